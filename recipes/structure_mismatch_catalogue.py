# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: "A loop body returns the carry that it was given: the same components, in the same order and containers."
#     answers: [google/flax#5113, google/jaxopt#258]
#     symptoms: ["nnx.scan raises an AssertionError without a text", "the message says NoneType and the body has no None", "a slot of the carry starts as None"]
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # The carry does not come back as it went in
#
# A loop body returns the carry it was given: the same components in the same order, in the same containers,
# and in them the same Modules. Each message on this page is a breach of that; the heading above it names the
# mistake.
#
# A Module whose attributes change, or that is replaced by another, is in [Modules that change in a
# loop](module_changes_in_a_loop.py). How each loop is called is in [arguments and axes of the
# loops](loop_arguments_and_axes.py).
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
step = nnx.jit(train_step)
expected_total = sum(float(step(expected, minibatch)) for minibatch in minibatches)

for loop in loop_with_fori, loop_with_while, loop_with_scan:
    session = make_session()
    result = loop(train_step, session, minibatches)
    (total, returned), losses = result if loop is loop_with_scan else (result, None)
    assert losses is None or (losses.shape == (4,) and abs(losses.sum() - total) < 1e-5)
    assert abs(total - expected_total) < 1e-5, (total, expected_total)
    for name in "weight", "bias":
        value, want = (getattr(s.model, name)[...] for s in (session, expected))
        assert np.abs(np.subtract(value, want)).max() < 1e-6, f"{name} of the model that was passed in"
        back = getattr(returned.model, name)[...]
        assert np.array_equal(value, back), f"{name} of the model that came back"
    assert np.all(np.array(session.model.bias[...]) != 0)
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
grad = nnx.jit(nnx.grad(loss_fn))
by_hand = [nnx.state(grad(looped, minibatch), nnx.Param) for minibatch in minibatches]
expected = jax.tree.leaves(jax.tree.map(lambda *new: np.sum(new, axis=0), *by_hand))

difference = max(np.max(np.abs(np.subtract(a, b))) for a, b in zip(jax.tree.leaves(grads), expected))
assert len(jax.tree.leaves(grads)) == len(expected) == 4 and max(np.max(np.abs(a)) for a in expected) > 1e-2
assert difference < 1e-6, difference
assert np.allclose(model.norm.mean[...], looped.norm.mean[...], atol=1e-6)
assert np.any(np.array(model.norm.mean[...]) != 0)
print(f"{len(expected)} gradients and the statistics as in a Python loop")

# %% [markdown]
# `optimizer.update` rejects a list of raw arrays, with the words of the first mistake of this group: put it
# back on the structure of the parameters, as in [accumulate with nnx.fori_loop](accumulate_with_fori_loop.py).
#
# ## When to prefer another recipe
#
# - The Module gains, loses or changes an attribute, or another object comes back: [Modules that change in a
#   loop](module_changes_in_a_loop.py).
# - The body gets the wrong arguments, or `in_axes` and `out_axes` do not fit: [arguments and axes of the
#   loops](loop_arguments_and_axes.py).
# - A gradient accumulator in `nnx.fori_loop` is what fails: [nnx.fori_loop rejects the gradient
#   accumulator](fori_loop_rejects_accumulator.py).
# - You do not see which leaf differs: [name the leaf that differs](name_the_leaf_that_differs.py).
# - The message names a dtype or a shape: [carry dtype and shape](carry_dtype_and_shape.py).
# - The message names a trace level, or the body reads a Module from outside:
#   [different trace level](different_trace_level.py).
# - You want no NNX loop at all: [accumulate with split and merge](accumulate_with_split_merge.py).
