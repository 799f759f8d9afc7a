# raises=[{"error": "RuntimeError"}]
import jax, jax.numpy as jnp
from flax import nnx

m = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
ema = nnx.clone(m)
step = nnx.jit(lambda m, x: m(x), donate_argnums=0)
step(m, jnp.ones((1, 3)))
print("OK", float(ema.kernel.value.sum()))
