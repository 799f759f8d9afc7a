import jax, jax.numpy as jnp, optax

p = {"w": jnp.ones(3, jnp.bfloat16)}
tx = optax.MultiSteps(optax.contrib.schedule_free(optax.adam(1e-3, b1=0.0), 1e-3, b1=0.9), 2)
s = tx.init(p)
for _ in range(2):
    u, s = jax.jit(tx.update)({"w": jnp.ones(3, jnp.bfloat16)}, s, p)
    p = optax.apply_updates(p, u)
print("OK", p["w"].dtype)
