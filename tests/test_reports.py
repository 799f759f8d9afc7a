"""The inputs of public reports under this row: each is run, and what it raises is kept for the test of the paste box.

`build/tracebacks/ROW/CASE.txt` holds the traceback of a case that raises. A case that runs through leaves none. They are
made again when a case, the row's lock or this file changes.
"""

import hashlib
import shutil
import traceback
import warnings
from pathlib import Path

import pytest

from harness import execute, rows

CASES = sorted((rows.ROOT / "tests" / "reports").glob("*.py"))
TRACEBACKS = rows.ROOT / "build" / "tracebacks"


@pytest.mark.filterwarnings("ignore")
def test_tracebacks_of_the_reports(row, monkeypatch):
    folder = TRACEBACKS / row.name
    sources = [Path(__file__), row.lock, *CASES]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    stamp = folder / "made-from"
    if stamp.exists() and stamp.read_text() == digest:
        return
    for name, value in execute._kernel_environment(row).items():
        if name.startswith(("JAX_", "XLA_", "NNX_")):
            monkeypatch.setenv(name, value)  # and nothing that outlives this test, such as a date
    import jax  # here, since an unchanged row needs no JAX

    jax.config.update("jax_num_cpu_devices", 8)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    raised = 0
    for path in CASES:
        try:
            with warnings.catch_warnings():
                exec(compile(path.read_text(), path.name, "exec"), {"__name__": "__main__"})
        except SystemExit:
            pass  # the case says that it does not apply
        except Exception:
            (folder / f"{path.stem}.txt").write_text(traceback.format_exc())
            raised += 1
    assert raised, "no report raises under this row: the cases were not run"
    stamp.write_text(digest)
