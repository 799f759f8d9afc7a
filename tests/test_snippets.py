"""Each snippet alone: what the copy button gives runs in a fresh interpreter of the current environment."""

import importlib.metadata
import subprocess
import sys

import pytest

from harness import contract, execute, rows

CURRENT = next(row for row in rows.load() if str(row.flax) == importlib.metadata.version("flax"))


@pytest.mark.parametrize("name", contract.names())
def test_snippet_runs_alone(name, tmp_path):
    recipe = contract.read(contract.RECIPES / f"{name}.py")
    if not recipe.needs.holds(CURRENT):
        pytest.skip(f"not applicable: {name} needs {recipe.needs}, here is row {CURRENT.name}")
    (tmp_path / "snippet.py").write_text(recipe.snippet)
    run = subprocess.run(
        [sys.executable, "-I", "-W", "error", "snippet.py"],
        cwd=tmp_path,
        env=execute.kernel_environment(CURRENT),
        capture_output=True,
        text=True,
        timeout=execute.CELL_SECONDS,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout + run.stderr == ""
