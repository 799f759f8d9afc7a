"""Forked kernels: as fresh as a new process, and gone when their run is."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from harness import execute, kernels
from tests.test_execute import row, toy


def printed(notebook):
    return [o.text for cell in notebook.cells for o in cell.get("outputs", []) if o.output_type == "stream"]


def test_a_kernel_knows_nothing_of_the_one_before(tmp_path, row):
    dirty = "# %%\nimport os, sys, jax\nos.environ['LEFT'] = sys.left = 'x'\njax.config.update('jax_enable_x64', True)\n"
    execute.run(toy(tmp_path, dirty), row)
    clean = "# %%\nimport os, sys, jax\nprint(os.environ.get('LEFT'), hasattr(sys, 'left'), jax.numpy.ones(1).dtype)\n"
    assert printed(execute.run(toy(tmp_path, clean), row)) == ["None False float32\n"]


def test_a_kernel_has_its_rows_environment_and_a_folder_of_its_own(tmp_path, row):
    row = replace(row, env={"NNX_SITE_TEST": "1"})
    cell = "# %%\nimport os, __main__\nprint(os.environ['NNX_SITE_TEST'], os.listdir('.'), __main__.__name__, 'harness' in globals())\n"
    (line,) = printed(execute.run(toy(tmp_path, cell), row))
    assert line.startswith("1 [") and line.endswith("] __main__ False\n") and "toy" not in line


def test_no_kernel_outlives_its_run(tmp_path, row):
    cell = "# %%\nimport os\nprint(os.getpid())\n"
    (pid,) = map(int, printed(execute.run(toy(tmp_path, cell), row)))
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("the kernel still runs ten seconds after its notebook")


def test_the_interpreter_ends_with_the_process_that_started_it():
    code = "from harness import kernels\nprint(kernels.server(tuple(__import__('os').environ.items())))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    address = run.stdout.strip()
    for _ in range(100):
        if address not in subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True).stdout:
            return
        time.sleep(0.1)
    pytest.fail("the interpreter that kernels are forked from still runs")


def test_an_interpreter_that_does_not_start_is_said(monkeypatch):
    monkeypatch.setattr(kernels, "__file__", "no/such/file.py")
    with pytest.raises(RuntimeError, match="the interpreter that kernels are forked from did not start"):
        kernels.server(())


def test_a_plot_is_kept_as_svg(tmp_path, row):
    cell = "# %%\nimport matplotlib.pyplot as plt\nfigure, axes = plt.subplots()\naxes.plot([1, 2])\nplt.show()\n"
    notebook = execute.run(toy(tmp_path, cell), row)
    assert [
        o for cell in notebook.cells for o in cell.get("outputs", []) if "image/svg+xml" in o.get("data", {})
    ]
