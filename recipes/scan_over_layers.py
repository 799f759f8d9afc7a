# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Build with split_rngs and vmap, call with scan, and do not split the rngs again at the call.
#     answers: [google/flax#4589, google/flax#4153, p-doom/jasmine#228, jax-ml/bonsai#47, sgl-project/sglang-jax#320, NVIDIA/jaxpp#7, NVIDIA/jaxpp#3, google/flax#5112, google/flax#5105, jax-ml/jax-ai-stack#265]
#     symptoms:
#       - all layers of a stack have the same parameters
#       - jax.checkpoint around a layer, and every call has the same dropout mask
#       - Adam's moments of stacked layers are sharded along the layers
#       - transform_metadata of nnx.vmap is ignored in tree mode
#     needs: {flax: ">=0.11.2", devices: 4}
# ---

# %% [markdown]
# # Scan over layers
#
# Build the layers with `nnx.split_rngs` and `nnx.vmap`: one Module whose arrays have a leading axis of layers.
# Call it with `nnx.scan`, which carries `x` from layer to layer. The same code runs in graph mode and in tree
# mode, and the program does not grow with the number of layers.
#
# ## Do this

# %% tags=["snippet"]
from flax import nnx


class Block(nnx.Module):
    def __init__(self, features: int, rngs: nnx.Rngs):
        self.up = nnx.Linear(features, 4 * features, rngs=rngs)
        self.down = nnx.Linear(4 * features, features, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(nnx.tanh(self.up(x))))


class Stack(nnx.Module):
    def __init__(self, num_layers: int, features: int, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap
        def make_blocks(rngs):
            return Block(features, rngs)

        self.blocks = make_blocks(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat  # leave it out where memory is plenty
        def forward(x, block):
            return block(x)

        return forward(x, self.blocks)


# %% [markdown]
# - **`split_rngs` is for building.** Each layer gets keys of its own, for its parameters and its Dropout.
# - **The call splits nothing.** `nnx.scan` hands each layer its slice, random state included, and writes the
#   counts back. The next call draws other masks.
# - **`x` keeps shape and dtype.** It is the [carry](carry_dtype_and_shape.py).
# - **`nnx.remat` is inside of `nnx.scan`.** The backward pass then computes a layer again from its input.
#
# ## The layers differ, and so do their masks

# %% tags=["proof"]
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# Only for the section on sharded stacks. Leave it out where there are real devices.
jax.config.update("jax_num_cpu_devices", 4)


@nnx.jit
@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
def get_masks(x, block):
    return x, block.dropout(x)


def num_different(arrays):
    return len(np.unique(np.reshape(arrays, (len(arrays), -1)), axis=0))


model = Stack(3, 16, nnx.Rngs(0))
x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
call = nnx.jit(lambda model, x: model(x))

assert model.blocks.up.kernel.shape == (3, 16, 64) and model.blocks.down.kernel.shape == (3, 64, 16)
assert num_different(model.blocks.up.kernel[...]) == num_different(model.blocks.down.kernel[...]) == 3
masks = [get_masks(np.ones_like(x), model.blocks)[1] for _ in range(2)]
assert num_different(np.concatenate(masks)) == 6
outputs = [np.array(call(model, x)) for _ in range(2)]
assert model.blocks.dropout.rngs.count[...].tolist() == [4, 4, 4], "two draws here, two for the masks"
assert abs(outputs[0] - outputs[1]).max() > 0.1
print("3 layers: parameters differ; 2 calls: 6 dropout masks, no two alike")

# %% [markdown]
# ## Equal to a Python loop
#
# Layer `i` is index `i` of every array, random state included. As a list of Blocks the layers give the same
# loss and the same gradients.


# %% tags=["proof"]
class Loop(nnx.Module):
    def __init__(self, stack: Stack, num_layers: int):
        graphdef, state = nnx.split(stack.blocks)
        states = [jax.tree.map(lambda a: a[i], state) for i in range(num_layers)]
        self.blocks = nnx.data([nnx.merge(graphdef, state) for state in states])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def merged_loss(params, rest, graphdef, minibatch):
    model = nnx.merge(graphdef, params, rest, copy=True)
    x, y = minibatch
    return jnp.mean((model(x) - y) ** 2), nnx.state(model, nnx.Not(nnx.Param))


@nnx.jit
def get_loss_and_grads(model, batch):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    (loss, _), grads = jax.value_and_grad(merged_loss, has_aux=True)(params, rest, graphdef, batch)
    return loss, grads


def max_difference(tree, other):
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return max(np.abs(np.array(a) - np.array(b)).max() for a, b in leaves)


batch = (x, np.sin(3 * x))
loop = nnx.jit(Loop, static_argnums=1)(model, 3)
loss, grads = get_loss_and_grads(model, batch)
loop_loss, loop_grads = get_loss_and_grads(loop, batch)
loop_layers = [loop_grads["blocks"][i] for i in range(3)]
loop_grads = jax.tree.map(lambda *layers: np.stack(layers), *loop_layers)
assert len(jax.tree.leaves(grads)) == 4 and max_difference(grads["blocks"], loop_grads) < 1e-6
assert all(np.abs(g).max() > 1e-3 for layer in loop_layers for g in jax.tree.leaves(layer))
assert abs(float(loss) - float(loop_loss)) < 1e-6
print("loss and 4 gradients equal those of the loop to 1e-06, with Dropout")

# %% [markdown]
# ## Without `split_rngs` all layers are the same
#
# `in_axes=None` gives every layer the same keys, and nothing is raised.
# [google/flax#4153](https://github.com/google/flax/issues/4153) asks for layers that differ.

# %%
same = nnx.vmap(lambda rngs: Block(16, rngs), in_axes=None, axis_size=3)(nnx.Rngs(0))
assert num_different(same.up.kernel[...]) == 1
assert num_different(get_masks(np.ones_like(x), same)[1]) == 1
print("3 layers, one set of parameters, one mask")

# %% [markdown]
# ## `split_rngs` at the call
#
# Flax 0.10 wanted it ([google/flax#4589](https://github.com/google/flax/issues/4589)). Now the random state of
# a stack stays split, and a key array cannot be split once more. Remove the decorator at the call.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "fold_in accepts a single key, but was given a key array of shape (3,)"}]
@nnx.split_rngs(splits=3)
@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def forward(x, block):
    return block(x)


forward(x, model.blocks)

# %% [markdown]
# ## A plain list of layers
#
# Flax 0.12 rejects it, 0.11.2 takes it. `nnx.data` around the list, as in `Loop`, runs under every release
# shown. Or scan over a stack, if the layers are alike.


# %% tags=["raises-exception", "outcome"] raises=[{"error": "ValueError", "match": "Found unexpected Arrays on value of type <class 'list'> in static attribute 'layers'", "flax": ">=0.12,<0.12.3"}, {"error": "ValueError", "match": "Found data on value of type '<class 'list'>' assigned to static attribute 'layers'", "flax": ">=0.12.3"}]
class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, wrap=lambda layers: layers):
        self.layers = wrap([nnx.Linear(8, 16, rngs=rngs) for _ in range(2)])


print("arrays:", len(jax.tree.leaves(nnx.state(Net(nnx.Rngs(0))))))

# %% [markdown]
# ### `nnx.List` came with Flax 0.12

# %% tags=["raises-exception"] raises=[{"error": "AttributeError", "match": "has no attribute 'List'", "flax": "<0.12"}]
print("arrays:", len(jax.tree.leaves(nnx.state(Net(nnx.Rngs(0), nnx.List)))))

# %% [markdown]
# ## Minibatches outside, layers inside
#
# The loop is that of [split and merge](accumulate_with_split_merge.py): split outside, merge in the loss.


# %% tags=["proof"]
def accumulate_grads(model, batch, num_minibatches):
    minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def body(carry, minibatch):
        total, rest = carry
        grads, rest = jax.grad(merged_loss, has_aux=True)(params, rest, graphdef, minibatch)
        return (jax.tree.map(jnp.add, total, grads), rest), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    (total, rest), _ = jax.lax.scan(body, (zeros, rest), minibatches)
    nnx.update(model, rest)
    return jax.tree.map(lambda g: g / num_minibatches, total)


accumulate = nnx.jit(accumulate_grads, static_argnums=2)
before = model.blocks.dropout.rngs.count[...]
accumulate(model, batch, 4)
assert (model.blocks.dropout.rngs.count[...] - before).tolist() == [4, 4, 4]

model.eval()  # without Dropout a row's loss depends on that row alone
_, full_grads = get_loss_and_grads(model, batch)
assert max_difference(accumulate(model, batch, 4), full_grads) < 1e-6
print("4 masks for each layer; without Dropout the gradients equal those of the full batch to 1e-06")

# %% [markdown]
# ## What depth costs
#
# Gradients of 512 rows, with 2 layers and with 8. The scans have as many instructions for 8 layers as for 2.
# `nnx.scan` alone keeps the activations of all layers. With `nnx.remat` it keeps the input of each.


# %% tags=["proof"]
class Plain(Stack):
    def __call__(self, x):
        return nnx.scan(Block.__call__, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)


def get_cost(form, num_layers, num_minibatches):
    model = nnx.eval_shape(lambda: form(num_layers, 16, nnx.Rngs(0)))
    model.eval()
    rows = (jax.ShapeDtypeStruct((512, 16), jnp.float32),) * 2
    compiled = accumulate.lower(model, rows, num_minibatches).compile()
    return compiled.as_text().count(" = "), compiled.memory_analysis().temp_size_in_bytes


forms = {
    "Python loop": (lambda n, *args: Loop(Stack(n, *args), n), 1),
    "scan": (Plain, 1),
    "scan of remat": (Stack, 1),
    "and 4 minibatches": (Stack, 4),
}
print(f"{'':18}{'HLO, 2 layers':>14}{'8 layers':>10}{'temporary bytes, 8 layers':>27}")
temporary = {}
for name, (form, num_minibatches) in forms.items():
    (two, _), (eight, temporary[name]) = (get_cost(form, n, num_minibatches) for n in (2, 8))
    print(f"{name:18}{two:>14,}{eight:>10,}{temporary[name]:>27,}")
    assert eight > 3 * two if name == "Python loop" else eight == two
assert temporary["scan of remat"] < temporary["scan"] / 2
assert temporary["and 4 minibatches"] < temporary["scan of remat"] / 2
print("remat more than halves the temporary bytes, and four minibatches halve the rest: True")

# %% [markdown]
# ### `jax.checkpoint` around a layer
#
# It loses what the layer changes: every call has the masks of the first.

# %%
model.train()
call = nnx.jit(nnx.scan(jax.checkpoint(Block.__call__), in_axes=(0, nnx.Carry), out_axes=nnx.Carry))
assert np.array_equal(call(model.blocks, x), call(model.blocks, x))
print("two calls, the same masks")

# %% [markdown]
# ## Sharded stacks and their optimizer
#
# Put the arrays on the devices, then make the optimizer. Its moments lie where the parameters lie. No mesh is
# set, and two stacks may have two meshes ([google/flax#5105](https://github.com/google/flax/issues/5105)).


# %% tags=["proof"]
def shard_stack(stack, mesh):
    """Cut the kernels along their last axis. The axis of layers stays whole: the scan walks along it."""
    params = nnx.state(stack, nnx.Param)
    specs = {2: PartitionSpec(), 3: PartitionSpec(None, None, *mesh.axis_names)}
    shardings = jax.tree.map(lambda a: NamedSharding(mesh, specs[a.ndim]), params)
    nnx.update(stack, jax.device_put(params, shardings))


mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
encoder, decoder = Stack(3, 16, nnx.Rngs(0)), Stack(3, 16, nnx.Rngs(0))
shard_stack(encoder, mesh)
shard_stack(decoder, jax.make_mesh((4,), ("other",), axis_types=(AxisType.Auto,)))
both = nnx.Sequential(encoder, decoder)
optimizer = nnx.Optimizer(both, optax.adam(1e-3), wrt=nnx.Param)
params, moments = map(jax.tree.leaves, (nnx.state(both, nnx.Param), optimizer.opt_state[0].mu))
assert [a.shape for a in params] == [a.shape for a in moments] and len(params) == 8
assert [a.sharding for a in params] == [a.sharding for a in moments]
assert {len(a.sharding.device_set) for a in moments} == {2, 4}

encoder.eval()
optimizer = nnx.Optimizer(encoder, optax.adam(1e-3, b1=0.0), wrt=nnx.Param)
step = nnx.jit(lambda model, optimizer: optimizer.update(model, get_loss_and_grads(model, batch)[1]))
step(encoder, optimizer)
params, moments = map(jax.tree.leaves, (nnx.state(encoder, nnx.Param), optimizer.opt_state[0].mu))
assert [a.sharding for a in params] == [a.sharding for a in moments]
assert {a.sharding.shard_shape(a.shape) for a in moments if a.ndim == 3} == {(3, 16, 32), (3, 64, 8)}
assert max_difference(moments, full_grads) < 1e-6, "with b1=0 the moments are the gradients"
print("moments lie like their parameters, on 2 and on 4 devices; gradients as on one device")

# %% [markdown]
# ### An annotated Variable needs a mesh
#
# Since Flax 0.12 it is sharded when it is made. Make it inside `jax.set_mesh(mesh)`
# ([jax-ml/jax-ai-stack#265](https://github.com/jax-ml/jax-ai-stack/issues/265)). Flax 0.11.2 only keeps the
# annotation.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "An auto mesh context or metadata is required if creating a variable with annotation", "flax": ">=0.12"}]
def make_linear(rngs):
    init = nnx.with_partitioning(nnx.initializers.zeros_init(), ("model", None))
    return nnx.Linear(16, 16, use_bias=False, kernel_init=init, rngs=rngs)


print("without a mesh:", make_linear(nnx.Rngs(0)).kernel.shape)

# %% [markdown]
# ### The optimizer shards the axis of layers
#
# `nnx.vmap` adds an axis to the array and none to the annotation. The optimizer reads the annotation, and
# three layers do not lie on two devices ([google/flax#5112](https://github.com/google/flax/issues/5112)).


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "which implies that the global size of its dimension 0 should be divisible by 2, but it is equal to 3", "flax": ">=0.12,<0.12.3"}, {"error": "ValueError", "match": "Sharding spec ('model',) implies that array axis 0 is partitioned 2 times, but does not evenly divide the dimension size 3", "flax": ">=0.12.3"}]
def get_axes(num_layers, make, mesh, **kwargs):
    """The mesh axes of a stacked kernel and of its first moment."""
    with jax.set_mesh(mesh):
        stack = nnx.split_rngs(splits=num_layers)(nnx.vmap(make, **kwargs))(nnx.Rngs(0))
        optimizer = nnx.Optimizer(stack, optax.adam(1e-3), wrt=nnx.Param)
    arrays = stack.kernel[...], optimizer.opt_state[0].mu["kernel"][...]
    return [(tuple(array.sharding.spec) + (None,) * 3)[:3] for array in arrays]


explicit_mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Explicit,))
print("three layers:", get_axes(3, make_linear, explicit_mesh))

# %% [markdown]
# Four layers do, and nothing is raised: the moments are cut between layers and the kernel is not.
# `transform_metadata=` puts the axis into the annotation. In tree mode `nnx.vmap` ignores it. Flax 0.11.2
# shards neither.

# %%
for kwargs in {}, {"transform_metadata": {nnx.PARTITION_NAME: None}}:
    kernel, moment = get_axes(4, make_linear, explicit_mesh, **kwargs)
    print(f"{', '.join(kwargs) or 'nnx.vmap':19}kernel {str(kernel):24}moment {moment}")

# %% [markdown]
# ### `nnx.transform_metadata` came with Flax 0.12.6
#
# It works in both modes.

# %% tags=["raises-exception"] raises=[{"error": "AttributeError", "match": "has no attribute 'transform_metadata'", "flax": "<0.12.6"}]
kernel, moment = get_axes(3, nnx.transform_metadata(make_linear, partition=None), explicit_mesh)
assert kernel == moment == (None, "model", None)
print("kernel and moment:", kernel)

# %% [markdown]
# ## When to prefer another recipe
#
# - A few layers, or layers of different classes: a Python loop over the list.
# - More arguments than `x` and the layers: [arguments and axes of a loop](loop_arguments_and_axes.py).
# - The batch lies on several devices: [cut a sharded batch](accumulate_sharded_minibatches.py).
