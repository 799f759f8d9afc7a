"""The measurements page: from the file that `nox -s bench` writes to Markdown with plots and tables."""

from __future__ import annotations

import io
import json
import re
from html import escape
from pathlib import Path

import jsonschema
import matplotlib
from matplotlib.figure import Figure

from harness import merge
from harness.rows import ROOT

SCHEMA = ROOT / "docs" / "measurements.schema.json"
PLOTTED = {  # what the plots show: variant, colour and dashes that can be told apart in both themes
    "unrolled": ("#d9622b", (0, (5, 2))),
    "optax.MultiSteps": ("#2f81d8", (0, (1, 1.5))),
    "split/merge, jax.lax.scan": ("#000000", "solid"),
}
RC = {"svg.fonttype": "none", "svg.hashsalt": "nnx", "figure.facecolor": "none", "axes.facecolor": "none"}
MISSING = """There are no measurements in this build. `nox -s bench` makes them; then build the site again."""


def page(path: Path) -> str:
    """The MyST Markdown for `[measurements]`, from the data file at `path`, or how to make one.

    Raises ValueError for a file that is not what `docs/measurements.schema.json` says.
    """
    if not path.exists():
        return MISSING
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        jsonschema.validate(data, json.loads(SCHEMA.read_text(encoding="utf-8")))
    except jsonschema.ValidationError as error:
        raise ValueError(_unusable(path, f"{error.json_path}: {error.message[:200]}")) from None
    except ValueError as error:
        raise ValueError(_unusable(path, str(error))) from None
    return "\n\n".join([_how(data), *_steps(data), *_compiling(data), *_calls(data), *_epochs(data)])


def _unusable(path: Path, why: str) -> str:
    return f"{path.parent.name}/{path.name} is not a file of measurements ({why}); run `nox -s bench`, or delete it"


def _how(data: dict) -> str:
    machine, plan = data["machine"], data["plan"]
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    quick = "**A quick run, which only tries the machinery: its figures mean nothing.**\n\n" * data["quick"]
    return f"""{quick}Measured on {data["date"]}: {escape(machine["cpu"])}, {machine["cores"]} cores, {machine["system"]}; {versions}.

All variants run in one process, in turn and in an order drawn anew each round: {plan["rounds"]} rounds after a warm-up.
Times are CPU times of the process until the result is ready. A ratio compares two times of the same round, so that what else the machine does
falls on both. A figure is the median, with first and third quartile beside it. Wall times are an indication only.
Before a variant is timed, its gradients must equal those of the full batch to {plan["tolerance"]:g} of the largest. `nox -s bench` measures again."""


def _steps(data: dict) -> list[str]:
    tables = {"CPU time, ratio to hand-written JAX in the same round": ("ratio", 2)}
    tables |= {"CPU time of a step, ms": ("cpu_ms", 1), "wall time of a step, ms": ("wall_ms", 1)}
    return [
        "## Time per step, by number of minibatches",
        "One training step with Adam, over a batch cut into N minibatches. Ratios are to hand-written JAX with the same N, the line at 1. "
        "All others are called through `nnx.jit`, whose [cost per call](#cost-of-a-call) is in their time; the eager loop and `optax.MultiSteps` call it for each minibatch.",
        "\n".join(f"- **{name}:** {about}." for name, about in data["models"].items() if name != "epoch"),
        *_against_n(
            data, "CPU time of a step, ratio to hand-written JAX", lambda r: r["ratio"][1], tables, 1
        ),
    ]


def _compiling(data: dict) -> list[str]:
    tables = {"lowering, CPU s": ("lower_s", 2), "compiling, CPU s": ("compile_s", 2)}
    return [
        "## Time to lower and to compile",
        "CPU seconds of one compilation without a cache: read the trend, not one figure. A Python loop in a program is traced and compiled once "
        "for each minibatch, a loop of JAX once. Where a step is several programs, their times are added.",
        *_against_n(data, "Lowering and compiling, CPU s", lambda r: r["lower_s"] + r["compile_s"], tables),
    ]


def _against_n(data: dict, title: str, figure_of, tables: dict, line: float | None = None) -> list[str]:
    """A plot of one figure and, folded, tables of all, for each model. `tables`: title to key and digits."""
    parts = []
    for model in dict.fromkeys(record["model"] for record in data["steps"]):
        records = [record for record in data["steps"] if record["model"] == model]
        columns = {record["minibatches"]: f"N = {record['minibatches']}" for record in records}
        made = []
        for name, (key, digits) in tables.items():
            cells = {(r["variant"], r["minibatches"]): _three(r[key], digits) for r in records}
            made.append(_table(f"{model}: {name}", "variant", columns, cells))
        parts += [
            _plot(records, f"{title}: {model}", figure_of, line),
            _folded(f"All numbers: {model}", made),
        ]
    return parts


def _calls(data: dict) -> list[str]:
    plan = data["plan"]
    columns = {r["leaves"]: f"{r['leaves']} leaves" for r in data["calls"]}
    made = []
    for what, key in (
        ("Above hand-written JAX", "over_us"),
        ("CPU time", "cpu_us"),
        ("Wall time", "wall_us"),
    ):
        cells = {(r["variant"], r["leaves"]): _three(r[key], 0) for r in data["calls"]}
        made.append(_table(f"{what}, µs per call", "called by", columns, cells))
    return [
        "## Cost of a call",
        "The same step, on a model so small that the call is most of it. *Leaves* are the arrays of model and optimizer. "
        f"The cost is the CPU time above that of hand-written JAX in the same round: {plan['call_rounds']} rounds of {plan['calls']} calls.",
        merge.raw(made[0]),
        _folded("CPU and wall time of a call", made[1:]),
    ]


def _epochs(data: dict) -> list[str]:
    columns = {
        "ratio": "CPU time, ratio to one program",
        "cpu_ms": "CPU time, ms",
        "wall_ms": "wall time, ms",
    }
    cells = {(r["variant"], key): _three(r[key], 2) for r in data["epochs"] for key in columns}
    table = _table("One epoch", "epoch", columns, cells)
    return [
        "## An epoch in one program, or call by call",
        f"An epoch of {data['plan']['epoch_steps']} steps on an MLP of {data['models']['epoch']}. The batch is cut into one part for each step.",
        merge.raw(table),
    ]


def _three(value: float | list[float], digits: int) -> str:
    """A figure, and its quartiles where it has them (HTML)."""
    if not isinstance(value, list):
        return f"{value:.{digits}f}"
    low, median, high = (f"{number:.{digits}f}" for number in value)
    return f"{median} <small>({low} to {high})</small>"


def _table(title: str, first: str, columns: dict, cells: dict) -> str:
    """A table with a row for each variant; `cells` by variant and column (HTML)."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in [first, *columns.values()])
    body = ""
    for variant in dict.fromkeys(variant for variant, _ in cells):
        row = "".join(f"<td>{cells.get((variant, column), 'not measured')}</td>" for column in columns)
        body += f'<tr><th scope="row">{escape(variant)}</th>{row}</tr>\n'
    table = f'<table class="outcomes numbers"><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>'
    return f'<p>{escape(title)}</p>\n<div class="wide">{table}</div>'


def _folded(summary: str, tables: list[str]) -> str:
    body = "\n".join(tables)
    return merge.raw(f"<details><summary>{escape(summary)}</summary>\n{body}\n</details>")


def _plot(records: list[dict], title: str, figure_of, line: float | None) -> str:
    """The plotted variants against N, each named at the end of its line. `line` is a height to mark; N is then in octaves."""
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(6.4, 3.4))
        axes = figure.add_axes((0.06, 0.15, 0.64, 0.74))
        ends = []
        for variant, (colour, dashes) in PLOTTED.items():
            found = [(r["minibatches"], figure_of(r)) for r in records if r["variant"] == variant]
            if points := sorted(found):
                axes.plot(
                    *zip(*points, strict=True), color=colour, linestyle=dashes, marker="o", markersize=3
                )
                ends.append((points[-1][1], variant))
        counts = sorted({record["minibatches"] for record in records})
        if line is not None:
            axes.axhline(line, color="#000000", linewidth=0.6)
            axes.set_xscale("log", base=2)
        axes.set_xticks(counts if line is not None else [counts[0], *counts[-3:]])
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.minorticks_off()
        axes.set_xlabel("N, number of minibatches")
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        height, last = axes.get_ylim()[1], -1.0
        for value, variant in sorted(ends):
            last = max(value / height, last + 0.07)  # names do not overlap
            axes.text(1, last, variant, va="center", transform=axes.transAxes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return merge.raw(merge.svg(buffer.getvalue(), re.sub(r"\W+", "-", title.lower()), title))
