"""Merging: what differs between rows stands in tabs, what agrees stands once, and a row's outcome is what sets it apart."""

import nbformat
import pytest

from harness import contract, execute, merge, origin, outcomes, pages, rows

ROWS = {row.name: row for row in rows.load()}
NEW, OLD, TREE = ROWS["0.12.12"], ROWS["0.12.2"], ROWS["0.12.12-tree"]
SOURCE = """# ---
# jupyter:
#   recipe:
#     summary: One "quoted" sentence.
#     needs: {flax: ">=0.12.0"}
# ---

# %% [markdown]
# # Toy
#
# The answer.
#
# ## Do this

# %% tags=["snippet"]
x = 1

# %% tags=["raises-exception"] raises=[{"error": "KeyError", "match": "always the same"}]
demonstrate()

# %% tags=["raises-exception", "outcome"] raises=[{"error": "ValueError", "match": "in old releases", "flax": "<0.12.3"}]
work()

# %% tags=["proof"]
assert x
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "toy.py").write_text(SOURCE)
    return contract.read(tmp_path / "toy.py")


def stream(text):
    return nbformat.v4.new_output("stream", text=text)


def error(name, message):
    return nbformat.v4.new_output(
        "error",
        ename=name,
        evalue=message,
        traceback=["Traceback (most recent call last):", "", f"{name}: {message}"],
    )


def result(recipe, by_row):
    """A result whose executed cells have these outputs: row to (index to outputs)."""
    notebooks = {}
    for row, outputs in by_row.items():
        notebook = nbformat.from_dict(recipe.notebook)
        notebook = nbformat.reads(nbformat.writes(notebook), as_version=4)
        for index, value in outputs.items():
            notebook.cells[index].outputs = value
        notebook.metadata["executed"] = {"date": "2026-01-02", "python": "3.13.0"}
        notebooks[row] = notebook
    return outcomes.Result(recipe, notebooks, {row: outcomes._outcome(recipe, row) for row in by_row})


def page_of(found):
    return merge.page(found, origin.Origin(), "abc1234")


def test_output_that_agrees_stands_once_and_output_that_differs_in_tabs_newest_first(recipe):
    same, old = error("KeyError", "always"), error("ValueError", "old")
    page = page_of(result(recipe, {NEW: {2: [same], 3: [stream("printed\n")]}, OLD: {2: [same], 3: [old]}}))
    assert page.count("KeyError: always") == 2  # its message and its folded traceback, once for both rows
    assert "**Raises** `KeyError` on every release run here" in page
    assert "**Raises** `ValueError` on `0.12.2`" in page
    assert page.index(":sync: 0.12.12") < page.index("printed")
    assert page.index("printed") < page.index(":sync: 0.12.2\n") < page.index("ValueError: old")
    assert page.count("{tab-set}") == 1 and ":sync-group: flax" in page


def test_rows_with_equal_output_are_named_together(recipe):
    old = error("ValueError", "old")
    page = page_of(result(recipe, {NEW: {3: []}, OLD: {3: [old]}, ROWS["0.11.2"]: {3: [old]}}))
    assert "**Raises** `ValueError` on `0.12.2`, `0.11.2`" in page
    assert "Runs, and prints nothing." in page


def test_the_chips_stand_under_the_answer_and_before_the_first_section(recipe):
    page = page_of(result(recipe, {NEW: {}, OLD: {}}))
    assert page.index("The answer.") < page.index('<ul class="rows"') < page.index("## Do this")
    assert '<a href="?flax=0.12.2"><b>0.12.2</b> raises <code>ValueError</code></a>' in page
    assert '<a href="?flax=0.12.12"><b>0.12.12</b> works</a>' in page
    assert 'html_meta: {description: "One \\"quoted\\" sentence."}' in page


def test_a_fence_cannot_be_ended_by_what_it_holds(recipe):
    page = page_of(result(recipe, {NEW: {1: [stream("a ```` b")]}}))
    assert "`````{code-block} text\n:class: output\n\na ```` b\n`````" in page


def test_a_plot_follows_the_theme_and_its_ids_are_its_own(recipe):
    svg = '<?xml version="1.0"?>\n<svg width="1"><metadata>m</metadata><g id="a" style="fill: #000000"/><use xlink:href="#a"/></svg>'
    shown = nbformat.v4.new_output("display_data", data={"image/svg+xml": svg, "text/plain": "<Figure>"})
    page = page_of(result(recipe, {NEW: {1: [shown]}}))
    assert 'aria-label="Plot: Do this"' in page and "currentColor" in page and "<Figure>" not in page
    assert 'id="toy-1-0-a"' in page and 'href="#toy-1-0-a"' in page and "<metadata>" not in page


def test_an_outcome_is_that_of_the_cell_tagged_so(recipe):
    found = result(recipe, {NEW: {}, OLD: {}}).outcomes
    assert found == {NEW: outcomes.Outcome("works"), OLD: outcomes.Outcome("raises", "ValueError")}


def test_rows_outside_the_needed_range_and_rows_not_run_are_said(recipe, monkeypatch):
    sound = result(recipe, {NEW: {}}).notebooks[NEW]

    def load(recipe, row):
        if row is NEW:
            return sound
        raise execute.NotExecutedError(f"row {row.name}: not executed")

    monkeypatch.setattr(execute, "load", load)
    found = outcomes.gather(recipe, list(ROWS.values()), {"0.12.12"}, {"0.12.12-tree": "needs Python 3.12"})
    assert str(found.outcomes[ROWS["0.11.2"]]) == "not applicable"
    assert found.outcomes[ROWS["0.11.2"]].detail == "needs flax >=0.12.0"
    assert found.outcomes[TREE] == outcomes.Outcome("not run", "needs Python 3.12")
    assert "not applicable" in outcomes.chips(found)
    said = outcomes.verified(found, "abc1234")
    assert "Not run in this build: 0.12.12-tree, 0.12.8, 0.12.2." in said
    assert "from commit <code>abc1234</code>" in said
    assert "from a working copy" in outcomes.verified(found, "")
    with pytest.raises(execute.NotExecutedError, match="row 0.12.2: not executed"):
        outcomes.gather(recipe, list(ROWS.values()), {"0.12.2"}, {})


def test_a_recipe_that_no_row_executed_has_no_page(recipe, monkeypatch):
    def load(recipe, row):
        raise execute.NotExecutedError("none")

    monkeypatch.setattr(execute, "load", load)
    with pytest.raises(execute.NotExecutedError, match="not executed under any row"):
        outcomes.gather(recipe, list(ROWS.values()), set(), {})


def test_a_traceback_keeps_the_readers_frames_and_the_last_one():
    trace = """Traceback (most recent call last):

  File site-packages/jax/tree.py:1 in map
    tree_map(f)

ValueError: the first
of two lines


During handling of the above exception, another exception occurred:

Traceback (most recent call last):

  Cell In[5], line 5
    loop(body)

  File site-packages/flax/a.py:1 in a
    b()

  File site-packages/flax/b.py:2 in b
    c()

  File site-packages/flax/c.py:3 in c
    raise ValueError(msg)

ValueError: the second
and more"""
    assert merge.shortened(trace).splitlines() == [
        "ValueError: the first",
        "During handling of the above exception, another exception occurred:",
        "Traceback (most recent call last):",
        "  Cell In[5], line 5",
        "    loop(body)",
        "  ... 2 in libraries",
        "  File site-packages/flax/c.py:3 in c",
        "    raise ValueError(msg)",
        "ValueError: the second ...",
    ]


def test_an_output_on_a_page_of_prose_must_be_there(recipe):
    with pytest.raises(pages.PageError, match="docs/choose.md: `\\[output toy#do-that\\]` has no such"):
        pages._output("docs/choose", "toy#do-that", [result(recipe, {NEW: {1: [stream("4")]}})])
    shown = pages._output("docs/choose", "toy#do-this", [result(recipe, {NEW: {1: [stream("4")]}})])
    assert "Printed under `0.12.12` by [Toy](../recipes/toy.py#do-this)." in shown


def test_a_recipe_must_be_in_one_group(recipe):
    found = [result(recipe, {NEW: {}})]
    index = "```{toctree}\n:caption: Group\n:hidden:\nrecipes/toy\n```\n"
    assert pages.grouped(index, found) == [("Group", ["toy"])]
    with pytest.raises(pages.PageError, match="came toy in none"):
        pages.grouped("", found)
    with pytest.raises(pages.PageError, match="came other in none, or without a recipe file"):
        pages.grouped(index.replace("toy", "toy\nrecipes/other"), found)


def test_a_recipe_differs_where_its_outcome_does(recipe):
    assert recipe.differs(NEW, OLD)
    assert not recipe.differs(NEW, ROWS["0.12.8"])
    assert recipe.differs(NEW, ROWS["0.11.2"]), "not applicable there"
