# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Scan over row numbers with model and optimizer in the carry; shuffle and evaluate in the same jitted function.
#     answers: [google/flax#4722]
#     symptoms:
#       - every epoch has the same order of the rows
#       - the same rows are left out in every epoch
#       - learning rate is zero after the first steps
#       - a list of losses holds one tracer
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # A whole epoch in one scan
#
# Carry model and optimizer through `nnx.scan`, and hand it the shuffled row numbers. Shuffling, one update
# for each batch, and evaluation are then one compiled function, which every epoch calls again. It ends with
# the parameters of a Python loop.
#
# ## Do this

# %% tags=["snippet"]
import jax
import jax.numpy as jnp
import optax
from flax import nnx


def loss_fn(model, batch):
    x, labels = batch
    logits = model(x)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, jnp.mean(logits.argmax(axis=-1) == labels)


def merged_loss(params, rest, graphdef, batch):
    model = nnx.merge(graphdef, params, rest, copy=True)
    loss, accuracy = loss_fn(model, batch)
    return loss, (accuracy, nnx.state(model, nnx.Not(nnx.Param)))


def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    grad_fn = jax.value_and_grad(merged_loss, has_aux=True)
    (loss, (accuracy, rest)), grads = grad_fn(params, rest, graphdef, batch)
    nnx.update(model, rest)
    optimizer.update(model, grads)
    return loss, accuracy


def evaluate(model: nnx.Module, batch):
    model = nnx.clone(model)  # eval() on the model itself would outlast the call
    model.eval()
    return loss_fn(model, batch)


def shuffled_rows(key, epoch, num_rows: int, batch_size: int):
    """Row numbers, a line for each batch. Rows that do not fill one are left out."""
    order = jax.random.permutation(jax.random.fold_in(key, epoch), num_rows)
    num_steps = num_rows // batch_size
    return order[: num_steps * batch_size].reshape(num_steps, batch_size)


@nnx.jit(static_argnames="batch_size", donate_argnames=("model", "optimizer"))
def train_epoch(model, optimizer, train_data, eval_data, key, epoch, batch_size: int):
    """Losses and accuracies of the steps; loss and accuracy on `eval_data` after them."""

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def body(carry, rows):
        model, optimizer = carry
        batch = jax.tree.map(lambda a: a[rows], train_data)
        return carry, train_step(model, optimizer, batch)

    num_rows = len(jax.tree.leaves(train_data)[0])
    _, steps = body((model, optimizer), shuffled_rows(key, epoch, num_rows, batch_size))
    return steps, evaluate(model, eval_data)


# %% [markdown]
# `loss_fn` is yours. Call `train_epoch` with `epoch` 0, 1, 2 and so on, and the same `key`.
#
# - **Model and optimizer are in the carry,** and what you passed holds the changes. `train_step` [splits and
#   merges](accumulate_with_split_merge.py), so BatchNorm and Dropout run in both modes.
# - **`epoch` is an ordinary argument.** Folded into the key it gives each epoch its own order. It is not
#   static, so one program serves all epochs.
# - **The data are arguments,** and only row numbers are scanned over. The body picks its batch.
# - **Losses and accuracies are stacked,** one for each step. The batches have one size, so their mean is that
#   of the rows.
#
# ## Equal to the Python loop
#
# The digits of scikit-learn, and SGD with a cosine schedule over all steps: Adam's steps hardly depend on
# the size of the gradients and would hide a wrong scale.
# The reference calls the same step from Python, jitted.

# %%
import numpy as np
from sklearn.datasets import load_digits


class Net(nnx.Module):
    traces = 0

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(64, 32, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.outer = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        Net.traces += 1  # runs while the function is traced, never after
        return self.outer(self.drop(nnx.relu(self.norm(self.inner(x)))))


images, labels = load_digits(return_X_y=True)
images, labels = np.float32(images / 16), np.int32(labels)
key, num_rows, batch_size, num_epochs = jax.random.key(1), 1437, 64, 3
train_data = jax.device_put((images[:num_rows], labels[:num_rows]))
eval_data = jax.device_put((images[num_rows:], labels[num_rows:]))
steps_per_epoch = num_rows // batch_size
schedule = optax.cosine_decay_schedule(0.3, decay_steps=num_epochs * steps_per_epoch)


@nnx.jit
def create():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(schedule), wrt=nnx.Param)


def arrays(*nodes):
    state = nnx.state(nodes, nnx.Not(nnx.RngKey))  # random keys never change
    return [np.array(a) for a in jax.tree.leaves(state)]


def max_difference(tree, other):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return max(np.abs(a - b).max() for a, b in pairs)


# %% tags=["proof"]
jitted_step, jitted_loss = nnx.jit(train_step), nnx.jit(loss_fn)


def python_epoch(model, optimizer, key, epoch):
    steps = []
    for rows in np.array(shuffled_rows(key, epoch, num_rows, batch_size)):
        batch = jax.tree.map(lambda a: np.array(a)[rows], train_data)
        steps.append(jitted_step(model, optimizer, batch))
    return tuple(map(np.stack, zip(*steps)))


scanned, looped = create(), create()
before, history, traces = arrays(scanned[0]), [], []
for epoch in range(num_epochs):
    history.append(train_epoch(*scanned, train_data, eval_data, key, epoch, batch_size))
    traces.append(Net.traces)
for epoch, (steps, evaluated) in enumerate(history):
    assert max_difference(steps, python_epoch(*looped, key, epoch)) < 1e-5
    looped[0].eval()
    assert max_difference(evaluated, jitted_loss(looped[0], eval_data)) < 1e-5
    looped[0].train()

model, optimizer = scanned
assert len(before) == 8 and all(np.abs(a - b).max() > 1e-2 for a, b in zip(arrays(model), before))
assert len(arrays(*scanned)) == 10 and max_difference(arrays(*scanned), arrays(*looped)) < 1e-5
assert optimizer.step[...] == model.drop.rngs.count[...] == num_epochs * steps_per_epoch
assert traces[0] == traces[-1] and not model.drop.deterministic
evaluated_model = nnx.clone(model)
evaluated_model.eval()
predicted = np.array(nnx.jit(Net.__call__)(evaluated_model, eval_data[0])).argmax(axis=-1)
assert abs(evaluated[1] - np.mean(predicted == eval_data[1])) < 1e-6 and evaluated[1] > 0.8
print(f"{len(arrays(*scanned))} arrays of model and optimizer equal those of the Python loop to 1e-05")
print(f"{optimizer.step[...]} updates, as many dropout masks; traced again: {traces[0] != traces[-1]}")

# %% [markdown]
# ## All epochs in one program
#
# A scan over the epochs, as in [google/flax#4722](https://github.com/google/flax/issues/4722). Losses and
# evaluations come out when all is done, and another number of epochs is another program.


# %% tags=["proof"]
@nnx.jit(static_argnames=("num_epochs", "batch_size"))
def train(model, optimizer, train_data, eval_data, key, num_epochs: int, batch_size: int):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def body(carry, epoch):
        return carry, train_epoch(*carry, train_data, eval_data, key, epoch, batch_size)

    _, history = body((model, optimizer), jnp.arange(num_epochs))
    return history


nested = create()
(losses, _), evaluated = train(*nested, train_data, eval_data, key, num_epochs, batch_size)
assert losses.shape == (num_epochs, steps_per_epoch) and nested[1].step[...] == losses.size
assert max_difference(arrays(*nested), arrays(*looped)) < 1e-5
assert max_difference([a[-1] for a in evaluated], history[-1][1]) < 1e-5
print(f"losses: {losses.shape}; model and optimizer equal those of the Python loop to 1e-05")

# %% [markdown]
# ## Model and optimizer captured by the body
#
# Both go into the carry. In graph mode `nnx.value_and_grad` in the body raises already. In tree mode, or with
# the step above, writing to model or optimizer does. [Different trace level](different_trace_level.py) says why.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Cannot extract graph node from different trace level, got Param", "mode": "graph"}, {"error": "TraceContextError", "match": "Cannot mutate Param from a different trace level", "mode": "tree"}]
linear = nnx.Linear(64, 10, rngs=nnx.Rngs(0))
linear_optimizer = nnx.Optimizer(linear, optax.sgd(0.1), wrt=nnx.Param)
rows = np.array(shuffled_rows(key, 0, num_rows, batch_size))
batches = jax.tree.map(lambda a: np.array(a)[rows], train_data)


@nnx.scan(in_axes=0, out_axes=0)
def body(batch):
    (loss, _), grads = nnx.value_and_grad(loss_fn, has_aux=True)(linear, batch)
    linear_optimizer.update(linear, grads)
    return loss


body(batches)

# %% [markdown]
# ## Losses collected in a list or on `self`
#
# The body runs once, while it is traced. The list gets one tracer for all steps, and whatever computes with
# it later raises. Return the loss beside the carry instead. Every value that outlives its trace gives this
# message; in [felafax/felafax#55](https://github.com/felafax/felafax/issues/55) it was one of the model's.

# %% tags=["raises-exception"] raises=[{"error": "UnexpectedTracerError", "match": "Encountered an unexpected tracer. A function transformed by JAX had a side effect"}]
collected = []


@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def body(carry, batch):
    loss, _ = train_step(*carry, batch)
    collected.append(loss)
    return carry


body((linear, linear_optimizer), batches)
print(f"{len(collected)} loss for {linear_optimizer.step[...]} steps")
jnp.stack(collected)

# %% [markdown]
# ## The last batch is not full
#
# A scan takes batches of one shape.

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "cannot reshape array of shape (1437,) (size 1437) into shape (-1, 64)"}]
jax.random.permutation(key, num_rows).reshape(-1, batch_size)

# %% [markdown]
# `shuffled_rows` leaves the rows over, other ones in each epoch. To train on them too, [pad, and count the
# rows](unequal_minibatches.py#pad-first-then-cut). The evaluation has no batches and sees every row.
#
# ## The same order in every epoch
#
# Nothing raises without `fold_in`. Each epoch then has the same batches, and the rows that are left out are
# never seen.


# %% tags=["proof"]
def rows_never_seen(epochs):
    orders = [shuffled_rows(key, epoch, num_rows, batch_size) for epoch in epochs]
    assert all(len(np.unique(order)) == steps_per_epoch * batch_size for order in orders)
    return num_rows - len(np.unique(orders))


assert rows_never_seen(range(4)) == 0
print("rows never seen in 4 epochs: 0")

# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "29 rows are never seen"}]
assert not (count := rows_never_seen([0, 0, 0, 0])), f"{count} rows are never seen"

# %% [markdown]
# ## A schedule that counts epochs
#
# The optimizer asks the schedule at every update. With `num_epochs` as its length it ends after that many
# batches. The right length is `num_epochs * steps_per_epoch`. Nothing raises.

# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "the second epoch changed nothing"}]
too_short = optax.cosine_decay_schedule(0.3, decay_steps=num_epochs)
linear_optimizer = nnx.Optimizer(linear, optax.sgd(too_short), wrt=nnx.Param)
train_epoch(linear, linear_optimizer, train_data, eval_data, key, 0, batch_size)
after_first = arrays(linear)
train_epoch(linear, linear_optimizer, train_data, eval_data, key, 1, batch_size)
assert max_difference(arrays(linear), after_first) > 0, "the second epoch changed nothing"

# %% [markdown]
# ## What it costs
#
# The figures are the compiler's, for a linear model. *Copied* scans over the shuffled batches instead of the
# row numbers, and holds a second dataset while it runs. *Closed over* takes the data by name. They are then
# constants of the program, which is as large as the dataset. The time of an epoch, beside a Python loop, is
# in the [measurements](../docs/measurements.md#an-epoch-in-one-program-or-call-by-call).


# %% tags=["proof"]
@nnx.jit(static_argnames="batch_size", donate_argnames=("model", "optimizer"))
def copied_epoch(model, optimizer, train_data, eval_data, key, epoch, batch_size: int):
    def body(carry, batch):
        return carry, train_step(*carry, batch)

    body = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    order = shuffled_rows(key, epoch, len(train_data[0]), batch_size)
    _, steps = body((model, optimizer), jax.tree.map(lambda a: a[order], train_data))
    return steps, evaluate(model, eval_data)


state, data = (linear, linear_optimizer), (train_data, eval_data)
passed, copied = (f.lower(*state, *data, key, 0, batch_size=64) for f in (train_epoch, copied_epoch))
closed_over = nnx.jit(lambda *state: train_epoch(*state, *data, key, 0, 64)).lower(*state).as_text()

passed_memory, copied_memory = (way.compile().memory_analysis() for way in (passed, copied))
constants = (len(closed_over) - len(passed.as_text())) // 2  # two digits for a byte
state_bytes, data_bytes = sum(a.nbytes for a in arrays(*state)), sum(a.nbytes for a in jax.tree.leaves(data))
print(f"temporary bytes: {passed_memory.temp_size_in_bytes:,}; copied: {copied_memory.temp_size_in_bytes:,}")
print(f"closed over: {data_bytes:,} bytes of data are constants:", constants > 0.99 * data_bytes)

assert passed_memory.alias_size_in_bytes == state_bytes, "the state is updated in place"
assert data_bytes < passed_memory.argument_size_in_bytes < data_bytes + state_bytes + 100
more = copied_memory.temp_size_in_bytes - passed_memory.temp_size_in_bytes
assert more > 0.9 * sum(a.nbytes for a in batches), "the shuffled copy"
assert 0.99 * data_bytes < constants < 1.05 * data_bytes

# %% [markdown]
# ## When to prefer another recipe
#
# - The dataset does not fit on the device: call the jitted step [from Python](complete_train_step.py).
# - The batch does not fit: [accumulate](accumulate_with_split_merge.py) inside of `train_step`.
# - Other metrics, or evaluation in minibatches: [metrics in loops](metrics_in_loops.py).
