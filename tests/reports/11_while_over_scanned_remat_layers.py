import jax.numpy as jnp
from flax import nnx


@nnx.vmap(in_axes=(0,), out_axes=0)
def _make(rngs):
    return nnx.Linear(4, 4, rngs=rngs)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.split_rngs(splits=3)(_make)(rngs)

    def __call__(self, x):
        f = nnx.scan(nnx.remat(lambda x, b: jnp.tanh(b(x))), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return f(x, self.blocks)


@nnx.jit
def decode(net, x):
    body = lambda c: (c[0], c[0](c[1]), c[2] + 1)
    return nnx.while_loop(lambda c: c[2] < 4, body, (net, x, 0))[1]


print("OK", decode(Net(nnx.Rngs(0)), jnp.ones((2, 4))).shape)
