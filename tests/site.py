"""The built site as the tests read it: pages by address, and the ids and links of each."""

from functools import cache
from pathlib import Path

from bs4 import BeautifulSoup

from harness.rows import ROOT

SITE = ROOT / "build" / "html"


def addresses() -> list[str]:
    """Every page, for example `recipes/x.html`."""
    return sorted(str(path.relative_to(SITE).as_posix()) for path in SITE.rglob("*.html"))


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
