"""Sphinx configuration: pages come from `index.md`, `docs/` and, merged from their executed notebooks, `recipes/`."""

import os
import re
import sys
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

import furo
from docutils import nodes

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from harness import execute, files, links, origin, pages, rows  # noqa: E402

project = "NNX Loop Recipes"
author = "NNX Loop Recipes contributors"
copyright = author
language = "en"
extensions = ["myst_parser", "notfound.extension", "sphinx_copybutton", "sphinx_design"]
include_patterns = ["index.md", "docs/**.md", "recipes/*.py"]
exclude_patterns = [".git", ".nox", ".venv", "build"]  # not walked through: a third of the time
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
html_favicon = "docs/_static/icon.svg"
html_js_files = [("site.js", {"defer": "defer"})]
html_copy_source = False
html_use_index = False
html_show_search_summary = False  # reads pages by requests, which a browser refuses for files
html_show_sourcelink = False

HOME = origin.known()
html_baseurl = HOME.site
notfound_urls_prefix = urlsplit(HOME.site).path or "/"
notfound_context = {
    "title": "No such page",
    "body": "<h1>No such page</h1><p>The address may be mistyped, or cut.</p>"
    f'<form role="search" action="{notfound_urls_prefix}search.html"><label>Search <input type="search" name="q">'
    f'</label> <button>Search</button></form><p><a href="{notfound_urls_prefix}index.html">All recipes</a></p>',
}
# The theme's one inline script, by its digest: no other script that stands in a page runs.
INLINE = re.findall(
    r"<script>(.*?)</script>", (furo.THEME_PATH / "base.html").read_text(encoding="utf-8"), re.S
)
DIGESTS = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in INLINE)
POLICY = (
    f"default-src 'self'; script-src 'self' {DIGESTS}; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
)
ROWS = rows.load()
HERE = rows.interpreters()
ABSENT = {row.name: row.lacks(HERE) for row in ROWS if not row.interpreter(HERE)}
REQUIRED = set(os.environ.get("NNX_SITE_ROWS", "").split())  # the rows that the calling session has just run


LOOK = sorted(path for name in ("_templates", "_static") for path in (ROOT / "docs" / name).rglob("*.*"))
MADE_BY = {
    path.name: sha256(path.read_bytes()).hexdigest()
    for path in [ROOT / "conf.py", *sorted((ROOT / "harness").glob("*.py"))]
}
TOOLS = rows.pins(ROOT / "requirements.txt")
MADE_BY |= {name: version for name, version in execute.environment().items() if name in TOOLS}
PASTE = ("index", "docs/errors")  # the pages that have the paste box
MADE: list[pages.Pages] = []  # made once, before anything is read


def outdated(app, env, added, changed, removed) -> list[str]:
    """Make the generated pages; name those whose text is not what was read last."""
    try:
        made = pages.make(ROWS, REQUIRED, ABSENT)
    except pages.ERRORS as error:
        sys.exit(f"\n{error}\n")  # the message alone, without Sphinx's report of an internal error
    MADE.append(made)
    index = Path(app.outdir) / "_static" / "paste_index.js"  # written first: pages name its digest
    files.write(index, made.files["_static/paste_index.js"])
    now = {
        name: text + made.files["_static/paste_index.js"] * (name in PASTE)
        for name, text in made.texts.items()
    }
    last, env.generated = getattr(env, "generated", {}), now
    return [name for name, text in now.items() if last.get(name) != text]


def read_source(app, docname: str, source: list[str]) -> None:
    """Put a generated page in the place of its file's text."""
    source[0] = MADE[-1].texts.get(docname, source[0])


def keep_short_anchors(app, doctree) -> None:
    """An entry of the errors page has the anchor that it was given, and none that was made from its long heading."""
    if app.env.current_document.docname == "docs/errors":
        given = {anchor for name, anchor in doctree.nameids.items() if doctree.nametypes[name]}
        for section in doctree.findall(nodes.section):
            section["ids"] = [anchor for anchor in section["ids"] if anchor in given] or section["ids"]


def furnish(app, pagename: str, templatename, context, doctree) -> None:
    """Give a page its anchors of old, what a link to it shows elsewhere, and the paste box's scripts if it has one."""
    if "body" in context:
        context["body"] = links.keep_anchors(f"{pagename}.html", context["body"], app.config.nnx_redirects)
    described = re.search(r'<meta content="([^"]*)" name="description"', context.get("metatags", ""))
    context["og"] = {
        "site_name": project,
        "type": "article" if pagename.startswith("recipes/") else "website",
        "title": context.get("title", project),
        "description": described[1] if described else "",
        "url": f"{HOME.site}{pagename}.html" if HOME.site else "",
    }
    context["content_security_policy"] = POLICY
    if pagename in PASTE:
        app.add_js_file("paste_index.js", defer="defer")
        app.add_js_file("paste.js", defer="defer")


def write_files(app, error) -> None:
    """Write the files beside the pages, and a page at each address that was moved."""
    if not error:
        sheet = Path(app.outdir) / "_static" / "sphinx-design.min.css"
        (Path(app.outdir) / ".buildinfo.bak").unlink(missing_ok=True)
        sheet.write_text(pages.tabs_alone(sheet.read_text(encoding="utf-8")), encoding="utf-8")
        moved = app.config.nnx_redirects
        stubs = {old: links.stub(old, moved) for old in moved if old.endswith(".html")}
        stubs |= {old: MADE[-1].files[new] for old, new in moved.items() if new in MADE[-1].files}
        if clash := [old for old in stubs if old.removesuffix(".html") in app.env.found_docs]:
            sys.exit(f"\n{clash[0]} is a page and has a redirect: take its line out of docs/redirects.txt\n")
        pages.write(MADE[-1], Path(app.outdir), stubs, app.env.found_docs)


def setup(app) -> None:
    # A change of these writes every page again. Sphinx itself goes by the time of templates, which a clock may set back.
    app.add_config_value("nnx_made_by", MADE_BY, "env")  # a change reads every page again
    app.add_config_value("nnx_redirects", links.redirects(), "html")
    app.add_config_value("nnx_look", {p.name: sha256(p.read_bytes()).hexdigest() for p in LOOK}, "html")
    app.connect("env-get-outdated", outdated)
    app.connect("source-read", read_source)
    app.connect("doctree-read", keep_short_anchors)
    app.connect("html-page-context", furnish)
    app.connect("build-finished", write_files)
