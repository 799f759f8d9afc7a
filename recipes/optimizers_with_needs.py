# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: One step, accumulating and scanned, for optax.partition, L-BFGS and schedule-free; FP8 statistics reduced with max.
#     answers: [google/flax#5372, google/flax#4144, google-deepmind/optax#1386, marin-community/marin#8360]
#     symptoms:
#       - L-BFGS stops far from the minimum when the gradients are accumulated
#       - schedule-free evaluates worse than it should
#       - FP8 amax history is that of the last minibatch only
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # Optimizers that need more than gradients
#
# For `optax.partition`, label whole Variables, not the arrays in them. Give `optax.lbfgs` the value, the gradient
# and `value_fn` of the whole batch. Evaluate `schedule_free` with its average. Reduce FP8 statistics with the
# maximum.
#
# ## Do this

# %% tags=["snippet"]
import jax
import jax.numpy as jnp
import optax
from flax import nnx


def loss_fn(model, minibatch):
    x, y = minibatch
    return jnp.mean((model(x) - y) ** 2)


def batch_loss(params, rest, graphdef, minibatches):
    """Mean loss of all minibatches. With the checkpoint its gradient holds one at a time."""

    @jax.checkpoint
    def minibatch_loss(minibatch):
        return loss_fn(nnx.merge(graphdef, params, rest, copy=True), minibatch)

    return jax.lax.map(minibatch_loss, minibatches).mean()


def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch, num_minibatches: int):
    minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def value_fn(params):
        return batch_loss(params, rest, graphdef, minibatches)

    value, grad = jax.value_and_grad(value_fn)(params)
    optimizer.update(model, grad, value=value, grad=grad, value_fn=value_fn)
    return value


@nnx.jit(static_argnames=("num_minibatches", "num_steps"))
def train_steps(model, optimizer, batch, num_minibatches: int, num_steps: int):
    graphdef, state = nnx.split((model, optimizer))

    def body(state, _):
        model, optimizer = nnx.merge(graphdef, state)
        loss = train_step(model, optimizer, batch, num_minibatches)
        return nnx.state((model, optimizer)), loss

    state, losses = jax.lax.scan(body, state, length=num_steps)
    nnx.update((model, optimizer), state)
    return losses


# %% [markdown]
# ### A rule for each group of parameters


# %% tags=["snippet"]
def label_fn(params):
    """A label for each parameter, from its path such as "head/kernel"."""

    def label(path, _):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return "frozen" if name.startswith("base") else "bias" if "bias" in name else "head"

    return jax.tree.map_with_path(label, params, is_leaf=lambda v: isinstance(v, nnx.Variable))


transforms = {"frozen": optax.set_to_zero(), "bias": optax.sgd(0.1), "head": optax.adam(0.1)}
tx = optax.partition(transforms, label_fn)


# %% [markdown]
# ### The model that schedule-free evaluates


# %% tags=["snippet"]
def eval_model(model: nnx.Module, optimizer: nnx.Optimizer):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    opt_state, params = jax.tree.map(
        lambda v: v[...], (optimizer.opt_state, params), is_leaf=lambda v: isinstance(v, nnx.Variable)
    )
    averaged = optax.contrib.schedule_free_eval_params(opt_state, params)
    return nnx.merge(graphdef, averaged, rest, copy=True)


# %% [markdown]
# ### Statistics whose "gradient" is their next value


# %% tags=["snippet"]
class OverwriteWithGradient(nnx.Variable):
    """FP8 scale or amax history."""


def accumulate_grads(model: nnx.Module, batch, num_minibatches: int):
    """Mean loss and mean gradients. `OverwriteWithGradient` moves on in place, the rest stands still."""
    minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)
    graphdef, params, stats, rest = nnx.split(model, nnx.Param, OverwriteWithGradient, ...)

    def merged_loss(params, stats, minibatch):
        return loss_fn(nnx.merge(graphdef, params, stats, rest, copy=True), minibatch)

    def body(carry, minibatch):
        total, largest = carry
        value_and_grad = jax.value_and_grad(merged_loss, argnums=(0, 1))
        loss, (grads, stats_of_minibatch) = value_and_grad(params, stats, minibatch)
        largest = jax.tree.map(jnp.maximum, largest, stats_of_minibatch)
        return (jax.tree.map(jnp.add, total, grads), largest), loss

    zeros = jax.tree.map(jnp.zeros_like, (params, stats))
    (total, largest), losses = jax.lax.scan(body, zeros, minibatches)
    nnx.update(model, largest)
    return losses.mean(), jax.tree.map(lambda g: g / num_minibatches, total)


# %% [markdown]
# - **`is_leaf`** labels a Variable, not the array in it. `nnx.Optimizer` initializes with Variables and
#   updates with arrays; such labels fit both.
# - **One `value_fn`** gives the value, the gradient and what the line search evaluates. Adam, SGD and
#   `optax.partition` ignore these arguments; wrap a bare `optax.scale` in `optax.with_extra_args_support`.
# - **`rest` stands still in a step**, since the line search calls the loss several times. Set Dropout and
#   BatchNorm to evaluation.
# - **Every minibatch starts from the same `stats`**, so the largest maximum is that of the batch.
#
# ## Equal to Optax on plain dicts
#
# Least squares. The reference has no Flax and no minibatches, and its labels are written out.

# %%
from functools import partial

import numpy as np


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.base = nnx.Linear(2, 1, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(2, 1, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1  # writes, as Dropout and BatchNorm do
        return self.base(x) + self.head(x**2)


def create(tx):
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def plain_params(model):
    return jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


@jax.jit
def plain_loss(params, batch):
    x, y = batch
    base, head = params["base"], params["head"]
    return jnp.mean((x @ base["kernel"] + x**2 @ head["kernel"] + head["bias"] - y) ** 2)


@partial(jax.jit, static_argnames="tx")
def plain_steps(tx, params, search_batch):
    """Parameters and state after 10 steps. The line search looks at a batch of its own."""

    def body(i, carry):
        params, opt_state = carry
        value, grad = jax.value_and_grad(plain_loss)(params, batch)
        extra = {"value": value, "grad": grad, "value_fn": lambda p: plain_loss(p, search_batch)}
        updates, opt_state = tx.update(grad, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state

    return jax.lax.fori_loop(0, 10, body, (params, tx.init(params)))


def difference(tree, other):
    return max(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), tree, other)))


x = np.array(jax.random.uniform(jax.random.key(1), (32, 2), minval=-1))
# Each minibatch has an offset of its own, so they do not agree about the minimum.
batch = (x, x.sum(-1, keepdims=True) + np.repeat(np.float32([0, 1, 2, 3]), 8)[:, None])
minibatches = jax.tree.map(lambda a: a.reshape(4, 8, -1), batch)
features = np.concatenate([x, x**2, np.ones((32, 1))], axis=1)
lowest = np.linalg.lstsq(features, batch[1])[1].item() / 32

# %% tags=["proof"]
labels = {"base": {"kernel": "frozen"}, "head": {"bias": "bias", "kernel": "head"}}
free, lbfgs = optax.contrib.schedule_free(optax.sgd(0.5), 0.5), optax.lbfgs()
plain = {"partition": optax.partition(transforms, labels), "L-BFGS": lbfgs, "schedule-free": free}
step = nnx.jit(train_step, static_argnames="num_minibatches")
above = {}
for name, plain_tx in plain.items():
    scanned, optimizer = create(tx if name == "partition" else plain_tx)
    start, structure = plain_params(scanned), jax.tree.structure(nnx.state(optimizer))
    train_steps(scanned, optimizer, batch, num_minibatches=4, num_steps=10)
    assert optimizer.step[...] == 10 and scanned.calls[...] == 0
    assert jax.tree.structure(nnx.state(optimizer)) == structure

    looped, other = create(tx if name == "partition" else plain_tx)
    for _ in range(10):
        step(looped, other, batch, num_minibatches=4)
    expected, opt_state = plain_steps(plain_tx, start, batch)
    assert max(difference(plain_params(m), expected) for m in (scanned, looped)) < 1e-5
    if name == "schedule-free":
        averaged = optax.contrib.schedule_free_eval_params(opt_state, expected)
        assert difference(plain_params(eval_model(scanned, optimizer)), averaged) < 1e-5
    above[name] = float(plain_loss(expected, batch)) - lowest
    print(f"{name}: scan over steps, jitted steps and plain Optax agree after 10 steps")

assert above["L-BFGS"] < 1e-4 < 1e-1 < min(above["partition"], above["schedule-free"])
print("within 1e-04 of the lowest loss:", [name for name in above if above[name] < 1e-4])

# %% [markdown]
# From the first step on each group follows its own rule, with the gradient of the full batch.

# %% tags=["proof"]
model, optimizer = create(tx)
grads = jax.grad(plain_loss)(start, batch)
graphdef, params, rest = nnx.split(model, nnx.Param, ...)
batch_grad = jax.jit(jax.grad(batch_loss), static_argnums=2)
accumulated = nnx.to_pure_dict(batch_grad(params, rest, graphdef, minibatches))
assert difference(accumulated, grads) < 1e-6
accumulate = nnx.jit(accumulate_grads, static_argnames="num_minibatches")
_, accumulated = accumulate(model, batch, num_minibatches=4)
assert difference(nnx.to_pure_dict(accumulated), grads) < 1e-6
assert len(jax.tree.leaves(grads)) == 3 and all(np.abs(g).min() > 1e-3 for g in jax.tree.leaves(grads))

step(model, optimizer, batch, num_minibatches=4)
one_step = plain_params(model)
moved = jax.tree.map(lambda a, b: a - b, one_step, start)
assert np.all(moved["base"]["kernel"] == 0)
base_bias = nnx.State({"base": {"bias": nnx.Param(jnp.zeros(1))}})
assert jax.tree.leaves(label_fn(base_bias)) == ["frozen"], "all of the base, its biases too"
assert np.allclose(moved["head"]["bias"], -0.1 * grads["head"]["bias"], atol=1e-6)
assert np.allclose(moved["head"]["kernel"], -0.1 * np.sign(grads["head"]["kernel"]), atol=1e-5)
print("frozen: not moved; bias: 0.1 times the gradient; head: Adam's first step of 0.1")

# %% [markdown]
# ## `optax.partition` and labels that do not match
#
# ### A label function without `is_leaf`
#
# Before Flax 0.12 this raises: `nnx.Optimizer` cannot store a Variable whose array was masked. Now it runs, and
# trains as labelled.


# %% tags=["raises-exception", "outcome"] raises=[{"error": "TypeError", "match": "tuple indices must be integers or slices, not ellipsis", "flax": "<0.12"}]
def label_arrays(params):
    return jax.tree.map(lambda a: "bias" if a.ndim == 1 else "head", params)


ones = nnx.Linear(2, 1, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(ones, optax.partition(transforms, label_arrays), wrt=nnx.Param)
optimizer.update(ones, jax.tree.map(lambda p: 3 * jnp.ones_like(p), nnx.state(ones, nnx.Param)))
assert jnp.allclose(ones.bias[...], -0.3) and jnp.allclose(ones.kernel[...], 0.9), "SGD, and Adam"
print("created, and trains as labelled")

# %% [markdown]
# ### A tree of labels with Variables in it
#
# The gradients of the update have none.

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "tuple indices must be integers or slices, not ellipsis", "flax": "<0.12"}, {"error": "ValueError", "match": "Custom node type mismatch: expected type: <class 'flax.nnx.variablelib.Param'>", "flax": ">=0.12", "jax": "<0.10.2"}, {"error": "ValueError", "match": "the prefix pytree tree_map tree has a subtree of type", "jax": ">=0.10.2"}]
in_variables = label_arrays(nnx.state(ones, nnx.Param))
optimizer = nnx.Optimizer(ones, optax.partition(transforms, in_variables), wrt=nnx.Param)
optimizer.update(ones, jax.tree.map(jnp.ones_like, nnx.state(ones, nnx.Param)))

# %% [markdown]
# ### Labels in a nested dict
#
# The parameters are a `State`, another type of node.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Expected dict, got State(", "jax": "<0.10.2"}, {"error": "ValueError", "match": "the prefix pytree tree_map tree has a subtree of type", "jax": ">=0.10.2"}]
in_dict = {"kernel": "head", "bias": "bias"}
nnx.Optimizer(ones, optax.partition(transforms, in_dict), wrt=nnx.Param)

# %% [markdown]
# `nnx.State` makes one of a dict. `label_fn` returns one too, so its result fits as well.

# %%
model, optimizer = create(optax.partition(transforms, nnx.State(labels)))
step(model, optimizer, batch, num_minibatches=4)
assert difference(plain_params(model), one_step) == 0
assert label_fn(nnx.state(model, nnx.Param)) == nnx.State(labels)
print("same step as with the label function")

# %% [markdown]
# ## L-BFGS without its arguments

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "update_fn() missing 3 required keyword-only arguments: 'value', 'grad', and 'value_fn'"}]
model, optimizer = create(lbfgs)
nnx.jit(lambda m, optimizer: optimizer.update(m, nnx.grad(loss_fn)(m, batch)))(model, optimizer)

# %% [markdown]
# ## L-BFGS stops early: `value_fn` of the last minibatch
#
# Nothing raises. Value and gradient are those of the whole batch, and the line search measures another
# function. Here the reference searches on the last eight rows.

# %%
last = jax.tree.map(lambda a: np.tile(a[-8:], (4, 1)), batch)
for name, search_batch in ("whole batch", batch), ("last minibatch", last):
    above[name] = float(plain_loss(plain_steps(lbfgs, start, search_batch)[0], batch)) - lowest
    print(f"value_fn of the {name}: {abs(above[name]):.3f} above the lowest loss after 10 steps")
assert above["whole batch"] < 1e-4 and above["last minibatch"] > 0.05

# %% [markdown]
# ## Donate L-BFGS
#
# A fresh state holds the same array twice, which [cannot be
# donated](donate_and_measure_memory.py#a-clone-shares-its-arrays). Copy it once, before the first step.

# %%
leaves = jax.tree.leaves(nnx.state(optimizer))
nnx.update(optimizer, jax.tree.map(jnp.copy, nnx.state(optimizer)))
copied = jax.tree.leaves(nnx.state(optimizer))
assert len({id(a) for a in leaves}) < len(leaves) == len({id(a) for a in copied})
nnx.jit(lambda optimizer: None, donate_argnums=0)(optimizer)
print("shared before the copy, donated after it")

# %% [markdown]
# ## Schedule-free: evaluate the average
#
# The model holds the point at which gradients are taken. Here each step sees one of four
# minibatches; the losses are means over the last four steps.

# %% tags=["proof"]
model, optimizer = create(free)
evaluate, losses = nnx.jit(loss_fn), []
for i in range(64):
    step(model, optimizer, tuple(a[i % 4] for a in minibatches), num_minibatches=1)
    if i >= 60:
        losses.append([float(evaluate(m, batch)) - lowest for m in (model, eval_model(model, optimizer))])
trained, evaluated = np.mean(losses, axis=0)
assert 0 < evaluated < trained / 2
assert model.calls[...] == 4, "calls of the averaged model are not those of the model"
print(f"above the lowest loss: {trained:.3f} as trained, {evaluated:.3f} averaged")

# %% [markdown]
# ### `schedule_free_eval_params` of a `State`
#
# The optimizer's Variables have another type. `eval_model` takes the arrays out of both.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Custom node type mismatch: expected type: <class 'flax.nnx.variablelib.Param'>, value: OptVariable", "jax": "<0.10.2"}, {"error": "ValueError", "match": "the prefix pytree tree_map tree has a subtree of type", "jax": ">=0.10.2"}]
optimizer = nnx.Optimizer(ones, free, wrt=nnx.Param)
optax.contrib.schedule_free_eval_params(optimizer.opt_state, nnx.state(ones, nnx.Param))

# %% [markdown]
# ## FP8 statistics: the largest, not the mean or the last
#
# `in_qdq` of Flax rounds to FP8. The gradient that it gives for scale and history is their next value.

# %% tags=["proof"]
from flax.linen.fp8_ops import in_qdq


class Fp8Linear(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.full((2, 1), 0.1))
        self.scale = OverwriteWithGradient(jnp.ones(1))
        self.amax_history = OverwriteWithGradient(jnp.zeros(4))

    def __call__(self, x):
        stats = self.scale[...], self.amax_history[...]
        return in_qdq(jnp.float32, jnp.float8_e4m3fn, x, *stats) @ self.kernel[...]


rows = np.float32([[1.0, 0.3], [-0.7, 0.5], [0.2, -0.9], [0.6, 0.1]])
parts = [(size * rows, rows[:, :1]) for size in (2.0, 8.0, 1.0, 4.0)]
whole = jax.tree.map(lambda *a: np.concatenate(a), *parts)

full, cut = Fp8Linear(), Fp8Linear()
for _ in range(2):  # the second step uses the scale that the first one measured
    loss, grads = accumulate(full, whole, num_minibatches=1)
    loss_of_cut, grads_of_cut = accumulate(cut, whole, num_minibatches=4)
    assert np.allclose(loss, loss_of_cut) and difference(grads, grads_of_cut) < 1e-6
    assert len(jax.tree.leaves(grads)) == 1 and np.abs(jax.tree.leaves(grads)[0]).min() > 1e-2
    assert np.array_equal(cut.amax_history[...], full.amax_history[...])
    assert np.array_equal(cut.scale[...], full.scale[...])
assert full.scale[...].item() == np.float32(8 / 448), "the largest value becomes the largest of FP8"

alone = [Fp8Linear() for _ in parts]
for model, part in zip(alone, parts, strict=True):
    accumulate(model, part, num_minibatches=1)
amax = [float(model.amax_history[0]) for model in alone]
reduced = {"sum": sum(amax), "mean": sum(amax) / 4, "last": amax[-1], "largest": max(amax)}
print("of the full batch:", float(full.amax_history[0]), "of 4 minibatches:", reduced)
assert [name for name in reduced if reduced[name] == full.amax_history[0]] == ["largest"]

# %% [markdown]
# ## What it costs
#
# Temporary bytes of the gradient of `batch_loss` for 4096 rows.

# %% tags=["proof"]
layers = nnx.Linear(64, 256, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(256, 1, rngs=nnx.Rngs(0))
graphdef, params, rest = nnx.split(nnx.Sequential(*layers), nnx.Param, ...)
temporary = {}
for n in 1, 16:
    shapes = [jax.ShapeDtypeStruct((n, 4096 // n, width), jnp.float32) for width in (64, 1)]
    lowered = batch_grad.lower(params, rest, graphdef, shapes)
    temporary[n] = lowered.compile().memory_analysis().temp_size_in_bytes
    print(f"{n:2} minibatches: {temporary[n]:>10,}")
assert temporary[16] < temporary[1] / 8, "the checkpoint holds one minibatch"

# %% [markdown]
# ## When to prefer another recipe
#
# - An optimizer that needs gradients only, and Dropout or BatchNorm: [split and
#   merge](accumulate_with_split_merge.py).
# - Update every few calls, or `optax.MultiSteps`: [MultiSteps or in the step](multisteps_or_in_step.py).
# - Statistics that average over minibatches: [BatchNorm and Dropout](batchnorm_and_dropout.py).
