"""The inputs of public reports under this row: each is run, and what it raises is kept for the reports page and the paste box."""

import pytest

from harness import execute, reports


@pytest.mark.filterwarnings("ignore")
def test_inputs_of_the_reports(row, monkeypatch):
    for name, value in execute.kernel_environment(row).items():
        if name.startswith(("JAX_", "XLA_", "NNX_")):
            monkeypatch.setenv(name, value)  # and nothing that outlives this test, such as a date
    found = reports.run(row)
    assert any(found.values()), "no report raises under this row"
    assert reports.outcomes(row) == found
