"""The canary: each kind of change it tells, how its report reads, and that its workflow can write no more than an issue."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import nbformat
import pytest
import yaml
from nbformat.v4 import new_output
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from harness import contract, execute, latest, rows

SOURCE = """# ---
# jupyter:
#   recipe:
#     summary: One sentence.
# ---

# %% [markdown]
# # Toy

# %% tags=["snippet", "proof"]
print("fine")

# %% [markdown]
# ## A trap

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "declared"}]
raise ValueError
"""
ROW = rows.Row("pinned", Version("0.12.12"), Version("0.12.0.1"), SpecifierSet(), "")
TRAP = "ValueError", "first line\nwith what was declared"


def printed(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def error(name, message):
    return new_output("error", ename=name, evalue=message, traceback=[f"{name}: {message}"])


def picture(svg):
    return new_output("display_data", data={"image/svg+xml": svg, "text/plain": f"<Figure {svg}>"})


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A recipe of two code cells, in a folder of its own."""
    monkeypatch.setattr(contract, "RECIPES", tmp_path)
    return edited(tmp_path, "", "")


def edited(folder, text, becomes):
    """The recipe with `text` in its source replaced."""
    (folder / "toy.py").write_text(SOURCE.replace(text, becomes) if text else SOURCE, encoding="utf-8")
    return contract.read(folder / "toy.py")


def ran(recipe, first=None, second=None):
    """The recipe's notebook as if it was executed: its first code cell printed, its second raised, if not told else."""
    notebook = nbformat.from_dict(json.loads(json.dumps(recipe.notebook)))
    notebook.cells[1].outputs = [printed("fine\n")] if first is None else first
    notebook.cells[3].outputs = [error(*TRAP)] if second is None else second
    return notebook


def test_nothing_differs(toy):
    assert latest.compare(toy, ROW, ran(toy), ran(toy)) == []


FIRST, SECOND = ("cell 2 (line 10)", "Toy"), ("cell 4 (line 16)", "A trap")
CHANGES = {
    "began to raise": (
        {"first": [printed("fine\n"), error("KeyError", "'a'\nb")]},
        (*FIRST, "began to raise", "runs", "raises KeyError: 'a'"),
    ),
    "raises no more": (
        {"second": [printed("a result")]},
        (*SECOND, "raises no more", "raises ValueError: first line", "runs"),
    ),
    "raises another class": (
        {"second": [error("TypeError", "first line\nwith what was declared")]},
        (*SECOND, "raises another class", "raises ValueError: first line", "raises TypeError: first line"),
    ),
    "other message": (
        {"second": [error("ValueError", "another line\nwith what was declared")]},
        (*SECOND, "other message", "raises ValueError: first line", "raises ValueError: another line"),
    ),
    "other message in a later line, without the declared words": (
        {"second": [error("ValueError", "first line")]},
        (
            *SECOND,
            "other message",
            "raises ValueError: first line",
            'raises ValueError: first line, without the declared "declared"',
        ),
    ),
    "no message any more": (
        {"second": [error("ValueError", "")]},
        (
            *SECOND,
            "other message",
            "raises ValueError: first line",
            'raises ValueError, without the declared "declared"',
        ),
    ),
    "other output": (
        {"first": [printed("fine\nand more\n")]},
        (*FIRST, "other output", "(no such line)", "and more"),
    ),
    "another value": (
        {"first": [new_output("execute_result", data={"text/plain": "fined"})]},
        (*FIRST, "other output", "fine", "fined"),
    ),
    "other output before it raises": (
        {"second": [printed("hm\n"), error(*TRAP)]},
        (*SECOND, "other output", "(no such line)", "hm"),
    ),
    "a picture in place of words": (
        {"first": [picture("one")]},
        (*FIRST, "other output", "fine", "image/svg+xml"),
    ),
    "warns on stderr": (
        {"first": [printed("fine\n"), printed("Warning: old\n", "stderr")]},
        (*FIRST, "warns", "(no such line)", "Warning: old"),
    ),
    "warns, which is an error while a recipe runs": (
        {"first": [printed("fine\n"), error("DeprecationWarning", "old")]},
        (*FIRST, "warns", "runs", "raises DeprecationWarning: old"),
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_each_kind_of_change(toy, case):
    cells, expected = CHANGES[case]
    assert latest.compare(toy, ROW, ran(toy), ran(toy, **cells)) == [latest.Change("toy", *expected)]


def test_changes_of_several_cells_are_told_in_the_order_of_the_recipe(toy):
    found = latest.compare(
        toy, ROW, ran(toy), ran(toy, [printed("x"), printed("y", "stderr")], [error("A", "b")])
    )
    assert [(c.cell, c.kind) for c in found] == [
        (FIRST[0], "warns"),
        (FIRST[0], "other output"),
        (SECOND[0], "raises another class"),
    ]


def test_what_does_not_count(toy):
    """A picture's bytes, which follow the plotting package; a message from its second line on."""
    pairs = [
        ({"first": [picture("one")]}, {"first": [picture("two")]}),
        ({}, {"second": [error("ValueError", "first line\nit is declared")]}),
    ]
    for old, new in pairs:
        assert latest.compare(toy, ROW, ran(toy, **old), ran(toy, **new)) == []


@pytest.fixture
def newest(tmp_path, monkeypatch):
    """A row of what is installed here; the executed notebook of the pinned row is what a test says."""
    monkeypatch.setattr(execute, "load", lambda recipe, row: ran(recipe))
    return latest.row(tmp_path)


@pytest.mark.parametrize(
    ("cell", "came"),
    [
        ("import time; time.sleep(60)", "it was still running and was stopped"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "its kernel died"),
    ],
)
def test_a_cell_that_hangs_or_dies_is_told_and_its_recipe_ends_there(tmp_path, toy, newest, cell, came):
    edited(tmp_path, "raise ValueError", cell)
    expected = latest.Change("toy", *SECOND, "hangs or dies", "raises ValueError: first line", came)
    assert latest.attempt("toy", ROW, newest, seconds=5) == [expected]


def test_a_recipe_is_executed_and_not_held_to_what_it_declares(toy, newest):
    (change,) = latest.attempt("toy", ROW, newest)
    assert (change.kind, change.newest) == (
        "other message",
        'raises ValueError, without the declared "declared"',
    )


def test_a_recipe_that_cannot_be_executed_is_told(toy, newest, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("flax cannot be imported\nmore")

    monkeypatch.setattr(execute, "run", fail)
    expected = ("", "Toy", "could not be executed", "executed", "RuntimeError: flax cannot be imported")
    assert latest.attempt("toy", ROW, newest) == [latest.Change("toy", *expected)]


def test_a_recipe_that_needs_another_release_is_told(tmp_path, toy, newest):
    for range_, kind, words in [
        (f"<{newest.flax}", "does not apply", ("applies", f"needs flax <{newest.flax}")),
        (f">={newest.flax}", "applies", (f"needs flax >={newest.flax}", "applies")),
    ]:
        edited(tmp_path, "#     summary", f'#     needs: {{flax: "{range_}"}}\n#     summary')
        older = replace(ROW, flax=Version("0.1"))
        expected = latest.Change("toy", "", "Toy", kind, *words)
        assert latest.attempt("toy", older, newest) == [expected]
    assert latest.attempt("toy", older, older) == [], "in neither, so nothing changed"


def test_a_pre_release_counts_as_the_release_that_it_will_be(tmp_path, monkeypatch):
    monkeypatch.setattr(
        execute, "environment", lambda: {"flax": "0.13.0rc1", "jax": "0.13.1.dev20261201", "a_b": "1"}
    )
    row = latest.row(tmp_path)
    assert (str(row.flax), str(row.jax), row.mode) == ("0.13.0", "0.13.1", "graph")
    assert contract.Where(flax=SpecifierSet(">=0.13.0")).holds(row)
    assert row.lock.read_text() == "a-b==1\nflax==0.13.0rc1\njax==0.13.1.dev20261201\n"


def test_versions_that_differ():
    found = latest.versions({"a": "1", "b": "1", "gone": "1"}, {"a": "1", "b": "2rc1", "new": "1"})
    assert [tuple(vars(package).values()) for package in found] == [
        ("b", "1", "2rc1", True),
        ("gone", "1", "not there", False),
        ("new", "not there", "1", False),
    ]


REPORT = latest.Report(
    row="0.12.12",
    python="3.13.0",
    installed={"flax": "0.13.0rc1", "jax": "0.12.0.1"},
    executed=30,
    changes=[
        latest.Change("toy", *FIRST, "began to raise", "runs", "raises ValueError: a | b, `c` @you <b>#1\nx"),
        latest.Change("toy", *SECOND, "other output", "`1`", ""),
    ],
    versions=[latest.Package("flax", "0.12.12", "0.13.0rc1", True), latest.Package("x", "1", "2", False)],
    site=latest.Site(False, ["conf.py: WARNING: <b>old</b>"]),
)


def test_the_report_for_people():
    text = latest.as_markdown(REPORT)
    assert "30 recipes executed under Python 3.13.0 with flax 0.13.0rc1, jax 0.12.0.1" in text
    assert "2 outcomes changed in 1 recipe." in text and "No outcome differs." not in text
    assert "| recipe | cell | under | kind | with 0.12.12 | with the newest |\n| --- |" in text
    assert (
        "| `toy` | `cell 2 (line 10)` | `Toy` | `began to raise` | `runs` "
        "| ``raises ValueError: a \\| b, `c` @you <b>#1 x`` |\n"
    ) in text
    assert "| `other output` | `` `1` `` |  |\n" in text
    assert "Does not build without warnings" in text and "\n    conf.py: WARNING: <b>old</b>\n" in text
    assert "| `flax` | `0.12.12` | `0.13.0rc1` | `pre-release` |\n| `x` | `1` | `2` |  |\n" in text
    rendered = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in rendered} == {7, 5}


def test_the_report_of_an_unchanged_release():
    same = replace(REPORT, changes=[], versions=[], site=latest.Site(True))
    text = latest.as_markdown(same)
    assert "\nNo outcome differs.\n" in text and "Builds without a warning" in text and "None: " in text
    assert "|" not in text and not same.differs and json.loads(latest.as_json(same))["differs"] is False


def test_what_is_news():
    assert replace(REPORT, site=latest.Site(True)).differs, "an outcome"
    assert replace(REPORT, changes=[]).differs, "a site that does not build"
    newer = replace(REPORT, changes=[], site=latest.Site(None))
    assert newer.versions and not newer.differs, "a newer version with the same outcomes is none"
    assert "Not built" in latest.as_markdown(newer)


def test_the_report_for_programs():
    read = json.loads(latest.as_json(REPORT))
    assert list(read) == [
        "differs",
        "row",
        "python",
        "installed",
        "executed",
        "changes",
        "versions",
        "site",
    ]
    assert list(read["changes"][0]) == ["recipe", "cell", "heading", "kind", "pinned", "newest"]
    assert read["differs"] is True and read["versions"][0]["prerelease"] is True
    assert latest.as_json(REPORT) == latest.as_json(replace(REPORT, changes=list(REPORT.changes)))


class Pool:
    """Stands in for the pool of processes: does the work at once."""

    def __init__(self, *args):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    map = staticmethod(map)


@pytest.fixture
def session(tmp_path, toy, newest, monkeypatch):
    """`main` without processes and without Sphinx, that writes to a temporary folder."""
    monkeypatch.setattr(latest, "FOLDER", tmp_path / "latest")
    monkeypatch.setattr(latest, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(latest, "row", lambda: newest)
    monkeypatch.setattr(latest, "build_site", lambda row: latest.Site(True))
    return rows.load()[0].name


def test_a_changed_outcome_is_news_and_no_error(tmp_path, session, monkeypatch, capsys):
    monkeypatch.setattr(execute, "run", lambda recipe, *args, **kwargs: ran(recipe, [printed("else\n")]))
    latest.main([session])
    text = (tmp_path / "latest" / "report.md").read_text(encoding="utf-8")
    assert text in capsys.readouterr().out and "| `other output` | `fine` | `else` |" in text
    read = json.loads((tmp_path / "latest" / "report.json").read_text(encoding="utf-8"))
    assert read["executed"] == 1 and [change["kind"] for change in read["changes"]] == ["other output"]
    assert read["site"]["builds"] is True


def test_the_session_fails_where_nothing_was_executed_and_its_report_says_why(tmp_path, session, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("flax cannot be imported")

    monkeypatch.setattr(execute, "run", fail)
    with pytest.raises(SystemExit, match="nothing was executed: RuntimeError: flax cannot be imported"):
        latest.main([session])
    assert "flax cannot be imported" in (tmp_path / "latest" / "report.md").read_text(encoding="utf-8")


def test_the_session_fails_where_there_is_nothing_to_compare_with(tmp_path, session, monkeypatch):
    def fail(recipe, row):
        raise execute.NotExecutedError("recipe toy, row x: not executed")

    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "report.json").touch()
    monkeypatch.setattr(execute, "load", fail)
    with pytest.raises(SystemExit, match="nothing can be compared: recipe toy"):
        latest.main([session])
    assert not (tmp_path / "latest" / "report.json").exists(), "no older report is taken for this one's"


@pytest.mark.parametrize("arguments", [[], ["0.0.1"], [rows.load()[0].name, "no_such_recipe"]])
def test_wrong_arguments_are_told(arguments):
    with pytest.raises(SystemExit, match="expected: python -m harness.latest ROW"):
        latest.main(arguments)


def test_the_site_is_built_apart_and_what_sphinx_says_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(latest, "FOLDER", tmp_path)
    seen = {}

    def run(command, **kwargs):
        seen.update(kwargs, command=command)
        return subprocess.CompletedProcess(
            command, 1, "".join(f"{rows.ROOT}/conf.py {i}\n" for i in range(99))
        )

    monkeypatch.setattr(subprocess, "run", run)
    site = latest.build_site(ROW)
    assert site.builds is False and site.said[0] == "conf.py 0" and len(site.said) == latest.SITE_LINES
    assert seen["command"][-3:] == [tmp_path / "doctrees", ".", tmp_path / "html"]
    assert {"-W", "-n"} <= {*seen["command"]} and seen["env"]["NNX_SITE_ROWS"] == "pinned"
    assert seen["command"][0] == sys.executable

    def hang(command, **kwargs):
        raise subprocess.TimeoutExpired(command, kwargs["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)
    assert latest.build_site(ROW).builds is False


def test_the_packages_installed_are_named_as_locks_name_them():
    assert latest.installed()["myst-parser"] == importlib.metadata.version("myst-parser")


# The workflows.

FOLDER = rows.ROOT / ".github" / "workflows"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.yml")}
MAY_WRITE = {("site", "publish"): {"contents"}, ("latest", "tell"): {"issues"}}


def test_every_action_is_pinned_by_its_commit():
    used = {}
    for name, workflow in WORKFLOWS.items():
        for job in workflow["jobs"].values():
            assert "uses" not in job, "a job of another repository"
            used.setdefault(name, []).extend(step["uses"] for step in job["steps"] if "uses" in step)
    assert all(used.values())
    for action in sum(used.values(), []):
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
    commits = [dict(action.split("@") for action in actions) for actions in used.values()]
    for one in commits:
        for other in commits:
            assert all(other.get(action, commit) == commit for action, commit in one.items())


def test_no_workflow_may_more_than_it_needs():
    assert set(WORKFLOWS) == {name for name, _ in MAY_WRITE}
    for name, workflow in WORKFLOWS.items():
        assert workflow["permissions"] == {"contents": "read"}, name
        for job, what in workflow["jobs"].items():
            given = what.get("permissions", {})
            assert isinstance(given, dict), "read-all and write-all are more than anything needs"
            writes = {scope for scope, level in given.items() if level != "read"}
            assert writes == MAY_WRITE.get((name, job), set()), (name, job)
        assert "secrets." not in (FOLDER / f"{name}.yml").read_text(encoding="utf-8")
        assert "pull_request_target" not in workflow[True], "runs what a stranger sends, with rights"


def test_the_job_that_runs_new_packages_has_no_token_and_the_one_that_has_runs_none():
    jobs = WORKFLOWS["latest"]["jobs"]
    checkout = next(step for step in jobs["execute"]["steps"] if "checkout" in step.get("uses", ""))
    assert checkout["with"]["persist-credentials"] is False
    assert "github.token" not in json.dumps(jobs["execute"])
    tell = json.dumps(jobs["tell"])
    assert not re.search(r"checkout|setup-python|nox|pip", tell)


def test_the_workflow_runs_what_the_readme_says():
    runs = [step["run"] for step in WORKFLOWS["latest"]["jobs"]["execute"]["steps"] if "run" in step]
    readme = (rows.ROOT / "README.md").read_text(encoding="utf-8")
    setup = re.search(r"^(python3 -m venv .* && )\.venv/bin/nox -s tests$", readme, re.MULTILINE)[1]
    assert runs == [f"{setup}.venv/bin/nox -s latest"] and "`.venv/bin/nox -s latest`" in readme


GH = """#!/usr/bin/env bash
echo "$*" >> calls
if [ "$2" = list ]; then jq -r "${@: -1}" < issues; fi
"""
OURS = {"number": 7, "title": "What the newest releases change", "author": {"is_bot": True}}
OTHERS = [
    {**OURS, "number": 5, "author": {"is_bot": False}},
    {**OURS, "number": 6, "title": "What the newest releases change?"},
]


@pytest.mark.skipif(not shutil.which("jq") or not shutil.which("bash"), reason="needs bash and jq")
@pytest.mark.parametrize(
    ("differs", "issues", "does"),
    [
        (True, OTHERS, "issue create --title What the newest releases change --body-file body.md"),
        (True, [*OTHERS, OURS], "issue edit 7 --body-file body.md"),
        (False, [*OTHERS, OURS], "issue close 7 --comment Nothing differs any more, says [this run](RUN)."),
        (False, OTHERS, None),
    ],
)
def test_one_issue_is_opened_brought_up_to_date_and_closed(tmp_path, differs, issues, does):
    (step,) = (step for step in WORKFLOWS["latest"]["jobs"]["tell"]["steps"] if "run" in step)
    (tmp_path / "gh").write_text(GH)
    (tmp_path / "gh").chmod(0o755)
    (tmp_path / "issues").write_text(json.dumps(issues))
    (tmp_path / "report.json").write_text(json.dumps({"differs": differs}))
    (tmp_path / "report.md").write_text("x" * 100_000)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TITLE": step["env"]["TITLE"], "RUN": "RUN"}
    subprocess.run(["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=env, check=True)
    listed, *done = (tmp_path / "calls").read_text().splitlines()
    assert listed.startswith("issue list --state open") and done == [does] * (does is not None)
    body = (tmp_path / "body.md").read_text()
    assert "[this run](RUN)" in body and len(body) < 65536
