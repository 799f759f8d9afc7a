# raises=[{"error": "TypeError", "flax": "<0.12"}]
import jax, jax.numpy as jnp, optax, flax
from flax import nnx

new_api = tuple(map(int, flax.__version__.split(".")[:2])) >= (0, 11)
m = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
labels = lambda t: jax.tree.map(lambda x: "mat" if jnp.ndim(x) > 1 else "vec", t)
tx = optax.partition({"mat": optax.adam(1e-2), "vec": optax.sgd(1e-2)}, labels)
opt = nnx.Optimizer(m, tx, wrt=nnx.Param)


@nnx.jit
def step(m, opt, x):
    g = nnx.grad(lambda m: (m(x) ** 2).mean())(m)
    opt.update(m, g) if new_api else opt.update(g)


step(m, opt, jnp.ones((4, 2)))
print("OK")
