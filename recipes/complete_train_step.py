# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: A jitted, donated, sharded step over model and optimizer that accumulates and updates once.
#     answers: [google/flax#5113]
#     symptoms:
#       - optimizer updated in every minibatch instead of once per step
#       - loss curve changes with the number of minibatches
#     needs: {flax: ">=0.11.2", devices: 8}
# ---

# %% [markdown]
# # A complete train step
#
# `get_training_step(config, batch_sharding, num_minibatches)` returns a step that is jitted, donates the
# model and the optimizer, leaves every row of the batch on its device, and updates once. Without Dropout and
# BatchNorm its gradients, loss and metrics are those of the full batch, for any number of minibatches.

# %%
import jax

# Only makes this machine look like eight devices. Leave it out where there are real ones.
jax.config.update("jax_num_cpu_devices", 8)

# %% tags=["snippet"]
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True)
class Config:
    hidden: int = 128
    dropout: float = 0.2
    label_smoothing: float = 0.1


class TrainSession(NamedTuple):
    model: nnx.Module
    optimizer: nnx.Optimizer


class Metrics(NamedTuple):
    loss: jax.Array
    accuracy: jax.Array


def forward_pass(config: Config, model: nnx.Module, batch: Any) -> tuple[jax.Array, Metrics]:
    logits = model(batch["image"])
    labels = jax.nn.one_hot(batch["label"], logits.shape[-1])
    loss = optax.softmax_cross_entropy(logits, optax.smooth_labels(labels, config.label_smoothing)).mean()
    accuracy = jnp.mean(logits.argmax(axis=-1) == batch["label"])
    return loss, Metrics(loss, accuracy)


def get_sharded_minibatch(batch: Any, batch_sharding: Any, minibatch_idx: jax.Array, num_minibatches: int):
    """Rows minibatch_idx, minibatch_idx + num_minibatches, ... of every array, taken where they are.

    `batch_sharding` is one NamedSharding for the whole batch or a tree of them.
    """

    def take(x, sharding):
        rows = sharding.shard_shape(x.shape)[0]
        if rows % num_minibatches:
            raise ValueError(f"{rows} rows per device do not divide into {num_minibatches} minibatches")
        # The new axis stands behind the sharded one, so that no row leaves its device.
        x = x.reshape(-1, num_minibatches, *x.shape[1:])
        spec = P(*sharding.spec[:1], None, *sharding.spec[1:])
        x = jax.lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, spec))
        return x[:, minibatch_idx]

    return jax.tree.map(take, batch, jax.tree.broadcast(batch_sharding, batch))


def get_training_step(
    config: Config, batch_sharding: Any, num_minibatches: int = 1
) -> Callable[[Any, TrainSession], Metrics]:
    @nnx.jit(donate_argnums=1)
    def training_step(batch, train_session):
        model, optimizer = train_session
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def loss_fn(params, rest, minibatch):
            model = nnx.merge(graphdef, params, rest, copy=True)
            loss, metrics = forward_pass(config, model, minibatch)
            return loss, (metrics, nnx.state(model, nnx.Not(nnx.Param)))

        def body(minibatch_idx, carry):
            total, rest = carry
            minibatch = get_sharded_minibatch(batch, batch_sharding, minibatch_idx, num_minibatches)
            grads, (metrics, rest) = jax.grad(loss_fn, has_aux=True)(params, rest, minibatch)
            return jax.tree.map(jnp.add, total, (grads, metrics)), rest

        zeros = jax.tree.map(jnp.zeros_like, params), Metrics(jnp.zeros(()), jnp.zeros(()))
        total, rest = jax.lax.fori_loop(0, num_minibatches, body, (zeros, rest))
        grads, metrics = jax.tree.map(lambda x: x / num_minibatches, total)

        nnx.update(model, rest)
        optimizer.update(model, grads)
        return metrics

    return training_step


# %% [markdown]
# - **Carried:** the sums and `rest`, which holds what is not a parameter: random state and statistics. Each
#   minibatch starts from what the one before it left, so Dropout draws a new mask every time.
# - **Closed over:** `params`, which stay the same during the step, and `config`, `batch_sharding` and
#   `num_minibatches`, which are plain Python.
# - **Divided once:** gradients and metrics are means over minibatches of equal size. Summed together and
#   divided together, they are the means over the batch.
# - **Outside the loop:** the optimizer. It takes one step for each batch.
# - **Returned:** metrics. `nnx.jit` writes the new model and optimizer back into the session.
#
# `Config`, `Metrics` and `forward_pass` are the parts to replace. A third metric needs a third zero in
# `zeros`.
# [Split and merge](accumulate_with_split_merge.py) says why the loop is written with `jax.lax`, and
# [sharded minibatches](accumulate_sharded_minibatches.py) how the batch is cut.
#
# ## Real images on eight devices
#
# 1797 images of 8 by 8 pixels come with scikit-learn. 1280 are for training, the others are held out.

# %%
import numpy as np
from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))
train_rows, held_out_rows = order[:1280], order[1280:]
mean, std = images[train_rows].mean(), images[train_rows].std()


def select(rows):
    return {"image": np.float32((images[rows] - mean) / std), "label": np.int32(labels[rows])}


train_data, held_out = select(train_rows), select(held_out_rows)

# %% [markdown]
# The session is made on the mesh. From a session on one device, the first step would return one on all eight,
# and the second step would be compiled again.


# %%
class Net(nnx.Module):
    def __init__(self, config, rngs):
        self.inner = nnx.Linear(64, config.hidden, rngs=rngs)
        self.drop = nnx.Dropout(config.dropout, rngs=rngs)
        self.outer = nnx.Linear(config.hidden, 10, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.drop(nnx.relu(self.inner(x))))


mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
batch_sharding = NamedSharding(mesh, P("data"))


def get_train_session(config, tx):
    model = Net(config, rngs=nnx.Rngs(0))
    train_session = TrainSession(model, nnx.Optimizer(model, tx, wrt=nnx.Param))
    for node in train_session:
        nnx.update(node, jax.device_put(nnx.state(node), NamedSharding(mesh, P())))
    return train_session


def get_batches(epoch, batch_size=256):
    order = np.random.default_rng(epoch).permutation(len(train_data["label"]))
    for rows in order.reshape(-1, batch_size):
        yield jax.device_put(jax.tree.map(lambda x: x[rows], train_data), batch_sharding)


# %%
config, num_minibatches, tx = Config(), 4, optax.sgd(0.1, momentum=0.9)
training_step = get_training_step(config, batch_sharding, num_minibatches)
train_session = get_train_session(config, tx)

# %% [markdown]
# ## The old buffers are gone
#
# The session is donated: new parameters and optimizer state take the place of the old ones instead of
# standing beside them. An old array that you kept raises when it is read, so copy with
# `jax.tree.map(jnp.copy, ...)` what must outlive a step. The batch is not donated and can be used again.

# %% tags=["proof"]
import re
import warnings

batch = next(get_batches(epoch=0))
old_buffers = jax.tree.leaves([nnx.state(node) for node in train_session])

with warnings.catch_warnings():
    warnings.simplefilter("error")  # "Some donated buffers were not usable" is a warning.
    training_step(batch, train_session)

new_buffers = jax.tree.leaves([nnx.state(node) for node in train_session])
assert len(old_buffers) == len(new_buffers) > 0
assert all(buffer.is_deleted() for buffer in old_buffers)
assert not any(buffer.is_deleted() for buffer in [*new_buffers, *jax.tree.leaves(batch)])
print(f"{len(old_buffers)} of {len(new_buffers)} old buffers deleted, batch kept: True")

hlo = training_step.lower(batch, train_session).compile().as_text()
assert re.findall("(all-[a-z]+|collective-permute)\\(", hlo) == ["all-reduce"], "no row leaves its device"

# %% [markdown]
# ## Train it
#
# The step updates the session in place, so the loop around it keeps only the losses, for the plot.

# %%
import sys

from tqdm import tqdm

epochs = 10
train_session = get_train_session(config, tx)


@nnx.jit
def evaluate(model, batch):
    return forward_pass(config, model, batch)[1]


training_losses, held_out_losses = [], []
bar_format = "{desc} {bar} {n_fmt}/{total_fmt}{postfix}"
progress = tqdm(range(epochs), "epoch", file=sys.stdout, ncols=72, bar_format=bar_format)
for epoch in progress:
    train_session.model.train()
    for batch in get_batches(epoch):
        metrics = training_step(batch, train_session)
        training_losses.append(metrics.loss)  # float(metrics.loss) would wait for the step
    train_session.model.eval()
    metrics = evaluate(train_session.model, held_out)
    held_out_losses.append(float(metrics.loss))
    progress.set_postfix_str(f"held-out accuracy {metrics.accuracy:.1%}")

# %% tags=["proof"]
steps = len(training_losses)
updates = train_session.optimizer.step[...]
(masks,) = jax.tree.leaves(nnx.state(train_session.model, nnx.RngCount))
assert metrics.accuracy > 0.95
_, unsmoothed = forward_pass(Config(label_smoothing=0.0), train_session.model, held_out)
assert unsmoothed.loss < metrics.loss - 0.1, "the loss is that of smoothed labels"
assert updates == steps == epochs * 5, "one update for each batch"
assert masks == steps * num_minibatches, "one dropout mask for each minibatch"
print(f"held-out accuracy above 95%: {metrics.accuracy > 0.95}")
print(f"{steps} batches, {updates} updates, {masks} dropout masks")

# %%
import matplotlib.pyplot as plt

steps_per_epoch = steps // epochs
figure, axes = plt.subplots()
for name, every, losses, offset in (
    ("training, with dropout", 1, training_losses, 10),
    ("held out", steps_per_epoch, held_out_losses, -10),
):
    losses = np.round(losses, 3)  # enough for a plot, and free of rounding noise
    (line,) = axes.plot(range(every, steps + 1, every), losses)
    axes.annotate(
        name,
        xy=(steps, losses[-1]),
        xytext=(0, offset),
        textcoords="offset points",
        ha="right",
        va="center",
        color=line.get_color(),
    )
axes.set(xlabel="optimizer step", ylabel="cross-entropy (nats)", ylim=(0, None))
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## The same gradients for 1, 2, 4 and 8 minibatches
#
# `optax.sgd(1.0)` subtracts the gradient itself, so parameters before a step minus parameters after it are
# the gradient that the step accumulated. Dropout is off, because its masks belong to the minibatches. The
# expected gradient comes from `jax.grad` over the whole batch on one device.

# %% tags=["proof"]
without_dropout = Config(dropout=0.0)
batches = [batch for epoch in range(3) for batch in get_batches(epoch)]


def get_params(train_session):
    return jax.device_get(jax.tree.leaves(nnx.state(train_session.model, nnx.Param)))


def full_batch(params, batch):
    return forward_pass(without_dropout, nnx.merge(graphdef, params, rest, copy=True), batch)


graphdef, params, rest = nnx.split(Net(without_dropout, rngs=nnx.Rngs(0)), nnx.Param, ...)
full_grad = jax.jit(jax.grad(full_batch, has_aux=True))
expected, expected_metrics = jax.device_get(full_grad(params, jax.device_get(batches[0])))
expected = jax.tree.leaves(expected)

loss_curves = {}
for n in 1, 2, 4, 8:
    step = get_training_step(without_dropout, batch_sharding, n)
    session = get_train_session(without_dropout, optax.sgd(1.0))

    before = get_params(session)
    metrics = jax.device_get(step(batches[0], session))
    grads = [old - new for old, new in zip(before, get_params(session), strict=True)]

    assert session.optimizer.step[...] == 1
    assert len(grads) == len(expected) == 4
    for grad, full in zip(grads, expected, strict=True):
        assert abs(full).max() > 1e-2 and abs(grad - full).max() < 1e-6, "the gradient of the full batch"
    assert abs(metrics.loss - expected_metrics.loss) < 1e-6
    assert abs(metrics.accuracy - expected_metrics.accuracy) < 1e-6

    loss_curves[n] = np.array([metrics.loss] + [step(batch, session).loss for batch in batches[1:]])
    print(f"{n} minibatches: gradients, loss and accuracy of the full batch to 1e-06: True")

# %% [markdown]
# Fifteen batches later the four runs still agree. The tolerance is 1e-5 for losses that fall from above 2 to
# below 1: rounding differs with the order of the sums, and each update carries it on.

# %% tags=["proof"]
assert all(len(curve) == 15 and curve[0] > 2 and curve[-1] < 1 for curve in loss_curves.values())
spread = np.ptp(np.stack(list(loss_curves.values())), axis=0).max()
assert spread < 1e-5
print(f"loss curves of 15 steps within 1e-05 of each other: {spread < 1e-5}")

# %% [markdown]
# ## When to prefer another recipe
#
# - Only the loop, with BatchNorm: [split and merge](accumulate_with_split_merge.py). A batch normalised in
#   parts has other statistics, so its gradients are not those of the full batch.
# - The model itself in the carry of an NNX loop: [`nnx.fori_loop`](accumulate_with_fori_loop.py) or
#   [`nnx.scan`](accumulate_with_scan.py).
# - What each way to cut a sharded batch costs:
#   [accumulate over sharded minibatches](accumulate_sharded_minibatches.py).
# - Minibatches that do not weigh the same, for example by tokens: [sum and count](unequal_minibatches.py).
# - One all-reduce for a step instead of one for each minibatch: [reduce once](reduce_once_per_step.py).
# - The bytes of the step before it runs: [donate and measure memory](donate_and_measure_memory.py).
