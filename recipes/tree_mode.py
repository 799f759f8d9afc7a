# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Differentiate the parameters alone and carry each Module once; the same code then runs in graph mode and in tree mode.
#     answers: [google/flax#5050]
#     symptoms:
#       - NNX_GRAPH_MODE=0 breaks my training loop
#       - code that worked in graph mode fails in tree mode
#       - nnx.jit loses a new attribute of a Module in tree mode
#       - nnx.grad gives gradients of BatchNorm statistics
#       - nnx.fori_loop returns a copy of the Module
#     needs: {flax: ">=0.12.6"}
# ---

# %% [markdown]
# # Tree mode: what changes, and what runs in both
#
# Differentiate the parameters alone, and carry each Module once. Then a loop ends at the same parameters in
# graph mode and in tree mode, in which a Module is a plain pytree to every NNX transform. Flax
# [announces](https://github.com/google/flax/blob/main/docs_nnx/flip/5310-tree-mode-nnx.md) tree mode as the
# default to come; both flags, `nnx_graph_mode` and `nnx_graph_updates`, are then off. It needs Flax 0.12.6.
#
# ## Do this

# %% tags=["snippet"]
import jax
import jax.numpy as jnp
from flax import nnx


def loss_fn(model, minibatch):
    x, y = minibatch
    return jnp.mean((model(x) - y) ** 2)


def pure_loss(params, rest, graphdef, minibatch):
    model = nnx.merge(graphdef, params, rest, copy=True)
    loss = loss_fn(model, minibatch)
    return loss, nnx.state(model, nnx.Not(nnx.Param))


value_and_grad = jax.value_and_grad(pure_loss, has_aux=True)


# The loop carries arrays.
def accumulate_states(model, minibatches):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def body(carry, minibatch):
        total, rest = carry
        (loss, rest), grads = value_and_grad(params, rest, graphdef, minibatch)
        return (jax.tree.map(jnp.add, total, grads), rest), loss

    zeros = jax.tree.map(jnp.zeros_like, params)
    (total, rest), losses = jax.lax.scan(body, (zeros, rest), minibatches)
    nnx.update(model, rest)
    return losses.mean(), jax.tree.map(lambda g: g / len(losses), total)


# The loop carries the Module.
def accumulate_module(model, minibatches):
    leaves, treedef = jax.tree.flatten(nnx.state(model, nnx.Param))

    def body(carry, minibatch):
        model, total = carry
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        (loss, rest), grads = value_and_grad(params, rest, graphdef, minibatch)
        nnx.update(model, rest)
        return (model, jax.tree.map(jnp.add, total, jax.tree.leaves(grads))), loss

    zeros = [jnp.zeros_like(leaf) for leaf in leaves]
    loop = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    (_, total), losses = loop((model, zeros), minibatches)
    return losses.mean(), jax.tree.unflatten(treedef, [g / len(losses) for g in total])


# %% [markdown]
# What makes them run in both modes:
#
# - **`jax.value_and_grad` of `params`.** `nnx.value_and_grad` differentiates other leaves in tree mode:
#   statistics too, and it raises for random state.
# - **The sum is a list of arrays** where `nnx.scan` carries it. Tree mode wants the Variables of a carry to
#   stay the same objects, and a `State` that `jax.tree.map` makes has new ones.
# - **The Module stands once in the carry**, and what it holds is changed in place.
#
# `minibatches` holds arrays of shape `(num_minibatches, rows, ...)`.
#
# ## Both forms, both modes
#
# A model with BatchNorm and Dropout, four minibatches. The reference is a Python loop. In the last line the
# model has neither, and the reference is the gradient of the full batch.

# %%
import re
from collections import Counter
from contextlib import ExitStack

import numpy as np
from IPython.display import Markdown


def mode(name: str):
    """Both flags, for a `with` block. A whole program: `NNX_GRAPH_MODE=0 NNX_GRAPH_UPDATES=0 python train.py`."""
    flags = ExitStack()
    flags.enter_context(nnx.set_graph_mode(name == "graph"))
    flags.enter_context(nnx.set_graph_updates(name == "graph"))
    return flags


class Net(nnx.Module):
    def __init__(self, stateful: bool):
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs) if stateful else None
        self.dropout = nnx.Dropout(0.5, rngs=rngs) if stateful else None
        self.outer = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.inner(x))
        return self.outer(self.dropout(self.norm(x)) if self.norm else x)


def python_loop(model, minibatches):
    """The reference: one minibatch after the other, each from the state that the last one left."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    every = []
    for minibatch in zip(*minibatches):
        (loss, rest), grads = jitted(params, rest, graphdef, minibatch)
        every.append((loss, grads))
    nnx.update(model, rest)
    return jax.tree.map(lambda *a: sum(a) / len(a), *every)


jitted = jax.jit(value_and_grad, static_argnums=2)
rng = np.random.default_rng(0)
x, y = np.float32(rng.normal(size=(32, 8))), np.float32(rng.normal(size=(32, 4)))
minibatches = x.reshape(4, 8, 8), y.reshape(4, 8, 4)

# %% tags=["proof"]


def arrays(tree):
    leaves = jax.tree.leaves(tree)
    return [
        np.array(jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a)
        for a in leaves
    ]


def differ(model, got, other, wanted):
    """The largest difference of loss, gradients and all that the models hold, relative to the largest value."""
    pairs = list(zip(arrays((got, nnx.state(model))), arrays((wanted, nnx.state(other))), strict=True))
    return max(np.abs(a.astype(float) - b).max() / max(1, np.abs(b).max()) for a, b in pairs)


for name in "graph", "tree":
    for accumulate in accumulate_states, accumulate_module:
        with mode(name):
            model, other = Net(stateful=True), Net(stateful=True)
            before = arrays(nnx.state(model))
            got = nnx.jit(accumulate)(model, minibatches)
            off = differ(model, got, other, python_loop(other, minibatches))
            plain, whole = Net(stateful=False), (x[None], y[None])
            (_, grads), (_, full) = nnx.jit(accumulate)(plain, minibatches), python_loop(plain, whole)
        after = arrays(nnx.state(model))
        changed = sum((a != b).any() for a, b in zip(before, after))
        full_off = max(np.abs(a - b).max() for a, b in zip(arrays(grads), arrays(full), strict=True))
        assert off < 1e-6 and full_off < 1e-6 and changed == 3, (
            "mean, var and the count of the random stream move"
        )
        assert len(arrays(full)) == 4 and all(np.abs(g).max() > 1e-3 for g in arrays(full))
        print(
            f"{name:5} mode, {accumulate.__name__:17}: as the Python loop, gradients of the full batch: True"
        )

# %% [markdown]
# ## What each idiom does in each mode
#
# Each function runs in both modes; the [table](#the-table) comes after them. A pair is what people write, and
# the form that gives one result in both modes.

# %%


class Count(nnx.Variable):
    pass


class Model(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.array(2.0))
        self.mean = nnx.BatchStat(jnp.array(1.0))
        self.count = Count(jnp.array(0.0))
        self.frozen = False
        self.frozen_state = Count(jnp.array(0.0))

    def __call__(self, x):
        self.count[...] += 1
        return self.kernel[...] * x + self.mean[...]


class Random(Model):
    def __init__(self):
        super().__init__()
        self.rngs = nnx.Rngs(0)


def grads_of(model):
    return nnx.grad(lambda model: model(1.0))(model)


def portable_grads(model, only=nnx.Param):
    graphdef, wrt, rest = nnx.split(model, only, ...)
    return jax.grad(lambda wrt: nnx.merge(graphdef, wrt, rest, copy=True)(1.0))(wrt)


def leaves(grads):
    return f"gradients: {len(jax.tree.leaves(grads))}"


def count(model, *models):
    return ", ".join(f"{float(m.count[...]):g}" for m in (model, *models))


idioms = {}


def idiom(about: str, instead: str):
    """Files a pair of functions: what people write, and the form that gives one result in both modes."""

    def add(pair):
        idioms[about] = (instead, *pair())

    return add


@idiom("`nnx.grad` of a model with random state", "`nnx.split`, `jax.grad`")
def _():
    return lambda: leaves(grads_of(Random())), lambda: leaves(portable_grads(Random()))


@idiom("`nnx.grad` of a model with statistics", "`nnx.split`, `jax.grad`")
def _():
    return lambda: leaves(grads_of(Model())), lambda: leaves(portable_grads(Model()))


@idiom("`nnx.DiffState(0, nnx.BatchStat)`", "`nnx.split` by that filter, `jax.grad`")
def _():
    def asked():
        return leaves(nnx.grad(lambda m: m(1.0), argnums=nnx.DiffState(0, nnx.BatchStat))(Model()))

    return asked, lambda: leaves(portable_grads(Model(), nnx.BatchStat))


@idiom("a `State` that the body of `nnx.fori_loop` makes anew", "a list of its leaves")
def _():
    def loop(carry):
        return nnx.fori_loop(0, 3, lambda i, carry: jax.tree.map(lambda a: a + 1, carry), carry)

    def total(tree):
        return f"sum {float(sum(jax.tree.leaves(tree))):g}"

    state = nnx.state(Model(), nnx.Param)
    return lambda: total(loop(state)), lambda: total(loop(jax.tree.leaves(state)))


@idiom("`nnx.StateAxes` in `nnx.scan`", "the whole Module in the carry")
def _():
    axes = nnx.StateAxes({nnx.Param: None, ...: nnx.Carry})

    def with_axes():
        model = Model()
        body = lambda total, x, model: (total + model(x), None)  # noqa: E731
        nnx.scan(body, in_axes=(nnx.Carry, 0, axes), out_axes=(nnx.Carry, 0))(0.0, jnp.ones(3), model)
        return f"count {count(model)}"

    def carried():
        model = Model()
        nnx.scan(lambda carry, x: ((carry[0] + carry[1](x), carry[1]), None))((0.0, model), jnp.ones(3))
        return f"count {count(model)}"

    return with_axes, carried


@idiom("a Module with `in_axes=None` that the body of `nnx.scan` changes", "the Module in the carry")
def _():
    def broadcast():
        model = Model()
        nnx.scan(lambda model, x: model(x), in_axes=(None, 0), out_axes=0)(model, jnp.ones(3))
        return f"count {count(model)}"

    def carried():
        model = Model()
        nnx.scan(lambda model, x: (model, model(x)))(model, jnp.ones(3))
        return f"count {count(model)}"

    return broadcast, carried


@idiom("one Module twice in the carry of `nnx.fori_loop`", "the Module once")
def _():
    def body(i, carry):
        carry[0](1.0)
        return carry

    def loop(model, times):
        nnx.fori_loop(0, 3, body, (model,) * times)
        return f"count {count(model)}"

    return lambda: loop(Model(), 2), lambda: loop(Model(), 1)


@idiom("one Module as two arguments of `nnx.jit`", "the Module once")
def _():
    def call(*models):
        nnx.jit(lambda *models: [model(1.0) for model in models])(*models)
        return f"count {count(models[0])}"

    def twice():
        model = Model()
        return call(model, model)

    def once():
        model = Model()
        nnx.jit(lambda model: (model(1.0), model(1.0)))(model)
        return f"count {count(model)}"

    return twice, once


@idiom("a Module returned by `nnx.jit`", "nothing returned: it is changed in place")
def _():
    def returned():
        model = Model()
        model = nnx.jit(lambda model: [model, model(1.0)][0])(model)
        return f"count {count(model)}"

    def in_place():
        model = Model()
        nnx.jit(lambda model: model(1.0))(model)
        return f"count {count(model)}"

    return returned, in_place


@idiom("an attribute set under `nnx.jit`", "a Variable, made in `__init__`")
def _():
    def attribute():
        model = Model()
        nnx.jit(lambda model: setattr(model, "frozen", True))(model)
        return f"set: {model.frozen}"

    def variable():
        model = Model()

        def freeze(model):
            model.frozen_state[...] = 1

        nnx.jit(freeze)(model)
        return f"set: {bool(model.frozen_state[...])}"

    return attribute, variable


@idiom("the Module that `nnx.fori_loop` returns", "the one passed in")
def _():
    def loop(which):
        model = Model()
        returned = nnx.fori_loop(0, 3, lambda i, model: [model, model(1.0)][0], model)
        kept = {"returned": returned, "passed": model}[which]
        return f"count {count(kept)}, {'the same' if kept is model else 'another'} object"

    return lambda: loop("returned"), lambda: loop("passed")


@idiom("`nnx.grad` in a loop of JAX, of a Module from outside", "`nnx.split`, `jax.grad`")
def _():
    def loop(grad):
        model = Model()
        total = jax.lax.fori_loop(0, 2, lambda i, total: total + sum(jax.tree.leaves(grad(model))), 0.0)
        return f"sum {float(total):g}"

    def read_only(model):
        return nnx.grad(lambda model: model.kernel[...] ** 2)(model)

    def portable(model):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        return jax.grad(lambda params: nnx.merge(graphdef, params, rest, copy=True).kernel[...] ** 2)(params)

    return lambda: loop(read_only), lambda: loop(portable)


# %% [markdown]
# ### The table
#
# The last column is what the portable form beside it gave, in both modes.


# %% tags=["proof"]
def outcome(function, name):
    with mode(name):
        try:
            return function()
        except Exception as error:
            return f"`{type(error).__name__}`"


lines = ["| what is written | graph mode | tree mode | in both | gives |", "|---|---|---|---|---|"]
for about, (instead, asked, portable) in idioms.items():
    graph, tree = (outcome(asked, name) for name in ("graph", "tree"))
    gives = {outcome(portable, name) for name in ("graph", "tree")}
    assert graph != tree and len(gives) == 1 and "Error" not in str(gives), (about, graph, tree, gives)
    lines.append(f"| {about} | {graph} | {tree} | {instead} | {gives.pop()} |")

Markdown("\n".join(lines))

# %% [markdown]
# - **Rows without an error in either mode** are the ones to look for: nothing raises, and the result is
#   another.
# - Every cell on this site that ends differently in tree mode is in the
#   [list of differences](../docs/porting.md).
#
# ## Try your own code
#
# ```sh
# NNX_GRAPH_MODE=0 NNX_GRAPH_UPDATES=0 python train.py
# ```
#
# In a test, set the flags before the transforms are made: `nnx.jit` reads them when it wraps the function, and
# keeps them.


# %% tags=["proof"]
def freeze(model):
    model.frozen = True


def froze(wrapped):
    model = Model()
    wrapped(model)
    return model.frozen


with mode("graph"):
    early = nnx.jit(freeze)
with mode("tree"):
    kept = [froze(early), froze(nnx.jit(freeze)), froze(nnx.compat.jit(freeze))]
assert kept == [True, False, True]
for wrapped, attribute in zip(
    ("nnx.jit, before the flags are set", "nnx.jit, after", "nnx.compat.jit, after"), kept
):
    print(f"{wrapped:34} attribute kept: {attribute}")

# %% [markdown]
# `nnx.compat` has the transforms and functions with graph mode on for one call. That is the way to port one
# piece after the other.
#
# ## A filter for `nnx.grad` in tree mode
#
# Split by the filter and differentiate the part that it takes.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "`argnums` cannot contain `DiffState` objects"}]
with mode("tree"):
    nnx.grad(lambda model: model(1.0), argnums=nnx.DiffState(0, nnx.Param))(Model())

# %% [markdown]
# ## A Module that goes in and comes out
#
# `nnx.jit` changes its arguments in place, so the Module would come back twice. Return what is not in it.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "does not support Variable aliasing"}]
with mode("tree"):
    nnx.jit(lambda model: model)(Model())

# %% [markdown]
# ## What it costs
#
# Nothing in the compiled program: JAX traces the same operations in both modes. [A call of
# `nnx.jit`](retracing_and_dispatch.py#a-step-that-is-slow-to-call) does less in Python in tree mode.

# %% tags=["proof"]
for accumulate in accumulate_states, accumulate_module:
    operations = {}
    for name in "graph", "tree":
        with mode(name):
            lowered = nnx.jit(accumulate).lower(Net(stateful=True), minibatches)
        operations[name] = Counter(re.findall(r"stablehlo\.\w+", lowered.as_text()))
    assert operations["graph"] == operations["tree"]
    print(
        f"{accumulate.__name__:17}: {operations['graph'].total()} operations in graph mode, the same in tree mode"
    )

# %% [markdown]
# ## When to prefer another recipe
#
# - The first form with donation and its errors: [split and merge](accumulate_with_split_merge.py). The second
#   one: [`nnx.scan`](accumulate_with_scan.py) and [`nnx.fori_loop`](accumulate_with_fori_loop.py).
# - BatchNorm and Dropout, layer by layer: [what each loop has to carry](batchnorm_and_dropout.py).
# - What a loop may carry, close over and return, in both modes: [the rules](what_a_loop_may_touch.py).
