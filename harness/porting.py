"""The list of what ends differently in tree mode: every cell of every recipe, compared between a release's two rows."""

from __future__ import annotations

import os.path
import re

from nbformat import NotebookNode

from harness.errors import slug
from harness.outcomes import Result
from harness.rows import Row

MESSAGE = 90  # characters of a message that the list shows; the recipe shows it whole

KINDS = {
    (False, True): ("Runs in graph mode, raises in tree mode", "Write these another way before you port."),
    (True, False): ("Raises in graph mode, runs in tree mode", "Here tree mode asks for less."),
    (True, True): ("Raises in both, with another message", "Search for the message of your mode."),
    (False, False): (
        "Runs in both, with another result",
        "Nothing raises. Read these sections: some show sizes and counts only, some another result.",
    ),
}


def pair(rows: list[Row]) -> tuple[Row, Row] | None:
    """The newest release that has a row in graph mode and one in tree mode: both rows, or None."""
    for tree in rows:
        for graph in rows:
            if tree.mode == "tree" and graph.mode == "graph" and tree.flax == graph.flax:
                return graph, tree
    return None


def differences(
    result: Result, graph: Row, tree: Row
) -> list[tuple[int, NotebookNode | None, NotebookNode | None]]:
    """The cells of a recipe that end differently in the two rows: index, exception in graph mode, in tree mode."""
    found = []
    for index, cell in enumerate(result.recipe.notebook.cells):
        if cell.cell_type == "code":
            ended = [result.notebooks[row].cells[index].outputs for row in (graph, tree)]
            if _shown(ended[0]) != _shown(ended[1]):
                errors = (next((o for o in outputs if o.output_type == "error"), None) for outputs in ended)
                found.append((index, *errors))
    return found


def _shown(outputs: list[NotebookNode]) -> list[dict]:
    """Outputs without tracebacks, which name lines of the library."""
    return [{key: value for key, value in output.items() if key != "traceback"} for output in outputs]


def listing(results: list[Result], rows: list[Row]) -> str:
    """A table for each kind of difference, with a link to the section that shows it (Markdown)."""
    found = pair(rows)
    both = [result for result in results if found and all(row in result.notebooks for row in found)]
    if not both:
        return (
            "This build has no execution in tree mode. `nox -s recipes`, then `nox -s docs`, fills the list."
        )
    graph, tree = found
    lines: dict[tuple[bool, bool], list[str]] = {kind: [] for kind in KINDS}
    for result in both:
        for index, in_graph, in_tree in differences(result, graph, tree):
            heading = result.recipe.heading(index)
            page = f"../recipes/{result.recipe.name}.py"
            link = f"[{_cell(result.recipe.title)}]({page})"
            if heading != result.recipe.title:
                link = f"[{_cell(heading)}]({page}#{slug(heading)}), in {link}"
            line = f"| {link} | {_ended(in_graph, in_tree)} | {_ended(in_tree, in_graph)} |"
            kind = lines[bool(in_graph), bool(in_tree)]
            kind += [line] * (line not in kind)
    parts = [
        f"Flax {graph.flax}: row `{graph.name}` against row `{tree.name}`, {len(both)} recipes, "
        f"{sum(map(len, lines.values()))} differences."
    ]
    for kind, (title, about) in KINDS.items():
        if lines[kind]:
            table = ["| section | graph mode | tree mode |", "|---|---|---|", *lines[kind]]
            parts.append(f"## {title}\n\n{about}\n\n:::{{div}} messages\n" + "\n".join(table) + "\n:::")
    return "\n\n".join(parts)


def _ended(error: NotebookNode | None, other: NotebookNode | None) -> str:
    """How a cell ended, for a table: the class with the message's first line, or with what the other's does not say."""
    if error is None:
        return "runs"
    text = " ".join(error.evalue.split())
    there = " ".join(other.evalue.split()) if other is not None and other.ename == error.ename else ""
    apart = len(os.path.commonprefix([text, there]))
    if apart > MESSAGE // 2:
        text = f"{text[: MESSAGE // 3].rpartition(' ')[0]} ... {text[text.rfind(' ', 0, apart - 9) + 1 :]}"
    else:
        text = " ".join((error.evalue.strip().splitlines() or [""])[0].split())
    short = text if len(text) <= MESSAGE else text[:MESSAGE].rstrip() + " ..."
    return f"`` {_cell(f'{error.ename}: {short}' if short else error.ename)} ``"


def _cell(text: str) -> str:
    """Text that ends no cell of a Markdown table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|")
