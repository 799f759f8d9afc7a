# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: "Compare gradients with the full batch, watch the state, count the rows, read the FLOPs: four assertions for what raises nothing."
#     answers: [google/flax#5113]
#     symptoms:
#       - gradients are all zero inside the loop
#       - gradient is num_minibatches times too large, Adam hides it
#       - accumulated gradient differs from the full batch with padding or unequal token counts
#       - batch statistics never move in nnx.scan
#       - same dropout mask in every iteration of nnx.scan
#       - model unchanged after jax.jit, BatchNorm not updated
#       - model unchanged after jax.lax.fori_loop or jax.lax.scan
#       - same module twice in the carry, update lost in tree mode
#       - two models have exchanged their parameters after the loop
#       - every minibatch is the whole batch, dynamic_slice clamps
#       - last rows of the batch are never trained on
#       - bfloat16 loss stops growing at 256
#       - gradient accumulation is as slow on eight devices as on one
#       - shard_map gradient is eight times too large, multiplied by the device count
#     needs: {flax: ">=0.11.2", devices: 8}
# ---

# %% [markdown]
# # Wrong results that raise nothing
#
# Four assertions catch most of the traps on this page: gradients equal those of the full batch, state
# moves, every row is seen once, devices share the work. Call them from a test of your own step; the last
# section has one. Every other section is a trap: the wrong number and the assertion that stops it, then the
# right number.

# %%
import jax

# Only makes this machine look like eight devices. Leave it out where there are real ones.
jax.config.update("jax_num_cpu_devices", 8)

# %% tags=["snippet"]
import contextlib

import jax
import numpy as np
from flax import nnx


def assert_gradients_equal(grads, expected, tolerance=1e-6):
    """A factor of 0 is a loss that ignores its argument, one of num_minibatches a division forgotten."""
    leaves, expected_leaves = jax.tree.leaves(grads), jax.tree.leaves(expected)
    assert len(leaves) == len(expected_leaves) > 0, f"{len(leaves)} leaves, {len(expected_leaves)} expected"
    grad, full = (
        np.concatenate([np.ravel(leaf).astype(float) for leaf in tree]) for tree in (leaves, expected_leaves)
    )
    assert np.any(full), "the expected gradient is zero, which proves nothing"
    difference, factor = np.abs(grad - full).max(), grad @ full / (full @ full)
    message = f"the gradient is {factor:.2f} times the expected one, off by up to {difference:.2g}"
    assert difference < tolerance, message


@contextlib.contextmanager
def assert_state_moves(model, *filters):
    """Every leaf that the filters select, such as nnx.BatchStat or nnx.RngCount, must change in the block."""

    def read():
        # Copies: a step that donates the model may write the new values over the old ones.
        return [(path, np.array(leaf)) for path, leaf in nnx.to_flat_state(nnx.state(model, *filters))]

    before = read()
    assert before, "the filters select nothing"
    yield
    after = dict(read())
    still = [".".join(map(str, path)) for path, leaf in before if np.array_equal(leaf, after[path])]
    assert not still, f"did not move: {', '.join(still)}"


def assert_every_row_seen_once(get_minibatch, batch_size, num_minibatches):
    """Cuts the row numbers 1, 2, ... as if they were the batch. Padding with zeros is not counted."""
    rows = np.arange(1, batch_size + 1)
    minibatches = [np.ravel(get_minibatch(rows, i, num_minibatches)) for i in range(num_minibatches)]
    seen = np.bincount(np.concatenate(minibatches), minlength=batch_size + 1)[1:]
    never, often = np.sum(seen == 0), np.sum(seen > 1)
    assert not never and not often, f"{never} rows are never seen, {often} more than once"


def assert_work_is_shared(compiled, compiled_for_one, num_devices):
    """Compares the FLOPs of all devices with those of the same step compiled for one device."""
    flops, flops_of_one = (step.cost_analysis()["flops"] for step in (compiled, compiled_for_one))
    factor = num_devices * flops / flops_of_one
    # Room for what is not divided, such as the sum of the gradients.
    assert factor < 1.5, f"{num_devices} devices do {factor:.0f} times the work of one"


# %% [markdown]
# ## Wrong gradients
#
# The model below has one parameter and the loss is a mean, so that the gradient is the mean of the rows.

# %%
import jax.numpy as jnp
import optax


class Scale(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return self.kernel[...] * x


def loss_fn(model, x):
    return jnp.mean(model(x))


def number(grads):
    (grad,) = jax.tree.leaves(grads)
    return float(grad)


batch = jnp.arange(1.0, 9.0)
minibatches = batch.reshape(4, 2)
full_grads = nnx.grad(loss_fn)(Scale(), batch)
print("gradient of the full batch:", number(full_grads))

# %% [markdown]
# ### The gradient is zero
#
# `nnx.grad` differentiates the argument `m`. This loss ignores it and reads the carried model, which is a
# constant there.


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "the gradient is 0.00 times the expected one"}]
def body_that_reads_the_carry(i, carry):
    model, total = carry

    def minibatch_loss(m):
        return loss_fn(model, minibatches[i])

    grads = nnx.grad(minibatch_loss)(model)
    return model, jax.tree.map(jnp.add, total, jax.tree.leaves(grads))


_, total = nnx.fori_loop(0, 4, body_that_reads_the_carry, (Scale(), [jnp.zeros(())]))
grads = jax.tree.map(lambda g: g / 4, total)
print("gradient:", number(grads))
assert_gradients_equal(grads, full_grads)

# %% [markdown]
# Read the argument.


# %% tags=["proof"]
def body(i, carry):
    model, total = carry

    def minibatch_loss(m):
        return loss_fn(m, minibatches[i])

    grads = nnx.grad(minibatch_loss)(model)
    return model, jax.tree.map(jnp.add, total, jax.tree.leaves(grads))


_, total = nnx.fori_loop(0, 4, body, (Scale(), [jnp.zeros(())]))
grads = jax.tree.map(lambda g: g / 4, total)
print("gradient:", number(grads))
assert_gradients_equal(grads, full_grads)

# %% [markdown]
# The whole loop: [accumulate with nnx.fori_loop](accumulate_with_fori_loop.py).
#
# ### Nobody divided, and Adam hides it
#
# The sum over four minibatches is four times the gradient. SGD takes a step four times too long. Adam divides
# by the size of the gradients it is given, so its update is the same. Compare gradients, never parameters
# that Adam has updated.


# %%
def sum_grads(loss_fn, model, minibatches):
    graphdef, params = nnx.split(model, nnx.Param)

    def minibatch_loss(params, minibatch):
        return loss_fn(nnx.merge(graphdef, params), minibatch)

    def body(total, minibatch):
        return jax.tree.map(jnp.add, total, jax.grad(minibatch_loss)(params, minibatch)), None

    total, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), minibatches)
    return total


def first_update(tx, grads):
    (params,), (grad,) = jax.tree.leaves(nnx.state(Scale())), jax.tree.leaves(grads)
    update, _ = tx.update(grad, tx.init(params), params)
    return float(update)


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "the gradient is 4.00 times the expected one"}]
grads = sum_grads(loss_fn, Scale(), minibatches)
print("gradient:", number(grads))
for name, tx in ("SGD", optax.sgd(0.1)), ("Adam", optax.adam(0.1)):
    factor = first_update(tx, grads) / first_update(tx, full_grads)
    print(f"update of {name}: {factor:.2f} times the right one")
assert_gradients_equal(grads, full_grads)

# %% tags=["proof"]
grads = jax.tree.map(lambda g: g / 4, sum_grads(loss_fn, Scale(), minibatches))
print("gradient:", number(grads))
assert_gradients_equal(grads, full_grads)

# %% [markdown]
# Where the division belongs: [split and merge](accumulate_with_split_merge.py).
#
# ### The mean of means is not the mean
#
# A minibatch with one token gets the weight of a minibatch with four.


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "the gradient is 1.25 times the expected one"}]
def token_sum(model, minibatch):
    tokens, mask = minibatch
    return jnp.sum(model(tokens) * mask)


def token_mean(model, minibatch):
    _, mask = minibatch
    return token_sum(model, minibatch) / mask.sum()


tokens = jnp.array([[8.0, 0, 0, 0], [4, 4, 4, 4]])
mask = jnp.array([[1, 0, 0, 0], [1, 1, 1, 1]])
full_token_grads = nnx.grad(token_mean)(Scale(), (tokens, mask))

grads = jax.tree.map(lambda g: g / len(tokens), sum_grads(token_mean, Scale(), (tokens, mask)))
print("gradient:", number(grads))
assert_gradients_equal(grads, full_token_grads)

# %% [markdown]
# Sum over the tokens of every minibatch, then divide once by all tokens.

# %% tags=["proof"]
grads = jax.tree.map(lambda g: g / mask.sum(), sum_grads(token_sum, Scale(), (tokens, mask)))
print(f"gradient: {number(grads):.1f}")
assert_gradients_equal(grads, full_token_grads)

# %% [markdown]
# With Dropout, empty minibatches or several devices: [sum and count](unequal_minibatches.py). With weights
# instead of counts: [pad and mask](accumulate_with_scan.py#pad-and-mask).
#
# A factor of 1 alone proves nothing: a wrong gradient may have it. So every number is compared.


# %% tags=["proof"]
def complaint(check, *args):
    """What an assertion says, or None where it holds."""
    try:
        check(*args)
    except AssertionError as error:
        return str(error)


found = complaint(assert_gradients_equal, [0.0, 2.0], [1.0, 1.0])
assert found == "the gradient is 1.00 times the expected one, off by up to 1"
assert "proves nothing" in complaint(assert_gradients_equal, [0.0, 0.0], [0.0, 0.0])
assert complaint(assert_gradients_equal, [1.0], [1.0, 1.0]) == "1 leaves, 2 expected"
assert complaint(assert_gradients_equal, [1.0, 1.0], [1.0, 1.0]) is None
print(found)

# %% [markdown]
# ## State that does not move
#
# With momentum 0.5, each minibatch of ones takes the running mean of this BatchNorm half of the way to 1.


# %%
ones = jnp.ones((4, 2, 1))


def batch_norm():
    return nnx.BatchNorm(1, momentum=0.5, rngs=nnx.Rngs(0))


# %% [markdown]
# ### Batch statistics never move
#
# `nnx.scan` broadcasts the model with `in_axes=None`. In graph mode the body writes to a copy of its own,
# and every iteration starts from the same statistics. In tree mode the writes go through.


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "did not move: mean, var", "mode": "graph"}]
@nnx.scan(in_axes=(None, 0), out_axes=0)
def call_broadcast(model, x):
    return model(x)


norm = batch_norm()
with assert_state_moves(norm, nnx.BatchStat):
    call_broadcast(norm, ones)
    print("running mean:", *norm.mean[...].tolist())

# %% [markdown]
# Carry the model. Both modes then do the same.


# %% tags=["proof"]
@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
def call_carried(model, x):
    return model, model(x)


norm = batch_norm()
with assert_state_moves(norm, nnx.BatchStat):
    call_carried(norm, ones)
    print("running mean:", *norm.mean[...].tolist())
assert norm.mean[...] == 1 - 0.5**4


def move_the_mean(*filters):
    with assert_state_moves(norm, *filters):
        norm.mean[...] += 1


assert complaint(move_the_mean, nnx.BatchStat) == "did not move: var", "one that moves is not enough"
assert complaint(move_the_mean, nnx.RngCount) == "the filters select nothing"

# %% [markdown]
# With gradients: [accumulate with nnx.scan](accumulate_with_scan.py).
#
# ### Every minibatch gets the same dropout mask
#
# The random stream of a broadcast model stands still for the same reason, in graph mode only. Count the
# masks: give every minibatch the same rows and compare what comes out.


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "1 dropout mask for 4 minibatches", "mode": "graph"}]
def dropout():
    return nnx.Dropout(0.5, rngs=nnx.Rngs(0))


same_rows = jnp.ones((4, 64))

masks = len(np.unique(call_broadcast(dropout(), same_rows), axis=0))
print("distinct masks:", masks)
assert masks == 4, f"{masks} dropout mask for 4 minibatches"

# %% tags=["proof"]
_, outputs = call_carried(dropout(), same_rows)
masks = len(np.unique(outputs, axis=0))
print("distinct masks:", masks)
assert masks == 4, f"{masks} dropout mask for 4 minibatches"

# %% [markdown]
# In a `jax.lax` loop the same happens, in both modes, when the random state is not in the carry: [split and
# merge](accumulate_with_split_merge.py).
#
# ### `jax.jit` leaves the model unchanged
#
# A Module is a pytree, so `jax.jit` accepts it. The function gets a copy, and what it writes is lost unless
# it returns the copy.


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "did not move: mean, var"}]
@jax.jit
def forward(model, x):
    return model(x)


norm = batch_norm()
with assert_state_moves(norm, nnx.BatchStat):
    forward(norm, ones[0])
    print("running mean:", *norm.mean[...].tolist())

# %% [markdown]
# `nnx.jit` writes the new state back.


# %% tags=["proof"]
@nnx.jit
def forward_and_write_back(model, x):
    return model(x)


norm = batch_norm()
with assert_state_moves(norm, nnx.BatchStat):
    forward_and_write_back(norm, ones[0])
    print("running mean:", *norm.mean[...].tolist())
assert norm.mean[...] == 0.5

# %% [markdown]
# ### `jax.lax.fori_loop` leaves the model unchanged
#
# The loop returns a new Module with the new state. The one that went in keeps the old state. `jax.lax.scan`
# does the same.


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "did not move: mean, var"}]
def norm_body(i, model):
    model(ones[i])
    return model


norm = batch_norm()
with assert_state_moves(norm, nnx.BatchStat):
    returned = jax.lax.fori_loop(0, 4, norm_body, norm)
    print("running mean:", *norm.mean[...].tolist())
    print("running mean of the returned model:", *returned.mean[...].tolist())

# %% [markdown]
# Write the returned state back with `nnx.update(norm, nnx.state(returned))`, or use the loop of NNX.

# %% tags=["proof"]
updated, looped = batch_norm(), batch_norm()
with assert_state_moves(updated, nnx.BatchStat), assert_state_moves(looped, nnx.BatchStat):
    nnx.update(updated, nnx.state(returned))
    nnx.fori_loop(0, 4, norm_body, looped)
    print("running means:", *updated.mean[...].tolist(), *looped.mean[...].tolist())
assert updated.mean[...] == looped.mean[...] == 1 - 0.5**4

# %% [markdown]
# State that goes into the loop and comes back: [split and merge](accumulate_with_split_merge.py).
#
# ### The same module twice in the carry
#
# Graph mode keeps them one object. In tree mode `nnx.fori_loop` makes two of them and writes both back, the second one last: what the body wrote
# to the first is lost. `nnx.scan` [raises](module_changes_in_a_loop.py#tree-mode-nnxscan-the-same-module-twice-in-the-carry).


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "did not move: mean, var", "mode": "tree"}]
def train_first(i, carry):
    first, second = carry
    first(ones[i])
    return first, second


norm = batch_norm()
with assert_state_moves(norm, nnx.BatchStat):
    nnx.fori_loop(0, 4, train_first, (norm, norm))
    print("running mean:", *norm.mean[...].tolist())

# %% [markdown]
# Put every module into the carry once.

# %% tags=["proof"]
norm = batch_norm()
with assert_state_moves(norm, nnx.BatchStat):
    nnx.fori_loop(0, 4, norm_body, norm)
    print("running mean:", *norm.mean[...].tolist())
assert norm.mean[...] == 1 - 0.5**4

# %% [markdown]
# How models, arrays and gradients share a carry: [accumulate with
# nnx.fori_loop](accumulate_with_fori_loop.py).
#
# ### Two models have exchanged their parameters
#
# The models take turns by changing places in the carry. Graph mode accepts this since Flax 0.12.3, and after
# an even number of turns each model has the parameters of the other. Tree mode, and graph mode up to Flax
# 0.12.2, raise.


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "the kernels are (12.0, 3.0)", "flax": ">=0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "requires body function's input and output to have the same reference and pytree structure", "flax": "<0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "Variable identity must be preserved across iterations", "mode": "tree"}]
def two_models():
    first, second = Scale(), Scale()
    first.kernel[...], second.kernel[...] = jnp.array(1.0), jnp.array(10.0)
    return first, second


def take_turns(i, carry):
    playing, waiting = carry
    playing.kernel[...] += 1
    return waiting, playing


first, second = two_models()
nnx.fori_loop(0, 4, take_turns, (first, second))
kernels = float(first.kernel[...]), float(second.kernel[...])
print("kernels:", *kernels)
assert kernels == (3, 12), f"the kernels are {kernels}"

# %% [markdown]
# Keep every module in its place and let one iteration be one turn of each.


# %% tags=["proof"]
def both_turns(i, carry):
    first, second = carry
    first.kernel[...] += 1
    second.kernel[...] += 1
    return first, second


first, second = two_models()
nnx.fori_loop(0, 2, both_turns, (first, second))
kernels = float(first.kernel[...]), float(second.kernel[...])
print("kernels:", *kernels)
assert kernels == (3, 12), f"the kernels are {kernels}"

# %% [markdown]
# Why the loops care which Variable is which: [nnx.fori_loop rejects the
# accumulator](fori_loop_rejects_accumulator.py).
#
# ## Wrong rows
#
# ### Every minibatch is the whole batch
#
# The length of the batch is taken for the length of a minibatch, and `dynamic_slice` moves a start that is
# out of range back until the slice fits. The mean over four whole batches is right, so the gradient says
# nothing. The work is done four times, and no memory is saved.


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "0 rows are never seen, 8 more than once"}]
def full_length_slice(batch, i, num_minibatches):
    size = len(batch)
    return jax.lax.dynamic_slice_in_dim(batch, i * size, size)


cut = jnp.stack([full_length_slice(batch, i, 4) for i in range(4)])
print("gradient:", number(sum_grads(loss_fn, Scale(), cut)) / 4, "from", cut.size, "rows")
assert_every_row_seen_once(full_length_slice, 8, 4)


# %% tags=["proof"]
def reshaped(batch, i, num_minibatches):
    return batch.reshape(num_minibatches, -1, *batch.shape[1:])[i]


cut = jnp.stack([reshaped(batch, i, 4) for i in range(4)])
print("gradient:", number(sum_grads(loss_fn, Scale(), cut)) / 4, "from", cut.size, "rows")
assert_every_row_seen_once(reshaped, 8, 4)

# %% [markdown]
# ### The last rows are dropped, or counted twice
#
# Ten rows in four minibatches: `10 // 4` is 2, and two rows are left over.


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "2 rows are never seen, 0 more than once"}]
def floor_slice(batch, i, num_minibatches):
    size = len(batch) // num_minibatches
    return jax.lax.dynamic_slice_in_dim(batch, i * size, size)


ten_rows = jnp.arange(1.0, 11.0)
cut = jnp.stack([floor_slice(ten_rows, i, 4) for i in range(4)])
print("gradient:", number(sum_grads(loss_fn, Scale(), cut)) / 4)
assert_every_row_seen_once(floor_slice, 10, 4)

# %% [markdown]
# Rounding up is no better: `dynamic_slice` starts the last slice early and counts rows twice.


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "0 rows are never seen, 2 more than once"}]
def ceil_slice(batch, i, num_minibatches):
    size = -(-len(batch) // num_minibatches)
    return jax.lax.dynamic_slice_in_dim(batch, i * size, size)


cut = jnp.stack([ceil_slice(ten_rows, i, 4) for i in range(4)])
print(f"gradient: {number(sum_grads(loss_fn, Scale(), cut)) / 4:.2f}")
assert_every_row_seen_once(ceil_slice, 10, 4)

# %% [markdown]
# Fill up with zeros and divide by the rows that count. This loss is zero for a row of zeros; others need a
# mask.


# %% tags=["proof"]
def padded(batch, i, num_minibatches):
    missing = -len(batch) % num_minibatches
    return reshaped(jnp.pad(batch, (0, missing)), i, num_minibatches)


def loss_sum(model, x):
    return jnp.sum(model(x))


cut = jnp.stack([padded(ten_rows, i, 4) for i in range(4)])
grads = jax.tree.map(lambda g: g / len(ten_rows), sum_grads(loss_sum, Scale(), cut))
print("gradient:", number(grads))
assert_every_row_seen_once(padded, 10, 4)
assert_gradients_equal(grads, nnx.grad(loss_fn)(Scale(), ten_rows))

# %% [markdown]
# All of these cuts, and the mask: [accumulate with nnx.scan](accumulate_with_scan.py).
#
# ## A thousand ones sum to 256
#
# A Python `0.0` in the carry takes the dtype of what is added to it. In bfloat16, 256 + 1 is 256.


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "the sum is a bfloat16"}]
def add_loss(i, total):
    loss = jnp.ones((), jnp.bfloat16)
    return total + loss


total = nnx.fori_loop(0, 1000, add_loss, 0.0)
print("sum:", float(total))
assert total.dtype == jnp.float32, f"the sum is a {total.dtype}"

# %% [markdown]
# A float32 array keeps its dtype.

# %% tags=["proof"]
total = nnx.fori_loop(0, 1000, add_loss, jnp.zeros((), jnp.float32))
print("sum:", float(total))
assert total.dtype == jnp.float32, f"the sum is a {total.dtype}"
assert total == 1000

# %% [markdown]
# In a loop with gradients: [split and merge](accumulate_with_split_merge.py).
#
# ## Several devices
#
# ### Each of eight devices does all the work
#
# The consecutive rows of a slice lie on a few of the devices. The compiler gathers the batch, and every
# device computes the whole minibatch. The gradients are right.

# %%
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
graphdef, params = nnx.split(nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
sharded_params = jax.device_put(params, NamedSharding(mesh, P()))
sharded_x = jax.device_put(x, NamedSharding(mesh, P("data")))


def linear_loss(params, x):
    return jnp.mean(nnx.merge(graphdef, params)(x) ** 2)


def compile_grads(get_minibatch, params, x):
    def minibatch_grads(params, x, i):
        return jax.grad(linear_loss)(params, get_minibatch(x, i, 4))

    return jax.jit(minibatch_grads).lower(params, x, 0).compile()


def mean_grads(compiled, params, x):
    return jax.tree.map(lambda *g: np.mean(g, axis=0), *(compiled(params, x, i) for i in range(4)))


def share_of_work(compiled):
    return compiled.cost_analysis()["flops"] / one_device.cost_analysis()["flops"]


one_device = compile_grads(floor_slice, params, x)
full_linear_grads = jax.jit(jax.grad(linear_loss))(params, x)

# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "8 devices do 8 times the work of one"}]
sliced = compile_grads(floor_slice, sharded_params, sharded_x)
assert_gradients_equal(mean_grads(sliced, sharded_params, sharded_x), full_linear_grads)
print(f"FLOPs of each device: {share_of_work(sliced):.1f} of those of one device alone")
assert_work_is_shared(sliced, one_device, 8)

# %% [markdown]
# Take every fourth row, and each device finds its share among its own rows.


# %% tags=["proof"]
def strided(batch, i, num_minibatches):
    return batch.reshape(-1, num_minibatches, *batch.shape[1:])[:, i]


shared = compile_grads(strided, sharded_params, sharded_x)
assert_gradients_equal(mean_grads(shared, sharded_params, sharded_x), full_linear_grads)
print(f"FLOPs of each device: {share_of_work(shared):.1f} of those of one device alone")
assert_work_is_shared(shared, one_device, 8)
assert_every_row_seen_once(strided, 64, 4)

# %% [markdown]
# The reason, and the cut as a function to copy: [sharded minibatches](accumulate_sharded_minibatches.py).
#
# ### The gradient is eight times too large
#
# In [`jax.shard_map`](https://docs.jax.dev/en/latest/notebooks/shard_map.html) every device holds the same
# parameters, and `jax.grad` sums the gradient of such an argument over the devices by itself. A `psum` after
# the loop adds up eight of these sums.


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "the gradient is 8.00 times the expected one"}]
def psum_after_the_loop(model, rows):
    total = sum_grads(loss_fn, model, rows.reshape(4, -1))
    return jax.tree.map(lambda g: g / (8 * 4), jax.lax.psum(total, "data"))


batch = jnp.arange(1.0, 65.0)
full_grads = nnx.grad(loss_fn)(Scale(), batch)
specs = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": P()}

grads = jax.jit(jax.shard_map(psum_after_the_loop, **specs))(Scale(), batch)
print("gradient:", number(grads))
assert_gradients_equal(grads, full_grads)

# %% [markdown]
# Leave `psum` out, and there is one all-reduce for every minibatch. Or keep it and turn the check of varying
# axes off with `check_vma=False`: `jax.grad` then sums nothing, and there is one all-reduce for the step.


# %% tags=["proof"]
def without_psum(model, rows):
    total = sum_grads(loss_fn, model, rows.reshape(4, -1))
    return jax.tree.map(lambda g: g / (8 * 4), total)


grads = jax.jit(jax.shard_map(without_psum, **specs))(Scale(), batch)
grads_unchecked = jax.jit(jax.shard_map(psum_after_the_loop, check_vma=False, **specs))(Scale(), batch)
print("gradients:", number(grads), number(grads_unchecked))
assert_gradients_equal(grads, full_grads)
assert_gradients_equal(grads_unchecked, full_grads)

# %% [markdown]
# With parameters that are made varying first, the check stays on and there is one all-reduce as well: [reduce
# once per step](reduce_once_per_step.py). A step that needs no `shard_map`: [sharded
# minibatches](accumulate_sharded_minibatches.py).
#
# ## A test of your own step
#
# BatchNorm and Dropout depend on how the batch is cut, so compare the gradients of a model without them.
# [The complete step](complete_train_step.py) is checked in this way too.


# %% tags=["proof"]
def get_minibatch(batch, i, num_minibatches):
    return batch.reshape(num_minibatches, -1, *batch.shape[1:])[i]


@nnx.jit
def train_step(model, optimizer, batch):
    minibatches = jnp.stack([get_minibatch(batch, i, 4) for i in range(4)])
    grads = jax.tree.map(lambda g: g / 4, sum_grads(loss_fn, model, minibatches))
    optimizer.update(model, grads)
    return grads


def test_train_step():
    model = Scale()
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    full_grads = nnx.grad(loss_fn)(model, batch)

    with assert_state_moves(model, nnx.Param), assert_state_moves(optimizer):
        grads = train_step(model, optimizer, batch)

    assert_gradients_equal(grads, full_grads)
    assert_every_row_seen_once(get_minibatch, len(batch), 4)
    assert optimizer.step[...] == 1


test_train_step()
print("gradients, parameters, optimizer and rows: passed")
