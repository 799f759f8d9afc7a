"""The inputs of public reports under this row: each is run, and what it raises is kept for the test of the paste box.

`build/tracebacks/ROW/CASE.txt` holds the traceback of a case that raises. A case that runs through leaves none.
"""

import shutil
import traceback
import warnings

import jax
import pytest

from harness import rows

CASES = sorted((rows.ROOT / "tests" / "reports").glob("*.py"))
TRACEBACKS = rows.ROOT / "build" / "tracebacks"


@pytest.mark.filterwarnings("ignore")
def test_tracebacks_of_the_reports(row):
    jax.config.update("jax_num_cpu_devices", 8)
    folder = TRACEBACKS / row.name
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
