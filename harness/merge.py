"""One page from the executed notebooks of a recipe: Markdown in which rows that differ stand side by side in tabs."""

from __future__ import annotations

import json
import re
from html import escape

from nbformat import NotebookNode

from harness import downloads, outcomes, replies
from harness.origin import Origin
from harness.outcomes import Result
from harness.rows import Row


def page(result: Result, origin: Origin, commit: str) -> str:
    """The MyST Markdown of a recipe's page. Text and code come from the recipe, every output from a run.

    `commit` is that of the recipe, empty where it is not known.
    """
    recipe = result.recipe
    parts = [
        f"---\nmyst: {{html_meta: {{description: {json.dumps(recipe.summary)}}}}}\n---",
        f"({recipe.name})=",
    ]
    head = raw(outcomes.chips(result) + replies.buttons(result) + outcomes.verified(result, commit))
    for index, cell in enumerate(recipe.notebook.cells):
        if cell.cell_type == "markdown":
            text = cell.source
            if index == 0:
                lead, _, rest = text.partition("\n## ")
                text = f"{lead}\n\n{head}\n\n" + (f"## {rest}" if rest else "")
            parts.append(text)
        elif cell.cell_type == "code":
            tags = cell.metadata.get("tags", [])
            name = "snippet" if "snippet" in tags else "proof" if "proof" in tags else "cell"
            parts.append(fence(cell.source, "python", name))
            ran = {row: notebook.cells[index].outputs for row, notebook in result.notebooks.items()}
            parts.append(_outputs(ran, f"{recipe.name}-{index}", recipe.heading(index)))
    parts.append(f"---\n\n{raw(downloads.links(result, origin, commit))}")
    return "\n\n".join(filter(None, parts)) + "\n"


def _outputs(ran: dict[Row, list[NotebookNode]], prefix: str, heading: str) -> str:
    """The outputs of one cell: once where all rows agree, else a tab for each row, newest first."""
    if len({_seen(outputs) for outputs in ran.values()}) == 1:
        newest = next(iter(ran))
        return show(ran[newest], list(ran), newest, prefix, heading, len(ran) > 1)
    tabs = []
    for row, outputs in ran.items():
        same = [other for other in ran if _seen(ran[other]) == _seen(outputs)]
        # One traceback a class: another release raises the same from the same lines of the cell.
        first = not any(_raised(ran[other]) == _raised(outputs) for other in list(ran)[: len(tabs)])
        body = show(outputs, same, row, f"{prefix}-{row.name}", heading, False, first)
        body = body or "Runs, and prints nothing."
        tabs.append(f":::::{{tab-item}} {row.name}\n:sync: {row.name}\n\n{body}\n:::::")
    return "::::::{tab-set}\n:sync-group: flax\n\n" + "\n".join(tabs) + "\n::::::"


def _raised(outputs: list[NotebookNode]) -> list[str]:
    """The classes of the exceptions among outputs."""
    return [output.ename for output in outputs if output.output_type == "error"]


def _seen(outputs: list[NotebookNode]) -> str:
    """What a reader sees of outputs without unfolding anything: tracebacks differ in line numbers alone."""
    return json.dumps(
        [{k: v for k, v in output.items() if k != "traceback"} for output in outputs],
        sort_keys=True,
    )


def show(outputs, same: list[Row], row: Row, prefix: str, heading: str, several: bool, traced=True) -> str:
    """The outputs of one cell under one row; `same` are the rows that did the same. `traced`: with tracebacks."""
    parts = []
    for number, output in enumerate(outputs):
        if output.output_type == "stream":
            parts.append(fence(output.text.rstrip("\n"), "text", "output"))
        elif output.output_type == "error":
            parts.append(_error(output, same, row, several, traced))
        elif "image/svg+xml" in output.data:
            parts.append(raw(svg(output.data["image/svg+xml"], f"{prefix}-{number}", heading)))
        elif "text/markdown" in output.data:
            parts.append(output.data["text/markdown"])
        else:
            parts.append(fence(output.data["text/plain"], "text", "output"))
    return "\n\n".join(parts)


def _error(output: NotebookNode, same: list[Row], row: Row, several: bool, traced: bool) -> str:
    """An exception: its class and rows in words, its whole message, and the traceback folded."""
    where = "every release run here" if several else ", ".join(f"`{r.name}`" for r in same)
    message = f"{output.ename}: {output.evalue}" if output.evalue else output.ename
    trace = escape(shortened("\n".join(output.traceback)))
    folded = raw(f"<details><summary>Traceback under {row.name}</summary><pre>{trace}</pre></details>")
    return (
        f"::::{{div}} raises\n\n**Raises** `{output.ename}` on {where}\n\n{fence(message, 'text', 'output')}\n\n"
        + f"{folded}\n\n" * traced
        + "::::"
    )


def shortened(traceback: str) -> str:
    """A traceback with the reader's frames and the last one, the others counted; of a chain, the exceptions before.

    The message, which stands above it whole, is cut to its first line.
    """
    *before, last = re.split(r"\n\n+(?=Traceback \(most recent)", traceback.strip())
    kept, passed = [], []
    for chain in before:
        kept += [
            part.splitlines()[0] for part in re.split(r"\n\n+", chain)[-2:]
        ]  # exception, "During handling"
    for part in re.split(r"\n\n+", last):
        if part.startswith("  File "):
            passed.append(part)
            continue
        if passed:
            ending = [] if part.startswith("  Cell In") else [passed.pop()]
            kept += [f"  ... {len(passed)} in libraries"] * bool(passed) + ending
            passed = []
        first, *rest = part.splitlines()
        kept.append(part if part.startswith("  Cell In") else first + " ..." * bool(rest))
    return "\n".join(kept)


def fence(text: str, language: str, name: str) -> str:
    """A code block with a fence that its text cannot end."""
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{ticks}{{code-block}} {language}\n:class: {name}\n\n{text}\n{ticks}"


def raw(html: str) -> str:
    """HTML as it is."""
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", html)), default=0))
    return f"{ticks}{{raw}} html\n{html}\n{ticks}"


def svg(svg: str, prefix: str, heading: str) -> str:
    """A plot as inline SVG: black follows the theme, ids are the page's only, and it has a name."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    svg = svg.replace("#000000", "currentColor")
    svg = svg.replace("<svg ", f'<svg class="plot" role="img" aria-label="Plot: {escape(heading)}" ', 1)
    return "\n".join(line for line in svg.splitlines() if line.strip())
