# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Carry raw gradient arrays through nnx.fori_loop, not a State that jax.tree.map rebuilds. Newer releases accept the State in graph mode.
#     answers: [google/flax#5113]
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # `nnx.fori_loop` rejects the gradient accumulator
#
# Carry the gradients as a list of raw arrays and put them back on the structure of the parameters after the
# loop. That runs on every release shown here, also in tree mode if the model has no Dropout. Two smaller
# changes are further down: write the sum into the `State` that is carried (one line, same reach), or upgrade
# to Flax 0.12.3 (graph mode, `nnx.fori_loop` only).

# %% tags=["snippet"]
import jax
import jax.numpy as jnp
from flax import nnx


def accumulate_grads(loss_fn, model, minibatches):
    """Mean loss and mean gradients.

    Every array in minibatches has shape (num_minibatches, rows, ...).
    """
    leaves, treedef = jax.tree.flatten(nnx.state(model, nnx.Param))
    num_minibatches = len(jax.tree.leaves(minibatches)[0])

    def body(i, carry):
        total, loss_sum, model = carry
        minibatch = jax.tree.map(lambda x: x[i], minibatches)
        loss, grads = nnx.value_and_grad(loss_fn)(model, minibatch)
        grads = jax.tree.leaves(nnx.state(grads, nnx.Param))
        return jax.tree.map(jnp.add, total, grads), loss_sum + loss, model

    zeros = [jnp.zeros_like(leaf) for leaf in leaves]
    total, loss_sum, _ = nnx.fori_loop(0, num_minibatches, body, (zeros, jnp.zeros(()), model))
    grads = jax.tree.unflatten(treedef, [g / num_minibatches for g in total])
    return loss_sum / num_minibatches, grads


# %% [markdown]
# Call it inside the jitted step, then `optimizer.update(model, grads)`. The optimizer has no reason to be
# in the carry.
#
# ## Carry a `State` rebuilt by `jax.tree.map`
#
# This body adds to a `State` with `jax.tree.map` and does nothing else. In graph mode, the default,
# `nnx.fori_loop` refuses it from Flax 0.11.0 to 0.12.2 and accepts it since 0.12.3: **in graph mode,
# upgrading is the whole fix.** Tree mode (`NNX_GRAPH_MODE=0`, `NNX_GRAPH_UPDATES=0`) still refuses it.

# %%
linear = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(0))
accumulator = jax.tree.map(jnp.zeros_like, nnx.state(linear, nnx.Param))


def add_ones(i, accumulator):
    grads = jax.tree.map(jnp.ones_like, accumulator)
    return jax.tree.map(jnp.add, accumulator, grads)


# %% tags=["raises-exception", "outcome"] raises=[{"error": "ValueError", "match": "nnx.fori_loop requires body function's input and output to have the same reference and pytree structure", "flax": "<0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "fori_loop Variable identity must be preserved across iterations", "mode": "tree"}]
total = nnx.fori_loop(0, 4, add_ones, accumulator)
assert jnp.all(total["kernel"][...] == 4)
print("accepted: four additions of one make", int(total["kernel"][0, 0]))

# %% [markdown]
# `nnx.while_loop` was not part of the change in 0.12.3. It refuses the same body on every release shown
# here.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.while_loop requires body function's input and output to have the same reference and pytree structure", "mode": "graph"}, {"error": "ValueError", "match": "while_loop Variable identity must be preserved across iterations", "mode": "tree"}]
nnx.while_loop(lambda carry: carry[0] < 4, lambda carry: (carry[0] + 1, add_ones(*carry)), (0, accumulator))

# %% [markdown]
# ## Why: `jax.tree.map` makes new Variables
#
# Since Flax 0.11.0 a `State` holds Variables. The loop numbers the Variables that enter it and expects the
# same ones back. `jax.tree.map` builds new ones around the sums, and a new Variable has no number: that is
# the `outer_index` in the message, a number for what went in and `None` for what came out. Tree mode asks
# the same question in other words: is this the Variable that went in?

# %%
rebuilt = jax.tree.map(jnp.add, accumulator, accumulator)
print("rebuilt by jax.tree.map, still the same Variable:", rebuilt["kernel"] is accumulator["kernel"])

unchanged = nnx.fori_loop(0, 4, lambda i, accumulator: accumulator, accumulator)
print("a body that hands back what it got is accepted:", jax.tree.leaves(unchanged)[0].shape == (8, 8))

# %% [markdown]
# Since 0.12.3 `nnx.fori_loop` first evaluates the body abstractly and takes the numbers from its output.
#
# ## The step from the report, before and after
#
# It has gradients, loss and a session of model and optimizer in one carry.

# %%
from typing import NamedTuple

import numpy as np
import optax


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(8, 16, rngs=rngs)
        self.outer = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.relu(self.inner(x)))


class TrainSession(NamedTuple):
    model: nnx.Module
    optimizer: nnx.Optimizer


def make_session() -> TrainSession:
    model = MLP(nnx.Rngs(0))
    return TrainSession(model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param))


def loss_fn(model, batch):
    x, y = batch
    return jnp.mean((model(x) - y) ** 2)


x = jax.random.normal(jax.random.key(1), (32, 8))
full_batch = (x, jnp.sin(x[:, :4]))
minibatches = jax.tree.map(lambda a: a.reshape(4, 8, *a.shape[1:]), full_batch)

full_loss, full_grads = nnx.jit(nnx.value_and_grad(loss_fn))(MLP(nnx.Rngs(0)), full_batch)


def check(name, loss, grads):
    """Loss and gradients must be those of the full batch."""
    expected, actual = jax.tree.leaves(full_grads), jax.tree.leaves(grads)
    assert len(actual) == len(expected) == 4, len(actual)
    assert max(np.max(np.abs(a)) for a in expected) > 1e-2, "a gradient of zeros proves nothing"
    difference = max(np.max(np.abs(np.subtract(a, b))) for a, b in zip(actual, expected))
    assert difference < 1e-6 and abs(loss - full_loss) < 1e-6, (difference, loss, full_loss)
    print(f"{name}: {len(actual)} gradients within 1e-06 of the full batch")


# %% [markdown]
# In tree mode this one fails in the body, before the loop compares anything: `nnx.value_and_grad` returns the
# gradients as a model there, and `jax.tree.map` cannot add a model to a `State`.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.fori_loop requires body function's input and output to have the same reference and pytree structure", "flax": "<0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "different types at key path", "mode": "tree"}]
@nnx.jit(donate_argnums=(1,))
def train_step(batch, session: TrainSession):
    def body(i, carry: tuple[nnx.State, jax.Array, TrainSession]):
        total, loss_sum, session = carry
        minibatch = jax.tree.map(lambda x: x[i], batch)
        loss, grads = nnx.value_and_grad(loss_fn)(session.model, minibatch)
        return jax.tree.map(jnp.add, total, grads), loss_sum + loss, session

    zeros = jax.tree.map(jnp.zeros_like, nnx.state(session.model, nnx.Param))
    total, loss_sum, session = nnx.fori_loop(0, 4, body, (zeros, jnp.zeros(()), session))
    grads = jax.tree.map(lambda g: g / 4, total)
    session.optimizer.update(session.model, grads)
    return loss_sum / 4, grads


check("State carried by nnx.fori_loop", *train_step(minibatches, make_session()))

# %% [markdown]
# The same step with `accumulate_grads` runs everywhere.


# %% tags=["proof"]
@nnx.jit(donate_argnums=(1,))
def repaired_step(batch, session: TrainSession):
    loss, grads = accumulate_grads(loss_fn, session.model, batch)
    session.optimizer.update(session.model, grads)
    return loss, grads


session = make_session()
before = [np.array(leaf) for leaf in jax.tree.leaves(nnx.state(session.model, nnx.Param))]

check("raw arrays carried by nnx.fori_loop", *repaired_step(minibatches, session))

after = jax.tree.leaves(nnx.state(session.model, nnx.Param))
moved = sum(bool(np.any(a != b)) for a, b in zip(after, before))
assert moved == 4 and int(session.optimizer.step[...]) == 1
print(f"optimizer step: {int(session.optimizer.step[...])}, parameters moved: {moved} of {len(after)}")

# %% [markdown]
# ## Or keep the `State` and change one line
#
# Do not return a new `State`: write the sum into the Variables of the one that is carried, with
# `nnx.update`. Their identity stays, so `nnx.while_loop` and tree mode have nothing to object to.
# `nnx.state(grads, nnx.Param)` turns the gradients of both modes into a `State`, and `optimizer.update` takes
# the result as it is.


# %%
def add_in_place(i, carry):
    total, loss_sum, model = carry
    minibatch = jax.tree.map(lambda x: x[i], minibatches)
    loss, grads = nnx.value_and_grad(loss_fn)(model, minibatch)
    nnx.update(total, jax.tree.map(jnp.add, total, nnx.state(grads, nnx.Param)))
    return total, loss_sum + loss, model


def init_carry():
    model = MLP(nnx.Rngs(0))
    zeros = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    return zeros, jnp.zeros(()), model


def mean(loss_sum, total):
    return loss_sum / 4, jax.tree.map(lambda g: g / 4, total)


# %% tags=["proof"]
total, loss_sum, _ = nnx.fori_loop(0, 4, add_in_place, init_carry())
check("State updated in place by nnx.fori_loop", *mean(loss_sum, total))

_, (total, loss_sum, _) = nnx.while_loop(
    lambda carry: carry[0] < 4,
    lambda carry: (carry[0] + 1, add_in_place(*carry)),
    (0, init_carry()),
)
check("State updated in place by nnx.while_loop", *mean(loss_sum, total))

# %% [markdown]
# ## Or let `nnx.scan` carry the `State`
#
# `nnx.scan` does not compare the Variables of a `State` in graph mode, so the rebuilt accumulator passes on
# every release. Tree mode refuses this one where it refused the step above: the gradients are not a `State`.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "different types at key path", "mode": "tree"}]
@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def scan_minibatches(carry, minibatch):
    total, loss_sum, model = carry
    loss, grads = nnx.value_and_grad(loss_fn)(model, minibatch)
    return jax.tree.map(jnp.add, total, grads), loss_sum + loss, model


total, loss_sum, _ = scan_minibatches(init_carry(), minibatches)
check("State carried by nnx.scan", *mean(loss_sum, total))

# %% [markdown]
# ## Or leave NNX outside of the loop
#
# `nnx.split` before the loop and `nnx.merge` in the loss: a JAX loop sees pytrees of arrays and knows
# nothing of Variables.

# %% tags=["proof"]
graphdef, params = nnx.split(MLP(nnx.Rngs(0)))


def add_split(i, carry):
    total, loss_sum = carry
    minibatch = jax.tree.map(lambda x: x[i], minibatches)
    loss, grads = jax.value_and_grad(lambda p: loss_fn(nnx.merge(graphdef, p), minibatch))(params)
    return jax.tree.map(jnp.add, total, grads), loss_sum + loss


zeros = jax.tree.map(jnp.zeros_like, params)
total, loss_sum = jax.lax.fori_loop(0, 4, add_split, (zeros, jnp.zeros(())))
check("split, carried by jax.lax.fori_loop", *mean(loss_sum, total))

# %% [markdown]
# ## When to prefer another recipe
#
# - The model has BatchNorm or Dropout: [accumulate with `nnx.fori_loop`](accumulate_with_fori_loop.py)
#   keeps statistics and random streams right in both modes. In tree mode the snippet above raises for a
#   model with Dropout, because `nnx.value_and_grad` differentiates every leaf there.
# - You want the loss of every minibatch, or minibatches as the scanned input: [accumulate with
#   `nnx.scan`](accumulate_with_scan.py).
# - You want no NNX transform in the loop: [accumulate with split and
#   merge](accumulate_with_split_merge.py).
# - The batch is sharded over devices: [accumulate sharded minibatches](accumulate_sharded_minibatches.py).
# - What else may be carried, closed over and changed: [what a loop may touch](what_a_loop_may_touch.py).
#
# The report and the change: [google/flax#5113](https://github.com/google/flax/issues/5113),
# [google/flax#5141](https://github.com/google/flax/pull/5141).
