# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: "A scan of training steps that keeps an average of the parameters; and loops for an RNN, for two models, and for tied weights."
#     answers: [google/flax#4676]
#     symptoms:
#       - the EMA parameters are always equal to the trained parameters
#       - recurrent dropout has another mask at every time step
#       - train a GAN or teacher and student in one loop
#       - gradient of tied embedding and output weights
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # EMA, RNN, two models and tied weights in a loop
#
# Carry all that the loop changes: model, optimizer and average; cell and hidden state; both models and both
# optimizers. A weight that is used twice has one owner.
#
# ## Do this
#
# A scan of training steps with an exponential moving average (EMA) of the parameters, and the model to
# evaluate.

# %% tags=["snippet"]
import jax
import jax.numpy as jnp
from flax import nnx


def loss_fn(params, rest, graphdef, batch):
    model = nnx.merge(graphdef, params, rest, copy=True)
    x, y = batch
    loss = jnp.mean((model(x) - y) ** 2)
    return loss, nnx.state(model, nnx.Not(nnx.Param))


def init_ema(model: nnx.Module) -> nnx.State:
    return jax.tree.map(lambda p: jnp.array(p, jnp.float32), nnx.state(model, nnx.Param))


@nnx.jit(donate_argnums=(0, 1, 2))
def train_steps(model, optimizer, ema, batches, decay):
    """One optimizer step for each batch. Model, optimizer and average move on in place."""
    graphdef, state = nnx.split((model, optimizer))

    def body(carry, batch):
        state, average = carry
        model, optimizer = nnx.merge(graphdef, state)
        model_def, params, rest = nnx.split(model, nnx.Param, ...)
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, rest), grads = grad_fn(params, rest, model_def, batch)
        nnx.update(model, rest)
        optimizer.update(model, grads)
        params = nnx.state(model, nnx.Param)
        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, average, params)
        return (nnx.state((model, optimizer)), average), loss

    (state, average), losses = jax.lax.scan(body, (state, ema), batches)
    nnx.update((model, optimizer), state)
    nnx.update(ema, average)
    return losses


def ema_model(model: nnx.Module, ema: nnx.State) -> nnx.Module:
    """The averaged parameters with the statistics of the model."""
    graphdef, _, rest = nnx.split(model, nnx.Param, ...)
    return nnx.merge(graphdef, ema, rest, copy=True)


# %% [markdown]
# - **`jnp.array(p, jnp.float32)`** gives the average arrays of its own, in float32 whatever the model has: in
#   bfloat16 a decay of 0.999 is 1.
# - **The average is in the carry**, and is taken after the optimizer step.
# - **`copy=True`** keeps the two models apart: what one writes, the other does not see. Call `.eval()` on the
#   averaged one to evaluate it.
#
# ## The average is the one that was asked for
#
# The reference steps in a Python loop and keeps the parameters of every step. After `n` steps the average is
# `decay**n` times the first parameters plus `(1 - decay) * decay**(n - k)` times those of step `k`.

# %% tags=["proof"]
import numpy as np
import optax


def get_trainees():
    rngs = nnx.Rngs(0)
    first, norm = nnx.Linear(8, 16, use_bias=False, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
    drop, last = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
    model = nnx.Sequential(first, norm, nnx.relu, drop, last)
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def arrays(tree):
    return [np.array(a) for a in jax.tree.leaves(tree)]


def max_difference(tree, other):
    return max(np.abs(a - b).max() for a, b in zip(arrays(tree), arrays(other), strict=True))


@nnx.jit
def python_step(model, optimizer, batch):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    (_, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, rest, graphdef, batch)
    nnx.update(model, rest)
    optimizer.update(model, grads)


rng = np.random.default_rng(0)
x = rng.normal(size=(5, 16, 8)).astype(np.float32)
batches, decay, n = (x, 2 * x), 0.9, 5
looped, optimizer = get_trainees()
history = [arrays(nnx.state(looped, nnx.Param))]
for k in range(n):
    python_step(looped, optimizer, (x[k], 2 * x[k]))
    history.append(arrays(nnx.state(looped, nnx.Param)))
weights = [decay**n] + [(1 - decay) * decay ** (n - k) for k in range(1, n + 1)]
closed_form = [sum(w * p for w, p in zip(weights, leaf)) for leaf in zip(*history, strict=True)]

model, optimizer = get_trainees()
ema, first_statistics = init_ema(model), arrays(nnx.state(model, nnx.BatchStat))
donated = jax.tree.leaves((nnx.state(model), nnx.state(optimizer), ema))
losses = train_steps(model, optimizer, ema, batches, decay)
averaged = ema_model(model, ema)
assert max_difference(nnx.state(averaged, nnx.Param), ema) == 0
assert max_difference(nnx.state(averaged, nnx.BatchStat), nnx.state(model, nnx.BatchStat)) == 0
nnx.jit(nnx.Sequential.__call__)(averaged, x[0])  # moves its statistics, not those of the other
moving = nnx.Any(nnx.Param, nnx.BatchStat, nnx.RngCount)
assert losses.shape == (n,) and optimizer.step[...] == n and len(closed_form) == 5
assert max(jax.tree.leaves(nnx.state(model, nnx.RngCount))) == n, "a mask for each step"
assert max_difference(nnx.state(model, nnx.BatchStat), first_statistics) > 1e-2
assert max_difference(nnx.state(model, moving), nnx.state(looped, moving)) < 1e-6
assert max_difference(ema, closed_form) < 1e-6 and all(a.is_deleted() for a in donated)
for a, first, last in zip(arrays(ema), history[0], history[n], strict=True):
    assert min(np.abs(a - first).max(), np.abs(a - last).max()) > 1e-3
half = nnx.Linear(2, 2, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
assert {a.dtype.name for a in arrays(init_ema(half))} == {"float32"}, "and so it stays in the scan"
print(f"{n} steps, {len(closed_form)} leaves: parameters, statistics and average equal to 1e-06")

# %% [markdown]
# ## The average starts without a copy
#
# `nnx.state` hands over the Variables of the model itself. Tree mode refuses the same Variable in two
# arguments. Graph mode runs, and the average is the model. `nnx.clone`, which the message advises, makes new
# Variables around the same arrays, and
# [donation refuses those](donate_and_measure_memory.py#a-clone-shares-its-arrays).

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Duplicate Param", "mode": "tree"}]
aliased, optimizer = get_trainees()
no_copy = nnx.state(aliased, nnx.Param)
train_steps(aliased, optimizer, no_copy, batches, decay)
print("difference of average and model:", max_difference(no_copy, nnx.state(aliased, nnx.Param)))

# %% [markdown]
# ## `nnx.merge` with a state that overlaps
#
# `nnx.merge` puts together states that have nothing in common, as `ema_model` does. One cannot replace a
# part of another ([google/flax#4676](https://github.com/google/flax/issues/4676)). It sorts the leaves by
# path, and where two have the same path it compares the Variables.

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "'<' not supported between instances of 'Param' and 'Param'", "flax": "<0.12"}, {"error": "ValueError", "match": "The truth value of an array with more than one element is ambiguous", "flax": ">=0.12"}]
graphdef, state = nnx.split(model)
nnx.merge(graphdef, state, ema)

# %% [markdown]
# With the same Variables a second time it gets further.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Incorrect number of leaves, expected 9 leaves, but got 14."}]
nnx.merge(graphdef, state, nnx.state(model, nnx.Param))

# %% [markdown]
# `nnx.merge_state` lets the last state win.

# %% tags=["proof"]
for states, expected in ((state, ema), ema), ((ema, state), nnx.state(model, nnx.Param)):
    merged = nnx.merge(graphdef, nnx.merge_state(*states))
    assert max_difference(nnx.state(merged, nnx.Param), expected) == 0
print("the average last: averaged model; the average first: trained model")


# %% [markdown]
# ## An RNN over time
#
# A loop over time carries the cell and the hidden state; `nnx.RNN` is that loop. Accumulation goes around it:
# the outer loop takes the gradient of the whole time loop, for one minibatch of rows. Time is the leading
# axis.


# %%
def scan_over_time(cell, x):
    def body(carry, x):
        cell, hidden = carry
        hidden, y = cell(hidden, x)
        return (cell, hidden), y

    hidden = cell.initialize_carry(x[0].shape, nnx.Rngs(0))
    return nnx.scan(body)((cell, hidden), x)[1]


def accumulate_grads(model, loss, minibatches):
    """Mean loss and gradients, for a model that the loss does not change."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    num_minibatches = len(jax.tree.leaves(minibatches)[0])

    def merged_loss(params, minibatch):
        return loss(nnx.merge(graphdef, params, rest, copy=True), minibatch)

    def body(total, minibatch):
        new = jax.value_and_grad(merged_loss)(params, minibatch)
        return jax.tree.map(lambda a, b: a + b / num_minibatches, total, new), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(body, zeros, minibatches)[0]


# %% tags=["proof"]
def python_loop_over_time(cell, x):
    hidden, ys = cell.initialize_carry(x[0].shape, nnx.Rngs(0)), []
    for x_t in x:
        hidden, y = cell(hidden, x_t)
        ys.append(y)
    return jnp.stack(ys)


def loss_over_time(over_time):
    return lambda cell, x: jnp.mean((over_time(cell, x) - x[..., :1]) ** 2)


x = rng.normal(size=(3, 8, 4)).astype(np.float32)
minibatches = x.reshape(3, 4, 2, 4).swapaxes(0, 1)  # minibatch, time, rows, features
cell = nnx.GRUCell(4, 6, rngs=nnx.Rngs(0))
rnn = nnx.RNN(cell, time_major=True)
expected = accumulate_grads(cell, loss_over_time(python_loop_over_time), x[None])
in_scan = accumulate_grads(cell, loss_over_time(scan_over_time), x[None])
in_rnn = accumulate_grads(rnn, loss_over_time(lambda rnn, x: rnn(x)), minibatches)
assert len(arrays(expected)) == 4 and min(np.abs(a).max() for a in arrays(expected)) > 1e-3
assert max(max_difference(in_scan, expected), max_difference(in_rnn, expected)) < 1e-6
print("loss and 3 gradients equal those of a Python loop to 1e-06:")
print("nnx.scan over time, and nnx.RNN over time in a loop over 4 minibatches")

# %% [markdown]
# ### Recurrent dropout: a mask for each time step, or one
#
# This cell drops out its hidden state; the zeros in its output are the mask. Each time step draws one.
# `broadcast_rngs` names the stream that is drawn from once for a sequence. The stream must exist:
# `nnx.Rngs(0)` has none of that name, Dropout takes the default stream, and `broadcast_rngs` does nothing.


# %% tags=["proof"]
class DropoutGRU(nnx.GRUCell):
    def __init__(self, in_features: int, hidden_features: int, *, rngs: nnx.Rngs):
        super().__init__(in_features, hidden_features, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rng_collection="recurrent", rngs=rngs)

    def __call__(self, carry, x):
        h = self.drop(super().__call__(carry, x)[0])
        return h, h


def over_time(rngs, **kwargs):
    return nnx.RNN(DropoutGRU(4, 6, rngs=rngs), time_major=True, **kwargs)


carried = DropoutGRU(4, 6, rngs=nnx.Rngs(0, recurrent=1))
for title, run, expected in (
    ("nnx.scan", lambda x: scan_over_time(carried, x), 3),
    ("nnx.RNN", over_time(nnx.Rngs(0, recurrent=1)), 3),
    ("broadcast_rngs", over_time(nnx.Rngs(0, recurrent=1), broadcast_rngs="recurrent"), 1),
    ("broadcast_rngs, no such stream", over_time(nnx.Rngs(0), broadcast_rngs="recurrent"), 3),
):
    dropped = np.array(run(x)) == 0
    masks = len(np.unique(dropped, axis=0))
    assert masks == expected and 0.2 < dropped.mean() < 0.8
    print(f"{title:31} masks in 3 time steps: {masks}")

# %% [markdown]
# ### Tree mode: `nnx.grad` of an `nnx.RNN`
#
# An `nnx.RNN` has a random stream for the first hidden state, and tree mode differentiates every leaf. Split
# off the parameters, as above.

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "grad requires real- or complex-valued inputs", "mode": "tree"}]
grads = nnx.jit(nnx.grad(lambda rnn: jnp.mean(rnn(x) ** 2)))(rnn)
print("gradients:", len(arrays(grads)))


# %% [markdown]
# ## Two models at once
#
# Both models and both optimizers are in the carry. `nnx.grad` differentiates the first argument, so each loss
# begins with the model that it trains.


# %%
def discriminator_loss(discriminator, generator, batch):
    real, noise = batch
    fake = discriminator(generator(noise))
    return jnp.mean(nnx.softplus(-discriminator(real)) + nnx.softplus(fake))


def generator_loss(generator, discriminator, batch):
    return jnp.mean(nnx.softplus(-discriminator(generator(batch[1]))))


def gan_step(carry, batch):
    generator, discriminator, generator_optimizer, discriminator_optimizer = carry
    grads = nnx.grad(discriminator_loss)(discriminator, generator, batch)
    discriminator_optimizer.update(discriminator, grads)
    loss, grads = nnx.value_and_grad(generator_loss)(generator, discriminator, batch)
    generator_optimizer.update(generator, grads)
    return carry, loss


# %% [markdown]
# The reference has no NNX transform and no optimizer: a Python loop moves two States by hand. The generator
# meets the discriminator that was updated just before.

# %% tags=["proof"]
models = nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 1, rngs=nnx.Rngs(1))
(g_def, g), (d_def, d) = map(nnx.split, models)
g, d = before = jax.tree.map(jnp.copy, (g, d))
real = 1 + rng.normal(size=(5, 8, 16)).astype(np.float32)
noise = rng.normal(size=(5, 8, 8)).astype(np.float32)
batches = (real, noise)


@jax.jit
def reference_step(g, d, batch):
    grads = jax.grad(lambda d: discriminator_loss(nnx.merge(d_def, d), nnx.merge(g_def, g), batch))(d)
    d = jax.tree.map(lambda p, grad: p - 0.1 * grad, d, grads)
    grads = jax.grad(lambda g: generator_loss(nnx.merge(g_def, g), nnx.merge(d_def, d), batch))(g)
    return jax.tree.map(lambda p, grad: p - 0.1 * grad, g, grads), d


for batch in zip(*batches):
    g, d = reference_step(g, d, batch)
optimizers = [nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param) for model in models]
_, losses = nnx.scan(gan_step)((*models, *optimizers), batches)
assert losses.shape == (5,) and [int(optimizer.step[...]) for optimizer in optimizers] == [5, 5]
for model, expected, first in zip(models, (g, d), before):
    assert len(arrays(expected)) == 2 and max_difference(nnx.state(model), expected) < 1e-6
    assert max_difference(expected, first) > 1e-2
generator, discriminator = models
first_generator = nnx.merge(g_def, before[0])
assert discriminator(generator(noise)).mean() > discriminator(first_generator(noise)).mean() + 1e-3
print("5 alternate steps: both models equal those of the Python loop to 1e-06")


# %% [markdown]
# ### One loss for both
#
# The gradient of the sum reaches both models through both losses. Cut the model that a loss must not train. A
# student that learns from `jax.lax.stop_gradient(teacher(x))` is the same case.


# %% tags=["proof"]
def joint_loss(generator, discriminator, batch, cut):
    cut_generator, cut_discriminator = jax.tree.map(cut, (generator, discriminator))
    loss = discriminator_loss(discriminator, cut_generator, batch)
    return loss + generator_loss(generator, cut_discriminator, batch)


g_grads = nnx.jit(nnx.grad(generator_loss))(generator, discriminator, batch)
d_grads = nnx.jit(nnx.grad(discriminator_loss))(discriminator, generator, batch)
both_grads = nnx.jit(nnx.grad(joint_loss, argnums=(0, 1)), static_argnums=3)
for title, cut in ("as it is", lambda a: a), ("stop_gradient", jax.lax.stop_gradient):
    joint = both_grads(generator, discriminator, batch, cut)
    differences = [max_difference(*pair) for pair in zip(joint, (g_grads, d_grads))]
    own = max(differences) < 1e-6
    assert own == (title == "stop_gradient") and (own or min(differences) > 1e-3)
    print(f"{title:13} gradients of both models are those of their own losses: {own}")


# %% [markdown]
# ## Tied weights
#
# Embedding and output layer share a matrix. Give it one owner and use it through a method: `nnx.Embed` has
# `attend`. Then it is one leaf, for the gradient, for the optimizer and in every loop.


# %%
class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(7, 4, rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(nnx.tanh(self.embed(tokens)))


class TwoNames(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(7, 4, rngs=rngs)
        self.head = self.embed

    def __call__(self, tokens):
        return self.head.attend(nnx.tanh(self.embed(tokens)))


# %% tags=["proof"]
def next_token_loss(model, tokens):
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


untied = TwoNames(nnx.Rngs(0))
untied.head = Tied(nnx.Rngs(0)).embed  # equal numbers, two Params
tokens = rng.integers(0, 7, size=(4, 2, 6), dtype=np.int32)
tied_loss, tied_grad = arrays(accumulate_grads(Tied(nnx.Rngs(0)), next_token_loss, tokens))
loss, *grads = arrays(accumulate_grads(untied, next_token_loss, tokens))
assert len(grads) == 2 and min(np.abs(g).max() for g in grads) > 1e-3
assert abs(loss - tied_loss) < 1e-6 and np.abs(tied_grad - sum(grads)).max() < 1e-6
print("one leaf; its gradient is the sum of both uses to 1e-06")

# %% [markdown]
# ### Two layers hold the same Param
#
# Graph mode finds one Param under two names. Tree mode refuses it: in `nnx.split`, in `nnx.Optimizer`, in
# [`nnx.scan`](module_changes_in_a_loop.py#tree-mode-nnxscan-two-layers-share-a-param).

# %% tags=["raises-exception", "outcome"] raises=[{"error": "ValueError", "match": "Duplicate Param", "mode": "tree"}]
_, grad = arrays(accumulate_grads(TwoNames(nnx.Rngs(0)), next_token_loss, tokens))
assert np.abs(grad - tied_grad).max() < 1e-6
print("one leaf, and its gradient is the sum of both uses")

# %% [markdown]
# ### `jax.grad` of that model
#
# JAX does not know that two leaves are one Param, in either mode. Nothing raises, and neither gradient is
# right.

# %% tags=["proof"]
rows = tokens.reshape(8, 6)
grads = arrays(jax.jit(jax.grad(next_token_loss))(TwoNames(nnx.Rngs(0)), rows))
assert len(grads) == 2 and min(np.abs(g - tied_grad).max() for g in grads) > 1e-3
assert np.abs(sum(grads) - tied_grad).max() < 1e-6
print("two gradients; only their sum is that of the Param")

# %% [markdown]
# ## When to prefer another recipe
#
# - Minibatches in one optimizer step: [split and merge](accumulate_with_split_merge.py).
# - One of two models has BatchNorm or Dropout, and tree mode must run: split it as in the snippet, or see
#   [BatchNorm and Dropout](batchnorm_and_dropout.py).
# - What may be in a carry, and how often: [what a loop may touch](what_a_loop_may_touch.py).
