"""The contract of a recipe: what its header and cells may say, and whether what a cell did is what it declared."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

import jupytext
from nbformat import NotebookNode
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from harness.rows import ROOT, Row

RECIPES = ROOT / "recipes"
TAGS = {"snippet", "proof", "raises-exception", "outcome"}
RANGE_KEYS = {"flax", "jax", "mode"}
MATCH_LETTERS = 8  # a shorter fragment is found in many messages
# What looks like output in a Markdown cell: a fenced or indented block, a line that begins with an exception.
TYPED = re.compile(r"^(?:`{3}|~{3}| {4,}\S|[\w.]+(?:Error|Exception|Warning): ).*", re.MULTILINE)


class RecipeError(Exception):
    """A recipe broke its contract. Names recipe, cell and row, what was expected, what came, and what to do."""

    def __init__(self, recipe: str, expected: str, came: str, do: str, cell: str = "", row: str = ""):
        where = ", ".join(filter(None, [f"recipe {recipe}", cell, row and f"row {row}"]))
        super().__init__(f"{where}\n  expected: {expected}\n  came:     {came}\n  do:       {do}")


@dataclass(frozen=True)
class Where:
    """A set of rows: a range of Flax, a range of jax, an NNX mode. Empty means every row."""

    flax: SpecifierSet = SpecifierSet()
    jax: SpecifierSet = SpecifierSet()
    mode: str | None = None

    def holds(self, row: Row) -> bool:
        """Whether `row` is in the set."""
        return self.flax.contains(row.flax) and self.jax.contains(row.jax) and self.mode in (None, row.mode)

    def __str__(self) -> str:
        parts = [f"{name} {value}" for name, value in (("flax", self.flax), ("jax", self.jax)) if str(value)]
        return " and ".join(parts + [f"{self.mode} mode"] * bool(self.mode)) or "every row"


@dataclass(frozen=True)
class Raises:
    """One declared exception of a cell: class, fragment of the message, where. `""` is an empty message."""

    error: str
    match: str
    where: Where

    def agrees(self, raised: tuple[str, str]) -> bool:
        """Whether (class, message) is what was declared."""
        name, message = raised
        return name == self.error and (self.match in message if self.match else not message)

    def __str__(self) -> str:
        return f'{self.error} with "{self.match}"' if self.match else f"{self.error} with an empty message"


@dataclass(frozen=True)
class Recipe:
    """A recipe as its file declares it. `raises` maps the index of a cell to its declared exceptions."""

    name: str
    title: str
    summary: str
    notebook: NotebookNode
    source: str
    answers: tuple[str, ...] = ()
    symptoms: tuple[str, ...] = ()
    needs: Where = Where()
    devices: int = 1
    raises: dict[int, tuple[Raises, ...]] = field(default_factory=dict)
    lines: tuple[int, ...] = ()

    @property
    def outcome(self) -> int | None:
        """The index of the cell tagged `outcome`, in which the page's rows differ, or None."""
        cells = enumerate(self.notebook.cells)
        return next((index for index, cell in cells if "outcome" in cell.metadata.get("tags", [])), None)

    @property
    def outcome_heading(self) -> str:
        """The heading over the `outcome` cell, which says what was tried; empty without such a cell."""
        return self.heading(self.outcome) if self.outcome is not None else ""

    def heading(self, index: int) -> str:
        """The nearest heading above a cell."""
        found = [
            heading
            for cell in self.notebook.cells[: index + 1]
            if cell.cell_type == "markdown"
            for heading in re.findall(r"^#+ (.+)$", cell.source, re.MULTILINE)
        ]
        return found[-1] if found else self.title

    @property
    def snippet(self) -> str:
        """The cells tagged `snippet`, joined: what a reader copies."""
        cells = [c.source for c in self.notebook.cells if "snippet" in c.metadata.get("tags", [])]
        return "\n\n\n".join(cells) + "\n"

    def cell(self, index: int) -> str:
        """How messages name a cell, for example `cell 4 (line 83)`."""
        return f"cell {index + 1} (line {self.lines[index]})"

    def expected(self, index: int, row: Row) -> Raises | None:
        """The exception that the cell declares for this row, or None where it must run through."""
        return next((r for r in self.raises.get(index, ()) if r.where.holds(row)), None)

    def differs(self, row: Row, other: Row) -> bool:
        """Whether the recipe's outcome under `row` is declared to be another than under `other`."""
        applies = self.needs.holds(row) != self.needs.holds(other)
        index = self.outcome
        return applies or (index is not None and self.expected(index, row) is not self.expected(index, other))

    def check(self, index: int, row: Row, raised: tuple[str, str] | None) -> None:
        """Compare what the cell raised, as (class, message) or None, with what it declares, both ways.

        Raises RecipeError where they differ.
        """
        declared = self.expected(index, row)
        if declared and raised and declared.agrees(raised):
            return
        if not declared and not raised:
            return
        came = f"{raised[0]}: {raised[1]}" if raised else "no exception"
        if not declared:
            do = f"mend the cell, or declare the exception in `raises` for a range that holds {row.name}"
        elif not raised:
            do = f"narrow the declared range ({declared.where}) so that it leaves {row.name} out"
        else:
            do = "correct the class or the message fragment in `raises`"
        raise RecipeError(self.name, str(declared or "no exception"), came, do, self.cell(index), row.name)


def check_ranges(recipe: Recipe, rows: list[Row]) -> None:
    """Check the declared ranges against the known rows.

    Raises RecipeError for an entry that holds no row, which nothing could ever check, and for two entries in one row.
    """
    for index, entries in recipe.raises.items():
        for entry in entries:
            if not any(entry.where.holds(row) and recipe.needs.holds(row) for row in rows):
                came, do = (
                    f"`raises` for {entry.where}, which holds none",
                    "correct the range or remove the entry",
                )
                raise RecipeError(recipe.name, "a range that holds a row", came, do, recipe.cell(index))
        for row in rows:
            if len(both := [str(entry) for entry in entries if entry.where.holds(row)]) > 1:
                came, do = " and ".join(both), "make the ranges of the entries disjoint"
                raise RecipeError(
                    recipe.name,
                    "one entry of `raises` at most",
                    came,
                    do,
                    recipe.cell(index),
                    row.name,
                )


def names() -> list[str]:
    """The names of all recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.py"))


def read(path: Path) -> Recipe:
    """Read and check one recipe. Raises RecipeError for anything that the contract does not know."""
    name, source = path.stem, path.read_text(encoding="utf-8")

    def bad(expected: str, came: str, do: str, cell: str = "") -> RecipeError:
        return RecipeError(name, expected, came, do, cell)

    markers = [i for i, line in enumerate(source.splitlines(), 1) if re.match(r"# %%( |$)", line)]
    if not source.startswith("# ---\n") or not markers:
        raise bad(
            "a Jupytext py:percent file: a `# ---` header, then cells that begin with `# %%`",
            "no header" if markers else "no `# %%` cell",
            "start from another recipe, as the README says",
        )
    try:
        notebook = jupytext.reads(source, fmt="py:percent")
    except Exception as error:  # whatever jupytext or its YAML reader could not digest
        raise bad(
            "a Jupytext py:percent file", f"{type(error).__name__}: {error}", "mend the header"
        ) from None
    if len(notebook.cells) != len(markers):
        raise bad(
            "every cell to begin with a `# %%` line",
            f"{len(notebook.cells)} cells from {len(markers)} markers",
            "put `# %% [markdown]` or `# %%` in front of what stands before the first marker",
        )

    header = notebook.metadata.get("recipe")
    if not isinstance(header, dict):
        raise bad("`recipe:` under `jupyter:` in the header", "none", "copy the header of another recipe")
    allowed = {"summary", "answers", "symptoms", "needs"}
    if unknown := sorted(set(header) - allowed):
        raise bad(f"header keys {', '.join(sorted(allowed))}", f"`{unknown[0]}`", "correct the key")
    if not isinstance(header.get("summary"), str) or not header["summary"].strip():
        raise bad(
            "`summary`, one sentence",
            repr(header.get("summary")),
            "write the sentence that is the answer",
        )
    for key in ("answers", "symptoms"):
        if not isinstance(value := header.get(key, []), list) or not all(isinstance(v, str) for v in value):
            raise bad(f"`{key}`, a list of strings", repr(value), "write it as [first, second]")
    for report in header.get("answers", []):
        if not re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report):
            raise bad(
                "reports named owner/repository#number",
                repr(report),
                "correct the header's `answers`",
            )
    needs = header.get("needs", {})
    if not isinstance(needs, dict) or not isinstance(needs.get("devices", 1), int):
        raise bad('`needs`, for example {flax: ">=0.12.2", devices: 8}', repr(needs), "correct the header")
    where = _where(bad, needs, RANGE_KEYS | {"devices"}, "header `needs`")

    first = notebook.cells[0]
    title = re.match(r"# (.+)", first.source)
    if first.cell_type != "markdown" or not title:
        raise bad(
            "a first cell of Markdown that begins with `# Title`",
            repr(first.source[:40]),
            "add the title",
        )

    raises = {}
    for index, (cell, line) in enumerate(zip(notebook.cells, markers, strict=True)):
        label = f"cell {index + 1} (line {line})"
        declared = _check_cell(bad, cell, label)
        if declared:
            raises[index] = declared
    for tag in ("snippet", "proof"):
        if not any(tag in cell.metadata.get("tags", []) for cell in notebook.cells):
            raise bad(
                f"at least one code cell tagged `{tag}`",
                "none",
                f'add tags=["{tag}"] to its `# %%` line',
            )
    return Recipe(
        name=name,
        title=title[1].strip(),
        summary=header["summary"].strip(),
        notebook=notebook,
        source=source,
        answers=tuple(header.get("answers", [])),
        symptoms=tuple(header.get("symptoms", [])),
        needs=where,
        devices=needs.get("devices", 1),
        raises=raises,
        lines=tuple(markers),
    )


def _check_cell(bad, cell: NotebookNode, label: str) -> tuple[Raises, ...]:
    """Check a cell's metadata and syntax; return the exceptions it declares."""
    metadata = dict(cell.metadata)
    tags, entries = metadata.pop("tags", []), metadata.pop("raises", [])
    metadata.pop("lines_to_next_cell", None)  # Jupytext's own note of blank lines
    if metadata:
        raise bad(
            "cell keys `tags` and `raises`",
            f"`{next(iter(metadata))}`",
            "correct the `# %%` line",
            label,
        )
    if unknown := sorted(set(tags) - TAGS):
        raise bad(f"tags {', '.join(sorted(TAGS))}", f"`{unknown[0]}`", "correct the tag", label)
    if (tags or entries) and cell.cell_type != "code":
        raise bad("tags on code cells only", f"{cell.cell_type} cell", "move them to the code cell", label)
    if bool(entries) != ("raises-exception" in tags):
        raise bad(
            'tags=["raises-exception"] and `raises` together',
            "`raises` alone" if entries else "the tag alone",
            "give the cell both: the tag lets Jupyter run on, `raises` says what must come",
            label,
        )
    if "outcome" in tags and not entries:
        raise bad("`outcome` on a cell that raises somewhere", "no `raises`", "remove the tag", label)
    if entries and {"snippet", "proof"} & set(tags):
        raise bad("a snippet or proof cell that does not raise", f"tags {tags}", "split the cell", label)
    prose = re.sub(r"^`{3}sh\n.*?^`{3}$", "", cell.source, flags=re.DOTALL | re.MULTILINE)  # commands to type
    if typed := cell.cell_type == "markdown" and TYPED.search(prose):
        raise bad("prose alone in Markdown", repr(typed[0]), "let a cell print it: no output is typed", label)
    if cell.cell_type == "code":
        try:
            ast.parse(cell.source)
        except SyntaxError as error:
            raise bad(
                "Python", f"{error.msg}: {(error.text or '').strip()}", "mend the cell", label
            ) from None
    if not isinstance(entries, list):
        raise bad(
            '`raises`, a list of {"error": ..., "match": ...}',
            repr(entries),
            "correct the cell",
            label,
        )
    declared = []
    for entry in entries:
        if not isinstance(entry, dict) or not entry.get("error") or not isinstance(entry.get("match"), str):
            raise bad(
                'an entry with "error" and "match"',
                repr(entry),
                "name the class and a fragment",
                label,
            )
        if 0 < len(entry["match"]) < MATCH_LETTERS:
            do = "quote more of the message: the words tell this error from others"
            raise bad(f"a `match` of {MATCH_LETTERS} letters or more", repr(entry["match"]), do, label)
        ranges = {k: v for k, v in entry.items() if k not in ("error", "match")}
        declared.append(
            Raises(entry["error"], entry["match"], _where(bad, ranges, RANGE_KEYS, "`raises`", label))
        )
    return tuple(declared)


def _where(bad, ranges: dict, allowed: set[str], place: str, label: str = "") -> Where:
    """Read the range keys of `needs` or of a `raises` entry."""
    if unknown := sorted(set(ranges) - allowed):
        raise bad(
            f"keys {', '.join(sorted(allowed))} in {place}",
            f"`{unknown[0]}`",
            "correct the key",
            label,
        )
    mode = ranges.get("mode")
    if mode not in (None, "graph", "tree"):
        raise bad(f'"graph" or "tree" as mode in {place}', repr(mode), "correct the mode", label)
    sets = {}
    for package in ("flax", "jax"):
        try:
            sets[package] = SpecifierSet(str(ranges.get(package, "")))
        except InvalidSpecifier:
            raise bad(
                f'a range such as "<0.12.3" for {package} in {place}',
                repr(ranges[package]),
                "correct it",
                label,
            ) from None
    return Where(sets["flax"], sets["jax"], mode)
