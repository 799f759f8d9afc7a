"""Links that last: docs/links.txt has every address that was published, and each leads somewhere for ever.

`python -m harness.links` adds what a new build has. Lines are never taken out: what is renamed gets a line
`old new` in docs/redirects.txt.
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

from bs4 import BeautifulSoup

from harness import files
from harness.rows import ROOT

PUBLISHED = ROOT / "docs" / "links.txt"
REDIRECTS = ROOT / "docs" / "redirects.txt"
ADDRESS = re.compile(
    r"(?!/)(?!.*\.\.)[\w./-]+\.(?:html(?:#[\w.-]+)?|ipynb|md|py)"
)  # page, place on one, download
NOT_PAGES = {"404.html", "search.html", "genindex.html"}  # found without a link, or empty


class LinkError(Exception):
    """A published address leads nowhere, or docs/redirects.txt is wrong. Says which line to add or to mend."""


def addresses(site: Path) -> set[str]:
    """Every address of a built site: its pages, the anchors of their sections and targets, and the files for programs."""
    found = set()
    for path in site.rglob("*"):
        name = path.relative_to(site).as_posix()
        if (
            path.suffix in (".ipynb", ".json", ".md", ".py", ".txt", ".xml", ".inv")
            and "/_" not in f"/{name}"
        ):
            found.add(name)
        elif path.suffix == ".html" and name not in NOT_PAGES:
            soup = BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
            if soup.find("meta", attrs={"http-equiv": "refresh"}):
                continue  # a redirect, which is in docs/redirects.txt
            found.add(name)
            anchors = soup.select("article section[id], article span[id]:empty")
            found |= {f"{name}#{tag['id']}" for tag in anchors}
    return found - {"sitemap.xml"}  # which is there only where the build knows the site


def published() -> list[str]:
    """The addresses that were published."""
    return PUBLISHED.read_text(encoding="utf-8").split() if PUBLISHED.exists() else []


def redirects(path: Path = REDIRECTS) -> dict[str, str]:
    """Old address to new. Raises LinkError for a line that is not `old new`, and for one that leads to itself."""
    found: dict[str, str] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("# "):
            continue
        words = line.split()
        kinds = {Path(word.partition("#")[0]).suffix for word in words}
        right = len(words) == len({*words}) == 2 and len(kinds) == 1 and all(map(ADDRESS.fullmatch, words))
        if not right or words[0] in found:
            raise LinkError(
                f"{path.name}, line {number}: expected `old new`, of one kind, each old once; came `{line}`"
            )
        found[words[0]] = words[1]
    return found


def broken(there: set[str], wanted: list[str], moved: dict[str, str]) -> list[str]:
    """What `wanted` has and neither `there` nor a redirect to something there: one message each, with the line to add.

    An anchor of a page that moved is looked for on the new page, unless it has a redirect of its own.
    """
    found = [
        f"{old} is there and has a redirect as well: take its line out of docs/redirects.txt"
        for old in moved
        if old in there
        and old.endswith(".html")  # anchors and downloads that moved are kept there by the build
    ]
    for address in wanted:
        page, hash_, anchor = address.partition("#")
        target = moved.get(address) or (
            moved[page].partition("#")[0] + hash_ + anchor if page in moved else address
        )
        if target in there:
            continue
        if address in moved:
            found.append(f"{address} is redirected to {target}, which is not there: mend docs/redirects.txt")
        else:
            found.append(
                f"{address} was published and is not there. Put it back, or add to docs/redirects.txt:\n"
                f"    {address} NEW-ADDRESS"
            )
    return found


def extend(site: Path) -> list[str]:
    """Add the new addresses of a built site to docs/links.txt; returns them."""
    known = published()
    new = sorted(addresses(site) - set(known) - set(redirects()))
    if new:
        try:
            files.write(PUBLISHED, "\n".join(sorted({*known, *new})) + "\n")
        except OSError as error:
            raise LinkError(
                f"{PUBLISHED.name}: expected to add {len(new)} new addresses; came: {error}; make it writable"
            ) from None
    return new


def stub(old: str, moved: dict[str, str]) -> str:
    """The page at an old address (HTML): it leads on at once, with row and anchor where JavaScript runs.

    Anchors of the old page that moved to other places have links of their own.
    """
    root = "../" * old.count("/")
    target = escape(root + moved[old])
    anchors = {a.partition("#")[2]: escape(root + new) for a, new in moved.items() if a.startswith(f"{old}#")}
    links = "".join(f'<p id="{anchor}"><a href="{link}">{anchor}</a></p>' for anchor, link in anchors.items())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Moved</title>'
        f'<meta http-equiv="refresh" content="1; url={target}"><link rel="canonical" href="{target}">'
        f'<script src="{root}_static/moved.js" defer></script></head>'
        f'<body><p>This page is now <a href="{target}">here</a>.</p>{links}</body></html>\n'
    )


def keep_anchors(page: str, body: str, moved: dict[str, str]) -> str:
    """The body of a page (HTML) with the anchors that it once had: beside the new one, or with a link to it."""
    for old, new in moved.items():
        old_page, _, old_anchor = old.partition("#")
        new_page, _, new_anchor = new.partition("#")
        if old_page != page or not old_anchor:
            continue
        place = re.search(rf'<(section|span|div|p)\b[^>]*\bid="{re.escape(new_anchor)}"', body)
        if new_page == page and place:
            body = f'{body[: place.start()]}<span id="{old_anchor}"></span>{body[place.start() :]}'
        else:
            link = escape("../" * page.count("/") + new)
            body += f'<p id="{old_anchor}">What stood here is now <a href="{link}">on another page</a>.</p>'
    return body


if __name__ == "__main__":
    try:
        for new_address in extend(ROOT / "build" / "html"):
            print(f"new address: {new_address}")
    except LinkError as error:
        sys.exit(str(error))
