# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Carry the model and a list of gradient arrays, scan over the minibatches, count every row once.
#     answers: [google/flax#5113]
#     symptoms:
#       - every minibatch is the whole batch
#       - dynamic_slice returns the same rows each time
#       - gradient accumulation saves no memory
#       - the last rows of the batch are never trained on
#       - batch size not divisible by the number of minibatches
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # Accumulate gradients with `nnx.scan`
#
# Put the model and a list of raw arrays for the sum in the carry, and scan over the minibatches. In graph
# mode the model may have BatchNorm and Dropout; in tree mode, with this snippet, no Dropout.

# %% tags=["snippet"]
import jax
import jax.numpy as jnp
from flax import nnx


def loss_fn(model, minibatch):
    x, y = minibatch
    return jnp.mean((model(x) - y) ** 2)


def accumulate_grads(loss_fn, model: nnx.Module, batch, num_minibatches: int):
    """Mean loss and mean gradients. Statistics and random state of the model move on in place."""
    minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)
    leaves, treedef = jax.tree.flatten(nnx.state(model, nnx.Param))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def body(carry, minibatch):
        model, total = carry
        loss, grads = nnx.value_and_grad(loss_fn)(model, minibatch)
        grads = jax.tree.leaves(nnx.state(grads, nnx.Param))
        total = jax.tree.map(jnp.add, total, grads)
        return (model, total), loss

    zeros = [jnp.zeros_like(leaf) for leaf in leaves]
    (_, total), losses = body((model, zeros), minibatches)
    grads = jax.tree.unflatten(treedef, [g / num_minibatches for g in total])
    return losses.mean(), grads


@nnx.jit(static_argnames="num_minibatches", donate_argnums=(0, 1))
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch, num_minibatches: int):
    loss, grads = accumulate_grads(loss_fn, model, batch, num_minibatches)
    optimizer.update(model, grads)
    return loss


# %% [markdown]
# `loss_fn` is yours. `batch` is any pytree of arrays with the rows on the leading axis, and `num_minibatches`
# divides the number of rows.
#
# - **The model is in the carry.** What BatchNorm and Dropout write reaches the next minibatch, and after the
#   loop it is in `model`. If the model is broadcast with `in_axes=None` instead, graph mode drops what they
#   write, and raises nothing.
# - **The sum is a list of raw arrays,** which both modes carry. It becomes a `State` again for
#   `optimizer.update`.
# - **`losses`** has the loss of every minibatch. Return it instead of its mean if you want to see them.
# - **`/ num_minibatches`.** The sum of the minibatch gradients is that many times too large. It has the dtype of
#   the parameters; for bfloat16 see [carry dtype and shape](carry_dtype_and_shape.py).
#
# ## Equal to the full batch

# %%
import numpy as np
import optax


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(8, 16, rngs=rngs)
        self.outer = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.relu(self.inner(x)))


x = jax.random.normal(jax.random.key(1), (32, 8))
batch = (x, 2 * x)


def max_difference(tree, other):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return np.max([np.abs(np.subtract(a, b)).max() for a, b in pairs])


accumulate = nnx.jit(accumulate_grads, static_argnums=(0, 3))
value_and_grad = nnx.jit(nnx.value_and_grad(loss_fn))


# %% tags=["proof"]
model = MLP(nnx.Rngs(0))
full_loss, full_grads = value_and_grad(model, batch)
assert len(jax.tree.leaves(full_grads)) == 4

shapes = set()


def recorded_loss_fn(model, minibatch):
    shapes.add(minibatch[0].shape)
    return loss_fn(model, minibatch)


loss, grads = accumulate(recorded_loss_fn, model, batch, 4)
assert shapes == {(8, 8)}, "a minibatch has a quarter of the 32 rows"
assert np.allclose(loss, full_loss)
assert max_difference(grads, full_grads) < 1e-6
print("4 minibatches of 8 rows: gradients in 4 leaves equal those of the full batch to 1e-06")

# %% tags=["proof"]
trained = MLP(nnx.Rngs(0))
optimizer = nnx.Optimizer(trained, optax.sgd(0.1), wrt=nnx.Param)
train_step(trained, optimizer, batch, 4)

before, gradients = jax.device_get((jax.tree.leaves(nnx.state(model)), jax.tree.leaves(full_grads)))
expected = [p - 0.1 * g for p, g in zip(before, gradients, strict=True)]
assert optimizer.step[...] == 1
assert max_difference(nnx.state(trained), before) > 1e-3
assert max_difference(nnx.state(trained), expected) < 1e-6
print("one optimizer step for four minibatches, equal to SGD on the full batch")

# %% [markdown]
# ## Dropout needs graph mode
#
# In graph mode the same code ends where a Python loop over the minibatches ends. In tree mode
# `nnx.value_and_grad` differentiates every leaf of the model and rejects the integers of a random stream;
# there, [split the model](accumulate_with_split_merge.py).


# %% tags=["raises-exception", "outcome"] raises=[{"error": "TypeError", "match": "grad requires real- or complex-valued inputs", "mode": "tree"}]
class Net(MLP):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.drop(nnx.relu(self.norm(self.inner(x)))))


scanned, looped = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
_, grads = accumulate(loss_fn, scanned, batch, 4)

minibatches = zip(*(np.split(np.array(a), 4) for a in batch))
all_grads = [jax.tree.leaves(value_and_grad(looped, minibatch)[1]) for minibatch in minibatches]
expected = [np.mean(g, axis=0) for g in zip(*all_grads)]

assert max_difference(grads, expected) < 1e-6
assert max_difference(nnx.state(scanned, nnx.BatchStat), nnx.state(looped, nnx.BatchStat)) < 1e-6
assert jax.tree.leaves(nnx.state(scanned, nnx.RngCount)) == [4]
print("gradients and statistics equal those of a Python loop, 4 dropout masks")

# %% [markdown]
# ## A `State` as the sum works in graph mode
#
# `nnx.scan` takes a `State` rebuilt by `jax.tree.map` also in the releases in which [`nnx.fori_loop` rejects
# it](fori_loop_rejects_accumulator.py). In tree mode the gradients are a Module, which cannot be added to a
# `State`.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "different types at key path", "mode": "tree"}]
def accumulate_state(loss_fn, model, batch, num_minibatches):
    minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def body(carry, minibatch):
        model, total = carry
        loss, grads = nnx.value_and_grad(loss_fn)(model, minibatch)
        return (model, jax.tree.map(jnp.add, total, grads)), loss

    zeros = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    (_, total), losses = body((model, zeros), minibatches)
    return losses.mean(), jax.tree.map(lambda g: g / num_minibatches, total)


_, grads = nnx.jit(accumulate_state, static_argnums=(0, 3))(loss_fn, model, batch, 4)
assert max_difference(grads, full_grads) < 1e-6
print("gradients equal those of the full batch")

# %% [markdown]
# ## Pick the minibatch by index
#
# With `length=` nothing is scanned: a counter in the carry picks the minibatch. Use it when `get_minibatch`
# has more to do than to index, as with a [sharded batch](accumulate_sharded_minibatches.py).


# %%
def accumulate_by_index(loss_fn, model, batch, num_minibatches, get_minibatch):
    leaves, treedef = jax.tree.flatten(nnx.state(model, nnx.Param))

    @nnx.scan(in_axes=nnx.Carry, out_axes=nnx.Carry, length=num_minibatches)
    def body(carry):
        i, model, total, loss_sum = carry
        minibatch = get_minibatch(batch, i, num_minibatches)
        loss, grads = nnx.value_and_grad(loss_fn)(model, minibatch)
        grads = jax.tree.leaves(nnx.state(grads, nnx.Param))
        total = jax.tree.map(jnp.add, total, grads)
        return i + 1, model, total, loss_sum + loss

    zeros = [jnp.zeros_like(leaf) for leaf in leaves]
    _, _, total, loss_sum = body((0, model, zeros, jnp.zeros((), jnp.float32)))
    grads = jax.tree.unflatten(treedef, [g / num_minibatches for g in total])
    return loss_sum / num_minibatches, grads


def indexed_minibatch(batch, i, num_minibatches):
    return jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:])[i], batch)


by_index = nnx.jit(accumulate_by_index, static_argnums=(0, 3, 4))


# %% tags=["proof"]
def times_seen(get_minibatch, batch_size, num_minibatches):
    """How often the loop sees each row of the batch."""
    rows = jnp.arange(batch_size)
    seen = jax.lax.map(lambda i: get_minibatch(rows, i, num_minibatches), jnp.arange(num_minibatches))
    return np.bincount(np.ravel(seen), minlength=batch_size)


loss, grads = by_index(loss_fn, model, batch, 4, indexed_minibatch)
assert np.allclose(loss, full_loss)
assert max_difference(grads, full_grads) < 1e-6
assert np.all(times_seen(indexed_minibatch, 32, 4) == 1)
print("gradients equal those of the full batch, every row seen once")

# %% [markdown]
# ## Catch minibatches that are all the whole batch
#
# This slice takes the length of the batch for the length of a minibatch. `dynamic_slice` moves a start that
# is out of range back until the slice fits: to 0, each time. Nothing raises. The comparison with the full
# batch passes too, because the mean of four whole batches is the whole batch.


# %%
def full_length_slice(batch, i, num_minibatches):
    def cut(a):
        bs = len(a)
        return jax.lax.dynamic_slice_in_dim(a, i * bs, bs)

    return jax.tree.map(cut, batch)


_, grads = by_index(loss_fn, model, batch, 4, full_length_slice)
minibatch_x, _ = full_length_slice(batch, 1, 4)
seen = times_seen(full_length_slice, 32, 4)
assert max_difference(grads, full_grads) < 1e-6
assert len(minibatch_x) == 32 and np.all(seen == 4)
print(f"gradients equal those of the full batch, from {seen.sum()} rows instead of 32")

# %% [markdown]
# Two assertions catch it. Shapes are known while the body is traced, so the first one costs nothing when the
# step runs.


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "4 minibatches of 32 rows from a batch of 32"}]
def checked_slice(batch, i, num_minibatches):
    minibatch = full_length_slice(batch, i, num_minibatches)
    rows, size = len(minibatch[0]), len(batch[0])
    message = f"{num_minibatches} minibatches of {rows} rows from a batch of {size}"
    assert rows * num_minibatches == size, message
    return minibatch


accumulate_by_index(loss_fn, model, batch, 4, checked_slice)

# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "rows are seen more than once"}]
seen = times_seen(full_length_slice, 32, 4)
assert np.all(seen == 1), f"{np.sum(seen > 1)} rows are seen more than once"

# %% [markdown]
# The compiler shows it as well: the memory that accumulation is meant to save is still needed.

# %%
large_batch = jax.tree.map(lambda a: jnp.tile(a, (64, 1)), batch)


def temporary_bytes(num_minibatches, get_minibatch):
    @nnx.jit
    def step(model, batch):
        return accumulate_by_index(loss_fn, model, batch, num_minibatches, get_minibatch)

    return step.lower(model, large_batch).compile().memory_analysis().temp_size_in_bytes


full = temporary_bytes(1, indexed_minibatch)
assert temporary_bytes(8, indexed_minibatch) < full / 4
assert temporary_bytes(8, full_length_slice) > 0.9 * full
print("8 minibatches: less than a quarter of the temporary memory of the full batch")
print("8 wrong slices: all of it")

# %% [markdown]
# ## A batch that does not divide
#
# Ten rows in four minibatches: `reshape` refuses, which is the reason to prefer it to a slice.

# %%
ten_rows = jax.tree.map(lambda a: a[:10], batch)
ten_loss, ten_grads = value_and_grad(model, ten_rows)

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "cannot reshape array of shape (10, 8)"}]
accumulate_grads(loss_fn, model, ten_rows, 4)

# %% [markdown]
# Rounding down drops the tail: `10 // 4` is 2, and rows 8 and 9 are in no minibatch.


# %%
def floor_slice(batch, i, num_minibatches):
    def cut(a):
        rows = len(a) // num_minibatches
        return jax.lax.dynamic_slice_in_dim(a, i * rows, rows)

    return jax.tree.map(cut, batch)


seen = times_seen(floor_slice, 10, 4)
_, grads = by_index(loss_fn, model, ten_rows, 4, floor_slice)
assert seen.tolist() == [1, 1, 1, 1, 1, 1, 1, 1, 0, 0]
assert max_difference(grads, ten_grads) > 1e-3
print(f"row numbers add up to {seen @ np.arange(10)} instead of {sum(range(10))}; the gradients are wrong")

# %% [markdown]
# Rounding up counts twice: the last slice would end at row 12, so `dynamic_slice` starts it two rows early.


# %%
def ceil_slice(batch, i, num_minibatches):
    def cut(a):
        rows = -(-len(a) // num_minibatches)
        return jax.lax.dynamic_slice_in_dim(a, i * rows, rows)

    return jax.tree.map(cut, batch)


seen = times_seen(ceil_slice, 10, 4)
_, grads = by_index(loss_fn, model, ten_rows, 4, ceil_slice)
assert seen.tolist() == [1, 1, 1, 1, 1, 1, 1, 2, 2, 1]
assert max_difference(grads, ten_grads) > 1e-3
print(f"row numbers add up to {seen @ np.arange(10)} instead of {sum(range(10))}; the gradients are wrong")

# %% [markdown]
# ## Pad and mask
#
# Fill up with rows of zeros of weight 0, and give every other row the weight `padded_size / size`. The
# weights of the padded batch then have mean 1, so the mean over rows and the division by `num_minibatches`
# stay as they are.


# %% tags=["proof"]
def pad(batch, num_minibatches):
    size = len(jax.tree.leaves(batch)[0])
    padded_size = -(-size // num_minibatches) * num_minibatches

    def pad_rows(a):
        return jnp.pad(a, [(0, padded_size - size)] + [(0, 0)] * (a.ndim - 1))

    weight = pad_rows(jnp.full(size, padded_size / size))
    return jax.tree.map(pad_rows, batch), weight


def weighted_loss_fn(model, minibatch):
    (x, y), weight = minibatch
    return jnp.mean(weight * jnp.mean((model(x) - y) ** 2, axis=-1))


padded = pad(ten_rows, 4)
(padded_x, _), weight = padded
loss, grads = accumulate(weighted_loss_fn, model, padded, 4)
assert padded_x.shape == (12, 8) and np.sum(np.array(weight) > 0) == 10
assert np.allclose(loss, ten_loss)
assert max_difference(grads, ten_grads) < 1e-6
print("12 rows, 10 of them with weight: loss and gradients equal those of the full batch to 1e-06")

# %% [markdown]
# The padded rows still pass through the model. A layer that mixes rows, as BatchNorm does, needs the mask
# too.

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
    costs["nnx.scan", n] = cost(lowered.compile())
    costs["by hand", n] = cost(by_hand.lower((params, tx.init(params)), (rows, rows), n).compile())
for (name, n), figures in costs.items():
    print(f"{name:16} {n:>11}", *(f"{figure:>12,}" for figure in figures))

full = value_and_grad.lower(model, (rows, rows)).compile().memory_analysis()
batch_bytes = 2 * 1024 * 512 * 4
params_bytes, largest = sum(a.nbytes for a in jax.tree.leaves(params)), 512 * 512 * 4
for n in 2, 64:
    instructions, temporary, _, _, aliased = costs["nnx.scan", n]
    assert abs(instructions / costs["by hand", n][0] - 1) < 0.02
    assert temporary <= 1.05 * (params_bytes + largest + (full.temp_size_in_bytes + batch_bytes) / n)
    assert aliased == sum(a.nbytes for node in (model, optimizer) for a in jax.tree.leaves(nnx.state(node)))
growth = {name: costs[name, 64][0] - costs[name, 2][0] for name in ("nnx.scan", "by hand")}
assert growth["nnx.scan"] == growth["by hand"] < 10, "the loop is as long for 64 minibatches as for 2"
print("as many instructions as by hand within 2%, all bytes of model and optimizer reused: True")

# %% [markdown]
# - **HLO instructions** do not grow with the loop. The few more for 64 minibatches take the mean of 64 losses.
# - **Temporary bytes** are at most those of the sum, which are the parameters', of the largest leaf, and of the
#   activations of one minibatch: [the model, and where it fails](donate_and_measure_memory.py).
#
# ## When to prefer another recipe
#
# - [Split and merge](accumulate_with_split_merge.py) runs in both modes with BatchNorm and Dropout.
# - [`nnx.fori_loop`](accumulate_with_fori_loop.py) hands the body an index instead of a minibatch.
# - [Sharded minibatches](accumulate_sharded_minibatches.py) when the batch lies on several devices.
# - [The complete step](complete_train_step.py) adds sharding, donation and metrics.
