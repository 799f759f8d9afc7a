# raises=[{"error": "ValueError"}]
import jax, jax.numpy as jnp
from flax import nnx

m = nnx.Linear(3, 3, rngs=nnx.Rngs(0))


@nnx.jit
def loss_grad(m, x, n):
    def loss(m):
        return nnx.fori_loop(0, n, lambda i, c: (c[0], c[0](c[1])), (m, x))[1].sum()

    return nnx.grad(loss)(m)


g = loss_grad(m, jnp.ones((2, 3)), 3)
print("OK", len(jax.tree.leaves(g)))
