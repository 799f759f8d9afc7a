"""Links that last: every address that was published leads somewhere, and what breaks one is told which line to add."""

import pytest

from harness import links
from tests.site import SITE


def test_every_published_address_resolves():
    broken = links.broken(links.addresses(SITE), links.published(), links.redirects())
    assert not broken, "\n".join(broken)


def test_every_address_of_the_site_is_kept():
    new = links.addresses(SITE) - set(links.published()) - set(links.redirects())
    assert not new, f"run `nox -s docs`, which adds them to docs/links.txt, and commit it: {sorted(new)[:5]}"


def test_what_was_renamed_without_a_redirect_is_told_with_the_line_to_add():
    there = {"recipes/new.html", "recipes/new.html#top"}
    (message,) = links.broken(there, ["recipes/old.html"], {})
    assert "recipes/old.html was published and is not there" in message
    assert "    recipes/old.html NEW-ADDRESS" in message
    (message,) = links.broken(there, ["recipes/new.html#gone"], {})
    assert "    recipes/new.html#gone NEW-ADDRESS" in message


def test_redirects_lead_pages_and_anchors_on():
    there = {"recipes/new.html", "recipes/new.html#top", "recipes/new.html#first", "recipes/new.py"}
    moved = {
        "recipes/old.py": "recipes/new.py",
        "recipes/old.html": "recipes/new.html",
        "recipes/old.html#sum": "recipes/new.html#top",
        "recipes/new.html#first": "recipes/new.html#top",
    }
    wanted = [
        "recipes/old.py",
        "recipes/old.html",
        "recipes/old.html#top",
        "recipes/old.html#sum",
        "recipes/new.html#first",
    ]
    assert links.broken(there, wanted, moved) == []
    (message,) = links.broken(there, ["recipes/old.html#gone"], moved)
    assert "    recipes/old.html#gone NEW-ADDRESS" in message
    (message,) = links.broken(there, [], {"recipes/new.html": "recipes/other.html"})
    assert "recipes/new.html is there and has a redirect as well" in message
    (message,) = links.broken(there, ["recipes/a.html"], {"recipes/a.html": "recipes/b.html"})
    assert "is redirected to recipes/b.html, which is not there" in message


@pytest.mark.parametrize(
    "line",
    [
        "one",
        "a.html b.html c",
        "a.html a.html",
        "a.html b.html\na.html c.html",
        "#a b.html",
        "../a.html b.html",
        "x.py y.html",
    ],
)
def test_a_wrong_line_of_redirects_is_named(tmp_path, line):
    (tmp_path / "redirects.txt").write_text(f"# old new\n{line}\n")
    with pytest.raises(links.LinkError, match="redirects.txt, line [23]: expected `old new`"):
        links.redirects(tmp_path / "redirects.txt")


def test_a_moved_anchor_stands_beside_the_new_one_or_leads_to_its_page():
    body = '<section id="sum"><h2>Sum</h2></section>'
    moved = {"recipes/x.html#add": "recipes/x.html#sum", "recipes/x.html#cost": "docs/choose.html#cost"}
    kept = links.keep_anchors("recipes/x.html", body, moved)
    assert '<span id="add"></span><section id="sum">' in kept
    assert '<p id="cost">' in kept and 'href="../docs/choose.html#cost"' in kept
    assert links.keep_anchors("recipes/y.html", body, moved) == body


def test_an_old_page_leads_on_with_and_without_javascript():
    moved = {"recipes/old.html": "recipes/new.html", "recipes/old.html#sum": "docs/choose.html#cost"}
    stub = links.stub("recipes/old.html", moved)
    assert '<p id="sum"><a href="../docs/choose.html#cost">' in stub
    assert 'content="1; url=../recipes/new.html"' in stub and '<a href="../recipes/new.html">' in stub
    assert 'src="../_static/moved.js"' in stub


def test_a_build_extends_the_file_and_never_shortens_it(tmp_path, monkeypatch):
    monkeypatch.setattr(links, "PUBLISHED", tmp_path / "links.txt")
    links.PUBLISHED.write_text("recipes/gone.html\n")
    (tmp_path / "site" / "_static").mkdir(parents=True)
    (tmp_path / "site" / "_static" / "x.txt").write_text("")
    (tmp_path / "site" / "a.html").write_text(
        '<article><section id="one"><span id="two"></span></section></article>'
    )
    assert links.extend(tmp_path / "site") == ["a.html", "a.html#one", "a.html#two"]
    assert links.published() == ["a.html", "a.html#one", "a.html#two", "recipes/gone.html"]
    assert links.extend(tmp_path / "site") == []
