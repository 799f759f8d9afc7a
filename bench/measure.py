"""Measure the variants of `steps.py` and write `docs/measurements.json`; `nox -s bench` runs it.

Variants run in turn, in an order drawn anew each round, and are compared within their round, so that what else the
machine does falls on all of them. Times are CPU times of the process; wall times stand beside them.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from bench import steps

ROOT = Path(__file__).parents[1]
REFERENCE = "hand-written JAX"
FULL = {"minibatches": [1, 2, 4, 8, 16, 32, 64], "rounds": 15, "call_rounds": 40, "calls": 20}
QUICK = {"minibatches": [2], "rounds": 2, "call_rounds": 2, "calls": 2}
TOLERANCE = 1e-5  # of the largest number compared
EPOCH_STEPS = 20


class WrongError(Exception):
    """A variant does not compute what the others do, so its time means nothing. Names it and by how much it is off."""


def check(found: list, expected: list, place: str) -> None:
    """Hold arrays (gradients, losses) to the expected ones, one by one. Raises WrongError."""
    shapes, wanted = [np.shape(leaf) for leaf in found], [np.shape(leaf) for leaf in expected]
    if shapes != wanted or not wanted:
        raise WrongError(f"{place}: expected shapes {wanted}, came {shapes}")
    largest = max(float(np.max(np.abs(leaf))) for leaf in expected)
    off = max(float(np.max(np.abs(np.subtract(a, b)))) for a, b in zip(found, expected, strict=True))
    if not (0 < largest < np.inf and off <= TOLERANCE * largest):
        raise WrongError(f"{place}: off by {off:.2g}, where the largest expected is {largest:.2g}")


def quartiles(values: list[float], digits: int = 2) -> list[float]:
    """First quartile, median and third quartile, rounded."""
    found = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return [round(value, digits) for value in found]


def paired(
    times: dict[str, list[float]], reference: str, how: Callable = operator.truediv
) -> dict[str, list]:
    """By name, each round's time over the reference's in the same round (or minus it, with `operator.sub`)."""
    return {n: [how(a, b) for a, b in zip(t, times[reference], strict=True)] for n, t in times.items()}


def interleaved(
    runs: dict[str, Callable], rounds: int, calls: int, unit: float, tick: Callable
) -> tuple[dict, dict]:
    """Run each once to warm up, then `calls` times in each round. Returns CPU and wall time of a call, by name.

    `unit` is in seconds: 1e-3 gives milliseconds. `tick` is called after each round.
    """
    cpu, wall = {name: [] for name in runs}, {name: [] for name in runs}
    order = np.random.default_rng(0)
    for run in runs.values():
        jax.block_until_ready(run())
    for _ in range(rounds):
        for name in order.permutation(list(runs)).tolist():
            began, began_cpu = time.perf_counter(), time.process_time()
            for _ in range(calls):
                result = runs[name]()
            jax.block_until_ready(result)
            cpu[name].append((time.process_time() - began_cpu) / calls / unit)
            wall[name].append((time.perf_counter() - began) / calls / unit)
        tick()
    return cpu, wall


def measure_steps(name: str, problem: steps.Problem, plan: dict, tick: Callable) -> list[dict]:
    """Compile and run every variant for every N. Raises WrongError before a round that has a wrong variant in it."""
    model, _ = steps.session(problem)
    expected = jax.tree.leaves(nnx.jit(nnx.grad(problem.loss))(model, problem.batch))
    records = []
    for n in plan["minibatches"]:
        runs, compiling = {}, {}
        for variant, make in steps.STEPS.items():
            step = make(problem, n)
            began = time.process_time()
            programs = step.lower(step.batch)
            lowered = time.process_time()
            for program in programs:
                program.compile()
            seconds = lowered - began, time.process_time() - lowered
            compiling[variant] = {"lower_s": round(seconds[0], 2), "compile_s": round(seconds[1], 2)}
            jax.block_until_ready(step.call(step.batch))
            check(step.gradients(), expected, f"{name}, {variant}, N = {n}")
            runs[variant] = lambda step=step: step.call(step.batch)
            tick()
        cpu, wall = interleaved(runs, plan["rounds"], 1, 1e-3, tick)
        ratio = paired(cpu, REFERENCE)
        records += [
            {"model": name, "variant": v, "minibatches": n, "ratio": quartiles(ratio[v])}
            | {"cpu_ms": quartiles(cpu[v], 1), "wall_ms": quartiles(wall[v], 1)}
            | compiling[v]
            for v in runs
        ]
    return records


def measure_calls(problem: steps.Problem, plan: dict, tick: Callable) -> list[dict]:
    """What a call costs more than that of the hand-written step, for each way to call. Raises WrongError."""
    made = {name: make(problem) for name, make in steps.CALLS.items()}
    for _ in range(2):
        losses = {name: call(problem.batch) for name, call in made.items()}
        for name, loss in losses.items():
            check([loss], [losses[REFERENCE]], f"loss by {name}")
    runs = {name: lambda call=call: call(problem.batch) for name, call in made.items()}
    cpu, wall = interleaved(runs, plan["call_rounds"], plan["calls"], 1e-6, tick)
    over = paired(cpu, REFERENCE, operator.sub)
    leaves = len(jax.tree.leaves(nnx.state(steps.session(problem))))
    return [
        {"leaves": leaves, "variant": v, "over_us": quartiles(over[v], 0)}
        | {"cpu_us": quartiles(cpu[v], 0), "wall_us": quartiles(wall[v], 0)}
        for v in runs
    ]


def measure_epochs(problem: steps.Problem, plan: dict, tick: Callable) -> list[dict]:
    """An epoch in one program against Python loops over the calls. Raises WrongError."""
    whole, parts = steps.cut(problem.batch, EPOCH_STEPS), steps.cut_list(problem.batch, EPOCH_STEPS)
    compiled, reference = steps.compiled_epoch(problem), "one program, jax.lax.scan"
    runs = {reference: lambda: compiled(whole)[-1]}
    for name, make in steps.CALLS.items():
        call = make(problem)
        runs[f"Python loop, {name}"] = lambda call=call: [call(part) for part in parts][-1]
    losses = {name: run() for name, run in runs.items()}
    for name, loss in losses.items():
        check([loss], [losses[reference]], f"last loss of an epoch, {name}")
    cpu, wall = interleaved(runs, plan["call_rounds"], 1, 1e-3, tick)
    ratio = paired(cpu, reference)
    return [
        {"variant": v, "ratio": quartiles(ratio[v])}
        | {"cpu_ms": quartiles(cpu[v]), "wall_ms": quartiles(wall[v])}
        for v in runs
    ]


def machine() -> dict:
    """CPU model, number of cores and operating system; nothing that names this machine."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = models[0] if models else platform.processor() or platform.machine()
    return {"cpu": cpu, "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}"}


def main() -> None:
    """Measure everything and write the file whole, or not at all."""
    parser = argparse.ArgumentParser(description="Measure the variants of a training step.")
    parser.add_argument("--quick", action="store_true", help="only try the machinery; writes into build/")
    quick = parser.parse_args().quick
    plan = QUICK if quick else FULL
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    models = {
        "MLP": steps.mlp((256,) * 5, 512),
        "transformer": steps.transformer(1 if quick else 2, 64, 64, 64, 32),
    }
    small = [steps.mlp((8,) * layers, 8) for layers in (5, 25)]
    digits = steps.mlp((64, 128, 10), 64 * EPOCH_STEPS)
    total = len(models) * len(plan["minibatches"]) * (len(steps.STEPS) + plan["rounds"])
    with tqdm(total=total + 3 * plan["call_rounds"], unit="run") as bar:
        data = {
            "date": datetime.now(UTC).date().isoformat(),
            "quick": quick,
            "machine": machine(),
            "versions": {"Python": platform.python_version()}
            | {name: version(name.lower()) for name in ("Flax", "jax", "optax")},
            "plan": plan | {"tolerance": TOLERANCE, "epoch_steps": EPOCH_STEPS},
            "models": {name: problem.about for name, problem in models.items()} | {"epoch": digits.about},
            "steps": [r for item in models.items() for r in measure_steps(*item, plan, bar.update)],
            "calls": [r for problem in small for r in measure_calls(problem, plan, bar.update)],
            "epochs": measure_epochs(digits, plan, bar.update),
        }
    out = ROOT / ("build" if quick else "docs") / "measurements.json"
    out.parent.mkdir(exist_ok=True)
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, out)
    print(f"wrote {out.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
