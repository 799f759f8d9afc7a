# raises=[{"error": "AssertionError", "jax": "<0.8"}]
import jax, jax.numpy as jnp

try:
    from jax._src.api import vjp3 as vjp
except ImportError:
    vjp = jax.vjp
mkref = getattr(jax, "new_ref", None) or getattr(jax, "array_ref", None)
if mkref is None:
    raise SystemExit("no refs in this jax")
Ws = jax.random.normal(jax.random.key(0), (3, 8, 8)) * 0.3
xs = jax.random.normal(jax.random.key(1), (5, 4, 8))


def loss(Ws, x):
    return (jax.lax.scan(lambda h, W: (jnp.tanh(h @ W), None), x, Ws)[0] ** 2).mean()


@jax.jit
def with_ref(Ws):
    acc = mkref(jnp.zeros_like(Ws))

    def micro(_, x):
        l, f = vjp(lambda W: loss(W, x), Ws)
        f.with_refs(acc)(jnp.ones_like(l))
        return (), l

    jax.lax.scan(micro, (), xs)
    return acc[...]


ref = sum(jax.grad(loss)(Ws, x) for x in xs)
err = float(jnp.abs(with_ref(Ws) - ref).max())
assert err < 1e-5, f"wrong gradient, max err {err:.3g}"
print("OK max err", err)
