# raises=[{"error": "TypeError", "mode": "tree"}]
import jax, jax.numpy as jnp, optax, flax
from flax import nnx

new_api = tuple(map(int, flax.__version__.split(".")[:2])) >= (0, 11)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.l = nnx.Linear(4, 4, rngs=rngs)
        self.bn = nnx.BatchNorm(4, rngs=rngs)
        self.d = nnx.Dropout(0.1, rngs=rngs)
        self.o = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.o(self.d(nnx.relu(self.bn(self.l(x)))))


m = Net(nnx.Rngs(0))
opt = nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param)


@nnx.jit
def epoch(m, opt, xs):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def body(carry, x):
        m, opt = carry
        loss, g = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(m)
        opt.update(m, g) if new_api else opt.update(g)
        return (m, opt), loss

    return body((m, opt), xs)[1]


losses = epoch(m, opt, jax.random.normal(jax.random.key(0), (20, 8, 4)))
assert losses[-1] < losses[0]
print("OK", losses.shape, "step", int(opt.step.value))
