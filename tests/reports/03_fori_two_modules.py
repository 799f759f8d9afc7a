import jax.numpy as jnp
from flax import nnx

a, b = (nnx.Linear(2, 2, rngs=nnx.Rngs(s)) for s in (0, 1))
a2, b2 = nnx.fori_loop(0, 3, lambda i, c: c, (a, b))
print("OK", a2 is a, b2 is b)
