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
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from harness import kernels
from harness.contract import Recipe, RecipeError
from harness.rows import ROOT, Row

EXECUTED = ROOT / "build" / "executed"
CELL_SECONDS = 120  # a cell that runs longer is stopped and named
COMPILED = ROOT / "build" / "compiled"  # by XLA, for each jax: an edited recipe compiles only what is new
EXECUTOR = [
    Path(__file__),
    ROOT / "harness" / "contract.py",
    ROOT / "harness" / "kernels.py",
]  # a change of these executes everything again

# Run in the kernel before the first cell. Warnings that a reader's code would cause are errors; plots are SVG whose
# text is text and whose bytes repeat.
SETUP = """
import warnings
get_ipython().InteractiveTB.set_mode("Plain")
warnings.filterwarnings("error", module=r"(flax|jax|jaxlib|optax|__main__)(\\.|$)")
warnings.filterwarnings("ignore", message=".*persistent compilation cache.*")  # a damaged entry is compiled again
get_ipython().run_line_magic("config", "InlineBackend.figure_formats = ['svg']")
get_ipython().run_line_magic("config", "InlineBackend.rc = " + repr({
    "figure.figsize": (6.4, 3.6), "figure.facecolor": "none", "axes.facecolor": "none",
    "savefig.facecolor": "none", "svg.fonttype": "none", "svg.hashsalt": "nnx",
}))
"""


class ExecutedError(Exception):
    """An executed notebook cannot be used: it is corrupt or was changed by hand."""


class NotExecutedError(ExecutedError):
    """There is no executed notebook of these sources: none at all, or one of an older recipe, lock or executor."""


@cache
def environment() -> dict[str, str]:
    """The installed packages and their versions, by name."""
    found = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    return dict(sorted(found.items()))


def check_environment(row: Row) -> None:
    """Raises RecipeError where the installed Flax or jax is not the row's."""
    for package, wanted in (("flax", row.flax), ("jax", row.jax)):
        if (found := importlib.metadata.version(package)) != str(wanted):
            do = f'run `nox -s "recipes({row.name})"`, which installs {row.lock.name}'
            raise RecipeError("(all)", f"{package} {wanted}", f"{package} {found}", do, row=row.name)


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
    path.unlink(missing_ok=True)  # nothing stale is left if this run fails
    notebook = run(recipe, row)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    nbformat.write(notebook, partial)
    os.replace(partial, path)
    return notebook


def run(recipe: Recipe, row: Row, seconds: float = CELL_SECONDS) -> NotebookNode:
    """Execute a recipe, cell by cell, and check each cell against its contract.

    `seconds` is the time limit of one cell. Returns the executed notebook. Raises RecipeError at the first cell that
    did not do what it declares, wrote to stderr, hung, or killed its kernel.
    """
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
                for index, cell in enumerate(notebook.cells):
                    if cell.cell_type == "code":
                        began = time.perf_counter()
                        _execute_cell(client, recipe, row, index, cell, seconds)
                        timings[recipe.cell(index)] = round(time.perf_counter() - began, 2)
                notebook.cells.append(probe)
                client.execute_cell(probe, len(notebook.cells) - 1, store_history=False)
                notebook.cells.pop()
        finally:
            if client.km and client.km.has_kernel:
                client.km.shutdown_kernel(now=True)
    devices = "".join(output.get("text", "") for output in probe.outputs).strip()
    if devices != str(recipe.devices):
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
        **sources(recipe, row),
    }
    return notebook


def _execute_cell(client, recipe: Recipe, row: Row, index: int, cell: NotebookNode, seconds: float) -> None:
    """Execute one code cell and check it; its outputs are cleaned in place."""
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
    error = next((o for o in cell.outputs if o.output_type == "error"), None)
    recipe.check(index, row, (error.ename, error.evalue) if error else None)
    for output in cell.outputs:
        if output.get("name") == "stderr":
            do = "mend what it warns of; a progress bar goes to sys.stdout"
            raise RecipeError(recipe.name, "nothing on stderr", output.text.strip()[:500], do, **place)


def kernel_environment(row: Row) -> dict[str, str]:
    """The caller's environment without its settings of JAX and Flax, and with the row's own."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "FLAX_", "NNX_", "PYTEST_"))
    }
    fixed = {
        "JAX_PLATFORMS": "cpu",
        # Machine code is made without LLVM's optimizations, in half the time. The HLO, which pages show, is the same.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(COMPILED / str(row.jax)),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONHASHSEED": "0",
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
