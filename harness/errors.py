"""The error index: every exception that the executed recipes raised, for the errors page and for the paste box."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from hashlib import sha256

from nbformat import NotebookNode

from harness.contract import Raises, Recipe
from harness.outcomes import Result
from harness.rows import Row

ANCHOR = 60  # the length of an entry's anchor; a longer one is cut and ends in four digits that keep it apart
TELLING = 1500  # characters of a message whose words the paste box compares: its head tells causes apart


@dataclass(frozen=True)
class Place:
    """One cell that raises: where it is explained, and what each row printed."""

    recipe: Recipe
    heading: str
    declared: Raises
    messages: dict[Row, str]  # rows that raised this, newest first, with the whole message
    passes: tuple[Row, ...]  # rows in which the same cell runs through
    calls: tuple[str, ...]  # the API names in the cell
    typical: bool = False  # the cell that the page is about

    @property
    def address(self) -> str:
        """The page and anchor, from the site's root."""
        return f"recipes/{self.recipe.name}.html#{slug(self.heading)}"


@dataclass
class Entry:
    """One exception, by class and telling words, with every place that explains it."""

    error: str
    match: str
    places: list[Place] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        """Its address on the errors page: it stays while class and fragment stay as the recipes declare them."""
        whole = re.sub(r"[^a-z0-9]+", "-", f"{self.error} {self.match}".lower()).strip("-")
        if len(whole) <= ANCHOR:
            return whole
        return f"{whole[:ANCHOR].rpartition('-')[0]}-{sha256(whole.encode()).hexdigest()[:4]}"


def slug(heading: str) -> str:
    """A heading's anchor, as MyST makes it: lower case, hyphens for spaces, no punctuation."""
    return re.sub(r"[^\w\- ]", "", heading.lower().strip()).replace(" ", "-")


def places(results: list[Result], declared_too: bool = False) -> list[Place]:
    """Every raising cell of every recipe, by what it declares.

    With `declared_too`, also what only rows raise that this build has not executed; its place has no messages.
    An AssertionError with a text is a recipe's own check at work and no message that a library prints.
    """
    found = []
    for result in results:
        for index, cell in enumerate(result.recipe.notebook.cells):
            heading = result.recipe.heading(index)
            for declared in result.recipe.raises.get(index, ()):
                raised = {row: _error(nb, index) for row, nb in result.notebooks.items()}
                messages = {
                    row: error.evalue
                    for row, error in raised.items()
                    if error and result.recipe.expected(index, row) is declared
                }
                own_check = declared.error == "AssertionError" and declared.match
                if (messages or declared_too) and not own_check:
                    passes = tuple(row for row, error in raised.items() if not error)
                    calls = tuple(dict.fromkeys(re.findall(r"\b(?:nnx|jax|optax)(?:\.\w+)+", cell.source)))
                    typical = index == result.recipe.outcome
                    found.append(Place(result.recipe, heading, declared, messages, passes, calls, typical))
    return found


def _error(notebook: NotebookNode, index: int) -> NotebookNode | None:
    return next((o for o in notebook.cells[index].outputs if o.output_type == "error"), None)


def entries(found: list[Place]) -> list[Entry]:
    """The places by class and words, in alphabetical order. Spellings with one anchor are one entry."""
    by_anchor: dict[str, Entry] = {}
    for place in found:
        entry = Entry(place.declared.error, place.declared.match)
        by_anchor.setdefault(entry.anchor, entry).places.append(place)
    return sorted(by_anchor.values(), key=lambda entry: (entry.error, entry.match.lower()))


def listing(results: list[Result], fence) -> str:
    """The body of the errors page: a section for each class, an entry for each exception (Markdown).

    `fence(text, language, name)` makes a code block.
    """
    parts, last = [], None
    for entry in entries(places(results, declared_too=True)):
        if entry.error != last:
            parts.append(f"## `{entry.error}`")
            last = entry.error
        parts.append(f"({entry.anchor})=\n\n### {_title(entry)}")
        texts: dict[str, list[str]] = {}
        for place in entry.places:
            for row, message in place.messages.items():
                rows = texts.setdefault(message.splitlines()[0] if message else "", [])
                rows += [row.name] * (row.name not in rows)
        for first_line, rows in texts.items():
            where = ", ".join(f"`{name}`" for name in rows)
            message = f"{entry.error}: {first_line}" if first_line else entry.error
            empty = "" if first_line else ", with an empty message"
            parts.append(f"On {where}{empty}:\n\n{fence(message, 'text', 'message')}")
        if not texts:
            parts.append("Not run in this build, so that no message stands here.")
        for place in entry.places:
            rows = ", ".join(f"`{row.name}`" for row in place.messages) or str(place.declared.where)
            runs = ", ".join(f"`{row.name}`" for row in place.passes)
            runs = f"; the same code runs on {runs}" if runs else ""
            link = f"[{place.heading}](../recipes/{place.recipe.name}.py#{slug(place.heading)})"
            parts.append(f"- {link}: {'raises' if place.messages else 'declared to raise'} on {rows}{runs}.")
    return "\n\n".join(parts)


def _title(entry: Entry) -> str:
    """An entry's heading: the declared words, which every row that raises it prints."""
    return f"`` {entry.match} ``" if entry.match else "No message at all"


def symptoms(results: list[Result]) -> str:
    """The symptoms that raise nothing, from the recipes' headers (Markdown)."""
    lines = [
        f"- {symptom[0].upper()}{symptom[1:]}: [{result.recipe.title}](../recipes/{result.recipe.name}.py)"
        for result in results
        for symptom in result.recipe.symptoms
    ]
    return "\n".join(sorted(lines))


def paste_index(results: list[Result], rows: list[Row]) -> str:
    """The script with what the paste box searches. Rows are named by their position, to keep it small."""
    number = {row: position for position, row in enumerate(rows)}
    found = []
    for place in places(results):
        heads = " ".join(message[:TELLING] for message in place.messages.values())
        entry = {
            "error": place.declared.error,
            "match": place.declared.match,
            "words": " ".join(dict.fromkeys(re.findall(r"[a-z_]\w{2,}", heads.lower()))),
            "rows": [number[row] for row in place.messages],
            "passes": [number[row] for row in place.passes],
            "calls": [call.rpartition(".")[2] for call in place.calls],
            "recipe": place.recipe.name,
            "heading": place.heading.replace("`", ""),
            "anchor": slug(place.heading),
            "typical": place.typical,
        }
        found.append(entry)
    index = {
        "rows": [{"name": row.name, "flax": str(row.flax), "mode": row.mode} for row in rows],
        "recipes": {r.recipe.name: [r.recipe.title.replace("`", ""), r.recipe.summary] for r in results},
        "places": found,
        "symptoms": [[symptom, r.recipe.name] for r in results for symptom in r.recipe.symptoms],
    }
    return f"window.pasteIndex = {json.dumps(index, ensure_ascii=False, separators=(',', ':'))};\n"
