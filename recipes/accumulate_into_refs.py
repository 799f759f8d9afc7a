# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Let the backward pass add into refs. Where layers are scanned, one copy of the gradients is saved.
#     answers: [jax-ml/jax#32411, google/flax#5114, google/flax#5116]
#     symptoms:
#       - gradient accumulation keeps two copies of the gradients
#       - accumulate gradients in place without a second gradient tree
#       - vjp3 in Flax NNX
#       - temporary memory of nnx.grad is larger than that of jax.grad
#     needs: {flax: ">=0.11.2", jax: ">=0.8.1"}
# ---

# %% [markdown]
# # Accumulate gradients into refs
#
# Make a ref of zeros for each parameter, hand the refs to `with_refs` of what `jax.vjp` returns, and the
# backward pass adds every gradient where it belongs. Where layers are scanned, that saves about one copy of
# the gradients. In the donated step of a plain MLP, it saves nothing.

# %% tags=["snippet"]
import jax
import jax.numpy as jnp
from flax import nnx


def loss_fn(model, minibatch):
    x, y = minibatch
    return jnp.mean((model(x) - y) ** 2)


def merged_loss(params, rest, graphdef, minibatch):
    model = nnx.merge(graphdef, params, rest, copy=True)
    loss = loss_fn(model, minibatch)
    return loss, nnx.state(model, nnx.Not(nnx.Param))


def accumulate_grads(model: nnx.Module, batch, num_minibatches: int):
    """Mean loss and mean gradients. Statistics and random state of the model move on in place."""
    minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    refs = jax.tree.map(lambda p: jax.new_ref(jnp.zeros_like(p)), params)

    def body(rest, minibatch):
        def loss_of(params):
            return merged_loss(params, rest, graphdef, minibatch)

        loss, f_vjp, rest = jax.vjp(loss_of, params, has_aux=True)
        f_vjp.with_refs(refs)(jnp.ones_like(loss) / num_minibatches)
        return rest, loss

    rest, losses = jax.lax.scan(body, rest, minibatches)
    nnx.update(model, rest)
    return losses.mean(), jax.tree.map(jax.freeze, refs)


@nnx.jit(static_argnames="num_minibatches", donate_argnums=(0, 1))
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch, num_minibatches: int):
    loss, grads = accumulate_grads(model, batch, num_minibatches)
    optimizer.update(model, grads)
    return loss


# %% [markdown]
# `loss_fn` is yours. `batch` is any pytree of arrays with the rows on the leading axis, and `num_minibatches`
# divides the number of rows.
#
# - **`refs`** has the structure, shapes and dtypes of `params`, which are the leaves of the model that
#   `nnx.split` gives. The body closes over it; a ref may not be carried.
# - **`with_refs(refs)`** returns the backward pass, bound to the refs. Calling it adds; it returns no
#   gradients. Calling `f_vjp` itself would return them and leave the refs as they are.
# - **`/ num_minibatches`** stands in the cotangent. The gradients are linear in it, so what is added is
#   divided already.
# - **`jax.freeze`** turns a ref into an array when the loop is done. The result is the `State` that
#   `optimizer.update` wants.
#
# ## Equal to the full batch
#
# Two models: an MLP, and one that scans over stacked layers.

# %%
import numpy as np
import optax

features, num_layers = 128, 6


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        for i in range(num_layers):
            setattr(self, f"layer{i}", nnx.Linear(features, features, rngs=rngs))

    def __call__(self, x):
        for i in range(num_layers):
            x = nnx.tanh(getattr(self, f"layer{i}")(x))
        return x


class Scanned(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap
        def create(rngs):
            return nnx.Linear(features, features, rngs=rngs)

        self.layers = create(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, layer):
            return nnx.tanh(layer(x))

        return forward(x, self.layers)


x = np.random.default_rng(0).normal(size=(64, features)).astype(np.float32)
batch = (x, np.sin(3 * x))


def max_difference(tree, other):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return max(np.abs(np.array(a) - np.array(b)).max() for a, b in pairs)


def largest(tree):
    return max(np.abs(np.array(a)).max() for a in jax.tree.leaves(tree))


# %% tags=["proof"]
into_refs = nnx.jit(accumulate_grads, static_argnums=2)
full_batch = nnx.jit(nnx.value_and_grad(loss_fn))
mlp, scanned = MLP(nnx.Rngs(0)), Scanned(nnx.Rngs(0))
for model, leaves in (mlp, 2 * num_layers), (scanned, 2):
    full_loss, full_grads = full_batch(model, batch)
    loss, grads = into_refs(model, batch, 8)
    assert len(jax.tree.leaves(grads)) == leaves and largest(full_grads) > 1e-3
    assert max_difference(grads, full_grads) < 1e-6 and abs(loss - full_loss) < 1e-6
    print(f"{type(model).__name__}: gradients in {leaves} leaves equal those of the full batch to 1e-06")

# %% [markdown]
# Gradients of scanned layers are where refs [went
# wrong](https://github.com/jax-ml/jax/issues/32411) in jax 0.7.2, and raised nothing. There `with_refs` was
# private. Keep a test like this one in your project.
#
# ## With BatchNorm and Dropout
#
# The expected result is the sum in the carry, as in [split and merge](accumulate_with_split_merge.py), which
# is also what the memory is compared with below.


# %% tags=["proof"]
def accumulate_in_carry(model, batch, num_minibatches):
    minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), batch)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    value_and_grad = jax.value_and_grad(merged_loss, has_aux=True)

    def body(carry, minibatch):
        total, rest = carry
        (loss, rest), grads = value_and_grad(params, rest, graphdef, minibatch)
        return (jax.tree.map(jnp.add, total, grads), rest), loss

    zeros = jax.tree.map(jnp.zeros_like, params)
    (total, rest), losses = jax.lax.scan(body, (zeros, rest), minibatches)
    nnx.update(model, rest)
    return losses.mean(), jax.tree.map(lambda g: g / num_minibatches, total)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(features, features, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(features, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(features, features, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.drop(nnx.relu(self.norm(self.inner(x)))))


in_carry = nnx.jit(accumulate_in_carry, static_argnums=2)
net, expected_net = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
before = jax.tree.map(jnp.copy, nnx.state(net, nnx.BatchStat))
_, grads = into_refs(net, batch, 8)
_, expected = in_carry(expected_net, batch, 8)

stats, expected_stats = nnx.state(net, nnx.BatchStat), nnx.state(expected_net, nnx.BatchStat)
(draws,) = jax.tree.leaves(nnx.state(net, nnx.RngCount))
assert largest(expected) > 1e-3 and max_difference(grads, expected) < 1e-6
assert max_difference(stats, expected_stats) < 1e-6 and max_difference(stats, before) > 1e-2
assert draws == 8
print(f"gradients and statistics equal those of the sum in the carry to 1e-06, {draws} dropout masks")

# %% [markdown]
# ## What it saves, and where it does not
#
# Temporary memory from the compiler, for 8 minibatches, as a multiple of the parameters' bytes. *Gradients* is
# the function alone, *donated step* is `train_step` with SGD, which updates the parameters in place.


# %% tags=["proof"]
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


@nnx.jit(static_argnames="num_minibatches", donate_argnums=(0, 1))
def carry_step(model, optimizer, batch, num_minibatches):
    loss, grads = accumulate_in_carry(model, batch, num_minibatches)
    optimizer.update(model, grads)
    return loss


def temporary(function, *args):
    return cost(function.lower(*args).compile())[1]


parameter_bytes = sum(p.nbytes for p in jax.tree.leaves(nnx.state(mlp)))
assert parameter_bytes == sum(p.nbytes for p in jax.tree.leaves(nnx.state(scanned)))

ratio, saved = {}, {}
print(f"{'temporary / parameters':28}{'in the carry':>14}{'into refs':>12}{'ratio':>8}")
for model in scanned, mlp:
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    for what, functions, args in (
        ("gradients", (in_carry, into_refs), (model, batch, 8)),
        ("donated step", (carry_step, train_step), (model, optimizer, batch, 8)),
    ):
        carried, refs = (temporary(function, *args) for function in functions)
        ratio[type(model), what], saved[type(model), what] = (
            refs / carried,
            (carried - refs) / parameter_bytes,
        )
        row = carried / parameter_bytes, refs / parameter_bytes, refs / carried
        print("{:28}{:14.2f}{:12.2f}{:8.2f}".format(f"{type(model).__name__}, {what}", *row))

assert ratio[Scanned, "gradients"] <= 0.5
assert all(0.75 < saved[Scanned, what] < 1.25 for what in ("gradients", "donated step"))
assert 0 < saved[MLP, "gradients"] < 0.5
assert abs(saved[MLP, "donated step"]) < 0.01

# %% [markdown]
# - **Scanned layers.** The backward pass of the scan writes the gradients of all layers into a stack, and the
#   stack is added to the sum afterwards. With refs each layer adds its gradient to the sum, and the stack,
#   one copy of the gradients, is not needed.
# - **MLP, gradients.** A layer's gradient is added as soon as it is there. What refs save is little.
# - **MLP, donated step.** Nothing at all: other parts of the step need that memory anyway.
#
# ## The same bytes in pure JAX
#
# `nnx.jit` and `nnx.grad` take no more temporary memory than `jax.jit` and `jax.grad` of the split model.

# %% tags=["proof"]
graphdef, params = nnx.split(mlp)
tx = optax.sgd(0.1)


@nnx.jit(donate_argnums=(0, 1))
def nnx_step(model, optimizer, batch):
    optimizer.update(model, nnx.grad(loss_fn)(model, batch))


@jax.jit(donate_argnums=(0, 1))
def jax_step(params, opt_state, batch):
    grads = jax.grad(lambda params: loss_fn(nnx.merge(graphdef, params), batch))(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


nnx_bytes = temporary(nnx_step, mlp, nnx.Optimizer(mlp, tx, wrt=nnx.Param), batch)
jax_bytes = temporary(jax_step, params, tx.init(params), batch)
assert nnx_bytes == jax_bytes > 0
print(f"temporary bytes of nnx and of jax are equal: {nnx_bytes == jax_bytes}")

# %% [markdown]
# ## What is rejected
#
# ### A ref in the carry


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "mutable array references cannot be returned"}]
def refs_in_carry(params, minibatches):
    refs = jax.tree.map(lambda p: jax.new_ref(jnp.zeros_like(p)), params)

    def body(refs, minibatch):
        loss, f_vjp = jax.vjp(lambda params: loss_fn(nnx.merge(graphdef, params), minibatch), params)
        f_vjp.with_refs(refs)(jnp.ones_like(loss) / len(minibatches[0]))
        return refs, loss

    refs, losses = jax.lax.scan(body, refs, minibatches)
    return losses.mean(), jax.tree.map(jax.freeze, refs)


minibatches = jax.tree.map(lambda a: a.reshape(8, 8, features), batch)
refs_in_carry(params, minibatches)

# %% [markdown]
# ### A float32 ref for a bfloat16 parameter
#
# The dtype of the ref must be that of the parameter.


# %% tags=["raises-exception"] raises=[{"error": "ValueError", "match": "Invalid dtype for `addupdate`. Ref dtype: float32. Value shape: bfloat16.", "jax": "<0.11"}, {"error": "ValueError", "match": "the given ref has type Ref{float32[128]}, but accumulating this argument's gradient requires a ref of type Ref{bfloat16[128]}", "jax": ">=0.11"}]
def add_one_minibatch(params, refs):
    minibatch = jax.tree.map(lambda a: a[0], minibatches)
    loss, f_vjp = jax.vjp(lambda params: loss_fn(nnx.merge(graphdef, params), minibatch), params)
    f_vjp.with_refs(refs)(jnp.ones_like(loss))


bf16_params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
float32_refs = jax.tree.map(lambda p: jax.new_ref(jnp.zeros(p.shape, jnp.float32)), params)
add_one_minibatch(bf16_params, float32_refs)

# %% [markdown]
# For [a float32 sum](accumulate_in_float32.py), keep float32 parameters and compute in bfloat16:
# `nnx.Linear(..., dtype=jnp.bfloat16)` casts them where they are used.


# %% tags=["proof"]
class Half(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(features, features, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        return self.linear(x).astype(jnp.float32)


half = Half(nnx.Rngs(0))
_, grads = into_refs(half, batch, 8)
_, expected = in_carry(half, batch, 8)
assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"float32"}
assert largest(expected) > 1e-3 and max_difference(grads, expected) < 1e-5
print("bfloat16 model: summed in float32")

# %% [markdown]
# ### Refs of another structure
#
# A list of refs for a `State` of parameters. The class is a bare `Exception` with an empty message up to
# jax 0.10.2.

# %% tags=["raises-exception"] raises=[{"error": "Exception", "match": "", "jax": "<0.11"}, {"error": "ValueError", "match": "The arguments to `with_refs` must match the pytree structure of the primal", "jax": ">=0.11"}]
add_one_minibatch(params, jax.tree.leaves(float32_refs))

# %% [markdown]
# ## With remat, use jax 0.10.0 or newer
#
# All rows of this page run it. The releases from 0.8.2 to 0.9.2, which are no rows, do not: jax 0.9.2 raises
# `NotImplementedError` with an empty message.


# %% tags=["proof"]
class Rematerialized(Scanned):
    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def forward(x, layer):
            return nnx.tanh(layer(x))

        return forward(x, self.layers)


remat = Rematerialized(nnx.Rngs(0))
_, grads = into_refs(remat, batch, 8)
assert largest(full_grads) > 1e-3 and max_difference(grads, full_grads) < 1e-6
print("gradients with remat equal those of the full batch to 1e-06")

# %% [markdown]
# ## What it costs
#
# `train_step` on scanned layers, with Adam and 256 rows.

# %% tags=["proof"]
optimizer = nnx.Optimizer(scanned, optax.adam(1e-3), wrt=nnx.Param)
large_batch = jax.tree.map(lambda a: np.tile(a, (4, 1)), batch)
print(
    f"{'minibatches':>11}{'instructions':>14}{'temporary':>12}{'arguments':>12}{'outputs':>12}{'aliased':>12}"
)
costs = {}
for n in 2, 64:
    costs[n] = cost(train_step.lower(scanned, optimizer, large_batch, num_minibatches=n).compile())
    print("{:11}{:14}{:12,}{:12,}{:12,}{:12,}".format(n, *costs[n]))

state_bytes = sum(a.nbytes for node in (scanned, optimizer) for a in jax.tree.leaves(nnx.state(node)))
assert costs[64][0] < 1.1 * costs[2][0], "a loop, not a copy for each minibatch"
assert costs[64][1] < 0.75 * costs[2][1], "more minibatches, less temporary memory"
assert costs[2][4] == costs[64][4] == state_bytes, "the whole state is updated in place"
print(f"the aliased bytes are those of model and optimizer: {costs[64][4] == state_bytes}")

# %% [markdown]
# ## When to prefer another recipe
#
# - The layers are not scanned, or jax is older than 0.8.1: [split and merge](accumulate_with_split_merge.py)
#   needs no more memory in a donated step, and runs everywhere.
# - bfloat16 or float16 parameters, loss scaling, minibatches to skip: [accumulate in
#   float32](accumulate_in_float32.py). A gradient that is not finite has been added to the refs before
#   anything can check it.
# - The batch lies on several devices: [sharded minibatches](accumulate_sharded_minibatches.py).
