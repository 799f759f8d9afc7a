# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: nnx.scan calls body(carry, slice), nnx.fori_loop body(index, carry), nnx.while_loop body(carry).
#     answers: [google/flax#4780]
#     symptoms: ["what nnx.Carry means in in_axes and out_axes of nnx.scan", "nnx.scan without an input to scan, with length", "order of the arguments of a fori_loop body"]
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # Arguments and axes of the NNX loops
#
# `nnx.scan` calls `body(carry, slice)` and gets `(carry, output)` back, `nnx.fori_loop` calls
# `body(index, carry)`, `nnx.while_loop` calls `body(carry)`; these two get the carry back. In `in_axes` and
# `out_axes` there is one entry for each argument and each result: `nnx.Carry` for the carry, a number for the
# axis that is sliced or stacked.
#
# ## The three calls

# %% tags=["snippet"]
import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(2))
        self.bias = nnx.Param(jnp.zeros(2))

    def __call__(self, x):
        return x * self.weight[...] + self.bias[...]


def step(model, minibatch):  # changes the model in place
    model.bias[...] += minibatch
    return model.bias[...].sum()


def scan_body(model, minibatch):  # the carry, then a slice of what is scanned
    return model, step(model, minibatch)  # the carry, then what is stacked


def fori_body(i, model):  # the index, then the carry
    step(model, minibatches[i])
    return model


def while_body(carry):  # the carry alone: an index is part of it
    i, model = carry
    step(model, minibatches[i])
    return i + 1, model


minibatches = jnp.array([1.0, 10.0, 100.0])

scanned = Net()
_, losses = nnx.scan(scan_body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(scanned, minibatches)

looped = Net()
nnx.fori_loop(0, len(minibatches), fori_body, looped)

counted = Net()
count, _ = nnx.while_loop(lambda carry: carry[0] < len(minibatches), while_body, (0, counted))


# %% [markdown]
# Each loop takes every minibatch once and in order, and changes the model that was passed in.
#
# The body of a `jax.lax.scan` looks the same. It carries arrays and no Modules, and always slices and stacks
# axis 0.
#
# The cells below run over these numbers.

# %%
from dataclasses import dataclass

import jax

xs = jnp.arange(3.0)

# %% tags=["proof"]
expected = Net()
expected_losses = [float(step(expected, minibatch)) for minibatch in minibatches]
assert expected.bias[...].tolist() == [111, 111] and expected_losses == [2, 22, 222]

assert losses.tolist() == expected_losses and count == 3
for name, model in {"nnx.scan": scanned, "nnx.fori_loop": looped, "nnx.while_loop": counted}.items():
    assert model.bias[...].tolist() == expected.bias[...].tolist(), name
    print(f"{name}: bias {model.bias[...]}, as in a Python loop")

# %% [markdown]
# Slices along another axis, outputs stacked along another axis, and an input that each iteration gets whole:
# its axis is `None`.


# %% tags=["proof"]
def body(model, column, scale):
    model.bias[...] += column
    return model, scale * column


model, table = Net(), jnp.arange(6.0).reshape(2, 3)
axes = {"in_axes": (nnx.Carry, 1, None), "out_axes": (nnx.Carry, 1)}
_, scaled = nnx.scan(body, **axes)(model, table, jnp.array([1.0, 10.0]))
assert model.bias[...].tolist() == table.sum(1).tolist() == [3, 12]
assert scaled.tolist() == [[0, 1, 2], [30, 40, 50]]
print("three columns of a table, stacked as columns:", scaled.tolist())

# %% [markdown]
# ## The body takes the wrong arguments
#
# ### `nnx.scan`: the body has too few parameters
#
# The body gets the carry and one slice of each scanned input. Take the slice, or scan nothing:
# `in_axes=nnx.Carry`, `out_axes=nnx.Carry` and `length=`.

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "too many positional arguments", "mode": "graph"}, {"error": "TypeError", "match": "takes 1 positional argument but 2 were given", "mode": "tree"}]
nnx.scan(lambda model: (model, None))(Net(), xs)

# %% tags=["proof"]
count = nnx.scan(lambda count: count + 1, in_axes=nnx.Carry, out_axes=nnx.Carry, length=3)(jnp.zeros(()))
assert count == 3
print("a body with nothing but a carry ran", int(count), "times")

# %% [markdown]
# ### `nnx.scan`: the body has too many parameters
#
# Pass as many arguments as the body has, each with an entry in `in_axes`.

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "missing a required argument: 'y'", "mode": "graph"}, {"error": "TypeError", "match": "missing 1 required positional argument: 'y'", "mode": "tree"}]
nnx.scan(lambda model, x, y: (model, None))(Net(), xs)

# %% [markdown]
# ### `nnx.scan`: more arguments than entries in `in_axes`
#
# One entry for each argument: here `in_axes=(nnx.Carry, 0, 0)`.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Tuple arity mismatch: 3 != 2", "jax": "<0.10.2"}, {"error": "ValueError", "match": "different lengths of tuple at key path", "jax": ">=0.10.2"}]
nnx.scan(lambda model, x, y: (model, x + y), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(Net(), xs, xs)

# %% [markdown]
# ### `nnx.scan`: the carry or an input is passed by keyword
#
# Graph mode sorts it out, tree mode passes the keyword on. Pass by position.

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "got an unexpected keyword argument 'x'", "mode": "tree"}]
_, doubled = nnx.scan(lambda model, x: (model, 2 * x))(Net(), x=xs)
print("accepted:", doubled)

# %% [markdown]
# ### `nnx.fori_loop`: the body has one parameter
#
# The body gets the index and the carry, also where it has no use for the index.

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "takes 1 positional argument but 2 were given"}]
nnx.fori_loop(0, 3, lambda model: model, Net())

# %% [markdown]
# ### `nnx.while_loop`: body or condition have a parameter for each component
#
# Both get the carry as one argument. Unpack it inside of the function.

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "missing 1 required positional argument: 'model'"}]
nnx.while_loop(lambda i, model: i < 3, lambda carry: (carry[0] + 1, carry[1]), (0, Net()))

# %% [markdown]
# ### `nnx.while_loop`: the condition returns a vector
#
# Reduce it to one truth value, with `jnp.any` or `jnp.all`.

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "cond_fun must return a boolean scalar"}]
nnx.while_loop(lambda model: model.bias[...] < 3, lambda model: model, Net())


# %% [markdown]
# ### `nnx.scan`: the body is a bound method
#
# `trainer.step` hides `self` from the loop. Scan the function of the class and pass the object as the carry.
# On Flax 0.11.2, which has no such check, the arguments do not fit.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Tuple arity mismatch: 1 != 2", "flax": "<0.12.1"}, {"error": "ValueError", "match": "nnx.scan does not support bound methods", "flax": ">=0.12.1"}]
class Trainer(nnx.Module):
    def __init__(self):
        self.total = nnx.Variable(jnp.zeros(()))

    def step(self, x):
        self.total[...] += x
        return self, self.total[...]


trainer = Trainer()
nnx.scan(trainer.step)(xs)

# %% tags=["proof"]
trainer = Trainer()
_, totals = nnx.scan(Trainer.step)(trainer, xs)
assert trainer.total[...] == 3 and totals.tolist() == [0, 1, 3]
print("the function of the class, the object as the carry:", totals)

# %% [markdown]
# ## Axes and lengths of `nnx.scan`
#
# ### `nnx.Carry` stands in `in_axes` only
#
# What is carried in comes out as a carry: `out_axes=(nnx.Carry, 0)`, and the body returns a pair.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "If one of in_axes or out_axes has Carry, the other must also have Carry"}]
nnx.scan(lambda model, x: x, in_axes=(nnx.Carry, 0), out_axes=0)(Net(), xs)

# %% [markdown]
# ### Two arguments are marked `nnx.Carry`
#
# There is one carry. Put both into a tuple.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Found multiple Carry definitions"}]
axes = (nnx.Carry, nnx.Carry, 0)
nnx.scan(lambda total, model, x: (total, model, x), in_axes=axes, out_axes=axes)(jnp.zeros(()), Net(), xs)

# %% [markdown]
# ### `nnx.Carry` stands inside of a tuple
#
# The carry is a whole argument: `in_axes=(nnx.Carry, 0)` for `(total, model), x`.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Carry must at the top-level, it cannot be nested", "mode": "graph"}, {"error": "ValueError", "match": "Carry must be a top-level argument, it cannot be nested", "mode": "tree"}]
axes = ((nnx.Carry, None), 0)
nnx.scan(lambda carry, x: (carry[0], x), in_axes=axes, out_axes=(nnx.Carry, 0))((jnp.zeros(()), Net()), xs)

# %% [markdown]
# ### Neither a scanned input nor `length=`
#
# Say how often: `length=3`.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "scan got no values to scan over and `length` not provided"}]
nnx.scan(lambda model, _: (model, None))(Net(), None)

# %% [markdown]
# ### `length=` is not the length of the scanned input
#
# Leave `length=` out where something is scanned.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "scan got `length` argument of 4 which disagrees with leading axis sizes [3]"}]
nnx.scan(lambda model, x: (model, x), length=4)(Net(), xs)

# %% [markdown]
# ### The scanned inputs differ in length
#
# Each has one slice for each iteration on its leading axis. Often one of them lacks the reshape to
# `(num_minibatches, rows, ...)`: [accumulate with nnx.scan](accumulate_with_scan.py).

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "scan got values with different leading axis sizes: 3, 4"}]
nnx.scan(lambda model, batch: (model, batch["x"]))(Net(), {"x": xs, "y": jnp.zeros(4)})

# %% [markdown]
# ### A number is scanned
#
# `nnx.scan(body)(model, 3)` does not mean three iterations. Scan `jnp.arange(3)`, or carry only and say
# `length=3`.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Expected an array, got int", "mode": "graph"}, {"error": "ValueError", "match": "scan got value with no leading axis to scan over", "mode": "tree"}]
nnx.scan(lambda model, i: (model, i))(Net(), 3)

# %% [markdown]
# ### Tree mode: `nnx.StateAxes` in `in_axes`
#
# Tree mode has no axes for parts of a Module. Carry the whole Module.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "`in_axes` cannot contain `StateAxes` objects", "mode": "tree"}]
class StatefulNet(Net):
    def __init__(self):
        super().__init__()
        self.seen = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.seen[...] += 1
        return super().__call__(x)


model = StatefulNet()
axes = nnx.StateAxes({nnx.Param: None, ...: nnx.Carry})
nnx.scan(lambda model, x: model(x), in_axes=(axes, 0), out_axes=0)(model, xs)
print("accepted: seen", int(model.seen[...]))

# %% tags=["proof"]
model = StatefulNet()
_, y = nnx.scan(lambda model, x: (model, model(x)))(model, xs)
assert model.seen[...] == 3 and jnp.all(y[:, 0] == xs)
print("the whole Module in the carry: seen", int(model.seen[...]))

# %% [markdown]
# ## The session is a plain dataclass
#
# ### `nnx.jit`: a plain dataclass as argument
#
# JAX takes an unregistered dataclass for a leaf. Use a NamedTuple, a dict or a Module, or register the class.


# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "The problematic value is of type <class '__main__.Session'>"}]
@dataclass
class Session:
    model: nnx.Module


nnx.jit(lambda session: session.model(1))(Session(Net()))

# %% [markdown]
# ### `nnx.scan`: a plain dataclass as carry
#
# `nnx.fori_loop` says this or the words above, depending on the release.

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "is not a valid JAX type"}]
nnx.scan(lambda session, x: (session, x))(Session(Net()), xs)

# %% tags=["proof"]
jax.tree_util.register_dataclass(Session, data_fields=["model"], meta_fields=[])


def body(session, x):
    session.model.bias[...] += x
    return session, x


session = Session(Net())
nnx.scan(body)(session, xs)
assert jnp.all(session.model.bias[...] == 3)
print("registered:", session.model.bias[...])

# %% [markdown]
# ## When to prefer another recipe
#
# - The arguments are right, and the body returns something else than the carry: [the carry does not come back
#   as it went in](structure_mismatch_catalogue.py).
# - The Module gains, loses or changes an attribute, or another object comes back: [Modules that change in a
#   loop](module_changes_in_a_loop.py).
# - The message names a dtype or a shape: [carry dtype and shape](carry_dtype_and_shape.py).
# - The body reads a Module from outside: [different trace level](different_trace_level.py).
# - You want a whole loop to paste: [with `nnx.scan`](accumulate_with_scan.py) or [with
#   `nnx.fori_loop`](accumulate_with_fori_loop.py).
