"""Mutants of the recipes: each mistake of `mutants.py`, put into a recipe and run, must be caught by the recipe.

Without `--mutants=all` a sample runs. Where one survives, its recipe needs a better proof.
"""

import json
import os

import jupytext
import pytest

from harness import contract, execute, rows
from tests import mutants

RECIPES = [contract.read(contract.RECIPES / f"{name}.py") for name in contract.names()]
MUTANTS = {mutant.name: mutant for recipe in RECIPES for mutant in mutants.of(recipe)}
CAUGHT = rows.ROOT / "build" / "mutants"
SAMPLE = 24  # every so-manieth mutant runs by default


def newest() -> rows.Row:
    """The newest row in graph mode whose packages are installed here."""
    for row in rows.load():
        if row.mode == "graph":
            try:
                execute.check_environment(row)
            except contract.RecipeError:
                continue
            return row
    pytest.fail("no row's packages are installed here; run `nox -s mutants`")


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(name, request, tmp_path):
    if request.config.getoption("--mutants") != "all" and list(MUTANTS).index(name) % SAMPLE:
        pytest.skip("not in the sample")
    mutant, row = MUTANTS[name], newest()
    path = tmp_path / f"{mutant.recipe}.py"
    path.write_text(mutant.source, encoding="utf-8")
    try:
        recipe = contract.read(path)
        if not recipe.needs.holds(row):
            pytest.skip(f"{mutant.recipe} does not apply to {row.name}")
        execute.run(recipe, row, seconds=60)
    except contract.RecipeError as error:
        CAUGHT.mkdir(parents=True, exist_ok=True)
        report = {"recipe": mutant.recipe, "mistake": mutant.mistake, "row": row.name, "caught": str(error)}
        (CAUGHT / f"{os.getpid()}-{abs(hash(name))}.json").write_text(json.dumps(report), encoding="utf-8")
        return
    pytest.fail(f"survives under {row.name}: {name}. Give the recipe a proof that fails here.", pytrace=False)


def test_there_are_enough_mutants_and_no_edit_of_an_absent_recipe():
    assert len(MUTANTS) >= 120
    assert set(mutants.OWN) | {name for name, _ in mutants.SAME} <= set(contract.names())


# What a recipe declares, changed: no run is needed, since the executed notebook says what happened.


def declared():
    return [
        (r, index, n) for r in RECIPES for index, entries in r.raises.items() for n in range(len(entries))
    ]


@pytest.mark.parametrize("change", ["another class", "another message", "nothing declared"])
def test_a_wrong_declaration_is_caught(change):
    survived = []
    for recipe, index, number in declared():
        entry = recipe.raises[index][number]
        row = next(
            (row for row in rows.load() if recipe.needs.holds(row) and recipe.expected(index, row) is entry),
            None,
        )
        if row is None:
            continue
        raised = (entry.error, f"... {entry.match} ..." if entry.match else "")
        recipe.check(index, row, raised)  # as it stands, it holds
        becomes = {
            "another class": [
                contract.Raises(
                    "KeyError" if entry.error != "KeyError" else "IndexError", entry.match, entry.where
                )
            ],
            "another message": [contract.Raises(entry.error, "no such words", entry.where)],
            "nothing declared": [],
        }[change]
        others = [other for other in recipe.raises[index] if other is not entry]
        changed = {**recipe.raises, index: tuple([*becomes, *others])}
        try:
            _with(recipe, changed).check(index, row, raised)
            survived.append(f"{recipe.name}, {recipe.cell(index)}, {entry}")
        except contract.RecipeError:
            pass
    assert not survived


def _with(recipe, raises):
    fields = {name: getattr(recipe, name) for name in recipe.__dataclass_fields__}
    return contract.Recipe(**{**fields, "raises": raises})


def test_a_recipe_without_its_proofs_is_refused(tmp_path):
    for recipe in RECIPES:
        path = tmp_path / f"{recipe.name}.py"
        path.write_text(
            recipe.source.replace('"proof"', '"outcome"').replace('tags=["outcome"]', ""), encoding="utf-8"
        )
        with pytest.raises(contract.RecipeError):
            contract.read(path)


def test_a_wider_and_a_narrower_range_are_caught():
    """A cell that raises in some rows only: declared for every row, or for none, it is caught in one of them."""
    survived = []
    every = rows.load()
    for recipe, index, number in declared():
        entry = recipe.raises[index][number]
        applies = [row for row in every if recipe.needs.holds(row)]
        ends = {row: recipe.expected(index, row) for row in applies}
        if all(ends.values()) or not any(end is entry for end in ends.values()):
            continue
        wide = contract.Raises(entry.error, entry.match, contract.Where())
        try:
            for row, end in ends.items():
                raised = (end.error, f"... {end.match} ..." if end.match else "") if end else None
                _with(recipe, {**recipe.raises, index: (wide,)}).check(index, row, raised)
            survived.append(f"{recipe.name}, {recipe.cell(index)}, {entry}")
        except contract.RecipeError:
            pass
    assert not survived


def test_output_typed_by_hand_is_refused(tmp_path):
    recipe = RECIPES[0]
    path = tmp_path / f"{recipe.name}.py"
    for typed in (
        "# ```\n# ValueError: nnx.fori_loop requires\n# ```",
        "#     loss 0.25",
        "# ValueError: it was typed by hand",
    ):
        path.write_text(f"{recipe.source}\n# %% [markdown]\n# It prints:\n#\n{typed}\n", encoding="utf-8")
        assert (
            jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent").cells[-1].cell_type
            == "markdown"
        )
        with pytest.raises(contract.RecipeError, match="typed"):
            contract.read(path)
