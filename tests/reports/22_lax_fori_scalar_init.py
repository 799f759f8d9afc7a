# raises=[{"error": "TypeError"}]
import jax, jax.numpy as jnp

xs = jnp.ones((4, 3))
out = jax.lax.fori_loop(0, 4, lambda i, acc: acc + xs[i], 0)
print("OK", out.shape)
