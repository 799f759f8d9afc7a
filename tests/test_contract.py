"""The contract of a recipe: every way to break it is named with cell, expectation, finding and remedy."""

import pytest

from harness import contract, rows

ROW = {row.name: row for row in rows.load()}
HEADER = """# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: One sentence.
#     answers: [google/flax#5113]
#     needs: {flax: ">=0.11.2"}
# ---

"""
BODY = """# %% [markdown]
# # A title

# %% tags=["snippet"]
double = lambda x: 2 * x

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "this is no good", "flax": "<0.12.3", "mode": "graph"}]
fail()

# %% tags=["proof"]
assert double(2) == 4
"""


def read(tmp_path, text):
    """Read `text` as a recipe called `toy`."""
    path = tmp_path / "toy.py"
    path.write_text(text)
    return contract.read(path)


def test_a_sound_recipe(tmp_path):
    recipe = read(tmp_path, HEADER + BODY)
    assert (recipe.name, recipe.title, recipe.summary) == ("toy", "A title", "One sentence.")
    assert recipe.answers == ("google/flax#5113",)
    assert recipe.snippet == "double = lambda x: 2 * x\n"
    assert recipe.cell(2) == "cell 3 (line 19)"
    assert (HEADER + BODY).splitlines()[18].startswith('# %% tags=["raises-exception"]')


def test_every_recipe_of_the_site_is_sound():
    assert contract.names()
    for name in contract.names():
        contract.check_ranges(contract.read(contract.RECIPES / f"{name}.py"), list(ROW.values()))


BROKEN = {
    "no header": (BODY, "no header"),
    "not percent format": (HEADER + "print(1)\n", "no `# %%` cell"),
    "text before the first cell": (HEADER + "import os\n" + BODY, "stands before the first marker"),
    "header that is not YAML": (HEADER.replace("answers: [", "answers: [[") + BODY, "mend the header"),
    "no recipe in the header": (HEADER.replace("recipe:", "recipes:") + BODY, "`recipe:` under `jupyter:`"),
    "unknown header key": (HEADER.replace("answers", "answer") + BODY, "`answer`"),
    "no summary": (HEADER.replace("One sentence.", "") + BODY, "`summary`, one sentence"),
    "a report without its number": (HEADER.replace("#5113", "") + BODY, "owner/repository#number"),
    "needs that are not a mapping": (HEADER.replace('{flax: ">=0.11.2"}', "flax") + BODY, "expected: `needs`"),
    "unknown need": (HEADER.replace("flax:", "python:") + BODY, "`python`"),
    "a need that is no range": (HEADER.replace(">=0.11.2", "new") + BODY, "'new'"),
    "no title": (HEADER + BODY.replace("# # A title", "# A title"), "begins with `# Title`"),
    "no snippet": (HEADER + BODY.replace(' tags=["snippet"]', ""), "at least one code cell tagged `snippet`"),
    "no proof": (HEADER + BODY.replace(' tags=["proof"]', ""), "at least one code cell tagged `proof`"),
    "unknown cell key": (HEADER + BODY.replace("raises=[", "raise=["), "`raise`"),
    "unknown tag": (HEADER + BODY.replace('"proof"', '"prof"'), "`prof`"),
    "broken cell metadata": (HEADER + BODY.replace('"graph"}]', '"graph"'), "cell 3 (line 19)"),
    "raises without the tag": (HEADER + BODY.replace('tags=["raises-exception"] ', ""), "`raises` alone"),
    "the tag without raises": (HEADER + BODY.replace(' raises=[{"error": "ValueError", "match": "this is no good", "flax": "<0.12.3", "mode": "graph"}]', ""), "the tag alone"),
    "an entry without a match": (HEADER + BODY.replace('"match": "this is no good", ', ""), 'an entry with "error" and "match"'),
    "a match of few letters": (HEADER + BODY.replace("this is no good", "no good"), "a `match` of 8 letters or more"),
    "an entry without a class": (HEADER + BODY.replace('"ValueError"', '""'), 'an entry with "error" and "match"'),
    "unknown entry key": (HEADER + BODY.replace('"mode"', '"rows"'), "`rows`"),
    "unknown mode": (HEADER + BODY.replace('"graph"', '"default"'), "'default'"),
    "a range that is none": (HEADER + BODY.replace("<0.12.3", "old"), "'old'"),
    "a proof that raises": (HEADER + BODY.replace('"raises-exception"]', '"raises-exception", "proof"]'), "split the cell"),
    "an outcome that cannot differ": (HEADER + BODY.replace('"proof"]', '"proof", "outcome"]'), "remove the tag"),
    "code that is not Python": (HEADER + BODY.replace("fail()", "fail("), "was never closed"),
    "a tagged markdown cell": (HEADER + BODY.replace("[markdown]", '[markdown] tags=["proof"]'), "tags on code cells only"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_recipe_is_named_with_what_is_wrong(tmp_path, case):
    text, message = BROKEN[case]
    with pytest.raises(contract.RecipeError) as error:
        read(tmp_path, text)
    said = str(error.value)
    assert message in said
    assert said.startswith("recipe toy") and all(part in said for part in ("expected:", "came:", "do:"))


RAISED = ("ValueError", "and this is no good at all")


@pytest.mark.parametrize(
    ("row", "raised", "message"),
    [
        ("0.12.2", RAISED, None),
        ("0.12.12", None, None),
        ("0.12.2", None, "narrow the declared range (flax <0.12.3 and graph mode)"),
        ("0.12.12", RAISED, "for a range that holds 0.12.12"),
        ("0.12.12-tree", RAISED, "for a range that holds 0.12.12-tree"),
        ("0.12.2", ("TypeError", "no good"), "correct the class or the message fragment"),
        ("0.12.2", ("ValueError", "fine"), "correct the class or the message fragment"),
    ],
)
def test_what_a_cell_did_is_compared_both_ways(tmp_path, row, raised, message):
    recipe = read(tmp_path, HEADER + BODY)
    if message is None:
        recipe.check(2, ROW[row], raised)
        return
    with pytest.raises(contract.RecipeError) as error:
        recipe.check(2, ROW[row], raised)
    assert f"recipe toy, cell 3 (line 19), row {row}" in str(error.value)
    assert message in str(error.value)


def test_an_empty_match_is_an_empty_message_and_nothing_else(tmp_path):
    recipe = read(tmp_path, HEADER + BODY.replace('"this is no good"', '""'))
    recipe.check(2, ROW["0.12.2"], ("ValueError", ""))
    with pytest.raises(contract.RecipeError, match="expected: ValueError with an empty message"):
        recipe.check(2, ROW["0.12.2"], RAISED)


def test_a_range_that_holds_no_row_and_two_entries_in_one_row_are_refused(tmp_path):
    never = read(tmp_path, HEADER + BODY.replace("<0.12.3", "<0.11"))
    with pytest.raises(contract.RecipeError, match="which holds none"):
        contract.check_ranges(never, list(ROW.values()))
    second = '{"error": "TypeError", "match": "not at all", "flax": "<0.12.0"}, {"error": "ValueError"'
    twice = read(tmp_path, HEADER + BODY.replace('{"error": "ValueError"', second))
    with pytest.raises(contract.RecipeError, match="make the ranges of the entries disjoint"):
        contract.check_ranges(twice, list(ROW.values()))


def test_outside_the_needed_range_a_recipe_does_not_apply(tmp_path):
    recipe = read(tmp_path, HEADER.replace(">=0.11.2", ">=0.12.3") + BODY)
    assert recipe.needs.holds(ROW["0.12.8"]) and not recipe.needs.holds(ROW["0.12.2"])
    assert str(recipe.needs) == "flax >=0.12.3"
