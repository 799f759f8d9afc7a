# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: "What a transform changes is its argument. Around jax.grad, jax.vmap and jax.lax: split outside, merge inside, return the state."
#     answers: [google/flax#4720, maxencefaldor/cax#17, google/flax#4695, google/flax#3997, google/flax#4847, google/flax#4734, google/flax#5050, google-deepmind/mujoco#1207]
#     symptoms:
#       - jax.jit runs and the model does not change
#       - the loss is a tracer after the step
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # `Cannot mutate` or `Cannot extract graph node` from a different trace level
#
# Hand a Module to the transform that changes it: as an argument, or in the carry of a loop. NNX transforms
# bring the changes back. JAX transforms do not: split before them, merge with `copy=True` inside, and return
# the state.
#
# ## A step that keeps both rules

# %% tags=["snippet"]
import jax
import jax.numpy as jnp
from flax import nnx


def loss_fn(params, rest, graphdef, x, y):
    model = nnx.merge(graphdef, params, rest, copy=True)
    loss = jnp.mean((model(x) - y) ** 2)
    return loss, nnx.state(model, nnx.Not(nnx.Param))


@nnx.jit
def train_step(model, optimizer, x, y):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    (loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, rest, graphdef, x, y)
    nnx.update(model, rest)
    optimizer.update(model, grads)
    return loss


# %% [markdown]
# `nnx.jit` is an NNX transform. Model and optimizer are its arguments, and after the call they hold what the
# step changed. `jax.value_and_grad` is a JAX transform. Arrays go in, the loss makes a model of its own, and
# the state comes out as a result.
#
# ## Every change arrives
#
# The reference is the same step without `nnx.jit`. There the call of the model moves batch statistics and
# random stream in place, and nothing is written back.

# %%
import numpy as np
import optax


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.dropout(nnx.relu(self.norm(self.inner(x)))))


def create():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def arrays(tree):
    """The leaves as NumPy arrays, random keys as the integers they hold."""

    def is_key(a):
        return jnp.issubdtype(a.dtype, jax.dtypes.prng_key)

    return [np.array(jax.random.key_data(a) if is_key(a) else a) for a in jax.tree.leaves(tree)]


grad = jax.jit(jax.grad(loss_fn, has_aux=True), static_argnums=2)


def plain_step(model, optimizer, x, y):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    grads, _ = grad(params, rest, graphdef, x, y)
    predicted = np.array(model(x))
    optimizer.update(model, grads)
    return np.mean((predicted - np.array(y)) ** 2)


x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 16, 3)), jnp.float32)
y = x.sum(-1, keepdims=True)

# %% tags=["proof"]
expected, expected_optimizer = create()
before = arrays(nnx.state(expected))
expected_losses = [plain_step(expected, expected_optimizer, x[i], y[i]) for i in range(4)]


def check(model, optimizer):
    """Four steps were taken: compare parameters, statistics and random state with the plain steps."""
    after = arrays(nnx.state(model))
    pairs = list(zip(after, arrays(nnx.state(expected)), strict=True))
    assert len(pairs) == 10 and max(np.abs(a.astype(float) - b).max() for a, b in pairs) < 1e-6
    # The random key stays, and so may the bias that BatchNorm subtracts again.
    assert sum(not np.array_equal(a, b) for a, b in zip(after, before)) >= 8
    assert optimizer.step[...] == 4 and model.dropout.rngs.count[...] == 4
    return f"{len(pairs)} arrays equal those of 4 plain steps"


model, optimizer = create()
losses = [train_step(model, optimizer, x[i], y[i]) for i in range(4)]
assert np.allclose(losses, expected_losses, atol=1e-6)
print(check(model, optimizer))

# %% [markdown]
# ## Why a Variable knows its trace
#
# JAX calls your function once, with tracers in place of arrays, and records what it does. After that call a
# tracer is of no use. A Variable that was made outside would keep it, so Flax lets a Variable be written only
# at the trace level at which it was made. Reading is free.
#
# In graph mode an NNX transform also takes the Module apart and writes it back, so it refuses a Module of
# another level even where your code only reads. Tree mode does not refuse it.
#
# ## The loop does not carry what its body changes
#
# The class in the message says which kind of state it is. The remedy is one for all: [carry
# it](#carry-everything-that-changes).
#
# ### A counter outside of the loop


# %%
class Count(nnx.Variable):
    pass


class Counter(nnx.Module):
    def __init__(self):
        self.count = Count(jnp.zeros(()))

    def __call__(self, x):
        self.count[...] += 1
        return x

    def body(self, i, total):
        return total + self(1.0)


counter = Counter()

# %% tags=["raises-exception"] raises=[{"error": "TraceContextError", "match": "Cannot mutate Count from a different trace level"}]
nnx.fori_loop(0, 4, lambda i, total: total + counter(1.0), 0.0)

# %% [markdown]
# ### A bound method as loop body
#
# `self` is closed over like any other name.

# %% tags=["raises-exception"] raises=[{"error": "TraceContextError", "match": "Cannot mutate Count from a different trace level"}]
nnx.fori_loop(0, 4, counter.body, 0.0)

# %% [markdown]
# ### BatchNorm outside of the loop

# %% tags=["raises-exception"] raises=[{"error": "TraceContextError", "match": "Cannot mutate BatchStat from a different trace level"}]
norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
nnx.scan(lambda total, minibatch: (total + norm(minibatch).sum(), None))(0.0, x)

# %% [markdown]
# ### Dropout or Rngs outside of the loop
#
# Drawing a random number counts the draw.

# %% tags=["raises-exception"] raises=[{"error": "TraceContextError", "match": "Cannot mutate RngStream from a different trace level", "flax": "<0.12"}, {"error": "TraceContextError", "match": "Cannot mutate RngCount from a different trace level", "flax": ">=0.12"}]
dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
jax.lax.fori_loop(0, 4, lambda i, total: total + dropout(x[i]).sum(), 0.0)

# %% [markdown]
# ### A metric outside of the loop

# %% tags=["raises-exception"] raises=[{"error": "TraceContextError", "match": "Cannot mutate MetricState from a different trace level"}]
metric = nnx.metrics.Average("loss")


def body(i, total):
    metric.update(loss=x[i].mean())
    return total


nnx.fori_loop(0, 4, body, 0.0)

# %% [markdown]
# ### The optimizer outside of the loop
#
# The model is carried, the optimizer is not. With `optax.sgd`, whose only state is the step, the class is
# `OptState`.

# %% tags=["raises-exception"] raises=[{"error": "TraceContextError", "match": "Cannot mutate OptArray from a different trace level"}]
linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(linear, optax.adam(0.1), wrt=nnx.Param)


def body(i, linear):
    grads = jax.tree.map(jnp.ones_like, nnx.state(linear, nnx.Param))
    optimizer.update(linear, grads)
    return linear


nnx.fori_loop(0, 4, body, linear)

# %% [markdown]
# ### Carry everything that changes
#
# The body calls the jitted step from above: NNX transforms may stand inside each other.


# %% tags=["proof"]
def body(i, carry):
    model, optimizer, metric = carry
    metric.update(loss=train_step(model, optimizer, x[i], y[i]))
    return model, optimizer, metric


model, optimizer = create()
metric = nnx.metrics.Average("loss")
nnx.fori_loop(0, 4, body, (model, optimizer, metric))
assert metric.count[...] == 4
print(check(model, optimizer))

# %% [markdown]
# ## The jitted function is not given what it changes
#
# ### `nnx.jit` of a Module

# %% tags=["raises-exception"] raises=[{"error": "TraceContextError", "match": "Cannot mutate Count from a different trace level"}]
nnx.jit(counter)(1.0)

# %% [markdown]
# ### `nnx.jit` of a bound method
#
# Newer releases say what to write instead.

# %% tags=["raises-exception"] raises=[{"error": "TraceContextError", "match": "Cannot mutate Count from a different trace level", "flax": "<0.12.1"}, {"error": "ValueError", "match": "nnx.jit does not support bound methods", "flax": ">=0.12.1"}]
nnx.jit(counter.__call__)(1.0)

# %% [markdown]
# The function of the class takes the Module as its first argument.

# %%
counter = Counter()
nnx.jit(Counter.__call__)(counter, 1.0)
assert counter.count[...] == 1
print("count after one call:", int(counter.count[...]))


# %% [markdown]
# ### `optimizer.update` in a jitted closure
#
# A trainer that keeps model and optimizer on `self` and jits a function that reaches for them. `nnx.jit` in
# place of `jax.jit` changes nothing.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Cannot extract graph node from different trace level, got Param", "mode": "graph"}, {"error": "TraceContextError", "match": "Cannot mutate Param from a different trace level", "mode": "tree"}]
class Trainer:
    def __init__(self):
        self.model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.adam(0.1), wrt=nnx.Param)

        @jax.jit
        def update(x):
            grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(self.model)
            self.optimizer.update(self.model, grads)

        self.update = update


Trainer().update(x[0])


# %% [markdown]
# ### `nnx.jit` on a method of a plain class
#
# Now `self` is the argument, and JAX does not know how to take it apart.


# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "The problematic value is of type <class '__main__.Trainer'>"}]
class Trainer:
    def __init__(self):
        self.model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.adam(0.1), wrt=nnx.Param)

    @nnx.jit
    def update(self, x):
        grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(self.model)
        self.optimizer.update(self.model, grads)


Trainer().update(x[0])


# %% [markdown]
# A trainer that is a Module mends both.


# %%
class Trainer(nnx.Module):
    def __init__(self):
        self.model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.model, optax.adam(0.1), wrt=nnx.Param)

    @nnx.jit
    def update(self, x):
        grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(self.model)
        self.optimizer.update(self.model, grads)


trainer = Trainer()
trainer.update(x[0])
assert trainer.optimizer.step[...] == 1 and np.any(trainer.model.bias[...] != 0)
print("optimizer step:", int(trainer.optimizer.step[...]))


# %% [markdown]
# ### A plain attribute of the Module is set
#
# The message names the Module, because it is the Module that would keep the tracer.


# %% tags=["raises-exception"] raises=[{"error": "TraceContextError", "match": "Cannot mutate 'Scale' from different trace level"}]
class Scale(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(3))

    def __call__(self, x):
        self.mean = x.mean()
        return x * self.scale[...]


scale = Scale()
nnx.jit(lambda x: scale(x))(x)


# %% [markdown]
# Make a Variable of it in `__init__` and pass the Module in. That works in tree mode too, where a new value
# of a plain attribute does not leave the transform.


# %%
class Scale(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(3))
        self.mean = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.mean[...] = x.mean()
        return x * self.scale[...]


scale = Scale()
nnx.jit(lambda scale, x: scale(x))(scale, x)
assert abs(scale.mean[...] - x.mean()) < 1e-6
print("the mean is on the Module")


# %% [markdown]
# ### `jax.jit` changes a Module and nothing raises
#
# A Module is a pytree, so `jax.jit` takes one. The function changes a copy, and the copy is gone when it
# returns. One assertion after the first step tells.


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "the count is 0 after one step"}]
@jax.jit
def step(counter, x):
    counter(x)


counter = Counter()
step(counter, 1.0)
assert counter.count[...] == 1, f"the count is {counter.count[...]:g} after one step"


# %% [markdown]
# Use `nnx.jit`, or return the state and write it back.


# %%
@jax.jit
def step(counter, x):
    counter(x)
    return nnx.state(counter)


nnx.update(counter, step(counter, 1.0))
assert counter.count[...] == 1
print("count after one step:", int(counter.count[...]))

# %% [markdown]
# ## Another transform stands around NNX code
#
# ### `jax.vmap` around a method that is jitted with `nnx.jit`
#
# In graph mode `nnx.jit` writes back every Variable that it was given, also one that did not change.


# %%
class Renderer(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(3))

    @nnx.jit
    def render(self, x):
        return x * self.scale[...]


renderer = Renderer()

# %% tags=["raises-exception"] raises=[{"error": "TraceContextError", "match": "Cannot mutate Param from a different trace level", "mode": "graph"}]
print("shape:", jax.vmap(renderer.render)(x).shape)

# %% [markdown]
# ### After that error the Module has lost its attributes
#
# In graph mode the failed call has emptied it: `nnx.state` of it is empty, and every later use fails in
# another way. In a notebook, make the Module anew before you try again.

# %% tags=["raises-exception"] raises=[{"error": "AttributeError", "match": "'Renderer' object has no attribute 'scale'", "mode": "graph"}]
print("Variables left:", len(jax.tree.leaves(nnx.state(renderer))))
print("shape:", renderer.render(x).shape)

# %% [markdown]
# ### `nnx.vmap`, or a merge inside
#
# Pass the Module to `nnx.vmap` as an argument that is not mapped, or split it and merge it inside of
# `jax.vmap`.

# %%
renderer = Renderer()
graphdef, state = nnx.split(renderer)
mapped = nnx.vmap(Renderer.render, in_axes=(None, 0))(renderer, x)
merged = jax.vmap(lambda x: nnx.merge(graphdef, state, copy=True).render(x))(x)
assert mapped.shape == (4, 16, 3) and np.array_equal(mapped, x) and np.array_equal(merged, x)
print("both shapes:", mapped.shape)

# %% [markdown]
# ### `jax.grad` around `nnx.merge` without `copy=True`
#
# `jax.grad` makes tracers of the argument that it differentiates and hands over the others as they are. The
# Variables in `rest` belong to the level outside.

# %% tags=["raises-exception"] raises=[{"error": "TraceContextError", "match": "Cannot mutate RngStream from a different trace level", "flax": "<0.12"}, {"error": "TraceContextError", "match": "Cannot mutate RngCount from a different trace level", "flax": ">=0.12"}]
graphdef, params, rest = nnx.split(nnx.Sequential(linear, dropout), nnx.Param, ...)
jax.grad(lambda params, rest: jnp.mean(nnx.merge(graphdef, params, rest)(x[0])))(params, rest)

# %% [markdown]
# The loss of the snippet merges with `copy=True` and returns the new state. [Accumulate gradients with split
# and merge](accumulate_with_split_merge.py) carries that state from one minibatch to the next.
#
# ### `jax.custom_vjp` whose forward pass writes a statistic
#
# The forward pass is traced at a level of its own when a gradient is taken, and only then.


# %%
class Quantized(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(3))
        self.absmax = Count(jnp.zeros(()))

    def __call__(self, x):
        @jax.custom_vjp
        def observe(x):
            return forward(x)[0]

        def forward(x):
            self.absmax[...] = jnp.max(jnp.abs(x))
            return x, None

        observe.defvjp(forward, lambda _, g: (g,))
        return observe(x * self.scale[...])


quantized = Quantized()
quantized(x)
print("without a gradient the statistic is written:", bool(quantized.absmax[...] > 0))

# %% tags=["raises-exception"] raises=[{"error": "TraceContextError", "match": "Cannot mutate Count from a different trace level", "mode": "graph"}, {"error": "UnexpectedTracerError", "match": "Encountered an unexpected tracer", "mode": "tree"}]
nnx.grad(lambda model, x: jnp.sum(model(x)))(quantized, x)


# %% [markdown]
# Return the statistic from the function and write it outside.


# %%
@jax.custom_vjp
def observe(x):
    return x, jnp.max(jnp.abs(x))


observe.defvjp(lambda x: (observe(x), None), lambda _, g: (g[0],))


class Quantized(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(3))
        self.absmax = Count(jnp.zeros(()))

    def __call__(self, x):
        x, self.absmax[...] = observe(x * self.scale[...])
        return x


quantized = Quantized()
grads = nnx.grad(lambda model, x: jnp.sum(model(x)))(quantized, x)
(grad,) = jax.tree.leaves(nnx.state(grads, nnx.Param))
assert quantized.absmax[...] == jnp.max(jnp.abs(x)) and np.abs(grad - x.sum((0, 1))).max() < 1e-5
print("statistic written, gradient right")

# %% [markdown]
# ### `nnx.eval_shape` of a model with BatchNorm

# %% tags=["raises-exception"] raises=[{"error": "TraceContextError", "match": "Cannot mutate BatchStat from a different trace level"}]
nnx.eval_shape(norm, x[0])

# %% [markdown]
# The model is an argument here too. Its statistics stay as they are.

# %%
shape = nnx.eval_shape(lambda norm, x: norm(x), norm, x[0])
assert shape.shape == (16, 3) and np.all(norm.mean[...] == 0)
print("shape:", shape.shape)

# %% [markdown]
# ## The body only reads the model, and it is refused
#
# ### `nnx.value_and_grad` of a model that the loop does not carry
#
# Graph mode takes the model apart to differentiate it, which it does not do at another level.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Cannot extract graph node from different trace level, got Param", "mode": "graph"}]
def body(total, minibatch):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(minibatch) ** 2))(linear)
    return total + loss, None


total, _ = nnx.scan(body)(0.0, x)
print("loss is finite:", bool(jnp.isfinite(total)))


# %% [markdown]
# Carry the model, or take the gradient with `jax.value_and_grad`, which leaves the model where it is. The
# second is for a model that the forward pass does not change.


# %%
def body(total, minibatch):
    loss, grads = jax.value_and_grad(lambda model: jnp.mean(model(minibatch) ** 2))(linear)
    return total + loss, None


total, _ = nnx.scan(body)(0.0, x)
assert abs(total - sum(jnp.mean(linear(x[i]) ** 2) for i in range(4))) < 1e-5
print("loss is that of a Python loop")

# %% [markdown]
# ## A tracer got out
#
# Python lists and plain objects have no guard. JAX notices when the tracer is used.
#
# ### Losses are appended to a Python list
#
# The body is traced, it does not run four times. The list gets what the trace put there.

# %% tags=["raises-exception"] raises=[{"error": "UnexpectedTracerError", "match": "Encountered an unexpected tracer"}]
losses = []


def body(i, linear):
    losses.append(jnp.mean(linear(x[i]) ** 2))
    return linear


nnx.fori_loop(0, 4, body, linear)
jnp.stack(losses).mean()

# %% [markdown]
# ### A loss is kept on `self` and printed after the step
#
# Formatting a tracer fails before JAX can say what it is.


# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "unsupported format string passed to DynamicJaxprTracer.__format__"}]
class Trainer:
    def fit(self, linear, x):
        @nnx.jit
        def step(linear, x):
            self.loss = jnp.mean(linear(x) ** 2)

        step(linear, x)


trainer = Trainer()
trainer.fit(linear, x[0])
f"{trainer.loss:.3f}"


# %% [markdown]
# What you want to keep is a result: of the jitted step, or the second result of the body of a scan.


# %%
def body(linear, minibatch):
    return linear, jnp.mean(linear(minibatch) ** 2)


_, losses = nnx.scan(body)(linear, x)
assert losses.shape == (4,) and len(set(losses.tolist())) == 4
print("losses:", losses.shape)

# %% [markdown]
# ## Python needs a value that is not there yet
#
# ### `if` on a traced loss


# %% tags=["raises-exception"] raises=[{"error": "TracerBoolConversionError", "match": "Attempted boolean conversion of traced array with shape bool[]"}]
@nnx.jit
def clipped_loss(linear, x):
    loss = jnp.mean(linear(x) ** 2)
    if loss > 1.0:
        loss = jnp.ones_like(loss)
    return loss


clipped_loss(linear, x[0])

# %% [markdown]
# `jnp.where` for a value, `nnx.cond` for a choice between computations that touch Modules.


# %%
@nnx.jit
def clipped_loss(linear, x):
    loss = jnp.mean(linear(x) ** 2)
    return jnp.where(loss > 1.0, 1.0, loss)


assert clipped_loss(linear, 100 * x[0]) == 1.0 and clipped_loss(linear, 0 * x[0]) < 1.0
print("both branches taken")


# %% [markdown]
# ### `float(loss)` in the step
#
# `loss.item()` says the same. Return the array, and convert it after the call.


# %% tags=["raises-exception"] raises=[{"error": "ConcretizationTypeError", "match": "Abstract tracer value encountered where concrete value is expected"}]
@nnx.jit
def step(linear, x):
    return {"loss": float(jnp.mean(linear(x) ** 2))}


step(linear, x[0])

# %% [markdown]
# ### A slice with the index of the loop

# %% tags=["raises-exception"] raises=[{"error": "IndexError", "match": "Array slice indices must have static start/stop/step", "jax": "<0.10"}, {"error": "IndexError", "match": "Slice entries must be static integers", "jax": ">=0.10,<0.11"}, {"error": "IndexError", "match": "Array slice indices must have static start/stop/step", "jax": ">=0.11"}]
rows = x.reshape(64, 3)
nnx.fori_loop(0, 4, lambda i, total: total + rows[i * 16 : (i + 1) * 16].sum(), 0.0)

# %% [markdown]
# Cut the batch before the loop and pick a minibatch by its index.

# %%
minibatches = rows.reshape(4, 16, 3)
total = nnx.fori_loop(0, 4, lambda i, total: total + minibatches[i].sum(), 0.0)
assert abs(total - rows.sum()) < 1e-4
print("every row was added once")

# %% [markdown]
# ### A Python list with the index of the loop
#
# A tuple, a list and `range` want a Python integer. `jnp.stack` makes an array of the list.

# %% tags=["raises-exception"] raises=[{"error": "TracerIntegerConversionError", "match": "The __index__() method was called on traced array with shape int32[]"}]
minibatches = [rows[:16], rows[16:32], rows[32:48], rows[48:]]
nnx.fori_loop(0, 4, lambda i, total: total + minibatches[i].sum(), 0.0)


# %% [markdown]
# ### The number of minibatches is traced


# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "Shapes must be 1D sequences of concrete values of integer type"}]
def mean_of_minibatches(linear, rows, num_minibatches):
    minibatches = rows.reshape(num_minibatches, -1, 3)
    return nnx.scan(lambda linear, x: (linear, linear(x).mean()))(linear, minibatches)[1]


nnx.jit(mean_of_minibatches)(linear, rows, 4)

# %% [markdown]
# It decides a shape, so it is static.

# %%
means = nnx.jit(mean_of_minibatches, static_argnames="num_minibatches")(linear, rows, num_minibatches=4)
print("shape:", means.shape)

# %% [markdown]
# ## A gradient that JAX does not take
#
# ### `jax.grad` of a Module that has Rngs
#
# Every leaf of the argument is differentiated, and a random key is no float.

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "grad requires real- or complex-valued inputs"}]
model = Net(nnx.Rngs(0))
jax.grad(lambda model: jnp.mean(model(x[0])))(model)

# %% [markdown]
# The loss of the snippet takes the parameters as an argument of their own. `nnx.grad` selects them in graph
# mode; in tree mode it raises the same error.
#
# ### The gradient of a loop whose bound is traced


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Reverse-mode differentiation does not work for lax.while_loop or lax.fori_loop with dynamic start/stop values"}]
def power(scale, num_iterations):
    return jax.lax.fori_loop(0, num_iterations, lambda i, y: y * scale, 1.0)


jax.jit(jax.grad(power))(2.0, 3)

# %% [markdown]
# Make the bound static. If it must vary, loop to the largest and mask what is too much. A gradient inside of
# the body has no such limit.


# %%
def masked_power(scale, num_iterations):
    def body(i, y):
        return jnp.where(i < num_iterations, y * scale, y)

    return jax.lax.fori_loop(0, 8, body, 1.0)


static = jax.jit(jax.grad(power), static_argnums=1)(2.0, 3)
masked = jax.jit(jax.grad(masked_power))(2.0, 3)
assert static == masked == 12.0
print("d/ds s**3 at 2:", float(static), float(masked))

# %% [markdown]
# ## The rule, tried out
#
# Ten transforms around a function that gets a `Counter`: by closure, as an argument, or split outside and
# merged inside with `copy=True`. *Reads*: the function uses the count. *Calls `nnx.jit`*: it reads in a
# jitted function. *Writes*: it counts up; the count of the original is *kept* or *lost*.

# %% tags=["proof"]
from functools import partial

from IPython.display import Markdown


def read(counter, x):
    return jnp.sum(x * counter.count[...])


def call(counter, x):
    return nnx.jit(read)(counter, x)


def write(counter, x):
    return jnp.sum(counter(x))


def scan(loop, f, *args):
    """Scan over the last argument, and carry the one before it."""

    def body(carry, x):
        return carry, f(carry, x) if len(args) == 2 else f(x)

    return loop(body, args[0] if len(args) == 2 else 0.0, args[-1])


def mapped(vmap, f, *args):
    return vmap(f, in_axes=(None,) * (len(args) - 1) + (0,))(*args)


def transformed(transform, f, *args):
    return transform(f)(*args)


def differentiated(grad, f, *args):
    """The gradient of the last argument."""
    return grad(f, argnums=len(args) - 1)(*args)


transforms = {
    "nnx.jit": partial(transformed, nnx.jit),
    "nnx.grad": partial(differentiated, nnx.grad),
    "nnx.vmap": partial(mapped, nnx.vmap),
    "nnx.scan": partial(scan, lambda body, *args: nnx.scan(body)(*args)),
    "nnx.remat": partial(transformed, nnx.remat),
    "jax.jit": partial(transformed, jax.jit),
    "jax.grad": partial(differentiated, jax.grad),
    "jax.vmap": partial(mapped, jax.vmap),
    "jax.lax.scan": partial(scan, jax.lax.scan),
    "jax.checkpoint": partial(transformed, jax.checkpoint),
}


def outcome(transform, f, way):
    counter = Counter()
    graphdef, state = nnx.split(counter)
    try:
        if way == "closure":
            transform(lambda x: f(counter, x), jnp.ones(3))
        elif way == "argument":
            transform(f, counter, jnp.ones(3))
        else:
            transform(lambda x: f(nnx.merge(graphdef, state, copy=True), x), jnp.ones(3))
    except Exception as error:
        return f"`{type(error).__name__}`"
    return "works" if f is not write else "kept" if counter.count[...] > 0 else "lost"


columns = [
    ("reads, closure", read, "closure"),
    ("calls `nnx.jit`, closure", call, "closure"),
    ("calls `nnx.jit`, argument", call, "argument"),
    ("writes, closure", write, "closure"),
    ("writes, argument", write, "argument"),
    ("writes, merged", write, "merged"),
]
table = [["transform", *(title for title, _, _ in columns)], ["---"] * (len(columns) + 1)]
for name, transform in transforms.items():
    outcomes = [outcome(transform, f, way) for _, f, way in columns]
    assert outcomes[0] == "works" and outcomes[3] == "`TraceContextError`" and outcomes[5] == "lost"
    assert outcomes[4] == "kept" if name.startswith("nnx") else outcomes[4] != "kept"
    table.append([f"`{name}`", *outcomes])
Markdown("\n".join(f"| {' | '.join(row)} |" for row in table))

# %% [markdown]
# - By closure a Module may be read. In graph mode it may not be given to an NNX transform.
# - As an argument of an NNX transform it may be changed.
# - As an argument of a JAX transform it is changed in vain. `jax.grad` hands over an argument that it does
#   not differentiate as it is, so that one cannot be changed at all.
# - Merged inside with `copy=True` it may be changed, and the change is lost unless the function returns the
#   state.
#
# ## When to prefer another recipe
#
# - The error is about structure or references and names a loop: [the carry does not come back as it went
#   in](structure_mismatch_catalogue.py) or [Modules that change in a loop](module_changes_in_a_loop.py).
# - The error is about shapes or dtypes of the carry: [the carry changes dtype or
#   shape](carry_dtype_and_shape.py).
# - You want a whole loop to paste: [accumulate with split and merge](accumulate_with_split_merge.py) or [a
#   complete train step](complete_train_step.py).
