"""What each recipe did under each row, and the tables of it on the releases page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape

from nbformat import NotebookNode

from harness import execute
from harness.contract import Recipe
from harness.rows import Row


@dataclass(frozen=True)
class Outcome:
    """One cell of the table. `kind` is works, raises, "not applicable" or "not run"; `detail` the class or reason."""

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.detail}" if self.kind == "raises" else self.kind


@dataclass(frozen=True)
class Result:
    """A recipe with its executed notebooks and its outcomes, by row, newest first."""

    recipe: Recipe
    notebooks: dict[Row, NotebookNode]
    outcomes: dict[Row, Outcome]


def gather(recipe: Recipe, rows: list[Row], required: set[str], absent: dict[str, str]) -> Result:
    """Collect what `recipe` did under `rows`.

    `required` names the rows that this build promises: the newest of them for every recipe, the others where the
    recipe declares a difference from it. `absent` gives the reason for rows that this machine cannot run.
    Raises ExecutedError for a required row that was not executed, for a corrupt notebook under any row, and for a
    recipe that was executed under no row.
    """
    notebooks, outcomes = {}, {}
    first = next((row for row in rows if row.name in required), None)
    for row in rows:
        if not recipe.needs.holds(row):
            outcomes[row] = Outcome("not applicable", f"needs {recipe.needs}")
            continue
        try:
            notebooks[row] = execute.load(recipe, row)
        except execute.NotExecutedError:
            if row is first or (row.name in required and recipe.differs(row, first)):
                raise
            outcomes[row] = Outcome(
                "not run", absent.get(row.name, f'`nox -s "recipes({row.name})"` runs it')
            )
            continue
        outcomes[row] = _outcome(recipe, row)
    if not notebooks:
        raise execute.NotExecutedError(f"recipe {recipe.name}: not executed under any row; run `nox -s docs`")
    return Result(recipe, notebooks, {row: outcomes[row] for row in rows})


def _outcome(recipe: Recipe, row: Row) -> Outcome:
    """What the cell tagged `outcome` does in this row; without one, the page's snippet and proofs work.

    Execution has held every cell to its declaration, so the declaration is what happened.
    """
    raised = None if recipe.outcome is None else recipe.expected(recipe.outcome, row)
    return Outcome("raises", raised.error) if raised else Outcome("works")


def chips(result: Result) -> str:
    """The line under a recipe's title: each row, what it did, and a link to its tab (HTML)."""
    about = _code(escape(result.recipe.outcome_heading or "The snippet and its proofs"))
    about = f"Snippet works. {about}" if result.recipe.outcome_heading else about
    items = [f'<li class="about">{about}:</li>']
    for row, outcome in result.outcomes.items():
        if outcome.kind == "not run":
            continue
        text = f"<b>{escape(row.name)}</b> {_words(outcome)}"
        if row in result.notebooks:
            text = f'<a href="?flax={escape(row.name)}">{text}</a>'
        items.append(f'<li class="{outcome.kind.split()[0]}">{text}</li>')
    return f'<ul class="rows">{"".join(items)}</ul>'


def dates(result: Result) -> str:
    """The day, or the first and last day, on which the recipe was executed."""
    found = sorted({notebook.metadata["executed"]["date"] for notebook in result.notebooks.values()})
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def verified(result: Result, commit: str) -> str:
    """Under which releases, when, and from which commit the page was executed (HTML)."""
    rows = ", ".join(f"<code>{escape(row.name)}</code>" for row in result.notebooks)
    left = [row.name for row, outcome in result.outcomes.items() if outcome.kind == "not run"]
    rest = f" Not run in this build: {', '.join(left)}." if left else ""
    source = f"commit <code>{escape(commit)}</code>" if commit else "a working copy"
    return (
        f'<p class="verified">Verified with Flax {rows} on {dates(result)}, from {source}.{rest} '
        '<a href="../docs/releases.html">All releases</a></p>'
    )


def summary(results: list[Result]) -> str:
    """What the whole build was executed with (Markdown)."""
    rows = list(dict.fromkeys(row for result in results for row in result.notebooks))
    every = [row for row in rows if all(r.outcomes[row].kind != "not run" for r in results)]
    some = [row for row in rows if row not in every]
    days = sorted({day for result in results for day in dates(result).split(" to ")})
    named = ", ".join(f"`{row.name}`" for row in every)
    partly = f", and in part with {', '.join(f'`{row.name}`' for row in some)}" if some else ""
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{len(results)} recipes, executed with Flax {named}{partly} on {when}."


def listing(results: list[Result], groups: list[tuple[str, list[str]]]) -> str:
    """The recipes by group, each with its summary and outcomes (Markdown)."""
    by_name = {result.recipe.name: result for result in results}
    lines = []
    for caption, names in groups:
        lines.append(f"### {caption}\n")
        for result in (by_name[name] for name in names):
            page = f"recipes/{result.recipe.name}.html"
            about = _code(escape(result.recipe.outcome_heading or "The snippet and its proofs"))
            ran = ", ".join(
                f'<a href="{page}?flax={row.name}">{row.name}</a> {_words(result.outcomes[row])}'
                for row in result.notebooks
            )
            lines.append(
                f"[{result.recipe.title}](recipes/{result.recipe.name}.py)\n"
                f": {result.recipe.summary} <br><small>{about}: {ran}</small>\n"
            )
    return "\n".join(lines)


def table(results: list[Result], rows: list[Row]) -> str:
    """The table of recipes against rows, each cell a link to that page and tab, with the reasons below it (HTML)."""
    head = "".join(f'<th scope="col">{escape(row.name)}</th>' for row in rows)
    body, reasons = [], []
    for result in results:
        page = f"../recipes/{result.recipe.name}.html"
        cells = [f'<th scope="row"><a href="{page}">{_code(escape(result.recipe.title))}</a></th>']
        for row in rows:
            outcome = result.outcomes[row]
            text = _words(outcome)
            if row in result.notebooks:
                text = f'<a href="{page}?flax={escape(row.name)}">{text}</a>'
            else:
                if outcome.detail not in reasons:
                    reasons.append(outcome.detail)
                number = reasons.index(outcome.detail) + 1
                text += f' <a href="#reason-{number}">({number})</a>'
            cells.append(f"<td>{text}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    notes = "".join(f'<li id="reason-{n}">{_code(escape(r))}</li>' for n, r in enumerate(reasons, 1))
    rows_html = "\n".join(body)
    return (
        f'<div class="wide"><table class="outcomes"><thead><tr><th scope="col">Recipe</th>{head}</tr></thead>\n'
        f"<tbody>\n{rows_html}\n</tbody></table></div>\n" + (f"<ol>{notes}</ol>" if notes else "")
    )


def environments(results: list[Result], rows: list[Row], absent: dict[str, str]) -> str:
    """The table of rows: what is installed in each, and whether this build ran it (Markdown)."""
    lines = ["| row | Flax | jax | Python | why | in this build |", "|---|---|---|---|---|---|"]
    for row in rows:
        records = [r.notebooks[row].metadata["executed"] for r in results if row in r.notebooks]
        pythons = sorted({record["python"] for record in records})
        if records:
            dates = sorted({record["date"] for record in records})
            state = f"{len(records)} of {len(results)} recipes, last on {dates[-1]}"
        else:
            state = absent.get(row.name, f'not run; `nox -s "recipes({row.name})"` runs it')
        lines.append(
            f"| `{row.name}` | {row.flax} | {row.jax} | {', '.join(pythons) or 'none'} | {row.why} | {state} |"
        )
    return "\n".join(lines)


def _code(text: str) -> str:
    """Markdown's backticks as HTML."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def _words(outcome: Outcome) -> str:
    """An outcome in words with the class as code (HTML)."""
    if outcome.kind != "raises":
        return escape(outcome.kind)
    return f"raises <code>{escape(outcome.detail)}</code>"
