"""The built site in a real browser: links with a row, tabs, phones, accessibility."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from harness import contract
from tests.browser import browser, tab, url
from tests.site import SHOWN, addresses

SEED = "recipes/fori_loop_rejects_accumulator.html"
REFUSED = "same reference and pytree structure"


def test_a_link_with_a_row_opens_its_tab(tab):
    tab.goto(url(f"{SEED}?flax=0.12.2"))
    visible = tab.locator("article div.raises:visible")
    expect(visible.first).to_contain_text(REFUSED)
    expect(visible.first).to_contain_text("outer_index")
    expect(visible.first).to_contain_text("Raises ValueError on 0.12.2")
    expect(tab.locator("p.shown-row")).to_contain_text("Shown for row 0.12.2")
    tab.get_by_role("link", name=f"Show the newest, {SHOWN[0]}").click()
    expect(tab.locator("p.shown-row")).to_have_count(0)
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


@pytest.mark.parametrize("address", addresses())
def test_no_page_scrolls_sideways_on_a_phone(tab, address):
    tab.set_viewport_size({"width": 390, "height": 844})
    tab.goto(url(address))
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    "name", ["index.html", "docs/releases.html", *(f"recipes/{n}.html" for n in contract.names())]
)
def test_pages_are_accessible(tab, name, theme):
    tab.emulate_media(color_scheme=theme)
    tab.goto(url(name))
    found = Axe().run(tab, options={"preload": False}).response["violations"]
    assert not found, [(v["id"], [n["html"][:160] for n in v["nodes"][:3]]) for v in found]
