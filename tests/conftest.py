"""Options and fixtures that several tests share."""

import pytest

from harness import execute, rows


def pytest_addoption(parser):
    parser.addoption("--row", help="the row whose environment this is, for example 0.12.2")
    parser.addoption("--differs-from", help="only recipes whose outcome is another than under this row")


@pytest.fixture(scope="session")
def row(request):
    """The row named by `--row`, whose Flax and jax are installed here."""
    name = request.config.getoption("--row")
    found = next((row for row in rows.load() if row.name == name), None)
    if found is None:
        pytest.fail(f"--row={name}: no such row; run `nox -s recipes`, which gives it")
    execute.check_environment(found)
    return found
