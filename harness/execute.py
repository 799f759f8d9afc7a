"""Execute a recipe in the current environment, hold it to its contract, and keep what it did.

The executed notebook is written to `build/executed/ROW/NAME.ipynb` with the digests of what it came from. It is used
again only while the recipe, the row's lock, the installed versions, the Python and the executor itself are unchanged.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import tempfile
import time
from datetime import UTC, date, datetime, timedelta
from functools import cache
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from harness import files, kernels
from harness.contract import Recipe, RecipeError
from harness.rows import ROOT, Row, pins

EXECUTED = ROOT / "build" / "executed"
CELL_SECONDS = 120  # a cell that runs longer is stopped and named
COMPILED = ROOT / "build" / "compiled"  # by XLA, for each jax: an edited recipe compiles only what is new
EXECUTOR = [
    Path(__file__),
    ROOT / "harness" / "contract.py",
    ROOT / "harness" / "kernels.py",
]  # a change of these executes everything again
CHANGELOG = ROOT / "CHANGELOG.md"

# Run in the kernel before the first cell. Warnings that a reader's code would cause are errors; no socket of the
# kernel reaches another machine (what a cell starts as a process is not watched); plots are SVG whose text is text and whose bytes repeat. It leaves no name behind that a cell could use.
SETUP = """
def _setup(shell):
    import sys
    import warnings

    def local_only(event, arguments):
        if event in ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"):
            address = arguments if event.startswith("socket.get") else arguments[-1]
            host = address[0] if isinstance(address, tuple) else "localhost"
            if host not in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::", None):
                raise ConnectionError(f"a recipe reaches no other machine; this one tried {host}")

    sys.addaudithook(local_only)
    shell.InteractiveTB.set_mode("Plain")
    warnings.filterwarnings("error", module=r"(flax|jax|jaxlib|optax|__main__)(\\.|$)")
    warnings.filterwarnings("ignore", message=".*persistent compilation cache.*")  # a damaged entry is compiled again
    shell.run_line_magic("config", "InlineBackend.figure_formats = ['svg']")
    shell.run_line_magic("config", "InlineBackend.rc = " + repr({
        "figure.figsize": (6.4, 3.6), "figure.facecolor": "none", "axes.facecolor": "none",
        "savefig.facecolor": "none", "svg.fonttype": "none", "svg.hashsalt": "nnx",
    }))

_setup(get_ipython())
del _setup
"""


class ExecutedError(Exception):
    """An executed notebook cannot be used: it is corrupt or was changed by hand."""


class NotExecutedError(ExecutedError):
    """There is no executed notebook of these sources: none at all, or one of an older recipe, lock or executor."""


@cache
def environment() -> dict[str, str]:
    """The installed packages and their versions, by name."""
    found: dict[str, str] = {}
    for package in importlib.metadata.distributions():  # the first on the path is the one that is imported
        if name := package.metadata.get("Name"):  # none in what an interrupted install left
            found.setdefault(name.lower(), package.version)
    return dict(sorted(found.items()))


def check_environment(row: Row) -> None:
    """Raises RecipeError where what is installed is not what the row's lock pins, package by package."""
    installed = {re.sub(r"[-_.]+", "-", name): version for name, version in environment().items()}
    pinned = {**pins(row.lock, here=True), "flax": str(row.flax), "jax": str(row.jax)}
    for package, wanted in pinned.items():
        if (found := installed.get(re.sub(r"[-_.]+", "-", package.lower()), "not installed")) != wanted:
            do = f'run `nox -s "recipes({row.name})"`, which installs {row.lock.name}'
            raise RecipeError("(all)", f"{package} {wanted}", f"{package} {found}", do, row=row.name)


def check_clock() -> None:
    """Raises RecipeError where the clock is behind the newest date in CHANGELOG.md by more than a time zone.

    Pages say when they were executed. A time that SOURCE_DATE_EPOCH fixes is taken as it is.
    """
    dates = re.findall(r"^## (\d{4}-\d\d-\d\d)$", CHANGELOG.read_text(encoding="utf-8"), re.MULTILINE)
    newest = max(map(date.fromisoformat, dates), default=date.min)
    today = _now().date()
    if "SOURCE_DATE_EPOCH" not in os.environ and today < newest - timedelta(days=1):
        expected = f"a clock at {newest} or later, the newest date in {CHANGELOG.name}"
        raise RecipeError("(all)", expected, str(today), "set the clock: pages say when they were executed")


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def sources(recipe: Recipe, row: Row) -> dict[str, str]:
    """The digests of what an executed notebook comes from: the recipe, the row's files, the executor."""
    return {
        "source": _digest(recipe.source.encode()),
        "lock": _digest(row.lock.read_bytes(), repr((row.flax, row.jax, sorted(row.env.items()))).encode()),
        "executor": _digest(*(path.read_bytes() for path in EXECUTOR)),
    }


def content(notebook: NotebookNode) -> str:
    """The digest of an executed notebook's cells, so that an output changed by hand is noticed."""
    return _digest(json.dumps(notebook.cells, sort_keys=True).encode())


def path_of(recipe: Recipe, row: Row, folder: Path = EXECUTED) -> Path:
    """Where the executed notebook of a recipe under a row is kept."""
    return folder / row.name / f"{recipe.name}.ipynb"


def load(recipe: Recipe, row: Row, folder: Path = EXECUTED) -> NotebookNode:
    """The executed notebook of `recipe` under `row`.

    Raises NotExecutedError where there is none of these sources, ExecutedError where it is corrupt or was changed.
    """
    path = path_of(recipe, row, folder)
    where, again = f"recipe {recipe.name}, row {row.name}", f'run `nox -s "recipes({row.name})"`'
    if not path.exists():
        raise NotExecutedError(f"{where}: not executed; {again}")
    try:
        notebook = nbformat.read(path, as_version=4)
        record = notebook.metadata["executed"]
        kept = record["content"]
    except Exception as error:  # any damage at all
        raise ExecutedError(f"{where}: {path.name} is corrupt ({type(error).__name__}); {again}") from None
    if kept != content(notebook):
        raise ExecutedError(f"{where}: the outputs in {path.name} are not those of the run; {again}")
    if changed := [name for name, digest in sources(recipe, row).items() if record.get(name) != digest]:
        raise NotExecutedError(f"{where}: executed from another {' and '.join(changed)}; {again}")
    return notebook


def executed(recipe: Recipe, row: Row, folder: Path = EXECUTED) -> NotebookNode:
    """The executed notebook, run again only if anything it depends on has changed. Raises RecipeError."""
    try:
        notebook = load(recipe, row, folder)
        record = notebook.metadata["executed"]
        if record["versions"] == environment() and record["python"] == platform.python_version():
            return notebook
    except ExecutedError:
        pass
    path = path_of(recipe, row, folder)
    try:
        path.unlink(missing_ok=True)  # nothing stale is left if this run fails
        notebook = run(recipe, row)
        files.write(path, nbformat.writes(notebook) + "\n")
    except OSError as error:
        do = "make room on the disk, or make the folder writable; then run it again"
        raise RecipeError(
            recipe.name, f"to write {path.parent.name}/{path.name}", str(error), do, row=row.name
        ) from None
    return notebook


def run(recipe: Recipe, row: Row, seconds: float = CELL_SECONDS, held: bool = True) -> NotebookNode:
    """Execute a recipe, cell by cell, and check each cell against its contract.

    `seconds` is the time limit of one cell. Returns the executed notebook. Raises RecipeError at the first cell that
    did not do what it declares, wrote to stderr, hung, or killed its kernel. With `held` false no cell is held to what
    it declares: what each did is in the notebook, and only a cell that hung or killed its kernel raises.
    """
    check_clock()
    made_from = sources(recipe, row)
    notebook = nbformat.from_dict(json.loads(json.dumps(recipe.notebook)))
    setup = nbformat.v4.new_code_cell(SETUP)
    probe = nbformat.v4.new_code_cell("import jax\nprint(jax.device_count())")
    timings = {}
    with tempfile.TemporaryDirectory(prefix="nnx-", dir="/tmp" if os.path.isdir("/tmp") else None) as scratch:
        client = NotebookClient(
            notebook,
            timeout=seconds,
            allow_errors=True,
            store_widget_state=False,
            shutdown_kernel="immediate",  # nothing in it is left to save
            resources={"metadata": {"path": scratch}},
        )
        client.km = client.create_kernel_manager()
        if forked := kernels.command(kernel_environment(row)):
            client.km._kernel_spec = KernelSpec(argv=forked, display_name="Python 3", language="python")
        if os.name == "posix":  # quiet, and no port is opened; the path must be absolute and short
            client.km.transport, client.km.ip = "ipc", f"{scratch}/k"
        try:
            with client.setup_kernel(env=kernel_environment(row)):
                notebook.cells.append(
                    setup
                )  # nbclient stores outputs by index, so hidden cells stand at the end
                client.execute_cell(setup, len(notebook.cells) - 1, store_history=False)
                notebook.cells.pop()
                if failed := raised(setup):
                    do = "mend SETUP in harness/execute.py"
                    raise RecipeError(
                        recipe.name, "the kernel to be set up", ": ".join(failed), do, row=row.name
                    )
                for index, cell in enumerate(notebook.cells):
                    if cell.cell_type == "code":
                        began = time.perf_counter()
                        _execute_cell(client, recipe, row, index, cell, seconds)
                        if held:
                            _check_cell(recipe, row, index, cell)
                        timings[recipe.cell(index)] = round(time.perf_counter() - began, 2)
                notebook.cells.append(probe)
                client.execute_cell(probe, len(notebook.cells) - 1, store_history=False)
                notebook.cells.pop()
        finally:
            if client.km and client.km.has_kernel:
                client.km.shutdown_kernel(now=True)
    devices = "".join(output.get("text", "") for output in probe.outputs).strip()
    if held and devices != str(recipe.devices):
        do = "declare `devices` in the header's `needs`, or set jax_num_cpu_devices in the first cell"
        raise RecipeError(recipe.name, f"{recipe.devices} device(s)", devices, do, "header", row.name)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    notebook.metadata["executed"] = {
        "row": row.name,
        "date": _now().date().isoformat(),
        "python": platform.python_version(),
        "versions": environment(),
        "seconds": timings,
        "content": content(notebook),
        **made_from,
    }
    if made_from != sources(recipe, row):
        do = "run it again: what it is made from was changed meanwhile"
        expected = "the row's lock and the executor to stay as they are"
        raise RecipeError(recipe.name, expected, "others", do, row=row.name)
    return notebook


def _execute_cell(client, recipe: Recipe, row: Row, index: int, cell: NotebookNode, seconds: float) -> None:
    """Execute one code cell; its outputs are cleaned in place."""
    place = {"cell": recipe.cell(index), "row": row.name}
    ends = f"the cell to end within {seconds:g} s"
    try:
        client.execute_cell(cell, index)
    except CellTimeoutError:
        do = "make the cell smaller, or look for a loop that does not end"
        raise RecipeError(recipe.name, ends, "it was still running and was stopped", do, **place) from None
    except DeadKernelError:
        do = "run the recipe in `nox -s lab` and look for a crash or for too much memory"
        raise RecipeError(recipe.name, ends, "its kernel died", do, **place) from None
    cell.outputs = [_clean(output) for output in _joined(cell.outputs)]
    cell.execution_count = None
    for output in cell.outputs:
        if "execution_count" in output:
            output.execution_count = None


def raised(cell: NotebookNode) -> tuple[str, str] | None:
    """The class and the message of what an executed cell raised, or None."""
    error = next((output for output in cell.get("outputs", []) if output.output_type == "error"), None)
    return (error.ename, error.evalue) if error else None


def _check_cell(recipe: Recipe, row: Row, index: int, cell: NotebookNode) -> None:
    """Hold an executed cell to what it declares, and to silence on stderr. Raises RecipeError."""
    recipe.check(index, row, raised(cell))
    for output in cell.outputs:
        if output.get("name") == "stderr":
            do = "mend what it warns of; a progress bar goes to sys.stdout"
            came = output.text.strip()[:500]
            raise RecipeError(
                recipe.name, "nothing on stderr", came, do, cell=recipe.cell(index), row=row.name
            )


def kernel_environment(row: Row) -> dict[str, str]:
    """The caller's environment without its settings of JAX and Flax, and with the row's own."""
    left_out = ("JAX_", "XLA_", "FLAX_", "NNX_", "PYTEST_", "PYTHON", "IPYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    fixed = {
        "JAX_PLATFORMS": "cpu",
        # Machine code is made without LLVM's optimizations, in half the time. The HLO, which pages show, is the same.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(COMPILED / str(row.jax)),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONHASHSEED": "0",
        "IPYTHONDIR": str(ROOT / "build" / "ipython"),  # not the user's, whose start-up files would run
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # the debugger that comes with a kernel has nothing to say
        "SOURCE_DATE_EPOCH": "0",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }
    return kept | fixed | row.env


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Outputs with the pieces of one stream put together: how they were cut is chance."""
    joined = []
    for output in outputs:
        last = joined[-1] if joined else {}
        if output.output_type == "stream" and last.get("name") == output.name:
            last["text"] += output.text
        else:
            joined.append(output)
    return joined


def _clean(output: NotebookNode) -> NotebookNode:
    """Take out of an output what is of this machine and not of the run: colours, paths, addresses, `\\r` of bars."""
    if output.output_type == "stream":
        output.text = _plain(output.text)
    elif output.output_type == "error":
        output.evalue = _plain(output.evalue)
        output.traceback = [_plain(line) for line in output.traceback]
    else:
        for kind, value in output.data.items():
            if kind.startswith("text/") and isinstance(value, str):
                output.data[kind] = _plain(value)
        output.metadata = NotebookNode()
    return output


def _plain(text: str) -> str:
    """Text without ANSI codes, memory addresses, folders of this machine, and overwritten progress lines."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    text = re.sub(r"\b0x[0-9a-f]{6,}\b", "0x...", text)
    text = re.sub(r"\bid=\d{6,}", "id=...", text)
    text = re.sub(r"[^\s\"']*/ipykernel_\d+/\d+\.py", "<cell>", text)
    text = re.sub(r"[^\s\"']*/site-packages/", "site-packages/", text)
    text = re.sub(r"[^\s\"']*/lib/python3", "lib/python3", text)
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


def _now() -> datetime:
    """Now, or the time that SOURCE_DATE_EPOCH fixes."""
    return datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())), UTC)
