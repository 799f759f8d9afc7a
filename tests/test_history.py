"""The history of outcomes: what it says when a row begins or stops raising, and of commits that are not there."""

import pytest

from harness import history

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
