# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   recipe:
#     summary: Every process loads its own rows, make_array_from_process_local_data makes one batch of them, and one all-reduce ends the step.
#     symptoms:
#       - training on several hosts hangs and nothing is raised
#       - jax.distributed.initialize hangs or crashes
#       - one process has more steps than the others
#       - gloo collectives on CPU with jax.distributed
#     needs: {flax: ">=0.11.2"}
# ---

# %% [markdown]
# # Accumulate gradients in many processes
#
# Start one file in every process. Each loads its own rows, `jax.make_array_from_process_local_data` makes one
# batch of them, and the step is that of one process with several devices. Here two processes on one machine
# run it. On many hosts it is the same file.
#
# ## Do this

# %% tags=["snippet"]
import os
import socket
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

if hasattr(jax.lax, "pcast"):
    vary = partial(jax.lax.pcast, to="varying")
else:
    vary = jax.lax.pvary  # the same in older releases of jax


@nnx.jit  # one program, not one for every random draw
def create_model(rngs: nnx.Rngs):
    return nnx.Sequential(nnx.Linear(64, 32, rngs=rngs), nnx.tanh, nnx.Linear(32, 10, rngs=rngs))


def loss_fn(model, minibatch):
    x, y = minibatch
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


@nnx.jit(static_argnames=("num_minibatches", "mesh"))
def train_step(model, optimizer, batch, num_minibatches: int, mesh: Mesh):
    graphdef, params = nnx.split(model, nnx.Param)

    def minibatch_loss(params, minibatch):
        return loss_fn(nnx.merge(graphdef, params), minibatch)

    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    def mean_over_devices(params, rows):
        params = vary(params, "data")  # or jax.grad sums over the devices, in every minibatch
        minibatches = jax.tree.map(lambda a: a.reshape(num_minibatches, -1, *a.shape[1:]), rows)

        def body(total, minibatch):
            loss, grads = jax.value_and_grad(minibatch_loss)(params, minibatch)
            return jax.tree.map(jnp.add, total, grads), loss

        total, losses = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), minibatches)
        grads = jax.tree.map(lambda g: g / num_minibatches, total)
        return jax.lax.pmean((losses.mean(), grads), "data")

    loss, grads = mean_over_devices(params, batch)
    optimizer.update(model, grads)
    return loss


def connect(coordinator: str, num_processes: int, process_id: int):
    """Join the other processes. Call it before anything asks for a device."""
    if process_id == 0:
        # Raises if the port is taken. jax itself may crash then.
        socket.create_server(("", int(coordinator.rpartition(":")[2]))).close()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # for CPUs only
    jax.distributed.initialize(
        coordinator, num_processes, process_id, initialization_timeout=60, heartbeat_timeout_seconds=60
    )
    devices = f"{jax.local_device_count()} of {jax.device_count()} devices"
    print(f"process {jax.process_index()} of {jax.process_count()}: {devices}", flush=True)


def main(coordinator, num_processes, process_id, rows_per_step=256, num_minibatches=4):
    connect(coordinator, num_processes, process_id)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    model = create_model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    for node in model, optimizer:
        nnx.update(node, jax.device_put(nnx.state(node), NamedSharding(mesh, P())))

    # Mapped, not read: only the rows of this process are loaded.
    dataset = [np.load(name, mmap_mode="r") for name in ("images.npy", "labels.npy")]
    mine = [a[process_id::num_processes] for a in dataset]
    rows = rows_per_step // num_processes
    num_steps = len(dataset[0]) // rows_per_step  # the same in every process
    for step in range(num_steps):
        local = [np.array(a[step * rows :][:rows]) for a in mine]
        batch = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), local)
        loss = train_step(model, optimizer, batch, num_minibatches, mesh)
    loss.block_until_ready()

    print(f"process {process_id}: {num_steps} steps", flush=True)
    if process_id == 0:
        np.savez("params.npz", *jax.tree.leaves(nnx.state(model, nnx.Param)))
    return model, optimizer, batch, mesh


if __name__ == "__main__" and "PROCESS_ID" in os.environ:
    env = os.environ
    trained = main(env["COORDINATOR"], int(env["NUM_PROCESSES"]), int(env["PROCESS_ID"]))

# %% [markdown]
# - **`connect`** comes first. After it, `jax.device_count()` counts the devices of all processes.
# - **`make_array_from_process_local_data`** takes the rows that this process has and gives arrays of all rows.
#   No row leaves its process. Which rows stand together makes no difference to a mean.
# - **`num_steps`** comes from the whole data set. A process that takes more steps than the others [waits for
#   them](#one-process-takes-more-steps), and nothing is raised.
# - **`mean_over_devices`** is explained in [reduce once per step](reduce_once_per_step.py).
#
# ## Start two processes
#
# In a shell, with `images.npy` and `labels.npy` beside it:
#
# ```sh
# export COORDINATOR=localhost:1234 NUM_PROCESSES=2
# for i in 0 1; do PROCESS_ID=$i python train.py & done; wait
# ```
#
# The cell below does the same from a notebook, and ends what hangs. `train.py` is the cell above, word for word. The launcher gives every process the address and the number of
# processes, and each an id of its own. What they write goes to files.

# %%
import inspect
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sklearn.datasets import load_digits

scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name)
images, labels = load_digits(return_X_y=True)
images, labels = (images[:1791] / 16).astype(np.float32), labels[:1791].astype(np.int32)
np.save(folder / "images.npy", images)
np.save(folder / "labels.npy", labels)
source = "".join(inspect.findsource(main)[0])  # the text of the cell in a notebook, of the file in a script
train = next(cell for cell in re.split(r"(?m)^# %%.*$", source) if "\ndef main(" in cell)
(folder / "train.py").write_text(train)


def free_port():
    with socket.create_server(("", 0)) as server:  # 0 asks the system for one
        return server.getsockname()[1]


def start(name, ids=(0, 1), port=None, **env):
    """Run `name`.py once for each id."""
    env |= {"COORDINATOR": f"localhost:{port or free_port()}", "NUM_PROCESSES": "2"}
    env |= {"PYTHON_COLORS": "0"}  # a notebook's kernel asks for colours, even in files
    # The alarm ends a process that waits for another even where this notebook is gone.
    code = f"import runpy, signal; signal.alarm(300); runpy.run_path('{name}.py', run_name='__main__')"
    job = []
    for i in ids:
        with open(folder / f"{name}-{i}.out", "w") as out, open(folder / f"{name}-{i}.err", "w") as err:
            kwargs = dict(cwd=folder, env=os.environ | env | {"PROCESS_ID": str(i)}, stdout=out, stderr=err)
            job.append(subprocess.Popen([sys.executable, "-c", code], **kwargs))
    return job


def printed(name):
    """What the processes printed, without the lines of gloo."""
    files = sorted(folder.glob(f"{name}-*.out"))
    return [s for file in files for s in file.read_text().splitlines() if s.startswith("process")]


def wait(job, seconds, until=lambda: False):
    """Wait for all processes of a job, or for `until`, but no longer."""
    ends = time.monotonic() + seconds
    while (running := sum(process.poll() is None for process in job)) and not until():
        if time.monotonic() > ends:
            raise TimeoutError(f"{running} of {len(job)} processes still run after {seconds} seconds")
        time.sleep(0.05)


def finish(name, job, seconds=100):
    """Wait, leave nothing running, and say why a process failed, without time and address."""
    try:
        wait(job, seconds)
    finally:
        for process in job:
            process.kill()
            process.wait()
    errors = "".join(file.read_text() for file in sorted(folder.glob(f"{name}-*.err")))
    lines = r"^(?:[EF]\d{4} [^\]]*\] )?((?:[\w.]+Error: |Terminating process|Failed to add port).*)"
    if any(process.returncode for process in job):
        cause = re.search(lines, errors, re.MULTILINE)[1]
        raise RuntimeError(re.split(r": No address| \(while|: \[external", cause)[0])


# %% [markdown]
# What a process holds can be seen only there. So this runs in both, after `train.py`. It keeps the rows and the
# parameters that the process has, takes one more step, and keeps the parameters again. NumPy says which files
# the process loads, and as what, and which it saves.


# %%
def watch(function):
    def watched(name, *args, **kwargs):
        result = function(name, *args, **kwargs)
        as_what = f" as {type(result).__name__}" if result is not None else ""
        print(f"process {os.environ['PROCESS_ID']}: {function.__name__} {name}{as_what}", flush=True)
        return result

    return watched


def look(train_step, trained):
    model, optimizer, batch, mesh = trained
    x, me = batch[0], jax.process_index()
    assert x.shape == (256, 64) and not x.is_fully_addressable
    seen = {"rows": np.concatenate([shard.data for shard in x.addressable_shards])}
    try:
        np.asarray(x)
    except RuntimeError as error:
        print(f"process {me}:", str(error).partition(". ")[0])

    if me == 0:
        step = train_step.lower(model, optimizer, batch, 4, mesh).compile().as_text()
        assert " while(" in step
        for place, hlo in ("step", step), ("loop", step[: step.index("\nENTRY")]):
            collectives = r" ((?:all|reduce|collective)-[a-z-]+?)(?:-start)?\("
            print(f"process 0: in the {place}:", *re.findall(collectives, hlo) or ["no collective"])

    for when in "trained", "one_more":
        params = jax.tree.leaves(nnx.state(model, nnx.Param))
        seen |= {f"{when}{k}": np.asarray(leaf) for k, leaf in enumerate(params)}
        seen["loss"] = np.asarray(train_step(model, optimizer, batch, 4, mesh))
    np.savez(f"seen-{me}.npz", **seen)


(folder / "look.py").write_text(f"""
import os, re, runpy, jax, numpy as np
from flax import nnx
{inspect.getsource(watch)}
{inspect.getsource(look)}
np.load, np.savez = watch(np.load), watch(np.savez)
names = runpy.run_path("train.py", run_name="__main__")
look(names["train_step"], names["trained"])
""")
finish("look", start("look", JAX_NUM_CPU_DEVICES="2"))
print(*printed("look"), sep="\n")

# %% [markdown]
# ## Equal to the full batch
#
# The reference is this process alone, with one device and no minibatches. It takes 256 rows a step, in the
# order of the file.


# %% tags=["proof"]
@nnx.jit
def full_batch_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss, grads


def difference(leaves, others):
    return max(np.abs(a - b).max() for a, b in zip(leaves, others, strict=True))


model = create_model(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
initial = jax.device_get(jax.tree.leaves(nnx.state(model)))
for step in range(6):
    batch = (images[256 * step :][:256], labels[256 * step :][:256])
    full_batch_step(model, optimizer, batch)
expected = jax.device_get(jax.tree.leaves(nnx.state(model)))
_, full_grads = jax.device_get(full_batch_step(model, optimizer, batch))
full_grads, full_loss = jax.tree.leaves(full_grads), full_batch_step(model, optimizer, batch)[0]
assert len(full_grads) == 4 and min(np.abs(leaf).max() for leaf in full_grads) > 1e-3

processes = []
for i in 0, 1:
    seen = np.load(folder / f"seen-{i}.npz")
    assert np.array_equal(seen["rows"], images[1280 + i : 1536 : 2]), "its rows, and no others"
    params = [seen[f"trained{k}"] for k in range(4)]
    grads = [(seen[f"trained{k}"] - seen[f"one_more{k}"]) / 0.5 for k in range(4)]
    off = difference(params, expected), difference(grads, full_grads)
    assert abs(seen["loss"] - full_loss) < 1e-6
    assert max(off) < 1e-6, f"parameters and gradients are off by up to {off}"
    assert difference(params, initial) > 1e-2, "nothing was trained"
    processes.append(params + grads)
assert difference(*processes) == 0
said = set(printed("look"))
assert {"process 0: in the step: all-reduce", "process 0: in the loop: no collective"} < said
assert {f"process {i}: load images.npy as memmap" for i in (0, 1)} < said, "mapped, not read"
assert {line for line in said if "params.npz" in line} == {"process 0: savez params.npz"}, "one writes"
saved = np.load(folder / "params.npz")
assert difference([saved[f"arr_{k}"] for k in range(4)], processes[0][:4]) == 0

print("each process holds 128 rows of a batch of 256: True")
print("parameters after 6 steps and gradients equal those of the full batch to 1e-06: True")
print("parameters and gradients are the same in both processes, bit for bit: True")

# %% [markdown]
# ## On several hosts
#
# Nothing in `train.py` changes. For two hosts, with your names:
#
# ```sh
# COORDINATOR=host0:1234 NUM_PROCESSES=2 PROCESS_ID=0 python train.py   # on host0
# COORDINATOR=host0:1234 NUM_PROCESSES=2 PROCESS_ID=1 python train.py   # on host1
# ```
#
# - **The address** is that of process 0, with a port that the others can reach. The ids are 0, 1, and so on.
#   On TPUs and under Slurm `jax.distributed.initialize()` [finds all three
#   itself](https://docs.jax.dev/en/latest/multi_process.html): call it without arguments, take
#   `jax.process_index()` and `jax.process_count()`, and call `main` without the guard.
# - **Several processes on one GPU machine**: give each its own GPUs, with `local_device_ids=[i]`.
# - **The data**: one file that all can open, or a part for each. With parts, agree on `num_steps` first.
# - **The batch**: `rows_per_step` is a multiple of `jax.device_count() * num_minibatches`.
# - **One process writes** what is the same in all, here `params.npz`.
# - **Every process takes every step.** Compute nothing on global arrays under `if process_id == 0`.
#
# ## What goes wrong
#
# Four jobs that fail, started at once: `connect` and nothing else, the same with a short timeout, a copy of
# `train.py` with the changes that stand here, and jax alone.

# %%
join = f"import os, socket, jax\n\n{inspect.getsource(connect)}\n\nconnect(os.environ['COORDINATOR'], 2, 0)\n"
alone = join.replace("initialization_timeout=60", "initialization_timeout=2")
uneven = train.replace("heartbeat_timeout_seconds=60", "heartbeat_timeout_seconds=5")
uneven = uneven.replace("len(dataset[0]) // rows_per_step", "len(mine[0]) // rows")
server = socket.create_server(("", 0))  # another program, which has the port
port = server.getsockname()[1]
unchecked = f"import jax; jax.distributed.initialize('localhost:{port}', 2, 0)"

for name, source in ("join", join), ("alone", alone), ("uneven", uneven), ("unchecked", unchecked):
    (folder / f"{name}.py").write_text(source)
jobs = {name: start(name, [0], port) for name in ("join", "unchecked")}
jobs |= {"alone": start("alone", [0]), "uneven": start("uneven")}

# %% [markdown]
# ### The port of the coordinator is taken
#
# `connect` tries the port first, so process 0 ends at once. Choose another port.

# %% tags=["raises-exception"] raises=[{"error": "RuntimeError", "match": "Address already in use"}]
finish("join", jobs["join"])

# %% [markdown]
# Without that line it is jax that fails. It writes this, and then raises `Failed to start RPC server` or
# crashes with a segmentation fault, in one and the same release.

# %% tags=["raises-exception"] raises=[{"error": "RuntimeError", "match": "Failed to add port to server"}]
finish("unchecked", jobs["unchecked"])

# %% [markdown]
# ### A process never comes
#
# `jax.distributed.initialize` ends the process after `initialization_timeout`, here 2 seconds; `except`
# cannot catch it. Look for a process that did not start, a wrong `NUM_PROCESSES`, an address that the others
# cannot reach.

# %% tags=["raises-exception"] raises=[{"error": "RuntimeError", "match": "Terminating process because the JAX distributed service detected fatal errors"}]
finish("alone", jobs["alone"])

# %% [markdown]
# ### One process takes more steps
#
# Here `num_steps` comes from the rows of the process. There are 1791, so process 0 has one more than
# process 1, and that makes a step more. It waits in an all-reduce in which process 1 takes no part. Both are
# alive, so no heartbeat is missing and nothing is raised. The launcher has to end them.

# %% tags=["raises-exception"] raises=[{"error": "TimeoutError", "match": "2 of 2 processes still run after 3 seconds"}]
wait(jobs["uneven"], 90, until=lambda: "process 1: 6 steps" in printed("uneven"))
print(*printed("uneven"), sep="\n")
wait(jobs["uneven"], 3)

# %% [markdown]
# ### A process dies
#
# Process 1 is killed while process 0 waits for it. Process 0 gets an error at once. At exit it looks for the
# other again, and ends after `heartbeat_timeout_seconds`, here 5. Nobody can go on alone: start all again, from
# what was saved.

# %% tags=["raises-exception"] raises=[{"error": "RuntimeError", "match": "Gloo all-reduce failed"}]
jobs["uneven"][1].kill()
finish("uneven", jobs["uneven"], 30)

# %% [markdown]
# ### Nothing is left running

# %% tags=["proof"]
try:
    left = os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    left = None
assert left is None, "a child process is left"
print("no child process is left: True")
server.close()
scratch.cleanup()

# %% [markdown]
# ## When to prefer another recipe
#
# - One process with several devices: [reduce once per step](reduce_once_per_step.py), or [sharded
#   minibatches](accumulate_sharded_minibatches.py), where the compiler places the all-reduces.
# - [Dropout and BatchNorm](reduce_once_per_step.py#with-dropout-and-batchnorm) in `shard_map`.
# - Rows of unequal weight, or a last batch that is not full: [unequal minibatches](unequal_minibatches.py).
