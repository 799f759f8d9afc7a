"""Execution: what a recipe may do while it runs, what is kept of it, and when it runs again.

The recipes here are small and really executed, under a row made to fit the Flax and jax that are installed.
"""

import importlib.metadata
import json
from dataclasses import replace

import nbformat
import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from harness import contract, execute, rows

HEADER = """# ---
# jupyter:
#   recipe:
#     summary: One sentence.
# ---

# %% [markdown]
# # Toy

# %% tags=["snippet"]
import warnings

# %% tags=["proof"]
assert True

"""


@pytest.fixture
def row(tmp_path):
    """A row with the installed Flax and jax, whose files stand in a temporary folder."""
    (tmp_path / "here.txt").write_text("a lock\n")
    versions = {package: Version(importlib.metadata.version(package)) for package in ("flax", "jax")}
    return rows.Row(name="here", python=SpecifierSet(), why="", folder=tmp_path, **versions)


def toy(tmp_path, cells, header=HEADER):
    """A recipe of the header above and more cells."""
    path = tmp_path / "toy.py"
    path.write_text(header + cells)
    return contract.read(path)


FAILS = {
    "raises undeclared": (
        "# %%\n1 / 0\n",
        "expected: no exception\n  came:     ZeroDivisionError: division by zero",
    ),
    "declared and does not raise": (
        '# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "not so good"}]\nprint(1)\n',
        'expected: ValueError with "not so good"\n  came:     no exception\n  do:       narrow the declared range',
    ),
    "wrong message": (
        '# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "not so good"}]\nraise ValueError("yes")\n',
        "came:     ValueError: yes",
    ),
    "writes to stderr": (
        "# %%\nimport sys\nprint('hm', file=sys.stderr)\n",
        "nothing on stderr\n  came:     hm",
    ),
    "warns": (
        "# %%\nwarnings.warn('old', DeprecationWarning)\n",
        "came:     DeprecationWarning: old",
    ),
    "kills its kernel": (
        "# %%\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
        "its kernel died",
    ),
    "hangs": (
        "# %%\nimport time\ntime.sleep(60)\n",
        "to end within 15 s\n  came:     it was still running",
    ),
}


@pytest.mark.parametrize("case", FAILS)
def test_a_cell_that_breaks_the_contract_is_named(tmp_path, row, case):
    cells, message = FAILS[case]
    with pytest.raises(contract.RecipeError) as error:
        execute.run(toy(tmp_path, cells), row, seconds=15)
    assert message in str(error.value)
    assert "recipe toy, cell 4 (line 16), row here" in str(error.value)


def test_the_declared_device_count_is_what_the_recipe_has(tmp_path, row):
    recipe = toy(tmp_path, "", HEADER.replace("#     summary", "#     needs: {devices: 8}\n#     summary"))
    with pytest.raises(contract.RecipeError, match=r"expected: 8 device\(s\)\n  came:     1"):
        execute.run(recipe, row)


def test_what_is_kept_of_a_run(tmp_path, row):
    cells = (
        "# %%\nimport sys\nfor i in range(3):\n    print(f'\\r{i} of 2', end='')\nprint()\n"
        "print('\\x1b[31mred\\x1b[0m', hex(id(sys)), f'id={id(sys)}')\n"
        '# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "not so good"}]\nraise ValueError("not so good")\n'
        "# %%\nimport os\nos.environ.get('NNX_GRAPH_MODE')\n"
    )
    notebook = execute.run(toy(tmp_path, cells), replace(row, env={"NNX_GRAPH_MODE": "0"}))
    printed, raised, value = (cell.outputs[0] for cell in notebook.cells[3:])
    assert printed.text == "2 of 2\nred 0x... id=...\n"
    assert (raised.ename, raised.evalue) == ("ValueError", "not so good")
    assert value.data["text/plain"] == "'0'"  # the row's own environment
    assert "rows.py" not in json.dumps(notebook) and str(rows.ROOT) not in json.dumps(notebook)
    record = notebook.metadata["executed"]
    assert record["row"] == "here" and record["versions"]["flax"] == str(row.flax)
    assert set(record) == {
        "row", "date", "python", "versions", "seconds", "content", "source", "lock", "executor",
    }  # fmt: skip


@pytest.fixture
def runs(monkeypatch):
    """Executions are counted and done by a stand-in, so that reuse can be tested without a kernel."""
    done = []

    def run(recipe, row):
        done.append(recipe.name)
        notebook = nbformat.from_dict(json.loads(json.dumps(recipe.notebook)))
        notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="ran\n")]
        notebook.metadata["executed"] = {
            "python": execute.platform.python_version(),
            "versions": execute.environment(),
            "content": execute.content(notebook),
            **execute.sources(recipe, row),
        }
        return notebook

    monkeypatch.setattr(execute, "run", run)
    return done


def change_source(tmp_path, row, monkeypatch):
    return toy(tmp_path, "# %%\nprint(2)\n"), row


def change_lock(tmp_path, row, monkeypatch):
    row.lock.write_text("another lock\n")
    return toy(tmp_path, ""), row


def change_mode(tmp_path, row, monkeypatch):
    return toy(tmp_path, ""), replace(row, env={"NNX_GRAPH_MODE": "0"})


def change_executor(tmp_path, row, monkeypatch):
    other = tmp_path / "execute.py"
    other.write_text("# another executor\n")
    monkeypatch.setattr(execute, "EXECUTOR", [other])
    return toy(tmp_path, ""), row


def change_python(tmp_path, row, monkeypatch):
    monkeypatch.setattr(execute.platform, "python_version", lambda: "3.99.0")
    return toy(tmp_path, ""), row


def change_package(tmp_path, row, monkeypatch):
    versions = execute.environment() | {"numpy": "99.0"}
    monkeypatch.setattr(execute, "environment", lambda: versions)
    return toy(tmp_path, ""), row


def corrupt(tmp_path, row, monkeypatch):
    recipe = toy(tmp_path, "")
    execute.path_of(recipe, row, tmp_path / "executed").write_text('{"cells": [')
    return recipe, row


@pytest.mark.parametrize(
    "change",
    [
        change_source,
        change_lock,
        change_mode,
        change_executor,
        change_python,
        change_package,
        corrupt,
    ],
)
def test_what_changed_is_executed_again_and_nothing_else(tmp_path, row, runs, monkeypatch, change):
    folder = tmp_path / "executed"
    for _ in range(2):
        execute.executed(toy(tmp_path, ""), row, folder)
    assert runs == ["toy"], "unchanged: the first execution is used again"
    recipe, changed = change(tmp_path, row, monkeypatch)
    execute.executed(recipe, changed, folder)
    assert runs == ["toy", "toy"]


def test_a_failing_run_leaves_no_older_notebook(tmp_path, row, runs, monkeypatch):
    folder = tmp_path / "executed"
    execute.executed(toy(tmp_path, ""), row, folder)

    def fail(recipe, row):
        raise contract.RecipeError("toy", "a", "b", "c")

    monkeypatch.setattr(execute, "run", fail)
    with pytest.raises(contract.RecipeError):
        execute.executed(toy(tmp_path, "# %%\nprint(2)\n"), row, folder)
    assert not list(folder.glob("*/*"))


def test_a_notebook_that_is_missing_stale_corrupt_or_changed_by_hand_is_refused(tmp_path, row, runs):
    folder, recipe = tmp_path / "executed", toy(tmp_path, "")
    with pytest.raises(execute.NotExecutedError, match="recipe toy, row here: not executed; run `nox -s"):
        execute.load(recipe, row, folder)
    execute.executed(recipe, row, folder)
    path = execute.path_of(recipe, row, folder)
    sound = path.read_text()
    with pytest.raises(execute.NotExecutedError, match="executed from another source"):
        execute.load(toy(tmp_path, "# %%\nprint(2)\n"), row, folder)

    path.write_text(sound.replace("ran\\n", "typed\\n"))
    with pytest.raises(execute.ExecutedError, match="not those of the run"):
        execute.load(recipe, row, folder)
    path.write_text(sound[:100])
    with pytest.raises(execute.ExecutedError, match="toy.ipynb is corrupt"):
        execute.load(recipe, row, folder)


def test_an_environment_that_is_not_the_rows_is_refused(row):
    execute.check_environment(row)
    with pytest.raises(contract.RecipeError, match="expected: flax 0.1.0"):
        execute.check_environment(replace(row, flax=Version("0.1.0")))
