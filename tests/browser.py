"""The browser of the tests: Debian's Chromium, driven by Playwright, from files and without a network."""

import os
import shutil
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import sync_playwright

from harness import origin
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
        lambda request: (
            request.url.startswith(("file:", "http://127.0.0.1:")) or tab.outside.append(request.url)
        ),
    )
    tab.on("console", lambda message: message.type == "error" and tab.errors.append(message.text))
    tab.on("pageerror", lambda error: tab.errors.append(str(error)))
    yield tab
    assert not tab.outside and not tab.errors
    context.close()


@pytest.fixture(scope="module")
def served():
    """The address of the site on a server that answers a missing page with 404.html, as its host does."""
    root = urlsplit(origin.known().site).path or "/"

    class Handler(SimpleHTTPRequestHandler):
        def translate_path(self, path):
            return str(SITE / urlsplit(path).path.removeprefix(root))

        def send_error(self, code, message=None, explain=None):
            self.send_response(200)  # a browser reports any other on the console
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write((SITE / "404.html").read_bytes())

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}{root}"
        server.shutdown()


def url(address):
    return (SITE / address.partition("?")[0]).as_uri() + "".join(address.partition("?")[1:])
