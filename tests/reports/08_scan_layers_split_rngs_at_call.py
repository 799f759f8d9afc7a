# raises=[{"error": "ValueError"}]
import jax.numpy as jnp
from flax import nnx


class Blk(nnx.Module):
    def __init__(self, rngs):
        self.l = nnx.Linear(4, 4, rngs=rngs)
        self.d = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.d(nnx.relu(self.l(x)))


@nnx.split_rngs(splits=3)
@nnx.vmap(in_axes=(0,), out_axes=0)
def make(rngs):
    return Blk(rngs)


stack = make(nnx.Rngs(0))


@nnx.split_rngs(splits=3)
@nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
def fwd(x, blk):
    return blk(x)


print("OK", fwd(jnp.ones((2, 4)), stack).shape)
