"""The built site in a real browser: links with a row, tabs, phones, accessibility."""

from urllib.parse import quote_plus

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from harness import links
from tests.browser import browser, served, tab, url
from tests.site import SHOWN, SITE, addresses

SEED = "recipes/fori_loop_rejects_accumulator.html"
PAGES = [address for address in addresses() if address != "404.html"]  # that one is served, never opened
REFUSED = "same reference and pytree structure"


def test_a_link_with_a_row_opens_its_tab(tab):
    tab.goto(url(f"{SEED}?flax=0.12.2"))
    visible = tab.locator("article div.raises:visible")
    expect(visible.first).to_contain_text(REFUSED)
    expect(visible.first).to_contain_text("outer_index")
    expect(visible.first).to_contain_text("Raises ValueError on 0.12.2")
    expect(tab.locator("p.shown-row")).to_contain_text("Shown for row 0.12.2")
    tab.get_by_role("link", name=f"Show the newest, {SHOWN[0]}").click()
    expect(tab.locator("p.shown-row")).to_be_hidden()
    expect(tab.get_by_text("accepted: four additions of one make 4").first).to_be_visible()


def test_a_row_that_was_not_executed_is_said(tab):
    tab.goto(url(f"{SEED}?flax=0.9.0<b>"))
    expect(tab.locator("p.shown-row")).to_contain_text("This page has not been executed under 0.9.0<b>.")


def test_chips_lead_to_the_tab(tab):
    tab.goto(url(SEED))
    tab.locator("ul.rows a", has_text="0.12.2").click()
    expect(tab.locator("article div.raises:visible").first).to_contain_text(REFUSED)
    expect(tab.locator("ul.rows a[aria-current]")).to_contain_text("0.12.2")


def test_tabs_work_without_javascript(browser):
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(url(SEED))
    assert not tab.get_by_text("Raises ValueError on 0.12.2").first.is_visible()
    tab.locator("label.sd-tab-label", has_text="0.12.2").first.click()
    assert tab.get_by_text("Raises ValueError on 0.12.2").first.is_visible()
    context.close()


def test_back_and_forward_work(tab):
    tab.goto(url(SEED))
    tab.locator("ul.rows a", has_text="0.12.2").click()
    tab.wait_for_url("**?flax=0.12.2")
    tab.go_back()
    tab.wait_for_url(url(SEED))
    tab.get_by_role("heading", level=1).wait_for()
    tab.go_forward()
    expect(tab.locator("p.shown-row")).to_contain_text("Shown for row 0.12.2")
    expect(tab.locator("article div.raises:visible").first).to_contain_text(REFUSED)


@pytest.mark.parametrize("address", PAGES)
def test_no_page_scrolls_sideways(tab, address):
    tab.goto(url(address))
    for width in 320, 390, 1280:
        tab.set_viewport_size({"width": width, "height": 844})
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, f"at {width} px"


# Of the coloured words of code, which are most of a page, one of each colour is left to look at.
ONE_OF_A_COLOUR = """() => {
    const seen = new Set();
    for (const span of document.querySelectorAll("pre span")) {
        if (seen.has(span.className)) span.replaceWith(...span.childNodes);
        else if (span.offsetParent) seen.add(span.className);
    }
}"""


@pytest.mark.parametrize("address", PAGES)
def test_pages_are_accessible(tab, address):
    for theme, rules in (
        ("light", {}),
        ("dark", {"runOnly": ["color-contrast"]}),
    ):  # a theme changes colours alone
        tab.emulate_media(color_scheme=theme)
        tab.goto(url(address))
        tab.evaluate(ONE_OF_A_COLOUR)
        found = Axe().run(tab, options={"preload": False, **rules}).response["violations"]
        assert not found, [(theme, v["id"], [n["html"][:160] for n in v["nodes"][:3]]) for v in found]


def test_the_first_tab_stop_skips_to_the_content(tab):
    tab.goto(url(SEED))
    tab.keyboard.press("Tab")
    expect(tab.locator("a.skip-to-content")).to_be_focused()
    tab.keyboard.press("Enter")
    assert tab.url.endswith("#furo-main-content")


def test_paper_shows_every_tab_and_no_buttons(tab):
    tab.goto(url(SEED))
    tab.emulate_media(media="print")
    expect(tab.locator("div.copy")).to_be_hidden()
    for content in tab.locator(".sd-tab-content").all():
        expect(content).to_be_visible()


# What a reader types, and the page that must be among what is found.
SEARCHES = {
    "Cannot mutate BatchStat from a different trace level": "different_trace_level",
    "input and output to have the same reference and pytree structure": "fori_loop_rejects_accumulator",
    "generator raised StopIteration": "module_changes_in_a_loop",
    "different numbers of pytree children at key path": "structure_mismatch_catalogue",
    "Carry references must be the same between iterations": "structure_mismatch_catalogue",
    "nnx.scan does not support bound methods": "loop_arguments_and_axes",
    "nnx.fori_loop": "accumulate_with_fori_loop",
    "outer_index": "fori_loop_rejects_accumulator",
    "nnx.value_and_grad": "accumulate_with_scan",
    "jax.lax.with_sharding_constraint": "accumulate_sharded_minibatches",
    "jax.eval_shape": "carry_dtype_and_shape",
}


@pytest.mark.parametrize("words", SEARCHES)
def test_search_finds_messages_and_names(tab, words):
    tab.goto(url(f"search.html?q={quote_plus(words)}"))
    found = tab.locator(f"ul.search a[href*='recipes/{SEARCHES[words]}.html']")
    expect(found.first).to_be_visible()


def test_a_moved_page_leads_on_with_row_and_anchor(tab, tmp_path):
    site = tmp_path / "site"
    (site / "recipes").mkdir(parents=True)
    (site / "_static").symlink_to(SITE / "_static")
    moved = {"recipes/old.html": "recipes/new.html", "recipes/old.html#add": "recipes/new.html#total"}
    (site / "recipes" / "old.html").write_text(links.stub("recipes/old.html", moved))
    (site / "recipes" / "new.html").write_text("<title>New</title><p id=sum>Sum")
    tab.goto(f"{(site / 'recipes' / 'old.html').as_uri()}?flax=0.12.2#sum")
    tab.wait_for_url("**/new.html?flax=0.12.2#sum")
    tab.goto(f"{(site / 'recipes' / 'old.html').as_uri()}#add")
    tab.wait_for_url("**/new.html#total")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_missing_page_is_accessible_and_offers_search(tab, served, theme):
    tab.emulate_media(color_scheme=theme)
    tab.set_viewport_size({"width": 320, "height": 844})
    tab.goto(f"{served}recipes/no_such/page.html")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 320
    assert not Axe().run(tab, options={"preload": False}).response["violations"]
    tab.locator("article input[name=q]").fill("outer_index")
    tab.locator("article button", has_text="Search").click()
    expect(tab.locator("ul.search a[href*='fori_loop_rejects_accumulator']").first).to_be_visible()
