# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Donate model and optimizer, and ask the compiler for the bytes of a step before you run it.
#     answers:
#       - google/flax#5026
#       - google/flax#5116
#       - google/flax#5461
#       - jax-ml/jax#9237
#       - jax-ml/jax#3186
#       - erfanzar/EasyDeL#125
#       - google-deepmind/optax#472
#       - google-deepmind/optax#528
#     symptoms:
#       - gradient accumulation does not reduce memory
#       - gradient accumulation needs more memory than the full batch
#       - Some donated buffers were not usable
#       - EMA copy of the model is deleted after the first step
#       - RESOURCE_EXHAUSTED out of memory in the training step
#       - nnx.grad needs more memory than jax.grad
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # Donate the session and measure memory
#
# Donate model and optimizer, and the new state takes the place of the old one. Accumulation then replaces the
# activations of the batch by those of one minibatch, and adds a sum of gradients. The compiler says what a
# step needs before anything runs.

# %% tags=["snippet"]
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class TrainSession(NamedTuple):
    model: nnx.Module
    optimizer: nnx.Optimizer


def loss_fn(model, minibatch):
    x, labels = minibatch
    return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()


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


@nnx.jit(donate_argnames="session", static_argnames="num_minibatches")
def train_step(session: TrainSession, batch, num_minibatches: int):
    model, optimizer = session
    loss, grads = accumulate_grads(model, batch, num_minibatches)
    optimizer.update(model, grads)
    return loss


def bytes_needed(step, *args, **kwargs) -> int:
    """Bytes that the compiled step holds at once. Nothing runs, and shapes will do for the batch."""
    memory = step.lower(*args, **kwargs).compile().memory_analysis()
    in_place = memory.alias_size_in_bytes  # outputs that lie where a donated argument lay
    ends = memory.argument_size_in_bytes + memory.output_size_in_bytes - in_place
    return ends + memory.temp_size_in_bytes


# %% [markdown]
# Call it as `bytes_needed(train_step, session, batch, num_minibatches=8)`. In place of the batch it takes
# `jax.ShapeDtypeStruct(shape, dtype)`.
#
# - **`donate_argnames`** gives the arrays of the session to the step. `nnx.jit` writes the new ones back into
#   model and optimizer, so the session itself stays usable.
# - **The batch is not donated.** No output has its shape, so nothing could lie in its place.
# - **All four numbers count.** Without donation, temporaries may lie in the outputs: the temporary bytes look
#   small and the sum is large.
#
# The loop is that of [split and merge](accumulate_with_split_merge.py).
#
# ## What donation saves

# %%
import numpy as np


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, activation=nnx.tanh):
        self.first = nnx.Linear(128, 128, rngs=rngs)
        self.second = nnx.Linear(128, 128, rngs=rngs)
        self.last = nnx.Linear(128, 10, rngs=rngs)
        self.activation = activation

    def __call__(self, x):
        x = self.activation(self.first(x))
        return self.last(self.activation(self.second(x)))


tx = optax.sgd(0.1, momentum=0.9)


def get_session(*args):
    model = MLP(nnx.Rngs(0), *args)
    return TrainSession(model, nnx.Optimizer(model, tx, wrt=nnx.Param))


def get_shapes(rows):
    return jax.ShapeDtypeStruct((rows, 128), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)


def get_batch(rows):
    x = np.random.default_rng(0).normal(size=(rows, 128)).astype(np.float32)
    return jax.device_put((x, np.int32(x[:, :10].argmax(axis=-1))))


def arrays(*nodes):
    return [array for node in nodes for array in jax.tree.leaves(nnx.state(node))]


def state_bytes(*nodes):
    return sum(array.nbytes for array in arrays(*nodes))


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


def undonated_step(session, batch, num_minibatches):
    loss, grads = accumulate_grads(session.model, batch, num_minibatches)
    session.optimizer.update(session.model, grads)
    return loss


undonated_step = nnx.jit(undonated_step, static_argnames="num_minibatches")
session, rows = get_session(), 2048
print(f"{'':13}{'temporary':>10}{'arguments':>11}{'outputs':>9}{'aliased':>9}{'needed':>11}")
costs, needed = {}, {}
for name, step in ("donated", train_step), ("not donated", undonated_step):
    costs[name] = cost(step.lower(session, get_shapes(rows), num_minibatches=8).compile())
    _, temporary, arguments, outputs, aliased = costs[name]
    needed[name] = temporary + arguments + outputs - aliased
    print(f"{name:13}{temporary:>10,}{arguments:>11,}{outputs:>9,}{aliased:>9,}{needed[name]:>11,}")

assert costs["donated"][4] == state_bytes(*session) and costs["not donated"][4] == 0
assert needed["donated"] == bytes_needed(train_step, session, get_shapes(rows), num_minibatches=8)
assert needed["donated"] < needed["not donated"] and costs["donated"][1] > costs["not donated"][1]
print(f"aliased bytes are those of model and optimizer: {state_bytes(*session):,}")

# %% [markdown]
# The gradients do not change with donation or with the number of minibatches. `optax.sgd(1.0)` subtracts the
# gradient itself, so the change of the parameters is the gradient that the donated step used. The old
# parameters are copied, because the step deletes what it was given.


# %% tags=["proof"]
class CountingMLP(MLP):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1  # writes, as Dropout and BatchNorm do
        return super().__call__(x)


small_batch = get_batch(64)
full_loss, full_grads = jax.device_get(nnx.jit(nnx.value_and_grad(loss_fn))(MLP(nnx.Rngs(0)), small_batch))
full_grads = jax.tree.leaves(full_grads)
model = CountingMLP(nnx.Rngs(0))
sgd_session = TrainSession(model, nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param))
old = arrays(*sgd_session)
before = [np.array(array) for array in jax.tree.leaves(nnx.state(model, nnx.Param))]
loss = train_step(sgd_session, small_batch, 8)

after = [np.array(array) for array in jax.tree.leaves(nnx.state(model, nnx.Param))]
grads = [old_array - new_array for old_array, new_array in zip(before, after, strict=True)]
assert len(grads) == len(full_grads) == 6
for grad, full in zip(grads, full_grads, strict=True):
    assert abs(full).max() > 1e-3 and abs(grad - full).max() < 1e-6
assert abs(loss - full_loss) < 1e-6 and model.calls[...] == 8
assert all(array.is_deleted() for array in old)
assert not any(array.is_deleted() for array in [*arrays(*sgd_session), *small_batch])
print(f"{len(grads)} gradients equal those of the full batch to 1e-06; {len(old)} old arrays deleted")

# %% [markdown]
# ## Any kind of session
#
# Tuples, dicts and Modules are donated whole, and so is the `State` of a session under `jax.jit`. There the
# old objects hold deleted arrays until `nnx.update` gives them the new ones.


# %% tags=["proof"]
class ModuleSession(nnx.Module):
    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer


def update_once(model, optimizer, x):
    optimizer.update(model, nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model))


kinds = {
    "NamedTuple": (TrainSession, lambda session: (session.model, session.optimizer)),
    "dict": (
        lambda model, optimizer: dict(m=model, o=optimizer),
        lambda session: (session["m"], session["o"]),
    ),
    "Module": (ModuleSession, lambda session: (session.model, session.optimizer)),
}


def get_linear():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


x = jnp.ones((4, 8))
for name, (make, take) in kinds.items():
    step = nnx.jit(lambda session, x: update_once(*take(session), x), donate_argnums=0)
    model, optimizer = get_linear()
    session_of_kind, old = make(model, optimizer), arrays(model, optimizer)
    aliased = cost(step.lower(session_of_kind, x).compile())[4]
    assert aliased == state_bytes(model, optimizer) == sum(array.nbytes for array in old)
    step(session_of_kind, x)
    step(session_of_kind, x)
    assert take(session_of_kind)[1].step[...] == 2 and all(array.is_deleted() for array in old)
    print(f"{name}: {aliased} of {state_bytes(model, optimizer)} bytes aliased, two steps taken")


def state_step(state, x):
    model, optimizer = nnx.merge(graphdef, state)
    update_once(model, optimizer, x)
    return nnx.state((model, optimizer))


model, optimizer = get_linear()
graphdef, state = nnx.split((model, optimizer))
state_step = jax.jit(state_step, donate_argnums=0)
aliased = cost(state_step.lower(state, x).compile())[4]
state = state_step(state, x)
assert aliased == state_bytes(model, optimizer) and all(array.is_deleted() for array in arrays(model))
nnx.update((model, optimizer), state)
assert optimizer.step[...] == 1 and np.isfinite(model.kernel[...]).all()
print(f"State under jax.jit: {aliased} of {state_bytes(model, optimizer)} bytes aliased")

# %% [markdown]
# A plain dataclass is no pytree, so no step takes it, donated or not.

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "Error interpreting argument"}]
import dataclasses


@dataclasses.dataclass
class PlainSession:
    model: nnx.Module
    optimizer: nnx.Optimizer


train_step(PlainSession(*session), small_batch, 8)

# %% [markdown]
# ## `Array has been deleted`
#
# An array that you took out of the model before the step is gone after it. Read it from the model again, or
# copy it before, with `np.array` or `jnp.copy`.

# %% tags=["raises-exception"] raises=[{"error": "RuntimeError", "match": "Array has been deleted with shape=float32[128,10]"}]
kernel = session.model.last.kernel[...]
train_step(session, small_batch, 8)
kernel + 1

# %% [markdown]
# ## A clone shares its arrays
#
# `nnx.clone` makes new Variables around the same arrays. The first donated step deletes those of an EMA model
# that was cloned ([google/flax#5461](https://github.com/google/flax/issues/5461)).

# %% tags=["raises-exception"] raises=[{"error": "RuntimeError", "match": "Array has been deleted with shape=float32[128,10]"}]
ema = nnx.clone(session.model)
train_step(session, small_batch, 8)
ema.last.kernel[...] + 1


# %% [markdown]
# Put into the session, the clone makes XLA refuse to run: the same array is there twice. XLA logs what it
# raises, and `quiet` keeps the log out of this page.


# %%
import contextlib
import os


@contextlib.contextmanager
def quiet():
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr), os.close(null)


# %% tags=["raises-exception"] raises=[{"error": "JaxRuntimeError", "match": "Attempt to donate the same buffer twice in Execute()", "jax": ">=0.8"}, {"error": "XlaRuntimeError", "match": "Attempt to donate the same buffer twice in Execute()", "jax": "<0.8"}]
class EMASession(NamedTuple):
    model: nnx.Module
    optimizer: nnx.Optimizer
    ema: nnx.Module


@nnx.jit(donate_argnames="session")
def ema_step(session, batch, decay):
    model, optimizer, ema = session
    _, grads = accumulate_grads(model, batch, 8)
    optimizer.update(model, grads)
    params = nnx.state(ema, nnx.Param), nnx.state(model, nnx.Param)
    nnx.update(ema, jax.tree.map(lambda e, p: decay * e + (1 - decay) * p, *params))


shared = get_session()
with quiet():
    ema_step(EMASession(*shared, nnx.clone(shared.model)), small_batch, 0.9)

# %% [markdown]
# Copy the arrays. This runs on every release.


# %% tags=["proof"]
def copy_of(model):
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(jnp.copy, state))


ema_session = EMASession(*get_session(), None)
ema_session = ema_session._replace(ema=copy_of(ema_session.model))
buffers = {array.unsafe_buffer_pointer() for array in arrays(*ema_session)}
assert len(buffers) == len(arrays(*ema_session)), "no two arrays share a buffer"

lowered = ema_step.lower(ema_session, small_batch, 0.9)
assert cost(lowered.compile())[4] == state_bytes(*ema_session), "the EMA is updated in place too"

expected = [np.array(array) for array in arrays(ema_session.ema)]
for _ in range(2):
    ema_step(ema_session, small_batch, 0.9)
    pairs = zip(expected, arrays(ema_session.model), strict=True)
    expected = [0.9 * average + 0.1 * np.array(array) for average, array in pairs]
averages, params = (jax.device_get(arrays(node)) for node in (ema_session.ema, ema_session.model))
for average, array, wanted in zip(averages, params, expected, strict=True):
    assert abs(average - wanted).max() < 1e-6 < abs(average - array).max()
print("two steps: the EMA is the average that was asked for, all its bytes aliased")

# %% [markdown]
# ### `nnx.clone` with `arrays=True`
#
# Since Flax 0.12.8 `nnx.clone` copies the arrays if it is told to.

# %% tags=["raises-exception", "outcome"] raises=[{"error": "TypeError", "match": "unexpected keyword argument 'arrays'", "flax": "<0.12.8"}]
cloned = nnx.clone(session.model, arrays=True)
train_step(session, small_batch, 8)
assert not any(array.is_deleted() for array in arrays(cloned))
print("the clone outlives the step")

# %% [markdown]
# ## Some donated buffers were not usable
#
# The warning names arrays that no output could replace, by dtype and shape
# ([jax-ml/jax#9237](https://github.com/jax-ml/jax/issues/9237)). A donated batch is harmless: it is not
# deleted, and nothing is saved. The shapes of parameters mean that a new state was not returned, or came back
# with another dtype.

# %%
import warnings


def warning_of(step, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        aliased = cost(step.lower(*args).compile())[4]
    return [str(warning.message).split("\nSee")[0] for warning in caught], aliased


model, optimizer = get_linear()
batch_too = nnx.jit(update_once, donate_argnums=(0, 1, 2))
(message,), aliased = warning_of(batch_too, model, optimizer, x)
assert "float32[4,8]" in message and "float32[8,8]" not in message
assert aliased == state_bytes(model, optimizer)
batch_too(model, optimizer, x)
assert not x.is_deleted()
print("batch donated:", message)

graphdef, state = nnx.split(model)
state_lost = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x).sum(), donate_argnums=0)
(message,), aliased = warning_of(state_lost, state, x)
assert "float32[8,8]" in message and aliased == 0
print("state not returned:", message)

# %% [markdown]
# ## How much a step needs with N minibatches
#
# Three things take temporary memory while the donated loop runs: the sum of the gradients, as large as the
# parameters; one gradient before it is added, at most the largest leaf; and the activations of one minibatch.
# The activations of the full batch are what `jax.value_and_grad` alone needs for it, together with the batch.
# So one compilation, without any loop, tells what every N will need:
#
# *parameters + largest leaf + activations of the full batch / N*


# %% tags=["proof"]
def activation_bytes(model, batch):
    """What the gradient of the full batch needs: its temporaries and the batch itself."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    grad = jax.jit(
        lambda params, batch: jax.value_and_grad(merged_loss, has_aux=True)(params, rest, graphdef, batch)
    )
    temporary = cost(grad.lower(params, batch).compile())[1]
    return temporary + sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(batch))


def step_cost(session, rows, num_minibatches):
    lowered = train_step.lower(session, get_shapes(rows), num_minibatches=num_minibatches)
    return cost(lowered.compile())


parameters = state_bytes(session.model)
largest_leaf = max(array.nbytes for array in arrays(session.model))
activations = activation_bytes(session.model, get_shapes(rows))

costs, measured, model_bytes = {}, {}, {}
print(f"parameters {parameters:,}, largest leaf {largest_leaf:,}, activations {activations:,} bytes\n")
print(f"{'N':>2}{'temporary':>12}{'model':>12}{'measured / model':>19}")
for n in 1, 2, 4, 8, 64:
    costs[n] = step_cost(session, rows, n)
    measured[n] = costs[n][1]
    model_bytes[n] = parameters + largest_leaf + activations / n
    print(f"{n:>2}{measured[n]:>12,}{model_bytes[n]:>12,.0f}{measured[n] / model_bytes[n]:>19.2f}")

assert all(measured[n] < 1.05 * model_bytes[n] for n in measured), "five percent are enough"
assert all(measured[n] > 0.95 * model_bytes[n] for n in measured if n > 1), "and are not generous"
assert measured[64] < measured[1] / 10
assert parameters + largest_leaf < measured[64], "what no number of minibatches takes away"

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots()
counts = list(measured)
floor = [parameters + largest_leaf] * len(counts)
for name, values, style, color, offset, align in (
    ("parameters + largest leaf", floor, ":", "#777777", (0, 6), "left"),
    ("model", list(model_bytes.values()), "--", "#c8500a", (8, -2), "left"),
    ("measured", list(measured.values()), "o", "#1f77b4", (0, -16), "center"),
):
    values = np.array(values) / 1e6
    axes.plot(counts, values, style, color=color)
    label = dict(xytext=offset, textcoords="offset points", ha=align)
    axes.annotate(name, xy=(1, values[0]), color=color, **label)
axes.set_xscale("log", base=2)
axes.set_xticks(counts, counts)
axes.minorticks_off()
axes.set(xlabel="minibatches", ylabel="temporary memory (MB)", xlim=(0.7, None), ylim=(0, None))
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# One minibatch needs less than the model says: there is no loop, and no sum. The model is an estimate for
# plain networks on CPU, for how many arrays are kept is the compiler's decision. With another activation
# function the loop keeps more than the gradient alone does. `bytes_needed` has the answer for
# your step.


# %% tags=["proof"]
relu_session = get_session(nnx.relu)
relu_activations = activation_bytes(relu_session.model, get_shapes(rows))
relu_model = parameters + largest_leaf + relu_activations / 2
ratio = step_cost(relu_session, rows, 2)[1] / relu_model
assert 1.05 < ratio < 1.2, "five percent are not enough here"
print(f"relu instead of tanh, 2 minibatches: measured / model {ratio:.2f}")

# %% [markdown]
# ## A larger batch in the same memory
#
# Keep the rows of a minibatch and add minibatches: only the batch itself grows. A step that runs the model on
# the large batch at once and then divides has no such effect, which is what
# [erfanzar/EasyDeL#125](https://github.com/erfanzar/EasyDeL/issues/125) saw.

# %% tags=["proof"]
twice = step_cost(session, 2 * rows, 16)[1] / measured[8]
assert abs(twice - 1) < 0.01
print(f"twice the rows in twice the minibatches: {twice:.2f} times the temporary memory")

# %% [markdown]
# ## When accumulation costs more
#
# With many parameters and few rows, the sum of the gradients is larger than the activations that are saved.

# %% tags=["proof"]
few_rows = 64
full, accumulated = (step_cost(session, few_rows, n)[1] for n in (1, 8))
assert accumulated > 1.2 * full
assert activation_bytes(session.model, get_shapes(few_rows)) < parameters + largest_leaf < activations
print(f"{few_rows} rows: 8 minibatches need {accumulated / full:.2f} times the memory of the full batch")
print(f"{rows} rows: {measured[8] / measured[1]:.2f} times")

# %% [markdown]
# As a rule it pays when the activations of the full batch are larger than parameters and largest leaf
# together.
#
# ## Do not differentiate the loop
#
# The gradient of a loop keeps the activations of every turn
# ([jax-ml/jax#3186](https://github.com/jax-ml/jax/issues/3186)): a mean over minibatches inside the loss
# saves nothing. `jax.checkpoint` around the loss in the loop makes it save, for one more forward pass.
# Differentiating inside the body, as above, needs neither.


# %% tags=["proof"]
def looped_grad_bytes(model, batch, num_minibatches, loss_fn):
    graphdef, params = nnx.split(model)

    def mean_loss(params, batch):
        minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)
        losses = jax.lax.map(lambda minibatch: loss_fn(params, graphdef, minibatch), minibatches)
        return losses.mean()

    return cost(jax.jit(jax.grad(mean_loss)).lower(params, batch).compile())[1]


def plain_loss(params, graphdef, minibatch):
    return loss_fn(nnx.merge(graphdef, params), minibatch)


checkpointed_loss = jax.checkpoint(plain_loss, static_argnums=1)
kept = looped_grad_bytes(session.model, get_shapes(rows), 8, plain_loss)
recomputed = looped_grad_bytes(session.model, get_shapes(rows), 8, checkpointed_loss)
assert kept > activations * 0.9 and recomputed < 1.1 * measured[8] < kept / 3
print(f"8 minibatches, loop differentiated: {kept / measured[8]:.1f} times the memory of the step above")
print(f"the same with jax.checkpoint:       {recomputed / measured[8]:.1f} times")

# %% [markdown]
# ## `nnx.grad` costs what `jax.grad` costs
#
# [google/flax#5116](https://github.com/google/flax/issues/5116) saw twice the temporary memory with NNX
# transforms. The same full-batch step in both spellings, both donated:


# %% tags=["proof"]
@nnx.jit(donate_argnums=0)
def nnx_step(session, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(session.model, batch)
    session.optimizer.update(session.model, grads)
    return loss


graphdef, params = nnx.split(session.model)


def jax_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(plain_loss)(params, graphdef, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


jax_step = jax.jit(jax_step, donate_argnums=(0, 1))
with_nnx = cost(nnx_step.lower(session, get_shapes(rows)).compile())[1]
with_jax = cost(jax_step.lower(params, tx.init(params), get_shapes(rows)).compile())[1]
assert abs(with_nnx / with_jax - 1) < 0.01
print(f"temporary memory, nnx.grad / jax.grad: {with_nnx / with_jax:.2f}")

# %% [markdown]
# ## `optax.MultiSteps` keeps its sum between the steps
#
# It accumulates over calls, so the sum is part of the optimizer state: one more copy of the parameters, for
# any number of steps, 1 included
# ([google-deepmind/optax#528](https://github.com/google-deepmind/optax/issues/528),
# [#472](https://github.com/google-deepmind/optax/issues/472)).

# %% tags=["proof"]
for every in 1, 8:
    multi_steps = nnx.Optimizer(session.model, optax.MultiSteps(tx, every), wrt=nnx.Param)
    extra = state_bytes(multi_steps) - state_bytes(session.optimizer)
    assert parameters <= extra < parameters + 16
print(f"MultiSteps adds {extra:,} bytes of state to the parameters' {parameters:,}")

# %% [markdown]
# ## What it costs
#
# The figures are the compiler's, for the donated step with 2 and with 64 minibatches of one batch.

# %% tags=["proof"]
print(
    f"{'minibatches':>11}{'instructions':>14}{'temporary':>11}{'arguments':>11}{'outputs':>9}{'aliased':>9}"
)
for n in 2, 64:
    print(f"{n:>11}" + "".join(f"{value:>{width},}" for value, width in zip(costs[n], (14, 11, 11, 9, 9))))

assert abs(costs[64][0] / costs[2][0] - 1) < 0.1, "one body, however often it runs"
assert costs[64][1] < costs[2][1] / 5
assert costs[2][4] == costs[64][4] == state_bytes(*session)

# %% [markdown]
# ## When to prefer another recipe
#
# - The batch lies on several devices: [sharded minibatches](accumulate_sharded_minibatches.py), and the
#   [complete train step](complete_train_step.py), which donates a sharded session.
# - The loop in NNX transforms: [`nnx.scan`](accumulate_with_scan.py) or
#   [`nnx.fori_loop`](accumulate_with_fori_loop.py).
# - Accumulation that saves no memory because every minibatch is the whole batch: [`nnx.scan`, minibatches
#   that are all the whole batch](accumulate_with_scan.py#catch-minibatches-that-are-all-the-whole-batch).
