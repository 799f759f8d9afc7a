# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Scan over the minibatches, and unroll with one argument; what a Python loop under jit costs instead.
#     answers: [jax-ml/jax#16611, NVIDIA/jaxpp#3]
#     symptoms:
#       - compile time grows with the number of minibatches
#       - lax.scan is slower than an unrolled Python loop
#       - Python loop over minibatches saves no memory
#       - scan over layers inside a loop over minibatches
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # Unroll a loop, or leave it rolled
#
# Scan over the minibatches. The compiled program then has the same length for any number of them. Where a
# measurement asks for copies of the body, `unroll=` makes them. A Python loop under `jit` makes a copy for
# every minibatch, and on CPU it saves no memory.
#
# ## Do this

# %% tags=["snippet"]
import jax
import jax.numpy as jnp
from flax import nnx


def loss_fn(model, minibatch):
    x, y = minibatch
    return jnp.mean((model(x) - y) ** 2)


def accumulate_grads(model: nnx.Module, batch, num_minibatches: int, unroll: int | bool = 1):
    """Mean loss and mean gradients. One turn of the loop holds `unroll` minibatches."""
    minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)
    graphdef, params = nnx.split(model, nnx.Param)

    def minibatch_loss(params, minibatch):
        return loss_fn(nnx.merge(graphdef, params), minibatch)

    def body(total, minibatch):
        loss, grads = jax.value_and_grad(minibatch_loss)(params, minibatch)
        return jax.tree.map(jnp.add, total, grads), loss

    zeros = jax.tree.map(jnp.zeros_like, params)
    total, losses = jax.lax.scan(body, zeros, minibatches, unroll=unroll)
    return losses.mean(), jax.tree.map(lambda g: g / num_minibatches, total)


# %% [markdown]
# - **`unroll=1`** is the default, and right for most steps: the gradients of a minibatch are much work, and a
#   turn of the loop adds little.
# - **`unroll=k`** writes the body k times into one turn. Take a k that divides the number of minibatches.
# - **`unroll=True`** leaves no loop. It is the Python loop, traced once.
# - **Under `jit`**, `num_minibatches` and `unroll` are static arguments.
#
# `nnx.scan`, `nnx.fori_loop` and `jax.lax.fori_loop` take `unroll` too. `nnx.split(model, nnx.Param)` raises if
# the model has other state: with BatchNorm or Dropout, give `unroll=` to the scan of [split and
# merge](accumulate_with_split_merge.py).
#
# Times depend on the machine, and are in [measurements](../docs/measurements.md#time-to-lower-and-to-compile). Here is what the compiler
# makes of each form.
#
# ## The length of the program
#
# The Python loop, and the scan of NNX:


# %%
def accumulate_in_python(model, batch, num_minibatches):
    minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)
    total, losses = None, []
    for i in range(num_minibatches):
        minibatch = jax.tree.map(lambda a: a[i], minibatches)
        loss, grads = nnx.value_and_grad(loss_fn)(model, minibatch)
        losses.append(loss)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    grads = jax.tree.map(lambda g: g / num_minibatches, nnx.state(total, nnx.Param))
    return jnp.stack(losses).mean(), grads


def accumulate_with_nnx_scan(model, batch, num_minibatches, unroll=1):
    minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)
    leaves, treedef = jax.tree.flatten(nnx.state(model, nnx.Param))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0), unroll=unroll)
    def body(carry, minibatch):
        model, total = carry
        loss, grads = nnx.value_and_grad(loss_fn)(model, minibatch)
        grads = jax.tree.leaves(nnx.state(grads, nnx.Param))
        return (model, jax.tree.map(jnp.add, total, grads)), loss

    (_, total), losses = body((model, [jnp.zeros_like(leaf) for leaf in leaves]), minibatches)
    return losses.mean(), jax.tree.unflatten(treedef, [g / num_minibatches for g in total])


# %% [markdown]
# Each program is compiled, measured and run: its loss and gradients must be those of the full batch. The
# figures are equations of the jaxpr (what was traced), instructions of the compiled HLO, and temporary bytes.

# %%
import re
from functools import partial
from types import SimpleNamespace

import numpy as np


def read_cost(traced):
    """What was traced, what was compiled, and how often its first loop turns, with how many operations."""
    compiled = traced.lower().compile()
    hlo = compiled.as_text()
    cost = SimpleNamespace(
        equations=str(traced.jaxpr).count(" = "),
        instructions=hlo.count(" = "),
        temporary=compiled.memory_analysis().temp_size_in_bytes,
        flops=int(compiled.cost_analysis()["flops"]),
        loops=hlo.count(" while("),
        turns=0,
        operations=0,
    )
    if cost.loops:
        cost.turns = int(re.search(r'"known_trip_count":\{"n":"(\d+)"', hlo)[1])
        body = hlo.split("\n" + re.search(r"body=(%[\w.-]+)", hlo)[1])[1].split("\n}")[0]
        names = re.findall(r" = [^\n]*? ([a-z][a-z-]*)\(", body)
        free = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}  # these move nothing
        cost.operations = sum(name not in free for name in names)
    return cost, compiled


Linear = partial(nnx.Linear, 64, 64, use_bias=False)
rngs = nnx.Rngs(0)
model = nnx.Sequential(Linear(rngs=rngs), nnx.tanh, Linear(rngs=rngs))
x = np.random.default_rng(0).normal(size=(1024, 64)).astype(np.float32)
batch = (x, np.sin(3 * x))
graphdef, state = nnx.split(model)


def run(accumulate, *args, **options):
    @jax.jit
    def loss_and_grads(state, batch):
        return accumulate(nnx.merge(graphdef, state), batch, *args, **options)

    cost, compiled = read_cost(loss_and_grads.trace(state, batch))
    return cost, [np.array(a) for a in jax.tree.leaves(compiled(state, batch))]


full, expected = run(nnx.value_and_grad(loss_fn))
assert len(expected) == 3 and min(np.abs(a).max() for a in expected) > 1e-3


def measure(accumulate, num_minibatches, **options):
    cost, found = run(accumulate, num_minibatches, **options)
    assert max(np.abs(a - b).max() for a, b in zip(found, expected, strict=True)) < 1e-6
    return cost


# %% tags=["proof"]
counts = (2, 4, 8, 16)
forms = {
    "Python loop": (accumulate_in_python, {}),
    "scan": (accumulate_grads, {}),
    "scan, unroll=4": (accumulate_grads, {"unroll": 4}),
}
costs = {name: [measure(form, n, **options) for n in counts] for name, (form, options) in forms.items()}
print(" " * 18 + "full batch" + "".join(f"     N = {n:<3}" for n in counts))
for figure in "equations", "instructions", "temporary":
    print(f"{figure:<18}{getattr(full, figure):>10,}")
    for name in forms:
        values = "".join(f"{getattr(cost, figure):>12,}" for cost in costs[name])
        print(f"  {name:<26}{values}")

python, scan, unrolled = costs.values()
slope = (python[3].instructions - python[0].instructions) / 14
for n, cost in zip(counts, python, strict=True):
    assert abs(cost.instructions / (python[0].instructions + slope * (n - 2)) - 1) < 0.02, "a line"
assert slope > 0.8 * full.instructions, "each minibatch is as long as a program of its own"
assert abs(scan[3].instructions - scan[0].instructions) <= 5, "constant"
assert [cost.loops for cost in unrolled] == [0, 0, 1, 1], "one step: the loop begins above four"
assert abs(unrolled[3].instructions - unrolled[2].instructions) <= 5, "and is constant from there"
for cost, copied in zip(unrolled[:2], python[:2]):
    assert abs(cost.instructions / copied.instructions - 1) < 0.02, "k >= N: the same as in Python"
assert {cost.equations for cost in scan + unrolled} == {scan[0].equations}, "the body is traced once"
assert python[3].equations > 7 * python[0].equations, "a Python loop traces every minibatch"
assert scan[3].temporary < full.temporary / 7 and python[3].temporary > full.temporary

with_nnx = measure(accumulate_with_nnx_scan, 16, unroll=4)
assert abs(with_nnx.instructions / unrolled[3].instructions - 1) < 0.02
print("nnx.scan: as many instructions as jax.lax.scan; all gradients equal the full batch to 1e-06")

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots()
for name, color, offset in zip(forms, ("#c7500f", "#1f78b8", "#3a8f3a"), (-4, 8, 8), strict=True):
    values = [cost.instructions for cost in costs[name]]
    axes.plot(counts, values, color=color, marker="o", markersize=4)
    label = dict(xytext=(-12, offset), textcoords="offset points", ha="right")
    axes.annotate(name, xy=(16, values[-1]), color=color, **label)
axes.set_xticks(counts, counts)
axes.set(xlabel="minibatches", ylabel="HLO instructions", ylim=(0, None))
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# The Python loop is a straight line in instructions and in equations, so tracing and compiling grow with it.
# The scan is flat. With `unroll=4` the line ends at four minibatches, and the loop begins. JAX makes the copies
# after tracing: the equations stay.
#
# **A Python loop saves no memory here.** Its copies are one program, and on CPU the compiler keeps the
# activations of all of them. The compiler for another device may order them otherwise. A loop ends one turn
# before the next begins.
#
# ## What each `unroll` makes of 16 minibatches

# %% tags=["proof"]
costs = {k: measure(accumulate_grads, 16, unroll=k) for k in (2, 3)} | {1: scan[3], 4: unrolled[3]}
no_loop = measure(accumulate_grads, 16, unroll=True)
print("unroll   turns   after   operations of a turn   instructions   temporary        FLOPs")
for k, cost in (*sorted(costs.items()), ("True", no_loop)):
    after = 16 - k * cost.turns if cost.loops else 16
    print(f"{k:<9}{cost.turns:<8}{after:<8}{cost.operations:>20}{cost.instructions:>15,}", end="")
    print(f"{cost.temporary:>12,}{cost.flops:>13,}")

for k in 1, 2, 4:
    assert costs[k].turns == 16 / k
    assert 0.7 < costs[k].temporary / (k * costs[1].temporary) < 1.2, "memory for k minibatches"
assert no_loop.loops == 0 and abs(no_loop.instructions / python[3].instructions - 1) < 0.02
assert costs[3].turns == 5 and abs(costs[3].instructions / costs[4].instructions - 1) < 0.05
assert costs[3].temporary > costs[4].temporary + 0.8 * sum(a.nbytes for a in batch)
assert abs(16 * costs[1].flops / no_loop.flops - 1) < 0.01

# %% [markdown]
# - **A divisor** leaves a loop of 16/k turns, and memory for k minibatches.
# - **A remainder** is written out after the loop: `unroll=3` is as long as `unroll=4`. To cut off the last
#   minibatch, the batch is copied.
# - **`True`** is as long as the Python loop. So is any k that is not below the number of minibatches.
# - **FLOPs** are those that `cost_analysis` reports. It counts the body once, however often it runs.
#
# ## What unrolling saves
#
# Operations are what a turn really does: matrix products, fused loops, copies. Some belong to the turn: the
# counter, the slices, the loss. The k copies share them. Beside the gradients of a minibatch they are few.
# Beside a cheap body they are most of it, and the compiler fuses the copies too:


# %% tags=["proof"]
def average(decay, values, unroll):
    def body(mean, value):
        mean = decay * mean + (1 - decay) * value
        return mean, mean

    return jax.lax.scan(body, jnp.zeros(8), values, unroll=unroll)


jitted = jax.jit(average, static_argnames="unroll")
cheap = {k: read_cost(jitted.trace(0.9, jnp.ones((16, 8)), unroll=k))[0] for k in (1, 4)}
print("operations per minibatch or value: unroll=1, unroll=4")
for name, cost in ("gradients", costs), ("moving average", cheap):
    print(f"{name:<33}  {cost[1].operations:>8.1f}, {cost[4].operations / 4:>8.1f}")
assert cheap[1].turns == 16 and cheap[4].turns == 4
assert cheap[4].operations / 4 < 0.5 * cheap[1].operations
assert costs[4].operations / 4 > 0.65 * costs[1].operations

# %% [markdown]
# [jax-ml/jax#16611](https://github.com/jax-ml/jax/issues/16611) saw a scan on a GPU run much slower than the same
# loop in Python. Try `unroll=4` before you rewrite such a loop: it is one number, and the result stays.
#
# ## Minibatches outside, layers inside
#
# Copies multiply. [NVIDIA/jaxpp#3](https://github.com/NVIDIA/jaxpp/issues/3) asks about a scan over layers inside
# the loop over minibatches. It works, and only with both rolled is the program the same for any depth and any
# number of minibatches.


# %% tags=["proof"]
class Stack(nnx.Module):
    def __init__(self, num_layers: int, unroll: int | bool, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap
        def create(rngs):
            return Linear(rngs=rngs)

        self.layers, self.unroll = create(rngs), unroll

    def __call__(self, x):
        graphdef, layers = nnx.split(self.layers)

        def apply(x, layer):
            return nnx.tanh(nnx.merge(graphdef, layer)(x)), None

        return jax.lax.scan(apply, x, layers, unroll=self.unroll)[0]


def measure_nested(accumulate, unroll, n):
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Stack(n, unroll, nnx.Rngs(0))))
    state = jax.tree.map(lambda a: np.sin(np.arange(a.size, dtype=a.dtype)).reshape(a.shape) / 8, state)
    grads = jax.jit(lambda s, b: accumulate(nnx.merge(graphdef, s), b, n)[1])
    cost, compiled = read_cost(grads.trace(state, batch))
    return cost, np.concatenate(jax.tree.leaves(compiled(state, batch)))


print("minibatches   layers        loops   instructions: 2 x 2, 4 x 4   temporary, 4 x 4")
growth, temporary, gradients = [], [], []
for name, accumulate in ("Python loop", accumulate_in_python), ("scan", accumulate_grads):
    for unroll in True, 1:
        (two, _), (four, grads) = (measure_nested(accumulate, unroll, n) for n in (2, 4))
        growth.append(four.instructions / two.instructions)
        temporary.append(four.temporary)
        gradients.append(grads)
        print(f"{name:<14}unroll={unroll!s:<7}{four.loops:<7}", end="")
        print(f"{two.instructions:>20}, {four.instructions:>5}{four.temporary:>19,}")
assert growth[0] > 3, "nearly four times: a product"
assert 1.7 < growth[1] < 2.1 and 1.3 < growth[2] < 2 and abs(growth[3] - 1) < 0.05
assert temporary[2] < temporary[3] < min(temporary[:2])
assert np.ptp(gradients, axis=0).max() < 1e-6 < 1e-3 < np.abs(gradients).max()

# %% [markdown]
# A loop over layers counts twice: forward and backward. The memory is saved by the loop over minibatches; the
# one over layers stacks what the backward pass needs, and the gradients, and costs some of it. How to write
# one is in [scan over layers](scan_over_layers.py).
#
# ## `fori_loop` is a scan or a while loop
#
# With static bounds it becomes a scan, which can be unrolled, and differentiated in reverse. With a traced bound
# it becomes a while loop, which cannot be unrolled and has no reverse-mode gradient: see [while
# loops](while_loop_decode.py).


# %% tags=["proof"]
def power(x, n, loop=jax.lax.fori_loop, **options):
    return loop(0, n, lambda i, y: x * y, jnp.ones(()), **options)


for bound, static, becomes in ("static", 1, "scan"), ("traced", (), "while"):
    jaxpr = jax.make_jaxpr(power, static_argnums=static)(2.0, 3)
    assert {eqn.primitive.name for eqn in jaxpr.eqns} & {"scan", "while"} == {becomes}
    print(f"{bound} bound: {becomes}")
assert jax.grad(power)(2.0, 3) == 12, "3 x**2"
for loop in jax.lax.fori_loop, nnx.fori_loop:
    assert "unroll=2" in str(jax.make_jaxpr(lambda x, loop=loop: power(x, 3, loop, unroll=2))(2.0))

# %% [markdown]
# ### `unroll` in a loop with a traced bound
#
# Make the bound static, or leave `unroll` out.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Can only use `unroll` in `fori_loop` if the loop bounds are statically known"}]
jax.jit(lambda x, n: power(x, n, unroll=2))(2.0, 3)

# %% [markdown]
# ### `unroll` is traced
#
# It decides the program, so it is static: `jax.jit(average, static_argnames="unroll")`. So is the number of minibatches, which [raises
# something else](different_trace_level.py#the-number-of-minibatches-is-traced).

# %% tags=["raises-exception"] raises=[{"error": "ConcretizationTypeError", "match": "The `unroll` argument to `scan` expects a concrete `int` or `bool` value"}]
jax.jit(average)(0.9, jnp.ones((16, 8)), 4)

# %% [markdown]
# ### `unroll=0`
#
# jax 0.8 and newer take it as `True`, older ones raise. Write `True`, which all releases know.

# %% tags=["raises-exception", "outcome"] raises=[{"error": "ValueError", "match": "`unroll` must be a `bool` or a positive `int`", "jax": "<0.8"}]
_, means = average(0.9, jnp.ones((16, 8)), unroll=0)
print("ran, shape", means.shape)

# %% [markdown]
# ## When to prefer another recipe
#
# - The loop itself: [split and merge](accumulate_with_split_merge.py), [`nnx.scan`](accumulate_with_scan.py),
#   [`nnx.fori_loop`](accumulate_with_fori_loop.py).
# - Fewer bytes, with donation: [donate and measure memory](donate_and_measure_memory.py).
# - A step that compiles again and again: [retracing and dispatch](retracing_and_dispatch.py).
# - Collectives in the loop: [reduce once per step](reduce_once_per_step.py).
