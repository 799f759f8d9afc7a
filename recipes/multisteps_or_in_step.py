# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Accumulate in the step if the batch arrives whole, with optax.MultiSteps if in parts.
#     answers:
#       - google/flax#2031
#       - google-deepmind/optax#472
#       - google-deepmind/optax#528
#       - google-deepmind/optax#1038
#       - patrick-kidger/equinox#853
#       - Physical-Intelligence/openpi#286
#       - AI-Hypercomputer/maxtext#3452
#       - huggingface/transformers#26330
#     symptoms:
#       - optax.MultiSteps runs out of memory
#       - optax.MultiSteps does not reduce memory
#       - learning rate schedule ends too early with gradient accumulation
#       - optimizer.step counts minibatches instead of updates
#       - clip_by_global_norm with gradient accumulation differs from the full batch
#       - parameters stop moving after a NaN with optax.MultiSteps
#       - optax.apply_every gives updates that are too large
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # `optax.MultiSteps`, or accumulate in the step
#
# Accumulate in the step if the whole batch is there when the step begins: one call is one update, and nothing
# is kept between calls. Use `optax.MultiSteps` if minibatches arrive one at a time. It keeps one float32 copy
# of the parameters for good, and clipping, decay and schedules must stand inside of it.

# %% tags=["snippet"]
import jax
import jax.numpy as jnp
import optax
from flax import nnx


def loss_fn(model, minibatch):
    x, y = minibatch
    return jnp.mean((model(x) - y) ** 2)


def merged_loss(params, rest, graphdef, minibatch):
    model = nnx.merge(graphdef, params, rest, copy=True)
    loss = loss_fn(model, minibatch)
    return loss, nnx.state(model, nnx.Not(nnx.Param))


# The batch arrives whole: call `train_step` once for each update.
@nnx.jit(static_argnames="num_minibatches", donate_argnums=(0, 1))
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch, num_minibatches: int):
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
    optimizer.update(model, jax.tree.map(lambda g: g / num_minibatches, total))
    return losses.mean()


# It arrives in minibatches: call `minibatch_step` for each of them, with the optimizer below.
@nnx.jit(donate_argnums=(0, 1))
def minibatch_step(model: nnx.Module, optimizer: nnx.Optimizer, minibatch):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    value_and_grad = jax.value_and_grad(merged_loss, has_aux=True)
    (loss, rest), grads = value_and_grad(params, rest, graphdef, minibatch)
    nnx.update(model, rest)
    optimizer.update(model, grads)
    return loss


def get_multisteps_optimizer(model: nnx.Module, tx: optax.GradientTransformation, num_minibatches: int):
    """`tx` is the whole chain: clipping, schedule and weight decay too."""
    return nnx.Optimizer(model, optax.MultiSteps(tx, every_k_schedule=num_minibatches), wrt=nnx.Param)


# %% [markdown]
# - **`train_step`** is the step of [split and merge](accumulate_with_split_merge.py), donated.
# - **`minibatch_step`** is a training step without accumulation. The optimizer is what accumulates: it hands
#   `tx` the mean gradient of every `num_minibatches` calls. In the other calls the parameters stay as they
#   are.
# - **With one minibatch, use neither.** `MultiSteps(tx, 1)` keeps its copy as well.
#
# ## One update, three ways
#
# The third way is [`optax.microbatch`](https://optax.readthedocs.io/en/latest/), which turns a function of a
# batch into a loop over minibatches. It knows no Modules: what the model changes in the loop is lost.

# %%
import numpy as np


@nnx.jit(static_argnames="num_minibatches", donate_argnums=(0, 1))
def microbatch_step(model, optimizer, batch, num_minibatches):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_and_grads(minibatch):
        (loss, _), grads = jax.value_and_grad(merged_loss, has_aux=True)(params, rest, graphdef, minibatch)
        return loss, grads

    microbatch_size = len(jax.tree.leaves(batch)[0]) // num_minibatches
    mean = optax.microbatching.AccumulationType.MEAN  # the default is the sum
    loss, grads = optax.microbatch(loss_and_grads, 0, microbatch_size, mean)(batch)
    optimizer.update(model, grads)
    return loss


class Net(nnx.Module):
    """Draws a dropout mask, records it and does not use it, so that gradients can be compared."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 16, rngs=rngs)
        self.outer = nnx.Linear(16, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        jax.debug.callback(lambda mask: masks.append(mask.tobytes()), self.drop(jnp.ones(64)))
        return self.outer(nnx.relu(self.inner(x)))


def record_runs():
    """Changes no gradient. Records every run, and the norm of the gradient it was given."""

    def update(updates, state, params=None):
        jax.debug.callback(lambda norm: runs.append(float(norm)), optax.tree.norm(updates))
        return updates, state

    return optax.GradientTransformation(lambda params: (), update)


masks, runs = [], []


def pieces(data, rows):
    """The data in pieces of so many rows; the last one may be smaller."""
    return [jax.tree.map(lambda a: a[i : i + rows], data) for i in range(0, len(data[0]), rows)]


def multisteps(model, tx, data, rows, num_minibatches):
    """An epoch over the data: the optimizer after it, and what the steps returned."""
    optimizer = get_multisteps_optimizer(model, tx, num_minibatches)
    return optimizer, [minibatch_step(model, optimizer, minibatch) for minibatch in pieces(data, rows)]


def in_step(model, tx, data, rows, num_minibatches, step=train_step):
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    batches = pieces(data, rows * num_minibatches)
    return optimizer, [step(model, optimizer, batch, num_minibatches) for batch in batches]


def microbatching(*args):
    return in_step(*args, step=microbatch_step)


ways = {"`optax.MultiSteps`": multisteps, "in the step": in_step, "`optax.microbatch`": microbatching}

# %% [markdown]
# A batch of 32 rows in four minibatches. `optax.sgd(1.0)` subtracts the gradient itself, so parameters before
# minus parameters after are the gradient that was accumulated.


# %% tags=["proof"]
def arrays(tree):
    return [np.array(a) for a in jax.tree.leaves(tree)]


def bytes_of(tree):
    """Scalars, which are counters here, left out."""
    return sum(a.nbytes for a in jax.tree.leaves(tree) if a.ndim)


def updates_made(optimizer):
    """The count that a schedule in `tx` goes by."""
    return int(optax.tree.get(optimizer.opt_state, "count")[...])


rng = np.random.default_rng(0)
batch = tuple(np.float32(rng.normal(size=(32, 8))) for _ in "xy")
graphdef, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)
value_and_grad = jax.jit(jax.value_and_grad(merged_loss, has_aux=True), static_argnums=2)
(full_loss, _), full_grads = value_and_grad(params, rest, graphdef, batch)
full_loss, full_grads = float(full_loss), arrays(full_grads)
full_norm = np.linalg.norm(np.concatenate([g.ravel() for g in full_grads]))
assert len(full_grads) == 4 and all(abs(g).max() > 1e-3 for g in full_grads)


def one_update(way):
    model, tx = Net(nnx.Rngs(0)), optax.chain(record_runs(), optax.sgd(optax.constant_schedule(1.0)))
    before, plain = arrays(nnx.state(model, nnx.Param)), nnx.Optimizer(model, tx, wrt=nnx.Param)
    jax.effects_barrier()
    masks.clear(), runs.clear()
    optimizer, losses = way(model, tx, batch, 8, 4)
    jax.effects_barrier()
    grads = [old - new for old, new in zip(before, arrays(nnx.state(model, nnx.Param)), strict=True)]
    difference = np.max([abs(a - b).max() for a, b in zip(grads, full_grads, strict=True)])
    assert len(masks) == 4 and abs(runs[-1] - full_norm) < 1e-6, "the last run is given the full batch"
    assert abs(np.mean(losses) - full_loss) < 1e-6, "the mean of the returned losses is that of the batch"
    draws = 0 if way is microbatching else 4
    assert model.drop.rngs.count[...] == draws, (
        "the random stream has moved on, but not with `optax.microbatch`"
    )
    return {
        "calls for one update": len(losses),
        "rows that one call is given": len(batch[0]) // len(losses),
        "gradient of the full batch to 1e-06": "yes" if difference < 1e-6 else "no",
        "`optimizer.step` after it": optimizer.step[...],
        "count that a schedule in `tx` sees": updates_made(optimizer),
        "runs of `tx`": len(runs),
        "dropout masks for four minibatches": len(set(masks)),
        "kept between calls, in bytes of the parameters": (
            f"{(bytes_of(nnx.state(optimizer)) - bytes_of(nnx.state(plain))) / bytes_of(params):.2f}"
        ),
    }


table = {name: one_update(way) for name, way in ways.items()}
in_four_calls, in_one_call, functional = (list(map(str, column.values())) for column in table.values())
assert in_four_calls == ["4", "8", "yes", "4", "1", "4", "4", "1.00"]
assert in_one_call == ["1", "32", "yes", "1", "1", "1", "4", "0.00"]
assert functional == ["1", "32", "yes", "1", "1", "1", "1", "0.00"]
print("all three are given the gradient and return the loss of the full batch: True")

# %% [markdown]
# A model with one parameter for each feature makes the rest easy to read: where a parameter is 0 and `x` is
# 1, its gradient is the negative target (twice that where there is only one feature).


# %% tags=["proof"]
class Scale(nnx.Module):
    def __init__(self, features, dtype=jnp.float32):
        self.scale = nnx.Param(jnp.zeros(features, dtype))

    def __call__(self, x):
        return self.scale * x


def with_targets(targets, dtype=jnp.float32):
    targets = np.asarray(targets, dtype)
    return np.ones_like(targets), targets


guarded_sgd = optax.apply_if_finite(optax.sgd(optax.constant_schedule(0.25)), max_consecutive_errors=5)


def in_bfloat16(way):
    """512 gradients that are all 1."""
    model = Scale(1, jnp.bfloat16)
    optimizer, _ = way(model, optax.sgd(1.0), with_targets([[-0.5]] * 512, jnp.bfloat16), 1, 512)
    mean = -float(np.array(model.scale[...])[0])
    kept = bytes_of(nnx.state(optimizer)) / bytes_of(nnx.state(model))
    return {"the same for bfloat16 parameters": f"{kept:.2f}", "mean of 512 bfloat16 gradients of 1": mean}


def clipped(way):
    """Two gradients, (30, 0) and (0, 1); their mean is clipped to norm 1."""
    model, tx = Scale(2), optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(optax.constant_schedule(1.0)))
    way(model, tx, with_targets([[-30, 0], [0, -1]]), 1, 2)
    mean = np.array([15, 0.5])
    off = abs(np.array(model.scale[...]) + mean / np.linalg.norm(mean)).max()
    return {"clipping in `tx` is off by": f"{off:.2f}"}


def leftover(way):
    """48 rows, where an update takes four minibatches of 8."""
    optimizer, _ = way(Scale(1), guarded_sgd, with_targets([[1.0]] * 48), 8, 4)
    waiting = 8 * int(getattr(optimizer.opt_state, "mini_step", np.zeros(()))[...])
    return {"updates from 48 rows": f"{updates_made(optimizer)}" + f", {waiting} rows wait" * (waiting > 0)}


def with_a_nan(way):
    """Three updates of four minibatches. The second of the twelve minibatches is NaN."""
    model, targets = Scale(1), np.ones((96, 1))
    targets[8:16] = np.nan
    optimizer, _ = way(model, guarded_sgd, with_targets(targets), 8, 4)
    assert np.isfinite(model.scale[...])
    return {"updates of 3, a NaN in the first, `apply_if_finite`": updates_made(optimizer)}


for name, way in ways.items():
    for measurement in in_bfloat16, clipped, leftover, with_a_nan:
        table[name] |= measurement(way)

in_four_calls, in_one_call, functional = (list(map(str, column.values()))[8:] for column in table.values())
assert in_four_calls == ["2.00", "1.0", "0.00", "1, 16 rows wait", "0"]
assert in_one_call == functional == ["0.00", "0.5", "0.00", "2", "2"]

# %% tags=["proof"]
from IPython.display import Markdown

questions = list(table["in the step"])
lines = [
    ["measured", *table],
    ["---"] * 4,
    *([row, *(str(column[row]) for column in table.values())] for row in questions),
]
Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines))

# %% [markdown]
# What decides:
#
# - **Does the whole batch fit where the step runs?** `MultiSteps` is the one that needs the rows of one
#   minibatch only. It cuts nothing: given the whole batch, it saves [no memory](#what-it-costs).
# - **Does the model have Dropout or BatchNorm?** `optax.microbatch` repeats one mask and moves no statistics.
# - **Does the data end in the middle of an update?** `MultiSteps` keeps the rest for the next epoch, so its
#   state belongs in a checkpoint.
# - **Do minibatches weigh the same?** All three average means. Where they do not, [sum and
#   count](unequal_minibatches.py).
#
# ## Put everything inside of `MultiSteps`
#
# What stands in a chain with `MultiSteps`, before or after it, runs for every minibatch: clipping sees
# single minibatches, decay is applied several times, and a schedule runs out early.


# %% tags=["proof"]
def run(tx, params, grads):
    """Parameters after each call, and the last state."""

    def body(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    @jax.jit
    def steps(params, grads):
        (_, state), history = jax.lax.scan(body, (params, tx.init(params)), grads)
        return history, state

    return jax.device_get(steps(params, grads))


def multi(tx, k):
    return optax.MultiSteps(tx, k).gradient_transformation()


clip, sgd = optax.clip_by_global_norm(1.0), optax.sgd(1.0)
grads = np.array([[30.0, 0.0], [0.0, 1.0]])
(*_, right), _ = run(optax.chain(clip, sgd), np.zeros(2), grads.mean(axis=0, keepdims=True))
(*_, inside), _ = run(multi(optax.chain(clip, sgd), 2), np.zeros(2), grads)
(*_, outside), _ = run(optax.chain(clip, multi(sgd, 2)), np.zeros(2), grads)
assert abs(inside - right).max() < 1e-6 and abs(outside - right).max() > 0.4
print(f"clipping inside: off by {abs(inside - right).max():.2f}, outside: {abs(outside - right).max():.2f}")

decay = optax.add_decayed_weights(-0.5)  # halves a parameter each time it is applied
(*_, inside), _ = run(multi(optax.chain(sgd, decay), 4), np.ones(1), np.zeros((4, 1)))
(*_, outside), _ = run(optax.chain(multi(sgd, 4), decay), np.ones(1), np.zeros((4, 1)))
assert inside == 0.5 and outside == 0.5**4
print(f"decay by half, one update of four minibatches: inside {inside[0]}, outside {outside[0]}")

schedule = optax.scale_by_learning_rate(optax.linear_schedule(1.0, 0.0, transition_steps=8))
inside, _ = run(multi(schedule, 4), np.zeros(1), np.ones((12, 1)))
outside, _ = run(optax.chain(multi(optax.identity(), 4), schedule), np.zeros(1), np.ones((12, 1)))
inside, outside = (abs(np.diff(history[3::4, 0], prepend=0)) for history in (inside, outside))
assert inside.tolist() == [1, 0.875, 0.75] and outside.tolist() == [0.625, 0.125, 0]
print(f"learning rates of three updates, 1 to 0 in eight steps: inside {inside}, outside {outside}")

# %% [markdown]
# Inside, a schedule is given the number of updates, so its length is that too: minibatches divided by
# `num_minibatches`. A schedule that your own loop evaluates should not go by `optimizer.step`, which counts
# minibatches.
#
# ## Read the counters, not `has_updated`
#
# `has_updated` compares the counters of the state. In an `nnx.Optimizer` these are Variables, and those have
# no order.

# %%
model = Net(nnx.Rngs(0))
tx = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=4)
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "'>' not supported between instances of 'Opt"}]
tx.has_updated(optimizer.opt_state)

# %% [markdown]
# The mean of the losses since the last update is the loss of the batch, because the parameters did not move
# in between.

# %% tags=["proof"]
log, losses = [], []
for minibatch in pieces(batch, 8) * 2:
    losses.append(minibatch_step(model, optimizer, minibatch))
    if optimizer.opt_state.mini_step[...] == 0:
        log.append((int(optimizer.opt_state.gradient_step[...]), float(np.mean(losses))))
        losses.clear()

assert [update for update, _ in log] == [1, 2] and optimizer.step[...] == 8
assert abs(log[0][1] - full_loss) < 1e-6 and log[1][1] < log[0][1] - 1e-3
print(f"{optimizer.step[...]} calls, {len(log)} losses logged, the first is that of the full batch: True")

# %% [markdown]
# ## A NaN stays in the accumulator
#
# `MultiSteps` clears its accumulator by multiplying with zero, and zero times NaN is NaN. With
# `optax.apply_if_finite` inside, every later update is rejected, and nothing raises: the last row of the
# table. Without it, the NaN reaches the parameters at once, in a call that is not an update. Skip the
# minibatch before it is added.

# %% tags=["proof"]
grads = np.array([[1.0], [1.0], [np.nan], [1.0], [1.0], [1.0], [1.0]])
second_is_nan = np.array([[1.0], [np.nan], [1.0], [1.0], [1.0], [1.0], [1.0]])
skipping = optax.MultiSteps(sgd, 3, should_skip_update_fn=optax.skip_not_finite)
unguarded, _ = run(optax.MultiSteps(sgd, 3), np.zeros(1), second_is_nan)
guarded, state = run(optax.MultiSteps(optax.apply_if_finite(sgd, 5), 3), np.zeros(1), grads)
skipped, skipped_state = run(skipping, np.zeros(1), grads)
print("no guard:         ", unguarded[:, 0])
print("apply_if_finite:  ", guarded[:, 0], "accumulator", state.acc_grads)
print("skip_not_finite:  ", skipped[:, 0], "accumulator", skipped_state.acc_grads)
assert unguarded[0] == 0 and np.isnan(unguarded[1:]).all(), "call 2 of 3 is not an update"
assert (guarded == 0).all() and np.isnan(state.acc_grads).all()
assert skipped[:, 0].tolist() == [0, 0, 0, -1, -1, -1, -2] and skipped_state.acc_grads == 0

# %% [markdown]
# In the step, the sum starts from zeros each time, and `apply_if_finite` loses one update.
#
# ## Choose the accumulator's dtype
#
# In the table, 512 gradients of 1 have the mean 0.5 where the sum is bfloat16: it stops at 256, where adding
# 1 changes nothing. `MultiSteps` accumulates in float32 unless told otherwise, which is twice the bytes of
# bfloat16 parameters. In the step, start from `jnp.zeros(p.shape, jnp.float32)`; for
# `optax.microbatch`, cast the gradients before it adds them.


# %% tags=["proof"]
def accumulate_float32(params, minibatches):
    def body(total, minibatch):
        grads = jax.grad(lambda scale: jnp.mean((scale * minibatch[0] - minibatch[1]) ** 2))(params)
        return total + grads, None

    total, _ = jax.lax.scan(body, jnp.zeros(params.shape, jnp.float32), minibatches)
    return total / len(minibatches[0])


ones = with_targets([[-0.5]] * 512, jnp.bfloat16)
params_bfloat16 = jnp.zeros(1, jnp.bfloat16)
mean = jax.jit(accumulate_float32)(params_bfloat16, ones)
assert mean.dtype == jnp.float32 and mean == 1
halved = optax.MultiSteps(optax.sgd(1.0), 4, accumulator_dtype=jnp.bfloat16).init(params_bfloat16)
assert halved.acc_grads.dtype == jnp.bfloat16
print(f"float32 sum in the step: mean {mean[0]}")
print(f"MultiSteps(accumulator_dtype=jnp.bfloat16) keeps {halved.acc_grads.dtype}")

# %% [markdown]
# The state of `MultiSteps` has the same structure and dtypes after an update as before, with optimizers too
# that keep parameters of their own.

# %% tags=["proof"]
schedule_free = optax.contrib.schedule_free(optax.adam(1e-3, b1=0.0), 1e-3, b1=0.9)
grads = jnp.ones((2, 3), jnp.bfloat16)
for tx in optax.MultiSteps(schedule_free, 2), optax.MultiSteps(optax.adam(1e-3), 2):
    params = jnp.ones(3, jnp.bfloat16)
    history, state = run(tx, params, grads)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), state) == jax.tree.map(
        lambda a: (a.shape, a.dtype), tx.init(params)
    )
    assert history.dtype == jnp.bfloat16
print("bfloat16 parameters, schedule_free and adam: same structure, shapes and dtypes")

# %% [markdown]
# ## Change the number of minibatches while training
#
# `every_k_schedule` may be a function of the number of updates. Nothing is compiled again; in the step,
# `num_minibatches` is static, and each number is compiled once.

# %% tags=["proof"]
growing = optax.MultiSteps(sgd, lambda update: jnp.where(update < 2, 1, 3))
history, state = run(growing, np.zeros(1), np.ones((8, 1)))
moved = [i + 1 for i, step in enumerate(np.diff(history[:, 0], prepend=0)) if step]
assert moved == [1, 2, 5, 8] and state.gradient_step == 4
print("one minibatch for the first two updates, then three: updates in calls", moved)

# %% [markdown]
# ## `optax.apply_every` is another thing
#
# It adds up updates and applies the sum, not the mean: with SGD the step is `k` times too large, and Adam's
# moments have seen every minibatch on its own. It keeps a copy of the parameters as well.

# %% tags=["proof"]
every = optax.chain(optax.sgd(1.0), optax.apply_every(4))
(*_, last), state = run(every, np.zeros(8), np.ones((4, 8)))
(*_, mean), _ = run(optax.MultiSteps(sgd, 4), np.zeros(8), np.ones((4, 8)))
assert (last == 4 * mean).all() and bytes_of(state) == last.nbytes
print(f"MultiSteps moves by {mean[0]}, apply_every by {last[0]}")

# %% [markdown]
# ## What it costs
#
# SGD with momentum on 4096 rows, model and optimizer donated. The compiler gives the figures, so they repeat;
# they are those of one call. "Held" is arguments, temporary and outputs, less what is aliased.


# %% tags=["proof"]
class MLP(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(64, 256, rngs=rngs)
        self.outer = nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.relu(self.inner(x)))


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


large = (np.zeros((4096, 64), np.float32),) * 2
model, tx = MLP(nnx.Rngs(0)), optax.sgd(0.1, momentum=0.9)
plain, accumulating = nnx.Optimizer(model, tx, wrt=nnx.Param), get_multisteps_optimizer(model, tx, 64)
costs = {("no accumulation", 1): cost(train_step.lower(model, plain, large, num_minibatches=1).compile())}
for n in 1, 2, 64:
    minibatch = pieces(large, 4096 // n)[0]
    costs["MultiSteps", n] = cost(minibatch_step.lower(model, accumulating, minibatch).compile())
    if n > 1:
        costs["in the step", n] = cost(train_step.lower(model, plain, large, num_minibatches=n).compile())
        costs["microbatch", n] = cost(microbatch_step.lower(model, plain, large, num_minibatches=n).compile())

titles = ("minibatches", "HLO", "temporary", "arguments", "outputs", "aliased", "held")
print(" " * 16, *(f"{title:>12}" for title in titles), sep="")
held = {}
for (name, n), figures in costs.items():
    _, temporary, arguments, outputs, aliased = figures
    held[name, n] = arguments + temporary + outputs - aliased
    print(f"{name:16}", *(f"{figure:>12,}" for figure in (n, *figures, held[name, n])), sep="")

params_bytes = bytes_of(nnx.state(model))
for n in 2, 64:
    other_rows = 2 * (large[0].nbytes - large[0].nbytes // n)
    arguments = {name: costs[name, n][2] for name in ("MultiSteps", "in the step", "microbatch")}
    assert arguments["MultiSteps"] + other_rows == arguments["in the step"] + params_bytes + 8
    assert held["MultiSteps", n] < held["in the step", n] < held["microbatch", n] < held["no accumulation", 1]
for name in "MultiSteps", "in the step", "microbatch":
    (few, few_bytes, *_), (many, many_bytes, *_, aliased) = costs[name, 2], costs[name, 64]
    assert many < 1.1 * few and many_bytes < few_bytes
    optimizer = accumulating if name == "MultiSteps" else plain
    state = sum(a.nbytes for node in (model, optimizer) for a in jax.tree.leaves(nnx.state(node)))
    assert aliased == state, "the donated bytes are all of the model and the optimizer"
assert held["MultiSteps", 64] + other_rows > held["in the step", 64], "with the other rows on the device too"
assert costs["microbatch", 64][1] > costs["in the step", 64][1] + 2 * large[0].nbytes
assert held["MultiSteps", 1] > held["no accumulation", 1] + params_bytes

# %% [markdown]
# - **Arguments:** `MultiSteps` is handed one minibatch, and its state is larger by the copy and two counters.
#   If the other rows are on the device too, it holds more than the step that accumulates, for 64 minibatches.
# - **`optax.microbatch`** makes a copy of the batch in another order.
# - **`MultiSteps` around the whole batch** needs more than no accumulation at all: it does not cut the batch.
#   Cut it yourself, or accumulate in the step.
#
# ## When to prefer another recipe
#
# - Minibatches with masks or different numbers of tokens: [sum and count](unequal_minibatches.py).
# - The step with sharding, metrics and a training loop: [the complete step](complete_train_step.py).
# - What the loop in the step may carry, and why `copy=True`: [split and
#   merge](accumulate_with_split_merge.py).
# - bfloat16 in the carry of a loop: [carry dtype and shape](carry_dtype_and_shape.py).
