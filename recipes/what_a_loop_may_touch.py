# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Carry what the body changes, close over what it only reads, hand back what came in, and let no Python number change.
#     answers: [google/flax#5113, google/flax#4436, google/flax#4695]
#     symptoms: ["a counter shows 1 or 2 after many iterations", "changes to a broadcast model are lost in nnx.scan", "what can be carried, closed over and returned"]
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # What a loop may touch
#
# 1. **What the body changes goes in**, as carry or as argument. Changed by closure, it raises or comes out
#    wrong.
# 2. **What the body only reads may be closed over.** One exception, in graph mode: a closed-over
#    model may not be given to another NNX transform, such as `nnx.grad`.
# 3. **What comes out of an iteration is what went in:** same structure, same shapes and dtypes, same
#    Variables.
# 4. **Python values outside the carry are static.** Attributes and closed-over numbers are read when the body
#    is traced. A number that changes goes into the carry or into a Variable.
#
# This loop keeps all four and runs on every release shown here, in both modes. The [last
# section](#every-case-that-was-tried) says what became of each thing under each transform.

# %% tags=["snippet"]
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx


@dataclass(frozen=True)
class Config:
    num_minibatches: int
    noise: float


class TrainSession(NamedTuple):
    model: nnx.Module
    optimizer: nnx.Optimizer
    metrics: nnx.MultiMetric
    rngs: nnx.Rngs


def loss_fn(model, x, labels):
    logits = model(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits


def get_train_loop(config: Config):
    @nnx.jit
    def train_loop(session: TrainSession, minibatches):
        def body(i, carry):
            session, total = carry  # what changes is carried
            # The minibatches and the config are only read: closed over.
            x, labels = jax.tree.map(lambda a: a[i], minibatches)
            x = x + config.noise * jax.random.normal(session.rngs.noise(), x.shape)

            grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
            (loss, logits), grads = grad_fn(session.model, x, labels)
            session.optimizer.update(session.model, grads)
            session.metrics.update(loss=loss, logits=logits, labels=labels)
            return session, total + loss  # the same objects, the same dtype

        init = session, jnp.zeros(())
        _, total = nnx.fori_loop(0, config.num_minibatches, body, init)
        return total / config.num_minibatches

    return train_loop


# %% [markdown]
# When the loop ends, the session that was passed in holds the changes. It need not be returned.
#
# ## It does what a Python loop does
#
# One step, called in a Python `for`, leaves the same parameters, statistics, optimizer state, metrics and
# random state.

# %%
import numpy as np


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(4, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.outer = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.relu(self.norm(self.inner(x))))


def make_session() -> TrainSession:
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    return TrainSession(model, optimizer, metrics, nnx.Rngs(noise=1))


@nnx.jit
def train_step(session: TrainSession, x, labels):
    model, optimizer, metrics, rngs = session
    x = x + config.noise * jax.random.normal(rngs.noise(), x.shape)
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, x, labels)
    optimizer.update(model, grads)
    metrics.update(loss=loss, logits=logits, labels=labels)
    return loss


def arrays(node, *filters):
    """The arrays of a Module, with random keys as plain numbers."""
    leaves = jax.tree.leaves(nnx.state(node, *filters))
    is_key = [jnp.issubdtype(a.dtype, jax.dtypes.prng_key) for a in leaves]
    return [np.array(jax.random.key_data(a) if key else a) for a, key in zip(leaves, is_key)]


x = jax.random.normal(jax.random.key(2), (4, 8, 4))
minibatches = x, jnp.argmax(x[..., :3], axis=-1)
config = Config(num_minibatches=4, noise=0.1)

# %% tags=["proof"]
session, expected, untouched = make_session(), make_session(), make_session()
loss = get_train_loop(config)(session, minibatches)
losses = [train_step(expected, *minibatch) for minibatch in zip(*minibatches)]
assert abs(loss - sum(losses) / 4) < 1e-6

for name, node in session._asdict().items():
    actual, wanted, before = (
        arrays(node) for node in (node, getattr(expected, name), getattr(untouched, name))
    )
    assert len(actual) == len(wanted) > 0
    assert all(np.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(actual, wanted)), name
    moved = sum(bool(np.any(a != b)) for a, b in zip(actual, before))
    assert moved == len(actual) - (name == "rngs"), "everything moves but the key of the random stream"
    print(f"{name}: {len(actual)} arrays as in the Python loop, {moved} of them moved")

steps, draws = int(session.optimizer.step[...]), int(session.rngs.noise.count[...])
seen = int(session.metrics.accuracy.count[...])
assert (steps, draws, seen) == (4, 4, 32)
assert abs(session.metrics.compute()["loss"] - loss) < 1e-6
print(f"optimizer steps: {steps}, random draws: {draws}, rows in the accuracy: {seen}")

# %% [markdown]
# ## Why
#
# A transform takes what it is given apart into structure and arrays, traces the body with tracers in place
# of the arrays, and afterwards writes the results into the objects that were passed in. An object that the
# body closes over takes no part in this. It can be read. If it could be written, it would keep a tracer.
#
# ## What the body changes goes in
#
# The model of the cells below counts its calls in a Variable.


# %%
class Count(nnx.Variable):
    pass


class Model(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()))
        self.calls = Count(jnp.zeros(()))
        self.python_calls = 0

    def __call__(self, x):
        self.calls[...] += 1
        return self.scale * x


# %% [markdown]
# ### A closed-over model is changed

# %% tags=["raises-exception"] raises=[{"error": "TraceContextError", "match": "Cannot mutate Count from a different trace level"}]
model = Model()


def body(i, total):
    return total + model(1.0)


nnx.fori_loop(0, 3, body, 0.0)

# %% [markdown]
# BatchNorm, Dropout, metrics and optimizers raise the same with the name of their own Variable. Carry the
# model:


# %%
def body(i, carry):
    model, total = carry
    return model, total + model(1.0)


model = Model()
_, total = nnx.fori_loop(0, 3, body, (model, 0.0))
print(f"total: {total:.0f}, calls: {model.calls[...]:.0f}")

# %% [markdown]
# ### A broadcast model is changed
#
# `in_axes=None` hands the same model to every iteration of `nnx.scan`. That is for reading. In graph mode a
# change is dropped and nothing raises: batch statistics stand still, Dropout repeats its mask. Tree mode
# keeps the change.


# %%
@nnx.scan(in_axes=(nnx.Carry, 0, None), out_axes=nnx.Carry)
def scan_broadcast(total, x, model):
    return total + model(x)


model = Model()
scan_broadcast(jnp.zeros(()), jnp.ones(3), model)
print(f"three iterations, calls: {model.calls[...]:.0f}")

# %% [markdown]
# In the carry every change is kept, in both modes:


# %% tags=["proof"]
@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def scan_carried(carry, x):
    total, model = carry
    return total + model(x), model


model = Model()
scan_carried((jnp.zeros(()), model), jnp.ones(3))
assert model.calls[...] == 3
print(f"three iterations, calls: {model.calls[...]:.0f}")

# %% [markdown]
# ## What the body only reads may be closed over
#
# Arrays, config, optimizer, and a model whose call changes nothing.
#
# ### The gradient of a closed-over model

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Cannot extract graph node from different trace level", "mode": "graph"}]
model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
x = jnp.ones((8, 4))


def body(i, total):
    grads = nnx.grad(lambda model: model(x).sum())(model)
    return total + nnx.state(grads)["bias"][...]


total = nnx.fori_loop(0, 3, body, jnp.zeros(1))
print(f"gradient of the bias, three times: {total.item():.0f}")

# %% [markdown]
# `nnx.value_and_grad` raises the same. So does `nnx.grad` of a closed-over model inside `nnx.jit` or `jax.jit`. Carry the model or pass it as an argument. To keep it closed over, split it in the body and use
# `jax.grad`:


# %%
def body(i, total):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    grads = jax.grad(lambda params: nnx.merge(graphdef, params, rest)(x).sum())(params)
    return total + grads["bias"][...]


total = nnx.fori_loop(0, 3, body, jnp.zeros(1))
print(f"gradient of the bias, three times: {total.item():.0f}")

# %% [markdown]
# ### A config in the carry

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "is not a valid JAX type", "flax": "<0.12.3", "mode": "graph"}, {"error": "TypeError", "match": "The problematic value is of type <class '__main__.Config'>", "flax": ">=0.12.3", "mode": "graph"}, {"error": "TypeError", "match": "is not a valid JAX type", "mode": "tree"}]
nnx.fori_loop(0, 3, lambda i, carry: carry, (config, 0.0))

# %% [markdown]
# A carry is made of arrays, Python numbers, Variables and Modules. Close over the config, or give it to `nnx.jit` by
# `static_argnames`.
#
# ## What comes out is what went in
#
# ### The carry comes back with another dtype

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "scan body function carry input and carry output must have equal types"}]
nnx.fori_loop(0, 3, lambda i, total: total + 0.5, jnp.zeros((), jnp.int32))

# %% [markdown]
# The message speaks of scan: that is what a `fori_loop` with fixed bounds becomes. Start with the dtype
# that the body returns, here `jnp.zeros(())`. More of these: [dtype and shape of the
# carry](carry_dtype_and_shape.py).
#
# ### The body returns another model

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.fori_loop requires body function's input and output to have the same reference and pytree structure", "flax": "<0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "fori_loop Variable identity must be preserved across iterations", "mode": "tree"}]
model = nnx.fori_loop(0, 3, lambda i, model: nnx.clone(model), Model())
print("accepted")

# %% [markdown]
# Since Flax 0.12.3 `nnx.fori_loop` accepts it in graph mode; `nnx.scan` and `nnx.while_loop` refuse it on
# every release shown here. Change the model that came in, with `nnx.update` where a whole state is new:


# %%
def body(i, model):
    other = nnx.clone(model)
    other(1.0)
    nnx.update(model, nnx.state(other))
    return model


model = Model()
nnx.fori_loop(0, 3, body, model)
print(f"calls: {model.calls[...]:.0f}")

# %% [markdown]
# `nnx.jit` and `nnx.cond` have no carry. They may return another model; in tree mode they may not return
# the one that they were given, which holds the changes anyway. The messages of the loops about a changed Module
# are in [Modules that change in a loop](module_changes_in_a_loop.py).
#
# ## Python values are static
#
# The body is traced once or twice, however many iterations the loop makes, and Python runs while it is
# traced.
#
# ### A closed-over number is counted up
#
# Nothing raises. Python counts the traces.

# %%
iterations = 0


def body(i, total):
    global iterations
    iterations += 1
    return total + 1


total = nnx.fori_loop(0, 3, body, 0)
print(f"three iterations, counted in the carry: {total}, by closure: {iterations}")

# %% [markdown]
# ### A Python attribute is counted up in `nnx.fori_loop`


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.fori_loop requires body function's input and output to have the same reference and pytree structure", "flax": "<0.12.3", "mode": "graph"}, {"error": "TypeError", "match": "scan body function carry input and carry output must have the same pytree structure", "flax": ">=0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "different pytree metadata at key path", "mode": "tree"}]
def body(i, model):
    model.python_calls += 1
    return model


nnx.fori_loop(0, 3, body, Model())

# %% [markdown]
# ### A Python attribute is counted up in `nnx.scan`
#
# Flax 0.11.2 refuses it. Flax 0.12.2 and newer raise nothing in graph mode. The attribute is counted up once, in three
# iterations.

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "scan body function carry input and carry output must have the same pytree structure", "flax": "<0.12.1", "mode": "graph"}, {"error": "ValueError", "match": "different pytree metadata at key path", "mode": "tree"}]
model = Model()
nnx.scan(body, in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=3)(0, model)
print("three iterations, counted:", model.python_calls)


# %% [markdown]
# Count in a Variable, as `calls` does, or in the carry. The other way round, a number that decides a shape,
# the length of a scan or a Python `if` cannot be carried: close over it, or name it in `static_argnames` of
# `nnx.jit`.
#
# ## Every case that was tried
#
# Each thing counts the changes that it has seen. Loops make three iterations; `nnx.cond`, `nnx.jit` and
# `nnx.value_and_grad` are called three times. A case is right if three changes are found afterwards. That
# nothing raised is not enough.

# %%
import functools
import re
from collections.abc import Callable
from typing import Any

from IPython.display import Markdown

tx = optax.sgd(1.0)


class Thing(NamedTuple):
    make: Callable[[], Any]
    change: Callable[[Any], Any]  # changes it in place and returns None, or returns the new value
    count: Callable[[Any], Any]  # how many changes it has seen


def model_and_optimizer():
    model = Model()
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def call(model):
    model(1.0)


def update(pair):
    model, optimizer = pair
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))


def draw(rngs):
    rngs.default()


nodes = {
    "model": Thing(Model, call, lambda model: model.calls[...]),
    "optimizer": Thing(
        model_and_optimizer, update, lambda pair: jnp.minimum(pair[1].step[...], 1 - pair[0].scale[...])
    ),
    "metrics": Thing(
        lambda: nnx.MultiMetric(loss=nnx.metrics.Average("loss")),
        lambda metrics: metrics.update(loss=jnp.ones(())),
        lambda metrics: jnp.minimum(metrics.loss.count[...], metrics.loss.total[...]),
    ),
    "Rngs": Thing(lambda: nnx.Rngs(0), draw, lambda rngs: rngs.default.count[...]),
}
values = {
    "array": Thing(lambda: jnp.zeros(()), lambda array: array + 1, lambda array: array),
    "number": Thing(lambda: 0, lambda number: number + 1, lambda number: number),
}


# %%
def new_or_same(new, same):
    return same if new is None else new


def three_calls(function, thing):
    for _ in range(3):
        thing = new_or_same(function(thing), thing)
    return thing


def with_fori_loop(change, thing):
    return nnx.fori_loop(0, 3, lambda i, thing: new_or_same(change(thing), thing), thing)


def with_scan(change, thing):
    def body(thing):
        return new_or_same(change(thing), thing)

    return nnx.scan(body, in_axes=nnx.Carry, out_axes=nnx.Carry, length=3)(thing)


def with_while_loop(change, thing):
    def body(carry):
        i, thing = carry
        return i + 1, new_or_same(change(thing), thing)

    return nnx.while_loop(lambda carry: carry[0] < 3, body, (0, thing))[1]


def with_cond(change, thing):
    return three_calls(lambda thing: nnx.cond(True, change, change, thing), thing)


def with_jit(change, thing):
    return three_calls(nnx.jit(change), thing)


def with_value_and_grad(change, thing):
    # What is differentiated is the weight. The thing is a further argument.
    grad_fn = nnx.value_and_grad(lambda weight, thing: (weight**2, change(thing)), has_aux=True)
    return three_calls(lambda thing: grad_fn(1.0, thing)[0][1], thing)


transforms = {
    "fori": with_fori_loop,
    "scan": with_scan,
    "while": with_while_loop,
    "cond": with_cond,
    "jit": with_jit,
    "grad": with_value_and_grad,
}
outcomes: dict[str, dict[str, dict[str, str]]] = {}


def outcome(action: str, row: str, column: str, case: Callable[[], Any]):
    """Run a case, which returns the changes that were seen, and record what became of it."""
    try:
        seen = np.array(case())
    except Exception as error:
        line = re.sub(r" ?\([^()]*\)", "", str(error).partition("\n")[0])
        line = re.split(r"\.? \(|[(,]|\. |\.$", line)[0]
        line = re.sub(r"(mutate|Duplicate) \w+", r"\1 ...", line)  # the name of a Variable
        result = f"`{type(error).__name__}`: {line}"
    else:
        result = "yes" if np.all(seen == 3) else "lost" if np.all(seen == 0) else "wrong"
    outcomes.setdefault(action, {}).setdefault(row, {})[column] = result


def outcomes_of(action: str, things: dict[str, Thing], case):
    for row, thing in things.items():
        for column, transform in transforms.items():
            outcome(action, row, column, functools.partial(case, thing, transform))


# %% [markdown]
# Carried or passed as an argument, and changed. The changes must be in what comes out and in the object
# that was passed in.


# %%
def passed_in_and_changed(thing: Thing, transform):
    before = thing.make()
    after = transform(thing.change, before)
    in_place = not isinstance(before, (int, jax.Array))
    return [thing.count(after)] + [thing.count(before)] * in_place


outcomes_of("Passed in and changed", nodes | values, passed_in_and_changed)
config_thing = Thing(lambda: config, lambda config: None, lambda config: 3)
outcomes_of("Passed in and changed", {"config, read": config_thing}, passed_in_and_changed)

# %% [markdown]
# The structure of a carried model is changed: an attribute is added, a Python attribute counted up, a
# Variable overwritten with an array.


# %%
def add_attribute(model):
    model.extra = Count(jnp.ones(()))


def count_in_python(model):
    model.python_calls += 1


def overwrite(model):
    model.scale = model.scale + 1


structure = {
    "new Variable": Thing(Model, add_attribute, lambda model: 3 * hasattr(model, "extra")),
    "Python number": Thing(Model, count_in_python, lambda model: model.python_calls),
    "array over Param": Thing(Model, overwrite, lambda model: model.scale[...] - 1),
}
outcomes_of("Attributes of a model that is passed in, changed", structure, passed_in_and_changed)

# %% [markdown]
# Closed over: read in every iteration, then changed in every iteration.


# %%
def closed_over_and_read(thing: Thing, transform):
    closed = thing.make()
    closed = new_or_same(thing.change(closed), closed)
    return transform(lambda total: total + thing.count(closed), jnp.zeros(()))


def nnx_grad(model):
    return nnx.state(nnx.grad(lambda model: model.scale[...])(model))["scale"][...]


def jax_grad(model):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    return jax.grad(lambda params: nnx.merge(graphdef, params, rest).scale[...])(params)["scale"][...]


model = nodes["model"]
gradients = {
    "model": model,
    "its nnx.grad": model._replace(count=nnx_grad),
    "split, jax.grad": model._replace(count=jax_grad),
}
settings = {"config": Thing(lambda: config, lambda config: None, lambda config: config.num_minibatches / 4)}
outcomes_of("Closed over and read", gradients | nodes | values | settings, closed_over_and_read)


# %%
def closed_over_and_changed(thing: Thing, transform):
    closed = thing.make()

    def body(total):
        nonlocal closed
        closed = new_or_same(thing.change(closed), closed)
        return total + 1

    transform(body, jnp.zeros(()))
    return thing.count(closed) + 0


outcomes_of("Closed over and changed", nodes | values, closed_over_and_changed)

# %% [markdown]
# Made in the body and returned, by a loop in the place of what was carried; and returned as it came in.


# %%
def new_returned(thing: Thing, transform):
    return thing.count(transform(lambda old: three_calls(thing.change, thing.make()), thing.make()))


def same_returned(thing: Thing, transform):
    def change(same):
        thing.change(same)
        return same

    return thing.count(transform(change, thing.make()))


outcomes_of("Returned", {"same model": nodes["model"]}, same_returned)
outcomes_of("Returned", {f"new {name}": thing for name, thing in nodes.items()}, new_returned)

# %% [markdown]
# What only `nnx.scan` has: scanned inputs, here a stack of three things; broadcast ones; outputs.


# %%
def scan_one(body, one):
    """Broadcast one thing to three iterations; the carry is the total that the body returns."""
    return nnx.scan(body, in_axes=(nnx.Carry, None), out_axes=nnx.Carry, length=3)(jnp.zeros(()), one)


def scanned_and_changed(thing: Thing):
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(thing.make() for _ in range(3)))
    body = nnx.scan(
        lambda total, one: (total, thing.change(one)), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0)
    )
    _, new = body(0.0, stack)
    return jnp.sum(thing.count(new_or_same(new, stack)))


def broadcast_and_read(thing: Thing):
    one = thing.make()
    return scan_one(lambda total, one: total + thing.count(one), new_or_same(thing.change(one), one))


def broadcast_and_changed(thing: Thing):
    def body(total, one):
        thing.change(one)
        return total

    one = thing.make()
    scan_one(body, one)
    return thing.count(one)


def params_broadcast(thing: Thing):
    def body(total, one):
        thing.change(one)
        return total

    one = thing.make()
    axes = nnx.StateAxes({nnx.Param: None, ...: nnx.Carry})
    nnx.scan(body, in_axes=(nnx.Carry, axes), out_axes=nnx.Carry, length=3)(0.0, one)
    return thing.count(one)


def new_output(thing: Thing):
    def body(total):
        return total, three_calls(thing.change, thing.make())

    _, outputs = nnx.scan(body, in_axes=nnx.Carry, out_axes=(nnx.Carry, 0), length=3)(0.0)
    assert thing.count(outputs).shape == (3,)
    return thing.count(outputs)


def carry_as_output(thing: Thing):
    def body(one):
        one = new_or_same(thing.change(one), one)
        return one, one

    _, outputs = nnx.scan(body, in_axes=nnx.Carry, out_axes=(nnx.Carry, 0), length=3)(thing.make())
    return thing.count(outputs)[-1]


in_place = {"broadcast and changed": broadcast_and_changed, "StateAxes, changed": params_broadcast}
ways = {"scanned and changed": scanned_and_changed, "broadcast and read": broadcast_and_read} | in_place
ways |= {"new output": new_output, "carry as output": carry_as_output}
for way, case in ways.items():
    for name, thing in (nodes if way in in_place else nodes | {"array": values["array"]}).items():
        outcome("nnx.scan alone", way, name, functools.partial(case, thing))

# %% tags=["proof"]
passed, read, changed = (
    outcomes[action]
    for action in ("Passed in and changed", "Closed over and read", "Closed over and changed")
)
for name in nodes:
    assert set(passed[name].values()) == {"yes"}, "what goes in may be changed"
    assert set(read[name].values()) == {"yes"}, "what is only read may be closed over"
    assert all(result.startswith("`TraceContextError`") for result in changed[name].values())
for name in values:
    assert set(passed[name].values()) == set(read[name].values()) == {"yes"}
    assert "yes" not in {changed[name][loop] for loop in ("fori", "scan", "while")}
assert not re.search("Warning|KeyError|NameError", str(outcomes)), "a mistake of this page is no outcome"
print(sum(len(row) for action in outcomes.values() for row in action.values()), "cases")

# %% [markdown]
# **yes**: three changes were found. **lost**: nothing raised, and none was found. **wrong**: nothing
# raised, and another number was found. **no**: it raised; its number is in the list below the tables. The
# columns are `nnx.fori_loop`, `nnx.scan`, `nnx.while_loop`, `nnx.cond`, `nnx.jit` and `nnx.value_and_grad`,
# where the thing is a further argument, not the one that is differentiated.


# %%
def tables():
    """One table for each action. Exceptions are numbered and listed at the end."""
    exceptions, lines = {}, []
    superscript = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")

    def cell(result):
        if not result.startswith("`"):
            return result
        number = exceptions.setdefault(result, len(exceptions) + 1)
        return "no" + str(number).translate(superscript)

    for action, rows in outcomes.items():
        columns = list(next(iter(rows.values())))
        lines += [f"**{action}**", "", f"| what | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for row, results in rows.items():
            lines.append(f"| {row} | {' | '.join(cell(results.get(column, '-')) for column in columns)} |")
        lines.append("")
    return "\n".join(lines + [f"{number}. {result}" for result, number in exceptions.items()])


Markdown(tables())

# %% [markdown]
# - A number or an array that a closure changes comes out right in the last column alone: outside of
#   `nnx.jit`, `nnx.value_and_grad` traces nothing but what it differentiates.
# - `nnx.StateAxes` with `nnx.Param: None` broadcasts the parameters: what an optimizer does to them is
#   lost.
# - In tree mode everything that is differentiated must be a float array, so the model may not hold random
#   state: [accumulate with `nnx.fori_loop`](accumulate_with_fori_loop.py) shows the split.
#
# ## When to prefer another recipe
#
# - You have the message `Cannot mutate` or `Cannot extract graph node`: [different trace
#   level](different_trace_level.py).
# - A message about structure or references: [the carry does not come back as it went
#   in](structure_mismatch_catalogue.py) or [Modules that change in a loop](module_changes_in_a_loop.py).
# - A message about the arguments of the body, `in_axes` or `out_axes`: [arguments and axes of the
#   loops](loop_arguments_and_axes.py).
# - Nothing raises and the numbers are wrong: [wrong results that raise nothing](silent_wrong_results.py).
# - You accumulate gradients: [with `nnx.fori_loop`](accumulate_with_fori_loop.py), [with
#   `nnx.scan`](accumulate_with_scan.py) or [with split and merge](accumulate_with_split_merge.py).
