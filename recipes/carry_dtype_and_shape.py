# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Start the accumulator from jax.eval_shape of what is added to it, floats in float32, and cast each sum back to the dtype of the carry.
#     answers: [jax-ml/jax#1686, jax-ml/jax#9046, google/jaxopt#258, google-deepmind/optax#1038, instadeepai/Mava#1184]
#     symptoms:
#       - the sum of the losses stops at 256
#       - the accumulated loss is bfloat16
#       - the error says scan but I called fori_loop
#       - the optimizer state changes from bfloat16 to float32
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # The carry changes its dtype or shape
#
# A loop carries arrays whose shapes and dtypes stay as they are. Ask `jax.eval_shape` what one minibatch
# gives, start from zeros like that with the floats in float32, and cast every sum back to the dtype it had.
#
# ## An accumulator that fits

# %% tags=["snippet"]
import jax
import jax.numpy as jnp
from flax import nnx


def accumulator_like(tree, dtype=jnp.float32):
    """Zeros for a pytree of arrays, or of what jax.eval_shape returns, with every float in dtype."""

    def zeros(a):
        return jnp.zeros_like(a, dtype=dtype if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype)

    return jax.tree.map(zeros, tree)


def add(total, new):
    """The sum of two pytrees, in the dtypes of the first."""
    return jax.tree.map(lambda t, n: (t + n).astype(t.dtype), total, new)


def accumulate(loss_fn, model, minibatches):
    """Mean loss in float32, mean gradients in the dtypes of the parameters."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def merged_loss(params, rest, minibatch):
        model = nnx.merge(graphdef, params, rest, copy=True)
        return loss_fn(model, minibatch), nnx.state(model, nnx.Not(nnx.Param))

    value_and_grad = jax.value_and_grad(merged_loss, has_aux=True)

    def body(carry, minibatch):
        total, rest = carry
        (loss, rest), grads = value_and_grad(params, rest, minibatch)
        return (add(total, (loss, grads)), rest), None

    first = jax.tree.map(lambda a: a[0], minibatches)
    (loss, _), grads = jax.eval_shape(value_and_grad, params, rest, first)
    start = (accumulator_like((loss, grads)), rest)
    ((loss, grads), rest), _ = jax.lax.scan(body, start, minibatches)
    nnx.update(model, rest)
    n = len(jax.tree.leaves(minibatches)[0])
    return loss / n, jax.tree.map(lambda g, p: (g / n).astype(p.dtype), grads, params)


# %% [markdown]
# `accumulator_like` and `add` fit into any loop. Three details:
#
# - **`jax.eval_shape`** traces the gradient of one minibatch and runs nothing. It knows structure, shapes and
#   dtypes of what will be added.
# - **float32**, also where gradients and loss are bfloat16. The mean gradient is rounded to bfloat16 once, after the loop.
# - **`.astype(p.dtype)` at the end.** The optimizer gets the dtype for which it was made.
#
# ## A thousand ones sum to a thousand, gradients are those of the full batch
#
# A bfloat16 model whose loss and gradient are one in every minibatch: the mean of a thousand is one. In
# bfloat16 the sum would stop at 256, where adding one changes nothing.

# %%
import numpy as np
import optax


class Scale(nnx.Module):
    def __init__(self, dtype):
        self.scale = nnx.Param(jnp.ones((), dtype))


def scaled_sum(model, minibatch):
    return jnp.sum(model.scale[...] * minibatch)


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(3, 8, rngs=rngs)
        self.outer = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.relu(self.inner(x)))


def squared_error(model, minibatch):
    x, y = minibatch
    return jnp.mean((model(x) - y) ** 2)


# %% tags=["proof"]
model = Scale(jnp.bfloat16)
jitted = nnx.jit(accumulate, static_argnums=0)
loss, grads = jitted(scaled_sum, model, jnp.ones((1000, 1), jnp.bfloat16))
(grad,) = jax.tree.leaves(grads)
assert loss == 1.0 and loss.dtype == jnp.float32
assert grad == 1.0 and grad.dtype == jnp.bfloat16
assert add(jnp.bfloat16(1), jnp.float32(1)).dtype == jnp.bfloat16, "the dtype of the total"
print(f"bfloat16 model: mean loss {loss:g} in {loss.dtype}, mean gradient {float(grad):g} in {grad.dtype}")

# %% tags=["proof"]
x = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
batch = (x, x.sum(-1, keepdims=True))
minibatches = jax.tree.map(lambda a: a.reshape(4, 8, -1), batch)

mlp = MLP(nnx.Rngs(0))
loss, grads = jitted(squared_error, mlp, minibatches)
full_loss, full_grads = nnx.jit(nnx.value_and_grad(squared_error))(mlp, batch)

pairs = list(zip(*map(jax.tree.leaves, jax.device_get((grads, full_grads))), strict=True))
assert len(pairs) == 4 and max(np.abs(g).max() for g, _ in pairs) > 1e-2
assert max(np.abs(g - full).max() for g, full in pairs) < 1e-6 and abs(loss - full_loss) < 1e-6
print(f"float32 model: {len(pairs)} gradients and the loss within 1e-06 of the full batch")

# %% [markdown]
# Batch statistics and random state go from minibatch to minibatch, as in a Python loop.


# %% tags=["proof"]
def create():
    rngs = nnx.Rngs(0)
    layers = nnx.Linear(3, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    return nnx.Sequential(*layers, nnx.Linear(8, 1, rngs=rngs))


net, looped = create(), create()
jitted(squared_error, net, minibatches)
call = nnx.jit(nnx.Sequential.__call__)
for i in range(4):
    call(looped, minibatches[0][i])

stats, expected = (jax.tree.leaves(nnx.state(model, nnx.BatchStat)) for model in (net, looped))
assert len(stats) == 2 and max(np.abs(a - b).max() for a, b in zip(stats, expected)) < 1e-6
draws, expected_draws = (jax.tree.leaves(nnx.state(model, nnx.RngCount)) for model in (net, looped))
assert draws == expected_draws and max(draws) == 4
print(f"{len(stats)} statistics and the random state equal those of a Python loop")

# %% [markdown]
# ## How to read the message
#
# - A `fori_loop` whose bounds are Python numbers is a scan, so the message says `scan`. `loop_carry[1]` is
#   your carry, `loop_carry[0]` the counter.
# - With a traced bound it is a `while_loop`, and your carry is `loop_carry[2]`.
# - In `scan` and `while_loop` the path begins with the name of the body's first parameter.
# - *Input* is what you start from, *output* what the body returns.
#
# ## Shapes
#
# ### A vector is added to a scalar

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "The input carry component loop_carry[1] has type float32[] but the corresponding output carry component has type float32[3], so the shapes do not match"}]
rows = jnp.ones((4, 3))
nnx.fori_loop(0, 4, lambda i, total: total + rows[i], 0.0)

# %% [markdown]
# ### The same, and the bound is traced

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "while_loop body function carry input and carry output must have equal types"}]
nnx.jit(lambda n: nnx.fori_loop(0, n, lambda i, total: total + rows[i], 0.0))(4)

# %% [markdown]
# Start from a vector, or reduce each row to a scalar.

# %%
vector = nnx.fori_loop(0, 4, lambda i, total: total + rows[i], jnp.zeros(3))
scalar = nnx.fori_loop(0, 4, lambda i, total: total + rows[i].sum(), 0.0)
print("vector:", vector.tolist(), "scalar:", float(scalar))

# %% [markdown]
# ## Integers and Python numbers
#
# ### An integer array and a float
#
# `jnp.int32(0)`, `jnp.zeros((), int)` and a counter that is divided say the same.

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "has type int32[] but the corresponding output carry component has type float32[], so the dtypes do not match"}]
nnx.fori_loop(0, 4, lambda i, total: total + rows[i].sum(), jnp.int32(0))

# %% [markdown]
# A Python `0` works: its type is weak, and JAX promotes a weak start to what the body returns.

# %%
total = nnx.fori_loop(0, 4, lambda i, total: total + rows[i].sum(), 0)
assert total == 12.0
print("sum:", float(total), total.dtype)


# %% [markdown]
# ### Two Python zeros, and one takes the value of the other
#
# JAX promotes once. Here `current` becomes a float, and `previous`, which gets its value one iteration later,
# is an integer still.


# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "The input carry component loop_carry[1][0] has type int32[] but the corresponding output carry component has type float32[], so the dtypes do not match"}]
def body(i, carry):
    previous, current = carry
    return current, rows[i].sum()


nnx.fori_loop(0, 4, body, (0, 0))

# %% [markdown]
# Start from arrays. Then there is nothing to promote.

# %%
previous, current = nnx.fori_loop(0, 4, body, (jnp.zeros(()), jnp.zeros(())))
print("previous and current:", float(previous), float(current))

# %% [markdown]
# ## bfloat16
#
# ### A thousand ones sum to 256
#
# A weak `0.0` is promoted to bfloat16 too, when that is what the body returns. Nothing raises.

# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "a thousand ones sum to 256 in bfloat16"}]
ones = jnp.ones(1000, jnp.bfloat16)
total = nnx.fori_loop(0, 1000, lambda i, total: total + ones[i], 0.0)
assert total == 1000, f"a thousand ones sum to {float(total):g} in {total.dtype}"

# %% [markdown]
# `jnp.array(0.0)` is as weak as `0.0`. `jnp.zeros(())` is float32 and stays float32.

# %%
for name, start in {"0.0": 0.0, "jnp.array(0.0)": jnp.array(0.0), "jnp.zeros(())": jnp.zeros(())}.items():
    total = nnx.fori_loop(0, 1000, lambda i, total: total + ones[i], start)
    print(f"{name:14} -> {float(total):4g} in {total.dtype}")
assert total == 1000 and total.dtype == jnp.float32


# %% [markdown]
# ### float32 gradients and an accumulator like the bfloat16 parameters
#
# The sum is meant to be float32, and the zeros are not.


# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "the input carry component total['bias'].value has type bfloat16[1] but the corresponding output carry component has type float32[1], so the dtypes do not match"}]
linear = nnx.Linear(3, 1, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
graphdef, params = nnx.split(linear)


@jax.grad
def grad(params, x):
    return jnp.mean(nnx.merge(graphdef, params)(x) ** 2)


def body(total, x):
    return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grad(params, x)), None


jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), x)

# %% [markdown]
# Ask for the zeros in float32.

# %%
total, _ = jax.lax.scan(body, accumulator_like(jax.eval_shape(grad, params, x[0])), x)
print("accumulated in", *{leaf.dtype.name for leaf in jax.tree.leaves(total)})


# %% [markdown]
# ### float32 gradients and an optimizer of bfloat16 parameters
#
# Adam starts its moments in the dtype of the parameters. An update with float32 gradients leaves the first
# moment in float32. In a loop that raises. Outside of a loop nothing raises, and the second step is traced
# again.


# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "['mu']['bias'].value has type bfloat16[1] but the corresponding output carry component has type float32[1]", "mode": "graph"}, {"error": "TypeError", "match": "mu['bias'].value has type bfloat16[1] but the corresponding output carry component has type float32[1]", "mode": "tree"}]
def body(i, carry):
    linear, optimizer = carry
    grads = jax.tree.map(lambda p: jnp.ones_like(p, jnp.float32), nnx.state(linear, nnx.Param))
    optimizer.update(linear, grads)
    return linear, optimizer


optimizer = nnx.Optimizer(linear, optax.adam(0.1), wrt=nnx.Param)
nnx.fori_loop(0, 4, body, (linear, optimizer))


# %% [markdown]
# `accumulate` returns the gradients in the dtypes of the parameters.


# %%
def body(carry, minibatches):
    linear, optimizer = carry
    loss, grads = accumulate(squared_error, linear, minibatches)
    optimizer.update(linear, grads)
    return (linear, optimizer), loss


optimizer = nnx.Optimizer(linear, optax.adam(0.1), wrt=nnx.Param)
steps = jax.tree.map(lambda a: a.reshape(2, 2, 8, -1), batch)
_, losses = nnx.scan(body)((linear, optimizer), steps)
moments = jax.tree.leaves(nnx.state(optimizer, nnx.OptState))
assert optimizer.step[...] == 2 and {m.dtype.name for m in moments} == {"bfloat16", "int32", "uint32"}
print("2 optimizer steps, losses in", losses.dtype)

# %% [markdown]
# ### A float32 value is written into a bfloat16 Variable
#
# Flax 0.11.2 lets the Variable change its dtype, and the loop raises. Newer releases cast the value and warn
# (this site makes errors of warnings). Cast it yourself.


# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "has type bfloat16[1] but the corresponding output carry component has type float32[1]", "flax": "<0.12"}, {"error": "FutureWarning", "match": "scatter inputs have incompatible types: cannot safely cast value from dtype=float32 to dtype=bfloat16", "flax": ">=0.12"}]
def body(i, linear):
    linear.bias[...] = linear.bias[...] + jnp.ones(1)
    return linear


nnx.fori_loop(0, 4, body, linear)


# %%
def body(i, linear):
    linear.bias[...] = (linear.bias[...] + jnp.ones(1)).astype(linear.bias.dtype)
    return linear


nnx.fori_loop(0, 4, body, linear)
print("bias in", linear.bias.dtype)


# %% [markdown]
# ### The branches of a `cond` return different dtypes
#
# An update every fourth minibatch, written by hand: the mean of a float32 sum, or zeros like the bfloat16
# gradients.


# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "cond branches must have equal output types but they differ"}]
def updates(total, grads, count):
    def mean():
        return jax.tree.map(lambda t: t / 4, total)

    def nothing():
        return jax.tree.map(jnp.zeros_like, grads)

    return jax.lax.cond(count == 4, mean, nothing)


grads = {"bias": jnp.ones(3, jnp.bfloat16)}
total = {"bias": jnp.zeros(3, jnp.float32)}
jax.jit(updates)(total, grads, 4)


# %% [markdown]
# Cast in the branch that has the wider dtype. `optax.MultiSteps` around `schedule_free` with bfloat16
# parameters once failed like this; it runs on every release shown here.


# %%
def updates(total, grads, count):
    def mean():
        return jax.tree.map(lambda t, g: (t / 4).astype(g.dtype), total, grads)

    def nothing():
        return jax.tree.map(jnp.zeros_like, grads)

    return jax.lax.cond(count == 4, mean, nothing)


print("by hand:", jax.jit(updates)(total, grads, 4)["bias"].dtype)

params = {"bias": jnp.ones(3, jnp.bfloat16)}
tx = optax.MultiSteps(optax.contrib.schedule_free(optax.adam(1e-3, b1=0.0), 1e-3), every_k_schedule=2)
opt_state = tx.init(params)
for _ in range(2):
    result, opt_state = jax.jit(tx.update)(grads, opt_state, params)
assert opt_state.gradient_step == 1
print("optax.MultiSteps:", result["bias"].dtype)

# %% [markdown]
# ## `None` becomes an array
#
# ### `jax.lax.scan`: a field that is `None` becomes an array
#
# Up to jax 0.10.2 the message can name another field than the one that was `None`.

# %%
from typing import Any, NamedTuple


class SolverState(NamedTuple):
    step: jax.Array | int
    aux: Any = None


def update(state, row):
    return SolverState(state.step + 1, {"loss": row.sum()})


# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "is a <class 'NoneType'> but the corresponding component of the carry output is"}]
jax.lax.scan(lambda state, row: (update(state, row), None), SolverState(0), rows)

# %% [markdown]
# ### `nnx.fori_loop`: a field that is `None` becomes an array

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.fori_loop requires body function's input and output to have the same reference and pytree structure", "flax": "<0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "different types at key path", "flax": ">=0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "different types at key path", "mode": "tree"}]
nnx.fori_loop(0, 4, lambda i, state: update(state, rows[i]), SolverState(0))

# %% [markdown]
# ### Start from the result of one update
#
# `jax.eval_shape` knows it without running it.

# %%
start = accumulator_like(jax.eval_shape(update, SolverState(0), rows[0]))
scanned, _ = jax.lax.scan(lambda state, row: (update(state, row), None), start, rows)
looped = nnx.fori_loop(0, 4, lambda i, state: update(state, rows[i]), start)
assert scanned.step.dtype == looped.step.dtype == jnp.int32, "an integer stays one"
assert scanned.step == looped.step == 4 and scanned.aux["loss"] == looped.aux["loss"] == 3.0
print("steps:", int(scanned.step), "last loss:", float(scanned.aux["loss"]))

# %% [markdown]
# ## Under `jax.shard_map`
#
# ### Zeros are the same on every device, the sum is not
#
# Under `shard_map` the type of an array says over which axes it varies. Zeros vary over none.

# %%
from jax.sharding import AxisType, PartitionSpec as P

mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))


def local_sum(rows, start):
    total, _ = jax.lax.scan(lambda total, row: (total + row.sum(), None), start, rows)
    return total[None]


# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "so the varying manual axes do not match", "jax": "<0.10"}, {"error": "TypeError", "match": "so the manual axis types do not match", "jax": ">=0.10"}]
@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
def device_sums(rows):
    return local_sum(rows, jnp.zeros(()))


device_sums(rows)


# %% [markdown]
# The message proposes `jax.lax.pvary` or `jax.lax.pcast`; none of the releases shown here has both. What
# `jax.eval_shape` returns knows its axes, so zeros like that are right on all of them.


# %%
@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
def device_sums(rows):
    return local_sum(rows, accumulator_like(jax.eval_shape(jnp.sum, rows)))


assert device_sums(rows)[0] == 12.0
print("sum:", float(device_sums(rows)[0]))

# %% [markdown]
# ## When to prefer another recipe
#
# - The structure of the carry changes, or its references: [the carry does not come back as it went
#   in](structure_mismatch_catalogue.py) or [Modules that change in a loop](module_changes_in_a_loop.py).
# - Everything is float32: [accumulate with split and merge](accumulate_with_split_merge.py) is shorter.
# - You want an NNX loop: [`nnx.scan`](accumulate_with_scan.py) or
#   [`nnx.fori_loop`](accumulate_with_fori_loop.py).
# - Loss scaling for float16, and minibatches that are not finite: [accumulate in
#   float32](accumulate_in_float32.py).
