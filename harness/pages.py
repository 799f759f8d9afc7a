"""All pages and files of the site that are made from the executed notebooks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from harness import (
    contract,
    downloads,
    errors,
    execute,
    machine,
    measurements,
    merge,
    origin,
    outcomes,
    plain,
    porting,
    reports,
)
from harness.outcomes import Result
from harness.rows import ROOT, Row


@dataclass(frozen=True)
class Pages:
    """`texts`: MyST Markdown by page name. `files`: the content of each file beside the pages, by its address."""

    texts: dict[str, str]
    files: dict[str, str]


class PageError(Exception):
    """A page asks for something that is not there. Names the page and what it asks for."""


def make(rows: list[Row], required: set[str], absent: dict[str, str]) -> Pages:
    """Make every page and file from what was executed under `rows`.

    `required` are the rows that this build promises, `absent` the reasons for rows that this machine cannot run.
    Raises RecipeError, ExecutedError and PageError.
    """
    results = []
    for name in contract.names():
        recipe = contract.read(contract.RECIPES / f"{name}.py")
        contract.check_ranges(recipe, rows)
        results.append(outcomes.gather(recipe, rows, required, absent))
    home = origin.known()
    commits = origin.commits()
    prose = {
        path.relative_to(ROOT).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        for path in [ROOT / "index.md", *sorted((ROOT / "docs").glob("*.md"))]
    }
    groups = grouped(prose["index"], results)
    place = {name: number for number, name in enumerate(name for _, names in groups for name in names)}
    results.sort(key=lambda result: place[result.recipe.name])
    made = {
        "[recipes]": outcomes.listing(results, groups),
        "[outcomes]": merge.raw(outcomes.table(results, rows)),
        "[environments]": outcomes.environments(results, rows, absent),
        "[verified]": outcomes.summary(results),
        "[measurements]": measurements.page(ROOT / "docs" / "measurements.json"),
        "[errors]": errors.listing(results, merge.fence),
        "[symptoms]": errors.symptoms(results),
        "[reports]": reports.listing(results, rows),
        "[porting]": porting.listing(results, rows),
    }
    texts = {}
    for name, text in prose.items():
        root = "../" * name.count("/")
        made["[paste]"] = merge.raw(
            f'<div id="paste" data-root="{root}"><p><a href="{root}docs/errors.html">Find your error in the index</a></p></div>'
        )
        for place, replacement in made.items():
            text = text.replace(place, replacement)
        for place in re.findall(r"^\[output (\S+)\]$", text, re.MULTILINE):
            text = text.replace(f"[output {place}]", _output(name, place, results))
        texts[name] = text
    for result in results:
        name = result.recipe.name
        texts[f"recipes/{name}"] = merge.page(result, home, commits.get(name, ""))
    titles = {name: re.search(r"^# (.+)", text, re.MULTILINE)[1] for name, text in prose.items()}
    files = {
        "_static/paste_index.js": errors.paste_index(results, rows),
        "recipes.json": machine.recipes(results, rows, groups, home),
        "recipes.schema.json": (ROOT / "docs" / "recipes.schema.json").read_text(encoding="utf-8"),
        "llms.txt": machine.llms(results, groups, titles, home),
        "feed.xml": machine.feed((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), home),
    }
    if home.site:
        files["sitemap.xml"] = machine.sitemap([f"{name}.html" for name in texts if name != "404"], home)
    for result in results:
        recipe = result.recipe
        files[f"recipes/{recipe.name}.py"] = recipe.source
        files[f"recipes/{recipe.name}.ipynb"] = downloads.notebook(recipe, home.site)
        files[f"colab/{recipe.name}.ipynb"] = downloads.colab(result, home.site)
    files |= {f"{name}.md": plain.markdown(text) for name, text in texts.items()}
    return Pages(texts, files)


def grouped(index: str, results: list[Result]) -> list[tuple[str, list[str]]]:
    """The groups of recipes and their order, as the home page's toctrees give them: caption, names.

    Raises PageError for a recipe that is in no group, and for one that is in a group and not there.
    """
    groups = []
    for caption, body in re.findall(
        r"^```\{toctree\}\n:caption: ([^\n]+)\n:hidden:\n(.*?)^```", index, re.M | re.S
    ):
        if names := [line.removeprefix("recipes/") for line in body.split() if line.startswith("recipes/")]:
            groups.append((caption, names))
    listed, there = [n for _, names in groups for n in names], [result.recipe.name for result in results]
    if wrong := sorted(set(listed) ^ set(there)):
        raise PageError(
            f"index.md: expected each recipe in one group; came {', '.join(wrong)} in none, or without a recipe file"
        )
    return groups


def _output(page: str, place: str, results: list[Result]) -> str:
    """What `[output RECIPE#anchor]` on a page shows: the last output under that heading, in the newest row executed."""
    name, _, anchor = place.partition("#")
    result = next((result for result in results if result.recipe.name == name), None)
    found = None
    if result:
        row, notebook = next(iter(result.notebooks.items()))
        for index, cell in enumerate(notebook.cells):
            if cell.get("outputs") and errors.slug(result.recipe.heading(index)) == anchor:
                found = cell.outputs
    if not found:
        raise PageError(f"{page}.md: `[output {place}]` has no such recipe, heading or output")
    text = merge.show(found, [row], row, f"{name}-{anchor}", result.recipe.title, False)
    return f"{text}\n\nPrinted under `{row.name}` by [{result.recipe.title}](../recipes/{name}.py#{anchor})."


def write(pages: Pages, out: Path, stubs: dict[str, str], documents: set[str]) -> None:
    """Write the files beside the built pages, and `stubs`, the pages at addresses that were moved.

    What an earlier build left and this one does not have is taken away: `documents` names the pages that it has.
    """
    made = {**pages.files, **stubs}
    for address, text in made.items():
        path = out / address
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    kept = {*made, *(f"{name}.html" for name in [*documents, "404", "search", "genindex"])}
    for path in out.rglob("*"):
        address = path.relative_to(out).as_posix()
        if path.suffix in (".html", ".ipynb", ".md", ".py", ".xml") and address not in kept:
            path.unlink()


def tabs_alone(css: str) -> str:
    """The rules of sphinx-design's style sheet that its tabs need: a seventh of its bytes."""
    rules = re.findall(r"[^{}]+\{[^{}]*\}", css)
    return "".join(rule for rule in rules if ".sd-tab" in rule or rule.strip().startswith(":root"))


ERRORS = (contract.RecipeError, execute.ExecutedError, PageError, ValueError)
