import jax, jax.numpy as jnp
from flax import nnx


@nnx.vmap(in_axes=None, out_axes=0, axis_size=3)
def make(rngs):
    return nnx.Linear(4, 4, rngs=rngs)


stack = make(nnx.Rngs(0))
gd, st = nnx.split(stack)
y, _ = jax.lax.scan(lambda h, s: (nnx.merge(gd, s)(h), None), jnp.ones((2, 4)), st)
k = stack.kernel.value
print("OK", y.shape, "layers identical:", bool((k[0] == k[1]).all()))
