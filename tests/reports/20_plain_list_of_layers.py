# raises=[{"error": "ValueError", "flax": ">=0.12"}]
import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = [nnx.Linear(3, 3, rngs=rngs) for _ in range(2)]

    def __call__(self, x):
        for l in self.layers:
            x = l(x)
        return x


print("OK", nnx.jit(lambda m, x: m(x))(Net(nnx.Rngs(0)), jnp.ones((1, 3))).shape)
