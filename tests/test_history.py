"""The history of outcomes: what it says when a row begins or stops raising, and of commits that are not there."""

import re
import shutil

import pytest

from harness import contract, history, machine, origin, rows

THEN = {
    ("loop", ""): {"1": "works", "2": "works"},
    ("loop", "A trap"): {"1": "raises `TypeError`", "2": "works"},
}


def test_nothing_changed():
    assert history.changes(THEN, THEN) == []


def test_a_row_that_began_and_one_that_stopped_raising():
    now = {
        ("loop", ""): {"1": "works", "2": "raises `ValueError`"},
        ("loop", "A trap"): {"1": "works", "2": "works"},
    }
    assert history.changes(THEN, now) == [
        "`loop`: raises `ValueError` on `2`; before, it was: works.",
        "`loop`, A trap: works on `1`; before, it was: raises `TypeError`.",
    ]


def test_rows_and_recipes_that_come_and_go():
    now = {("other", ""): {"2": "works", "3": "works"}}
    assert history.changes(THEN, now) == [
        "Row `3`: added.",
        "Row `1`: no longer executed.",
        "`other`: new recipe.",
        "`loop`: recipe removed.",
    ]


def test_a_section_under_another_heading_is_one_that_went_and_one_that_came():
    now = {
        ("loop", ""): {"1": "works", "2": "works"},
        ("loop", "Other"): {"1": "raises `KeyError`", "2": "works"},
    }
    assert history.changes(THEN, now) == [
        "`loop`, Other: this section is new; it raises `KeyError`.",
        "`loop`, A trap: this section is gone; it raises `TypeError`.",
    ]


def test_a_section_that_begins_or_stops_raising_is_told(tmp_path):
    """Where no cell of the section raised before, and where none does any more."""
    (tmp_path / "recipes").mkdir()
    shutil.copytree(rows.REQUIREMENTS, tmp_path / "requirements")
    path, name = tmp_path / "recipes" / "scan_over_layers.py", "scan_over_layers"
    source = (contract.RECIPES / path.name).read_text(encoding="utf-8")
    path.write_text(source, encoding="utf-8")
    before = history.ends(tmp_path)
    declared = re.search(
        r'# %% tags=\["raises-exception"\] raises=\[\{"error": "ValueError", "match": "fold_in .*', source
    )[0]
    path.write_text(source.replace(declared, "# %%"), encoding="utf-8")
    after, changed = history.ends(tmp_path), f"`{name}`, `split_rngs` at the call: "
    assert [line.partition(" on ")[0] for line in history.changes(before, after)] == [changed + "works"]
    assert [line.partition(" on ")[0] for line in history.changes(after, before)] == [
        changed + "raises `ValueError`"
    ]


def test_the_working_copy_says_what_the_seed_does_in_each_row():
    ends = history.ends()
    seed = ends["fori_loop_rejects_accumulator", ""]
    assert seed["0.12.2"] == "raises `ValueError`" and seed["0.12.12"] == "works"
    assert ends["tree_mode", ""]["0.11.2"] == "does not apply"


def test_a_commit_that_is_not_there_is_named():
    with pytest.raises(history.HistoryError, match="commit no-such-commit: expected one that has recipes/"):
        history.at("no-such-commit")
    with pytest.raises(SystemExit, match="commit no-such-commit"):
        history.main(["no-such-commit"])


def test_two_commits_are_compared(capsys):
    history.main(["HEAD", "HEAD"])
    assert capsys.readouterr().out == "No outcome changed.\n"


CHANGES = "# Changelog\n\n## 2026-11-30\n\n- Older.\n"


def test_changes_are_entered_once_into_the_section_of_the_day_and_reach_the_feed():
    once = history.entered(CHANGES, ["`loop`: works on `2`; before, it was: raises `E`."], "2026-12-01")
    line = "- `loop`: works on `2`; before, it was: raises `E`.\n"
    assert once == f"# Changelog\n\n## 2026-12-01\n\n{line}\n## 2026-11-30\n\n- Older.\n"
    assert history.entered(once, ["`loop`: works on `2`; before, it was: raises `E`."], "2026-12-02") == once
    more = history.entered(once, ["Row `3`: added."], "2026-12-01")
    assert f"{line}- Row `3`: added.\n\n## 2026-11-30" in more
    assert "Row `3`: added." in machine.feed(more, origin.known())
    assert history.entered("# Changelog\n", ["x"], "2026-12-01") == "# Changelog\n\n## 2026-12-01\n\n- x\n"


def test_the_command_compares_with_the_last_commit_of_the_changelog(monkeypatch, tmp_path, capsys):
    path = tmp_path / "CHANGELOG.md"
    path.write_text(CHANGES)
    monkeypatch.setattr(history, "last_changed", lambda changelog: "HEAD")
    now = history.ends()
    name = next(iter(now))
    monkeypatch.setattr(history, "CHANGELOG", path)
    monkeypatch.setattr(history, "at", lambda commit: {**now, name: {row: "raises `E`" for row in now[name]}})
    history.main(["--write"])
    said = capsys.readouterr().out.splitlines()[0]
    assert "before, it was: raises `E`" in said and said in path.read_text()


def test_a_changelog_that_no_commit_has_is_named(tmp_path):
    with pytest.raises(history.HistoryError, match="x.md: expected a commit that changed it"):
        history.last_changed(tmp_path / "x.md")
