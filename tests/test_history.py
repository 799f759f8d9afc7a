"""The history of outcomes: what it says when a row begins or stops raising, and of commits that are not there."""

import re
import shutil

import pytest

from harness import contract, history, rows

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
