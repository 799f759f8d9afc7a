# raises=[{"error": "TypeError"}]
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P, NamedSharding

shard_map = getattr(jax, "shard_map", None)
if shard_map is None:
    from jax.experimental.shard_map import shard_map
mesh = jax.make_mesh((2,), ("d",))
x = jax.device_put(jnp.ones((4, 3)), NamedSharding(mesh, P("d")))


def local(x):
    total, _ = jax.lax.scan(lambda a, r: (a + r.sum(), None), jnp.zeros(()), x)
    return total[None]


y = jax.jit(shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d")))(x)
print("OK", y)
