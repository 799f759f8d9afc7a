"""A page as Markdown that any reader understands, people and programs: no directives, no tabs, every output kept."""

from __future__ import annotations

import re

from bs4 import BeautifulSoup

OPENS = re.compile(r"^(`{3,}|:{3,})\{([\w-]+)\} ?(.*)$")
OPTION = re.compile(r"^:[\w-]+:( |$)")


def markdown(page: str) -> str:
    """The MyST Markdown of a page, with its directives written out.

    Code blocks become plain fences, tabs are named by their row, folded tracebacks and toctrees are left out, and links
    lead to the Markdown of the other pages. Raises ValueError for a directive that it does not know.
    """
    page = re.sub(r"\A---\n.*?\n---\n", "", page, flags=re.DOTALL)
    lines, out = iter(page.splitlines()), []
    for line in lines:
        if opened := OPENS.match(line):
            out += _directive(*opened.groups(), lines)
        elif fence := re.match(r"^(`{3,}|~{3,})[^`]*$", line):  # code that is already plain
            out.append("\n".join([line, *_until(fence[1], lines), fence[1]]))
        elif not re.match(r"^\([\w-]+\)=$|^:{3,}$|^:sync(-group)?: ", line):
            out.append(_links(line))
    text = [line for line, after in zip(out, [*out[1:], ""], strict=True) if line or after]
    return "\n".join(text).strip() + "\n"


def _until(fence: str, lines) -> list[str]:
    """The lines up to the one that closes a fence."""
    found = []
    for line in lines:
        if re.fullmatch(rf"{fence}{fence[0]}*\s*", line):
            return found
        found.append(line)
    raise ValueError(f"a block is not closed: expected {fence}")


def _directive(fence: str, name: str, argument: str, lines) -> list[str]:
    """The plain lines of one directive; a directive that only holds others is left to the lines inside it."""
    if name == "code-block":
        options, _, body = "\n".join(_until(fence, lines)).partition("\n\n")  # a blank line ends the options
        body = body.split("\n") if OPTION.match(options) else [options, *([body] if body else [])]
        return ["\n".join([f"{fence}{argument}", *body, fence])]
    if name == "raw":
        return [_html("\n".join(_until(fence, lines)))]
    if name == "toctree":
        _until(fence, lines)
        return []
    if name in ("div", "tab-set", "tab-item"):
        return [f"**{argument}:**"] if name == "tab-item" else []
    raise ValueError(f"plain.py does not know the directive {{{name}}}: write out what it becomes")


def _html(html: str) -> str:
    """What raw HTML says: tables and lists as Markdown, a plot by its name, and nothing of what only a browser uses."""
    soup, parts = BeautifulSoup(html, "html.parser"), []
    for tag in soup.find_all(["table", "ul", "ol", "svg", "p"]):
        if tag.name == "table":
            for link in tag.select("td a"):  # each leads to a tab, which Markdown does not have
                link.unwrap()
            rows = [[_inline(cell) for cell in row.find_all(["th", "td"])] for row in tag.find_all("tr")]
            rows.insert(1, ["---"] * len(rows[0]))
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
        elif tag.name in ("ul", "ol"):
            bullet = "-" if tag.name == "ul" else "1."
            parts.append("\n".join(f"{bullet} {_inline(item)}" for item in tag.find_all("li")))
        elif tag.name == "svg":
            parts.append(f"({tag['aria-label']})")
        elif not tag.find_parent(id="paste"):
            parts.append(_inline(tag))
    return "\n\n".join(parts)


def _inline(tag) -> str:
    """The text of a tag with its links and code as Markdown."""
    for code in tag.find_all("code"):
        code.replace_with(f"`{code.get_text()}`")
    for link in tag.find_all("a"):
        if link["href"].startswith(("?", "#")):  # a tab or a note of this page
            link.unwrap()
            continue
        place = re.sub(r"^(?!https?:)(.*)\.html(\?[^#]*)?", r"\1.md", link["href"])
        link.replace_with(f"[{link.get_text()}]({place})")
    return re.sub(r"\s+", " ", tag.get_text()).strip()


def _links(line: str) -> str:
    """Links between pages lead to their Markdown; `x.py` in a recipe is the page x."""
    line = re.sub(
        r" <br><small>(.*)</small>", lambda m: f" ({BeautifulSoup(m[1], 'html.parser').get_text()})", line
    )
    line = re.sub(r'<a href="([^"]+)">(.*?)</a>', r"[\2](\1)", line)
    return re.sub(r"\]\((?!https?:)([\w/.-]+)\.py(#[\w-]+)?\)", r"](\1.md\2)", line)
