# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Let every device sum its own gradients in the loop, and average over the devices once, after it.
#     answers: [openxla/xla#6750, openxla/xla#14332, AI-Hypercomputer/maxtext#5099, google/flax#4217, instadeepai/Mava#1184]
#     symptoms:
#       - all-reduce of the gradients in every minibatch instead of once per step
#       - gradient accumulation does not reduce communication
#       - shard_map gradient is eight times too large, multiplied by the device count
#       - psum after the loop gives gradients times the number of devices
#       - every device draws the same dropout mask in shard_map
#       - all-gather and reduce-scatter in every minibatch with FSDP
#     needs: {flax: ">=0.11.2", devices: 8}
# ---

# %% [markdown]
# # Reduce gradients once per step
#
# Let every device sum the gradients of its own rows over the minibatches, and average over the devices once,
# after the loop. In `jax.shard_map`, mark the parameters as varying first. Otherwise `jax.grad` sums over the
# devices in every minibatch, and an average after the loop makes the gradient too large by the number of
# devices.

# %%
import jax

# Only makes this machine look like eight devices. Leave it out where there are real ones.
jax.config.update("jax_num_cpu_devices", 8)

# %% tags=["snippet"]
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

if hasattr(jax.lax, "pcast"):
    vary = partial(jax.lax.pcast, to="varying")
else:
    vary = jax.lax.pvary  # the same in older releases of jax


def loss_fn(model, minibatch):
    x, y = minibatch
    return jnp.mean((model(x) - y) ** 2)


def accumulate_grads(model: nnx.Module, batch, num_minibatches: int, mesh: Mesh):
    """Mean loss and mean gradients of a batch whose rows are sharded over the mesh axis "data"."""
    graphdef, params = nnx.split(model, nnx.Param)

    def minibatch_loss(params, minibatch):
        return loss_fn(nnx.merge(graphdef, params), minibatch)

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    def mean_over_devices(params, rows):
        params = vary(params, "data")  # or jax.grad sums over the devices, in every minibatch
        minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), rows)

        def body(total, minibatch):
            loss, grads = jax.value_and_grad(minibatch_loss)(params, minibatch)
            return jax.tree.map(jnp.add, total, grads), loss

        total, losses = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), minibatches)
        grads = jax.tree.map(lambda g: g / num_minibatches, total)
        return jax.lax.pmean((losses.mean(), grads), "data")

    return mean_over_devices(params, batch)


@nnx.jit(static_argnames=("num_minibatches", "mesh"))
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch, num_minibatches: int, mesh: Mesh):
    loss, grads = accumulate_grads(model, batch, num_minibatches, mesh)
    optimizer.update(model, grads)
    return loss


# %% [markdown]
# `loss_fn` is yours, and is a mean over rows. The model and the optimizer are replicated, and
# `num_minibatches` divides the number of rows of each device.
#
# - **`vary`.** It moves no data. Inside `shard_map` the type of an array says whether it may differ between
#   devices. The gradient of an argument has the type of the argument. For parameters that are the same
#   everywhere the gradient must be the same too, so `jax.grad` sums it over the devices. For varying ones it
#   stays on its device.
# - **`rows`.** What the device holds. The `reshape` cuts it there, and no row leaves its device.
# - **`pmean`.** One collective for the loss and all gradients.
# - **`nnx.split(model, nnx.Param)`** raises if the model has other state, which this form would lose. For
#   Dropout and BatchNorm see [below](#with-dropout-and-batchnorm).
#
# ## One all-reduce, outside the loop
#
# The compiler says what runs. This reads its result, the optimized HLO of one device: it walks from the entry
# into everything that is called, counts the collectives, and adds up the matrix products. What stands in the
# body of the loop counts once for each minibatch. With none in the loop, XLA's passes for collectives in loops
# have nothing to do either; on GPUs one of them failed in
# [openxla/xla#14332](https://github.com/openxla/xla/issues/14332).

# %%
import math
import re
from collections import Counter

import numpy as np

COMPUTATION = re.compile(r"^(ENTRY|%[\w.-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
PRODUCT = re.compile(r"%([\w.-]+) = .* dot\(%([\w.-]+), .*lhs_contracting_dims=\{([\d,]+)\}")
CALLED = re.compile(r"(?:calls|to_apply|body)=(%[\w.-]+)")


def read_cost(hlo, num_minibatches):
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
    print(f"{name:28}{moved[0]:18}{moved[1]:46}{flops:>12,}")


def show_header():
    print(f"{'':28}{'in the loop':18}{'outside':46}{'FLOPs/device':>12}")


# %% [markdown]
# 64 rows on eight devices in four minibatches, against the gradients of the whole batch on one device.

# %%
from jax.sharding import AxisType, NamedSharding

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
num_minibatches = 4


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(32, 64, rngs=rngs)
        self.outer = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.tanh(self.inner(x)))


graphdef, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)
x = jax.random.normal(jax.random.key(1), (64, 32))
batch = (x, jnp.sin(3 * x))


def pure_loss(params, minibatch):
    return loss_fn(nnx.merge(graphdef, params), minibatch)


full_batch = jax.jit(jax.value_and_grad(pure_loss)).lower(params, batch).compile()
full_loss, full_grads = jax.device_get(full_batch(params, batch))
full_flops = read_cost(full_batch.as_text(), num_minibatches=1)[2]

replicated_params = jax.device_put(params, NamedSharding(mesh, P()))
sharded_batch = jax.device_put(batch, NamedSharding(mesh, P("data")))


# %%
def assert_full_batch(loss, grads, expected_loss=full_loss, expected=full_grads):
    leaves, expected_leaves = jax.tree.leaves(jax.device_get(grads)), jax.tree.leaves(expected)
    assert len(leaves) == len(expected_leaves) > 0
    assert all(abs(full).max() > 1e-3 for full in expected_leaves), "a gradient of zeros proves nothing"
    difference = max(abs(g - full).max() for g, full in zip(leaves, expected_leaves, strict=True))
    factor = sum((g * full).sum() for g, full in zip(leaves, expected_leaves, strict=True))
    factor /= sum((full**2).sum() for full in expected_leaves)
    message = f"the gradient is {factor:.2f} times that of the full batch, off by up to {difference:.1g}"
    assert difference < 1e-6, message
    assert abs(jax.device_get(loss) - expected_loss) < 1e-6, "the loss is not that of the full batch"


def compile_and_run(accumulate, params=replicated_params, batch=sharded_batch):
    """What `accumulate(params, batch)` costs, its temporary bytes on each device, its loss and gradients."""
    compiled = jax.jit(accumulate).lower(params, batch).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return read_cost(compiled.as_text(), num_minibatches), temporary, *compiled(params, batch)


# %% [markdown]
# Without `shard_map`, the compiler for CPUs reduces the gradients in every minibatch:
# `jit_every_minibatch` is the strided cut of [sharded minibatches](accumulate_sharded_minibatches.py).


# %% tags=["proof"]
def jit_every_minibatch(params, batch):
    def cut(a):
        return a.reshape(-1, num_minibatches, *a.shape[1:]).swapaxes(0, 1)

    def body(total, minibatch):
        loss, grads = jax.value_and_grad(pure_loss)(params, minibatch)
        return jax.tree.map(jnp.add, total, grads), loss

    total, losses = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), jax.tree.map(cut, batch))
    return losses.mean(), jax.tree.map(lambda g: g / num_minibatches, total)


def shard_map_once(params, batch):
    return accumulate_grads(nnx.merge(graphdef, params), batch, num_minibatches, mesh)


show_header()
show("full batch, one device", {}, {}, full_flops)
costs = {}
for accumulate in jit_every_minibatch, shard_map_once:
    cost, temporary, loss, grads = compile_and_run(accumulate)
    assert_full_batch(loss, grads)
    show(accumulate.__name__, *cost)
    costs[accumulate.__name__] = cost
temporary_of_shard_map = temporary

assert full_flops == 2 * 64 * (32 * 64) * 5, "two products forward, three backward"
inside, _, flops = costs["jit_every_minibatch"]
assert inside["all-reduce"] >= 1 and flops == full_flops // 8
assert costs["shard_map_once"] == ({}, {"all-reduce": 1}, full_flops // 8)
print("loss and gradients equal those of the full batch to 1e-06: True")

# %% tags=["proof"]
import optax

model = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
for node in model, optimizer:
    nnx.update(node, jax.device_put(nnx.state(node), NamedSharding(mesh, P())))

loss = train_step(model, optimizer, sharded_batch, num_minibatches, mesh)
updates = jax.tree.map(np.subtract, jax.device_get(params), jax.device_get(nnx.state(model)))
assert_full_batch(loss, jax.tree.map(lambda update: update / 0.1, updates), expected=full_grads)
assert optimizer.step[...] == 1
print("the step subtracts 0.1 times the gradient of the full batch, once: True")

# %% [markdown]
# ## Eight times too large
#
# Leave `vary` out, and nothing raises. `jax.grad` has summed over the devices already, in the loop, so every
# device holds the sum, and the mean of eight equal sums is the sum. Adam divides by the size of the gradient
# and [hides it](silent_wrong_results.py). The comparison with the full batch catches it.


# %%
def sum_minibatches(params, rows):
    """The body of `mean_over_devices` up to the mean."""
    minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), rows)

    def body(total, minibatch):
        loss, grads = jax.value_and_grad(pure_loss)(params, minibatch)
        return jax.tree.map(jnp.add, total, grads), loss

    total, losses = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), minibatches)
    return losses.mean(), jax.tree.map(lambda g: g / num_minibatches, total)


over_devices = partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "the gradient is 8.00 times that of the full batch"}]
@over_devices
def without_vary(params, rows):
    return jax.lax.pmean(sum_minibatches(params, rows), "data")


cost, temporary, loss, grads = compile_and_run(without_vary)
show_header()
show("without_vary", *cost)
assert_full_batch(loss, grads)

# %% [markdown]
# The types say it before anything runs: a gradient that has been summed does not vary. This assertion stands
# in the body and costs nothing when the step runs.


# %%
def assert_varying(tree, axis):
    """Inside `shard_map`: every leaf may still differ between the devices."""
    for leaf in jax.tree.leaves(tree):
        # The type is written as float32[64]{V:data}, in jax 0.7 as float32[64]{data}.
        assert f"{axis}}}" in str(jax.typeof(leaf)), f"{jax.typeof(leaf)} is the same on every device"


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "is the same on every device"}]
@over_devices
def checked_without_vary(params, rows):
    loss, grads = sum_minibatches(params, rows)
    assert_varying(grads, "data")
    return jax.lax.pmean((loss, grads), "data")


jax.eval_shape(checked_without_vary, params, batch)


# %% tags=["proof"]
@over_devices
def checked(params, rows):
    loss, grads = sum_minibatches(vary(params, "data"), rows)
    assert_varying(grads, "data")
    return jax.lax.pmean((loss, grads), "data")


jax.eval_shape(checked, params, batch)
print("every gradient still varies over the devices: True")

# %% [markdown]
# Two other ways give the right gradient. Divide the sums by eight instead of averaging them, and there is
# an all-reduce for every minibatch; the one outside is the loss. Or turn the types off with
# `check_vma=False`: `jax.grad` then sums nothing, and `pmean` after the loop is right without `vary`.


# %% tags=["proof"]
@over_devices
def divided(params, rows):
    loss, grads = sum_minibatches(params, rows)
    return jax.lax.pmean(loss, "data"), jax.tree.map(lambda g: g / 8, grads)


@partial(over_devices, check_vma=False)
def unchecked(params, rows):
    return jax.lax.pmean(sum_minibatches(params, rows), "data")


show_header()
for accumulate in divided, unchecked:
    cost, temporary, loss, grads = compile_and_run(accumulate)
    assert_full_batch(loss, grads)
    show(accumulate.__name__, *cost)
    costs[accumulate.__name__] = cost

assert costs["divided"][0] == {"all-reduce": 1}
assert costs["unchecked"] == costs["shard_map_once"]

# %% [markdown]
# Keep the check on where you can. If `pmean` is forgotten, the check refuses the result:


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "out_specs"}]
@over_devices
def forgotten_mean(params, rows):
    return sum_minibatches(vary(params, "data"), rows)


jax.eval_shape(forgotten_mean, params, batch)

# %% [markdown]
# With the check off nothing raises, and you get the gradient of one device's rows.


# %% tags=["raises-exception"] raises=[{"error": "AssertionError", "match": "times that of the full batch"}]
@partial(over_devices, check_vma=False)
def unchecked_forgotten_mean(params, rows):
    return sum_minibatches(params, rows)


_, _, loss, grads = compile_and_run(unchecked_forgotten_mean)
first_rows = jax.tree.map(lambda a: a[:8], batch)
first_loss, first_grads = jax.device_get(jax.jit(jax.value_and_grad(pure_loss))(params, first_rows))
assert_full_batch(loss, grads, first_loss, first_grads)
print("the gradient of the 8 rows of the first device: True")
assert_full_batch(loss, grads)

# %% [markdown]
# ## What the loop carries must vary too
#
# A loss sum that starts as `jnp.zeros(())` is the same on every device. After the first minibatch it is not,
# and a carry keeps its type.


# %% tags=["raises-exception"] raises=[{"error": "TypeError", "match": "so the varying manual axes do not match", "jax": "<0.10"}, {"error": "TypeError", "match": "so the manual axis types do not match", "jax": ">=0.10"}]
def sum_losses(rows, loss_sum):
    minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), rows)

    def body(loss_sum, minibatch):
        return loss_sum + pure_loss(params, minibatch), None

    return jax.lax.scan(body, loss_sum, minibatches)[0] / num_minibatches


@partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P())
def mean_loss_from_zeros(rows):
    return jax.lax.pmean(sum_losses(rows, jnp.zeros(())), "data")


jax.eval_shape(mean_loss_from_zeros, batch)

# %% [markdown]
# Let it vary from the start. `jnp.zeros_like` of a varying array does by itself, which is why the sums of the
# gradients need no `vary`.


# %% tags=["proof"]
@partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P())
def mean_loss(rows):
    return jax.lax.pmean(sum_losses(rows, vary(jnp.zeros(()), "data")), "data")


assert abs(jax.jit(mean_loss)(sharded_batch) - full_loss) < 1e-6
print("the loss equals that of the full batch to 1e-06: True")

# %% [markdown]
# ## Without `shard_map`: an axis for the devices
#
# Give the batch and the sums an axis of length eight, shard that axis, and let `jax.vmap` take the gradient
# of each of its entries. Each device then works on its own entry, and the mean over the axis, after the loop,
# is the all-reduce. There is no type to declare.


# %% tags=["proof"]
def vmap_once(params, batch):
    def cut(a):
        a = a.reshape(8, num_minibatches, -1, *a.shape[1:])
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P("data"))).swapaxes(0, 1)

    def zeros(p):
        return jnp.zeros((8, *p.shape), p.dtype)

    def body(total, minibatch):
        losses, grads = jax.vmap(jax.value_and_grad(pure_loss), in_axes=(None, 0))(params, minibatch)
        return jax.tree.map(jnp.add, total, grads), losses

    total, losses = jax.lax.scan(body, jax.tree.map(zeros, params), jax.tree.map(cut, batch))
    return losses.mean(), jax.tree.map(lambda g: g.mean(axis=0) / num_minibatches, total)


cost, temporary, loss, grads = compile_and_run(vmap_once)
assert_full_batch(loss, grads)
assert cost == ({}, {"all-reduce": 1}, full_flops // 8)
assert temporary < 1.5 * temporary_of_shard_map, "an eighth of the sums on each device"
cost_from_host, *_ = compile_and_run(vmap_once, batch=jax.device_get(batch))
assert cost_from_host == cost, "the constraint spreads a batch that comes from the host"
show_header()
show("vmap_once", *cost)

# %% [markdown]
# The sums are eight times as large, but an eighth of them lies on each device, as above. The model must be
# one that `jax.vmap` takes.
#
# ## FSDP: gather once, scatter once
#
# Where each device holds an eighth of every parameter, gather the parameters before the loop and scatter the
# sums after it. Gathered parameters vary already, so the check is on and needs no `vary`.


# %%
def fsdp(loss_of_shards, gather, scatter):
    @partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=(P(), P("data")))
    def mean_over_devices(shards, rows):
        minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), rows)
        params = gather(shards)

        def body(total, minibatch):
            loss, grads = jax.value_and_grad(loss_of_shards)(params, minibatch)
            return jax.tree.map(jnp.add, total, grads), loss

        total, losses = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), minibatches)
        grads = jax.tree.map(lambda g: g / (8 * num_minibatches), scatter(total))
        return jax.lax.pmean(losses.mean(), "data"), grads

    return mean_over_devices


def gather(shards):
    return jax.lax.all_gather(shards, "data", tiled=True)


def scatter(total):
    return jax.lax.psum_scatter(total, "data", tiled=True)


# %% [markdown]
# `fsdp_every_minibatch` gathers in the loss instead. The transpose of the gather is a scatter, so `jax.grad`
# scatters in every minibatch.

# %% tags=["proof"]
fsdp_once = fsdp(pure_loss, gather, scatter)
fsdp_every_minibatch = fsdp(
    lambda shards, minibatch: pure_loss(gather(shards), minibatch), lambda shards: shards, lambda total: total
)
sharded_params = jax.device_put(params, NamedSharding(mesh, P("data")))

show_header()
for name, accumulate in ("fsdp_every_minibatch", fsdp_every_minibatch), ("fsdp_once", fsdp_once):
    cost, temporary, loss, grads = compile_and_run(accumulate, sharded_params)
    assert_full_batch(loss, grads)
    assert all(g.sharding == p.sharding for g, p in zip(*map(jax.tree.leaves, (grads, sharded_params))))
    show(name, *cost)
    costs[name] = (*cost, temporary)

assert costs["fsdp_every_minibatch"][0]["reduce-scatter"] == 4, "one for each of four parameters"
once = {"all-gather": 4, "reduce-scatter": 4, "all-reduce": 1}
assert costs["fsdp_once"][:3] == ({}, once, full_flops // 8)
assert costs["fsdp_every_minibatch"][3] < costs["fsdp_once"][3]
print("fewer temporary bytes with a scatter in every minibatch: True")

# %% [markdown]
# The all-reduce is the loss. The price of gathering once is memory: during the loop, every device holds all
# parameters and a sum of their size. Where that does not fit, scatter in every minibatch.
#
# ## With `Explicit` axes: reduced parameters, unreduced gradients
#
# On a mesh with `Explicit` axes the same is said in
# [types](https://docs.jax.dev/en/latest/301/sharding-ad.html). The gradient of a `reduced` parameter is
# `unreduced`: each device keeps its part of the sum, until `reshard` adds the parts up. No `shard_map` is
# needed.

# %%
explicit_mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
explicit_batch = jax.device_put(batch, NamedSharding(explicit_mesh, P("data")))
reshard = jax.reshard if hasattr(jax, "reshard") else jax.sharding.reshard


def row_losses(model, minibatch):
    x, y = minibatch
    return jnp.mean((model(x) - y) ** 2, axis=-1)


def typed_once(graphdef, params, batch):
    def minibatch_loss(params, minibatch):
        losses = row_losses(nnx.merge(graphdef, params), minibatch)
        return losses.mean(), losses

    def cut(a):
        return a.reshape(-1, num_minibatches, *a.shape[1:]).swapaxes(0, 1)

    def body(total, minibatch):
        # The mean is not used: it would be an all-reduce in the loop. The losses of the rows are not.
        grads, losses = jax.grad(minibatch_loss, has_aux=True)(reduced, minibatch)
        return jax.tree.map(jnp.add, total, grads), losses

    reduced = jax.tree.map(lambda p: reshard(p, P(reduced={"data"})), params)
    zeros = jax.tree.map(lambda p: reshard(jnp.zeros_like(p), P(unreduced={"data"})), params)
    total, losses = jax.lax.scan(body, zeros, jax.tree.map(cut, batch))
    return losses.mean(), jax.tree.map(lambda g: reshard(g, P()) / num_minibatches, total)


def run_typed(model):
    graphdef, params = nnx.split(model, nnx.Param)
    with jax.set_mesh(explicit_mesh):
        params = jax.device_put(params, NamedSharding(explicit_mesh, P()))
        cost, _, loss, grads = compile_and_run(partial(typed_once, graphdef), params, explicit_batch)
    assert_full_batch(loss, grads)
    return cost


# %% [markdown]
# The bias of `nnx.Linear` is in the way: an addition of a sharded array and a reduced one has no type.

# %% tags=["raises-exception"] raises=[{"error": "ShardingTypeError", "match": "another input is reduced on", "jax": ">=0.8"}, {"error": "NotImplementedError", "match": "unreduced rule for", "jax": "<0.8"}]
run_typed(Net(nnx.Rngs(0)))

# %% [markdown]
# Spread the bias over the rows before it is added, which moves no data, and the whole network goes through. Of
# the releases shown here, those with jax 0.10 and newer take it.


# %% tags=["raises-exception", "outcome"] raises=[{"error": "ShardingTypeError", "match": "operand passed to reduce_sum cannot be unreduced", "jax": ">=0.8,<0.10"}, {"error": "ShardingTypeError", "match": "lhs is unreduced while rhs is not", "jax": "<0.8"}]
class Linear(nnx.Linear):
    def __call__(self, x):
        y = x @ self.kernel[...]
        bias = jnp.broadcast_to(self.bias[...], y.shape)
        return y + reshard(bias, P("data"))


class TypedNet(Net):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = Linear(32, 64, rngs=rngs)
        self.outer = Linear(64, 32, rngs=rngs)


cost = run_typed(TypedNet(nnx.Rngs(0)))
assert cost == ({}, {"all-reduce": 1}, full_flops // 8)
show_header()
show("typed_once", *cost)

# %% [markdown]
# ## With Dropout and BatchNorm
#
# Three things are added to the snippet. The random keys get the number of the device folded in, or all
# devices would draw the same masks. The counts of the random streams are carried, so that every minibatch
# has its own. The statistics are carried as varying arrays, because each device moves its own, and averaged
# in the same all-reduce.


# %%
def accumulate_with_state(loss_fn, model, batch, num_minibatches, mesh):
    """Mean loss and mean gradients. Statistics and random state of the model move on in place."""
    graphdef, *states = nnx.split(model, nnx.Param, nnx.BatchStat, nnx.RngKey, nnx.RngCount)

    def minibatch_loss(params, stats, keys, counts, minibatch):
        model = nnx.merge(graphdef, params, stats, keys, counts, copy=True)
        return loss_fn(model, minibatch), nnx.state(model, nnx.BatchStat, nnx.RngCount)

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P(), P(), P("data")), out_specs=P())
    def mean_over_devices(params, stats, keys, counts, rows):
        params, stats = vary((params, stats), "data")
        keys = jax.tree.map(lambda key: jax.random.fold_in(key, jax.lax.axis_index("data")), keys)
        minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), rows)
        value_and_grad = jax.value_and_grad(minibatch_loss, has_aux=True)

        def body(carry, minibatch):
            total, stats, counts = carry
            (loss, (stats, counts)), grads = value_and_grad(params, stats, keys, counts, minibatch)
            return (jax.tree.map(jnp.add, total, grads), stats, counts), loss

        carry = (jax.tree.map(jnp.zeros_like, params), stats, counts)
        (total, stats, counts), losses = jax.lax.scan(body, carry, minibatches)
        grads = jax.tree.map(lambda g: g / num_minibatches, total)
        loss, grads, stats = jax.lax.pmean((losses.mean(), grads, stats), "data")
        return loss, grads, stats, counts

    loss, grads, stats, counts = mean_over_devices(*states, batch)
    nnx.update(model, stats, counts)
    return loss, grads


# %% [markdown]
# The model below has one row of parameters for each of 32 rows of the batch, so that row `i` of the gradient
# shows the mask that row `i` got.


# %% tags=["proof"]
class Masks(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jnp.ones((32, 64)))
        self.norm = nnx.BatchNorm(32, momentum=0.5, use_bias=False, use_scale=False, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, rows):
        one_hot, x = rows
        self.norm(x)  # its output is not used: here it only keeps statistics
        return self.drop(one_hot @ self.kernel[...])


def loss_of_masks(model, rows):
    return model(rows).sum(axis=-1).mean()


model = Masks(nnx.Rngs(0))
one_hot = np.eye(32, dtype=np.float32)
rows = jax.device_put((one_hot, x[:32]), NamedSharding(mesh, P("data")))


@nnx.jit
def step_with_state(model, rows):
    return accumulate_with_state(loss_of_masks, model, rows, num_minibatches, mesh)


hlo = step_with_state.lower(model, rows).compile().as_text()
_, grads = step_with_state(model, rows)
inside, outside, _ = read_cost(hlo, num_minibatches)
assert inside == {} and outside == {"all-reduce": 1}

masks = {tuple(row) for row in (np.array(grads["kernel"][...]) != 0).tolist()}
assert len(masks) == 32, "8 devices, 4 minibatches, one row each"
assert model.drop.rngs.count[...] == num_minibatches
assert abs(np.array(model.norm.var[...]) - 0.5**num_minibatches).max() < 1e-6, "one row has no variance"

mean = np.zeros(32)
for minibatch_mean in x[:32].reshape(8, 4, 32).mean(axis=0):
    mean = 0.5 * mean + 0.5 * minibatch_mean
assert abs(np.array(model.norm.mean[...]) - mean).max() < 1e-6
print(f"{len(masks)} distinct masks on 8 devices in 4 minibatches, one all-reduce")
print("running mean as if every minibatch had been seen whole: True")

# %% [markdown]
# The running variance is that within the rows of one device: here each device has one row of a minibatch,
# and one row has none. More on state in loops: [BatchNorm and Dropout](batchnorm_and_dropout.py).
#
# The snippet at the top refuses this model, which would draw one mask for all minibatches:

# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Non-exhaustive filters"}]
accumulate_grads(model, rows, num_minibatches, mesh)

# %% [markdown]
# ## What it costs
#
# The whole step with donated model and optimizer, for one batch cut in 2 and in 64 minibatches. Bytes are
# those of one device.


# %%
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


@nnx.jit(donate_argnums=(0, 1), static_argnums=3)
def donated_step(model, optimizer, batch, num_minibatches):
    loss, grads = accumulate_grads(model, batch, num_minibatches, mesh)
    optimizer.update(model, grads)
    return loss


model = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
for node in model, optimizer:
    nnx.update(node, jax.device_put(nnx.state(node), NamedSharding(mesh, P())))
large_batch = jax.tree.map(lambda a: jnp.tile(a, (64, 1)), batch)
large_batch = jax.device_put(large_batch, NamedSharding(mesh, P("data")))


# %% tags=["proof"]
table = {}
for n in 2, 64:
    compiled = donated_step.lower(model, optimizer, large_batch, n).compile()
    table[n] = (*cost(compiled), *read_cost(compiled.as_text(), n))

rows = "HLO instructions", "temporary bytes", "argument bytes", "output bytes", "aliased bytes"
print(f"{'minibatches':26}{2:>14}{64:>14}")
for i, name in enumerate(rows):
    print(f"{name:26}{table[2][i]:>14,}{table[64][i]:>14,}")
for i, name in enumerate(("all-reduces in the loop", "all-reduces outside"), 5):
    print(f"{name:26}{table[2][i].total():>14,}{table[64][i].total():>14,}")
print(f"{'FLOPs/device':26}{table[2][7]:>14,}{table[64][7]:>14,}")

state_bytes = sum(leaf.nbytes for node in (model, optimizer) for leaf in jax.tree.leaves(nnx.state(node)))
assert table[2][5:] == table[64][5:] == ({}, {"all-reduce": 1}, 64 * full_flops // 8)
assert table[64][0] < 1.1 * table[2][0], "the program hardly grows"
assert table[64][1] < table[2][1] / 4, "activations of one minibatch"
assert table[2][4] == table[64][4] == state_bytes, "the new state takes the place of the old one"
print("aliased bytes are those of model and optimizer:", table[64][4] == state_bytes)

# %% [markdown]
# The counts are those of the compiler for CPUs. Other backends may combine or split collectives, but none has
# anything to reduce in this loop.
#
# ## When to prefer another recipe
#
# - [Sharded minibatches](accumulate_sharded_minibatches.py) reduce in every minibatch and leave the devices to
#   the compiler. That is less to write, and enough where the parameters are small.
# - [The complete step](complete_train_step.py) adds metrics and scaling to that form.
# - [BatchNorm and Dropout](batchnorm_and_dropout.py) on one device.
# - [Silent wrong results](silent_wrong_results.py) has the gradient that is eight times too large among other
#   traps, with assertions to copy.
