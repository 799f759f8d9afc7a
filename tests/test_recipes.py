"""Every recipe under the row whose environment this is: executed, and held to its contract."""

import pytest

from harness import contract, execute, rows


@pytest.mark.parametrize("name", contract.names())
def test_recipe(name, row, request):
    try:
        recipe = contract.read(contract.RECIPES / f"{name}.py")
    except contract.RecipeError as error:
        pytest.fail(str(error), pytrace=False)
    if not recipe.needs.holds(row):
        pytest.skip(
            f"not applicable: {name} needs {recipe.needs}, row {row.name} has Flax {row.flax}, jax {row.jax}"
        )
    other = request.config.getoption("--differs-from")
    if other and not recipe.differs(row, next(r for r in rows.load() if r.name == other)):
        pytest.skip(f"{name} is declared to end alike under row {row.name} and row {other}")
    try:
        execute.executed(recipe, row)
    except contract.RecipeError as error:
        pytest.fail(str(error), pytrace=False)  # the message says it all
