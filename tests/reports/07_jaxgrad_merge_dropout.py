# raises=[{"error": "TraceContextError"}]
import jax, jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.l = nnx.Linear(4, 4, rngs=rngs)
        self.d = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.d(self.l(x))


gd, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)


def loss(params, rest):
    return nnx.merge(gd, params, rest)(jnp.ones((2, 4))).sum()


g = jax.grad(loss)(params, rest)
print("OK leaves", len(jax.tree.leaves(g)))
