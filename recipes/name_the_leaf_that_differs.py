# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: "explain_carry(loop, body, *args) traces a loop body, runs nothing, and says which path of the carry comes back different and how."
#     answers: [google/flax#5113]
#     symptoms:
#       - the loop rejects the carry and the message does not name the leaf
#       - which leaf of the carry changed
#       - AssertionError without a message from nnx.scan
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # Name the leaf that differs
#
# `print(explain_carry(nnx.fori_loop, body, 0, carry))` says which path of the carry comes back different, and
# how. It traces the body and runs nothing. It reads the same on every release and in both modes, for the
# loops of `nnx` and of `jax.lax`.

# %% tags=["snippet"]
import jax
from flax import nnx


def explain_carry(loop, body, *args, has_y=None):
    """Say where the carry that body(*args) returns differs from the one given. Runs no loop.

    loop: nnx.fori_loop, nnx.while_loop, nnx.scan or its namesake in jax.lax; calls body(*args).
    has_y: does body return (carry, y)? A scan's does, except with out_axes=nnx.Carry.
    """
    in_nnx = loop in (nnx.fori_loop, nnx.while_loop, nnx.scan)  # these ask for the same objects, too
    has_y = loop in (nnx.scan, jax.lax.scan) if has_y is None else has_y

    def look(x, path="carry"):  # {path: (object, its type or value, static data)} of all in x
        children, static = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda child: child is not x)
        parts = {jax.tree_util.keystr(key): child for key, child in children if key}
        names = [k for k in vars(x) if str(k)[0].isalpha()] if isinstance(x, nnx.Pytree) else []
        array = children and not parts and not names
        found = {path: (x, jax.typeof(x) if array else type(x).__name__.replace("NoneType", "None"), static)}
        for key, child in parts.items():
            found |= look(child, path + key)
        return found | {f"{path}.{k}": (None, repr(vars(x)[k]), None) for k in names if f".{k}" not in parts}

    def compare(body, *args):
        old = look(args[loop in (nnx.fori_loop, jax.lax.fori_loop)])  # as of now, before the body
        try:
            out = body(*args)
        except Exception as error:
            return [f"the body itself raises {type(error).__name__}: {error}"]
        if out is None or has_y and not (isinstance(out, tuple) and len(out) == 2):
            return [f"the body returns {look(out)['carry'][1]}, not {'(carry, y)' if has_y else 'a carry'}"]
        new, lines, pairs, skip = look(out[0] if has_y else out), [], [], ()
        for path in old | new:
            (x, a, _), (y, b, _) = (found.get(path, (None, "nothing", None)) for found in (old, new))
            replaced = in_nnx and x is not y and isinstance(x, (nnx.Variable, nnx.Pytree))
            if path.startswith(skip) or a == b and not replaced:
                continue
            traits = ("shape", "dtype", "sharding", "weak_type") if type(a) is type(b) else ()
            differ = [trait for trait in traits if getattr(a, trait, 0) != getattr(b, trait, 0)]
            weak = differ == ["weak_type"] or differ[:1] == ["dtype"] and a.weak_type
            taken = weak and jax.numpy.result_type(x, y) == b.dtype
            hint = f" (another {differ[0]}{', accepted: ~ is a weak type' * taken})" if differ else ""
            lines.append(f"{path}: {a} in, {'another ' * (a == b)}{b} out{hint}".replace(".value:", ":"))
            pairs.append((a, b) if a != b else (id(x), id(y)))
            skip += (path + ".", path + "[") if a != b or isinstance(x, nnx.Pytree) else ()
        if len(pairs) > 1 and {a for a, _ in pairs} == {b for _, b in pairs}:
            lines.insert(0, "what went in comes back, but in another order")
        return lines or [f"{p}: other metadata or private attribute" for p in old if old[p][2] != new[p][2]]

    def evaluate(body, lines):
        eval_shape = nnx.eval_shape if in_nnx else jax.eval_shape
        return eval_shape(lambda *args: lines.extend(compare(body, *args)), *args) or lines

    lines = evaluate(body, [])
    if lines and not evaluate(lambda *args: body(*args[::-1]), []):
        lines.insert(0, "with its arguments swapped the body would be right")
    if lines and not evaluate(lambda *args: (body(*args), None) if has_y else body(*args)[0], []):
        lines.insert(0, f"the body would be right if it returned {'(carry, y)' if has_y else 'the carry'}")
    return "\n".join(lines) or "the carry comes back as it went in"


# %% [markdown]
# Put it where the loop is, also inside `nnx.jit`, and give it what the loop gives to the body:
#
# - `explain_carry(nnx.fori_loop, body, 0, carry)`
# - `explain_carry(nnx.while_loop, body, carry)`
# - `explain_carry(nnx.scan, body, carry, x)`, where `x` is one slice: `jax.tree.map(lambda a: a[0], xs)`
# - `explain_carry(nnx.scan, body, carry, has_y=False)` with `out_axes=nnx.Carry`, where the body returns the
#   carry alone
#
# Loops of `jax.lax` are passed in the same way. Pass the body undecorated. Where `in_axes` has the carry
# in another place, pass a lambda that takes it first.
#
# ## The mistake of google/flax#5113
#
# The body adds gradients to a `State`, adds up the loss, and carries a session of model and optimizer. Inside
# `nnx.jit` the reports are printed once, when the step is traced.

# %%
from typing import NamedTuple

import jax.numpy as jnp
import optax


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.l1 = nnx.Linear(4, 10, rngs=rngs)
        self.l2 = nnx.Linear(10, 4, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.l2(nnx.relu(self.l1(x)))


class TrainSession(NamedTuple):
    model: nnx.Module
    optimizer: nnx.Optimizer


def loss_fn(model, x):
    return jnp.mean((model(x) - x) ** 2)


@nnx.jit
def train_step(session: TrainSession, minibatches):
    def body(i, carry):
        grads, loss, session = carry
        new_loss, new_grads = nnx.value_and_grad(loss_fn)(session.model, minibatches[i])
        grads = jax.tree.map(jnp.add, grads, nnx.state(new_grads, nnx.Param))
        return grads, loss + new_loss, session

    zeros = jax.tree.map(jnp.zeros_like, nnx.state(session.model, nnx.Param))
    for loop in (nnx.fori_loop, jax.lax.fori_loop):
        print(explain_carry(loop, body, 0, (zeros, jnp.zeros(()), session)), end="\n\n")


model = MLP(nnx.Rngs(0))
session = TrainSession(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param))
train_step(session, jnp.ones((4, 8, 4)))

# %% [markdown]
# Loss, model and optimizer are in order. `jax.tree.map` has put the sums into new Variables, which some
# releases refuse: [`nnx.fori_loop` rejects the accumulator](fori_loop_rejects_accumulator.py) says which, and
# what to write instead. `jax.lax.fori_loop` asks for types only, and has nothing to object to.
#
# How to read a line:
#
# - `float32[3] in, bfloat16[3] out`: the type of what went in at this path, and of what came out there.
# - `Param in, another Param out`: the same type, another object. Only the loops of `nnx` ask for the same
#   object, and not all of them on every release.
# - `nothing in`: the body added it. `nothing out`: the body removed it.
# - `~float32[]`: a weak type, as a Python number has. A loop takes over the type that comes out wherever the
#   weak one promotes to it, and the line says `accepted`. That holds for each value alone: where one
#   component takes the value of another, the loop can [still raise](carry_dtype_and_shape.py). And a sum that
#   starts as `0.0` may be kept in `bfloat16`.
#
# ## Each mistake, in the words of the loop and as a path
#
# Every body below goes to its loop and to `explain_carry`. Under the name of the body stand the loop's answer,
# cut to the class and the first sentence, and the report. The loop's answers change from release to release;
# the paths do not.


# %%
import warnings

from IPython.display import Markdown


class Count(nnx.Variable):
    pass


class Block(nnx.Module):
    def __init__(self, seed=0):
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(seed))
        self.count = Count(jnp.zeros(()))
        self.calls = 0


class Case(NamedTuple):
    """A body, its loop, what makes its carry, and the lines that explain_carry must say."""

    loop: object
    body: object
    init: object
    lines: tuple[str, ...]
    has_y: bool

    def explain(self):
        i = (0,) if self.loop in (nnx.fori_loop, jax.lax.fori_loop) else ()
        x = (0.0,) if self.loop in (nnx.scan, jax.lax.scan) else ()
        return explain_carry(self.loop, self.body, *i, self.init(), *x, has_y=self.has_y)

    def run(self):
        """The class and the first sentence of what the loop raises."""
        try:
            if self.loop in (nnx.fori_loop, jax.lax.fori_loop):
                self.loop(0, 2, self.body, self.init())
            elif self.loop in (nnx.while_loop, jax.lax.while_loop):
                self.loop(lambda carry: jnp.array(False), self.body, self.init())
            elif self.loop is nnx.scan:
                out_axes = (nnx.Carry, 0) if self.has_y else nnx.Carry
                nnx.scan(self.body, in_axes=(nnx.Carry, 0), out_axes=out_axes)(self.init(), jnp.zeros(2))
            else:
                jax.lax.scan(self.body, self.init(), jnp.zeros(2))
        except Exception as error:
            sentence = (str(error).strip().splitlines() or ["(no message)"])[0].split(". ")[0]
            return f"{type(error).__name__}: {sentence}"
        return "raises nothing"


cases: list[Case] = []


def case(loop, init, *lines, has_y=None):
    """Keep the decorated body as a case."""
    has_y = loop in (nnx.scan, jax.lax.scan) if has_y is None else has_y

    def keep(body):
        cases.append(Case(loop, body, init, lines, has_y))
        return body

    return keep


def answers(first):
    """The cases from number `first` on: what the loop says, and what explain_carry says."""
    items = []
    for mistake in cases[first:]:
        report = mistake.explain().splitlines()
        report = report if len(report) < 5 else [report[0], "..."]
        said = [f"the loop: `` {mistake.run()} ``", *(f"`` {line} ``" for line in report)]
        items.append(f"- `{mistake.body.__name__}`, `nnx.{mistake.loop.__name__}`")
        items += [f"  - {line}" for line in said]
    return Markdown("\n".join(items))


def total_and_block():
    return jnp.zeros(()), Block()


# %% [markdown]
# ### The body returns something else

# %%
first = len(cases)


@case(nnx.fori_loop, Block, "the body returns None, not a carry")
def forgets_to_return(i, block):
    block.count[...] += i


@case(nnx.fori_loop, total_and_block, "the body returns None, not a carry")
def forgets_to_return_a_tuple(i, carry):
    carry = (carry[0] + 1, carry[1])


@case(nnx.while_loop, Block, "the body returns None, not a carry")
def forgets_to_return_to_while(block):
    block.count[...] += 1


@case(nnx.scan, Block, "the body returns None, not (carry, y)")
def forgets_to_return_to_scan(block, x):
    block.count[...] += x


right = "the body would be right if it returned (carry, y)"


@case(nnx.scan, Block, right, "the body returns Block, not (carry, y)")
def returns_only_the_carry(block, x):
    return block


@case(nnx.scan, total_and_block, right, "carry: tuple in, float32[] out")
def returns_only_the_carry_which_is_a_pair(carry, x):
    return carry


right = "the body would be right if it returned the carry"


@case(nnx.scan, Block, right, "carry: Block in, tuple out", has_y=False)
def returns_a_y_where_out_axes_is_Carry(block, x):
    return block, x


right = "with its arguments swapped the body would be right"


@case(nnx.fori_loop, Block, right, "carry: Block in, ~int32[] out")
def takes_carry_and_i(block, i):
    return block


@case(nnx.fori_loop, total_and_block, right, "the body itself raises IndexError")
def takes_carry_and_i_and_uses_them(carry, i):
    return carry[0] + i, carry[1]


answers(first)

# %% [markdown]
# ### A component of the carry is elsewhere or missing

# %%
first = len(cases)
order = "what went in comes back, but in another order"
mixed = "carry[0]: float32[] in, Block out", "carry[1]: Block in, float32[] out"


@case(nnx.fori_loop, total_and_block, order, *mixed)
def changes_the_order(i, carry):
    total, block = carry
    return block, total + 1


@case(nnx.scan, total_and_block, order, *mixed)
def changes_the_order_in_scan(carry, x):
    total, block = carry
    return (block, total + x), x


other = "carry[0]: Block in, another Block out", "carry[1]: Block in, another Block out"


@case(nnx.fori_loop, lambda: (Block(0), Block(1)), order, *other)
def swaps_two_modules(i, carry):
    return carry[1], carry[0]


@case(nnx.scan, lambda: (Block(0), Block(1)), order, *other)
def swaps_two_modules_in_scan(carry, x):
    return (carry[1], carry[0]), x


@case(nnx.fori_loop, total_and_block, "carry: tuple in, list out")
def turns_the_tuple_into_a_list(i, carry):
    return list(carry)


@case(nnx.fori_loop, total_and_block, "carry[1]: Block in, nothing out")
def drops_a_component(i, carry):
    return (carry[0] + 1,)


@case(nnx.fori_loop, lambda: (jnp.zeros(()), None), "carry[1]: None in, float32[] out")
def fills_a_slot_that_held_None(i, carry):
    return carry[0], carry[0] + 1


answers(first)

# %% [markdown]
# ### An array comes back with another type

# %%
first = len(cases)


@case(
    nnx.fori_loop,
    lambda: (MLP(nnx.Rngs(0)), jnp.zeros(())),
    "carry[0].l1.bias: float32[10] in, bfloat16[10] out (another dtype)",
    "carry[0].l1.kernel: float32[4,10] in, bfloat16[4,10] out (another dtype)",
)
def rounds_a_layer(i, carry):
    model, total = carry
    nnx.update(model.l1, jax.tree.map(lambda a: a.astype(jnp.bfloat16), nnx.state(model.l1)))
    return model, total


@case(
    nnx.fori_loop,
    lambda: {"grads": [jnp.zeros(3, jnp.bfloat16)]},
    "carry['grads'][0]: bfloat16[3] in, float32[3] out (another dtype)",
)
def adds_float32_to_bfloat16(i, carry):
    return {"grads": [carry["grads"][0] + jnp.ones(3)]}


@case(nnx.fori_loop, lambda: jnp.int32(0), "carry: int32[] in, float32[] out (another dtype)")
def adds_float32_to_int32(i, total):
    return total + jnp.float32(1)


@case(nnx.while_loop, total_and_block, "carry[0]: float32[] in, float32[3] out (another shape)")
def adds_a_vector_to_a_scalar(carry):
    total, block = carry
    return total + jnp.ones(3), block


accepted = "accepted: ~ is a weak type"


@case(nnx.fori_loop, lambda: 0.0, f"carry: ~float32[] in, bfloat16[] out (another dtype, {accepted})")
def adds_bfloat16_to_a_Python_number(i, total):
    return total + jnp.ones((), jnp.bfloat16)


@case(nnx.scan, lambda: 0.0, f"carry: ~float32[] in, float32[] out (another weak_type, {accepted})")
def adds_float32_to_a_Python_number(total, x):
    return total + jnp.ones(()), x


mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


@case(
    nnx.fori_loop,
    lambda: jax.device_put(jnp.zeros((8, 4)), by_rows),
    "carry: float32[8@data,4] in, float32[8,4] out (another sharding)",
)
def loses_the_sharding(i, grads):
    return jax.sharding.reshard(grads, replicated)


answers(first)

# %% [markdown]
# ### The body changes a Module

# %%
first = len(cases)


@case(nnx.fori_loop, Block, "carry.extra: nothing in, Param out")
def adds_an_attribute(i, block):
    block.extra = nnx.Param(jnp.zeros(3))
    return block


@case(nnx.while_loop, Block, "carry.extra: nothing in, Param out")
def adds_an_attribute_in_while(block):
    block.extra = nnx.Param(jnp.zeros(3))
    return block


@case(nnx.fori_loop, Block, "carry.loss: nothing in, Intermediate out")
def sows(i, block):
    with warnings.catch_warnings():  # newer releases warn that sow should be inside nnx.capture
        warnings.simplefilter("ignore", DeprecationWarning)
        block.sow(nnx.Intermediate, "loss", block.count[...])
    return block


@case(nnx.fori_loop, Block, "carry.linear.bias: Param in, nothing out")
def removes_an_attribute(i, block):
    del block.linear.bias
    return block


@case(nnx.fori_loop, Block, "carry.linear.bias: Param in, float32[3] out")
def assigns_an_array_to_a_Param(i, block):
    block.linear.bias = block.linear.bias + 1.0
    return block


@case(nnx.fori_loop, Block, "carry.calls: 0 in, 1 out")
def counts_in_a_Python_attribute(i, block):
    block.calls += 1
    return block


@case(nnx.fori_loop, Block, "carry: other metadata or private attribute")
def writes_a_private_attribute(i, block):
    block._calls = 1
    return block


@case(nnx.fori_loop, Block, "carry.linear: Linear in, another Linear out")
def replaces_a_submodule(i, block):
    block.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(1))
    return block


@case(nnx.fori_loop, Block, "carry.linear.bias: Param in, another Param out")
def replaces_a_Variable(i, block):
    block.linear.bias = nnx.Param(jnp.ones(3))
    return block


@case(nnx.fori_loop, Block, "carry: Block in, another Block out")
def returns_a_new_module(i, block):
    return Block(1)


@case(nnx.scan, Block, "carry: Block in, another Block out")
def returns_a_new_module_to_scan(block, x):
    return Block(1), x


answers(first)

# %% [markdown]
# ### The body rebuilds the Variables of a State

# %%
first = len(cases)
rebuilt = "carry['bias']: Param in, another Param out", "carry['kernel']: Param in, another Param out"


def zeros_of_params():
    return jax.tree.map(jnp.zeros_like, nnx.state(Block().linear, nnx.Param))


@case(nnx.fori_loop, zeros_of_params, *rebuilt)
def rebuilds_the_State(i, grads):
    return jax.tree.map(lambda a: a + 1, grads)


@case(nnx.while_loop, zeros_of_params, *rebuilt)
def rebuilds_the_State_in_while(grads):
    return jax.tree.map(lambda a: a + 1, grads)


@case(nnx.scan, zeros_of_params, *rebuilt)
def rebuilds_the_State_in_scan(grads, x):
    return jax.tree.map(lambda a: a + 1, grads), x


@case(
    nnx.fori_loop,
    zeros_of_params,
    "carry['bias']: Param in, another Param out",
    "carry['bias']: float32[3] in, bfloat16[3] out (another dtype)",
    "carry['kernel']: Param in, another Param out",
    "carry['kernel']: float32[3,3] in, bfloat16[3,3] out (another dtype)",
)
def rebuilds_the_State_in_bfloat16(i, grads):
    return jax.tree.map(lambda a: (a + 1).astype(jnp.bfloat16), grads)


answers(first)

# %% [markdown]
# ### The body itself raises
#
# Then there is no carry to compare, and the report names the exception. The loop's own traceback leads to
# the line.

# %%
first = len(cases)
outer = Block()


@case(nnx.scan, Block, "the body itself raises TypeError: takes_too_few_arguments() takes 1 positional")
def takes_too_few_arguments(block):
    return block, 0.0


@case(nnx.fori_loop, lambda: jnp.zeros(()), "the body itself raises TraceContextError: Cannot mutate Count")
def changes_a_Module_that_is_not_carried(i, total):
    outer.count[...] += 1
    return total + 1


def zeros_of_everything():
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    return jax.tree.map(jnp.zeros_like, nnx.state(model)), model


@case(nnx.fori_loop, zeros_of_everything, "the body itself raises ValueError")
def adds_gradients_to_the_state_of_everything(i, carry):
    total, model = carry
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    return jax.tree.map(jnp.add, total, grads), model


answers(first)

# %% [markdown]
# ## Proof: each is named
#
# The lines of every report are asserted: the same on every release and in both modes, and no line more.

# %% tags=["proof"]
for mistake in cases:
    said = mistake.explain().splitlines()
    if "raises" in mistake.lines[-1]:  # the message of the exception may go on
        said = said[: len(mistake.lines)]
    named = [line for line, words in zip(said, mistake.lines, strict=False) if line.startswith(words)]
    assert len(named) == len(said) == len(mistake.lines), (mistake.body.__name__, said)
print(f"{len(cases)} mistakes, each with its path and its words")

last_line = max(line for *_, line in explain_carry.__code__.co_lines() if line)
assert last_line < 60
print(f"the snippet ends on line {last_line}")

# %% [markdown]
# ## Proof: a sound body is called sound
#
# BatchNorm, Dropout, an optimizer, metrics, a random stream and raw arrays, all in one carry and all changed
# by the body. Each of these loops is run, too.

# %% tags=["proof"]
sound = "the carry comes back as it went in"


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(self.norm(x)))


def init():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    zeros = [jnp.zeros_like(p) for p in jax.tree.leaves(nnx.state(model, nnx.Param))]
    return TrainSession(model, optimizer), nnx.MultiMetric(loss=nnx.metrics.Average()), nnx.Rngs(1), zeros


def train(i, carry):
    session, metrics, rngs, total = carry
    graphdef, params, rest = nnx.split(session.model, nnx.Param, ...)
    x = jax.random.normal(rngs(), (8, 4))

    def minibatch_loss(params):
        merged = nnx.merge(graphdef, params, rest, copy=True)
        return loss_fn(merged, x), nnx.state(merged, nnx.Not(nnx.Param))

    (loss, new_rest), grads = jax.value_and_grad(minibatch_loss, has_aux=True)(params)
    nnx.update(session.model, new_rest)
    session.optimizer.update(session.model, grads)
    metrics.update(values=loss)
    return session, metrics, rngs, jax.tree.map(jnp.add, total, jax.tree.leaves(grads))


def scan_step(carry, x):
    return train(0, carry), x


def split_zeros():
    return nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)[1:]


def split_step(carry, x):  # to jax.lax, States that are built anew are as good as the old ones
    return jax.tree.map(lambda a: a, carry), x


sound_cases = [
    Case(nnx.fori_loop, train, init, (), False),
    Case(nnx.while_loop, lambda carry: train(0, carry), init, (), False),
    Case(nnx.scan, scan_step, init, (), True),
    Case(jax.lax.fori_loop, train, init, (), False),
    Case(jax.lax.scan, split_step, split_zeros, (), True),
    Case(jax.lax.while_loop, lambda carry: split_step(carry, 0)[0], split_zeros, (), False),
]
for right in sound_cases:
    assert right.explain() == sound, (right.loop, right.explain())
    assert right.run() == "raises nothing", (right.loop, right.run())
assert len(jax.tree.leaves(init())) > 20
print(f"{len(sound_cases)} sound bodies: {sound}")

assert explain_carry(nnx.scan, lambda carry: train(0, carry), init(), has_y=False) == sound
nnx.scan(lambda carry: train(0, carry), in_axes=nnx.Carry, out_axes=nnx.Carry, length=2)(init())
print("and a scan with nothing but a carry")

# %% [markdown]
# For every pair of these types, as a carry of one value, the report says `accepted`, or finds nothing, where `jax.lax.fori_loop` takes
# the pair, and nowhere else.

# %% tags=["proof"]
values = [0, 0.0, jnp.int32(0), jnp.float32(0), jnp.bfloat16(0), jnp.zeros(3), jnp.zeros(3, jnp.int32)]


def is_taken(start, end):
    try:
        jax.eval_shape(lambda: jax.lax.fori_loop(0, 2, lambda i, total: end, start))
    except TypeError:
        return False
    return True


def is_called_fine(start, end):
    report = explain_carry(jax.lax.fori_loop, lambda i, total: end, 0, start)
    assert report == sound or "another" in report, report
    return report == sound or "accepted" in report


pairs = [(start, end) for start in values for end in values]
assert [is_taken(*pair) for pair in pairs] == [is_called_fine(*pair) for pair in pairs]
taken = sum(is_taken(*pair) for pair in pairs)
assert len(values) < taken < len(pairs) - len(values)
print(f"{taken} of {len(pairs)} pairs are taken, and the reports say so")

# %% [markdown]
# ## Proof: it runs nothing and keeps nothing
#
# The body below changes its module in five ways, and calls back to Python whenever it runs. After two reports
# there was no call, the caller's module is what it was, and it works.

# %% tags=["proof"]
runs = []


def count_runs(i, block):
    jax.debug.callback(lambda: runs.append(1))
    block.count[...] += 1
    return block


def meddle(i, block):
    block = count_runs(i, block)
    block.linear.kernel[...] *= 2
    block.calls += 1
    block.extra = nnx.Param(jnp.zeros(3))
    del block.linear.bias
    return block


block = Block()
variables = jax.tree.leaves(block, is_leaf=lambda x: isinstance(x, nnx.Variable))
values = [jnp.array(a) for a in jax.tree.leaves(block)]
attributes = sorted(map(str, vars(block)))

with jax.checking_leaks():  # raises if a tracer outlives its trace
    for loop in (nnx.fori_loop, jax.lax.fori_loop):
        report = explain_carry(loop, meddle, 0, block)
        assert "carry.extra" in report and "carry.linear.bias" in report and "carry.calls" in report

jax.effects_barrier()
assert runs == []
assert sorted(map(str, vars(block))) == attributes and block.calls == 0
after = jax.tree.leaves(block, is_leaf=lambda x: isinstance(x, nnx.Variable))
assert len(after) == len(variables) == 3 and all(a is b for a, b in zip(after, variables, strict=True))
assert all(bool(jnp.array_equal(a, b)) for a, b in zip(jax.tree.leaves(block), values, strict=True))
assert jnp.isfinite(nnx.jit(lambda block, x: block.linear(x))(block, jnp.ones((2, 3)))).all()
print("runs of the body:", len(runs))

nnx.fori_loop(0, 2, count_runs, block)
jax.effects_barrier()
assert len(runs) == 2 and block.count[...] == 2
print("runs of the body in a loop of two:", len(runs))

# %% [markdown]
# ## Limits
#
# - Only the carry is compared: not `y`, not the condition of a `while_loop`, not the length of a scan.
# - Where something differs, the body is traced twice more, to see whether swapped arguments or another
#   `return` would be right. What it prints while it is traced, it prints again.
# - `another Block out` is in the report on every release, also where the loop raises nothing. The list above
#   shows where that is.
#
# ### One Variable at two places of the carry
#
# In tree mode `nnx.eval_shape`, which traces the body, refuses a Variable that stands at two places, before it
# comes to the body. So does `nnx.scan`.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "does not support Variable aliasing", "mode": "tree"}]
block = Block()
print(explain_carry(nnx.scan, lambda carry, x: (carry, x), (block, block), 0.0))

# %% [markdown]
# Carry it once.
#
# ## When to prefer another recipe
#
# - The report says `another Param out` in a `State` of gradients: [`nnx.fori_loop` rejects the
#   accumulator](fori_loop_rejects_accumulator.py).
# - You would rather start from a loop that is right: [with `nnx.fori_loop`](accumulate_with_fori_loop.py),
#   [with `nnx.scan`](accumulate_with_scan.py), [with split and merge](accumulate_with_split_merge.py), or [the
#   complete step](complete_train_step.py).
