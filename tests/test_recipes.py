"""Every recipe under the row whose environment this is: executed, and held to its contract."""

import pytest

from harness import contract, execute


@pytest.mark.parametrize("name", contract.names())
def test_recipe(name, row):
    recipe = contract.read(contract.RECIPES / f"{name}.py")
    if not recipe.needs.holds(row):
        pytest.skip(
            f"not applicable: {name} needs {recipe.needs}, row {row.name} has Flax {row.flax}, jax {row.jax}"
        )
    try:
        execute.executed(recipe, row)
    except contract.RecipeError as error:
        pytest.fail(str(error), pytrace=False)  # the message says it all
