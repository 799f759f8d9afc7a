# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Make tx and the jitted step once, keep shapes and dtypes, count the traces; take a small model apart once.
#     answers: [google/flax#5548, google/flax#4329, google/flax#4994, google/flax#5512, vllm-project/tpu-inference#2607]
#     symptoms:
#       - nnx.jit recompiles every epoch and memory grows
#       - TRACING CACHE MISS never seen function
#       - the training step is slow although the model is small
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # A step that is traced again, or is slow to call
#
# `nnx.jit` recompiles for a new `tx`, a newly jitted step, another shape or dtype. Make `tx` and the step once
# and pad the last batch: then model and optimizer may be made anew. Count the traces to be sure.
#
# ## Do this

# %% tags=["snippet"]
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

traces = Counter()
# Made once: a new tx is another program, even with the same numbers in it.
tx = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)


def loss_fn(model, batch):
    x, y, mask = batch
    return jnp.sum(mask * jnp.mean((model(x) - y) ** 2, axis=-1)) / mask.sum()


@nnx.jit
def train_step(model, optimizer, batch):
    traces["train_step"] += 1  # happens when JAX traces the step, not when the step runs
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


def pad_batch(x, y, size):
    """The batch as float32 with `size` rows, and a mask that is 1 for the rows that count."""
    # float32 for regression: class labels and token ids stay np.int32.
    arrays = [np.asarray(a, np.float32) for a in (x, y, np.ones(len(x)))]
    return [np.pad(a, [(0, size - len(a))] + [(0, 0)] * (a.ndim - 1)) for a in arrays]


# %% [markdown]
# - **One `tx`.** It is a pair of functions, and a function equals only itself. The optimizer keeps it, so it
#   is part of the graph definition, by which JAX finds the program.
# - **The learning rate is state.** `inject_hyperparams` puts it where it can change without a new `tx`.
# - **The last batch is padded.** The mask takes the padding out of the loss and of the gradients. It does not
#   take it out of the statistics of BatchNorm: there, drop the last batch.
#
# ## One trace for three epochs
#
# Each epoch makes model and optimizer anew, as in
# [google/flax#5548](https://github.com/google/flax/issues/5548), with another seed and another learning rate.
# The last batch has two rows. Adam's step is about as long as the learning rate, so it tells which was used.


# %% tags=["proof"]
class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(3, 8, rngs=rngs)
        self.outer = nnx.Linear(8, 2, rngs=rngs)
        self.activation = nnx.relu

    def __call__(self, x):
        return self.outer(self.activation(self.inner(x)))


def create(seed):
    model = MLP(nnx.Rngs(seed))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


x = np.random.default_rng(0).normal(size=(10, 3))
y = x[:, :2] + x[:, 1:]
batches = [pad_batch(x[i : i + 4], y[i : i + 4], 4) for i in (0, 4, 8)]
for seed, rate in enumerate([1e-3, 1e-2, 1e-1]):
    model, optimizer = create(seed)
    optimizer.opt_state.hyperparams["learning_rate"][...] = jnp.float32(rate)
    for batch in batches:
        before = np.array(model.outer.kernel[...])
        train_step(model, optimizer, batch)
        assert 0.3 < np.abs(np.array(model.outer.kernel[...]) - before).max() / rate < 1.1
    assert optimizer.step[...] == 3
assert traces["train_step"] == train_step.jitted_fn._cache_size() == 1

grad = nnx.jit(nnx.grad(loss_fn))
grads, two_rows = grad(model, batches[2]), grad(model, pad_batch(x[8:], y[8:], 2))
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), grads, two_rows)
predicted = np.array(nnx.jit(MLP.__call__)(model, np.float32(x[8:])))
expected = np.mean((predicted - np.float32(y[8:])) ** 2)
assert abs(float(nnx.jit(loss_fn)(model, batches[2])) - expected) < 1e-6
largest = [np.abs(leaf).max() for leaf in jax.tree.leaves(two_rows)]
assert len(largest) == 4 and min(largest) > 1e-2
print(traces["train_step"], "trace in 9 steps; gradients of the padded batch: those of its rows to 1e-06")

# %% [markdown]
# ## See it in your own code
#
# Count with a side effect as above, or ask how many programs the step holds: `step.jitted_fn._cache_size()`, of
# `jax.jit` `step._cache_size()`. Both are private. Three settings of JAX help: `jax_log_compiles` logs each
# compilation, `jax_explain_cache_misses` says what was new about a call, `jax_no_tracing` raises.

# %% tags=["raises-exception"] raises=[{"error": "RuntimeError", "match": "re-tracing function train_step at"}]
print("programs:", train_step.jitted_fn._cache_size())
jax.config.update("jax_no_tracing", True)
try:
    train_step(model, optimizer, batches[0])
    train_step(model, optimizer, pad_batch(x[:8], y[:8], 8))
finally:
    jax.config.update("jax_no_tracing", False)

# %% [markdown]
# ## What traces a step again
#
# Each row counts the traces of three calls, or of those it names: as people write them, and with the cure.

# %% tags=["proof"]
from IPython.display import Markdown


def counted(f):
    def counting(*args):
        traces["counted"] += 1
        return f(*args)

    return counting


def count(*arguments, call=None, **options):
    """The traces of calls with these arguments, by default of `forward`, newly jitted."""
    call = call or nnx.jit(forward, **options)
    traces.clear()
    for args in arguments:
        call(*args)
    return traces["counted"]


def epochs(inits, txs):
    models = [nnx.Linear(3, 1, kernel_init=init, rngs=nnx.Rngs(0)) for init in inits]
    return [(m, rows, nnx.Optimizer(m, tx, wrt=nnx.Param)) for m, tx in zip(models, txs)]


def row(cause, before, cure, after, *expected):
    assert (before, after) in expected, (cause, before, after)
    table.append(f"| {cause} | {before} | {cure} | {after} |")


forward, table, (model, _) = counted(lambda model, x, *rest: model(x).sum()), [], create(seed=0)
rows, half = np.ones((4, 3), np.float32), np.float32(0.5)
full, short, padded = (model, rows), (model, rows[:2]), (model, pad_batch(rows[:2], rows, 4)[0])
float16, cast = (model, np.float16(rows)), (model, pad_batch(np.float16(rows), rows, 4)[0])
txs, inits = [optax.sgd(0.1) for _ in range(3)], [nnx.initializers.lecun_normal() for _ in range(3)]
one_tx, one_init, lambdas, relu = 3 * txs[:1], 3 * inits[:1], [lambda x: x for _ in range(3)], 3 * [nnx.relu]
kept, kept_relu = [(nnx.Sequential(f), rows) for f in lambdas], [(nnx.Sequential(f), rows) for f in relu]
weak, strong = ((*full, 0.5), (*full, jnp.array(0.5)), (*full, half)), 3 * [(*full, half)]
modes = 3 * [(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), rows) for _ in range(2)]
modes[0][0].train(), modes[1][0].eval()

row("a new `tx` each time", count(*epochs(one_init, txs)), "one", count(*epochs(one_init, one_tx)), (3, 1))
before, after = count(*epochs(inits, one_tx)), count(*epochs(one_init, one_tx))
row("a new initialiser each time", before, "one", after, (3, 1), (1, 1))
row("a new lambda, kept by the model", count(*kept), "a named function", count(*kept_relu), (3, 1))
before, after = (count(*((*full, f) for f in fs), static_argnums=2) for fs in (lambdas, relu))
row("a new lambda as static argument", before, "a named function", after, (3, 1))
before = count(*3 * [full], call=lambda *args: nnx.jit(forward)(*args))
row("`nnx.jit` in the epoch function", before, "outside of it", count(*3 * [full]), (3, 1))
before = count((*full, 1), (*full, 2), (*full, 4), static_argnums=2)
by_index = counted(lambda x, n: jax.lax.fori_loop(0, n, lambda i, total: total + x[i].sum(), 0.0))
after = count((rows, 1), (rows, 2), (rows, 4), call=nnx.jit(by_index))
row("static `num_minibatches` 1, 2, 4", before, "bound of `jax.lax.fori_loop`", after, (3, 1))
row("`0.5` or `jnp.array(0.5)`, then float32", count(*weak), "`jnp.float32(0.5)`", count(*strong), (2, 1))
add = nnx.jit(counted(jnp.add))
before = count((0.0,), call=lambda total: add(add(total, half), half))
add = nnx.jit(counted(jnp.add))
after = count((jnp.zeros(()),), call=lambda total: add(add(total, half), half))
row("a sum that begins as `0.0`", before, "`jnp.zeros(())`", after, (2, 1))
row("float32 batches, then float16", count(full, float16), "cast before", count(full, cast), (2, 1))
row("a shorter last batch", count(full, full, short), "pad or drop it", count(full, full, padded), (2, 1))
row("`train()` and `eval()` in turn", count(*modes), "none: both are needed", count(*modes), (2, 2))
first, second = counted(jnp.abs), counted(jnp.abs)
before = count(*3 * [(rows,)], call=lambda x: nnx.cond(x[0, 0] > 0, first, jnp.negative, x))
after = count(*3 * [(rows,)], call=nnx.jit(lambda x: nnx.cond(x[0, 0] > 0, second, jnp.negative, x)))
row("`nnx.cond` outside of `nnx.jit`", before, "inside", after, (3, 1), (1, 1))
Markdown("\n".join(["| cause | traces | cure | traces |", "|---|---|---|---|", *table]))

# %% [markdown]
# - A Python number, and what `jnp.array` makes of one, is weakly typed: another type than float32, here and in
#   [the carry of a loop](carry_dtype_and_shape.py). Its value matters only where it is static.
# - Where the count is 3, `nnx.cond` wraps its branches anew in every call
#   ([google/flax#5512](https://github.com/google/flax/issues/5512)).
#
# ## A new initialiser
#
# Where shapes and dtypes are the same and a step is traced again, compare `nnx.graphdef` of the two models or
# optimizers, as advised in [google/flax#4329](https://github.com/google/flax/issues/4329). Before Flax 0.12.1 it
# held the initialisers too, and each new one was another program
# ([google/flax#4994](https://github.com/google/flax/issues/4994)).

# %% tags=["raises-exception", "outcome"] raises=[{"error": "AssertionError", "match": "the initialiser is part of the graph definition", "flax": "<0.12.1"}]
assert nnx.graphdef(create(seed=0)) == nnx.graphdef(create(seed=1))
assert nnx.graphdef(epochs(one_init, txs)[0][2]) != nnx.graphdef(epochs(one_init, txs)[1][2])
first, second = (nnx.Linear(3, 1, kernel_init=init, rngs=nnx.Rngs(0)) for init in inits[:2])
assert nnx.graphdef(first) == nnx.graphdef(second), "the initialiser is part of the graph definition"
print("a new initialiser is no new program")

# %% [markdown]
# ## A step that is slow to call
#
# In every call `nnx.jit` takes model and optimizer apart and writes the results back, in Python, Variable by
# Variable. [What that costs](../docs/measurements.md#cost-of-a-call) shows where the step is short. Four forms do less.


# %%
def step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


names = "nnx.jit", "nnx.cached_partial", "nnx.jit_partial", "jax.jit on split state", "jax.jit on arrays"
sessions = {name: create(seed=0) for name in names}
forms = {"nnx.jit": lambda batch: train_step(*sessions["nnx.jit"], batch)}

# %% [markdown]
# ### `nnx.cached_partial` and `nnx.jit_partial` bind model and optimizer
#
# After each call they are up to date. `cached_partial` needs graph mode. `jit_partial`, since Flax 0.12.5, also
# jits, and runs in both modes. In graph mode pass `graph=False`; the model may then share no Variables.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "cached_partial is a graph-mode-only API", "mode": "tree"}]
model, optimizer = sessions["nnx.cached_partial"]
forms["nnx.cached_partial"] = nnx.cached_partial(nnx.jit(step), model, optimizer)

# %% tags=["raises-exception"] raises=[{"error": "AttributeError", "match": "has no attribute 'jit_partial'", "flax": "<0.12.5"}]
model, optimizer = sessions["nnx.jit_partial"]
forms["nnx.jit_partial"] = nnx.jit_partial(step, model, optimizer, graph=False)

# %% tags=["raises-exception"] raises=[{"error": "AttributeError", "match": "has no attribute 'jit_partial'", "flax": "<0.12.5"}, {"error": "ValueError", "match": "`graph_updates` not supported by `jit_partial`", "flax": ">=0.12.5", "mode": "graph"}]
nnx.jit_partial(step, model, optimizer)

# %% [markdown]
# ### `jax.jit` on split state, or on a list of arrays
#
# In every release and mode. Write the state back after the loop. JAX asks each Variable of it for its array; a
# list of arrays asks for nothing: [tpu-inference#2607](https://github.com/vllm-project/tpu-inference/issues/2607).

# %%
session = create(seed=0)
graphdef, state = nnx.split(session)
arrays, treedef = jax.tree.flatten(state)


@jax.jit
def pure_step(state, batch):
    model, optimizer = nnx.merge(graphdef, state, copy=True)
    loss = step(model, optimizer, batch)
    return nnx.state((model, optimizer)), loss


@jax.jit
def array_step(arrays, batch):
    state, loss = pure_step(jax.tree.unflatten(treedef, arrays), batch)
    return jax.tree.leaves(state), loss


for batch in batches:
    state, loss = pure_step(state, batch)
nnx.update(session, state)
assert session[1].step[...] == 3

# %% [markdown]
# ### What one call does
#
# Three steps of each form give the losses of `train_step`. Then Python counts the functions of Flax that it
# enters in one more call. Last, an attribute of the model is set, as `eval()` does. Does it arrive?

# %% tags=["proof"]
import sys


def keep(step, state):
    def call(batch):
        nonlocal state
        state, loss = step(state, batch)
        return loss

    return call


def flax_functions(call, batch):
    events = []
    sys.setprofile(lambda frame, event, _: events.append((event, frame.f_globals.get("__name__", ""))))
    call(batch)
    sys.setprofile(None)
    return sum(event == "call" and module.startswith("flax.") for event, module in events)


forms |= {names[3]: keep(pure_step, nnx.split(sessions[names[3]])[1]), names[4]: keep(array_step, arrays)}
plain, entered = create(seed=0), Counter()
expected = [train_step(*plain, batches[0]) for _ in range(3)]
assert expected[0] > expected[1] > expected[2] > 0
table = [f"| {len(arrays)} arrays | functions of Flax | attribute arrives |", "|---|---|---|"]
for name, call in forms.items():
    assert np.allclose([call(batches[0]) for _ in range(3)], expected, rtol=1e-6, atol=0), name
    assert sessions[name][1].step[...] == (3 if name.startswith("nnx") else 0)
    entered[name] = flax_functions(call, batches[0])
    sessions[name][0].activation = jnp.zeros_like
    arrives = bool(np.isclose(call(batches[0]), np.mean(batches[0][1] ** 2), rtol=0.05))
    assert arrives == (name == "nnx.jit")
    table.append(f"| `{name}` | {entered[name]} | {'yes' if arrives else 'no'} |")
assert entered["nnx.cached_partial"] < entered["nnx.jit"] / 2 and entered["jax.jit on arrays"] == 0
assert entered["nnx.jit_partial"] < 2 * len(arrays) < entered[names[3]] < entered["nnx.jit"] / 5
Markdown("\n".join(table))

# %% [markdown]
# ## When to prefer another recipe
#
# - Trace once, then call less often: [an epoch in one scan](epoch_in_one_scan.py) is one call. Bind or split
#   where that is not possible, and make the form anew where a flag of the model changes.
# - The model has Dropout or BatchNorm: take the gradient as in [split and merge](accumulate_with_split_merge.py).
