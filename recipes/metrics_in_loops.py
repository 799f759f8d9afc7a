# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Carry an nnx.MultiMetric, give it one value per row, divide once at the end, reset each epoch.
#     answers: [google/flax#262, google/flax#4722, google/flax#5051]
#     symptoms:
#       - accuracy changes with the number of minibatches
#       - mean of minibatch means instead of the mean of the rows
#       - padded rows are counted in the metric
#       - nnx.metrics.Average ignores mask
#       - metrics of an epoch hold the epochs before it
#       - a metric is nan
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # Metrics in loops
#
# Put an `nnx.MultiMetric` in the carry and give it one value for each row. It keeps sums and counts, so the
# result does not depend on how the batch was cut. `compute` divides once, and `reset` starts again from zero.

# %% tags=["snippet"]
import jax
import jax.numpy as jnp
import optax
from flax import nnx


def loss_fn(model, minibatch):
    """The loss to differentiate, and what the metrics need: one value for each row."""
    x, labels = minibatch
    logits = model(x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), {"loss": losses, "logits": logits, "labels": labels}


def merged_loss(params, rest, graphdef, minibatch):
    model = nnx.merge(graphdef, params, rest, copy=True)
    loss, values = loss_fn(model, minibatch)
    return loss, (values, nnx.state(model, nnx.Not(nnx.Param)))


def accumulate_grads(model: nnx.Module, metrics: nnx.MultiMetric, batch, num_minibatches: int):
    """Losses of the minibatches and mean gradients. Model and metrics move on in place."""
    minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    metrics_graphdef, counts = nnx.split(metrics)
    value_and_grad = jax.value_and_grad(merged_loss, has_aux=True)

    def body(carry, minibatch):
        total, rest, counts = carry
        (loss, (values, rest)), grads = value_and_grad(params, rest, graphdef, minibatch)
        metrics = nnx.merge(metrics_graphdef, counts)
        metrics.update(**values)
        return (jax.tree.map(jnp.add, total, grads), rest, nnx.state(metrics)), loss

    zeros = jax.tree.map(jnp.zeros_like, params)
    (total, rest, counts), losses = jax.lax.scan(body, (zeros, rest, counts), minibatches)
    nnx.update(model, rest)
    nnx.update(metrics, counts)
    return losses, jax.tree.map(lambda g: g / num_minibatches, total)


@nnx.jit(donate_argnames=("model", "optimizer", "metrics"), static_argnames="num_minibatches")
def train_step(model, optimizer, metrics, batch, num_minibatches: int):
    losses, grads = accumulate_grads(model, metrics, batch, num_minibatches)
    optimizer.update(model, grads)
    return losses


# %% [markdown]
# `loss_fn` is yours. A metric takes from `values` what carries its name.
#
# - **One value for each row.** The mean is for the gradient. `Average` adds up what it is given and counts
#   the elements; a mean counts as a single one.
# - **Updated in the body, not in the loss.** What happens inside `jax.value_and_grad` leaves it as aux only.
# - **`counts` is in the carry** and is written back with `nnx.update`, as the rest of the model is ([split
#   and merge](accumulate_with_split_merge.py) says why).
# - **`losses`** has the loss of each minibatch: what a loop returns beside the carry is stacked.
#
# ## Equal to the whole batch

# %%
import numpy as np


class MLP(nnx.Module):
    traces = 0

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(8, 16, rngs=rngs)
        self.outer = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        MLP.traces += 1  # runs while the step is traced, never after
        return self.outer(nnx.tanh(self.inner(x)))


def get_metrics():
    return nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())


x = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
batch = (x, np.int32(x[:, :4].argmax(axis=-1)))


# %% tags=["proof"]
def max_difference(tree, other):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return max(np.abs(np.subtract(a, b)).max() for a, b in pairs)


model = MLP(nnx.Rngs(0))
whole_batch = nnx.jit(nnx.value_and_grad(loss_fn, has_aux=True))
(full_loss, values), full_grads = whole_batch(model, batch)
full_loss, values = jax.device_get((full_loss, values))
full_accuracy = np.mean(values["logits"].argmax(axis=-1) == batch[1])
magnitudes = [np.abs(g).max() for g in jax.tree.leaves(full_grads)]
assert len(magnitudes) == 4 and min(magnitudes) > 1e-3

accumulate = nnx.jit(accumulate_grads, static_argnums=3)
for num_minibatches in 4, 32:
    metrics = get_metrics()
    losses, grads = accumulate(model, metrics, batch, num_minibatches)
    result = jax.device_get(metrics.compute())
    assert max_difference(grads, full_grads) < 1e-6
    assert metrics.loss.count[...] == metrics.accuracy.count[...] == 32, "every row counts once"
    assert abs(result["loss"] - full_loss) < 1e-6 and result["accuracy"] == full_accuracy
    of_each = values["loss"].reshape(num_minibatches, -1).mean(axis=1)
    assert losses.shape == (num_minibatches,) and max_difference(losses, of_each) < 1e-6
    print(f"{num_minibatches} minibatches: gradients, loss and accuracy are those of the full batch to 1e-06")

with_dropout = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(1)), MLP(nnx.Rngs(0)))
accumulate(with_dropout, get_metrics(), batch, 4)
(draws,) = jax.tree.leaves(nnx.state(with_dropout, nnx.RngCount))
assert draws == 4, "one dropout mask for each minibatch"

# %% [markdown]
# ## Reset each epoch
#
# The metrics go from step to step. Read them at the end of an epoch, then `reset`; the compiled step stays
# valid. Before the first update a metric is `nan`: zero divided by zero.

# %% tags=["proof"]
batches = [jax.tree.map(lambda a: np.roll(a, shift, axis=0), batch) for shift in (0, 8, 16)]
optimizer, metrics = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), get_metrics()
assert np.isnan(metrics.compute()["loss"])

losses, epoch_losses, rows, traces = [], [], [], []
for _ in range(2):
    losses.append(np.array([train_step(model, optimizer, metrics, batch, 4) for batch in batches]))
    epoch_losses.append(float(metrics.compute()["loss"]))
    rows.append(int(metrics.loss.count[...]))
    metrics.reset()
    traces.append(MLP.traces)

first, second = (float(of_epoch.mean()) for of_epoch in losses)
assert abs(epoch_losses[0] - first) < 1e-6 and abs(epoch_losses[1] - second) < 1e-6
assert rows == [96, 96] and metrics.loss.count[...] == 0
assert first - second > 1e-2, "without the reset the second result would be the mean of both"
assert traces[0] == traces[1], "the reset metrics do not compile the step again"
assert optimizer.step[...] == 6
print(f"rows in each epoch: {rows}; traced again after the reset: {traces[0] != traces[1]}")

# %% [markdown]
# ## A mean of means is wrong
#
# Evaluation seldom divides. 26 rows make three minibatches of eight and one of two, padded to eight with
# weight 0. The model here is right on all rows but the last two, so the accuracy is known without running it.
#
# `nnx.scan` carries model and metrics as they are, in both modes, on every release. A metric of your own is a
# class with `reset`, `update` and `compute`, whose arrays are `MetricState`.


# %%
class WeightedAverage(nnx.Metric):
    """Mean of the values, each as often as its weight says."""

    def __init__(self, argname: str):
        self.argname = argname
        self.total = nnx.metrics.MetricState(jnp.zeros(()))
        self.weight = nnx.metrics.MetricState(jnp.zeros(()))

    def reset(self):
        self.total[...] = jnp.zeros(())
        self.weight[...] = jnp.zeros(())

    def update(self, *, weight, **values):
        self.total[...] += jnp.sum(weight * values[self.argname])
        self.weight[...] += jnp.sum(weight)

    def compute(self):
        return self.total[...] / self.weight[...]


@nnx.jit
def evaluate(model, metrics, minibatches):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def body(carry, minibatch):
        model, metrics = carry
        x, labels, weight = minibatch
        logits = model(x)
        correct = logits.argmax(axis=-1) == labels
        mean = jnp.sum(weight * correct) / jnp.sum(weight)
        metrics.update(correct=correct, logits=logits, labels=labels, mean=mean, weight=weight)
        return model, metrics

    body((model, metrics), minibatches)


class Scale(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return self.scale[...] * x


# %% tags=["proof"]
logits = jax.nn.one_hot(jnp.arange(26) % 4, 4)
labels = (jnp.arange(26) + (jnp.arange(26) >= 24)) % 4  # the last two are wrong
weight = jnp.ones(26)
padded = [jnp.pad(a, [(0, 6)] + [(0, 0)] * (a.ndim - 1)) for a in (logits, labels, weight)]
minibatches = [a.reshape(4, 8, *a.shape[1:]) for a in padded]

metrics = nnx.MultiMetric(
    sums_and_counts=WeightedAverage("correct"),
    mean_of_means=nnx.metrics.Average("mean"),
    padding_counted=nnx.metrics.Accuracy(),
)
evaluate(Scale(), metrics, minibatches)
result = metrics.compute()
for name, value in result.items():
    print(f"{name:16}{value:6.1%}")

assert metrics.sums_and_counts.weight[...] == 26 and metrics.sums_and_counts.total[...] == 24
assert abs(result["sums_and_counts"] - 24 / 26) < 1e-6
assert abs(result["mean_of_means"] - (1 + 1 + 1 + 0) / 4) < 1e-6 and metrics.mean_of_means.count[...] == 4
assert abs(result["padding_counted"] - (24 + 6) / 32) < 1e-6, "the model is right on padding, by chance"
metrics.reset()
assert metrics.sums_and_counts.weight[...] == 0

# %% [markdown]
# The mean of means gives two rows the weight of eight
# ([google/flax#262](https://github.com/google/flax/issues/262)). With minibatches of equal size it is right,
# and breaks the day the last one is smaller. The gradients of such minibatches need the same care.
#
# ## `mask=` is ignored before Flax 0.12.6
#
# `Average` and `Accuracy` take a mask since 0.12.6. Older releases accept the argument, as they accept any
# other, and count every row. Nothing is raised, so check the count.

# %% tags=["raises-exception", "outcome"] raises=[{"error": "AssertionError", "match": "32 rows counted, 26 have weight", "flax": "<0.12.6"}]
accuracy = nnx.metrics.Accuracy()
accuracy.update(logits=padded[0], labels=padded[1], mask=padded[2] > 0)
rows = int(accuracy.count[...])
assert rows == 26, f"{rows} rows counted, 26 have weight"
assert abs(accuracy.compute() - 24 / 26) < 1e-6
print(f"{rows} rows counted")

# %% [markdown]
# ## Metrics outside of the carry
#
# A body function may not change what it closes over, which is how
# [google/flax#4722](https://github.com/google/flax/issues/4722) began. [What a loop may
# touch](what_a_loop_may_touch.py) has the rules.

# %% tags=["raises-exception"] raises=[{"error": "TraceContextError", "match": "Cannot mutate MetricState from a different trace level"}]
metrics = get_metrics()


@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def body(model, minibatch):
    _, values = loss_fn(model, minibatch)
    metrics.update(**values)
    return model


body(model, jax.tree.map(lambda a: a.reshape(4, 8, *a.shape[1:]), batch))

# %% [markdown]
# ## Values from inside the model
#
# A value that the model can return is best returned, and handed on as aux. `sow` stores a value from deep
# inside as a new attribute of its Module. Since Flax 0.12.6 it warns outside of `nnx.capture`.

# %%
import warnings


class SowingMLP(MLP):
    def __call__(self, x):
        hidden = nnx.tanh(self.inner(x))
        self.sow(nnx.Intermediate, "hidden_rms", jnp.sqrt(jnp.mean(hidden**2)))
        return self.outer(hidden)


model = SowingMLP(nnx.Rngs(0))
minibatches = jax.tree.map(lambda a: a.reshape(4, 8, *a.shape[1:]), batch)
expected = [jnp.sqrt(jnp.mean(nnx.tanh(model.inner(x)) ** 2)) for x in minibatches[0]]
assert len({round(float(value), 4) for value in expected}) == 4

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    SowingMLP(nnx.Rngs(0))(x)
print(*(str(warning.message).split(";")[0] for warning in caught) or ["no warning"])

# The cells below show what `sow` does without `nnx.capture`.
warnings.filterwarnings("ignore", message="Using 'Module.sow", category=DeprecationWarning)

# %% [markdown]
# In a carry, the new attribute is a change of structure.


# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "carry input and carry output must have the same pytree structure", "mode": "graph"}, {"error": "ValueError", "match": "different numbers of pytree children at key path", "mode": "tree"}]
@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
def body(model, minibatch):
    loss, _ = loss_fn(model, minibatch)
    return model, loss


body(SowingMLP(nnx.Rngs(0)), minibatches)

# %% [markdown]
# ### Capture in the body
#
# `nnx.capture` collects what is sown and leaves the model as it was. Return the collected state beside the
# carry, and it is stacked, one value for each minibatch. It came with Flax 0.12.6.


# %% tags=["raises-exception"] raises=[{"error": "AttributeError", "match": "has no attribute 'capture'", "flax": "<0.12.6"}]
@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0, 0))
def body(model, minibatch):
    (loss, _), sown = nnx.capture(loss_fn, nnx.Intermediate)(model, minibatch)
    return model, loss, sown


model, losses, sown = body(model, minibatches)
(hidden_rms,) = jax.tree.leaves(sown)
assert hidden_rms.shape == losses.shape == (4,)
assert max_difference(list(hidden_rms), expected) < 1e-6
assert not jax.tree.leaves(nnx.state(model, nnx.Intermediate))
print("one value for each minibatch, none left in the model")

# %% [markdown]
# ### Pop in the loss, on every release
#
# With split and merge, `nnx.pop` takes the sown values out before the model is split again. They leave the
# loss as aux and the loop as an output.


# %% tags=["proof"]
def popped_loss(params, rest, graphdef, minibatch):
    model = nnx.merge(graphdef, params, rest, copy=True)
    loss, _ = loss_fn(model, minibatch)
    sown = nnx.pop(model, nnx.Intermediate)
    return loss, (sown, nnx.state(model, nnx.Not(nnx.Param)))


@jax.jit
def sown_values(params, rest, minibatches):
    def body(rest, minibatch):
        (_, (sown, rest)), _ = jax.value_and_grad(popped_loss, has_aux=True)(
            params, rest, graphdef, minibatch
        )
        return rest, sown

    return jax.lax.scan(body, rest, minibatches)


graphdef, params, rest = nnx.split(SowingMLP(nnx.Rngs(0)), nnx.Param, ...)
rest, sown = sown_values(params, rest, minibatches)
(hidden_rms,) = jax.tree.leaves(sown)
assert hidden_rms.shape == (4,) and max_difference(list(hidden_rms), expected) < 1e-6
assert not jax.tree.leaves(rest)
print("the same values, with gradients")

# %% [markdown]
# ### `StateAxes` stacks them in graph mode
#
# With `nnx.Intermediate` on axis 0, `nnx.scan` stacks what the model sows and leaves it in the model. Before
# Flax 0.12.1 that failed when a second NNX object was carried
# ([google/flax#5051](https://github.com/google/flax/issues/5051)). Tree mode has no `StateAxes`.


# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "carry input and carry output must have the same pytree structure", "flax": "<0.12.1", "mode": "graph"}, {"error": "ValueError", "match": "`in_axes` cannot contain `StateAxes` objects", "mode": "tree"}]
axes = nnx.StateAxes({nnx.Intermediate: 0, ...: nnx.Carry})


@nnx.scan(in_axes=(axes, nnx.Carry, 0), out_axes=nnx.Carry)
def body(model, metrics, minibatch):
    _, values = loss_fn(model, minibatch)
    metrics.update(**values)
    return metrics


model, metrics = SowingMLP(nnx.Rngs(0)), get_metrics()
body(model, metrics, minibatches)
(hidden_rms,) = jax.tree.leaves(nnx.state(model, nnx.Intermediate))
assert max_difference(list(hidden_rms), expected) < 1e-6 and metrics.loss.count[...] == 32
print("one value for each minibatch in the model, metrics in the carry")

# %% [markdown]
# ## What it costs
#
# A sum and a count for each metric join the carry. The figures are the compiler's, for the step above,
# donated, with 2 and with 64 minibatches of one batch.


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


def state_bytes(node):
    return sum(a.nbytes for a in jax.tree.leaves(nnx.state(node)))


model, metrics = MLP(nnx.Rngs(0)), get_metrics()
optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
large_batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct((4096, *a.shape[1:]), a.dtype), batch)
costs = {}
print(
    f"{'minibatches':>11}{'instructions':>14}{'temporary':>11}{'arguments':>11}{'outputs':>9}{'aliased':>9}"
)
for n in 2, 64:
    lowered = train_step.lower(model, optimizer, metrics, large_batch, num_minibatches=n)
    costs[n] = cost(lowered.compile())
    print(f"{n:>11}" + "".join(f"{value:>{width},}" for value, width in zip(costs[n], (14, 11, 11, 9, 9))))

assert abs(costs[64][0] / costs[2][0] - 1) < 0.1, "one body, however often it runs"
assert costs[64][1] < costs[2][1] / 8
assert costs[2][4] == costs[64][4] == sum(state_bytes(node) for node in (model, optimizer, metrics))
assert state_bytes(metrics) == 2 * (4 + 4), "two metrics, each with a float32 sum and an int32 count"

# %% [markdown]
# ## When to prefer another recipe
#
# - A mean of equal minibatches is all you need: sum the metrics with the gradients and divide both, as the
#   [complete train step](complete_train_step.py) does.
# - Model and optimizer in an NNX loop: [`nnx.scan`](accumulate_with_scan.py) or
#   [`nnx.fori_loop`](accumulate_with_fori_loop.py).
# - The error names a trace level: [different trace level](different_trace_level.py).
# - The error names a structure: [catalogue of mismatches](structure_mismatch_catalogue.py).
