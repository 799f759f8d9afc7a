# raises=[{"error": "ValueError", "flax": "<0.12.3", "mode": "graph"}, {"error": "ValueError", "mode": "tree"}]
import jax, jax.numpy as jnp, optax, flax
from flax import nnx

new_api = tuple(map(int, flax.__version__.split(".")[:2])) >= (0, 11)
model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
opt = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
K = 4


@nnx.jit(donate_argnums=(1, 2))
def step(batch, model, opt):
    micro = batch.reshape(K, -1, 4)

    def body(i, carry):
        g_sum, loss_sum, model, opt = carry
        loss, g = nnx.value_and_grad(lambda m: (m(micro[i]) ** 2).mean())(model)
        return jax.tree.map(jnp.add, g_sum, g), loss_sum + loss, model, opt

    zeros = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    g, l, model, opt = nnx.fori_loop(0, K, body, (zeros, jnp.float32(0), model, opt))
    g = jax.tree.map(lambda x: x / K, g)
    opt.update(model, g) if new_api else opt.update(g)
    return l / K


x = jax.random.normal(jax.random.key(1), (16, 4))
w0 = jnp.array(model.kernel.value)
ref = jax.grad(lambda w: ((x @ w) ** 2).mean())(w0)
step(x, model, opt)
err = float(jnp.abs(model.kernel.value - (w0 - 0.1 * ref)).max())
assert err < 1e-5, err
print("OK matches full batch")
