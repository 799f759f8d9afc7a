# raises=[{"error": "TypeError", "flax": "<0.12.1"}, {"error": "ValueError", "mode": "tree"}]
import jax.numpy as jnp
from flax import nnx


class S(nnx.Module):
    def __init__(self):
        self.v = nnx.Variable(jnp.zeros(2))


class Net(nnx.Module):
    def __call__(self, s):
        s.v.value = s.v.value + 1
        self.sow(nnx.Intermediate, "h", s.v.value)
        return s


axes = nnx.StateAxes({nnx.Intermediate: 0, ...: nnx.Carry})
run = nnx.scan(lambda net, s: net(s), in_axes=(axes, nnx.Carry), out_axes=nnx.Carry, length=3)
net, s = Net(), S()
run(net, s)
print("OK sown", [v.shape for v in net.h.value])
