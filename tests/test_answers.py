"""The reports page and the list of differences in tree mode: complete, and true of what ran."""

import dataclasses
import json
import os
import re
from functools import partial

import pytest

from harness import contract, errors, execute, outcomes, porting, reports, rows
from tests.site import SHOWN, page, target

ROWS = rows.load()
RECIPES = {name: contract.read(contract.RECIPES / f"{name}.py") for name in contract.names()}


def linked(address):
    """The links of a page: each page it leads to, with the anchor that the link's text has there."""
    links = page(address).find("article").find_all("a")
    return {(link["href"].partition("#")[0], errors.slug(link.get_text())) for link in links}


def test_every_report_has_a_page_that_says_it_answers():
    listed = reports.listed()
    assert len({report.name for report in listed}) == len(listed) > 60
    for report in listed:
        name, _, anchor = report.answer.partition("#")
        assert report.name in RECIPES[name].answers, report
        assert not anchor or page(f"recipes/{name}.html").find(id=anchor), report


def test_every_report_that_a_recipe_answers_is_listed():
    listed = {report.name for report in reports.listed()}
    assert not {name for recipe in RECIPES.values() for name in recipe.answers} - listed


def test_every_input_belongs_to_a_report():
    used = {case for report in reports.listed() for case in report.cases}
    there = {path.stem for path in reports.CASES.glob("*.py")}
    assert there - used <= {
        "01_fori_pure_state_carry",
        "23_accum_dtype_mismatch_scan",
    }  # smaller forms of others


def test_the_reports_page_links_each_report_and_its_answer():
    links = linked("docs/reports.html")
    for report in reports.listed():
        assert report.url in {
            link["href"] for link in page("docs/reports.html").find("article").find_all("a")
        }
        name, _, anchor = report.answer.partition("#")
        assert (f"../recipes/{name}.html", anchor or errors.slug(RECIPES[name].title)) in links


def test_fixed_is_between_the_last_row_that_raises_and_the_next():
    by_name = {row.name: row for row in ROWS}
    ended = {by_name[n]: e for n, e in {"0.12.12": "", "0.12.8": "", "0.12.2": "E", "0.11.2": ""}.items()}
    between = (by_name["0.12.2"], by_name["0.12.8"])
    assert reports._fixed(ended) == between
    assert reports._fixed({**ended, by_name["0.12.12"]: "E"}) is None
    assert reports._fixed(dict.fromkeys(ended, "")) is None
    tree = {by_name["0.12.12-tree"]: "E", **ended}
    assert reports._fixed(tree) == between, "tree mode says nothing about a fix"


def test_the_seed_is_fixed_after_the_last_release_that_raises():
    seed = next(report for report in reports.listed() if report.name == "google/flax#5113")
    ran = {row: reports.outcomes(row) for row in ROWS if row.name in SHOWN}
    text = reports._inputs(seed, ran)
    assert re.search(r"\*\*fixed after `0\.[\d.]+`, by `0\.12\.", text) and re.search(
        r"`ValueError` on [^;]*`0\.12\.2`", text
    ), text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": "no_such_recipe"}, "no such recipe"),
        ({"answer": "tree_mode"}, "its header answers"),
        ({"answer": "fori_loop_rejects_accumulator#nowhere"}, "has no section #nowhere"),
        ({"cases": ["no_such_case"]}, "expected tests/reports/no_such_case.py"),
    ],
)
def test_a_wrong_report_is_named(tmp_path, monkeypatch, change, message):
    entries = json.loads(reports.LISTED.read_text(encoding="utf-8"))
    seed = next(entry for entry in entries if entry["report"] == "google/flax#5113")
    seed.update(change)
    path = tmp_path / "reports.json"
    path.write_text(json.dumps(entries), encoding="utf-8")
    monkeypatch.setattr(reports, "listed", partial(reports.listed, path))
    results = [outcomes.Result(recipe, {}, {}) for recipe in RECIPES.values()]
    with pytest.raises(reports.ReportError, match=re.escape(message)) as caught:
        reports.listing(results, [])
    assert "google/flax#5113" in str(caught.value)


def in_folder(tmp_path, monkeypatch, text):
    """One case in a folder of its own, and no outcomes."""
    monkeypatch.setattr(reports, "CASES", tmp_path / "cases")
    monkeypatch.setattr(reports, "RAN", tmp_path / "ran")
    reports.CASES.mkdir()
    (reports.CASES / "case.py").write_text(text, encoding="utf-8")
    return ROWS[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise NameError", "expected no exception; came NameError"),
        ("raise SystemExit(1)", "expected no exception; came SystemExit"),
        ('# raises=[{"error": "KeyError"}]', "expected KeyError; came no exception"),
        ('# raises=[{"error": "KeyError", "flax": "<0.1"}]\n{}[1]', "expected no exception; came KeyError"),
    ],
)
def test_a_case_that_does_not_end_as_it_declares_is_named(tmp_path, monkeypatch, text, message):
    row = in_folder(tmp_path, monkeypatch, text)
    with pytest.raises(reports.ReportError, match=f"tests/reports/case.py, row {row.name}: {message}"):
        reports.run(row)
    assert reports.outcomes(row) is None


def test_outcomes_are_those_of_the_run(tmp_path, monkeypatch):
    row = in_folder(
        tmp_path, monkeypatch, '# raises=[{"error": "KeyError"}]\nimport os\nos.environ["A"] = "1"\n{}[1]'
    )
    assert reports.run(row) == reports.outcomes(row) == {"case": "KeyError"} and "A" not in os.environ
    (reports.CASES / "case.py").rename(reports.CASES / "other.py")
    assert reports.outcomes(row) is None, "the name of a case is part of what was run"
    (reports.CASES / "other.py").rename(reports.CASES / "case.py")
    assert reports.outcomes(dataclasses.replace(row, env={"NNX_GRAPH_MODE": "0"})) is None
    path = reports.RAN / row.name / "outcomes.json"
    path.write_text(path.read_text().replace('"KeyError"', '"MadeUpError"'))
    with pytest.raises(reports.ReportError, match="are not those of the run"):
        reports.outcomes(row)


def test_every_cell_that_ends_differently_in_tree_mode_is_listed():
    graph, tree = porting.pair(ROWS)
    if not {graph.name, tree.name} <= set(SHOWN):
        pytest.skip("the row in tree mode is not shown by this build")
    links = linked("docs/porting.html")
    missing, found = [], 0
    for recipe in RECIPES.values():
        if not (recipe.needs.holds(graph) and recipe.needs.holds(tree)):
            continue
        one, other = (execute.load(recipe, row) for row in (graph, tree))
        for index, cell in enumerate(recipe.notebook.cells):
            if cell.cell_type != "code":
                continue
            ended = [
                [
                    (o.get("ename"), o.get("evalue"), o.get("text"), o.get("data"))
                    for o in nb.cells[index].outputs
                ]
                for nb in (one, other)
            ]
            if ended[0] != ended[1]:
                found += 1
                link = (f"../recipes/{recipe.name}.html", errors.slug(recipe.heading(index)))
                missing += [link] * (link not in links)
    assert found > 60 and not missing


def test_each_difference_stands_in_the_table_of_its_kind():
    graph, tree = porting.pair(ROWS)
    assert (graph.mode, tree.mode) == ("graph", "tree") and graph.flax == tree.flax == max(
        row.flax for row in ROWS
    )
    if not {graph.name, tree.name} <= set(SHOWN):
        pytest.skip("the row in tree mode is not shown by this build")
    text = (target("docs/porting.html", "porting.md")).read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    raises = sections["Runs in graph mode, raises in tree mode"]
    assert "dropout-needs-graph-mode" in raises and "| runs | `` TypeError: grad requires" in raises
    assert not re.search(r"\| runs \| runs \|", raises)
    assert re.search(r"\| runs \| runs \|", sections["Runs in both, with another result"])
