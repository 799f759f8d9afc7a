"""The reply kit in a real browser: what the buttons copy is what was tested, with the address of the release chosen."""

import re
import subprocess
import sys

import pytest
from markdown_it import MarkdownIt
from playwright.sync_api import expect

from harness import contract, execute, origin, rows
from tests.browser import browser, served, tab, url
from tests.site import SHOWN, page, shown

SEED = "fori_loop_rejects_accumulator"
PAGE = f"recipes/{SEED}.html"


def recipe_of(name):
    return contract.read(contract.RECIPES / f"{name}.py")


def copied(tab, button):
    """What a button leaves in the clipboard."""
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.get_by_role("button", name=button, exact=True).first.click()
    expect(tab.locator("div.copy [role=status]")).to_contain_text("copied")
    return tab.evaluate("navigator.clipboard.readText()")


def parts(reply):
    """The code and the links of a reply, as a Markdown parser reads them."""
    tokens = MarkdownIt().parse(reply)
    code = [token.content for token in tokens if token.type == "fence" and token.info == "python"]
    inline = [child for token in tokens for child in token.children or []]
    return code, [child.attrs["href"] for child in inline if child.type == "link_open"]


def test_the_snippet_is_copied_whole(tab):
    tab.goto(url(PAGE))
    assert copied(tab, "Copy snippet") == recipe_of(SEED).snippet


def test_every_cell_has_its_own_button(tab):
    tab.goto(url(PAGE))
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    cells = [cell.source for cell in recipe_of(SEED).notebook.cells if cell.cell_type == "code"]
    buttons = tab.locator("div.highlight-python button.copybtn")
    assert buttons.count() == len(cells)
    buttons.nth(1).click(force=True)
    tab.wait_for_function("async () => (await navigator.clipboard.readText()).length > 0")
    assert tab.evaluate("navigator.clipboard.readText()").strip() == cells[1].strip()


@pytest.mark.parametrize("name", [SEED, "complete_train_step"])
def test_the_reply_is_markdown_whose_code_runs_alone(tab, served, name, tmp_path):
    recipe = recipe_of(name)
    tab.goto(f"{served}recipes/{name}.html")
    reply = copied(tab, "Copy as reply")
    code, links = parts(reply)
    assert code == [recipe.snippet]
    assert links == [address(served, f"recipes/{name}.html")]
    assert reply.startswith(recipe.summary)
    for row in shown(recipe):
        assert (f"{row.flax} (tree mode)" if row.mode == "tree" else row.name) in reply
    (tmp_path / "reply.py").write_text(code[0])
    newest = next(row for row in rows.load() if row.name == SHOWN[0])
    run = subprocess.run(
        [sys.executable, "-I", "-W", "error", "reply.py"],
        cwd=tmp_path,
        env=execute.kernel_environment(newest),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


def address(served, page):
    """The address that a reply gives: the site's own where the build knows it."""
    return (origin.known().site or served) + page


def test_the_reply_names_the_release_of_the_link(tab, served):
    tab.goto(f"{served}{PAGE}?flax=0.12.2")
    assert parts(copied(tab, "Copy as reply"))[1] == [address(served, f"{PAGE}?flax=0.12.2")]


def test_the_reply_the_note_and_the_chips_follow_the_tab(tab, served):
    tab.goto(f"{served}{PAGE}")
    tab.locator("label.sd-tab-label", has_text="0.12.2").first.click()
    assert parts(copied(tab, "Copy as reply"))[1] == [address(served, f"{PAGE}?flax=0.12.2")]
    expect(tab.locator("p.shown-row")).to_contain_text("Shown for row 0.12.2")
    expect(tab.locator("ul.rows a[aria-current]")).to_contain_text("0.12.2")
    tab.goto(f"{served}{PAGE}")  # the choice is kept, and said
    expect(tab.locator("p.shown-row")).to_contain_text("Shown for row 0.12.2")
    tab.locator("label.sd-tab-label", has_text=re.compile(rf"^\s*{re.escape(SHOWN[0])}\s*$")).first.click()
    assert parts(copied(tab, "Copy as reply"))[1] == [address(served, PAGE)]
    expect(tab.locator("p.shown-row")).to_be_hidden()


def test_a_release_that_was_not_executed_is_not_in_the_reply(tab, served):
    tab.goto(f"{served}{PAGE}?flax=0.9.0")
    assert parts(copied(tab, "Copy as reply"))[1] == [address(served, PAGE)]


def test_a_copy_on_disk_gives_no_address_of_this_machine(tab):
    tab.goto(url(PAGE))
    reply = copied(tab, "Copy as reply")
    assert "file:" not in reply and "PAGE-ADDRESS" not in reply and recipe_of(SEED).title in reply


@pytest.mark.parametrize("name", contract.names())
def test_both_texts_of_every_page_hold_the_tested_snippet(name):
    soup, snippet = page(f"recipes/{name}.html"), recipe_of(name).snippet
    texts = {tag["id"]: "".join(tag.strings or tag.find_all(string=True)) for tag in soup.select("template")}
    assert texts["copy-snippet"] == snippet
    assert parts(texts["copy-reply"])[0] == [snippet]
