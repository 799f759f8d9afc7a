# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Take every N-th row, not N blocks. Each device then cuts its own rows, and no data moves.
#     answers: [google/flax#5113, openxla/xla#19166]
#     symptoms:
#       - gradient accumulation is as slow on eight devices as on one
#       - every device computes the whole minibatch
#       - all-gather of the batch before the accumulation loop
#     needs: {flax: ">=0.11.2", devices: 8}
# ---

# %% [markdown]
# # Cut a sharded batch into minibatches
#
# Let minibatch `i` of `N` be the rows `i`, `i + N`, `i + 2N` and so on. Every device finds its share of
# every minibatch among the rows that it already holds, so the cut moves no data. With a slice of consecutive
# rows the gradients are the same, but every device computes all of them, and nothing is raised.

# %%
import jax

# Only makes this machine look like eight devices. Leave it out where there are real ones.
jax.config.update("jax_num_cpu_devices", 8)

# %% tags=["snippet"]
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def get_sharded_minibatch(batch: Any, batch_sharding: Any, minibatch_idx: jax.Array, num_minibatches: int):
    """Rows minibatch_idx, minibatch_idx + num_minibatches, ... of every array, taken where they are.

    `batch_sharding` is one NamedSharding for the whole batch or a tree of them.
    """

    def take(x, sharding):
        rows = sharding.shard_shape(x.shape)[0]
        if rows % num_minibatches:
            raise ValueError(f"{rows} rows per device do not divide into {num_minibatches} minibatches")
        # The new axis stands behind the sharded one, so that no row leaves its device.
        x = x.reshape(-1, num_minibatches, *x.shape[1:])
        spec = P(*sharding.spec[:1], None, *sharding.spec[1:])
        x = jax.lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, spec))
        return x[:, minibatch_idx]

    return jax.tree.map(take, batch, jax.tree.broadcast(batch_sharding, batch))


# %% [markdown]
# Call it in the body of any loop: `minibatch_idx` may be traced. The mesh is made outside, and its axes may
# be of type `Auto` or `Explicit`. `jax.make_mesh` makes `Explicit` ones since jax 0.9.0 and made `Auto` ones
# before, so say which you want. With `Explicit` axes, call the step inside `jax.set_mesh(mesh)`.
#
# ## Which rows a minibatch gets
#
# 64 rows on eight devices, four minibatches: each takes two rows from every device.

# %%
import jax.numpy as jnp
from jax.sharding import AxisType

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
batch_sharding = NamedSharding(mesh, P("data"))
num_minibatches = 4

row_numbers = jax.device_put(jnp.arange(64), batch_sharding)
get_rows = jax.jit(lambda i: get_sharded_minibatch(row_numbers, batch_sharding, i, num_minibatches))

for i in range(num_minibatches):
    first, second, third, *_, last = get_rows(i).tolist()
    print(f"minibatch {i}: rows {first}, {second}, {third}, ... {last}")

# %% tags=["proof"]
seen = []
for i in range(num_minibatches):
    minibatch = get_rows(i)
    seen += minibatch.tolist()
    for held, taken in zip(row_numbers.addressable_shards, minibatch.addressable_shards, strict=True):
        assert held.device == taken.device
        assert len(taken.data) == 2 and set(taken.data.tolist()) <= set(held.data.tolist())
assert sorted(seen) == list(range(64))
print("every row is in one minibatch, on the device that held it: True")

both, shardings = {"x": row_numbers, "y": row_numbers}, {"x": batch_sharding, "y": batch_sharding}
taken = get_sharded_minibatch(both, shardings, 1, num_minibatches)
assert taken["x"].tolist() == taken["y"].tolist() == get_rows(1).tolist(), "a tree of shardings"

# %% [markdown]
# The gradient of a mean over the batch does not depend on which rows stand together. BatchNorm and losses
# that compare the rows of a minibatch do. Where rows belong together, such as the pairs of a contrastive
# loss, let them be one row: `(pairs, 2, features)`.
#
# ## What each way to cut costs
#
# Four ways to cut the batch, in one loop that accumulates the gradients of a small network.

# %%
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(32, 64, rngs=rngs)
        self.outer = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.tanh(self.inner(x)))


graphdef, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)
x = jax.random.normal(jax.random.key(1), (64, 32))
batch = {"x": x, "y": jnp.sin(3 * x)}


def loss_fn(params, batch):
    model = nnx.merge(graphdef, params)
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def accumulate_with(cut):
    def accumulate(params, batch):
        def body(i, grads):
            minibatch = jax.tree.map(lambda x: cut(x, i), batch)
            return jax.tree.map(jnp.add, grads, jax.grad(loss_fn)(params, minibatch))

        grads = jax.lax.fori_loop(0, num_minibatches, body, jax.tree.map(jnp.zeros_like, params))
        return jax.tree.map(lambda g: g / num_minibatches, grads)

    return accumulate


# %%
def naive_slice(x, i):
    rows = len(x) // num_minibatches
    return jax.lax.dynamic_slice_in_dim(x, i * rows, rows)


def contiguous(x, i):
    return x.reshape(num_minibatches, -1, *x.shape[1:])[i]


def contiguous_constrained(x, i):
    x = x.reshape(num_minibatches, -1, *x.shape[1:])
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, "data")))[i]


def strided(x, i):
    return get_sharded_minibatch(x, batch_sharding, i, num_minibatches)


# %% [markdown]
# The compiler says what each of them costs. This reads its result, the optimized HLO of one device: it
# walks from the entry into everything that is called, counts the collectives, and adds up the matrix
# products. What stands in the body of the loop counts once for each minibatch.

# %%
import math
import re
from collections import Counter

COMPUTATION = re.compile(r"^(ENTRY|%[\w.-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
PRODUCT = re.compile(r"%([\w.-]+) = .* dot\(%([\w.-]+), .*lhs_contracting_dims=\{([\d,]+)\}")
CALLED = re.compile(r"(?:calls|to_apply|body)=(%[\w.-]+)")


def read_cost(hlo):
    """Collectives inside the loop, collectives outside, FLOPs of matrix products: for one device."""
    computations = dict(COMPUTATION.findall(hlo))
    shapes = {
        name: [int(size) for size in sizes.split(",") if size]
        for name, sizes in re.findall(r"%([\w.-]+) = \w+\[([\d,]*)\]", hlo)
    }
    inside, outside, flops = Counter(), Counter(), 0

    def visit(name, times):
        nonlocal flops
        for line in computations[name].splitlines():
            if product := PRODUCT.search(line):
                result, left, axes = product.groups()
                contracted = math.prod(shapes[left][int(axis)] for axis in axes.split(","))
                flops += times * 2 * math.prod(shapes[result]) * contracted
            if collective := COLLECTIVE.search(line):
                (inside if times > 1 else outside)[collective[1]] += 1
            for called in CALLED.findall(line):
                visit(called, times * num_minibatches if " while(" in line else times)

    visit("ENTRY", 1)
    return inside, outside, flops


def show(name, inside, outside, flops):
    moved = [", ".join(f"{n} {kind}" for kind, n in sorted(c.items())) or "none" for c in (inside, outside)]
    print(f"{name:24}{moved[0]:16}{moved[1]:36}{flops:>11,}")


# %% tags=["proof"]
full = jax.jit(jax.grad(loss_fn)).lower(params, batch).compile()
full_grads, full_flops = jax.tree.leaves(full(params, batch)), read_cost(full.as_text())[2]


def measure(cut, params, batch):
    compiled = jax.jit(accumulate_with(cut)).lower(params, batch).compile()
    grads = jax.tree.leaves(compiled(params, batch))
    assert len(grads) == len(full_grads) == 4
    for grad, expected in zip(grads, full_grads, strict=True):
        # The devices of the two differ, so the comparison is made on the host.
        grad, expected = jax.device_get((grad, expected))
        assert abs(expected).max() > 1e-3 and abs(grad - expected).max() < 1e-6
    return read_cost(compiled.as_text())


replicated_params = jax.device_put(params, NamedSharding(mesh, P()))
sharded_batch = jax.device_put(batch, batch_sharding)
cuts = [naive_slice, contiguous, contiguous_constrained, strided]
costs = {cut.__name__: measure(cut, replicated_params, sharded_batch) for cut in cuts}
costs["strided_numpy"] = measure(strided, replicated_params, jax.device_get(batch))

print(f"{'':24}{'in the loop':16}{'outside':36}{'FLOPs/device':>11}")
show("full batch, one device", Counter(), Counter(), full_flops)
for name, cost in costs.items():
    show(name, *cost)

assert full_flops == 2 * 64 * (32 * 64) * 5, "two products forward, three backward"
assert costs["naive_slice"] == ({}, {"all-gather": 2}, full_flops), "eight devices do the work of one"
assert costs["strided"] == ({"all-reduce": 1}, {}, full_flops // 8), "no data moves, nothing is done twice"
assert costs["strided_numpy"] == costs["strided"], "a batch from the host is spread, not replicated"
assert all(costs[cut.__name__][1] for cut in cuts if cut is not strided), "the other cuts move the batch"
print("all give the gradients of the full batch to 1e-06: True")

# %% [markdown]
# - **`naive_slice`**: sixteen consecutive rows live on two devices. The compiler gathers the batch on every
#   device before the loop, and every device computes every minibatch whole: eight times its share.
# - **`contiguous`**: an axis of four blocks does not spread over eight devices. The batch is gathered too,
#   and every device computes half of each minibatch: four times its share.
# - **`contiguous_constrained`**: each device does its share, after the devices have exchanged the batch.
# - **`strided`**: no device needs a row of another. What is left is the all-reduce of the gradients, once
#   for each minibatch.
# - **`strided_numpy`**: the same function, given NumPy arrays. The constraint is what spreads them; without
#   it every device would compute everything.
#
# These are the choices of the compiler for CPUs. Other backends may choose other collectives.
#
# ## With `Explicit` axes, the contiguous reshape raises
#
# There the sharding is [part of an array's type](https://docs.jax.dev/en/latest/parallel.html). Four blocks
# do not lie evenly on eight devices, so the reshape is refused instead of repaired in silence.

# %%
explicit_mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
explicit_sharding = NamedSharding(explicit_mesh, P("data"))
explicit_params = jax.device_put(params, NamedSharding(explicit_mesh, P()))
explicit_batch = jax.device_put(batch, explicit_sharding)

# %% tags=["raises-exception"] raises=[{"error": "ShardingTypeError", "match": "Please specify the sharding of the output via the `out_sharding` argument"}]
with jax.set_mesh(explicit_mesh):
    jax.jit(accumulate_with(contiguous))(explicit_params, explicit_batch)

# %% [markdown]
# `out_sharding=`, which the message asks for, makes it run at the cost of the constraint above. The naive
# slice does not raise: it shares the work, but still gathers the batch. The strided cut needs no
# `out_sharding`, because the types accept `64@data` as `16@data, 4`. `get_sharded_minibatch` is the same
# function as before. Its constraint is now a check that the batch has the sharding you say, and it wants
# the mesh to be set.


# %% tags=["proof"]
def contiguous_out_sharding(x, i):
    shape = (num_minibatches, len(x) // num_minibatches, *x.shape[1:])
    return jnp.reshape(x, shape, out_sharding=P(None, "data"))[i]


def strided_explicit(x, i):
    return get_sharded_minibatch(x, explicit_sharding, i, num_minibatches)


explicit_costs = {}
print(f"{'':24}{'in the loop':16}{'outside':36}{'FLOPs/device':>11}")
with jax.set_mesh(explicit_mesh):
    for cut in naive_slice, contiguous_out_sharding, strided_explicit:
        explicit_costs[cut.__name__] = measure(cut, explicit_params, explicit_batch)
        show(cut.__name__, *explicit_costs[cut.__name__])

assert explicit_costs["strided_explicit"] == costs["strided"]
assert explicit_costs["contiguous_out_sharding"] == costs["contiguous_constrained"]
assert explicit_costs["naive_slice"] == ({"all-reduce": 1}, {"all-gather": 2}, full_flops // 8)

# %% [markdown]
# ## Every device needs a row of every minibatch
#
# Eight rows on each device make at most eight minibatches. With sixteen, a minibatch would have four rows for
# eight devices, and with `Auto` axes the compiler would move data again. `get_sharded_minibatch` refuses.

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "8 rows per device do not divide into 16 minibatches"}]
get_sharded_minibatch(row_numbers, batch_sharding, 0, 16)

# %% [markdown]
# ## When to prefer another recipe
#
# - The whole step, with optimizer, metrics and donation, around this function: [a complete train
#   step](complete_train_step.py).
# - The all-reduce of every minibatch costs too much: [reduce once per step](reduce_once_per_step.py).
# - BatchNorm and Dropout in the loop: [split and merge](accumulate_with_split_merge.py).
# - The batch is still on the host: reshape it there to `(minibatches, rows, ...)`, put it on the devices
#   with `P(None, "data")` and loop over them [by index](accumulate_with_fori_loop.py). Rows keep their order.
