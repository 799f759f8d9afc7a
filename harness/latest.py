"""The canary: what the newest releases change, before readers meet it.

    python -m harness.latest ROW [NAME ...]

executes the recipes, or those named, with whatever is installed, which `nox -s latest` makes the newest of everything,
and compares each cell with the executed notebook of ROW, the newest row that is pinned. Unless recipes are named, it
also builds the site from ROW's notebooks with the installed tools. It writes `build/latest/report.md` and `report.json`.

A changed outcome is news, not an error. Plots are not compared, only that they are there.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from nbformat import NotebookNode
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from harness import contract, execute, files, rows
from harness.contract import Recipe, RecipeError
from harness.rows import ROOT, Row

FOLDER = ROOT / "build" / "latest"
PROCESSES = 2
SITE_SECONDS = 1800  # a build of the site that runs longer is stopped, and said not to end
SITE_LINES = 15  # so much of what Sphinx says is kept
WIDTH = 300  # so many characters of a line are kept
NAMED = ("flax", "jax", "jaxlib", "optax", "numpy")  # always in the report, changed or not
DIED, FAILED = "hangs or dies", "could not be executed"
NOT_THERE = "not there"


@dataclass(frozen=True)
class Change:
    """One cell that ends otherwise, or a whole recipe: how, and what it did under the pinned row and does now."""

    recipe: str
    cell: str
    heading: str
    kind: str
    pinned: str
    newest: str


@dataclass(frozen=True)
class Package:
    """A package whose newest version is not the pinned one. `NOT_THERE` stands for no version."""

    package: str
    pinned: str
    newest: str
    prerelease: bool


@dataclass(frozen=True)
class Site:
    """Whether the site was built without a warning, None where it was not tried, and how Sphinx's words begin."""

    builds: bool | None
    said: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """All that one run found. `executed` counts recipes; `installed` has the packages of `NAMED`."""

    row: str
    python: str
    installed: dict[str, str]
    executed: int
    changes: list[Change]
    versions: list[Package]
    site: Site

    @property
    def differs(self) -> bool:
        """Whether there is news: an outcome that changed, or a site that does not build."""
        return bool(self.changes) or self.site.builds is False


def installed() -> dict[str, str]:
    """The installed packages and their versions, by the names that locks have."""
    return {_normal(name): version for name, version in execute.environment().items()}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.lower())


def row(folder: Path = FOLDER) -> Row:
    """A row of what is installed; its packages are written to `latest.txt` in `folder`.

    A pre-release counts as the release that it will be, since a range such as `>=0.13` holds none.
    Raises OSError where the file cannot be written.
    """
    found = installed()
    files.write(folder / "latest.txt", "".join(f"{n}=={v}\n" for n, v in sorted(found.items())))
    flax, jax = (Version(Version(found[name]).base_version) for name in ("flax", "jax"))
    return Row("latest", flax, jax, SpecifierSet(), "the newest of everything", folder=folder)


def versions(pinned: dict[str, str], newest: dict[str, str]) -> list[Package]:
    """The packages whose versions differ, by name, from two lists of package to version."""
    return [
        Package(name, old, new, new != NOT_THERE and Version(new).is_prerelease)
        for name in sorted(pinned.keys() | newest.keys())
        if (old := pinned.get(name, NOT_THERE)) != (new := newest.get(name, NOT_THERE))
    ]


def compare(recipe: Recipe, row: Row, pinned: NotebookNode, newest: NotebookNode) -> list[Change]:
    """The cells of a recipe that end otherwise in `newest` than in `pinned`, which was executed under `row`."""
    return [
        Change(recipe.name, recipe.cell(index), recipe.heading(index), *found)
        for index, (old, new) in enumerate(zip(pinned.cells, newest.cells, strict=True))
        if old.cell_type == "code"
        for found in _differences(recipe.expected(index, row), old, new)
    ]


def _differences(
    declared: contract.Raises | None, old: NotebookNode, new: NotebookNode
) -> list[tuple[str, str, str]]:
    """How one cell ends otherwise: kind, what the old one did, what the new one does."""
    was, now = execute.raised(old), execute.raised(new)
    ends = _end(was), _end(now)
    found = []
    if was and now and was[0] == now[0]:
        if declared and declared.agrees(was) and not declared.agrees(now):  # perhaps in a later line alone
            lost = f', without the declared "{declared.match}"' if declared.match else ""
            found.append(("other message", ends[0], ends[1] + lost))
        elif ends[0] != ends[1]:
            found.append(("other message", *ends))
    elif was and now:
        found.append(("raises another class", *ends))
    elif was:
        found.append(("raises no more", *ends))
    elif now:  # while a recipe runs, warnings of flax, jax and optax are errors
        found.append(("warns" if now[0].endswith("Warning") else "began to raise", *ends))
    before, after = (_printed(cell, "stderr") for cell in (old, new))
    if after and after != before:
        found.append(("warns", *_first_difference(before, after)))
    if (was and was[0]) == (now and now[0]):  # else that it ended earlier or later is already told
        before, after = (_printed(cell, "stdout") for cell in (old, new))
        if before != after:
            found.append(("other output", *_first_difference(before, after)))
    return found


def _end(raised: tuple[str, str] | None) -> str:
    """How a cell ended, in words: with the class and the first line of the message, if it raised."""
    if raised is None:
        return "runs"
    name, message = raised
    return f"raises {name}: {_first(message)}" if message.strip() else f"raises {name}"


def _first(text: str) -> str:
    """The first line of a text that says something, shortened."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:WIDTH]


def _printed(cell: NotebookNode, stream: str) -> list[str]:
    """The lines that a cell wrote to a stream; with stdout the values that it showed, and a word for each picture."""
    lines = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            lines += output.text.splitlines() if output.name == stream else []
        elif output.output_type != "error" and stream == "stdout":
            pictures = sorted(kind for kind in output.data if kind.startswith("image/"))
            lines += pictures or output.data.get("text/plain", "").splitlines()
    return lines


def _first_difference(old: list[str], new: list[str]) -> tuple[str, str]:
    """The first line in which two texts differ, as each has it."""
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    return tuple(lines[at].strip()[:WIDTH] if at < len(lines) else "(no such line)" for lines in (old, new))


def attempt(name: str, pinned: Row, newest: Row, seconds: float = execute.CELL_SECONDS) -> list[Change]:
    """Execute one recipe with what is installed; how it differs from its executed notebook under `pinned`.

    `seconds` is the time limit of one cell. Raises ExecutedError for an executed notebook that cannot be used.
    """
    recipe = contract.read(contract.RECIPES / f"{name}.py")
    applied, applies = recipe.needs.holds(pinned), recipe.needs.holds(newest)
    if not (applied and applies):
        words = [f"needs {recipe.needs}" if not holds else "applies" for holds in (applied, applies)]
        kind = "applies" if applies else "does not apply"
        return [Change(name, "", recipe.title, kind, *words)] if applied != applies else []
    notebook = execute.load(recipe, pinned)
    try:
        return compare(recipe, pinned, notebook, execute.run(recipe, newest, seconds, held=False))
    except RecipeError as error:
        return [died(recipe, pinned, notebook, error)]
    except (
        Exception
    ) as error:  # of the newest tools that execute it, or of an import that fails in every recipe
        came = f"{type(error).__name__}: {_first(str(error))}"
        return [Change(name, "", recipe.title, FAILED, "executed", came)]


def died(recipe: Recipe, row: Row, pinned: NotebookNode, error: RecipeError) -> Change:
    """The change of a cell that ended its recipe by hanging or by killing its kernel, from what `error` says."""
    found = re.search(r", cell (\d+) \(", str(error))
    came = re.search(r"^ *came: *(.*)$", str(error), re.MULTILINE)[1]
    if not found:
        return Change(recipe.name, "", recipe.title, DIED, "runs", came)
    index = int(found[1]) - 1
    old = _end(execute.raised(pinned.cells[index]))
    return Change(recipe.name, recipe.cell(index), recipe.heading(index), DIED, old, came)


def build_site(row: Row) -> Site:
    """Build the site from the notebooks of `row` with the installed tools, in a folder of its own."""
    html, doctrees = FOLDER / "html", FOLDER / "doctrees"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-n", "-N", "-E", "-d", doctrees, ".", html]
    env = {**os.environ, "NNX_SITE_ROWS": row.name}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SITE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Site(False, [f"Sphinx was still at work after {SITE_SECONDS} s and was stopped."])
    lines = [line.replace(f"{ROOT}/", "")[:WIDTH] for line in done.stdout.splitlines() if line.strip()]
    return Site(done.returncode == 0, lines[:SITE_LINES])


def as_json(report: Report) -> str:
    """The report for programs; the same findings give the same text."""
    return json.dumps({"differs": report.differs, **asdict(report)}, indent=2) + "\n"


def as_markdown(report: Report) -> str:
    """The report for people. What releases say stands as code, so that nothing in it is taken for a link or a name."""
    has = ", ".join(f"{name} {version}" for name, version in report.installed.items())
    parts = [
        "# What the newest releases change",
        f"{_count(report.executed, 'recipe')} executed under Python {report.python} with {has}; "
        f"compared with row `{report.row}`.",
    ]
    if report.changes:
        recipes = {change.recipe for change in report.changes}
        parts.append(
            f"{_count(len(report.changes), 'outcome')} changed in {_count(len(recipes), 'recipe')}. "
            "In a recipe, the first is often the cause of the others."
        )
        table = [[c.recipe, c.cell, c.heading, c.kind, c.pinned, c.newest] for c in report.changes]
        parts.append(
            _table(["recipe", "cell", "under", "kind", f"with {report.row}", "with the newest"], table)
        )
    else:
        parts.append("No outcome differs.")
    parts.append("## The site")
    if report.site.builds is None:
        parts.append("Not built, since recipes were named.")
    elif report.site.builds:
        parts.append("Builds without a warning with the newest tools.")
    else:
        said = "\n".join(f"    {line}" for line in report.site.said)
        parts.append(f"Does not build without warnings with the newest tools. Sphinx says:\n\n{said}")
    parts.append("## Versions that differ")
    if report.versions:
        table = [
            [v.package, v.pinned, v.newest, "pre-release" if v.prerelease else ""] for v in report.versions
        ]
        parts.append(_table(["package", "pinned", "newest", "it is a"], table))
    else:
        parts.append("None: what is pinned is the newest.")
    return "\n\n".join(parts) + "\n"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + "s" * (number != 1)


def _table(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_code(text) for text in line] for line in body)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(text: str) -> str:
    """Text as code in a table: a fence that it cannot end, and no bar or line break that would end its place."""
    text = " ".join(text.split()).replace("|", r"\|")
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{space}{text}{space}{ticks}" if text else ""


def main(arguments: list[str]) -> None:
    """Execute, compare, build, and write the report. Exits with a message where that could not be done."""
    known = {known.name: known for known in rows.load()}
    if not arguments or arguments[0] not in known or set(arguments[1:]) - set(contract.names()):
        sys.exit(
            f"expected: python -m harness.latest ROW [NAME ...], a row of requirements/ and recipes; came {arguments}"
        )
    pinned, names = known[arguments[0]], sorted(set(arguments[1:])) or contract.names()
    for left in ("report.md", "report.json"):
        (FOLDER / left).unlink(missing_ok=True)
    newest = row()
    try:
        execute.check_clock()
        recipes = [contract.read(contract.RECIPES / f"{name}.py") for name in names]
        # Spawned: a process that is forked would not end the interpreter that its kernels come from.
        with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
            found = []
            of_recipes = pool.map(attempt, names, [pinned] * len(names), [newest] * len(names))
            for name, changes in zip(names, of_recipes, strict=True):
                print(f"{name}: {_count(len(changes), 'change')}", flush=True)
                found += changes
    except (RecipeError, execute.ExecutedError) as error:
        sys.exit(f"nothing can be compared: {error}")
    failed = [change for change in found if change.kind == FAILED]
    apply = [recipe for recipe in recipes if recipe.needs.holds(pinned) and recipe.needs.holds(newest)]
    pins = {**rows.pins(ROOT / "requirements.txt", here=True), **rows.pins(pinned.lock, here=True)}
    have = installed()
    report = Report(
        row=pinned.name,
        python=platform.python_version(),
        installed={name: have.get(name, NOT_THERE) for name in NAMED},
        executed=len(apply) - len(failed),
        changes=found,
        versions=versions({_normal(name): version for name, version in pins.items()}, have),
        site=Site(None),
    )
    if not arguments[1:]:
        report = replace(report, site=build_site(pinned))
    files.write(FOLDER / "report.json", as_json(report))
    files.write(FOLDER / "report.md", as_markdown(report))
    print(as_markdown(report))
    if not report.executed:
        sys.exit(f"nothing was executed: {failed[0].newest if failed else 'no recipe applies'}")


if __name__ == "__main__":
    main(sys.argv[1:])
