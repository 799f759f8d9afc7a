# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Create every Variable before the loop, write into it in the body, return the Modules that came in.
#     answers: [google/flax#5051]
#     symptoms: ["static attribute counted once in nnx.scan", "nnx.clone in a loop body leaves the original unchanged", "swapped modules in a fori_loop carry"]
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # Modules that change in a loop
#
# A loop changes the values of Variables and nothing else about a Module. Create every Variable before the
# loop, write into it in the body, and return the Module that came in, once.
#
# ## A body that changes a Module in place

# %% tags=["snippet"]
import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(2))
        self.bias = nnx.Param(jnp.zeros(2))

    def __call__(self, x):
        return x * self.weight[...] + self.bias[...]


def body(i, model):
    model.bias[...] += i  # into the Variable that is there, not over it
    model.steps[...] += 1
    return model  # the object that came in


model = Net()
model.steps = nnx.Variable(jnp.zeros((), jnp.int32))  # made before the loop, and not a Python number
model = nnx.fori_loop(0, 3, body, model)


# %% [markdown]
# The same in `nnx.while_loop` and `nnx.scan`. What is passed in has the new values, in the Variables that it
# had before.
#
# The cells below run three times over a `Net()` or these numbers. Each loop has words of its own for the same
# mistake: [how to read the messages](structure_mismatch_catalogue.py#how-to-read-the-messages).

# %%
import warnings

import jax

xs = jnp.arange(3.0)


def less_than_three(carry):
    return carry[0] < 3


# %% tags=["proof"]
assert isinstance(model.bias, nnx.Param) and model.steps[...] == 3 and model.bias[...].tolist() == [3, 3]

loops = {
    "nnx.fori_loop": lambda model: nnx.fori_loop(0, 3, body, model),
    "nnx.while_loop": lambda model: nnx.while_loop(
        less_than_three, lambda c: (c[0] + 1, body(*c)), (0, model)
    )[1],
    "nnx.scan": lambda model: nnx.scan(lambda model, x: (body(x, model), x))(model, xs)[0],
}
for name, loop in loops.items():
    model = Net()
    model.steps = nnx.Variable(jnp.zeros((), jnp.int32))
    bias, steps = model.bias, model.steps
    returned = loop(model)
    assert model.bias is bias and model.steps is steps, "the Variables that were there before"
    for passed in model, returned:
        assert passed.bias[...].tolist() == [3, 3] and passed.weight[...].tolist() == [1, 1]
        assert passed.steps[...] == 3
    print(f"{name}: bias {model.bias[...]}, {int(model.steps[...])} steps, in the Module that was passed in")

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
# ## When to prefer another recipe
#
# - The body returns other components, another order or nothing: [the carry does not come back as it went
#   in](structure_mismatch_catalogue.py), which also says how to read the messages.
# - The body gets the wrong arguments, or `in_axes` and `out_axes` do not fit: [arguments and axes of the
#   loops](loop_arguments_and_axes.py).
# - The object that comes back is a State of gradients: [nnx.fori_loop rejects the gradient
#   accumulator](fori_loop_rejects_accumulator.py).
# - You do not see which leaf differs: [name the leaf that differs](name_the_leaf_that_differs.py).
# - The body changes a Module that it does not get as an argument: [different trace
#   level](different_trace_level.py).
# - You want the rules without the messages: [what a loop may touch](what_a_loop_may_touch.py).
