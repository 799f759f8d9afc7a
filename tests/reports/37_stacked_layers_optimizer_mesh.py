# raises=[{"error": "ValueError", "flax": ">=0.12"}]
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, optax
from flax import nnx

mesh = jax.make_mesh((2,), ("model",))
ctx = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh
init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("model", None))
make = nnx.split_rngs(splits=3)(
    nnx.vmap(lambda r: nnx.Linear(4, 4, kernel_init=init, rngs=r), in_axes=(0,), out_axes=0)
)
with ctx(mesh):
    stack = make(nnx.Rngs(0))
    opt = nnx.Optimizer(stack, optax.adam(1e-3), wrt=nnx.Param)
print(
    "OK",
    stack.kernel.value.shape,
    stack.kernel.value.sharding.spec if hasattr(stack.kernel.value.sharding, "spec") else None,
)
