"""Rows: what a row's file may say, and what a machine that lacks an interpreter is told."""

import importlib.util
import re
import sys

import nox
import pytest
from nox.command import CommandFailed

from harness import rows

GOOD = "# why: newest\n# python: >=3.12\nflax==0.12.12\njax==0.12.0.1\n"


def write(folder, name, text, lock=True):
    """A row's file in `folder`, with its lock unless told otherwise."""
    (folder / f"{name}.in").write_text(text)
    if lock:
        (folder / f"{name}.txt").write_text("flax==0.12.12 --hash=sha256:00\n")
    return folder / f"{name}.in"


def test_rows_come_newest_first_and_graph_before_tree():
    names = [row.name for row in rows.load()]
    assert names == ["0.12.12", "0.12.12-tree", "0.12.8", "0.12.2", "0.11.2"]


def test_a_row_is_added_by_its_two_files(tmp_path):
    write(tmp_path, "0.12.12", GOOD)
    write(tmp_path, "0.13.0", GOOD.replace("0.12.12", "0.13.0"))
    assert [row.name for row in rows.load(tmp_path)] == ["0.13.0", "0.12.12"]


def test_tree_mode_comes_from_the_environment_and_pins_from_the_included_file(tmp_path):
    write(tmp_path, "0.12.12", GOOD)
    tree = write(
        tmp_path,
        "0.12.12-tree",
        "# why: t\n# python: >=3.12\n# env: NNX_GRAPH_MODE=0 A=b\n-r 0.12.12.in\n",
    )
    row = rows.read(tree)
    assert (row.mode, str(row.flax), row.env) == (
        "tree",
        "0.12.12",
        {"NNX_GRAPH_MODE": "0", "A": "b"},
    )


@pytest.mark.parametrize(
    ("text", "lock", "message"),
    [
        (GOOD.replace("# why", "# reason"), True, "unknown header `reason`"),
        (GOOD.replace("# why: newest\n", ""), True, "`# why: ...` is missing"),
        (GOOD.replace("jax==0.12.0.1", "jax"), True, "a pin `jax==VERSION`"),
        (GOOD.replace(">=3.12", "three"), True, "not a version range"),
        (GOOD + "# env: A\n", True, "NAME=VALUE"),
        (GOOD, False, "its lock 0.12.12.txt is missing"),
    ],
)
def test_a_wrong_row_file_is_named_with_what_is_wrong(tmp_path, text, lock, message):
    with pytest.raises(rows.RowError, match=re.escape(message)) as error:
        rows.read(write(tmp_path, "0.12.12", text, lock))
    assert "0.12.12.in" in str(error.value)


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(rows.RowError, match="no row"):
        rows.load(tmp_path)


def test_every_lock_pins_its_rows_flax_and_jax_and_hashes_everything():
    for row in rows.load():
        text = row.lock.read_text()
        assert f"flax=={row.flax} " in text and f"jax=={row.jax} " in text, row.name
        pins = re.findall(r"^([\w.-]+==\S+)[^\n]*\n((?: +--hash=sha256:[0-9a-f]{64}.*\n)*)", text, re.M)
        assert pins and all(hashes for _, hashes in pins), row.name


def test_the_current_environment_is_the_newest_row_of_each_python():
    text = (rows.ROOT / "requirements.txt").read_text()
    locked = set(re.findall(r"^flax==([\d.]+)", text, re.M))
    known = {str(row.flax) for row in rows.load()}
    assert locked <= known, (
        f"requirements.txt has Flax {locked - known} and no row does: add requirements/ROW.in"
    )
    assert str(rows.load()[0].flax) in locked, (
        "requirements.txt lacks the newest row's Flax: run `nox -s lock`"
    )


def test_an_interpreter_that_does_not_run_is_not_found(tmp_path, monkeypatch):
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    found = rows.interpreters()
    assert list(found) == [".".join(map(str, sys.version_info[:2]))]  # this one alone


class Session:
    """Stands in for a nox session: keeps what it is told."""

    def __init__(self):
        self.said = []

    def warn(self, text):
        self.said.append(text)

    def error(self, text):
        raise RuntimeError(text)


def load_noxfile(monkeypatch, pythons):
    """Import noxfile.py as on a machine that has just these Pythons."""
    monkeypatch.setattr(nox.registry, "_REGISTRY", {})  # each import registers its sessions anew
    monkeypatch.setattr(rows, "interpreters", lambda: {v: f"/opt/{v}/bin/python" for v in pythons})
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
    spec = importlib.util.spec_from_file_location("noxfile_here", rows.ROOT / "noxfile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("pythons", "current", "absent"),
    [
        (["3.11"], "0.12.8", ["0.12.12", "0.12.12-tree"]),
        (["3.12"], "0.12.12", []),
        (["3.13", "3.11"], "0.12.12", []),
        (["3.14"], "0.12.12", []),
    ],
)
def test_the_newest_row_that_can_run_is_current(monkeypatch, pythons, current, absent):
    monkeypatch.delenv("CI", raising=False)
    noxfile = load_noxfile(monkeypatch, pythons)
    assert noxfile.CURRENT == current
    assert [current, "0.12.2"] == noxfile.SHOWN
    assert [row.name for row in noxfile.ABSENT] == absent


def test_a_missing_interpreter_is_named_with_its_remedy_and_is_an_error_under_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    noxfile = load_noxfile(monkeypatch, ["3.11"])
    session = Session()
    noxfile.tell(session)
    assert len(session.said) == 2
    assert "row 0.12.12 is not run here: it needs Python >=3.12, this machine has 3.11" in session.said[0]
    assert "Install one of Python 3.13, 3.12, 3.14" in session.said[0]
    monkeypatch.setenv("CI", "true")
    noxfile = load_noxfile(monkeypatch, ["3.11"])
    with pytest.raises(RuntimeError, match="every row must run"):
        noxfile.tell(Session())


def test_a_recipe_that_fails_and_a_build_that_fails_leave_no_site(monkeypatch, tmp_path):
    noxfile = load_noxfile(monkeypatch, ["3.13"])
    monkeypatch.chdir(tmp_path)

    class Failing(Session):
        def install(self, *args):
            pass

        def run(self, *args, **kwargs):
            raise CommandFailed("failed")

    for fails in (lambda: noxfile.execute(Failing(), "0.12.2"), lambda: noxfile.build(Failing(), ["0.12.2"])):
        noxfile.SITE.mkdir(parents=True)
        (noxfile.SITE / "index.html").touch()
        with pytest.raises(CommandFailed):
            fails()
        assert not noxfile.SITE.exists()


def test_an_older_python_is_told_so(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 13, "final", 0))
    with pytest.raises(SystemExit, match="needs Python 3.11 or newer, this is 3.10"):
        load_noxfile(monkeypatch, ["3.11"])


def test_a_machine_without_any_supported_python_is_told_so(monkeypatch):
    with pytest.raises(SystemExit, match="none of Python 3.13, 3.12, 3.14, 3.11"):
        load_noxfile(monkeypatch, [])


def test_pins_of_a_lock_by_package(tmp_path):
    lock = tmp_path / "x.txt"
    assert rows.pins(lock) == {}
    lock.write_text(
        "jax==0.10.2 ; python_full_version < '3.12' \\\n    --hash=sha256:00\njax==0.12.0.1\nflax==0.12.8\n"
    )
    assert rows.pins(lock) == {"jax": "0.10.2 or 0.12.0.1", "flax": "0.12.8"}
