import jax.numpy as jnp
from flax import nnx


def run(model, x, n):
    body = lambda c: (c[0] + 1, c[2](c[1]), c[2])
    return nnx.while_loop(lambda c: c[0] < n, body, (0, x, model))[1]


m = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
y = nnx.vmap(run, in_axes=(None, 0, 0))(m, jnp.ones((4, 3)), jnp.arange(4))
print("OK", y.shape)
