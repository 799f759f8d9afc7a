"""The error index: every message that was measured is in it, under the rows where it occurs, with an anchor of its own."""

import pytest

from harness import contract, errors, outcomes, rows
from tests.site import SHOWN, page

ROWS = rows.load()
GRAPH = {"0.12.12", "0.12.8", "0.12.2", "0.11.2"}
NEW, OLD, ALL, TREE = (
    {"0.12.12", "0.12.8"},
    {"0.12.2", "0.11.2"},
    GRAPH | {"0.12.12-tree"},
    {"0.12.12-tree"},
)
FORI = (
    "nnx.fori_loop requires body function's input and output to have the same reference and pytree structure"
)
WHILE = (
    "nnx.while_loop requires body function's input and output to have the same reference and pytree structure"
)

# Class, words of the message, and rows that print it, for the mistakes that NNX loops are known to answer with them.
MEASURED = [
    ("ValueError", FORI, OLD),
    ("ValueError", WHILE, GRAPH),
    ("ValueError", "Variable identity must be preserved across iterations", TREE),
    ("AttributeError", "'NoneType' object has no attribute '_graphdef'", NEW),
    ("AttributeError", "'ShapeDtypeStruct' object has no attribute '_graphdef'", NEW),
    ("RuntimeError", "generator raised StopIteration", NEW),
    ("AssertionError", "", GRAPH),
    ("ValueError", "Carry references must be the same between iterations", GRAPH),
    ("ValueError", "different numbers of pytree children at key path", NEW),
    ("ValueError", "different types at key path", TREE),
    ("ValueError", "different pytree metadata at key path", NEW),
    (
        "TypeError",
        "scan body function carry input and carry output must have the same pytree structure",
        NEW,
    ),
    ("TypeError", "scan body function carry input and carry output must have equal types", ALL),
    ("TypeError", "too many positional arguments", GRAPH),
    ("TraceContextError", "from a different trace level", ALL),
    ("ValueError", "Cannot extract graph node from different trace level", GRAPH),
    (
        "ValueError",
        "Reverse-mode differentiation does not work for lax.while_loop or lax.fori_loop",
        ALL,
    ),
    ("IndexError", "Array slice indices must have static start/stop/step", ALL - {"0.12.8"}),
    ("ValueError", "nnx.scan does not support bound methods", ALL - {"0.11.2"}),
    ("TypeError", "grad requires real- or complex-valued inputs", ALL),
    ("TypeError", "Error interpreting argument to", ALL),
]


@pytest.fixture(scope="module")
def found():
    """Every place that raises, from the executed notebooks of the rows shown."""
    recipes = [contract.read(contract.RECIPES / f"{name}.py") for name in contract.names()]
    return errors.places([outcomes.gather(recipe, ROWS, set(SHOWN), {}) for recipe in recipes])


@pytest.mark.parametrize(("error", "words", "expected"), MEASURED)
def test_every_measured_message_is_in_the_index_under_its_rows(found, error, words, expected):
    printed = {
        row.name
        for place in found
        for row, message in place.messages.items()
        if place.declared.error == error and (words in message if words else not message)
    }
    assert expected & set(SHOWN) <= printed
    if expected & set(SHOWN):
        assert (words or "No message at all") in page("docs/errors.html").get_text()


def test_entries_have_anchors_of_their_own_and_lead_to_the_explaining_heading(found):
    entries = errors.entries(found)
    anchors = [entry.anchor for entry in entries]
    assert len(anchors) == len(set(anchors))
    index = page("docs/errors.html")
    for entry in entries:
        assert index.find(id=entry.anchor), entry.anchor
        for place in entry.places:
            name, _, anchor = place.address.partition("#")
            assert page(name).find(id=anchor), place.address


def test_symptoms_that_raise_nothing_are_listed():
    text = page("docs/errors.html").get_text().lower()
    for name in contract.names():
        for symptom in contract.read(contract.RECIPES / f"{name}.py").symptoms:
            assert symptom.lower() in text


def test_a_recipes_own_assertions_are_not_messages_of_a_library(found):
    assert not [place for place in found if place.declared.error == "AssertionError" and place.declared.match]
