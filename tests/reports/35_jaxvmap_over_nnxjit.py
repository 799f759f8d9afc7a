# raises=[{"error": "TraceContextError", "mode": "graph"}]
import jax, jax.numpy as jnp
from flax import nnx

m = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
fwd = nnx.jit(lambda m, x: m(x))
print("OK", jax.vmap(lambda x: fwd(m, x))(jnp.ones((4, 3))).shape)
