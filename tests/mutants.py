"""Mistakes that a person could make in a recipe, as edits of its text. Each must be caught when the recipe runs.

`COMMON` are edits for every recipe whose snippet has the pattern, one for each place. `OWN` are
edits of one recipe: a text that stands in it once, and what it becomes. `SAME` are edits that change nothing that could
be caught, each with the reason; they are not run.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from harness import rows
from harness.contract import Recipe

FOLDER = rows.ROOT / "build" / "mutants"

COMMON = [
    ("the division is forgotten", r" / (num_minibatches|len\(losses\)|len\(x\)|count|total_count)\b", ""),
    ("the division is made twice", r"( / (?:num_minibatches|len\(losses\)))\b", r"\1\1"),
    ("gradients are subtracted", r"\bjnp\.add\b", "jnp.subtract"),
    ("the sum is bfloat16", r"jnp\.zeros_like\((\w+)\)", r"jnp.zeros_like(\1, jnp.bfloat16)"),
    ("the sum starts at one", r"\bjnp\.zeros_like\b", "jnp.ones_like"),
    ("the state is not written back", r"^ +nnx\.update\(model, \w+\).*\n", ""),
    ("the optimizer is not called", r"^ +optimizer\.update\(.*\).*\n", ""),
    ("statistics start over in each minibatch", r"\(loss, rest\), grads = ", "(loss, _), grads = "),
    ("the merged model is not a copy", r", copy=True\)", ")"),
    ("the sum of the rows is taken for their mean", r"\bjnp\.mean\(", "jnp.sum("),
    ("the mean of the losses is their sum", r"\blosses\.mean\(\)", "losses.sum()"),
    ("the mask is forgotten", r" \* mask\b", ""),
    ("the wrong part of the batch", r"\[i\]", "[0]"),
    ("another seed", r"\bjax\.random\.fold_in\(([^,()]+), [^()]+\)", r"\1"),
]  # fmt: skip

OWN: dict[str, list[tuple[str, str, str]]] = {
    "accumulate_in_float32": [
        (
            "the mean counts what was skipped",
            "lambda a: a / kept, total",
            "lambda a: a / num_minibatches, total",
        ),
        (
            "a skipped minibatch leaves its statistics",
            "jnp.where(finite, n, old), new, (total, rest))",
            "jnp.where(finite, n, old), new[0], total), new_rest",
        ),
        ("the loss is not looked at", "jax.tree.leaves((loss, grads))", "jax.tree.leaves(grads)"),
        ("the loss scale stays", "jnp.where(finite, loss_scale, loss_scale / 2)", "loss_scale"),
    ],
    "accumulate_into_refs": [
        (
            "the optimizer is not donated",
            "donate_argnums=(0, 1))\ndef train_step",
            "donate_argnums=0)\ndef train_step",
        ),
    ],
    "accumulate_sharded_minibatches": [
        ("a tree of shardings is not read", "jax.tree.broadcast(batch_sharding, batch)", "jax.tree.map(lambda _: batch_sharding, batch)"),
        (
            "the wrong axis is sharded",
            "P(*sharding.spec[:1], None, *sharding.spec[1:])",
            "P(None, *sharding.spec)",
        ),
        (
            "no constraint",
            "        x = jax.lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, spec))\n",
            "",
        ),
        ("the rows of all devices must divide", "if rows % num_minibatches:", "if len(x) % num_minibatches:"),
    ],
    "accumulate_with_fori_loop": [
        (
            "the last loss for the sum",
            "leaves(grads)), loss_sum + loss, model",
            "leaves(grads)), loss, model",
        ),
    ],
    "accumulate_with_scan": [
        (
            "every minibatch is the whole batch",
            "lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)\n    leaves",
            "lambda a: jnp.stack([a] * num_minibatches), batch)\n    leaves",
        ),
        ("the last gradients for the sum", "return (model, total), loss", "return (model, grads), loss"),
    ],
    "accumulate_with_split_merge": [
        (
            "the state before the call is returned",
            "params, rest, copy=True)\n    loss = loss_fn(model, minibatch)\n    return loss, nnx.state(model, nnx.Not(nnx.Param))",
            "params, rest, copy=True)\n    loss = loss_fn(model, minibatch)\n    return loss, rest",
        ),
    ],
    "batchnorm_and_dropout": [
        (
            "the statistics are lost",
            "nnx.state(merged, nnx.Not(nnx.Param))",
            "nnx.state(merged, nnx.RngState)",
        ),
        (
            "the model is called twice",
            "  # the next minibatch starts from here\n        return loss, grads\n",
            "\n        model(minibatch[0])\n        return loss, grads\n",
        ),
    ],
    "carry_dtype_and_shape": [
        ("the dtype of what is added", "(t + n).astype(t.dtype)", "t + n"),
        (
            "the sum is bfloat16",
            "def accumulator_like(tree, dtype=jnp.float32)",
            "def accumulator_like(tree, dtype=jnp.bfloat16)",
        ),
        (
            "integers become floats",
            "dtype=dtype if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype",
            "dtype=dtype",
        ),
    ],
    "complete_train_step": [
        ("labels are not smoothed", "optax.smooth_labels(labels, config.label_smoothing)", "labels"),
        ("the mask is the same", "grads, (metrics, rest) = jax.grad", "grads, (metrics, _) = jax.grad"),
        ("the batch is donated", "@nnx.jit(donate_argnums=1)", "@nnx.jit(donate_argnums=0)"),
        (
            "the wrong axis is sharded",
            "P(*sharding.spec[:1], None, *sharding.spec[1:])",
            "P(None, *sharding.spec)",
        ),
    ],
    "different_trace_level": [
        (
            "the masks are lost",
            "return loss, nnx.state(model, nnx.Not(nnx.Param))",
            "return loss, nnx.state(model, nnx.BatchStat)",
        ),
    ],
    "donate_and_measure_memory": [
        ("the batch is donated", 'donate_argnames="session", static', 'donate_argnames="batch", static'),
        ("temporary memory is left out", "return ends + memory.temp_size_in_bytes", "return ends"),
    ],
    "epoch_in_one_scan": [
        (
            "the model stays in evaluation mode",
            "    model = nnx.clone(model)  # eval() on the model itself would outlast the call\n",
            "",
        ),
        (
            "the labels are not shuffled",
            "model, optimizer = carry\n        batch = jax.tree.map(lambda a: a[rows], train_data)",
            "model, optimizer = carry\n        batch = train_data[0][rows], train_data[1][:batch_size]",
        ),
        (
            "evaluated on the training data",
            "num_rows, batch_size))\n    return steps, evaluate(model, eval_data)",
            "num_rows, batch_size))\n    return steps, evaluate(model, train_data)",
        ),
    ],
    "fori_loop_rejects_accumulator": [
        (
            "the last gradients for the sum",
            "return jax.tree.map(jnp.add, total, grads), loss_sum + loss, model\n\n    zeros = [",
            "return grads, loss_sum + loss, model\n\n    zeros = [",
        ),
    ],
    "loop_arguments_and_axes": [
        (
            "one iteration too many",
            "carry: carry[0] < len(minibatches)",
            "carry: carry[0] <= len(minibatches)",
        ),
        (
            "one iteration too few",
            "nnx.fori_loop(0, len(minibatches), ",
            "nnx.fori_loop(1, len(minibatches), ",
        ),
    ],
    "many_processes": [
        (
            "every process saves",
            'if process_id == 0:\n        np.savez("params',
            'if True:\n        np.savez("params',
        ),
        ("every process reads all rows", 'np.load(name, mmap_mode="r")', "np.load(name)"),
        ("every process has the same rows", "a[process_id::num_processes]", "a[: len(a) // num_processes]"),
        (
            "reduced in every minibatch",
            "return jax.tree.map(jnp.add, total, grads), loss\n",
            'return jax.tree.map(jnp.add, total, jax.lax.pmean(grads, "data")), loss\n',
        ),
    ],
    "metrics_in_loops": [
        ("the labels are lost", '"labels": labels}', '"labels": 0 * labels}'),
        ("the metrics are not written back", "    nnx.update(metrics, counts)\n", ""),
        ("the mean counts as one row", '{"loss": losses, "logits"', '{"loss": losses.mean(), "logits"'),
        ("the metrics are not donated", '("model", "optimizer", "metrics")', '("model", "optimizer")'),
    ],
    "module_changes_in_a_loop": [
        (
            "the Variable is overwritten",
            "model.bias[...] += i  #",
            "model.bias = nnx.Param(model.bias[...] + i)  #",
        ),
        ("the body returns a clone", "return model  # the object that came in", "return nnx.clone(model)"),
        ("steps are not counted", "    model.steps[...] += 1\n    return model  #", "    return model  #"),
    ],
    "multisteps_or_in_step": [
        (
            "MultiSteps sums",
            "optax.MultiSteps(tx, every_k_schedule=num_minibatches)",
            "optax.MultiSteps(tx, every_k_schedule=num_minibatches, use_grad_mean=False)",
        ),
        ("the loss of the last minibatch", "return losses.mean()", "return losses[-1]"),
    ],
    "name_the_leaf_that_differs": [
        (
            "the index is taken for the carry",
            "args[loop in (nnx.fori_loop, jax.lax.fori_loop)]",
            "args[loop is nnx.fori_loop]",
        ),
        ("swapped arguments are not tried", "body(*args[::-1])", "body(*args)"),
        (
            "sharding is not compared",
            '("shape", "dtype", "sharding", "weak_type")',
            '("shape", "dtype", "weak_type")',
        ),
    ],
    "optimizers_with_needs": [
        ("no checkpoint", "    @jax.checkpoint\n", ""),
        (
            "the statistics are summed",
            "jnp.maximum, largest, stats_of_minibatch",
            "jnp.add, largest, stats_of_minibatch",
        ),
        (
            "the line search sees one minibatch",
            "value_fn=value_fn)\n    return value",
            "value_fn=lambda p: batch_loss(p, rest, graphdef, [a[-1:] for a in minibatches]))\n    return value",
        ),
    ],
    "other_models_in_loops": [
        ("the average has the dtype of the parameters", "map(lambda p: jnp.array(p, jnp.float32), nnx", "map(lambda p: jnp.array(p), nnx"),
        (
            "the average is not a copy",
            "return jax.tree.map(lambda p: jnp.array(p, jnp.float32), nnx.state(model, nnx.Param))",
            "return nnx.state(model, nnx.Param)",
        ),
        ("the average is not written back", "    nnx.update(ema, average)\n", ""),
        (
            "the average is a step behind",
            "        optimizer.update(model, grads)\n        params = nnx.state(model, nnx.Param)\n        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, average, params)\n",
            "        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, average, params)\n        optimizer.update(model, grads)\n",
        ),
    ],
    "reduce_once_per_step": [
        (
            "reduced in every minibatch",
            "(minibatch_loss)(params, minibatch)\n            return jax.tree.map(jnp.add, total, grads), loss\n",
            '(minibatch_loss)(params, minibatch)\n            return jax.tree.map(jnp.add, total, jax.lax.pmean(grads, "data")), loss\n',
        ),
        ("the parameters do not vary", '        params = vary(params, "data")  # or', "        # or"),
        (
            "every device has all rows",
            'in_specs=(P(), P("data")), out_specs=P())\n    def mean_over_devices(params, rows):',
            "in_specs=(P(), P()), out_specs=P())\n    def mean_over_devices(params, rows):",
        ),
    ],
    "retracing_and_dispatch": [
        ("padding counts in the mean", "axis=-1)) / mask.sum()", "axis=-1)) / len(x)"),
        (
            "the dtype of the batch stays",
            "np.asarray(a, np.float32) for a in (x, y",
            "np.asarray(a) for a in (x, y",
        ),
    ],
    "scan_over_layers": [
        ("no remat", "        @nnx.remat  # leave it out where memory is plenty\n", ""),
        (
            "all layers are the same",
            "        @nnx.split_rngs(splits=num_layers)\n        @nnx.vmap\n        def make_blocks",
            "        @nnx.vmap(in_axes=None, axis_size=num_layers)\n        def make_blocks",
        ),
    ],
    "silent_wrong_results": [
        ("zeros equal zeros", '    assert np.any(full), "the expected gradient is zero, which proves nothing"\n', ""),
        ("nothing selected is nothing still", '    assert before, "the filters select nothing"\n', ""),
        ("one leaf that moves is enough", "assert not still, f", "assert len(still) < len(before), f"),
        ("what was read is not a copy", "(path, np.array(leaf)) for", "(path, leaf) for"),
        ("the last rows are not missed", ", minlength=batch_size + 1)[1:]", ")[1:]"),
        (
            "only the factor is compared",
            "assert difference < tolerance",
            "assert abs(factor - 1) < tolerance",
        ),
    ],
    "structure_mismatch_catalogue": [
        (
            "one iteration too many",
            "carry: carry[0] < len(minibatches)",
            "carry: carry[0] <= len(minibatches)",
        ),
        ("the last loss for the sum", "return (total + loss, session), loss", "return (loss, session), loss"),
    ],
    "tree_mode": [
        (
            "the masks are lost",
            "return loss, nnx.state(model, nnx.Not(nnx.Param))",
            "return loss, nnx.state(model, nnx.BatchStat)",
        ),
    ],
    "unequal_minibatches": [
        ("the count has the dtype of the mask", "jnp.sum(mask, dtype=jnp.int32)\n", "jnp.sum(mask)\n"),
        ("no token at all", "    count = jnp.maximum(count, 1)  # no token", "    # no token"),
        ("the count of the last minibatch", "counts.sum(), total", "counts[-1], total"),
    ],
    "unrolled_or_looped": [
        ("unroll is not handed on", "zeros, minibatches, unroll=unroll)", "zeros, minibatches)"),
        (
            "every minibatch is the whole batch",
            "def minibatch_loss(params, minibatch):\n        return loss_fn(nnx.merge(graphdef, params), minibatch)",
            "def minibatch_loss(params, minibatch):\n        return loss_fn(nnx.merge(graphdef, params), batch)",
        ),
    ],
    "what_a_loop_may_touch": [
        (
            "the same noise in each minibatch",
            "jax.random.normal(session.rngs.noise(), x.shape)",
            "jax.random.normal(jax.random.key(1), x.shape)",
        ),
        ("the optimizer is not called", "            session.optimizer.update(session.model, grads)\n", ""),
        ("the last loss for the sum", "return session, total + loss  #", "return session, loss  #"),
    ],
    "while_loop_decode": [
        (
            "the cache is one place late",
            "self.values[...].at[rows, positions].set",
            "self.values[...].at[rows, positions + 1].set",
        ),
        (
            "a token does not see itself",
            "jnp.arange(keys.shape[1]) <= positions",
            "jnp.arange(keys.shape[1]) < positions",
        ),
        ("rows that are done go on", "jnp.where(done, last, logits.argmax(-1))", "logits.argmax(-1)"),
    ],
}  # fmt: skip

SAME: dict[tuple[str, str], str] = {}


@dataclass(frozen=True)
class Mutant:
    """A recipe's text with one mistake in it."""

    recipe: str
    mistake: str
    source: str

    @property
    def name(self) -> str:
        """How reports name it."""
        return f"{self.recipe}: {self.mistake}"


class MutantError(ValueError):
    """An edit does not fit its recipe: the message names both, and how often its text was found."""


def of(recipe: Recipe) -> list[Mutant]:
    """The mutants of one recipe. Raises MutantError for an edit of its own that does not fit once."""
    made = []
    cells = [cell.source for cell in recipe.notebook.cells if "snippet" in cell.metadata.get("tags", [])]
    for mistake, pattern, becomes in COMMON:
        hits = [(cell, hit) for cell in cells for hit in re.finditer(pattern, cell, re.MULTILINE)]
        for number, (cell, hit) in enumerate(hits, 1):
            name = mistake if number == 1 else f"{mistake}, place {number}"
            changed = cell[: hit.start()] + hit.expand(becomes) + cell[hit.end() :]
            if (recipe.name, name) not in SAME:
                made.append(Mutant(recipe.name, name, recipe.source.replace(cell, changed)))
    for mistake, text, becomes in OWN.get(recipe.name, []):
        if (times := recipe.source.count(text)) != 1:
            raise MutantError(
                f"{recipe.name}, {mistake}: expected {text!r} once in the recipe, found it {times} times"
            )
        made.append(Mutant(recipe.name, mistake, recipe.source.replace(text, becomes)))
    return made


def record(mutant: Mutant, row: str, caught: str) -> None:
    """Note what caught a mutant, the message of a RecipeError, or "" for a mutant that survives."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    noted = {"recipe": mutant.recipe, "mistake": mutant.mistake, "row": row, "caught": caught}
    name = re.sub(r"\W+", "-", mutant.name)
    (FOLDER / f"{name}.json").write_text(json.dumps(noted, indent=2), encoding="utf-8")


def report() -> tuple[Path, list[str]]:
    """Write a table of what was noted. Returns its path, and the mutants that survive."""
    noted = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]
    survivors = [f"{note['recipe']}: {note['mistake']}" for note in noted if not note["caught"]]
    lines = [f"{len(noted)} mutants, {len(survivors)} survive.", "", *(f"- {name}" for name in survivors), ""]
    lines += ["| recipe | mistake | caught in | by |", "|---|---|---|---|"]
    for note in noted:
        cell = re.search(r"cell \d+ \(line \d+\)", note["caught"])
        came = re.search(r"came: +(.*)", note["caught"])
        by = came[1].replace("|", "\\|") if came else "nothing"
        lines.append(f"| {note['recipe']} | {note['mistake']} | {cell[0] if cell else ''} | {by} |")
    FOLDER.mkdir(parents=True, exist_ok=True)  # of a run without mutants
    path = FOLDER / "report.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path, survivors
