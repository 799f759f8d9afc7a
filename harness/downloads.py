"""What a reader takes away to run a recipe: the Python file, a clean notebook, one for Colab, and the links to them."""

from __future__ import annotations

import re
from html import escape

import nbformat
from nbformat import NotebookNode

from harness.contract import Recipe
from harness.origin import Origin
from harness.outcomes import Result

PINNED = ("flax", "jax", "optax")  # what decides a recipe's outcome; Colab has the rest


def notebook(recipe: Recipe, site: str = "", first: tuple[dict, ...] = ()) -> str:
    """The recipe as a notebook without outputs, after the cells `first` (JSON). The same recipe gives the same bytes.

    Links to other recipes lead to their pages on `site`, or to the notebooks beside it where that is unknown.
    """
    cells = [
        {"id": f"cell-{number}"} | cell
        for number, cell in enumerate([*first, *(_clean(cell, site) for cell in recipe.notebook.cells)], 1)
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}
    return nbformat.writes(nbformat.from_dict(made)) + "\n"


def _clean(cell: NotebookNode, site: str) -> dict:
    """A cell as it is downloaded: its source and its tags."""
    tags, source = cell.metadata.get("tags"), cell.source
    if cell.cell_type == "markdown":
        there = rf"]({site}recipes/\1.html\2)" if site else r"](\1.ipynb)"
        source = re.sub(r"\]\((\w+)\.py(#[\w-]+)?\)", there, source)
    kept = {"cell_type": cell.cell_type, "source": source, "metadata": {"tags": tags} if tags else {}}
    return kept | ({"execution_count": None, "outputs": []} if cell.cell_type == "code" else {})


def colab(result: Result, site: str = "") -> str:
    """The notebook for Colab: its first cell installs what the newest executed row has (JSON)."""
    row, executed = next(iter(result.notebooks.items()))
    versions = executed.metadata["executed"]["versions"]
    pins = " ".join(f'"{name}=={versions[name]}"' for name in PINNED)
    source = f"# The versions that this recipe was executed with (row {row.name}).\n%pip install -q {pins}"
    return notebook(result.recipe, site, (_clean(nbformat.v4.new_code_cell(source), site),))


def links(result: Result, origin: Origin, commit: str) -> str:
    """The links at the end of a recipe's page (HTML); those into a repository only where it is known."""
    recipe, name = result.recipe, result.recipe.name
    items = [
        f'<a href="{name}.ipynb" download>Notebook</a>',
        f'<a href="{name}.py" download>Python file</a>',
        f'<a href="{name}.md">Markdown with outputs</a>',
    ]
    if origin.repository:
        row, executed = next(iter(result.notebooks.items()))
        report = origin.report(recipe, row, executed.metadata["executed"]["versions"], commit)
        items += [
            f'<a href="{escape(origin.colab(recipe))}">Open in Colab</a>',
            f'<a href="{escape(origin.edit(recipe))}">Edit</a>',
            f'<a href="{escape(report)}">Report a problem</a>',
        ]
    return f'<ul class="links">{"".join(f"<li>{item}</li>" for item in items)}</ul>'
