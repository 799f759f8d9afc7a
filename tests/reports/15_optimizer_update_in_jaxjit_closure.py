# raises=[{"error": "ValueError", "mode": "graph"}, {"error": "TraceContextError", "mode": "tree"}]
import jax, jax.numpy as jnp, optax, flax
from flax import nnx

new_api = tuple(map(int, flax.__version__.split(".")[:2])) >= (0, 11)
m = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
opt = nnx.Optimizer(m, optax.adam(1e-3), wrt=nnx.Param)


@jax.jit
def update(x):
    g = nnx.grad(lambda m: (m(x) ** 2).mean())(m)
    opt.update(m, g) if new_api else opt.update(g)


update(jnp.ones((3, 2)))
print("OK", float(m.kernel.value.sum()))
