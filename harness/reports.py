"""The public reports: what each asked, the page that answers it, and whether its input still fails, row by row.

`docs/reports.json` lists the reports. The inputs of some are small programs in `tests/reports`; running them under a row
leaves `build/reports/ROW`: `outcomes.json`, and the traceback of each that raised as `CASE.txt`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from packaging.specifiers import SpecifierSet

from harness.contract import Where
from harness.errors import slug
from harness.outcomes import Result
from harness.rows import ROOT, Row

LISTED = ROOT / "docs" / "reports.json"
CASES = ROOT / "tests" / "reports"
RAN = ROOT / "build" / "reports"


@dataclass(frozen=True)
class Report:
    """One public report: `name` is `owner/repository#1`, `answer` a recipe and the anchor of a section, `NAME#anchor`."""

    name: str
    question: str
    answer: str
    cases: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """The report's address."""
        repository, _, number = self.name.partition("#")
        return f"https://github.com/{repository}/issues/{number}"


class ReportError(ValueError):
    """A report names what is not there: the message says which report, what was expected and what came."""


def listed(path: Path = LISTED) -> list[Report]:
    """The reports of `docs/reports.json`. Raises ReportError for an unknown case."""
    reports = [
        Report(entry["report"], entry["question"], entry["answer"], tuple(entry.get("cases", ())))
        for entry in json.loads(path.read_text(encoding="utf-8"))
    ]
    for report in reports:
        for case in report.cases:
            if not (CASES / f"{case}.py").exists():
                raise ReportError(
                    f"{path.name}, {report.name}: expected tests/reports/{case}.py, it is not there"
                )
    return reports


def expected(path: Path, row: Row) -> str | None:
    """The class that a case declares for `row` in its first line, "" where it runs through, None where it does not apply.

    The line is `# needs={...}` or `# raises=[{"error": ..., "flax": ..., "jax": ..., "mode": ...}]`, ranges as in recipes.
    """
    found = re.match(r"# (raises|needs)=(.+)", path.read_text(encoding="utf-8"))
    entries = json.loads(found[2]) if found else []
    if found and found[1] == "needs":
        return "" if _where(entries).holds(row) else None
    return next((entry["error"] for entry in entries if _where(entry).holds(row)), "")


def _where(entry: dict[str, str]) -> Where:
    return Where(SpecifierSet(entry.get("flax", "")), SpecifierSet(entry.get("jax", "")), entry.get("mode"))


def digest(row: Row) -> str:
    """What the outcomes under a row come from: the inputs and their names, the row's lock and variables, this module."""
    sources = [Path(__file__), row.lock, *sorted(CASES.glob("*.py"))]
    parts = [part for path in sources for part in (path.name.encode(), path.read_bytes())]
    return hashlib.sha256(b"\0".join([repr(sorted(row.env.items())).encode(), *parts])).hexdigest()


def outcomes(row: Row) -> dict[str, str] | None:
    """The class that each case raised under `row`, "" where it ran through; None where they were not run as they are.

    Raises ReportError for a file that was changed by hand.
    """
    path = RAN / row.name / "outcomes.json"
    if not path.exists():
        return None
    again = f'delete build/reports/{row.name} and run `nox -s "recipes({row.name})"`'
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        made_from, content, cases = kept["made-from"], kept["content"], kept["cases"]
    except (ValueError, KeyError, TypeError) as error:  # any damage at all
        raise ReportError(
            f"row {row.name}: {path.name} is corrupt ({type(error).__name__}); {again}"
        ) from None
    if made_from != digest(row):
        return None
    if content != _content(cases):
        raise ReportError(f"row {row.name}: the outcomes in {path.name} are not those of the run; {again}")
    return cases


def _content(cases: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(cases, sort_keys=True).encode()).hexdigest()


def run(row: Row) -> dict[str, str]:
    """Run every case in this process, unless nothing changed since the last run.

    The process must have the row's packages and the variables of `execute.kernel_environment`. Raises ReportError for a
    case that does not end as it declares.
    """
    try:
        if (kept := outcomes(row)) is not None:
            return kept
    except ReportError:
        pass  # they are run again
    import jax  # here, since an unchanged row needs no JAX

    jax.config.update("jax_num_cpu_devices", 8)
    folder, partial = RAN / row.name, RAN / f"{row.name}.{os.getpid()}.partial"
    for left in RAN.glob(f"{row.name}.*.partial"):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    found, made_from = {}, digest(row)
    for path in sorted(CASES.glob("*.py")):
        if (declared := expected(path, row)) is None:
            continue
        code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
        found[path.stem] = ""
        try:
            with warnings.catch_warnings(), patch.dict(os.environ):
                exec(code, {"__name__": "__main__"})
        except (Exception, SystemExit) as error:
            found[path.stem] = type(error).__name__
            (partial / f"{path.stem}.txt").write_text(traceback.format_exc(), encoding="utf-8")
        if found[path.stem] != declared:
            came, wanted = (name or "no exception" for name in (found[path.stem], declared))
            do = "correct its first line, or see what changed"
            raise ReportError(
                f"tests/reports/{path.name}, row {row.name}: expected {wanted}; came {came}; {do}"
            )
    kept = {"made-from": made_from, "content": _content(found), "cases": found}
    (partial / "outcomes.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return found


def listing(results: list[Result], rows: list[Row]) -> str:
    """The reports in the order of the recipes that answer them: question, answer, and what the input does (Markdown).

    Raises ReportError for a recipe or a section that is not there, and where the recipe does not say that it answers.
    """
    by_name = {result.recipe.name: result.recipe for result in results}
    order = {name: number for number, name in enumerate(by_name)}
    ran = {row: found for row in rows if (found := outcomes(row)) is not None}
    lines = ["| report | answer | its program, by row |", "|---|---|---|"]
    every = listed()
    answered = {name for recipe in by_name.values() for name in recipe.answers}
    if missing := sorted(answered - {report.name for report in every}):
        raise ReportError(
            f"{LISTED.name}: expected every report that a recipe answers; {', '.join(missing)} is not listed"
        )
    for report in sorted(every, key=lambda report: order.get(report.answer.partition("#")[0], -1)):
        name, _, anchor = report.answer.partition("#")
        recipe = by_name.get(name)
        if recipe is None or report.name not in recipe.answers:
            came = (
                "no such recipe"
                if recipe is None
                else f"its header answers {', '.join(recipe.answers) or 'none'}"
            )
            raise ReportError(
                f"{LISTED.name}, {report.name}: expected a recipe {name} that answers it; {came}"
            )
        prose = "\n".join(cell.source for cell in recipe.notebook.cells if cell.cell_type == "markdown")
        headings = {slug(heading): heading for heading in re.findall(r"^##+ (.+)$", prose, re.MULTILINE)}
        if anchor and anchor not in headings:
            raise ReportError(f"{LISTED.name}, {report.name}: {name} has no section #{anchor}")
        page = f"[{recipe.title}](../recipes/{name}.py)"
        if anchor:
            page = f"[{headings[anchor]}](../recipes/{name}.py#{anchor}), in {page}"
        text = f"[{report.name}]({report.url}): {report.question}"
        lines.append(f"| {_cell(text)} | {_cell(page)} | {_inputs(report, ran)} |")
    return "\n".join(lines)


def _inputs(report: Report, ran: dict[Row, dict[str, str]]) -> str:
    """What the report's inputs do: the first row that runs them again, and the rows that raise."""
    parts = []
    for case in report.cases:
        ended = {row: found[case] for row, found in ran.items() if case in found}
        raising: dict[str, list[str]] = {}
        for row, error in ended.items():
            if error:
                raising.setdefault(error, []).append(f"`{row.name}`")
        runs = [f"`{row.name}`" for row, error in ended.items() if not error]
        text = "; ".join([f"`{error}` on {', '.join(names)}" for error, names in raising.items()])
        if fixed := _fixed(ended):
            text = f"**fixed after `{fixed[0].name}`, by `{fixed[1].name}`**; " + text
        if runs:
            text += "; " * bool(text) + (
                f"runs on {', '.join(runs)}" if raising else "runs on every row run here"
            )
        if text and text not in parts:
            parts.append(text)
    return "<br>".join(parts) or ("not run in this build" if report.cases else "no program")


def _fixed(ended: dict[Row, str]) -> tuple[Row, Row] | None:
    """The last row in graph mode that raises, and the next, from which on the input runs. `ended` is newest first."""
    graph = [row for row in ended if row.mode == "graph"]
    running = []
    for row in graph:
        if ended[row]:
            return (row, running[-1]) if running else None
        running.append(row)
    return None


def _cell(text: str) -> str:
    """Text that ends no cell of a Markdown table."""
    return text.replace("|", "\\|")
