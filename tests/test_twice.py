"""Every recipe executed a second time under the row whose environment this is: the outputs must be the same."""

import pytest

from harness import contract, execute


@pytest.mark.parametrize("name", contract.names())
def test_executed_twice(name, row):
    recipe = contract.read(contract.RECIPES / f"{name}.py")
    if not recipe.needs.holds(row):
        pytest.skip(f"not applicable: {name} needs {recipe.needs}")
    first, second = execute.load(recipe, row), execute.run(recipe, row)
    differing = [
        recipe.cell(index)
        for index, (one, other) in enumerate(zip(first.cells, second.cells, strict=True))
        if one.get("outputs") != other.get("outputs")
    ]
    assert not differing, f"recipe {name}, row {row.name}: other outputs in a second run of {differing}"
