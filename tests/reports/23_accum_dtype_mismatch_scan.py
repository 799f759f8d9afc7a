# raises=[{"error": "TypeError"}]
import jax, jax.numpy as jnp
from flax import nnx

m = nnx.Linear(4, 4, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
gd, p = nnx.split(m)
acc0 = jax.tree.map(jnp.zeros_like, p)  # bf16 buffer


def body(acc, x):
    g = jax.grad(lambda p: (nnx.merge(gd, p)(x).astype(jnp.float32) ** 2).mean())(p)
    return jax.tree.map(lambda a, g: a + g.astype(jnp.float32), acc, g), None


acc, _ = jax.lax.scan(body, acc0, jnp.ones((3, 2, 4), jnp.bfloat16))
print("OK", {l.dtype.name for l in jax.tree.leaves(acc)})
