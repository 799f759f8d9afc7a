"""What changed between two commits of the site: rows in which a recipe or a cell began or stopped raising.

    python -m harness.history OLD [NEW]

prints a line for each change, as CHANGELOG.md wants it. Nothing is executed: a recipe declares what each cell raises in
each row, and no commit passes its tests where a declaration and a run disagree.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from harness import contract, rows
from harness.rows import ROOT, Row

Ends = dict[tuple[str, str], dict[str, str]]  # recipe and section: row name to how it ends there


class HistoryError(ValueError):
    """There is no such commit, or it has no recipes: the message says which, and what git said."""


def at(commit: str) -> Ends:
    """How every recipe and section ended in every row, as the files of `commit` declare it."""
    found = subprocess.run(
        ["git", "archive", commit, "recipes", "requirements"], cwd=ROOT, capture_output=True, check=False
    )
    if found.returncode:
        said = found.stderr.decode().strip()
        raise HistoryError(
            f"commit {commit}: expected one that has recipes/ and requirements/; git says: {said}"
        )
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
            archive.extractall(folder, filter="data")
        return ends(Path(folder))


def ends(folder: Path = ROOT) -> Ends:
    """How every recipe and section of a working copy ends in every row: "works", a class, or "does not apply"."""
    loaded = rows.load(folder / "requirements")
    found: Ends = {}
    for path in sorted((folder / "recipes").glob("*.py")):
        recipe = contract.read(path)
        sections: dict[tuple[str, str], list[int]] = {(recipe.name, ""): [*filter(None, [recipe.outcome])]}
        for index, cell in enumerate(recipe.notebook.cells):
            if cell.cell_type == "code":
                sections.setdefault((recipe.name, recipe.heading(index)), []).append(index)
        for section, cells in sections.items():
            found[section] = {row.name: _end(recipe, cells, row) for row in loaded}
    return found


def _end(recipe: contract.Recipe, cells: list[int], row: Row) -> str:
    """How the cells of one section end in a row, in words."""
    if not recipe.needs.holds(row):
        return "does not apply"
    raised = [declared.error for index in cells if (declared := recipe.expected(index, row))]
    return "raises " + ", ".join(f"`{name}`" for name in dict.fromkeys(raised)) if raised else "works"


def changes(old: Ends, new: Ends) -> list[str]:
    """A line for each section that ends otherwise in a row that both have, and for what came or went.

    That is rows, recipes, and sections in which something raises: a section under a new heading is one that went and
    one that came.
    """
    lines = []
    rows_then, rows_now = ({row for ended in ends.values() for row in ended} for ends in (old, new))
    for name, verb in [(n, "added") for n in sorted(rows_now - rows_then)] + [
        (n, "no longer executed") for n in sorted(rows_then - rows_now)
    ]:
        lines.append(f"Row `{name}`: {verb}.")
    for section in sorted(old.keys() & new.keys()):
        moved: dict[tuple[str, str], list[str]] = {}
        for row, then in old[section].items():
            now = new[section].get(row, then)
            if now != then:
                moved.setdefault((then, now), []).append(f"`{row}`")
        recipe, heading = section
        for (then, now), names in moved.items():
            where = f"`{recipe}`, {heading}" if heading else f"`{recipe}`"
            lines.append(f"{where}: {now} on {', '.join(names)}; before, it was: {then}.")
    then, now = ({name for name, _ in ends} for ends in (old, new))
    for verb, ends, others in ("new", new, old), ("gone", old, new):
        for recipe, heading in sorted(ends.keys() - others.keys()):
            raising = {end for end in ends[recipe, heading].values() if end.startswith("raises")}
            if raising and recipe in then & now:
                lines.append(
                    f"`{recipe}`, {heading}: this section is {verb}; it {' and '.join(sorted(raising))}."
                )
    lines += [f"`{name}`: new recipe." for name in sorted(now - then)]
    lines += [f"`{name}`: recipe removed." for name in sorted(then - now)]
    return lines


def main(arguments: list[str]) -> None:
    """Print the changes between the commits named, or between a commit and the working copy."""
    if len(arguments) not in (1, 2):
        sys.exit(
            "expected: python -m harness.history OLD [NEW], each a commit; NEW is the working copy if left out"
        )
    try:
        old, new = at(arguments[0]), at(arguments[1]) if arguments[1:] else ends()
    except HistoryError as error:
        sys.exit(str(error))
    print("\n".join(f"- {line}" for line in changes(old, new)) or "No outcome changed.")


if __name__ == "__main__":
    main(sys.argv[1:])
