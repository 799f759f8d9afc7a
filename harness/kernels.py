"""Kernels that start at once: each is forked from an interpreter that has imported jax, flax and optax.

Every recipe still has a process of its own. What is saved is the imports, about half of a recipe's time. Where
processes cannot be forked, Jupyter's own kernels are used.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache
from pathlib import Path

# Not matplotlib_inline: it looks for a running IPython when it is imported, and without one shows no plots.
IMPORTED = (
    "jax",
    "jax.numpy",
    "flax.nnx",
    "optax",
    "numpy",
    "IPython",
    "ipykernel.kernelapp",
    "ipykernel.debugger",
)
READY_SECONDS = 120


@cache
def server(environment: tuple[tuple[str, str], ...]) -> str:
    """The address of an interpreter with this environment, started once a process. It ends with this process.

    Raises RuntimeError where it does not come up.
    """
    folder = tempfile.mkdtemp(prefix="nnx-", dir="/tmp" if os.path.isdir("/tmp") else None)
    address = f"{folder}/s"
    command = [sys.executable, __file__, "serve", address]
    process = subprocess.Popen(command, env=dict(environment), stdin=subprocess.PIPE)
    atexit.register(_stop, process, folder)
    ends = time.monotonic() + READY_SECONDS
    while not os.path.exists(address):
        if process.poll() is not None or time.monotonic() > ends:
            raise RuntimeError(
                "the interpreter that kernels are forked from did not start; see its error above"
            )
        time.sleep(0.05)
    return address


def _stop(process: subprocess.Popen, folder: str) -> None:
    """End a server; it also ends by itself when its stdin does, as when this process is killed."""
    process.stdin.close()
    process.kill()
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def command(environment: dict[str, str]) -> list[str] | None:
    """The command that starts a forked kernel with this environment, as a Jupyter kernelspec has it, or None."""
    if not hasattr(os, "fork"):
        return None
    address = server(tuple(sorted(environment.items())))
    return [sys.executable, "-I", "-S", __file__, "ask", address, "-f", "{connection_file}"]


def serve(address: str) -> None:
    """Import, then fork a kernel for each connection, until stdin ends."""
    import importlib
    import selectors

    sys.path.pop(0)  # this folder, which a recipe does not see
    for name in IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended kernels need no one to wait for them
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen()
    os.rename(f"{address}.new", address)
    with selectors.DefaultSelector() as waiting:
        waiting.register(listener, selectors.EVENT_READ)
        waiting.register(sys.stdin, selectors.EVENT_READ)
        while not any(key.fileobj is sys.stdin for key, _ in waiting.select()):
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
        else:
            return
    listener.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    become_kernel(connection)


def become_kernel(connection: socket.socket) -> None:
    """Be the kernel that the other end of `connection` asks for, and end when it does."""
    asked = json.loads(connection.makefile().readline())

    def watch() -> None:
        connection.recv(1)
        os._exit(1)

    os.chdir(asked["folder"])
    threading.Thread(target=watch, daemon=True).start()
    from ipykernel.kernelapp import launch_new_instance

    parent = f"--IPKernelApp.parent_handle={os.getppid()}"  # without its parent the kernel ends, too
    launch_new_instance([*asked["arguments"], parent])


def ask(address: str, *arguments: str) -> None:
    """What Jupyter takes for the kernel: it asks for one, lives as long, and takes it along when it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    connection.sendall(json.dumps({"folder": str(Path.cwd()), "arguments": arguments}).encode() + b"\n")
    connection.recv(1)  # returns when the kernel is gone


if __name__ == "__main__":
    {"serve": serve, "ask": ask}[sys.argv[1]](*sys.argv[2:])
