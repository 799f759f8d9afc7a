"""Every recipe under the row whose environment this is: executed, and held to its contract."""

import pytest

from harness import contract, execute, rows


@pytest.fixture(scope="session")
def row(request):
    """The row named by `--row`, whose Flax and jax are installed here."""
    name = request.config.getoption("--row")
    found = next((row for row in rows.load() if row.name == name), None)
    if found is None:
        pytest.fail(f"--row={name}: no such row; run `nox -s recipes`, which gives it")
    execute.check_environment(found)
    return found


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
