# raises=[{"error": "ValueError"}]
import jax, jax.numpy as jnp
from flax import nnx

bn = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
f = nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))
x = jax.random.normal(jax.random.key(0), (5, 7, 3))
f(bn, x)
f(bn, x)
print("OK mean shape", bn.mean.value.shape)
