"""The browser of the tests: Debian's Chromium, driven by Playwright, from files and without a network."""

import os
import shutil

import pytest
from playwright.sync_api import sync_playwright

from tests.site import SITE

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser():
    """One headless browser. Without Chromium the tests are skipped, and with CI set that is an error."""
    if CHROMIUM is None:
        reason = "Chromium is missing: install Debian's package `chromium`"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(browser):
    """A fresh page that notes every request to another place and every error on the console."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    tab = context.new_page()
    tab.outside, tab.errors = [], []
    tab.on(
        "request",
        lambda request: request.url.startswith("file:") or tab.outside.append(request.url),
    )
    tab.on("console", lambda message: message.type == "error" and tab.errors.append(message.text))
    tab.on("pageerror", lambda error: tab.errors.append(str(error)))
    yield tab
    assert not tab.outside and not tab.errors
    context.close()


def url(address):
    return (SITE / address.partition("?")[0]).as_uri() + "".join(address.partition("?")[1:])
