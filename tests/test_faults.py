"""What may go wrong around a build: each fault is told plainly, ends with an exit code, and leaves the next run right."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from harness import contract, execute, files, kernels, links, reports, rows
from tests.test_execute import HEADER, row, runs, toy
from tests.test_rows import load_noxfile
from tests.tiny import Project, difference

HERE = "# %%\nimport os\nfrom pathlib import Path\n"


@contextmanager
def full_disk(size):
    """A stand-in for a full disk: no file of this process, or of one that it starts, grows beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """A project that was built once, with nothing in the way."""
    project = Project(tmp_path_factory.mktemp("clean"))
    project.build()
    return project


@pytest.fixture
def project(tmp_path):
    """The same project, not built."""
    return Project(tmp_path)


def right(project, clean):
    """Whether the site is there, is the one of a clean build, and nothing half-made lies beside it."""
    left = [path.name for path in project.site.parent.iterdir() if "." in path.name]
    return not left and not difference(project.site, clean.site)


# While a recipe is executed.


def test_a_kernel_killed_in_the_middle_of_a_cell(tmp_path, row):
    said, killed = tmp_path / "pid", tmp_path / "killed"
    cell = (
        HERE
        + f"if not Path({str(killed)!r}).exists():\n    Path({str(said)!r}).write_text(str(os.getpid()))\n"
        "    import time; time.sleep(60)\nprint('ran')\n"
    )

    def kill():
        while not (said.exists() and said.read_text()):
            time.sleep(0.05)
        killed.touch()
        os.kill(int(said.read_text()), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    recipe, folder = toy(tmp_path, cell), tmp_path / "executed"
    with pytest.raises(contract.RecipeError, match="recipe toy, cell 4 .*row here\n.*\n.*its kernel died"):
        execute.executed(recipe, row, folder)
    assert not list(folder.rglob("*.*"))
    assert execute.executed(recipe, row, folder).cells[3].outputs[0].text == "ran\n"


def test_a_full_disk_while_a_notebook_is_kept(tmp_path, row, runs):
    recipe, folder = toy(tmp_path, ""), tmp_path / "executed"
    with full_disk(100), pytest.raises(contract.RecipeError, match="recipe toy, row here(?s:.*)make room"):
        execute.executed(recipe, row, folder)
    assert not list(folder.rglob("*.*"))
    assert execute.executed(recipe, row, folder) == execute.load(recipe, row, folder)


def test_a_process_killed_while_it_writes_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "x.txt"
    files.write(path, "whole")
    code = (
        f"import os, signal\nfrom pathlib import Path\nfrom harness import files\nfiles.os.replace = lambda *a: os.kill(os.getpid(), {signal.SIGKILL})\n"
        f"files.write(Path({str(path)!r}), 'half')"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=rows.ROOT).returncode == -signal.SIGKILL
    assert path.read_text() == "whole"


def test_a_clock_set_back(tmp_path, row, monkeypatch):
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    monkeypatch.setattr(execute.time, "time", lambda: 1_000_000_000.0)
    with pytest.raises(contract.RecipeError, match="a clock at 20(?s:.*)2001-09-09(?s:.*)set the clock"):
        execute.run(toy(tmp_path, ""), row)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")  # not a clock, but what the caller wants
    notebook = execute.run(toy(tmp_path, ""), row)
    assert notebook.metadata["executed"]["date"] == "2001-09-09"


@pytest.mark.parametrize("host", ["192.0.2.1", "recipes.example"])
def test_a_recipe_that_reaches_for_the_network(tmp_path, row, host):
    cell = f"# %%\nimport socket\nsocket.create_connection(({host!r}, 80), timeout=5)\n"
    with pytest.raises(contract.RecipeError, match=f"reaches no other machine; this one tried {host}"):
        execute.run(toy(tmp_path, cell), row)


def test_a_recipe_that_uses_what_only_the_harness_imported(tmp_path, row):
    with pytest.raises(contract.RecipeError, match="NameError: name 'warnings'"):
        execute.run(
            toy(tmp_path, "# %%\nwarnings.warn\n", HEADER.replace("import warnings\n", "x = 1\n")), row
        )


def test_a_package_that_is_missing_or_another(tmp_path, row):
    lock = "optax==0.0.1 \\\n    --hash=sha256:00\n"
    row.lock.write_text("absent-here==1.0 ; sys_platform == 'none' \\\n    --hash=sha256:00\n")
    execute.check_environment(row)
    row.lock.write_text(lock)
    with pytest.raises(contract.RecipeError, match="row here\n  expected: optax 0.0.1\n(?s:.*)nox -s"):
        execute.check_environment(row)
    row.lock.write_text(lock.replace("optax", "No_Such.package"))
    with pytest.raises(
        contract.RecipeError,
        match="expected: No_Such.package 0.0.1\n  came:     No_Such.package not installed",
    ):
        execute.check_environment(replace(row, flax=Version(str(row.flax))))


def test_an_interpreter_that_cannot_import_is_told_with_the_reason(tmp_path, capfd):
    (tmp_path / "jax.py").write_text("raise ImportError('broken on purpose')\n")
    with pytest.raises(RuntimeError, match="did not start"):
        kernels.server((("PATH", os.environ["PATH"]), ("PYTHONPATH", str(tmp_path))))
    assert "broken on purpose" in capfd.readouterr().err


def test_what_is_made_while_the_executor_changes_is_not_kept(tmp_path, row, monkeypatch):
    digests = iter([{"executor": "old"}, {"executor": "new"}])
    monkeypatch.setattr(execute, "sources", lambda recipe, row: next(digests))
    with pytest.raises(contract.RecipeError, match="changed meanwhile"):
        execute.run(toy(tmp_path, ""), row)


def test_a_kernel_that_cannot_be_set_up(tmp_path, row, monkeypatch):
    monkeypatch.setattr(execute, "SETUP", "get_ipython().no_such_method()")
    with pytest.raises(contract.RecipeError, match="the kernel to be set up(?s:.*)no_such_method"):
        execute.run(toy(tmp_path, ""), row)


def test_a_damaged_compilation_cache(tmp_path, row, monkeypatch):
    cache = tmp_path / "compiled"
    monkeypatch.setattr(execute, "COMPILED", cache)
    recipe = toy(tmp_path, "# %%\nimport jax\nprint(jax.jit(lambda x: x * 17.25 + 3)(2.0))\n")
    first = execute.run(recipe, row)
    entries = [path for path in cache.rglob("*") if path.is_file() and path.stat().st_size > 100]
    assert entries
    for path in entries:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert execute.run(recipe, row).cells[3].outputs == first.cells[3].outputs


def test_damaged_outcomes_of_reports(tmp_path, monkeypatch):
    monkeypatch.setattr(reports, "RAN", tmp_path)
    newest = rows.load()[0]
    files.write(tmp_path / newest.name / "outcomes.json", '{"made-from": ')
    with pytest.raises(
        reports.ReportError, match=f"row {newest.name}: outcomes.json is corrupt(?s:.*)delete"
    ):
        reports.outcomes(newest)


# While the site is built.


def once_there(project, process, pattern):
    """Wait until a build, which is at work, has made what the pattern says."""
    while not list((project.folder / "build").glob(pattern)):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("point", "number"),
    [
        ("doctrees.*", signal.SIGKILL),
        ("html.*/_static", signal.SIGINT),
        ("html.*/index.html", signal.SIGKILL),
    ],
)
def test_a_build_interrupted_at_any_point(project, clean, point, number):
    process = project.start()
    once_there(project, process, point)
    os.killpg(process.pid, number)
    said = process.communicate(timeout=180)[0]
    assert process.returncode != 0 and not project.site.exists(), said
    project.build()
    assert right(project, clean)


def test_a_sphinx_that_outlives_its_nox_spoils_nothing(project, tmp_path_factory):
    """It goes on with the old text while a build of the new text is half done."""
    old = project.start()
    once_there(project, old, "html.*/_static")
    old.kill()
    old.wait()
    os.killpg(old.pid, signal.SIGSTOP)
    other = Project(tmp_path_factory.mktemp("other"))
    for changed in (project, other):
        changed.add("first", title="Another title")
    new = project.start()
    once_there(project, new, "html.*/recipes/first.html")
    os.killpg(new.pid, signal.SIGSTOP)
    os.killpg(old.pid, signal.SIGCONT)
    old.communicate(timeout=180)
    os.killpg(new.pid, signal.SIGCONT)
    said = new.communicate(timeout=180)[0]
    assert new.returncode == 0, said
    other.build()
    assert not difference(project.site, other.site)
    project.build()
    assert right(project, other)


def test_two_builds_at_once(project, clean):
    both = [project.start() for _ in range(2)]
    said = [process.communicate(timeout=180)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum("Waiting until it ends" in text for text in said) == 1
    assert right(project, clean)


def test_a_full_disk_while_the_site_is_written(project, clean):
    with full_disk(30_000):
        process = project.start()
        said = process.communicate(timeout=180)[0]
    assert process.returncode != 0 and "File too large" in said
    assert not project.site.exists()
    project.build()
    assert right(project, clean)


def test_damaged_doctrees(project, clean):
    project.build()
    trees = project.folder / "build" / "doctrees"
    for path in trees.rglob("*.*"):
        path.write_bytes(path.read_bytes()[:100])
    process = project.start()
    said = process.communicate(timeout=180)[0]
    if process.returncode:
        assert not project.site.exists(), said
        project.build()
    assert right(project, clean)


def test_a_change_made_while_the_clock_was_set_back(project, tmp_path_factory):
    project.build()
    later = time.time() + 1_000_000
    for path in [*project.site.rglob("*"), *(project.folder / "build" / "doctrees").rglob("*")]:
        os.utime(path, (later, later))  # as if it had been built before the clock was set back
    other = Project(tmp_path_factory.mktemp("other"))
    for changed in (project, other):
        template = changed.folder / "docs" / "_templates" / "page.html"
        template.write_text(template.read_text() + "<!-- changed -->")
        changed.add("first", title="Another title")
        page = changed.folder / "docs" / "releases.md"
        page.write_text(page.read_text().replace("Text.", "Other text."))
    project.build()
    other.build()
    assert right(project, other)


def test_no_network_is_needed_to_build(project, clean):
    """An audit hook refuses every connection of Sphinx and of what it loads."""
    hook = project.folder / "sitecustomize.py"
    hook.write_text(
        "import sys\n"
        "def refuse(event, arguments):\n"
        "    if event in ('socket.connect', 'socket.getaddrinfo'):\n"
        "        raise ConnectionError(f'the build reached for the network: {arguments}')\n"
        "sys.addaudithook(refuse)\n"
        "open(__file__ + '.loaded', 'w').close()\n"
    )
    project.build(env={"PYTHONPATH": str(project.folder)})
    assert right(project, clean) and Path(f"{hook}.loaded").exists()


def test_an_executed_notebook_that_is_corrupt_leaves_no_site(project, clean):
    project.build()
    recipe = contract.read(project.folder / "recipes" / "first.py")
    path = execute.path_of(recipe, project.row, project.folder / "build" / "executed")
    sound = path.read_text()
    path.write_text(sound[:200])
    process = project.start()
    said = process.communicate(timeout=180)[0]
    assert process.returncode != 0 and "first.ipynb is corrupt" in said and "Traceback" not in said
    assert not project.site.exists()
    path.write_text(sound)
    project.build()
    assert right(project, clean)


# The machine.


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(SystemExit, match=r"cannot write build/ and .nox/ in .*: copy the project"):
        load_noxfile(monkeypatch, ["3.13"])


def test_a_mounted_folder_that_cannot_be_written(project):
    """The same with a real mount, where this machine lets a process make one of its own."""
    mount = "mount --bind . . && mount -o remount,bind,ro . && cd . && cd $PWD && exec"
    unshare = ["unshare", "-rm", "sh", "-c"]
    command = [*unshare, f"{mount} {sys.executable} -c 'import noxfile'"]
    probe = [*unshare, f"{mount} true"]
    if (
        not shutil.which("unshare")
        or subprocess.run(probe, cwd=project.folder, capture_output=True).returncode
    ):
        pytest.skip("this machine lets no process mount")
    found = subprocess.run(command, cwd=project.folder, capture_output=True, text=True)
    assert found.returncode == 1 and "cannot write build/" in found.stderr
    project.build()


def test_addresses_that_cannot_be_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(links, "PUBLISHED", tmp_path / "links.txt")
    monkeypatch.setattr(links, "addresses", lambda site: {f"recipes/{n}.html" for n in range(50)})
    with full_disk(100), pytest.raises(links.LinkError, match="links.txt: expected to add 50(?s:.*)writable"):
        links.extend(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("true", 1)])
def test_without_chromium(ci, code, tmp_path):
    """Browser tests are skipped and say so; with CI set they fail."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n0",
        "tests/test_browser.py",
        "-k",
        "back_and_forward",
    ]
    environment = {**os.environ, "PATH": str(Path(sys.executable).parent), "CI": ci}
    found = subprocess.run(command, cwd=rows.ROOT, env=environment, capture_output=True, text=True)
    assert found.returncode == code and "install Debian's package `chromium`" in found.stdout
