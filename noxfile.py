"""Sessions of the project. `nox -s docs` builds the site, `nox -s tests` tests it; `nox -l` lists the rest."""

import os
import shlex
import shutil
import sys
from pathlib import Path

if sys.version_info < (3, 11):
    sys.exit("NNX Loop Recipes needs Python 3.11 or newer, this is %d.%d." % sys.version_info[:2])
sys.path.insert(0, str(Path(__file__).parent))

import nox
from filelock import FileLock, Timeout  # with nox comes virtualenv, with it this
from nox.command import CommandFailed

from harness import rows

nox.needs_version = ">=2026.10.20"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.download_python = "never"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["docs"]
os.environ["UV_PYTHON_DOWNLOADS"] = "never"
# Without written bytecode each of the many processes would compile JAX anew: a third of the time. It stays in .nox.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

CONTRAST = (
    "0.12.2"  # what the site shows beside the newest row: the last release in which the seed code fails
)
ROWS = rows.load()
HERE = rows.interpreters()
if not HERE:
    sys.exit(f"found none of Python {', '.join(rows.PYTHONS)} on this machine; install one of them")
PYTHON = {row.name: row.interpreter(HERE) for row in ROWS}
ABSENT = [row for row in ROWS if not PYTHON[row.name]]
CURRENT = next(row.name for row in ROWS if PYTHON[row.name])
CI = bool(os.environ.get("CI"))
SHOWN = [row.name for row in ROWS] if CI else list(dict.fromkeys([CURRENT, CONTRAST]))
WORKERS = min(
    6, (os.cpu_count() or 1) + 1
)  # a recipe also waits, for its kernel or for processes that it starts
SITE, DOCTREES = Path("build/html"), Path("build/doctrees")
MADE = [Path("build"), Path(".nox")]  # what every session writes is in these
if locked := [path for path in MADE if not os.access(path if path.exists() else ".", os.W_OK)]:
    names = " and ".join(f"{path}/" for path in locked)
    sys.exit(f"cannot write {names} in {Path.cwd()}: copy the project to a folder that can be written")
LOCK = FileLock("build/lock")
# The interpreters found go in front, so that nox and uv take them and no shim that fails.
os.environ["PATH"] = os.pathsep.join(
    [*{os.path.dirname(HERE[v]) for v in PYTHON.values() if v}, os.environ["PATH"]]
)


def tell(session: nox.Session) -> None:
    """Say at once which rows this machine cannot run; under CI that is an error."""
    for row in ABSENT:
        session.warn(row.lacks(HERE))
    if ABSENT and CI:
        session.error("with CI set, every row must run")


def alone(session: nox.Session) -> None:
    """Wait until no other nox works in this clone, and keep others out until this one ends, however it does."""
    Path("build").mkdir(exist_ok=True)
    try:
        LOCK.acquire(timeout=0)
    except Timeout:
        session.log("Another nox session is at work in this clone. Waiting until it ends ...")
        LOCK.acquire()


def execute(session: nox.Session, row: str, *args: str) -> None:
    """Install one row from its lock, and execute the recipes in it."""
    tell(session)
    alone(session)
    if not PYTHON[row]:
        session.skip(f"no interpreter for row {row}")
    session.install("--require-hashes", "-r", f"requirements/{row}.txt")
    checks = ["tests/test_reports.py", "tests/test_recipes.py"]
    try:
        session.run("pytest", "-q", f"-n{WORKERS}", "--dist=worksteal", f"--row={row}", *checks, *args)
    except CommandFailed:
        shutil.rmtree(SITE, ignore_errors=True)  # it was built from recipes that no longer hold
        raise


@nox.session
@nox.parametrize("python,row", [nox.param(PYTHON[row.name], row.name, id=row.name) for row in ROWS])
def recipes(session: nox.Session, row: str) -> None:
    """Execute every recipe under one row and hold it to its contract; `-- NAME` runs one recipe."""
    names = [name for name in session.posargs if Path(f"recipes/{name}.py").exists()]
    unknown = [name for name in session.posargs if name not in names]
    if unknown and any(
        word.startswith("recipes") for word in sys.argv
    ):  # else meant for a session that needs this one
        session.error(f"not the name of a recipe: {' '.join(unknown)}; recipes/ has the names")
    execute(session, row, *(["-k", " or ".join(names)] if names else []))


@nox.session(python=PYTHON[CONTRAST])
def contrast(session: nox.Session) -> None:
    """Execute under 0.12.2 the recipes whose outcome there is another than under the newest row."""
    execute(session, CONTRAST, f"--differs-from={CURRENT}", "-rfE")


EVERY = [f"recipes({row})" for row in SHOWN]
EXECUTED = EVERY if CI else [f"recipes({CURRENT})", "contrast"]


def build(session: nox.Session, rows_shown: list[str]) -> None:
    """Build the site beside the old one and put it in its place; a build that fails leaves no site.

    Nothing of a build that was interrupted is used. Its folders have its process in their names, since a Sphinx that was
    left without its nox may still write to them.
    """
    alone(session)
    for left in [*Path("build").glob("html.*"), *Path("build").glob("doctrees.*")]:
        shutil.rmtree(left, ignore_errors=True)
    html, doctrees = (path.with_suffix(f".{os.getpid()}") for path in (SITE, DOCTREES))
    if SITE.exists() and DOCTREES.exists():
        SITE.rename(html)
        DOCTREES.rename(doctrees)
    for path in (SITE, DOCTREES):
        shutil.rmtree(path, ignore_errors=True)
    env = {"NNX_SITE_ROWS": " ".join(rows_shown)}
    session.run("sphinx-build", "-q", "-W", "-n", "-d", str(doctrees), ".", str(html), env=env)
    if html.exists():  # not with --install-only, which runs nothing
        doctrees.rename(DOCTREES)
        html.rename(SITE)


@nox.session(python=PYTHON[CURRENT], requires=EXECUTED)
def docs(session: nox.Session) -> None:
    """Build the site from the newest row, from 0.12.2 where outcomes differ, and from what else was executed."""
    tell(session)
    session.install("--require-hashes", "-r", "requirements.txt")
    build(session, SHOWN)
    session.run("python", "-m", "harness.links")  # what is published is kept: docs/links.txt
    session.log(f"The site is built. Open {(SITE / 'index.html').resolve().as_uri()}")


@nox.session(python=PYTHON[CURRENT], requires=EVERY)
def tests(session: nox.Session) -> None:
    """Test everything: recipes under the newest row and 0.12.2, harness, built site, site in a browser."""
    tell(session)
    session.install("--require-hashes", "-r", "requirements/tests.txt")
    build(session, SHOWN)
    env = {"NNX_SITE_ROWS": " ".join(SHOWN)}
    session.run(
        "pytest",
        "-q",
        "-n2",
        "--ignore=tests/test_recipes.py",
        "--ignore=tests/test_reports.py",
        "--ignore=tests/test_twice.py",
        *session.posargs,
        env=env,
    )


@nox.session(python=PYTHON[CURRENT], requires=EXECUTED)
def serve(session: nox.Session) -> None:
    """Show the site at http://127.0.0.1:8000; a changed recipe is executed and the pages built again."""
    session.install("--require-hashes", "-r", "requirements.txt")
    watched = [f"--watch={name}" for name in ("harness", "requirements")]
    ignored = [f"--ignore={Path.cwd() / name}" for name in ("build", ".nox", ".venv", ".git")]
    LOCK.release(force=True)  # what a change starts is a nox of its own
    again = shlex.join([sys.executable, "-m", "nox", "-R", "-s", *EXECUTED])
    session.run(
        "sphinx-autobuild",
        *watched,
        *ignored,
        "--pre-build",
        again,
        ".",
        "build/live",
    )


@nox.session(python=PYTHON[CURRENT])
def lab(session: nox.Session) -> None:
    """Open the recipes in JupyterLab, in the current environment; a double click opens one as a notebook."""
    session.install("--require-hashes", "-r", "requirements/lab.txt")
    session.env["JUPYTER_CONFIG_DIR"] = str(Path("build/jupyter").resolve())  # the user's own is left alone
    session.run("jupytext-config", "set-default-viewer", "python", silent=True)
    session.run("jupyter", "lab", "recipes", *session.posargs)


@nox.session(python=PYTHON[CURRENT])
def bench(session: nox.Session) -> None:
    """Measure the variants of a training step for the measurements page; `-- --quick` only tries the machinery."""
    session.install("--require-hashes", "-r", "requirements.txt")
    session.run("python", "-m", "bench.measure", *session.posargs)


@nox.session(python=PYTHON[CURRENT], default=False, requires=[f"recipes({CURRENT})"])
def mutants(session: nox.Session) -> None:
    """Put mistakes into the recipes and run them: each must be caught. `-- -k NAME` tries one recipe."""
    alone(session)
    session.install("--require-hashes", "-r", f"requirements/{CURRENT}.txt")
    shutil.rmtree("build/mutants", ignore_errors=True)
    test = "tests/test_mutants.py::test_a_mistake_is_caught"
    session.run("pytest", "-q", "-n2", f"--row={CURRENT}", "--mutants=all", test, *session.posargs)


@nox.session(python=PYTHON[CURRENT], default=False, reuse_venv=False, requires=[f"recipes({CURRENT})"])
def latest(session: nox.Session) -> None:
    """Run the recipes with the newest of everything, pre-releases too: what changes is news; `-- NAME` runs one."""
    alone(session)
    session.install("--pre", "--upgrade", "-r", "requirements.in")
    session.run("python", "-m", "harness.latest", CURRENT, *session.posargs)


@nox.session(python=PYTHON[CURRENT], default=False, requires=[f"recipes({CURRENT})"])
def repeat(session: nox.Session) -> None:
    """Execute every recipe a second time under the newest row: the outputs must be the same."""
    alone(session)
    session.install("--require-hashes", "-r", f"requirements/{CURRENT}.txt")
    session.run("pytest", "-q", "-n2", f"--row={CURRENT}", "tests/test_twice.py", *session.posargs)


@nox.session(python=PYTHON[CURRENT], default=False)
def history(session: nox.Session) -> None:
    """Add to CHANGELOG.md which outcomes changed since it was last committed; `-- COMMIT` compares with another commit."""
    session.install("--require-hashes", "-r", "requirements.txt")
    session.run("python", "-m", "harness.history", "--write", *session.posargs)


@nox.session(python=PYTHON[CURRENT], default=False)
def licences(session: nox.Session) -> None:
    """List the licence of every package that the site and its tests install."""
    session.install("--require-hashes", "-r", "requirements/tests.txt")
    session.run("pip-licenses", "--format=markdown", "--with-urls")


@nox.session(python=False)
def lock(session: nox.Session) -> None:
    """Resolve every requirements file again, write its hashed lock, and say what changed."""
    alone(session)
    for source in [Path("requirements.in"), *sorted(Path("requirements").glob("*.in"))]:
        if source.stem == "common":
            continue
        row = next((row for row in ROWS if row.name == source.stem), None)
        python = str(row.python).removeprefix(">=") if row else "3.11"
        target = str(source.with_suffix(".txt"))
        how = "--universal --generate-hashes --no-emit-index-url --no-emit-find-links --upgrade".split()
        files = ["--python-version", python, str(source), "-o", target]
        command = [sys.executable, "-m", "uv", "pip", "compile", "-q", *how, *files]
        before = rows.pins(Path(target))
        session.run(*command, external=True)
        after = rows.pins(Path(target))
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                session.log(f"{target}: {name} {before.get(name, 'new')} -> {after.get(name, 'gone')}")


@nox.session(python=PYTHON[CURRENT])
def lint(session: nox.Session) -> None:
    """Check format and style; `-- --fix` mends what it can."""
    session.install("--require-hashes", "-r", "requirements/tests.txt")
    fix = "--fix" in session.posargs
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
