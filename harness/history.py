"""What changed between two commits of the site: rows in which a recipe or a cell began or stopped raising.

    python -m harness.history [--write] [OLD [NEW]]

prints a line for each change; OLD is the commit that last changed CHANGELOG.md if left out, NEW the working copy. With
`--write` the lines that CHANGELOG.md does not have are added to its section of today, from which the feed has them.
Nothing is executed: a recipe declares what each cell raises in each row, and no commit passes its tests where a
declaration and a run disagree.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import tempfile
from datetime import date
from pathlib import Path

from harness import contract, files, rows
from harness.rows import ROOT, Row

CHANGELOG = ROOT / "CHANGELOG.md"
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
            archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        try:
            return ends(Path(folder))
        except (contract.RecipeError, rows.RowError) as error:
            raise HistoryError(
                f"commit {commit}: cannot be read by today's rules; name a later one. {error}"
            ) from None


def last_changed(path: Path) -> str:
    """The commit that last changed a file. Raises HistoryError where none did, and where the clone has no history."""
    shallow = ["git", "rev-parse", "--is-shallow-repository"]
    if subprocess.run(shallow, cwd=path.parent, capture_output=True, text=True).stdout.strip() == "true":
        raise HistoryError(
            f"{path.name}: expected a clone with its history; run `git fetch --unshallow`, or name a commit"
        )
    command = ["git", "log", "-1", "--format=%H", "--", str(path)]
    found = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False)
    if not found.stdout.strip():
        raise HistoryError(
            f"{path.name}: expected a commit that changed it, found none; {found.stderr.strip()}"
        )
    return found.stdout.strip()


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


def entered(changelog: str, lines: list[str], today: str) -> str:
    """The text of CHANGELOG.md with the lines that it does not have, at the end of the section of `today` (YYYY-MM-DD).

    The section is made, before the others, where there is none.
    """
    new = "".join(f"- {line}\n" for line in lines if f"- {line}\n" not in changelog)
    if not new:
        return changelog
    start = re.search(rf"^## {today}\n", changelog, re.MULTILINE)
    following = re.compile(r"^## ", re.MULTILINE).search(changelog, start.end() if start else 0)
    place = following.start() if following else len(changelog)
    before, after = changelog[:place].rstrip("\n"), changelog[place:]
    heading = "\n" if start else f"\n\n## {today}\n\n"
    return before + heading + new + ("\n" + after if after else "")


def main(arguments: list[str]) -> None:
    """Print the changes between the commits named, or between a commit and the working copy."""
    commits = [argument for argument in arguments if argument != "--write"]
    if len(commits) > 2 or any(commit.startswith("-") for commit in commits):
        sys.exit("expected: python -m harness.history [--write] [OLD [NEW]], OLD and NEW each a commit")
    try:
        old = at(commits[0] if commits else last_changed(CHANGELOG))
        new = at(commits[1]) if commits[1:] else ends()
    except HistoryError as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"expected git, which knows the commits; {error}")
    found = changes(old, new)
    print("\n".join(f"- {line}" for line in found) or "No outcome changed.")
    if "--write" in arguments:
        before = CHANGELOG.read_text(encoding="utf-8")
        text = entered(before, found, date.today().isoformat())
        if text != before:
            files.write(CHANGELOG, text)
            print(f"{CHANGELOG.name} has them now, for its readers to be told in words.")


if __name__ == "__main__":
    main(sys.argv[1:])
