# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Add up losses, gradients and counts over the minibatches, and divide once by the total count.
#     answers:
#       - google/flax#262
#       - AI-Hypercomputer/maxtext#3040
#       - AI-Hypercomputer/maxtext#3381
#       - axolotl-ai-cloud/axolotl#1100
#       - huggingface/transformers#37197
#       - huggingface/transformers#37766
#     symptoms:
#       - gradient accumulation gives another loss than the full batch
#       - loss grows with the number of accumulation steps
#       - mean of means with masked tokens or padding
#       - loss is NaN when a minibatch has no tokens
#       - padding rows are trained on
#       - metrics averaged over batches of different size
#     needs: {flax: ">=0.11.2", devices: 4}
# ---

# %% [markdown]
# # Accumulate over minibatches that do not weigh the same
#
# Let the loss return a sum and a count. Add up both, and the gradients of the sum, and divide once by the
# total count after the loop. Padding, masks and empty minibatches are then right by themselves. A mean of the
# minibatches' means gives every minibatch the same weight, however few tokens it has.

# %%
import jax

# Only makes this machine look like four devices. Leave it out where there are real ones.
jax.config.update("jax_num_cpu_devices", 4)

# %% tags=["snippet"]
import jax
import jax.numpy as jnp
from flax import nnx


def loss_fn(model, minibatch):
    """Sum of the losses of the tokens that count, and how many they are."""
    x, y, mask = minibatch
    losses = jnp.mean((model(x) - y) ** 2, axis=-1)
    return jnp.sum(jnp.where(mask, losses, 0)), jnp.sum(mask, dtype=jnp.int32)


def merged_loss(params, rest, graphdef, minibatch):
    model = nnx.merge(graphdef, params, rest, copy=True)
    loss_sum, count = loss_fn(model, minibatch)
    return loss_sum, (count, nnx.state(model, nnx.Not(nnx.Param)))


def accumulate_sums(model: nnx.Module, batch, num_minibatches: int):
    """Sum of the losses, of the counts and of the gradients."""
    minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    value_and_grad = jax.value_and_grad(merged_loss, has_aux=True)

    def body(carry, minibatch):
        total, rest = carry
        (loss_sum, (count, rest)), grads = value_and_grad(params, rest, graphdef, minibatch)
        return (jax.tree.map(jnp.add, total, grads), rest), (loss_sum, count)

    zeros = jax.tree.map(jnp.zeros_like, params)
    (total, rest), (loss_sums, counts) = jax.lax.scan(body, (zeros, rest), minibatches)
    nnx.update(model, rest)
    return loss_sums.sum(), counts.sum(), total


def accumulate_grads(model: nnx.Module, batch, num_minibatches: int):
    """Mean loss and mean gradients over all tokens that count."""
    loss_sum, count, total = accumulate_sums(model, batch, num_minibatches)
    count = jnp.maximum(count, 1)  # no token at all: zeros instead of 0/0
    return loss_sum / count, jax.tree.map(lambda g: g / count, total)


@nnx.jit(static_argnames="num_minibatches", donate_argnums=(0, 1))
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch, num_minibatches: int):
    loss, grads = accumulate_grads(model, batch, num_minibatches)
    optimizer.update(model, grads)
    return loss


# %% [markdown]
# `batch` is `x`, `y` and a mask that is true for what counts: tokens here, of shape `(rows, length)`, or
# whole rows, of shape `(rows,)`.
#
# - **A sum, not a mean.** What a minibatch weighs is then in its gradient, and adding needs no weights.
# - **One division,** by the count of the whole batch. Not by `num_minibatches`, and not in the loss.
# - **The count is an integer.** It takes no gradient, and no minibatch is too small to be added to it.
# - **`rest`** holds statistics and random state; [split and merge](accumulate_with_split_merge.py) says why
#   it is carried.
#
# ## Equal to the full batch
#
# Sixteen sequences of one to eight tokens.

# %%
import numpy as np
import optax


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(8, 16, rngs=rngs)
        self.outer = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.relu(self.inner(x)))


def arrays(tree):
    return [np.array(a) for a in jax.tree.leaves(tree)]


def max_difference(tree, other):
    return np.max([abs(a - b).max() for a, b in zip(arrays(tree), arrays(other), strict=True)])


rng = np.random.default_rng(0)
lengths = np.array([8, 8, 7, 8, 1, 2, 1, 1, 8, 2, 1, 1, 4, 3, 4, 5])
mask = np.arange(8) < lengths[:, None]
x = np.float32(rng.normal(size=(16, 8, 8))) * mask[..., None]
y = np.float32(np.sin(3 * x) + 4 / lengths[:, None, None])  # short sequences have other targets
batch = (x, y, mask)


# %% tags=["proof"]
def token_loss(params, x, y):
    return jnp.mean((nnx.merge(graphdef, params)(x) - y) ** 2, axis=-1)


graphdef, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)
value_and_grad = jax.jit(jax.value_and_grad(lambda params, x, y: token_loss(params, x, y).mean()))


def full_batch(x, y, mask):
    """Mean loss and gradients over the tokens that count, picked out by NumPy: no mask and no padding."""
    return value_and_grad(params, x[mask], y[mask])


full_loss, full_grads = full_batch(*batch)
assert len(arrays(full_grads)) == 4 and all(abs(g).max() > 1e-2 for g in arrays(full_grads))

accumulate = nnx.jit(accumulate_grads, static_argnums=2)
loss, grads = accumulate(Net(nnx.Rngs(0)), batch, 4)
assert max_difference(grads, full_grads) < 1e-6 and np.isclose(loss, full_loss, rtol=1e-6)
print(f"minibatches of {mask.reshape(4, -1).sum(axis=1).tolist()} tokens: loss and 4 gradients to 1e-06")

model = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
loss = train_step(model, optimizer, batch, 16)
moved = [old - new for old, new in zip(arrays(params), arrays(nnx.state(model)), strict=True)]
assert max_difference(moved, full_grads) < 1e-6 and np.isclose(loss, full_loss, rtol=1e-6)
assert optimizer.step[...] == 1
print("minibatches of one sequence: one step of SGD by the gradients of the full batch to 1e-06")

with_dropout = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(1)), Net(nnx.Rngs(0)))
accumulate(with_dropout, batch, 4)
(draws,) = jax.tree.leaves(nnx.state(with_dropout, nnx.RngCount))
assert draws == 4, "one dropout mask for each minibatch"

# %% [markdown]
# ## The mean of means is off
#
# The loop that [averages minibatches](accumulate_with_split_merge.py) with a loss that is a mean over the
# tokens of its minibatch. Nothing raises.

# %% tags=["proof"]
from functools import partial


def mean_loss(params, minibatch):
    x, y, mask = minibatch
    return jnp.sum(token_loss(params, x, y) * mask) / jnp.sum(mask)


@partial(jax.jit, static_argnums=2)
def mean_of_means(params, batch, num_minibatches):
    minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)

    def body(total, minibatch):
        loss, grads = jax.value_and_grad(mean_loss)(params, minibatch)
        return jax.tree.map(jnp.add, total, grads), loss

    total, losses = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), minibatches)
    return losses.mean(), jax.tree.map(lambda g: g / num_minibatches, total)


def off_by(tree, expected):
    """Length of the difference, as a share of the expected length."""
    tree, expected = (np.concatenate([a.ravel() for a in arrays(t)]) for t in (tree, expected))
    return np.linalg.norm(tree - expected) / np.linalg.norm(expected)


loss, grads = mean_of_means(params, batch, 4)
assert off_by(grads, full_grads) > 0.25 and loss > 1.25 * full_loss
print("loss and gradients are off by more than a quarter: True")

everything = (x, y, np.ones_like(mask))
_, expected = full_batch(*everything)
assert max_difference(mean_of_means(params, everything, 4)[1], expected) < 1e-6
print("without a mask the same loop is right to 1e-06, so test with unequal counts: True")

# %% [markdown]
# ## Divide a sum by a count
#
# One minibatch has six tokens with gradient 1, the other has one token with gradient 8; their mean is 14/7.
# With equal counts two more forms come out right, which is how they survive a test.

# %% tags=["proof"]
from IPython.display import Markdown


def divisions(sums, counts):
    """Ways to make one gradient from the minibatches' sums and counts."""
    sums, counts, num_minibatches = np.array(sums), np.array(counts), len(counts)
    means, total = sums / counts, sum(counts)
    return {
        "sums, divided by the total count": sums.sum() / total,
        "means, weighted by count / total count": (means * counts / total).sum(),
        "means, divided by `num_minibatches`": means.sum() / num_minibatches,
        "means, not divided": means.sum(),
        "sums, divided by `num_minibatches`": sums.sum() / num_minibatches,
        "means, divided by the total count": means.sum() / total,
    }


columns = {
    "6 and 1 tokens": divisions([6, 8], [6, 1]),
    "6 and 6": divisions([6, 48], [6, 6]),
    "6, 6, 6 and 6": divisions([6, 48, 6, 48], [6, 6, 6, 6]),
}
lines = [["the minibatches' gradients", *columns], ["---", *["---:"] * 3]]
for form in columns["6 and 1 tokens"]:
    lines.append([form, *(f"{column[form]:g}" for column in columns.values())])
assert [column["sums, divided by the total count"] for column in columns.values()] == [2, 4.5, 4.5]
right = [form for form, value in columns["6 and 1 tokens"].items() if abs(value - 2) < 1e-12]
right_if_equal = [form for form, value in columns["6 and 6"].items() if abs(value - 4.5) < 1e-12]
assert right == list(columns["6 and 1 tokens"])[:2] and right_if_equal == list(columns["6 and 6"])[:3]
Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines))

# %% [markdown]
# - **Means, not divided:** loss and gradients grow with the number of minibatches. It happens when one part
#   of the code leaves the division to another, and that one believes it done.
# - **Sums, divided by `num_minibatches`:** they grow with the tokens.
# - **Means, divided by the total count:** divided twice.
#
# Adam hides a constant factor, so compare gradients. Losses and metrics that you log follow the same rule:
# carry a sum and a count.
#
# ## If the loss is a mean, weight it
#
# A loss that you cannot change to a sum is right with the weight `count / total count`. The total must be
# known before the loop. Where gradients are not yours to multiply, the weight goes in as the cotangent:
# `pull_back(weight)` instead of `pull_back(1.0)`.


# %% tags=["proof"]
def guarded_mean_loss(params, minibatch):
    loss_sum, count = loss_fn(nnx.merge(graphdef, params), minibatch)
    return loss_sum / jnp.maximum(count, 1)


@partial(jax.jit, static_argnums=(2, 3))
def weighted(params, batch, num_minibatches, as_cotangent):
    minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)
    total_count = jnp.maximum(batch[-1].sum(), 1)

    def body(total, minibatch):
        weight = minibatch[-1].sum() / total_count
        loss, pull_back = jax.vjp(lambda params: guarded_mean_loss(params, minibatch), params)
        if as_cotangent:
            (grads,) = pull_back(weight)
        else:
            (grads,) = pull_back(jnp.ones_like(loss))
            grads = jax.tree.map(lambda g: weight * g, grads)
        return jax.tree.map(jnp.add, total, grads), (weight * loss, grads)

    total, (losses, each) = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), minibatches)
    return losses.sum(), total, each


for as_cotangent in False, True:
    loss, grads, each = weighted(params, batch, 4, as_cotangent)
    assert max_difference(grads, full_grads) < 1e-6 and np.isclose(loss, full_loss, rtol=1e-6)
print("weighted gradients and weighted cotangents: loss and gradients to 1e-06")

# %% [markdown]
# `optax.MultiSteps` takes the same weights, if it adds up instead of taking the mean.


# %% tags=["proof"]
@partial(jax.jit, static_argnums=0)
def last_update(tx, params, grads):
    def body(state, grads):
        updates, state = tx.update(grads, state, params)
        return state, updates

    _, updates = jax.lax.scan(body, tx.init(params), grads)
    return jax.tree.map(lambda a: -a[-1], updates)


summing = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=4, use_grad_mean=False)
averaging = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=4)
assert max_difference(last_update(summing, params, each), full_grads) < 1e-6
assert off_by(last_update(averaging, params, each), full_grads) > 0.7
print("MultiSteps(use_grad_mean=False) of weighted gradients: to 1e-06")

# %% [markdown]
# ## An empty minibatch adds nothing
#
# With sums it is a zero among others. A mean over no tokens is 0/0, and that one NaN reaches the loss and
# the gradients of every layer. The mask is float32 here: a product with Booleans is NaN or not as the
# compiler sees fit. With `jnp.where`, as in the snippet, the gradients of a mean are 0 and the loss alone is
# NaN.

# %% tags=["proof"]
empty = np.arange(16)[:, None] // 4 == 1
holed = (x, y, mask & ~empty)
holed_loss, holed_grads = full_batch(*holed)

loss, grads = accumulate(Net(nnx.Rngs(0)), holed, 4)
assert max_difference(grads, holed_grads) < 1e-6 and np.isclose(loss, holed_loss, rtol=1e-6)
loss, grads, _ = weighted(params, holed, 4, False)
assert max_difference(grads, holed_grads) < 1e-6 and np.isclose(loss, holed_loss, rtol=1e-6), "guarded"
means = mean_of_means(params, (x, y, np.float32(holed[2])), 4)
assert all(np.isnan(a).any() for a in arrays(means))
print(f"tokens {holed[2].reshape(4, -1).sum(axis=1).tolist()}: sums to 1e-06, mean of means NaN")


def mean_with_where(params, minibatch):
    loss_sum, count = loss_fn(nnx.merge(graphdef, params), minibatch)
    return loss_sum / count


loss, grads = jax.jit(jax.value_and_grad(mean_with_where))(params, jax.tree.map(lambda a: a[4:8], holed))
assert np.isnan(loss) and all((g == 0).all() for g in arrays(grads))
print("a mean with jnp.where instead of the product: loss NaN, gradients 0")

# %% [markdown]
# A batch without any token has zero gradients, thanks to `jnp.maximum(count, 1)`. SGD then stands still. An
# optimizer with momentum moves on, and counts a step; where that is not wanted, do not call it.

# %% tags=["proof"]
nothing = (x, y, np.zeros_like(mask))
loss, grads = accumulate(Net(nnx.Rngs(0)), nothing, 4)
assert loss == 0 and len(arrays(grads)) == 4 and all((g == 0).all() for g in arrays(grads))

before = arrays(nnx.state(model))
loss = train_step(model, optimizer, nothing, 16)
assert all((a == b).all() for a, b in zip(before, arrays(nnx.state(model)), strict=True))

momentum = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
train_step(model, momentum, batch, 4)
before = arrays(nnx.state(model))
train_step(model, momentum, nothing, 4)
assert max_difference(before, nnx.state(model)) > 1e-3 and momentum.step[...] == 2
print("no token: loss 0, gradients 0, SGD stands still, momentum moves on")

# %% [markdown]
# ## Pad first, then cut
#
# Rows that fill up the batch are false in the mask and need nothing else.


# %% tags=["proof"]
def pad(batch, num_minibatches):
    """Rows of zeros at the end, so that the minibatches divide the batch. In the mask zero is false."""
    extra = -len(batch[0]) % num_minibatches
    return jax.tree.map(lambda a: np.pad(a, [(0, extra)] + [(0, 0)] * (a.ndim - 1)), batch)


fourteen = jax.tree.map(lambda a: a[:14], batch)
padded = pad(fourteen, 4)
_, expected = full_batch(*fourteen)
_, grads = accumulate(Net(nnx.Rngs(0)), padded, 4)
assert [len(a) for a in padded] == [16] * 3 and not padded[2][14:].any()
assert max_difference(grads, expected) < 1e-6 and off_by(grads, full_grads) > 1e-2
print("14 rows in four minibatches: to 1e-06")

# %% [markdown]
# A batch may come with rows that only fill it, for example because a loader gives every device a whole
# number of rows. Say which rows count before the reshape. Cutting each minibatch afterwards takes others.

# %% tags=["proof"]
row_numbers, rows_that_count, num_minibatches = np.arange(12), 8, 4
cut_first = row_numbers[:rows_that_count].reshape(num_minibatches, -1)
cut_last = row_numbers.reshape(num_minibatches, -1)[:, : rows_that_count // num_minibatches]
counts = np.arange(12) < rows_that_count
assert sorted(cut_first.ravel()) == list(range(8))
assert set(cut_last.ravel()) - set(range(8)) == {9, 10} and set(range(8)) - set(cut_last.ravel()) == {2, 5}
assert sorted(row_numbers.reshape(4, -1)[counts.reshape(4, -1)]) == list(range(8)), "or mask, and cut nothing"
print("cut, then reshape:", cut_first.tolist())
print("reshape, then cut:", cut_last.tolist(), "has rows 9 and 10, which only fill, and lacks 2 and 5")

# %% [markdown]
# Zeros are safe to pad with. A mask does not help against padding that is not finite: `jnp.where` takes its
# value out of the loss, and it reaches the gradients all the same. Take it out of `x` and `y` first.

# %% tags=["proof"]
dirty = (np.where(mask[..., None], x, np.nan), np.where(mask[..., None], y, np.nan), mask)
loss, grads = accumulate(Net(nnx.Rngs(0)), dirty, 4)
assert np.isclose(loss, full_loss, rtol=1e-6) and any(np.isnan(g).any() for g in arrays(grads))

clean = (*(np.where(mask[..., None], a, 0) for a in dirty[:2]), mask)
loss, grads = accumulate(Net(nnx.Rngs(0)), clean, 4)
assert np.isfinite(loss) and max_difference(grads, full_grads) < 1e-6
print("padded with NaN: the loss is right, there is NaN in the gradients; cleaned: to 1e-06")

# %% [markdown]
# ## Count in integers
#
# Masks often have the dtype of the activations. A bfloat16 count stops at 256, where adding 1 changes
# nothing.

# %% tags=["proof"]
masks = jnp.ones((601, 1), jnp.bfloat16)  # 601 minibatches of one token
count, _ = jax.lax.scan(lambda count, mask: (count + mask.sum(), None), jnp.zeros((), jnp.bfloat16), masks)
_, counted = loss_fn(lambda x: x, (jnp.zeros((601, 1, 1)), jnp.zeros((601, 1, 1)), masks))
assert count == 256 and int(counted) == 601
print(f"601 tokens: counted in bfloat16 {count}, in {counted.dtype} {counted}")

# %% [markdown]
# ## On several devices the count is a global sum
#
# In `jax.jit` and `nnx.jit` an array that lies on several devices is one array, so `jnp.sum` is global and
# the step stays as it is. In `jax.shard_map` every device sees its own rows: sum over the devices too, then
# divide. `pmean` of what each device divided by its own count is a mean of means again.

# %% tags=["proof"]
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
sharded_batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
loss, grads = accumulate(Net(nnx.Rngs(0)), sharded_batch, 2)
assert max_difference(grads, full_grads) < 1e-6 and np.isclose(loss, full_loss, rtol=1e-6)


@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
def on_each_device(params, batch):
    sums = accumulate_sums(nnx.merge(graphdef, params), batch, 2)
    _, count, total = jax.lax.psum(sums, "data")
    _, local_mean = accumulate_grads(nnx.merge(graphdef, params), batch, 2)
    return jax.tree.map(lambda g: g / count, total), jax.lax.pmean(local_mean, "data")


summed, averaged = on_each_device(params, sharded_batch)
assert max_difference(summed, full_grads) < 1e-6 and off_by(averaged, full_grads) > 0.25
print("jit: to 1e-06; psum of sums and counts: to 1e-06; pmean of means: off by more than a quarter")

# %% [markdown]
# ## What it costs
#
# The counts add next to nothing to the loop that averages. SGD with momentum, 4096 rows, model and optimizer
# donated; the figures are the compiler's.


# %% tags=["proof"]
@nnx.jit(static_argnames="num_minibatches", donate_argnums=(0, 1))
def mean_step(model, optimizer, batch, num_minibatches):
    loss, grads = mean_of_means(nnx.state(model, nnx.Param), batch, num_minibatches)
    optimizer.update(model, grads)
    return loss


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


large = jax.tree.map(lambda a: np.tile(a, (256,) + (1,) * (a.ndim - 1)), batch)
costs = {}
titles = ("minibatches", "HLO", "temporary", "arguments", "outputs", "aliased")
print(" " * 6, *(f"{title:>11}" for title in titles), sep="")
for name, step in ("means", mean_step), ("sums", train_step):
    for n in 2, 64:
        costs[name, n] = cost(step.lower(model, momentum, large, num_minibatches=n).compile())
        print(f"{name:6}", *(f"{figure:>11,}" for figure in (n, *costs[name, n])), sep="")

for n in 2, 64:
    assert costs["sums", n][0] < costs["means", n][0] + 50
    assert costs["sums", n][1] < 1.05 * costs["means", n][1]
    assert costs["sums", n][2:] == costs["means", n][2:]
(few, few_bytes, *_, aliased), (many, many_bytes, *_) = costs["sums", 2], costs["sums", 64]
assert many < 1.1 * few and many_bytes < few_bytes / 16
state = sum(a.nbytes for node in (model, momentum) for a in jax.tree.leaves(nnx.state(node)))
assert aliased == state, "the donated bytes are all of the model and the optimizer"

# %% [markdown]
# The program has about the same size for any number of minibatches, the temporary memory falls with it, and
# the new model and optimizer take the place of the old ones.
#
# ## When to prefer another recipe
#
# - Every minibatch has the same number of rows and no mask: the mean of means is right, with
#   [split and merge](accumulate_with_split_merge.py) or [`nnx.scan`](accumulate_with_scan.py).
# - Whole rows as padding, with an `nnx.scan` whose loss stays a mean:
#   [pad and mask](accumulate_with_scan.py#pad-and-mask).
# - Minibatches arrive one at a time: [`optax.MultiSteps`](multisteps_or_in_step.py), with the weights above
#   if the total is known.
# - How to cut a batch that lies on several devices:
#   [sharded minibatches](accumulate_sharded_minibatches.py).
# - A model with BatchNorm mixes rows, so its statistics need the mask too.
