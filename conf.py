"""Sphinx configuration: pages come from `index.md`, `docs/` and, merged from their executed notebooks, `recipes/`."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from harness import contract, errors, execute, merge, outcomes, rows  # noqa: E402

project = "NNX Loop Recipes"
author = "NNX Loop Recipes contributors"
copyright = author
language = "en"
extensions = ["myst_parser", "sphinx_copybutton", "sphinx_design"]
include_patterns = ["index.md", "docs/**.md", "recipes/*.py"]
source_suffix = {".md": "markdown", ".py": "markdown"}
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nitpicky = True
smartquotes = False  # quotes in a message are to be found as they are printed

html_theme = "furo"
html_title = project
templates_path = ["docs/_templates"]
html_static_path = ["docs/_static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_copy_source = False
html_show_sourcelink = False

ROWS = rows.load()
HERE = rows.interpreters()
ABSENT = {row.name: row.lacks(HERE) for row in ROWS if not row.interpreter(HERE)}
REQUIRED = set(os.environ.get("NNX_SITE_ROWS", "").split())  # the rows that the calling session has just run


SCRIPT: list[str] = []  # what the paste box searches
PAGES: dict[str, str] = {}  # generated text by page, made once before anything is read


def pages() -> dict[str, str]:
    """The text of every page that is made from executed notebooks, by page name."""
    results = []
    for name in contract.names():
        recipe = contract.read(contract.RECIPES / f"{name}.py")
        contract.check_ranges(recipe, ROWS)
        results.append(outcomes.gather(recipe, ROWS, REQUIRED, ABSENT))
    texts = {
        name: (ROOT / f"{name}.md").read_text(encoding="utf-8")
        for name in ("index", "docs/errors", "docs/releases")
    }
    made = {
        "[recipes]": outcomes.listing(results, texts["index"]),
        "[outcomes]": outcomes.table(results, ROWS),
        "[environments]": outcomes.environments(results, ROWS, ABSENT),
        "[errors]": errors.listing(results, merge.fence),
        "[symptoms]": errors.symptoms(results),
    }
    for name in texts:
        root = "../" * name.count("/")
        made["[paste]"] = merge.raw(
            f'<div id="paste" data-root="{root}"><p><a href="{root}docs/errors.html">Find your error in the index</a></p></div>'
        )
        for place, text in made.items():
            texts[name] = texts[name].replace(place, text)
    SCRIPT.append(errors.paste_index(results, ROWS))
    return texts | {f"recipes/{result.recipe.name}": merge.page(result) for result in results}


def outdated(app, env, added, changed, removed) -> list[str]:
    """Make the generated pages; name those whose text is not what was read last."""
    try:
        PAGES.update(pages())
    except (contract.RecipeError, execute.ExecutedError) as error:
        sys.exit(f"\n{error}\n")  # the message alone, without Sphinx's report of an internal error
    last, env.generated = getattr(env, "generated", {}), dict(PAGES)
    return [name for name, text in PAGES.items() if last.get(name) != text]


def read_source(app, docname: str, source: list[str]) -> None:
    """Put a generated page in the place of its file's text."""
    source[0] = PAGES.get(docname, source[0])


def add_paste_box(app, pagename: str, templatename, context, doctree) -> None:
    """Only the pages that have the paste box load its scripts."""
    if pagename in ("index", "docs/errors"):
        app.add_js_file("paste_index.js", defer="defer")
        app.add_js_file("paste.js", defer="defer")


def write_script(app, error) -> None:
    """Put the paste box's index beside the other scripts."""
    if not error:
        (Path(app.outdir) / "_static" / "paste_index.js").write_text(SCRIPT[-1], encoding="utf-8")


def setup(app) -> None:
    app.connect("html-page-context", add_paste_box)
    app.connect("build-finished", write_script)
    app.connect("env-get-outdated", outdated)
    app.connect("source-read", read_source)
