# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: A loop body returns the carry it got, same components, same order, same Modules, written in place. One heading for each way to break that.
#     answers: [google/flax#5113, google/flax#5051, google/jaxopt#258]
#     symptoms: ["static attribute counted once in nnx.scan", "nnx.clone in a loop body leaves the original unchanged", "swapped modules in a fori_loop carry"]
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # Structure and reference errors of the NNX loops
#
# A loop body returns the carry it was given: the same components in the same order, and in them the same
# Modules, whose Variables it writes into. Each message on this page is a breach of that, or of how a loop
# is called; the heading above it names the mistake.
#
# Messages about dtype, shape or weak type are in [carry dtype and shape](carry_dtype_and_shape.py), those
# about closures and leaked tracers in [different trace level](different_trace_level.py).
#
# ## A body that breaks no rule
#
# `step` changes the Modules of `session` in place and returns a loss. For a tuple of arrays, the slice is
# `jax.tree.map(lambda a: a[i], minibatches)` and the number of minibatches is `len(minibatches[0])`: `len` of a
# tuple counts its arrays.

# %% tags=["snippet"]
import jax.numpy as jnp
from flax import nnx


def loop_with_fori(step, session, minibatches):
    def body(i, carry):  # the index, then the carry
        total, session = carry
        total += step(session, minibatches[i])
        return total, session  # what came in, in the order in which it came

    return nnx.fori_loop(0, len(minibatches), body, (jnp.zeros(()), session))


def loop_with_while(step, session, minibatches):
    def body(carry):  # the carry alone: the index is part of it
        i, total, session = carry
        total += step(session, minibatches[i])
        return i + 1, total, session

    init = (0, jnp.zeros(()), session)
    _, total, session = nnx.while_loop(lambda carry: carry[0] < len(minibatches), body, init)
    return total, session


def loop_with_scan(step, session, minibatches):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def body(carry, minibatch):  # the carry, then one slice of what is scanned
        total, session = carry
        loss = step(session, minibatch)
        return (total + loss, session), loss  # a pair: the carry, then what is stacked

    return body((jnp.zeros(()), session), minibatches)


# %% [markdown]
# All three leave the loss, the parameters and the optimizer of a plain Python loop, and leave them in the
# objects that were passed in.

# %%
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
import optax


class Net(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(2))
        self.bias = nnx.Param(jnp.zeros(2))

    def __call__(self, x):
        return x * self.weight[...] + self.bias[...]


class TrainSession(NamedTuple):
    model: nnx.Module
    optimizer: nnx.Optimizer


def make_session() -> TrainSession:
    model = Net()
    return TrainSession(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param))


def train_step(session: TrainSession, minibatch):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(minibatch) - 3.0) ** 2))(session.model)
    session.optimizer.update(session.model, grads)
    return loss


minibatches = jax.random.normal(jax.random.key(0), (4, 8, 2))

# %% tags=["proof"]
expected = make_session()
expected_total = sum(train_step(expected, minibatch) for minibatch in minibatches)

for loop in loop_with_fori, loop_with_while, loop_with_scan:
    session = make_session()
    result = loop(train_step, session, minibatches)
    (total, returned), losses = result if loop is loop_with_scan else (result, None)
    assert losses is None or (losses.shape == (4,) and abs(losses.sum() - total) < 1e-5)
    assert abs(total - expected_total) < 1e-5, (total, expected_total)
    for name in "weight", "bias":
        value, want = (getattr(s.model, name)[...] for s in (session, expected))
        assert jnp.max(jnp.abs(value - want)) < 1e-6, f"{name} of the model that was passed in"
        assert jnp.all(value == getattr(returned.model, name)[...]), f"{name} of the model that came back"
    assert jnp.all(session.model.bias[...] != 0)
    assert int(session.optimizer.step[...]) == int(returned.optimizer.step[...]) == 4
    print(f"{loop.__name__}: as the Python loop, optimizer step {int(session.optimizer.step[...])}")

# %% [markdown]
# ## How to read the messages
#
# - In graph mode, `nnx.fori_loop` up to Flax 0.12.2 and `nnx.while_loop` on every release shown here have
#   one sentence for nearly every structure mistake below. Read what follows `Detail of the mismatch`: left of `!=` stands what went
#   in, right of it what the body returned.
# - In a `pytree structure error`, the prefix pytree is what went in and the full pytree what came back.
# - A message of `nnx.fori_loop` may say *scan*: with static bounds the loop is a `jax.lax.scan`.
#   `loop_carry[1]` is the carry there, `loop_carry[1][0]` its first component.
#
# The cells below run three times over a `Net()` or these numbers.

# %%
xs = jnp.arange(3.0)


def less_than_three(carry):
    return carry[0] < 3


# %% [markdown]
# ## The body does not return the carry
#
# ### `nnx.fori_loop`: the body forgets to return a Module
#
# The loop finds `None` where the Module was. Add `return model`: changes in place do not replace it.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.fori_loop requires body function's input and output to have the same reference and pytree structure", "flax": "<0.12.3", "mode": "graph"}, {"error": "AttributeError", "match": "'NoneType' object has no attribute '_graphdef'", "flax": ">=0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "a subtree of different type\n    <class 'NoneType'>", "mode": "tree"}]
def body(i, model):
    model.bias[...] += 1


nnx.fori_loop(0, 3, body, Net())

# %% [markdown]
# ### `nnx.fori_loop`: the body forgets to return a tuple
#
# Add `return total, model`.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.fori_loop requires body function's input and output to have the same reference and pytree structure", "flax": "<0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "a subtree of different type\n    <class 'NoneType'>", "flax": ">=0.12.3", "jax": ">=0.10.2"}]
def body(i, carry):
    total, model = carry
    model.bias[...] += 1


nnx.fori_loop(0, 3, body, (jnp.zeros(()), Net()))

# %% [markdown]
# ### `nnx.while_loop`: the body forgets to return
#
# Add `return i + 1, model`.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.while_loop requires body function's input and output to have the same reference and pytree structure", "mode": "graph"}, {"error": "ValueError", "match": "a subtree of different type\n    <class 'NoneType'>", "mode": "tree"}]
def body(carry):
    i, model = carry
    model.bias[...] += 1


nnx.while_loop(less_than_three, body, (0, Net()))

# %% [markdown]
# ### `nnx.scan`: the body forgets to return
#
# In graph mode an `AssertionError` without a text. The defaults are `in_axes=(nnx.Carry, 0)` and
# `out_axes=(nnx.Carry, 0)`: the body returns a pair. Add `return model, x`, or `return model, None` if
# nothing is to be stacked.


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "", "mode": "graph"}, {"error": "ValueError", "match": "a subtree of different type\n    <class 'NoneType'>", "mode": "tree"}]
def body(model, x):
    model.bias[...] += x


nnx.scan(body)(Net(), xs)

# %% [markdown]
# ### `nnx.scan`: the body returns the carry and no output
#
# In graph mode the same empty `AssertionError`. Return `model, None`, or say `out_axes=nnx.Carry` and return `model`.


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "", "mode": "graph"}, {"error": "ValueError", "match": "different types at key path", "mode": "tree"}]
def body(model, x):
    model.bias[...] += x
    return model


nnx.scan(body)(Net(), xs)

# %% [markdown]
# ### `nnx.scan`: the body returns a carry of two components and no output
#
# The pair passes for the carry and the output, so the loop takes `total` for the whole carry. Return
# `(total + x, model), None`.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Expected tuple, got JitTracer", "jax": "<0.10.2"}, {"error": "ValueError", "match": "different types at key path", "jax": ">=0.10.2"}]
def body(carry, x):
    total, model = carry
    return total + x, model


nnx.scan(body)((jnp.zeros(()), Net()), xs)

# %% [markdown]
# ### `nnx.scan`: `out_axes=nnx.Carry`, and the body returns a pair
#
# With `out_axes=nnx.Carry` the whole return value is the carry. Return `model` alone, or say
# `out_axes=(nnx.Carry, 0)`.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Carry references must be the same between iterations", "mode": "graph"}, {"error": "ValueError", "match": "a subtree of different type\n    <class 'tuple'>", "mode": "tree"}]
@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def body(model, x):
    model.bias[...] += x
    return model, x


body(Net(), xs)

# %% [markdown]
# ## The carry comes back in another form
#
# ### `nnx.fori_loop`: `body(carry, i)` instead of `body(i, carry)`
#
# The body takes the index for the carry and returns it. The index is the first argument.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.fori_loop requires body function's input and output to have the same reference and pytree structure", "flax": "<0.12.3", "mode": "graph"}, {"error": "AttributeError", "match": "'ShapeDtypeStruct' object has no attribute '_graphdef'", "flax": ">=0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "different types at key path", "mode": "tree"}]
def body(model, i):
    return model


nnx.fori_loop(0, 3, body, Net())

# %% [markdown]
# ### `nnx.fori_loop`: `body(carry, i)`, and the body uses the model
#
# The index has no attributes. `nnx.scan` says the same when its arguments are swapped: there the carry is
# the first argument.


# %% tags=["raises-exception"] raises=[{"error": "AttributeError", "match": "DynamicJaxprTracer has no attribute bias"}]
def body(model, i):
    model.bias[...] += i
    return model


nnx.fori_loop(0, 3, body, Net())

# %% [markdown]
# ### `nnx.fori_loop`: `body(carry, i)`, and the body unpacks the carry
#
# The index cannot be unpacked.


# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "iteration over a 0-d array"}]
def body(carry, i):
    total, model = carry
    return total + i, model


nnx.fori_loop(0, 3, body, (jnp.zeros(()), Net()))

# %% [markdown]
# ### `nnx.fori_loop`: the components come back in another order
#
# Return `total + 1, model`. A NamedTuple or a dict as carry makes the mistake hard to make.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.fori_loop requires body function's input and output to have the same reference and pytree structure", "flax": "<0.12.3", "mode": "graph"}, {"error": "AttributeError", "match": "'ShapeDtypeStruct' object has no attribute '_graphdef'", "flax": ">=0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "different types at key path", "mode": "tree"}]
def body(i, carry):
    total, model = carry
    return model, total + 1


nnx.fori_loop(0, 3, body, (jnp.zeros(()), Net()))

# %% [markdown]
# ### `nnx.while_loop`: the components come back in another order

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.while_loop requires body function's input and output to have the same reference and pytree structure", "mode": "graph"}, {"error": "ValueError", "match": "different types at key path", "mode": "tree"}]
nnx.while_loop(less_than_three, lambda carry: (carry[1], carry[0] + 1), (0, Net()))

# %% [markdown]
# ### `nnx.scan`: the components come back in another order
#
# The message names an object that came in and the one that came back in its place; where in the carry
# stands at its end.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Carry references must be the same between iterations", "mode": "graph"}, {"error": "ValueError", "match": "different types at key path", "mode": "tree"}]
def body(carry, x):
    total, model = carry
    return (model, total + x), x


nnx.scan(body)((jnp.zeros(()), Net()), xs)

# %% [markdown]
# ### `nnx.fori_loop`: a component is dropped from the carry
#
# Return every component, the unchanged ones too.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.fori_loop requires body function's input and output to have the same reference and pytree structure", "flax": "<0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "different lengths of tuple at key path", "flax": ">=0.12.3", "jax": ">=0.10.2"}]
def body(i, carry):
    total, model = carry
    return (total + 1,)


nnx.fori_loop(0, 3, body, (jnp.zeros(()), Net()))

# %% [markdown]
# ### `nnx.scan`: a component is dropped from the carry


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Tuple arity mismatch: 1 != 2", "jax": "<0.10.2"}, {"error": "ValueError", "match": "different lengths of tuple at key path", "jax": ">=0.10.2"}]
def body(carry, x):
    total, model = carry
    return (total + x,), x


nnx.scan(body)((jnp.zeros(()), Net()), xs)

# %% [markdown]
# ### `nnx.fori_loop`: a tuple comes back as a list
#
# A list, a tuple and a NamedTuple are three structures. Return the kind that was passed in.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.fori_loop requires body function's input and output to have the same reference and pytree structure", "flax": "<0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "a subtree of different type\n    <class 'list'>", "flax": ">=0.12.3", "jax": ">=0.10.2"}]
def body(i, carry):
    total, model = carry
    return [total + 1, model]


nnx.fori_loop(0, 3, body, (jnp.zeros(()), Net()))

# %% [markdown]
# ### `nnx.scan`: a tuple comes back as a list


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Expected tuple, got [JitTracer", "jax": "<0.10.2"}, {"error": "ValueError", "match": "a subtree of different type\n    <class 'list'>", "jax": ">=0.10.2"}]
def body(carry, x):
    total, model = carry
    return [total + x, model], x


nnx.scan(body)((jnp.zeros(()), Net()), xs)

# %% [markdown]
# ### `nnx.fori_loop`: a dict comes back with another key
#
# The keys are part of the structure, their order is not. Return the keys that came in.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.fori_loop requires body function's input and output to have the same reference and pytree structure", "flax": "<0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "different pytree metadata at key path", "flax": ">=0.12.3", "jax": ">=0.10.2"}]
def body(i, carry):
    return {"model": carry["model"], "sum": carry["total"] + 1}


nnx.fori_loop(0, 3, body, {"model": Net(), "total": jnp.zeros(())})

# %% [markdown]
# ### `nnx.fori_loop`: a slot that is `None` becomes an array
#
# `None` is a subtree without leaves, so it cannot turn into a leaf. Start from zeros of the shape and dtype
# that the body returns.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.fori_loop requires body function's input and output to have the same reference and pytree structure", "flax": "<0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "different pytree metadata at key path", "flax": ">=0.12.3", "jax": ">=0.10.2", "mode": "graph"}, {"error": "ValueError", "match": "different types at key path", "mode": "tree"}]
def body(i, carry):
    model, last = carry
    return model, jnp.float32(i)


nnx.fori_loop(0, 3, body, (Net(), None))

# %% tags=["proof"]
_, last = nnx.fori_loop(0, 3, body, (Net(), jnp.zeros(())))
assert last == 2
print("started from zeros, the slot ends with the last index:", int(last))

# %% [markdown]
# ### `nnx.scan`: a slot that is `None` becomes an array

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Expected None, got JitTracer", "jax": "<0.10.2"}, {"error": "ValueError", "match": "different types at key path", "jax": ">=0.10.2"}]
nnx.scan(lambda last, x: (x, x))(None, xs)

# %% [markdown]
# ### `nnx.fori_loop`: an array becomes `None`
#
# The other way round. Return the array as it came.

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "scan body function carry input and carry output must have the same pytree structure"}]
nnx.fori_loop(0, 3, lambda i, carry: (carry[0], None), (Net(), jnp.zeros(())))

# %% [markdown]
# ## The Module gains, loses or changes an attribute
#
# ### `nnx.fori_loop`: the body adds an attribute
#
# The Module that comes back has more leaves than the one that went in. Create the Variable before the loop,
# in `__init__`, and write into it in the body.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.fori_loop requires body function's input and output to have the same reference and pytree structure", "flax": "<0.12.3", "mode": "graph"}, {"error": "TypeError", "match": "scan body function carry input and carry output must have the same pytree structure", "flax": ">=0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "different numbers of pytree children at key path", "mode": "tree"}]
def body(i, model):
    model.last = nnx.Variable(model.bias[...])
    return model


nnx.fori_loop(0, 3, body, Net())


# %% tags=["proof"]
def body(i, model):
    model.last[...] = model.bias[...]
    model.bias[...] += 1
    return model


model = Net()
model.last = nnx.Variable(jnp.zeros(2))
nnx.fori_loop(0, 3, body, model)
assert jnp.all(model.bias[...] == 3) and jnp.all(model.last[...] == 2)
print("created before the loop, written in the body:", model.last[...])

# %% [markdown]
# ### `nnx.while_loop`: the body adds an attribute


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.while_loop requires body function's input and output to have the same reference and pytree structure", "mode": "graph"}, {"error": "ValueError", "match": "different numbers of pytree children at key path", "mode": "tree"}]
def body(carry):
    i, model = carry
    model.last = nnx.Variable(model.bias[...])
    return i + 1, model


nnx.while_loop(less_than_three, body, (0, Net()))

# %% [markdown]
# ### `nnx.scan`: the body adds an attribute


# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "scan body function carry input and carry output must have the same pytree structure", "mode": "graph"}, {"error": "ValueError", "match": "different numbers of pytree children at key path", "mode": "tree"}]
def body(model, x):
    model.last = nnx.Variable(model.bias[...])
    return model, x


nnx.scan(body)(Net(), xs)

# %% [markdown]
# ### The model calls `sow` in the body
#
# The first `sow` adds an attribute, so every loop answers as above, here `nnx.scan`. Return the value
# instead: `nnx.scan` stacks it. The forms that keep `sow` are in
# [google/flax#5051](https://github.com/google/flax/issues/5051); no cell here runs them.


# %%
class SowNet(Net):
    def __call__(self, x):
        y = super().__call__(x)
        self.sow(nnx.Intermediate, "hidden", y)
        return y


# Newer releases deprecate sow outside of nnx.capture. The loop's own error comes after that warning.
warnings.filterwarnings("ignore", message="Using 'Module.sow", category=DeprecationWarning)

# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "scan body function carry input and carry output must have the same pytree structure", "mode": "graph"}, {"error": "ValueError", "match": "different numbers of pytree children at key path", "mode": "tree"}]
nnx.scan(lambda model, x: (model, model(x)))(SowNet(), xs)

# %% tags=["proof"]
_, hidden = nnx.scan(lambda model, x: (model, model(x)))(Net(), xs)
assert hidden.shape == (3, 2) and jnp.all(hidden[:, 0] == xs)
print("returned instead of sown, stacked:", hidden.shape)

# %% [markdown]
# ### `nnx.fori_loop`: the body removes an attribute
#
# The loop looks for the Variable that went in and finds none. Keep the attribute; write zeros into it, or
# delete it before the loop.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.fori_loop requires body function's input and output to have the same reference and pytree structure", "flax": "<0.12.3", "mode": "graph"}, {"error": "RuntimeError", "match": "generator raised StopIteration", "flax": ">=0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "different numbers of pytree children at key path", "mode": "tree"}]
def body(i, model):
    del model.bias
    return model


nnx.fori_loop(0, 3, body, Net())

# %% [markdown]
# ### `nnx.while_loop`: the body removes an attribute


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.while_loop requires body function's input and output to have the same reference and pytree structure", "mode": "graph"}, {"error": "ValueError", "match": "different numbers of pytree children at key path", "mode": "tree"}]
def body(carry):
    i, model = carry
    del model.bias
    return i + 1, model


nnx.while_loop(less_than_three, body, (0, Net()))

# %% [markdown]
# ### `nnx.scan`: the body removes an attribute


# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "scan body function carry input and carry output must have the same pytree structure", "mode": "graph"}, {"error": "ValueError", "match": "different numbers of pytree children at key path", "mode": "tree"}]
def body(model, x):
    del model.bias
    return model, x


nnx.scan(body)(Net(), xs)

# %% [markdown]
# ### `nnx.fori_loop`: an array is assigned over a Param
#
# `model.bias = model.bias + 1` computes an array and puts it in the place of the Param: a Variable is gone.
# Write into it: `model.bias[...] += 1`.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.fori_loop requires body function's input and output to have the same reference and pytree structure", "flax": "<0.12.3", "mode": "graph"}, {"error": "RuntimeError", "match": "generator raised StopIteration", "flax": ">=0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "fori_loop Variable identity must be preserved across iterations", "mode": "tree"}]
def body(i, model):
    model.bias = model.bias + 1
    return model


nnx.fori_loop(0, 3, body, Net())


# %% tags=["proof"]
def body(i, model):
    model.bias[...] += 1
    return model


model = Net()
nnx.fori_loop(0, 3, body, model)
assert isinstance(model.bias, nnx.Param) and jnp.all(model.bias[...] == 3)
print("written into the Param:", model.bias[...])

# %% [markdown]
# ### `nnx.while_loop`: an array is assigned over a Param


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.while_loop requires body function's input and output to have the same reference and pytree structure", "mode": "graph"}, {"error": "ValueError", "match": "while_loop Variable identity must be preserved across iterations", "mode": "tree"}]
def body(carry):
    i, model = carry
    model.bias = model.bias + 1
    return i + 1, model


nnx.while_loop(less_than_three, body, (0, Net()))

# %% [markdown]
# ### `nnx.scan`: an array is assigned over a Param


# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "scan body function carry input and carry output must have the same pytree structure", "mode": "graph"}, {"error": "ValueError", "match": "scan Variable identity must be preserved across iterations", "mode": "tree"}]
def body(model, x):
    model.bias = model.bias + 1
    return model, x


nnx.scan(body)(Net(), xs)


# %% [markdown]
# ### `nnx.fori_loop`: a Python attribute changes
#
# A Python attribute is part of the structure, not of the data: the loop traces the body and never sees it
# change again. Hold it in a Variable.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.fori_loop requires body function's input and output to have the same reference and pytree structure", "flax": "<0.12.3", "mode": "graph"}, {"error": "TypeError", "match": "scan body function carry input and carry output must have the same pytree structure", "flax": ">=0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "different pytree metadata at key path", "mode": "tree"}]
class Counting(Net):
    def __init__(self):
        super().__init__()
        self.calls = 0


def body(i, model):
    model.calls += 1
    return model


nnx.fori_loop(0, 3, body, Counting())


# %% tags=["proof"]
model = Net()
model.calls = nnx.Variable(jnp.zeros((), jnp.int32))


def body(i, model):
    model.calls[...] += 1
    return model


nnx.fori_loop(0, 3, body, model)
assert model.calls[...] == 3
print("counted in a Variable:", int(model.calls[...]))

# %% [markdown]
# ### `nnx.while_loop`: a Python attribute changes


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.while_loop requires body function's input and output to have the same reference and pytree structure", "mode": "graph"}, {"error": "ValueError", "match": "different pytree metadata at key path", "mode": "tree"}]
def body(carry):
    i, model = carry
    model.calls += 1
    return i + 1, model


nnx.while_loop(less_than_three, body, (0, Counting()))

# %% [markdown]
# ### `nnx.scan`: a Python attribute changes
#
# Flax 0.11.2 refuses it. 0.12.2 and newer accept it in graph mode and count once instead of three times:
# it is the trace that is counted.


# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "scan body function carry input and carry output must have the same pytree structure", "flax": "<0.12.2"}, {"error": "ValueError", "match": "different pytree metadata at key path", "mode": "tree"}]
def body(model, x):
    model.calls += 1
    return model, x


model, _ = nnx.scan(body)(Counting(), xs)
print("accepted: after three iterations the count is", model.calls)

# %% [markdown]
# ## Another object comes back
#
# ### `nnx.fori_loop`: the body returns a new Module
#
# The loop knows the Variables that went in and wants those back. Graph mode accepts the copy since Flax
# 0.12.3, but then the result is in the returned Module only. Write the new values into the old Variables
# with `nnx.update`; that runs in all loops, on all releases and in both modes.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.fori_loop requires body function's input and output to have the same reference and pytree structure", "flax": "<0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "fori_loop Variable identity must be preserved across iterations", "mode": "tree"}]
def body(i, model):
    model = nnx.clone(model)
    model.bias[...] += 1
    return model


model = Net()
returned = nnx.fori_loop(0, 3, body, model)
print(f"accepted: {returned.bias[0]:g} in the returned Module, {model.bias[0]:g} in the one passed in")


# %% tags=["proof"]
def update(model):
    new = jax.tree.map(lambda leaf: leaf + 1, model)  # a new Module, from wherever it comes
    nnx.update(model, nnx.state(new))
    return model


loops = [
    lambda model: nnx.fori_loop(0, 3, lambda i, model: update(model), model),
    lambda model: nnx.while_loop(less_than_three, lambda c: (c[0] + 1, update(c[1])), (0, model))[1],
    lambda model: nnx.scan(lambda model, x: (update(model), x))(model, xs)[0],
]
for loop in loops:
    model = Net()
    returned = loop(model)
    assert jnp.all(model.bias[...] == 3) and jnp.all(returned.bias[...] == 3)
print(f"written into the old Variables: right in {len(loops)} loops")

# %% [markdown]
# ### `nnx.while_loop`: the body returns a new Module
#
# A `State` that `jax.tree.map` rebuilds is the same mistake, for `nnx.fori_loop` too: [nnx.fori_loop rejects
# the gradient accumulator](fori_loop_rejects_accumulator.py).

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.while_loop requires body function's input and output to have the same reference and pytree structure", "mode": "graph"}, {"error": "ValueError", "match": "while_loop Variable identity must be preserved across iterations", "mode": "tree"}]
nnx.while_loop(less_than_three, lambda carry: (carry[0] + 1, nnx.clone(carry[1])), (0, Net()))

# %% [markdown]
# ### `nnx.scan`: the body returns a new Module

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Carry references must be the same between iterations", "mode": "graph"}, {"error": "ValueError", "match": "scan Variable identity must be preserved across iterations", "mode": "tree"}]
nnx.scan(lambda model, x: (nnx.clone(model), x))(Net(), xs)

# %% [markdown]
# ### `nnx.fori_loop`: a Variable or a submodule is replaced
#
# A new Param under an old name. Graph mode accepts it since Flax 0.12.3. Write into the Param that is
# there: `model.bias[...] = ...`.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.fori_loop requires body function's input and output to have the same reference and pytree structure", "flax": "<0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "fori_loop Variable identity must be preserved across iterations", "mode": "tree"}]
def body(i, model):
    model.bias = nnx.Param(model.bias[...] + 1)
    return model


model = nnx.fori_loop(0, 3, body, Net())
print(f"accepted: bias {model.bias[0]:g}")

# %% [markdown]
# ### `nnx.scan`: a Variable or a submodule is replaced
#
# Graph mode accepts it on every release shown here, tree mode does not.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "scan Variable identity must be preserved across iterations", "mode": "tree"}]
def body(model, x):
    model.bias = nnx.Param(model.bias[...] + 1)
    return model, x


model, _ = nnx.scan(body)(Net(), xs)
print(f"accepted: bias {model.bias[0]:g}")

# %% [markdown]
# ### `nnx.fori_loop`: two Modules of the carry change places
#
# Graph mode accepts it since Flax 0.12.3: what is returned is right, and after an even number of iterations
# the objects that were passed in hold each other's values. Exchange the values, not the objects.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.fori_loop requires body function's input and output to have the same reference and pytree structure", "flax": "<0.12.3", "mode": "graph"}, {"error": "ValueError", "match": "fori_loop Variable identity must be preserved across iterations", "mode": "tree"}]
first, second = Net(), Net()
second.bias[...] += 5
pair = nnx.fori_loop(0, 2, lambda i, carry: carry[::-1], (first, second))
print("accepted: returned", [int(model.bias[0]) for model in pair])
print("the objects that were passed in hold", [int(model.bias[0]) for model in (first, second)])


# %% tags=["proof"]
def body(i, carry):
    first, second = carry
    # A copy, because a state shares its Variables with the Module.
    old_first, old_second = jax.tree.map(jnp.array, (nnx.state(first), nnx.state(second)))
    nnx.update(first, old_second)
    nnx.update(second, old_first)
    return first, second


for iterations, want in (2, [0, 5]), (3, [5, 0]):
    first, second = Net(), Net()
    second.bias[...] += 5
    pair = nnx.fori_loop(0, iterations, body, (first, second))
    assert [int(model.bias[0]) for model in pair] == [int(model.bias[0]) for model in (first, second)] == want
print("values exchanged: returned and passed in agree")

# %% [markdown]
# ### `nnx.while_loop`: two Modules of the carry change places

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "nnx.while_loop requires body function's input and output to have the same reference and pytree structure", "mode": "graph"}, {"error": "ValueError", "match": "while_loop Variable identity must be preserved across iterations", "mode": "tree"}]
nnx.while_loop(less_than_three, lambda carry: (carry[0] + 1, carry[2], carry[1]), (0, Net(), Net()))

# %% [markdown]
# ### `nnx.scan`: two Modules of the carry change places

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Carry references must be the same between iterations", "mode": "graph"}, {"error": "ValueError", "match": "scan Variable identity must be preserved across iterations", "mode": "tree"}]
nnx.scan(lambda carry, x: (carry[::-1], x))((Net(), Net()), xs)

# %% [markdown]
# ## The accumulator is not shaped like the gradients


# %%
class NormNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


class DropoutNet(NormNet):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(super().__call__(x))


def loss_fn(model, x):
    return jnp.mean((model(x) - x) ** 2)


@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def add_grads(carry, minibatch):
    grads, model = carry
    return jax.tree.map(jnp.add, grads, nnx.grad(loss_fn)(model, minibatch)), model


# %% [markdown]
# ### The accumulator has statistics and random state
#
# `nnx.state(model)` has every Variable, gradients have the Params: `dropout` is missing in them. Filter:
# `nnx.state(model, nnx.Param)`. (Tree mode cannot differentiate a random state at all; [accumulate with
# nnx.fori_loop](accumulate_with_fori_loop.py) shows the form for such a model.)

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Mismatch custom node data: ('dropout', 'linear', 'norm') != ('linear', 'norm')", "jax": "<0.10.2"}, {"error": "ValueError", "match": "different numbers of pytree children at key path", "jax": ">=0.10.2", "mode": "graph"}, {"error": "TypeError", "match": "grad requires real- or complex-valued inputs", "mode": "tree"}]
model = DropoutNet(nnx.Rngs(0))
add_grads((jax.tree.map(jnp.zeros_like, nnx.state(model)), model), minibatches)

# %% [markdown]
# ### The accumulator has the statistics of BatchNorm
#
# The same one level down, and other words: `mean` and `var` are missing in the gradients. The same filter.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Dict key mismatch; expected keys: ['bias', 'mean', 'scale', 'var']", "jax": "<0.10.2"}, {"error": "ValueError", "match": "different numbers of pytree children at key path", "jax": ">=0.10.2", "mode": "graph"}, {"error": "ValueError", "match": "different types at key path", "mode": "tree"}]
model = NormNet(nnx.Rngs(0))
add_grads((jax.tree.map(jnp.zeros_like, nnx.state(model)), model), minibatches)

# %% [markdown]
# ### The accumulator is a Module
#
# In graph mode gradients are a `State`, so zeros in the shape of the Module do not fit. In tree mode they do
# fit, and the sum is a new Module, which the loop refuses.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Custom node type mismatch: expected type: <class '__main__.NormNet'>", "jax": "<0.10.2"}, {"error": "ValueError", "match": "different types at key path", "jax": ">=0.10.2", "mode": "graph"}, {"error": "ValueError", "match": "scan Variable identity must be preserved across iterations", "mode": "tree"}]
model = NormNet(nnx.Rngs(0))
add_grads((jax.tree.map(jnp.zeros_like, model), model), minibatches)


# %% [markdown]
# ### The accumulator that fits
#
# Params on both sides, and the sum written into the Variables that are carried.


# %% tags=["proof"]
@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def add_grads(carry, minibatch):
    grads, model = carry
    new_grads = nnx.state(nnx.grad(loss_fn)(model, minibatch), nnx.Param)
    nnx.update(grads, jax.tree.map(jnp.add, grads, new_grads))
    return grads, model


model, looped = NormNet(nnx.Rngs(0)), NormNet(nnx.Rngs(0))
grads, _ = add_grads((jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param)), model), minibatches)
by_hand = [nnx.state(nnx.grad(loss_fn)(looped, minibatch), nnx.Param) for minibatch in minibatches]
expected = jax.tree.leaves(jax.tree.map(lambda *new: sum(new), *by_hand))

difference = max(np.max(np.abs(np.subtract(a, b))) for a, b in zip(jax.tree.leaves(grads), expected))
assert len(jax.tree.leaves(grads)) == len(expected) == 4 and max(np.max(np.abs(a)) for a in expected) > 1e-2
assert difference < 1e-6, difference
assert jnp.allclose(model.norm.mean[...], looped.norm.mean[...], atol=1e-6)
assert jnp.any(model.norm.mean[...] != 0)
print(f"{len(expected)} gradients and the statistics as in a Python loop")

# %% [markdown]
# `optimizer.update` rejects a list of raw arrays, with the words of the first mistake of this group: put it
# back on the structure of the parameters, as in [accumulate with nnx.fori_loop](accumulate_with_fori_loop.py).
#
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
# ## One object in two places
#
# ### `nnx.scan`: the body also returns the model as an output
#
# The model would be carried and stacked at once. Return values: a loss, a statistic, `nnx.state(...)` copied
# with `jax.tree.map(jnp.array, ...)`.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Inconsistent aliasing detected", "mode": "graph"}, {"error": "ValueError", "match": "Duplicate Param", "mode": "tree"}]
nnx.scan(lambda model, x: (model, model))(Net(), xs)


# %% tags=["proof"]
def body(model, x):
    model.bias[...] += 1
    return model, jax.tree.map(jnp.array, nnx.state(model, nnx.Param))


_, history = nnx.scan(body)(Net(), xs)
assert history["bias"].shape == (3, 2) and history["bias"][:, 0].tolist() == [1, 2, 3]
print("a copy of the parameters of every iteration:", history["bias"].shape)

# %% [markdown]
# ### Tree mode, `nnx.scan`: the same Module twice in the carry
#
# In graph mode it stays one object. Carry it once. In tree mode `nnx.fori_loop` and `nnx.while_loop` say
# nothing and lose the update: [silent wrong results](silent_wrong_results.py).

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Duplicate Param", "mode": "tree"}]
model = Net()
(first, second), _ = nnx.scan(lambda carry, x: (carry, x))((model, model), xs)
print("accepted: still one object,", first is second)


# %% [markdown]
# ### Tree mode, `nnx.scan`: two layers share a Param
#
# Own the Param in one place and use it twice.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Duplicate Param", "mode": "tree"}]
class Tied(nnx.Module):
    def __init__(self):
        self.inner, self.outer = Net(), Net()
        self.outer.weight = self.inner.weight

    def __call__(self, x):
        return self.outer(self.inner(x))


_, y = nnx.scan(lambda model, x: (model, model(x)))(Tied(), xs)
print("accepted:", y.shape)


# %% tags=["proof"]
class Tied(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.full(2, 2.0))

    def __call__(self, x):
        return self.weight[...] * (self.weight[...] * x)


_, y = nnx.scan(lambda model, x: (model, model(x)))(Tied(), xs)
assert jnp.all(y[:, 0] == 4 * xs)
print("one owner, used twice:", y.shape)

# %% [markdown]
# ### Tree mode, `nnx.jit`: the same Module in two arguments
#
# Also the model next to a session that holds it. Pass it once.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Duplicate Param", "mode": "tree"}]
model = Net()
total = nnx.jit(lambda model, session: jnp.sum(model(1) + session["model"](1)))(model, {"model": model})
print(f"accepted: {total:g}")

# %% [markdown]
# ### Tree mode, `nnx.jit`: the function returns its argument
#
# Return nothing: the Variables of the argument are updated in both modes.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Duplicate Param", "mode": "tree"}]
def add_one(model):
    model.bias[...] += 1
    return model


model = Net()
print("accepted: the same object,", nnx.jit(add_one)(model) is model)


# %% tags=["proof"]
@nnx.jit
def add_one(model):
    model.bias[...] += 1


model = Net()
add_one(model)
assert jnp.all(model.bias[...] == 1)
print("updated without a return:", model.bias[...])


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
# - A gradient accumulator in `nnx.fori_loop` is what fails: [nnx.fori_loop rejects the gradient
#   accumulator](fori_loop_rejects_accumulator.py).
# - You do not see which leaf differs: [name the leaf that differs](name_the_leaf_that_differs.py).
# - The message names a dtype or a shape: [carry dtype and shape](carry_dtype_and_shape.py).
# - The message names a trace level, or the body reads a Module from outside:
#   [different trace level](different_trace_level.py).
# - You want no NNX loop at all: [accumulate with split and merge](accumulate_with_split_merge.py).
