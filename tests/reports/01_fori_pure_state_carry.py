# raises=[{"error": "ValueError", "flax": "<0.12.3", "mode": "graph"}, {"error": "ValueError", "mode": "tree"}]
import jax, jax.numpy as jnp
from flax import nnx

lin = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
acc0 = jax.tree.map(jnp.zeros_like, nnx.state(lin, nnx.Param))
add_one = lambda i, acc: jax.tree.map(lambda a: a + 1.0, acc)
acc = nnx.fori_loop(0, 4, add_one, acc0)
assert all(bool((l == 4).all()) for l in jax.tree.leaves(acc))
print("OK sum=4")
