"""Mistakes that a person could make in a recipe, as edits of its text. Each must be caught when the recipe runs.

`COMMON` are edits for every recipe whose snippet has the pattern; the first place in the snippet is changed. `OWN` are
edits of one recipe: a text that stands in it once, and what it becomes. `SAME` are edits that change nothing that could
be caught, each with the reason; they are not run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.contract import Recipe

COMMON = [
    ("the division is forgotten", r" / (num_minibatches|len\(losses\)|len\(x\)|count|total_count)\b", ""),
    ("divided by the length of the batch", r" / num_minibatches\b", " / len(jax.tree.leaves(batch)[0])"),
    ("gradients are subtracted", r"\bjnp\.add\b", "jnp.subtract"),
    ("the sum is bfloat16", r"jnp\.zeros_like\((\w+)\)", r"jnp.zeros_like(\1, jnp.bfloat16)"),
    ("the sum starts at one", r"\bjnp\.zeros_like\b", "jnp.ones_like"),
    ("the state is not written back", r"^ +nnx\.update\(model, \w+\).*\n", ""),
    ("the optimizer is not called", r"^ +optimizer\.update\(.*\).*\n", ""),
    ("statistics start over in each minibatch", r"\(loss, rest\), grads = ", "(loss, _), grads = "),
    ("the merged model is not a copy", r", copy=True\)", ")"),
    ("the sum of the rows is taken for their mean", r"\bjnp\.mean\(", "jnp.sum("),
    ("the mean of the losses is their sum", r"\blosses\.mean\(\)", "losses.sum()"),
    ("the mask is forgotten", r" \* mask\b", ""),
    ("the wrong part of the batch", r"\[i\]", "[0]"),
    ("another seed", r"\bjax\.random\.fold_in\(([^,()]+), [^()]+\)", r"\1"),
]  # fmt: skip

OWN: dict[str, list[tuple[str, str, str]]] = {}

SAME: dict[tuple[str, str], str] = {}


@dataclass(frozen=True)
class Mutant:
    """A recipe's text with one mistake in it."""

    recipe: str
    mistake: str
    source: str

    @property
    def name(self) -> str:
        """How reports name it."""
        return f"{self.recipe}: {self.mistake}"


class MutantError(ValueError):
    """An edit does not fit its recipe: the message names both, and how often its text was found."""


def of(recipe: Recipe) -> list[Mutant]:
    """The mutants of one recipe. Raises MutantError for an edit of its own that does not fit once."""
    made = []
    for mistake, pattern, becomes in COMMON:
        for cell in recipe.notebook.cells:
            changed = re.sub(pattern, becomes, cell.source, count=1, flags=re.MULTILINE)
            if "snippet" in cell.metadata.get("tags", []) and changed != cell.source:
                if (recipe.name, mistake) not in SAME:
                    made.append(Mutant(recipe.name, mistake, recipe.source.replace(cell.source, changed)))
                break
    for mistake, text, becomes in OWN.get(recipe.name, []):
        if (times := recipe.source.count(text)) != 1:
            raise MutantError(
                f"{recipe.name}, {mistake}: expected {text!r} once in the recipe, found it {times} times"
            )
        made.append(Mutant(recipe.name, mistake, recipe.source.replace(text, becomes)))
    return made
