# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Carry the model and a list of raw gradient arrays; split inside the body. Every release, both modes, BatchNorm and Dropout included.
#     answers: [google/flax#5113]
#     symptoms: ["batch statistics never move in the loop", "same dropout mask in every minibatch"]
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # Accumulate gradients with `nnx.fori_loop`
#
# Carry the model and a list of raw arrays for the sum, split the model inside the body, and put the sum back
# on the structure of the parameters before `optimizer.update`. This form runs on every release shown here, in
# graph mode and in tree mode, with BatchNorm and Dropout in the model.

# %% tags=["snippet"]
import jax
import jax.numpy as jnp
from flax import nnx


def loss_fn(model, minibatch):
    x, y = minibatch
    return jnp.mean((model(x) - y) ** 2)


def accumulate_grads(model, minibatches):
    """Mean loss and mean gradients. Statistics and random state of the model move on in place.

    Every array in minibatches has shape (num_minibatches, rows, ...).
    """
    leaves, treedef = jax.tree.flatten(nnx.state(model, nnx.Param))
    num_minibatches = len(jax.tree.leaves(minibatches)[0])

    def body(i, carry):
        total, loss_sum, model = carry
        minibatch = jax.tree.map(lambda x: x[i], minibatches)
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def minibatch_loss(params):
            merged = nnx.merge(graphdef, params, rest, copy=True)
            return loss_fn(merged, minibatch), nnx.state(merged, nnx.Not(nnx.Param))

        (loss, new_rest), grads = jax.value_and_grad(minibatch_loss, has_aux=True)(params)
        nnx.update(model, new_rest)  # the next minibatch starts from here
        return jax.tree.map(jnp.add, total, jax.tree.leaves(grads)), loss_sum + loss, model

    zeros = [jnp.zeros_like(leaf) for leaf in leaves]
    total, loss_sum, _ = nnx.fori_loop(0, num_minibatches, body, (zeros, jnp.zeros(()), model))
    grads = jax.tree.unflatten(treedef, [g / num_minibatches for g in total])
    return loss_sum / num_minibatches, grads


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, minibatches):
    loss, grads = accumulate_grads(model, minibatches)
    optimizer.update(model, grads)
    return loss


# %% [markdown]
# What each part is for:
#
# - **A list of raw arrays for the sum.** Flax before 0.12.3, and tree mode, reject a `State` that the body
#   rebuilds: [`nnx.fori_loop` rejects the accumulator](fori_loop_rejects_accumulator.py).
# - **The model in the carry.** The body changes it, and a loop may change only what it carries. After the
#   loop, the model that was passed in has the new statistics and random state; the returned one is dropped.
# - **The split inside the body.** Only the parameters are differentiated. In tree mode `nnx.value_and_grad`
#   would differentiate every leaf of the model, random state included.
# - **`copy=True`.** The loss changes statistics and random state. It may do that to Variables of its own, not
#   to those of the body ([what raises otherwise](accumulate_with_split_merge.py#without-copytrue)).
# - **`nnx.update`.** It brings those changes back to the carried model. Without it nothing raises: every
#   minibatch gets the same mask and the statistics stay where they were.
# - **The division.** The sum is `num_minibatches` times too large; [Adam hides it](silent_wrong_results.py). It
#   has the dtype of the parameters; for bfloat16 see [carry dtype and shape](carry_dtype_and_shape.py).
#
# ## The gradients are those of the full batch
#
# Without BatchNorm and Dropout, equal minibatches must give the loss and the gradients of the whole batch.

# %%
import numpy as np
import optax


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(8, 16, rngs=rngs)
        self.outer = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.relu(self.inner(x)))


x = jax.random.normal(jax.random.key(1), (32, 8))
batch = (x, jnp.sin(x[:, :4]))
minibatches = jax.tree.map(lambda a: a.reshape(4, 8, *a.shape[1:]), batch)


def max_difference(actual, expected):
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(actual) == len(expected) > 0
    return np.max([np.max(np.abs(np.subtract(a, b))) for a, b in zip(actual, expected)])


# %% tags=["proof"]
full_loss, full_grads = nnx.jit(nnx.value_and_grad(loss_fn))(MLP(nnx.Rngs(0)), batch)
loss, grads = nnx.jit(accumulate_grads)(MLP(nnx.Rngs(0)), minibatches)

assert len(jax.tree.leaves(grads)) == 4
assert max(np.max(np.abs(g)) for g in jax.tree.leaves(grads)) > 1e-2, "a gradient of zeros proves nothing"
assert max_difference(grads, full_grads) < 1e-6 and abs(loss - full_loss) < 1e-6
print(f"{len(jax.tree.leaves(grads))} gradients and the loss within 1e-06 of the full batch")

# %% [markdown]
# ## Parameters, statistics and random state are those of a Python loop
#
# With BatchNorm and Dropout the full batch is no reference: statistics and masks are drawn per minibatch. A
# plain Python loop is one. It takes the gradients of one minibatch, then calls the model on it to move
# statistics and random state on.


# %%
class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(8, 16, use_bias=False, rngs=rngs)  # BatchNorm has a bias of its own
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.dropout(nnx.relu(self.norm(self.inner(x)))))


@nnx.jit
def python_step(model, optimizer, minibatches):
    total = None
    for minibatch in zip(*minibatches):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        grads = jax.grad(lambda p: loss_fn(nnx.merge(graphdef, p, rest, copy=True), minibatch))(params)
        model(minibatch[0])
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    optimizer.update(model, jax.tree.map(lambda g: g / 4, total))


def arrays(model, *filters):
    """The arrays of a model, with random keys as plain numbers."""
    leaves = jax.tree.leaves(nnx.state(model, *filters))
    is_key = [jnp.issubdtype(a.dtype, jax.dtypes.prng_key) for a in leaves]
    return [np.array(jax.random.key_data(a) if key else a) for a, key in zip(leaves, is_key)]


# %% tags=["proof"]
model, reference = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
# A learning rate of one: the parameters differ by exactly as much as the gradients do.
optimizer, reference_optimizer = (nnx.Optimizer(m, optax.sgd(1.0), wrt=nnx.Param) for m in (model, reference))
params_before, stats_before = arrays(model, nnx.Param), arrays(model, nnx.BatchStat)

train_step(model, optimizer, minibatches)
python_step(reference, reference_optimizer, minibatches)

for kind, count in {nnx.Param: 5, nnx.BatchStat: 2, nnx.RngState: 2}.items():
    actual, expected = arrays(model, kind), arrays(reference, kind)
    assert len(actual) == len(expected) == count
    assert max_difference(actual, expected) < 1e-6, kind
    print(f"{kind.__name__}: {count} arrays within 1e-06 of the Python loop")

assert all(np.any(a != b) for a, b in zip(arrays(model, nnx.BatchStat), stats_before))
assert [int(a) for a in arrays(model, nnx.RngCount)] == [4], "one mask for each minibatch"
moved = sum(bool(np.any(a != b)) for a, b in zip(arrays(model, nnx.Param), params_before))
assert moved == 5 and int(optimizer.step[...]) == 1
print("optimizer step:", int(optimizer.step[...]))

# %% [markdown]
# ## Every minibatch has a mask of its own
#
# Minibatch `i` selects row `i` of the parameter, so row `i` of the gradient is the mask that minibatch `i`
# got.


# %% tags=["proof"]
class Masks(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jnp.ones((4, 64)))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x @ self.kernel[...])


one_hot = np.eye(4, dtype=np.float32)[:, None, :]
targets = np.zeros((4, 1, 64), np.float32)
_, grads = nnx.jit(accumulate_grads)(Masks(nnx.Rngs(0)), (one_hot, targets))
masks = {tuple(row) for row in (np.array(grads["kernel"][...]) != 0).tolist()}
assert len(masks) == 4
print(f"{len(masks)} distinct masks in 4 minibatches")

# %% [markdown]
# ## `optimizer.update` wants the structure of the parameters
#
# It selects the gradients of `nnx.Param`, and in a bare list there are none.

# %%
linear = nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(linear, optax.sgd(0.1), wrt=nnx.Param)
grads = jax.tree.map(jnp.ones_like, nnx.state(linear, nnx.Param))

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Mismatch custom node data: ('kernel',)", "jax": "<0.10.2"}, {"error": "ValueError", "match": "different numbers of pytree children at key path", "jax": ">=0.10.2"}]
optimizer.update(linear, jax.tree.leaves(grads))

# %% [markdown]
# A dict of raw arrays was accepted from Flax 0.11.0 to 0.12.0, and is rejected since 0.12.1.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Mismatch custom node data: ('kernel',)", "flax": ">=0.12.1", "jax": "<0.10.2"}, {"error": "ValueError", "match": "different numbers of pytree children at key path", "flax": ">=0.12.1", "jax": ">=0.10.2"}]
optimizer.update(linear, nnx.to_pure_dict(grads))
print("accepted, step:", int(optimizer.step[...]))

# %% [markdown]
# That is what `jax.tree.unflatten` with the structure of `nnx.state(model, nnx.Param)` is for.
#
# ## Shorter, for graph mode or a model without Dropout
#
# `nnx.value_and_grad` replaces the split, the merge and the update.


# %%
def shorter_accumulate_grads(model, minibatches):
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


# %% tags=["proof"]
loss, grads = nnx.jit(shorter_accumulate_grads)(MLP(nnx.Rngs(0)), minibatches)
assert max_difference(grads, full_grads) < 1e-6 and abs(loss - full_loss) < 1e-6
print("shorter form: gradients and loss within 1e-06 of the full batch")

# %% [markdown]
# In graph mode it is right for BatchNorm and Dropout too. In tree mode it differentiates every leaf, and
# raises at the random state of Dropout, which is made of integers.

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "grad requires real- or complex-valued inputs", "mode": "tree"}]
model, same = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
_, grads = nnx.jit(shorter_accumulate_grads)(model, minibatches)
_, expected = nnx.jit(accumulate_grads)(same, minibatches)
assert max_difference(grads, expected) < 1e-6 and max_difference(arrays(model), arrays(same)) < 1e-6
print("shorter form with BatchNorm and Dropout: same gradients, statistics and random state")

# %% [markdown]
# ## Less memory, and a program that does not grow
#
# The loop holds the activations of one minibatch instead of those of the batch, at the price of one sum the
# size of the parameters. The program does not grow with the number of minibatches.


# %%
@nnx.jit
def full_batch_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


def lower(step, batch):
    model = MLP(nnx.Rngs(0))
    return step.lower(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), batch)


def temporary_bytes(lowered):
    return lowered.compile().memory_analysis().temp_size_in_bytes


def cut(batch, num_minibatches):
    return jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)


large_batch = (jnp.ones((4096, 8)), jnp.ones((4096, 4)))
at_once = lower(full_batch_step, large_batch)
in_two, in_eight = (lower(train_step, cut(large_batch, n)) for n in (2, 8))

assert temporary_bytes(in_eight) < temporary_bytes(at_once) / 6
print("8 minibatches of 512 rows need less than a sixth of the temporary memory of 4096 rows")
assert len(in_two.as_text().splitlines()) == len(in_eight.as_text().splitlines())
print("2 and 8 minibatches make programs of the same length")

# %% [markdown]
# In graph mode `nnx.fori_loop` traces its body twice since Flax 0.12.3. That is paid once, at compilation.


# %%
class CountedMLP(MLP):
    traces = 0

    def __call__(self, x):
        CountedMLP.traces += 1
        return super().__call__(x)


nnx.jit(accumulate_grads)(CountedMLP(nnx.Rngs(0)), minibatches)
print("times the model was traced:", CountedMLP.traces)

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
    minibatches = jax.eval_shape(lambda a: a.reshape(n, -1, 512), rows)
    lowered = train_step.lower(model, optimizer, (minibatches, minibatches))
    costs["nnx.fori_loop", n] = cost(lowered.compile())
    costs["by hand", n] = cost(by_hand.lower((params, tx.init(params)), (rows, rows), n).compile())
for (name, n), figures in costs.items():
    print(f"{name:16} {n:>11}", *(f"{figure:>12,}" for figure in figures))

full = nnx.jit(nnx.value_and_grad(loss_fn)).lower(model, (rows, rows)).compile().memory_analysis()
batch_bytes = 2 * 1024 * 512 * 4
params_bytes, largest = sum(a.nbytes for a in jax.tree.leaves(params)), 512 * 512 * 4
for n in 2, 64:
    instructions, temporary, _, _, aliased = costs["nnx.fori_loop", n]
    assert abs(instructions / costs["by hand", n][0] - 1) < 0.02
    assert temporary <= 1.05 * (params_bytes + largest + (full.temp_size_in_bytes + batch_bytes) / n)
    assert aliased == sum(a.nbytes for node in (model, optimizer) for a in jax.tree.leaves(nnx.state(node)))
growth = costs["nnx.fori_loop", 64][0] - costs["nnx.fori_loop", 2][0]
assert growth < 10, "the loop is not longer for 64 minibatches than for 2"
print("as many instructions as by hand within 2%, all bytes of model and optimizer reused: True")

# %% [markdown]
# - **HLO instructions** do not grow with the loop. The few more by hand take the mean of 64 losses.
# - **Temporary bytes** are at most those of the sum, which are the parameters', of the largest leaf, and of the
#   activations of one minibatch: [the model, and where it fails](donate_and_measure_memory.py).
#
# ## When to prefer another recipe
#
# - You are here for the error message: [`nnx.fori_loop` rejects the
#   accumulator](fori_loop_rejects_accumulator.py), which also shows how to keep a `State` as the sum.
# - You want the loss of every minibatch, or minibatches as the scanned input: [accumulate with
#   `nnx.scan`](accumulate_with_scan.py).
# - You want no NNX loop at all, or to split the model once and not in the body: [accumulate with split and
#   merge](accumulate_with_split_merge.py).
# - The batch is sharded over devices: [accumulate sharded minibatches](accumulate_sharded_minibatches.py).
# - You want the whole step, with metrics, donation and sharding: [a complete train
#   step](complete_train_step.py).
