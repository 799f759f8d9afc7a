# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Cast each minibatch's gradients to float32, unscale them, and add only those that are finite.
#     answers: [jax-ml/jax#9046]
#     symptoms:
#       - gradient accumulation in bfloat16 gets worse with more minibatches
#       - all gradients are zero in float16
#       - one NaN minibatch makes the whole accumulated gradient NaN
#       - loss scaling with gradient accumulation
#       - skip a minibatch with inf or nan gradients
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # Accumulate in float32
#
# Cast the gradients of each minibatch to float32, unscale them, and add them only if all of them are finite.
# The error of a bfloat16 sum grows with the number of minibatches, and a single NaN in a sum costs the whole
# step.

# %% tags=["snippet"]
import jax
import jax.numpy as jnp
from flax import nnx


def loss_fn(model, minibatch):
    x, y = minibatch
    return jnp.mean((model(x).astype(jnp.float32) - y) ** 2)


def accumulate_grads(loss_fn, model: nnx.Module, batch, num_minibatches: int, loss_scale=1.0):
    """Mean loss and gradients in float32 over the finite minibatches; how many those are; the next loss scale."""
    minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def scaled_loss(params, rest, minibatch, loss_scale):
        model = nnx.merge(graphdef, params, rest, copy=True)
        loss = loss_fn(model, minibatch).astype(jnp.float32)
        return loss * loss_scale, (loss, nnx.state(model, nnx.Not(nnx.Param)))

    def body(carry, minibatch):
        total, rest, kept, loss_scale = carry
        grads, (loss, new_rest) = jax.grad(scaled_loss, has_aux=True)(params, rest, minibatch, loss_scale)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / loss_scale, grads)
        finite = jnp.array([jnp.isfinite(a).all() for a in jax.tree.leaves((loss, grads))]).all()
        new = (jax.tree.map(jnp.add, total, (loss, grads)), new_rest)
        total, rest = jax.tree.map(lambda n, old: jnp.where(finite, n, old), new, (total, rest))
        return (total, rest, kept + finite, jnp.where(finite, loss_scale, loss_scale / 2)), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    total = (jnp.zeros((), jnp.float32), zeros)
    carry = (total, rest, jnp.zeros((), jnp.int32), jnp.asarray(loss_scale, jnp.float32))
    (total, rest, kept, loss_scale), _ = jax.lax.scan(body, carry, minibatches)
    nnx.update(model, rest)
    loss, grads = jax.tree.map(lambda a: a / kept, total)
    return loss, grads, kept, loss_scale


@nnx.jit(static_argnames="num_minibatches", donate_argnums=(0, 1))
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch, loss_scale, num_minibatches: int):
    loss, grads, kept, loss_scale = accumulate_grads(loss_fn, model, batch, num_minibatches, loss_scale)

    def update(model, optimizer):
        params = nnx.state(model, nnx.Param)
        optimizer.update(model, jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params))

    def keep(model, optimizer):
        pass

    nnx.cond(kept > 0, update, keep, model, optimizer)
    return {"loss": loss, "skipped": num_minibatches - kept, "loss_scale": loss_scale}


# %% [markdown]
# `loss_fn` is yours, and returns a mean over the rows. `num_minibatches` divides the number of rows.
#
# - **float32 before anything else.** The sum is float32, whatever the parameters are. In `train_step` the mean
#   is rounded once, to the dtype for which the optimizer was made.
# - **`/ loss_scale` before the sum.** The scale is halved where a minibatch overflows, so the minibatches of
#   one step can have different scales. It stays a power of two, by which dividing is exact.
# - **`jnp.where`, not a product.** NaN times zero is NaN. `rest` is put back too: a minibatch that is skipped
#   leaves no NaN in the BatchNorm statistics.
# - **`/ kept`.** The mean is over the minibatches that were added.
# - **`nnx.cond`.** If nothing was added, model and optimizer stay as they are. An update with zeros would
#   still move them, for Adam and for weight decay.
#
# bfloat16 has the range of float32: give it a `loss_scale` of `jnp.float32(1)`. For float16 begin with
# `jnp.float32(2**15)`, and hand the scale that a step returns to the next one. Double it after some thousand
# steps in which nothing was skipped. A Python number as the first scale would compile the step twice.
#
# ## The error of a bfloat16 sum grows
#
# Parameters in bfloat16 have gradients in bfloat16. Here is the mean of the first N of 1024 such gradients,
# summed in both dtypes and compared with the same mean in float64 of gradients that were never rounded. The
# model computes in float32, so that no other rounding is in the picture.

# %%
import numpy as np
import optax


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, **dtypes):
        self.inner = nnx.Linear(8, 16, rngs=rngs, **dtypes)
        self.outer = nnx.Linear(16, 8, rngs=rngs, **dtypes)

    def __call__(self, x):
        return self.outer(nnx.tanh(self.inner(x)))


def flat(grads):
    return np.concatenate([np.ravel(g).astype(float) for g in jax.tree.leaves(grads)])


def relative_error(grads, expected):
    return np.linalg.norm(grads - expected, axis=-1) / np.linalg.norm(expected, axis=-1)


x = np.random.default_rng(0).normal(size=(4096, 8)).astype(np.float32)
batch = (x, np.sin(3 * x))
minibatches = jax.tree.map(lambda a: a.reshape(1024, 4, 8), batch)

bf16_model = MLP(nnx.Rngs(0), dtype=jnp.float32, param_dtype=jnp.bfloat16)
graphdef, bf16_params = nnx.split(bf16_model, nnx.Param)
params = jax.tree.map(lambda p: p.astype(jnp.float32), bf16_params)


@jax.jit
def grads_of_each(params):
    def grad(minibatch):
        grads = jax.grad(lambda params: loss_fn(nnx.merge(graphdef, params), minibatch))(params)
        return jnp.concatenate([g.ravel() for g in jax.tree.leaves(grads)])

    return jax.lax.map(grad, minibatches)


def running_sum(grads, dtype):
    def body(total, g):
        total = total + g.astype(dtype)
        return total, total

    _, totals = jax.lax.scan(body, jnp.zeros(grads.shape[1], dtype), grads)
    return np.array(totals, float)


# %% tags=["proof"]
grads, unrounded = grads_of_each(bf16_params), grads_of_each(params)
assert grads.dtype == jnp.bfloat16 and unrounded.dtype == jnp.float32 and len(grads) == 1024

counts = 4 ** np.arange(6)
expected = np.cumsum(np.array(unrounded, float), axis=0)[counts - 1]
errors = {}
for dtype in jnp.float32, jnp.bfloat16:
    errors[dtype.dtype.name] = relative_error(running_sum(grads, dtype)[counts - 1], expected)

print(f"{'minibatches':>11}{'float32 sum':>14}{'bfloat16 sum':>14}")
for row in zip(counts, *errors.values()):
    print("{:11}{:14.2%}{:14.2%}".format(*row))

float32_errors, bfloat16_errors = errors.values()
assert float32_errors[0] == bfloat16_errors[0] > 1e-3, "one gradient: what is wrong is its own rounding"
assert np.all(np.diff(float32_errors) < 0), "float32: the roundings of the gradients average out"
assert np.all(np.diff(bfloat16_errors) > 0), "bfloat16: each addition rounds again"
assert float32_errors[-1] < 1e-3 and bfloat16_errors[-1] > 0.1

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots()
for (name, error), color, offset in zip(errors.items(), ("#1f78b8", "#c7500f"), (-12, 10)):
    error = [float(f"{e:.1e}") for e in error]  # as in the table, and free of noise
    axes.loglog(counts, error, color=color, marker="o", markersize=4)
    axes.annotate(
        f"{name} sum",
        xy=(counts[-2], error[-2]),
        xytext=(-6, offset),
        textcoords="offset points",
        ha="right",
        va="center",
        color=color,
    )
axes.set_xticks(counts, [str(n) for n in counts])
axes.set_yticks([1e-4, 1e-3, 1e-2, 1e-1], ["0.01%", "0.1%", "1%", "10%"])
axes.minorticks_off()
axes.set(xlabel="minibatches in the sum", ylabel="relative error of the mean gradient", ylim=(5e-5, 0.5))
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# A bfloat16 has eight significant bits. When the sum is 256 times as large as what is added, adding changes
# nothing, and the sum stands still.
#
# ## Equal to the full batch
#
# A float32 model gives the gradients of the full batch. A bfloat16 model gives the mean of its minibatch
# gradients without another rounding.

# %% tags=["proof"]
accumulate = nnx.jit(accumulate_grads, static_argnums=(0, 3))
model = MLP(nnx.Rngs(0))
small_batch = jax.tree.map(lambda a: a[:32], batch)
full_loss, full_grads = nnx.jit(nnx.value_and_grad(loss_fn))(model, small_batch)
loss, grads, kept, _ = accumulate(loss_fn, model, small_batch, 4)
assert len(jax.tree.leaves(grads)) == 4 and abs(flat(full_grads)).max() > 1e-2
assert abs(flat(grads) - flat(full_grads)).max() < 1e-6
assert abs(loss - full_loss) < 1e-6 and kept == 4
print("float32 model: loss and gradients in 4 leaves equal those of the full batch to 1e-06")

exact = np.array(grads_of_each(bf16_params), float).mean(axis=0)
_, grads, kept, _ = accumulate(loss_fn, bf16_model, batch, 1024)
assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"float32"} and kept == 1024
assert relative_error(flat(grads), exact) < 1e-6
print("bfloat16 parameters: mean of 1024 gradients equal to the exact mean to 1e-06")

# Adam's moments are bfloat16 too. Float32 gradients would change them, and the branches of nnx.cond would differ.
optimizer = nnx.Optimizer(bf16_model, optax.adam(1e-3), wrt=nnx.Param)
train_step.lower(bf16_model, optimizer, small_batch, jnp.float32(1), num_minibatches=4)
print("bfloat16 parameters and Adam: the step can be traced")

# %% [markdown]
# ## float16 needs a loss scale
#
# The smallest float16 above zero is about 6e-8. A term of the loss with a small weight has gradients below
# it, and they vanish without a word. Scaled up before the backward pass, they survive it.


# %% tags=["proof"]
def small_term(model, minibatch):
    return 1e-7 * loss_fn(model, minibatch)


float16_model = MLP(nnx.Rngs(0), dtype=jnp.float16)
expected = 1e-7 * flat(full_grads)
for loss_scale in 1.0, 2.0**15:
    _, grads, kept, _ = accumulate(small_term, float16_model, small_batch, 4, loss_scale)
    assert kept == 4, "nothing overflows"
    if loss_scale == 1:
        assert np.all(flat(grads) == 0)
        print(f"loss scale     1: all {expected.size} gradients are zero")
assert relative_error(flat(grads), expected) < 1e-2
print(f"loss scale {loss_scale:g}: within 1% of the float32 gradients")

# %% [markdown]
# ### Keep the parameters in float32
#
# Layers with `dtype=jnp.float16` compute in float16 and keep parameters in float32, the default of
# `param_dtype`. With float16 parameters the sum is right as well, but it is too small for the dtype in which
# the optimizer wants it.

# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "of 280 gradients are zero in float16"}]
float16_params = jax.tree.map(lambda p: p.astype(jnp.float16), nnx.state(model, nnx.Param))
nnx.update(float16_model, float16_params)
_, grads, *_ = accumulate(small_term, float16_model, small_batch, 4, 2.0**15)
assert relative_error(flat(grads), expected) < 1e-2, "the float32 sum is right"

zeros = np.sum(flat(grads).astype(np.float16) == 0)
assert zeros == 0, f"{zeros} of {expected.size} gradients are zero in float16"

# %% [markdown]
# ## A minibatch that is not finite costs nothing but itself
#
# Minibatch 3 of 8 has an infinite input. The step over the eight equals the step over the seven others:
# parameters, statistics, random state.


# %% tags=["proof"]
class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(8, 16, use_bias=False, dtype=jnp.float16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, dtype=jnp.float16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(16, 8, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.drop(nnx.relu(self.norm(self.inner(x)))))


def create(tx):
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def arrays(*nodes):
    """The leaves as NumPy arrays, random keys as the integers they hold."""

    def is_key(a):
        return jnp.issubdtype(a.dtype, jax.dtypes.prng_key)

    leaves = [leaf for node in nodes for leaf in jax.tree.leaves(nnx.state(node))]
    return [np.array(jax.random.key_data(a) if is_key(a) else a) for a in leaves]


small_x, small_y = small_batch
bad_batch = (small_x.copy(), small_y)
bad_batch[0][13] = np.inf  # a row of minibatch 3
seven = jax.tree.map(lambda a: np.delete(a, range(12, 16), axis=0), small_batch)

# The first step of SGD with a rate of one subtracts the gradient itself.
tx = optax.sgd(1.0, momentum=0.9)
skipping, others = create(tx), create(tx)
before = arrays(*skipping)
metrics = train_step(*skipping, bad_batch, jnp.float32(1024), num_minibatches=8)
expected_metrics = train_step(*others, seven, jnp.float32(1024), num_minibatches=7)

after, expected_after = arrays(*skipping), arrays(*others)
moved = [abs(a.astype(float) - b).max() for a, b in zip(after, before, strict=True)]
assert len(moved) == 15 and sum(m > 1e-3 for m in moved) == 14, "all but the random key moves"
assert all(abs(a.astype(float) - b).max() < 1e-6 for a, b in zip(after, expected_after, strict=True))
assert abs(metrics["loss"] - expected_metrics["loss"]) < 1e-6
assert metrics["skipped"] == 1 and expected_metrics["skipped"] == 0
assert metrics["loss_scale"] == 512 and expected_metrics["loss_scale"] == 1024
print(f"skipped {metrics['skipped']} of 8, loss scale 1024 -> {metrics['loss_scale']:g}")
print("parameters, statistics, random state and loss equal those of the step over the others to 1e-06")

# %% [markdown]
# If no minibatch is finite, nothing moves, not even the momentum, and the step does not count.

# %% tags=["proof"]
before = arrays(*skipping)
metrics = train_step(
    *skipping, (np.full_like(small_x, np.nan), small_y), jnp.float32(1024), num_minibatches=8
)
assert metrics["skipped"] == 8 and np.isnan(metrics["loss"]) and skipping[1].step[...] == 1
assert all(np.array_equal(a, b) for a, b in zip(arrays(*skipping), before, strict=True))
print(f"skipped {metrics['skipped']} of 8, {len(before)} leaves of model and optimizer unchanged")


def nan_without_gradients(model, minibatch):
    return 0 * loss_fn(model, minibatch) + jnp.nan


_, _, kept, _ = accumulate(nan_without_gradients, MLP(nnx.Rngs(0)), small_batch, 4)
assert kept == 0, "a loss that is NaN is skipped even where its gradients are zero"

# %% [markdown]
# ## Report what was skipped
#
# A start of `2**24` is far too high. The first step finds the scale that fits on its way and loses a few
# minibatches to it. Had the scale stayed the same within a step, that step would have lost all of them.

# %% tags=["proof"]
model, optimizer = create(optax.sgd(1e-2, momentum=0.9))
loss_scale, skipped = jnp.float32(2**24), []
for step in range(4):
    metrics = train_step(model, optimizer, batch, loss_scale, num_minibatches=64)
    loss_scale = metrics["loss_scale"]
    skipped.append(int(metrics["skipped"]))
    if skipped[-1]:
        print(f"step {step}: skipped {skipped[-1]} of 64 minibatches, loss scale now {loss_scale:g}")
assert 0 < skipped[0] < 64 and loss_scale == 2.0 ** (24 - sum(skipped))
assert optimizer.step[...] == 4
print(f"{optimizer.step[...]} updates")

# %% [markdown]
# ## What goes wrong
#
# ### Check after the loop
#
# The sum has no way to say which minibatch was bad. Everything in the step is lost.


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "280 of 280 gradients are not finite"}]
@jax.jit
def plain_sum(params, batch):
    minibatches = jax.tree.map(lambda a: a.reshape(8, -1, 8), batch)

    def body(total, minibatch):
        grads = jax.grad(lambda params: loss_fn(nnx.merge(graphdef, params), minibatch))(params)
        return jax.tree.map(jnp.add, total, grads), None

    return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), minibatches)[0]


total = flat(plain_sum(params, bad_batch))
lost = np.sum(~np.isfinite(total))
assert lost == 0, f"{lost} of {total.size} gradients are not finite"

# %% [markdown]
# ### Multiply by the mask
#
# The mask is zero, and the product is NaN.

# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "nan is still in the sum"}]
grads = np.array([np.nan, 1.0])
finite = np.isfinite(grads).all()
assert np.isfinite(finite * grads).all(), f"{(finite * grads)[0]} is still in the sum"

# %% [markdown]
# ### Zeros like the parameters
#
# `jnp.zeros_like` makes a bfloat16 sum from bfloat16 parameters. Float32 gradients do not fit into it, which
# is the better case. bfloat16 gradients do, and nothing raises.


# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "has type bfloat16[16] but the corresponding output carry component has type float32[16], so the dtypes do not match"}]
def body(total, minibatch):
    grads = jax.grad(lambda params: loss_fn(nnx.merge(graphdef, params), minibatch))(bf16_params)
    return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grads), None


jax.lax.scan(body, jax.tree.map(jnp.zeros_like, bf16_params), minibatches)

# %% [markdown]
# ## What it costs
#
# From the compiler, for the step above with momentum and a batch of 4096 rows.


# %% tags=["proof"]
def cost(compiled):
    """HLO instructions, and bytes: temporary, arguments, outputs, outputs that take the place of an argument."""
    memory = compiled.memory_analysis()
    instructions = compiled.as_text().count(" = ")
    return (
        instructions,
        memory.temp_size_in_bytes,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
    )


print(
    f"{'minibatches':>11}{'instructions':>14}{'temporary':>12}{'arguments':>12}{'outputs':>10}{'aliased':>10}"
)
costs = {}
for n in 2, 64:
    costs[n] = cost(train_step.lower(model, optimizer, batch, loss_scale, num_minibatches=n).compile())
    print("{:11}{:14}{:12,}{:12,}{:10,}{:10,}".format(n, *costs[n]))

state_bytes = sum(a.nbytes for a in arrays(model, optimizer))
assert costs[64][0] < 1.1 * costs[2][0], "a loop, not a copy for each minibatch"
assert costs[64][1] < costs[2][1] / 4, "more minibatches, less temporary memory"
assert costs[2][4] == costs[64][4] == state_bytes, "the whole state is updated in place"
print(f"the aliased bytes are those of model and optimizer: {costs[64][4] == state_bytes}")

# %% [markdown]
# The program for 64 minibatches is about as long as the one for two. The sum takes four bytes for each
# parameter, also where the parameter takes two.
#
# ## `optax.MultiSteps` can do both
#
# Where minibatches arrive one by one, `optax.MultiSteps` keeps its mean in float32 too, and skips with
# `optax.skip_not_finite`. It does not scale the loss.

# %% tags=["proof"]
tx = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=2, should_skip_update_fn=optax.skip_not_finite)
weight = jnp.zeros((), jnp.bfloat16)
opt_state, update = tx.init(weight), jax.jit(tx.update)
for grad in 1.0, np.nan, 3.0:
    step, opt_state = update(jnp.asarray(grad, jnp.bfloat16), opt_state, weight)
assert opt_state.acc_grads.dtype == jnp.float32
assert step == -2.0 and opt_state.gradient_step == 1
print(f"mean kept in {opt_state.acc_grads.dtype}; mean of 1, nan and 3: {-float(step):g}")

# %% [markdown]
# ## When to prefer another recipe
#
# - Everything is float32 and finite: [split and merge](accumulate_with_split_merge.py) is shorter.
# - The carry changes its dtype and raises, or the loss stands still at 256: [carry dtype and
#   shape](carry_dtype_and_shape.py).
# - The sum goes straight into refs, in the dtype of the parameters: [accumulate into
#   refs](accumulate_into_refs.py).
# - Sharding and metrics around the loop: [a complete train step](complete_train_step.py).
