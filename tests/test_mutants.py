"""Mutants of the recipes: each mistake of `mutants.py`, put into a recipe and run, must be caught by the recipe.

Without `--mutants=all` a sample runs. Where one survives, its recipe needs a better proof.
"""

import re
from collections import Counter
from functools import cache

import jupytext
import pytest

from harness import contract, execute, rows
from tests import mutants

RECIPES = [contract.read(contract.RECIPES / f"{name}.py") for name in contract.names()]
MUTANTS = {mutant.name: (mutant, recipe) for recipe in RECIPES for mutant in mutants.of(recipe)}
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


RUN: set[str] = set()  # recipes of which it is known


def check_as_it_stands(recipe, row):
    """Without a mistake the recipe runs. If it did not, every mutant of it would be caught, and prove nothing."""
    if recipe.name not in RUN:
        try:
            execute.load(recipe, row)
        except execute.ExecutedError:
            execute.run(recipe, row)
        RUN.add(recipe.name)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_caught(name, request, tmp_path):
    if request.config.getoption("--mutants") != "all" and list(MUTANTS).index(name) % SAMPLE:
        pytest.skip("not in the sample")
    (mutant, recipe), row = MUTANTS[name], newest()
    if not recipe.needs.holds(row):
        pytest.skip(f"{recipe.name} does not apply to {row.name}")
    check_as_it_stands(recipe, row)
    path = tmp_path / f"{recipe.name}.py"
    path.write_text(mutant.source, encoding="utf-8")
    try:
        execute.run(contract.read(path), row, seconds=60)
    except contract.RecipeError as error:
        caught = str(error)
    else:
        caught = ""
    mutants.record(mutant, row.name, caught)
    assert not re.search(r"came: +(NameError|UnboundLocalError|\w*SyntaxError|IndentationError)", caught), (
        f"{name}: the edit makes a text that cannot run, which proves nothing; correct it.\n{caught}"
    )
    assert not re.search(r"^recipe \(all\)|came: +(its kernel died|it was still running)", caught), (
        f"{name}: the machine ended it, not a proof.\n{caught}"
    )
    if not caught:
        pytest.fail(
            f"survives under {row.name}: {name}. Give the recipe a proof that fails here.", pytrace=False
        )


def test_there_are_enough_mutants_and_no_edit_of_an_absent_recipe():
    assert len(MUTANTS) >= 120
    counts = Counter(mutant.recipe for mutant, _ in MUTANTS.values())
    assert not [recipe for recipe in contract.names() if counts[recipe] < 2], "two mistakes in every recipe"
    assert set(mutants.OWN) | {name for name, _ in mutants.SAME} <= set(contract.names())


# What a recipe declares, changed: no run is needed, since the executed notebooks say what happened.


@cache
def endings():
    """Each raising cell in each row shown: recipe, cell, row, and the class and message that it raised, or None."""
    from tests.site import shown  # a row's own packages, with which mutants run, cannot read a site

    found = []
    for recipe in RECIPES:
        for row in shown(recipe):
            notebook = execute.load(recipe, row)
            for index in recipe.raises:
                error = next((o for o in notebook.cells[index].outputs if o.output_type == "error"), None)
                found.append((recipe, index, row, (error.ename, error.evalue) if error else None))
    assert found, "no row is shown: the session that builds the site says which"
    return found


def caught(recipe, index, row, raised, entries) -> bool:
    """Whether the contract refuses what happened, if the cell declares `entries`."""
    fields = {name: getattr(recipe, name) for name in recipe.__dataclass_fields__}
    changed = contract.Recipe(**{**fields, "raises": {**recipe.raises, index: tuple(entries)}})
    try:
        changed.check(index, row, raised)
    except contract.RecipeError:
        return True
    return False


CHANGES = {
    "another class": lambda entry: [contract.Raises("KeyError", entry.match, entry.where)],
    "another message": lambda entry: [contract.Raises(entry.error, "no such words", entry.where)],
    "a range without this row": lambda entry: [],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_wrong_declaration_is_caught(change):
    survived = []
    for recipe, index, row, raised in endings():
        if raised is None or raised[0] == "KeyError":
            continue
        entry = recipe.expected(index, row)
        others = [other for other in recipe.raises[index] if other is not entry]
        assert not caught(recipe, index, row, raised, recipe.raises[index]), "as it stands, it holds"
        if not caught(recipe, index, row, raised, [*CHANGES[change](entry), *others]):
            survived.append(f"{recipe.name}, {recipe.cell(index)}, {row.name}: {entry}")
    assert not survived


def test_a_wider_range_is_caught():
    """A cell that ends in several ways: what one row raises, declared for every row, is caught in another."""
    survived, tried = [], 0
    for recipe, index, row, raised in endings():
        entry = recipe.expected(index, row)
        ends = [(other, end) for r, i, other, end in endings() if r is recipe and i == index]
        if raised is None or all(recipe.expected(index, other) is entry for other, _ in ends):
            continue
        tried += 1
        wide = [contract.Raises(entry.error, entry.match, contract.Where())]
        if not any(caught(recipe, index, other, end, wide) for other, end in ends):
            survived.append(f"{recipe.name}, {recipe.cell(index)}: {entry}")
    assert tried and not survived


def test_a_recipe_without_its_proofs_is_refused(tmp_path):
    for recipe in RECIPES:
        path = tmp_path / f"{recipe.name}.py"
        path.write_text(
            recipe.source.replace(', "proof"', "").replace('"proof", ', "").replace('tags=["proof"]', ""),
            encoding="utf-8",
        )
        with pytest.raises(contract.RecipeError, match="tagged `proof`"):
            contract.read(path)


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
