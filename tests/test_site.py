"""The built HTML: every recipe has its page, what a row did is in that row's tab, and nothing leads nowhere."""

import re
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from harness import contract, execute, rows
from tests.site import SHOWN, SITE, addresses, page, panel, shown, target

NAMES = contract.names()


@pytest.fixture(autouse=True, scope="module")
def built():
    """The tests need the site of the present sources, which `nox -s tests` builds first."""
    assert SHOWN, "run these tests by `nox -s tests`, which builds the site and says which rows it shows"
    assert (SITE / "index.html").exists(), "build/html is missing: run `nox -s docs`"


def squeeze(text):
    return re.sub(r"\s+", " ", text)


def test_home_leads_to_every_recipe():
    links = {a["href"] for a in page("index.html").select("a[href]")}
    assert {f"recipes/{name}.html" for name in NAMES} <= links


@pytest.mark.parametrize("name", NAMES)
def test_page_has_the_snippet_and_every_output_of_each_row_in_its_tab(name):
    recipe = contract.read(contract.RECIPES / f"{name}.py")
    address = f"recipes/{name}.html"
    for cell in recipe.notebook.cells:
        if cell.cell_type == "code":
            assert squeeze(cell.source) in squeeze(page(address).get_text()), cell.source
    assert "1970" not in page(address).select_one("p.verified").get_text(), "a date that no run had"
    for row in shown(recipe):
        seen = squeeze(panel(address, row.name))
        for cell in execute.load(recipe, row).cells:
            for output in cell.get("outputs", []):
                if output.output_type == "stream":
                    assert squeeze(output.text).strip() in seen
                elif output.output_type == "error":
                    assert (
                        squeeze(f"{output.ename}: {output.evalue}" if output.evalue else output.ename).strip()
                        in seen
                    )


def test_the_seed_failure_is_told_by_the_release_that_has_it():
    address = "recipes/fori_loop_rejects_accumulator.html"
    old, new = squeeze(panel(address, "0.12.2")), squeeze(panel(address, SHOWN[0]))
    message = "nnx.fori_loop requires body function's input and output to have the same reference and pytree structure"
    assert f"ValueError: {message}" in old and "outer_index=None" in old
    assert f"ValueError: {message}" not in new
    assert "nnx.while_loop requires body function's input and output" in new, "the loop that was not mended"


@pytest.mark.parametrize(
    "name", ["complete_train_step", "accumulate_in_float32", "donate_and_measure_memory"]
)
def test_a_plot_is_on_the_page(name):
    assert page(f"recipes/{name}.html").select("article svg.plot text")


@pytest.mark.parametrize("address", addresses())
def test_links_and_anchors_resolve_and_ids_are_unique(address):
    soup = page(address)
    ids = [tag["id"] for tag in soup.select("[id]")]
    assert len(ids) == len(set(ids)), sorted({i for i in ids if ids.count(i) > 1})
    for tag in soup.select("a[href], link[href], script[src], img[src]"):
        link = tag.get("href") or tag.get("src")
        anchor = urldefrag(link).fragment
        if urlsplit(link).scheme:
            continue
        file = target(address, link)
        assert file.exists(), f"{address}: {link} leads nowhere"
        if anchor and file.suffix == ".html":
            other = file.relative_to(SITE).as_posix()
            assert page(other).find(id=unquote(anchor)), f"{address}: {link} has no such anchor"


@pytest.mark.parametrize("address", addresses())
def test_nothing_is_requested_from_another_site(address):
    soup = page(address)
    loads = [
        tag.get("src") or tag.get("href")
        for tag in soup.select("script[src], img[src], iframe[src], source[src]")
    ]
    loads += [tag["href"] for tag in soup.select("link[href]") if "canonical" not in tag.get("rel", [])]
    loads += re.findall(r"url\(([^)]+)\)", " ".join(tag.get_text() for tag in soup.select("style")))
    assert not [link for link in loads if urlsplit(link.strip("'\"")).netloc]
    for sheet in soup.select("link[rel=stylesheet]"):
        text = target(address, sheet["href"]).read_text(encoding="utf-8")
        assert not re.search(r"@import|url\(['\"]?(https?:)?//", text), sheet["href"]


@pytest.mark.parametrize("address", addresses())
def test_no_path_of_the_building_machine_is_published(address):
    assert str(rows.ROOT) not in (SITE / address).read_text(encoding="utf-8")


def test_releases_page_names_every_row_and_links_every_execution():
    text = page("docs/releases.html").get_text()
    links = {a["href"] for a in page("docs/releases.html").select("table.outcomes a[href]")}
    for row in rows.load():
        assert row.name in text
    for name in NAMES:
        recipe = contract.read(contract.RECIPES / f"{name}.py")
        for row in shown(recipe):
            assert f"../recipes/{name}.html?flax={row.name}" in links
