"""Options and fixtures that several tests share."""

import nbformat
import pytest

from harness import execute, rows
from tests import mutants


def pytest_addoption(parser):
    parser.addoption("--row", help="the row whose environment this is, for example 0.12.2")
    parser.addoption("--differs-from", help="only recipes whose outcome is another than under this row")
    parser.addoption("--mutants", choices=["sample", "all"], default="sample", help="how many mutants run")


@pytest.fixture(scope="session")
def row(request):
    """The row named by `--row`, whose Flax and jax are installed here."""
    name = request.config.getoption("--row")
    found = next((row for row in rows.load() if row.name == name), None)
    if found is None:
        pytest.fail(f"--row={name}: no such row; run `nox -s recipes`, which gives it")
    execute.check_environment(found)
    return found


def pytest_terminal_summary(terminalreporter, config):
    """The mutants that survive; the ten slowest cells of the recipes that this row has executed, in seconds."""
    if config.getoption("--mutants") == "all":  # no worker of xdist comes here: it is written once
        path, survivors = mutants.report()
        terminalreporter.section(f"{len(survivors)} mutants survive; all: {path.relative_to(rows.ROOT)}")
        for survivor in survivors:
            terminalreporter.line(survivor)
    name = config.getoption("--row")
    cells = []
    for path in (execute.EXECUTED / str(name)).glob("*.ipynb"):
        try:
            recorded = nbformat.read(path, as_version=4).metadata["executed"]["seconds"]
        except Exception:  # any damage at all: who uses the notebook says so
            continue
        cells += [(seconds, path.stem, cell) for cell, seconds in recorded.items()]
    if cells:
        terminalreporter.section(f"slowest cells recorded under row {name}, in this run or an earlier one")
        for seconds, recipe, cell in sorted(cells, reverse=True)[:10]:
            terminalreporter.line(f"{seconds:6.1f} s  {recipe}, {cell}")
