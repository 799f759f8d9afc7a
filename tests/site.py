"""The built site as the tests read it: pages by address, and the ids and links of each."""

import os
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup

from harness import contract, origin, rows

SITE = rows.ROOT / "build" / "html"
SHOWN = os.environ.get("NNX_SITE_ROWS", "").split()  # newest first, as the session that built the site says


def shown(recipe: contract.Recipe) -> list[rows.Row]:
    """The rows that the session which built the site has executed the recipe under."""
    return [row for row in rows.load() if row.name in SHOWN and recipe.needs.holds(row)]


def addresses() -> list[str]:
    """Every page, for example `recipes/x.html`."""
    return sorted(str(path.relative_to(SITE).as_posix()) for path in SITE.rglob("*.html"))


def target(address: str, link: str) -> Path:
    """The file that a link on a page leads to. Links of 404.html start at the root that the site is served from."""
    path, root = unquote(urlsplit(link).path), urlsplit(origin.known().site).path or "/"
    if not path:
        return SITE / address
    return (
        SITE / path.removeprefix(root) if path.startswith("/") else ((SITE / address).parent / path).resolve()
    )


@cache
def page(address: str) -> BeautifulSoup:
    """A page, parsed."""
    return BeautifulSoup((SITE / Path(address)).read_text(encoding="utf-8"), "html.parser")


def panel(address: str, row: str) -> str:
    """The text that a reader of one row sees: what stands outside of tabs, and in the tabs of that row."""
    soup = BeautifulSoup(str(page(address).find("article")), "html.parser")
    for label in soup.select("label.sd-tab-label"):
        if label["data-sync-id"] != row:
            label.find_next_sibling("div", class_="sd-tab-content").clear()
    return soup.get_text()
