"""The measurements page says what the data file says, and how to make one; the bench compares what it should."""

import json
import operator
import re

import pytest
from bs4 import BeautifulSoup

from bench import measure, steps
from harness import measurements, plain


def three(value):
    return [value, value + 1, value + 2]


def made():
    """Data as `nox -s bench` writes it, every number different from the others."""
    numbers = iter(range(101, 10_000, 3))
    variants = [*measurements.PLOTTED, "hand-written JAX"]
    return {
        "date": "2026-01-02",
        "quick": False,
        "machine": {"cpu": "A <fast> CPU", "cores": 2, "system": "Linux x86_64"},
        "versions": {"Python": "3.13.1", "Flax": "0.12.12", "jax": "0.12.0", "optax": "0.2.8"},
        "plan": measure.FULL | {"tolerance": 1e-5, "epoch_steps": 20},
        "models": {"MLP": "four layers", "epoch": "two layers"},
        "steps": [
            {"model": "MLP", "variant": variant, "minibatches": n}
            | {key: three(next(numbers)) for key in ("ratio", "cpu_ms", "wall_ms")}
            | {key: next(numbers) for key in ("lower_s", "compile_s")}
            for n in (1, 2, 4)
            for variant in variants
        ],
        "calls": [
            {"variant": variant, "leaves": leaves}
            | {key: three(next(numbers)) for key in ("over_us", "cpu_us", "wall_us")}
            for leaves in (26, 126)
            for variant in ("nnx.jit", "hand-written JAX")
        ],
        "epochs": [
            {"variant": variant} | {key: three(next(numbers)) for key in ("ratio", "cpu_ms", "wall_ms")}
            for variant in ("one program", "Python loop")
        ],
    }


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "measurements.json"
    path.write_text(json.dumps(made()))
    return path


def test_without_data_the_page_says_how_to_make_it(tmp_path):
    text = measurements.page(tmp_path / "none.json")
    assert "`nox -s bench`" in text and "<table" not in text and "##" not in text


def test_every_number_stands_in_a_table(file):
    soup = BeautifulSoup(measurements.page(file), "html.parser")
    shown = {float(n) for cell in soup.select("td") for n in re.findall(r"[\d.]+", cell.get_text())}
    data = made()
    for record in [*data["steps"], *data["calls"], *data["epochs"]]:
        for key, value in record.items():
            if key not in ("model", "variant", "minibatches", "leaves"):
                assert set(value if isinstance(value, list) else [value]) <= shown, (record, key)
    assert "not measured" not in soup.get_text()


def test_plots_are_named_and_follow_the_theme(file):
    plots = BeautifulSoup(measurements.page(file), "html.parser").select("svg")
    names = [plot["aria-label"] for plot in plots]
    assert len(names) == len(set(names)) == 2 and all(name.startswith("Plot: ") for name in names)
    for plot in plots:
        assert "unrolled" in plot.get_text(), "text is text, and a line has its name"
        assert "#000000" not in str(plot) and "currentColor" in str(plot)
    ids = [tag["id"] for plot in plots for tag in plot.select("[id]")]
    assert len(ids) == len(set(ids))


def test_the_page_repeats_and_is_plain_markdown_too(file):
    text = measurements.page(file)
    assert text == measurements.page(file)
    assert "A &lt;fast&gt; CPU" in text and "| unrolled |" in plain.markdown(text)


def test_a_variant_that_a_release_does_not_have_is_left_out(file):
    data = made()
    data["steps"] = [r for r in data["steps"] if (r["variant"], r["minibatches"]) != ("unrolled", 4)]
    file.write_text(json.dumps(data))
    assert "not measured" in measurements.page(file)


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps(made() | {"steps": [{"model": "MLP"}]}), "\xff"])
def test_a_corrupt_file_is_named_with_what_to_do(file, text):
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"measurements\.json is not .*run `nox -s bench`, or delete it"):
        measurements.page(file)


def test_what_is_plotted_is_measured():
    assert set(measurements.PLOTTED) <= set(steps.STEPS) and measure.REFERENCE in steps.STEPS


def test_times_are_compared_within_their_round():
    times = {"a": [2.0, 40.0, 6.0], "b": [1.0, 10.0, 2.0]}
    assert measure.paired(times, "b") == {"a": [2.0, 4.0, 3.0], "b": [1.0, 1.0, 1.0]}
    assert measure.paired(times, "b", operator.sub)["a"] == [1.0, 30.0, 4.0]
    assert measure.quartiles([2.0, 4.0, 3.0]) == [2.5, 3.0, 3.5]
    assert measure.quartiles([1.23456]) == [1.23, 1.23, 1.23]
    with pytest.raises(ValueError):
        measure.paired({"a": [1.0], "b": [1.0, 2.0]}, "b")


def test_every_round_runs_every_variant():
    ran = []
    runs = {"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}
    cpu, wall = measure.interleaved(runs, 5, 3, 1e-3, lambda: ran.append("|"))
    warm_up, *rounds = "".join(ran).replace("ab", "ab#", 1).split("#")
    assert warm_up == "ab" and all(sorted(r) == list("aaabbb") for r in rounds[0].split("|")[:-1])
    assert all(len(times[name]) == 5 for times in (cpu, wall) for name in runs)


@pytest.mark.parametrize("found", [[[2.0, 4.0]], [[1.0]], [], [[1.0, float("nan")]], [[1.0, 2.001]]])
def test_a_wrong_variant_is_not_timed(found):
    measure.check([[1.0, 2.0]], [[1.0, 2.0]], "right")
    with pytest.raises(measure.WrongError, match="MLP, unrolled, N = 2"):
        measure.check(found, [[1.0, 2.0]], "MLP, unrolled, N = 2")
    with pytest.raises(measure.WrongError):
        measure.check([[0.0]], [[0.0]], "gradients of zeros prove nothing")


def test_the_machine_is_described_without_its_name():
    import platform

    assert platform.node() not in json.dumps(measure.machine())
