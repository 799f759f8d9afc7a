# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Differentiate the parameters alone, hand the rest back to the model, and carry the model in any loop.
#     answers: [google/flax#5050, google/flax#4760, google/flax#4734, google/flax#2052, google/flax#4950]
#     symptoms:
#       - same dropout mask at every step of the loop
#       - BatchNorm gradients differ from the full batch with gradient accumulation
#       - how to carry batch_stats through scan
#       - running variance too small with small minibatches
#       - freeze BatchNorm statistics for fine-tuning
#       - nnx.reseed does nothing, dropout mask does not depend on the key
#       - model stays in evaluation mode after a step, dropout is off
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # BatchNorm and Dropout in a loop
#
# Statistics and random streams are state: each minibatch starts from what the one before left. Differentiate
# the parameters alone and hand the rest back to the model, and every loop that carries the model ends where a
# Python loop ends. BatchNorm sees one minibatch at a time, so its gradients are not those of the full batch,
# unless its statistics are frozen.

# %% tags=["snippet"]
import jax
import jax.numpy as jnp
from flax import nnx


def loss_fn(model, minibatch):
    x, y = minibatch
    return jnp.mean((model(x) - y) ** 2)


def value_and_grad(loss_fn):
    """`nnx.value_and_grad` for a model with state, in graph mode and in tree mode."""

    def loss_and_grads(model, minibatch):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def pure_loss(params):
            merged = nnx.merge(graphdef, params, rest, copy=True)
            return loss_fn(merged, minibatch), nnx.state(merged, nnx.Not(nnx.Param))

        (loss, new_rest), grads = jax.value_and_grad(pure_loss, has_aux=True)(params)
        nnx.update(model, new_rest)  # the next minibatch starts from here
        return loss, grads

    return loss_and_grads


def accumulate_grads(loss_fn, model: nnx.Module, batch, num_minibatches: int):
    """Mean loss and mean gradients. Statistics and random state of the model move on in place."""
    minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)
    leaves, treedef = jax.tree.flatten(nnx.state(model, nnx.Param))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def body(carry, minibatch):
        model, total = carry
        loss, grads = value_and_grad(loss_fn)(model, minibatch)
        return (model, jax.tree.map(jnp.add, total, jax.tree.leaves(grads))), loss

    zeros = [jnp.zeros_like(leaf) for leaf in leaves]
    (_, total), losses = body((model, zeros), minibatches)
    return losses.mean(), jax.tree.unflatten(treedef, [g / num_minibatches for g in total])


@nnx.jit(static_argnames="num_minibatches")
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch, num_minibatches: int):
    loss, grads = accumulate_grads(loss_fn, model, batch, num_minibatches)
    optimizer.update(model, grads)
    return loss


# %% [markdown]
# `loss_fn` is yours, and `num_minibatches` divides the number of rows.
#
# - **`value_and_grad`** differentiates the parameters. Everything else, statistics and random state, comes
#   back from the loss and is written into the model. Use it in any loop, or in none.
# - **`copy=True`.** BatchNorm and Dropout write to Variables of the merged model, not to those of the body
#   ([what raises otherwise](accumulate_with_split_merge.py#without-copytrue)).
# - **The model in the carry.** A loop may change what it carries. In graph mode, a model that is broadcast
#   with `in_axes=None` [loses what is written to it](silent_wrong_results.py#batch-statistics-never-move).
#
# ## Every loop ends where the Python loop ends
#
# The reference takes the gradients of a minibatch, then calls the model on it, which moves statistics and
# random state in place.

# %%
import numpy as np
import optax


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(8, 16, use_bias=False, rngs=rngs)  # BatchNorm has a bias of its own
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x, key=None):
        return self.outer(self.drop(nnx.relu(self.norm(self.inner(x))), rngs=key))


x = jax.random.normal(jax.random.key(1), (32, 8))
batch = (x, 2 * x)
minibatches = jax.tree.map(lambda a: a.reshape(4, 8, 8), batch)


@nnx.jit
def grads_then_call(model, minibatch):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    grads = jax.grad(lambda p: loss_fn(nnx.merge(graphdef, p, rest, copy=True), minibatch))(params)
    model(minibatch[0])
    return jax.tree.leaves(grads)


def python_loop(model):
    grads = [grads_then_call(model, minibatch) for minibatch in zip(*minibatches)]
    return [np.mean(g, axis=0) for g in zip(*grads)]


# %%
def with_nnx_scan(model):
    return jax.tree.leaves(accumulate_grads(loss_fn, model, batch, 4)[1])


def with_nnx_fori_loop(model):
    def body(i, carry):
        model, total = carry
        _, grads = value_and_grad(loss_fn)(model, jax.tree.map(lambda a: a[i], minibatches))
        return model, jax.tree.map(jnp.add, total, jax.tree.leaves(grads))

    zeros = [jnp.zeros_like(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
    _, total = nnx.fori_loop(0, 4, body, (model, zeros))
    return [g / 4 for g in total]


def with_split_and_merge(model):
    graphdef, state = nnx.split(model)

    def body(carry, minibatch):
        state, total = carry
        model = nnx.merge(graphdef, state, copy=True)
        _, grads = value_and_grad(loss_fn)(model, minibatch)
        return (nnx.state(model), jax.tree.map(jnp.add, total, jax.tree.leaves(grads))), None

    zeros = [jnp.zeros_like(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
    (state, total), _ = jax.lax.scan(body, (state, zeros), minibatches)
    nnx.update(model, state)
    return [g / 4 for g in total]


def arrays(model, *filters):
    """The arrays of a model, with random keys as plain numbers."""
    leaves = jax.tree.leaves(nnx.state(model, *filters))
    is_key = [jnp.issubdtype(a.dtype, jax.dtypes.prng_key) for a in leaves]
    return [np.array(jax.random.key_data(a) if key else a) for a, key in zip(leaves, is_key)]


def max_difference(actual, expected):
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(actual) == len(expected) > 0
    return max(np.max(np.abs(np.subtract(a, b, dtype=float))) for a, b in zip(actual, expected))


# %% tags=["proof"]
reference = Net(nnx.Rngs(0))
before = arrays(reference)
expected = python_loop(reference)
assert len(expected) == 5 and max_difference(expected, [0 * g for g in expected]) > 1e-2

for loop in with_nnx_scan, with_nnx_fori_loop, with_split_and_merge:
    model = Net(nnx.Rngs(0))
    grads = nnx.jit(loop)(model)
    assert max_difference(grads, expected) < 1e-6
    assert max_difference(arrays(model, nnx.BatchStat), arrays(reference, nnx.BatchStat)) < 1e-6
    assert max_difference(arrays(model, nnx.RngState), arrays(reference, nnx.RngState)) == 0
    print(f"{loop.__name__:22}gradients, statistics and random state are those of the Python loop")

# %% tags=["proof"]
means = np.array(x @ Net(nnx.Rngs(0)).inner.kernel[...]).reshape(4, 8, 16).mean(axis=1)
running_mean = np.zeros(16)
for mean in means:
    running_mean = 0.9 * running_mean + 0.1 * mean
assert max_difference(model.norm.mean[...], running_mean) < 1e-6
assert max_difference(model.norm.mean[...], 0.1 * means[-1]) > 1e-2, "not those of one minibatch"
assert model.drop.rngs.count[...] == 4
assert sum(np.any(a != b) for a, b in zip(arrays(model), before)) == 3, "two statistics and a count"
print("statistics moved 4 times, 4 masks drawn")

optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
train_step(model, optimizer, batch, num_minibatches=4)
assert optimizer.step[...] == 1 and model.drop.rngs.count[...] == 8
print("another step: 4 more masks, one update")

# %% [markdown]
# Minibatch `i` selects row `i` of this parameter, so row `i` of the gradient is the mask that it got.


# %% tags=["proof"]
class Masks(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jnp.ones((4, 64)))
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, key=None):
        return self.drop(x @ self.kernel[...], rngs=key)


def distinct_masks(grads):
    return len(np.unique(grads["kernel"][...] != 0, axis=0))


accumulate = nnx.jit(accumulate_grads, static_argnums=(0, 3))

one_row_each = (np.eye(4, dtype=np.float32), np.zeros((4, 64), np.float32))
_, grads = accumulate(loss_fn, Masks(nnx.Rngs(0)), one_row_each, 4)
assert distinct_masks(grads) == 4
print(distinct_masks(grads), "distinct masks in 4 minibatches")

# %% [markdown]
# ## BatchNorm cannot equal the full batch
#
# In training, BatchNorm subtracts the mean of the rows it is given and divides by their deviation. Eight rows
# have another mean than all 32, and a smaller variance: what lies between the minibatches is missing.


# %%
h = np.array(x @ Net(nnx.Rngs(0)).inner.kernel[...])
cut = h.reshape(4, 8, 16)
within, between = cut.var(axis=1).mean(axis=0), cut.mean(axis=1).var(axis=0)
assert np.allclose(h.mean(axis=0), cut.mean(axis=1).mean(axis=0), atol=1e-6)
assert np.allclose(h.var(axis=0), within + between, atol=1e-6) and np.all(between > 0)
print("variance of the batch = variance within the minibatches + variance of their means: True")

# %% [markdown]
# No sum of gradients mends that, because each row was normalized with other numbers. A norm that looks at one
# row, such as `nnx.LayerNorm`, does not know how the batch was cut. Frozen BatchNorm does not either.


# %% tags=["proof"]
def step_difference(model, num_minibatches=4):
    """How far the accumulated gradients are from those of the full batch, relative to the largest one."""
    full_loss, full = nnx.jit(value_and_grad(loss_fn))(nnx.clone(model), batch)
    loss, grads = accumulate(loss_fn, model, batch, num_minibatches)
    assert len(jax.tree.leaves(grads)) == 5
    return max_difference(grads, full) / max_difference(full, jax.tree.map(jnp.zeros_like, full))


def without_dropout(norm=None):
    model = Net(nnx.Rngs(0))
    model.drop = nnx.Dropout(0.0)
    if norm is not None:
        model.norm = norm
    return model


layer_norm = nnx.LayerNorm(16, rngs=nnx.Rngs(0))
frozen = without_dropout()
frozen.set_attributes(nnx.BatchNorm, use_running_average=True)
stats = arrays(frozen, nnx.BatchStat)

differences = {
    "BatchNorm": step_difference(without_dropout()),
    "BatchNorm, frozen": step_difference(frozen),
    "LayerNorm": step_difference(without_dropout(layer_norm)),
}
for name, difference in differences.items():
    print(f"{name:20}{'equal to 1e-06' if difference < 1e-6 else 'off by more than a tenth'}")

assert differences["BatchNorm"] > 0.1
assert differences["BatchNorm, frozen"] < 1e-6 and differences["LayerNorm"] < 1e-6
assert max_difference(arrays(frozen, nnx.BatchStat), stats) == 0

# %% [markdown]
# Smaller minibatches also make the running statistics forget faster: each of them is a step of the average.
# `momentum ** (1 / num_minibatches)` gives one batch the weight that it had.


# %% tags=["proof"]
def weight_of_the_past(momentum, num_minibatches):
    """What is left of the first running variance, 1, after one batch of zeros."""

    def body(norm, x):
        return norm, norm(x)

    norm = nnx.BatchNorm(1, momentum=momentum, rngs=nnx.Rngs(0))
    carry_norm = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    carry_norm(norm, jnp.zeros((num_minibatches, 2, 1)))
    return float(norm.var[0])


weights = [weight_of_the_past(m, n) for m, n in ((0.9, 1), (0.9, 4), (0.9 ** (1 / 4), 4))]
assert np.allclose(weights, [0.9, 0.9**4, 0.9], atol=1e-6)
print(f"1 minibatch, momentum 0.9:             {weights[0]:.2f}")
print(f"4 minibatches, momentum 0.9:           {weights[1]:.2f}")
print(f"4 minibatches, momentum 0.9 ** (1/4):  {weights[2]:.2f}")

# %% [markdown]
# ## Freeze the statistics
#
# `set_attributes` with a type reaches every BatchNorm of the model and leaves Dropout on. Scale and bias are
# still trained. Call it before the step, not in it.

# %% tags=["proof"]
model = Net(nnx.Rngs(0))
model.set_attributes(nnx.BatchNorm, use_running_average=True)
stats = arrays(model, nnx.BatchStat)
_, grads = accumulate(loss_fn, model, batch, 4)

assert max_difference(arrays(model, nnx.BatchStat), stats) == 0
assert model.drop.rngs.count[...] == 4
assert all(np.abs(grads["norm"][name][...]).max() > 1e-3 for name in ("scale", "bias"))
print("statistics still, 4 masks drawn, scale and bias have gradients")

# %% [markdown]
# `model.train()` thaws them, because it sets `use_running_average` of every BatchNorm. After an evaluation,
# freeze again.

# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "the statistics are not frozen"}]
model.eval()
model.train()
assert model.norm.use_running_average, "the statistics are not frozen"

# %% [markdown]
# ## Give each minibatch its own key
#
# The masks of a stream depend on how many were drawn before. With keys in the batch they depend on the key
# alone: on no order, on no earlier step, and a run that is resumed needs no random state. `nnx.Dropout`
# takes a key where it takes `rngs`.


# %% tags=["proof"]
def loss_with_key(model, minibatch):
    x, y, (key,) = minibatch
    return jnp.mean((model(x, key) - y) ** 2)


def reverse(one_row_each):
    return jax.tree.map(lambda a: a[::-1], one_row_each)


step, masks = 7, Masks(nnx.Rngs(0))
keys = jax.random.split(jax.random.fold_in(jax.random.key(0), step), 4)
_, grads = accumulate(loss_with_key, masks, (*one_row_each, keys), 4)
assert distinct_masks(grads) == 4 and masks.drop.rngs.count[...] == 0

_, reversed_grads = accumulate(loss_with_key, Masks(nnx.Rngs(0)), reverse((*one_row_each, keys)), 4)
assert max_difference(grads, reversed_grads) == 0
_, stream = accumulate(loss_fn, Masks(nnx.Rngs(0)), one_row_each, 4)
_, reversed_stream = accumulate(loss_fn, Masks(nnx.Rngs(0)), reverse(one_row_each), 4)
assert max_difference(stream, reversed_stream) > 1e-3
print("keys in the batch: 4 masks, the same in reverse order")
print("random stream: other masks in reverse order")

# %% [markdown]
# ### Reseed the stream instead
#
# If the key cannot be passed through the model, `nnx.reseed` puts it into the stream, and starts the count
# again. Name the stream by the name it was made with. `nnx.Rngs(0)` makes one stream, called `default`, and a
# name that no stream has is ignored in silence.


# %%
def mask_after_reseed(rngs, **streams):
    drop = nnx.Dropout(0.5, rngs=rngs)
    nnx.reseed(drop, **streams)
    return drop(jnp.ones(64))


def follows_the_key(make_rngs, name):
    first, second = (mask_after_reseed(make_rngs(), **{name: jax.random.key(i)}) for i in (1, 2))
    return not np.array_equal(first, second)


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "the mask does not depend on the key"}]
assert follows_the_key(lambda: nnx.Rngs(0), "dropout"), "the mask does not depend on the key"

# %% tags=["proof"]
assert follows_the_key(lambda: nnx.Rngs(0), "default")
assert follows_the_key(lambda: nnx.Rngs(params=0, dropout=1), "dropout")

drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
drop(jnp.ones(64))
nnx.reseed(drop, default=jax.random.key(1))
assert drop.rngs.count[...] == 0
print("default of nnx.Rngs(0), and dropout of nnx.Rngs(params=0, dropout=1): the mask follows the key")

# %% [markdown]
# ## Give each row its own key
#
# Then even Dropout does not know how the batch was cut: any number of minibatches gives the gradients of the
# full batch. BatchNorm must be frozen, as it compares rows.


# %% tags=["proof"]
def loss_with_row_keys(model, minibatch):
    x, y, keys = minibatch
    return jnp.mean((jax.vmap(model)(x, keys) - y) ** 2)


model = Net(nnx.Rngs(0))
model.set_attributes(nnx.BatchNorm, use_running_average=True)
batch_with_keys = (*batch, jax.random.split(jax.random.key(2), 32))
full_loss, full = nnx.jit(value_and_grad(loss_with_row_keys))(model, batch_with_keys)
assert len(jax.tree.leaves(full)) == 5 and max_difference(full, jax.tree.map(jnp.zeros_like, full)) > 1e-2
for num_minibatches in 4, 16:
    loss, grads = accumulate(loss_with_row_keys, model, batch_with_keys, num_minibatches)
    assert max_difference(grads, full) < 1e-6 and abs(loss - full_loss) < 1e-6
    print(f"{num_minibatches:2} minibatches with Dropout: gradients equal those of the full batch to 1e-06")

# %% [markdown]
# ## Evaluate
#
# `model.eval()` turns Dropout off and makes BatchNorm use its running statistics. Nothing is written then,
# so a loop may broadcast the model, and the cut makes no difference.

# %% tags=["proof"]
model = reference  # its statistics have moved
model.eval()
before = arrays(model)


@nnx.jit
@nnx.scan(in_axes=(None, 0), out_axes=0)
def minibatch_losses(model, minibatch):
    return loss_fn(model, minibatch)


losses = minibatch_losses(model, minibatches)
assert abs(losses.mean() - nnx.jit(loss_fn)(model, batch)) < 1e-6
assert max_difference(arrays(model), before) == 0
print("loss of 4 minibatches equals that of the batch to 1e-06, nothing moved")

# %% [markdown]
# Switch outside the step. In a loop body, `eval()` changes what the loop carries:


# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "carry input and carry output must have the same pytree structure", "flax": ">=0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "requires body function's input and output to have the same reference and pytree structure", "flax": "<0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "different pytree metadata at key path", "mode": "tree"}]
def evaluate_one(i, carry):
    model, loss_sum = carry
    model.eval()
    return model, loss_sum + loss_fn(model, jax.tree.map(lambda a: a[i], minibatches))


nnx.fori_loop(0, 4, evaluate_one, (Net(nnx.Rngs(0)), jnp.zeros(())))

# %% [markdown]
# Inside `nnx.jit` it raises nothing. In graph mode the model that you passed is then in evaluation mode, and
# trains on without Dropout. In tree mode it is not.


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "the model is left in evaluation mode", "mode": "graph"}]
@nnx.jit
def evaluate(model, batch):
    model.eval()
    return loss_fn(model, batch)


model = Net(nnx.Rngs(0))
evaluate(model, batch)
assert not model.drop.deterministic, "the model is left in evaluation mode"

# %% [markdown]
# ## What tree mode changes
#
# The snippet is the same. `nnx.value_and_grad` is not: in tree mode it differentiates every leaf of the
# model. The count of a random stream is an integer, so a model with Dropout raises.

# %% tags=["raises-exception", "outcome"] raises=[{"error": "TypeError", "match": "grad requires real- or complex-valued inputs", "mode": "tree"}]
_, grads = nnx.jit(nnx.value_and_grad(loss_fn))(Net(nnx.Rngs(0)), batch)
_, expected = nnx.jit(value_and_grad(loss_fn))(Net(nnx.Rngs(0)), batch)
assert max_difference(grads, expected) < 1e-6
print("gradients equal those of the snippet's value_and_grad")

# %% [markdown]
# A model with BatchNorm alone does not raise. It gets gradients of its statistics as well.

# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "7 gradients for 5 parameters", "mode": "tree"}]
_, grads = nnx.jit(nnx.value_and_grad(loss_fn))(without_dropout(), batch)
count = len(jax.tree.leaves(grads))
assert count == 5, f"{count} gradients for 5 parameters"

# %% [markdown]
# Two more differences are above and in [silent wrong results](silent_wrong_results.py): what `eval()` inside
# `nnx.jit` leaves behind, and what a broadcast model keeps of the writes to it.
#
# ## `nnx.vmap` is no loop
#
# It calls the model on all minibatches at once, so BatchNorm would end with several means at once, and
# there is no place for them in one model.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "got axis spec None but output was batched on axis 0"}]
def call(model, x):
    return model(x)


norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
nnx.jit(nnx.vmap(call, in_axes=(None, 0)))(norm, minibatches[0])

# %% [markdown]
# With a name for the axis, BatchNorm averages over it: output and statistics are those of the whole batch.

# %% tags=["proof"]
norm = nnx.BatchNorm(8, axis_name="minibatches", rngs=nnx.Rngs(0))
mapped = nnx.vmap(call, in_axes=(None, 0), axis_name="minibatches")
output = nnx.jit(mapped)(norm, minibatches[0])

whole = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
assert max_difference(output.reshape(32, 8), nnx.jit(call)(whole, x)) < 1e-5
assert max_difference(arrays(norm, nnx.BatchStat), arrays(whole, nnx.BatchStat)) < 1e-6
print("output and statistics equal those of the whole batch")

# %% [markdown]
# ## Shapes without running it
#
# `nnx.eval_shape` of a model with BatchNorm raises if the model is the function, because the model is then
# closed over. Pass it as an argument.

# %% tags=["raises-exception"] raises=[{"error": "TraceContextError", "match": "Cannot mutate BatchStat from a different trace level"}]
model = Net(nnx.Rngs(0))
nnx.eval_shape(model, x)

# %% tags=["proof"]
before = arrays(model)
output = nnx.eval_shape(call, model, x)
assert output.shape == (32, 8) and max_difference(arrays(model), before) == 0
print("shape:", output.shape)

# %% [markdown]
# ## What it costs
#
# The step with donated model and optimizer, for one batch cut in 2 and in 64 minibatches.


# %%
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


@nnx.jit(donate_argnums=(0, 1), static_argnums=3)
def donated_step(model, optimizer, batch, num_minibatches):
    loss, grads = accumulate_grads(loss_fn, model, batch, num_minibatches)
    optimizer.update(model, grads)
    return loss


# %% tags=["proof"]
optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
large_batch = jax.tree.map(lambda a: np.tile(a, (64, 1)), batch)
table = [cost(donated_step.lower(model, optimizer, large_batch, n).compile()) for n in (2, 64)]

print(f"{'minibatches':20}{2:>12}{64:>12}")
names = "HLO instructions", "temporary bytes", "argument bytes", "output bytes", "aliased bytes"
for name, two, many in zip(names, *table):
    print(f"{name:20}{two:>12,}{many:>12,}")

two, many = table
state_bytes = sum(a.nbytes for node in (model, optimizer) for a in arrays(node))
assert many[0] < 1.25 * two[0], "the program hardly grows"
assert many[1] < two[1] / 4, "activations of one minibatch"
assert two[4] == many[4] == state_bytes, "the new state takes the place of the old one"
print("aliased bytes are those of model and optimizer:", many[4] == state_bytes)

# %% [markdown]
# ## When to prefer another recipe
#
# - [Split and merge](accumulate_with_split_merge.py) splits the model once, outside of a `jax.lax` loop.
# - [`nnx.scan`](accumulate_with_scan.py) and [`nnx.fori_loop`](accumulate_with_fori_loop.py) have shorter
#   forms for models without state.
# - On several devices, each device needs masks of its own: [reduce once per
#   step](reduce_once_per_step.py#with-dropout-and-batchnorm).
# - State that does not move, and how a test finds it: [silent wrong results](silent_wrong_results.py).
