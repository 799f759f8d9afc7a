# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Split once, scan over minibatches, merge inside the loss; graph and tree mode, with BatchNorm.
#     answers: [google/flax#5113, google/flax#5050]
#     symptoms:
#       - every minibatch has the same dropout mask
#       - batch statistics are those of the last minibatch only
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # Accumulate gradients with split and merge
#
# Split the model once, scan over the minibatches with `jax.lax.scan`, and merge inside the loss. JAX sees
# pytrees of arrays and nothing else, so the same code runs in graph mode and in tree mode, with BatchNorm
# and Dropout.

# %% tags=["snippet"]
import jax
import jax.numpy as jnp
from flax import nnx


def loss_fn(model, minibatch):
    x, y = minibatch
    return jnp.mean((model(x) - y) ** 2)


def merged_loss(params, rest, graphdef, minibatch):
    model = nnx.merge(graphdef, params, rest, copy=True)
    loss = loss_fn(model, minibatch)
    return loss, nnx.state(model, nnx.Not(nnx.Param))


def accumulate_grads(model: nnx.Module, batch, num_minibatches: int):
    """Mean loss and mean gradients. Statistics and random state of the model move on in place."""
    minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    value_and_grad = jax.value_and_grad(merged_loss, has_aux=True)

    def body(carry, minibatch):
        total, rest = carry
        (loss, rest), grads = value_and_grad(params, rest, graphdef, minibatch)
        return (jax.tree.map(jnp.add, total, grads), rest), loss

    zeros = jax.tree.map(jnp.zeros_like, params)
    (total, rest), losses = jax.lax.scan(body, (zeros, rest), minibatches)
    nnx.update(model, rest)
    return losses.mean(), jax.tree.map(lambda g: g / num_minibatches, total)


@nnx.jit(static_argnames="num_minibatches", donate_argnums=(0, 1))
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch, num_minibatches: int):
    loss, grads = accumulate_grads(model, batch, num_minibatches)
    optimizer.update(model, grads)
    return loss


# %% [markdown]
# `loss_fn` is yours. `batch` is any pytree of arrays with the rows on the leading axis, and `num_minibatches`
# divides the number of rows.
#
# - **`rest` is in the carry.** It holds all that is not a `Param`: BatchNorm statistics, random state. Each
#   minibatch starts from what the one before left, and `nnx.update` writes the last state back into the
#   model.
# - **`copy=True`.** `jax.grad` makes new Variables for the argument it differentiates and hands the others
#   over as they are. BatchNorm and Dropout write to Variables of `rest`, so the merged model needs its own.
# - **`/ num_minibatches`.** The sum of the minibatch gradients is that many times too large;
#   [Adam hides it](silent_wrong_results.py). It has the dtype of the parameters; for bfloat16 see [carry dtype
#   and shape](carry_dtype_and_shape.py).
#
# ## Equal to a Python loop
#
# The reference is a loop in Python. Calling the model there moves its statistics and its random state in
# place, so nothing is carried and nothing is written back.

# %%
import numpy as np
import optax


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(8, 16, use_bias=False, rngs=rngs)  # BatchNorm has a bias of its own
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.drop(nnx.relu(self.norm(self.inner(x)))))


x = jax.random.normal(jax.random.key(1), (32, 8))
batch = (x, 2 * x)


# %% tags=["proof"]
@nnx.jit(static_argnames="num_minibatches")
def python_step(model, optimizer, batch, num_minibatches):
    total = None
    for minibatch in zip(*(jnp.split(a, num_minibatches) for a in batch)):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        grads = jax.grad(lambda p: loss_fn(nnx.merge(graphdef, p, rest, copy=True), minibatch))(params)
        loss_fn(model, minibatch)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    optimizer.update(model, jax.tree.map(lambda g: g / num_minibatches, total))


def arrays(tree):
    """The leaves as NumPy arrays, random keys as the integers they hold."""

    def is_key(a):
        return jnp.issubdtype(a.dtype, jax.dtypes.prng_key)

    return [np.array(jax.random.key_data(a) if is_key(a) else a) for a in jax.tree.leaves(tree)]


def max_difference(tree, other):
    return np.max(
        [np.abs(a.astype(float) - b).max() for a, b in zip(arrays(tree), arrays(other), strict=True)]
    )


scanned, looped = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
before = arrays(nnx.state(scanned))
for model, step in (scanned, train_step), (looped, python_step):
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    step(model, optimizer, batch, 4)
    assert optimizer.step[...] == 1

after = arrays(nnx.state(scanned))
moved = [not np.array_equal(a, b) for a, b in zip(after, before, strict=True)]
(draws,) = arrays(nnx.state(scanned, nnx.RngCount))
assert len(moved) == 9 and sum(moved) == 8, "all but the random key moves"
assert draws == 4, "one dropout mask for each minibatch"
assert max_difference(nnx.state(scanned), nnx.state(looped)) < 1e-6
print(f"{sum(moved)} of {len(moved)} leaves moved, {draws} dropout masks, one optimizer step")
print("parameters, statistics and random state equal those of the Python loop to 1e-06")

# %% [markdown]
# ## Equal to the full batch
#
# Without BatchNorm and Dropout a row's loss depends on that row alone, and cutting the batch changes
# nothing.


# %% tags=["proof"]
class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(8, 16, rngs=rngs)
        self.outer = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.relu(self.inner(x)))


accumulate = nnx.jit(accumulate_grads, static_argnums=2)
full_batch = nnx.jit(nnx.value_and_grad(loss_fn))
mlp = MLP(nnx.Rngs(0))
full_loss, full_grads = full_batch(mlp, batch)
assert len(jax.tree.leaves(full_grads)) == 4 and max(np.abs(g).max() for g in arrays(full_grads)) > 1e-2
for num_minibatches in 4, 32:
    loss, grads = accumulate(mlp, batch, num_minibatches)
    assert max_difference(grads, full_grads) < 1e-6
    assert np.allclose(loss, full_loss)
print("4 leaves: gradients of 4 and of 32 minibatches equal those of the full batch to 1e-06")

# %% [markdown]
# ## Without `copy=True`
#
# The first BatchNorm or Dropout raises: its Variable belongs to the trace around `jax.grad`. The default of
# `nnx.merge` has been `copy=False` since Flax 0.11.2
# ([google/flax#5050](https://github.com/google/flax/issues/5050)); before, it always copied.

# %% tags=["raises-exception"] raises=[{"error": "TraceContextError", "match": "Cannot mutate BatchStat from a different trace level"}]
graphdef, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)


def loss_without_copy(params, rest):
    return loss_fn(nnx.merge(graphdef, params, rest), batch)


jax.grad(loss_without_copy)(params, rest)

# %% [markdown]
# A mapped copy inside the loss makes new Variables too, and needs no argument of `nnx.merge`.


# %%
def mapped_loss(params, rest, graphdef, minibatch):
    model = nnx.merge(graphdef, params, jax.tree.map(lambda a: a, rest))
    loss = loss_fn(model, minibatch)
    return loss, nnx.state(model, nnx.Not(nnx.Param))


copied, mapped = (
    jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=2)(params, rest, graphdef, batch)
    for loss in (merged_loss, mapped_loss)
)
assert max_difference(copied, mapped) == 0
print("loss, rest and gradients are the same")

# %% [markdown]
# ## Leave `rest` out of the carry and nothing raises
#
# Here `rest` leaves the loop as an output instead. Every minibatch starts from the state before the step.


# %%
def accumulate_from_the_same_rest(model, batch, num_minibatches):
    minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    value_and_grad = jax.value_and_grad(merged_loss, has_aux=True)

    def body(total, minibatch):
        loss_and_rest, grads = value_and_grad(params, rest, graphdef, minibatch)
        return jax.tree.map(jnp.add, total, grads), loss_and_rest

    zeros = jax.tree.map(jnp.zeros_like, params)
    total, (losses, rests) = jax.lax.scan(body, zeros, minibatches)
    nnx.update(model, jax.tree.map(lambda a: a[-1], rests))
    return losses.mean(), jax.tree.map(lambda g: g / num_minibatches, total)


eight_rows = jax.tree.map(lambda a: a[:8], batch)
same_rows_four_times = jax.tree.map(lambda a: jnp.tile(a, (4, 1)), eight_rows)
same_rest = nnx.jit(accumulate_from_the_same_rest, static_argnums=2)
_, one_mask = accumulate(Net(nnx.Rngs(0)), eight_rows, 1)
_, four_masks = accumulate(Net(nnx.Rngs(0)), same_rows_four_times, 4)
_, repeated = same_rest(Net(nnx.Rngs(0)), same_rows_four_times, 4)

assert max_difference(repeated, one_mask) < 1e-6
assert max_difference(four_masks, one_mask) > 1e-2
print("rest in the carry: four masks; rest outside: the first mask four times")

# %% [markdown]
# The statistics are those of the last minibatch alone.

# %%
model, last = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
same_rest(model, batch, 4)
nnx.jit(loss_fn)(last, (x[-8:], x[-8:]))
assert max_difference(nnx.state(model, nnx.BatchStat), nnx.state(last, nnx.BatchStat)) < 1e-6
assert max_difference(nnx.state(model, nnx.BatchStat), nnx.state(scanned, nnx.BatchStat)) > 1e-2
print("statistics after 4 minibatches: as if only the last had been seen")

# %% [markdown]
# Count the draws, once, in a test of your step.

# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "1 dropout mask for 4 minibatches"}]
(draws,) = arrays(nnx.state(model, nnx.RngCount))
assert draws == 4, f"{draws} dropout mask for 4 minibatches"

# %% [markdown]
# ## The same with `jax.lax.fori_loop`
#
# The loss is summed in the carry and the minibatch is picked by index. Start the sum as a float32 array: a
# Python `0.0` would take the dtype of a bfloat16 loss.


# %% tags=["proof"]
def accumulate_with_fori_loop(model, batch, num_minibatches):
    minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    value_and_grad = jax.value_and_grad(merged_loss, has_aux=True)

    def body(i, carry):
        total, loss_sum, rest = carry
        minibatch = jax.tree.map(lambda a: a[i], minibatches)
        (loss, rest), grads = value_and_grad(params, rest, graphdef, minibatch)
        return jax.tree.map(jnp.add, total, grads), loss_sum + loss, rest

    carry = (jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.float32), rest)
    total, loss_sum, rest = jax.lax.fori_loop(0, num_minibatches, body, carry)
    nnx.update(model, rest)
    return loss_sum / num_minibatches, jax.tree.map(lambda g: g / num_minibatches, total)


first, second = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
from_scan = accumulate(first, batch, 4)
from_fori = nnx.jit(accumulate_with_fori_loop, static_argnums=2)(second, batch, 4)
assert np.allclose(from_scan[0], from_fori[0])
assert max_difference(from_scan[1], from_fori[1]) < 1e-6
assert max_difference(nnx.state(first), nnx.state(second)) < 1e-6
print("loss, gradients, statistics and random state equal those of the scan")

# %% [markdown]
# ## What it costs
#
# The figures of the compiler for a batch of 1024 rows, with model and optimizer donated, beside the same step
# written by hand on arrays. They do not depend on the machine's load, so they repeat.


# %% tags=["proof"]
class Deep(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        for i in range(4):
            setattr(self, f"layer{i}", nnx.Linear(512, 512, rngs=rngs))

    def __call__(self, x):
        for i in range(4):
            x = nnx.relu(getattr(self, f"layer{i}")(x))
        return x


def hand_written_step(state, batch, num_minibatches):
    """The same step on a list of arrays, without Flax."""
    params, opt_state = state

    def loss_fn(params, minibatch):
        x, y = minibatch
        for kernel, bias in params:
            x = jax.nn.relu(x @ kernel + bias)
        return jnp.mean((x - y) ** 2)

    def body(total, minibatch):
        loss, grads = jax.value_and_grad(loss_fn)(params, minibatch)
        return jax.tree.map(jnp.add, total, grads), loss

    minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)
    total, losses = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), minibatches)
    grads = jax.tree.map(lambda g: g / num_minibatches, total)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), losses.mean()


def cost(compiled):
    """HLO instructions, and bytes: temporary, arguments, outputs, outputs that take the place of an argument."""
    memory = compiled.memory_analysis()
    return (
        compiled.as_text().count(" = "),
        memory.temp_size_in_bytes,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
    )


rows = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
model, tx = Deep(nnx.Rngs(0)), optax.adam(1e-3)
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
params = [(jnp.zeros((512, 512)), jnp.zeros(512)) for _ in range(4)]
by_hand = jax.jit(hand_written_step, static_argnums=2, donate_argnums=0)

titles = ("HLO", "temporary", "arguments", "outputs", "aliased")
print(" " * 16, "minibatches", *(f"{title:>12}" for title in titles))
costs = {}
for n in 2, 64:
    lowered = train_step.lower(model, optimizer, (rows, rows), num_minibatches=n)
    costs["split and merge", n] = cost(lowered.compile())
    costs["by hand", n] = cost(by_hand.lower((params, tx.init(params)), (rows, rows), n).compile())
for (name, n), figures in costs.items():
    print(f"{name:16} {n:>11}", *(f"{figure:>12,}" for figure in figures))

full = full_batch.lower(model, (rows, rows)).compile().memory_analysis()
batch_bytes = 2 * 1024 * 512 * 4
params_bytes, largest = sum(a.nbytes for a in jax.tree.leaves(params)), 512 * 512 * 4
for n in 2, 64:
    instructions, temporary, _, _, aliased = costs["split and merge", n]
    assert abs(instructions / costs["by hand", n][0] - 1) < 0.02
    assert temporary <= 1.05 * (params_bytes + largest + (full.temp_size_in_bytes + batch_bytes) / n)
    assert aliased == sum(a.nbytes for node in (model, optimizer) for a in jax.tree.leaves(nnx.state(node)))
growth = {name: costs[name, 64][0] - costs[name, 2][0] for name in ("split and merge", "by hand")}
assert growth["split and merge"] == growth["by hand"] < 10, "the loop is as long for 64 minibatches as for 2"
print("as many instructions as by hand within 2%, all bytes of model and optimizer reused: True")

# %% [markdown]
# - **HLO instructions** do not grow with the loop. The few more for 64 minibatches take the mean of 64 losses.
# - **Temporary bytes** are at most those of the sum, which are the parameters', of the largest leaf, and of the
#   activations of one minibatch: [the model, and where it fails](donate_and_measure_memory.py).
#
# ## When to prefer another recipe
#
# - [`nnx.scan`](accumulate_with_scan.py) carries the model itself, so there is nothing to split and nothing
#   to write back. In tree mode it takes no BatchNorm and no Dropout.
# - [`nnx.fori_loop`](accumulate_with_fori_loop.py) carries the model too, and splits it inside the body.
# - [Sharded minibatches](accumulate_sharded_minibatches.py) when the batch lies on several devices: the
#   `reshape` above would move data between them.
# - [The complete step](complete_train_step.py) adds sharding, donation and metrics.
# - A batch that does not divide: [pad and mask](accumulate_with_scan.py#pad-and-mask).
