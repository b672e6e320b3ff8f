"""The rendezvous address of JAX's processes. torchrun's own store already listens on MASTER_PORT."""

from __future__ import annotations

import os
import socket

from meshwright.training.rendezvous import free_port

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # set by torchrun if its agent has the store


def variables() -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT of JAX's coordinator; empty if the given port is free.

    Under torchrun the first process chooses a port and sends it to the others through torchrun's store, at every
    restart.
    """
    if os.environ.get(AGENT_STORE) != "True" or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return {}
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  not in __all__

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False)
    key = f"meshwright/jax/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if os.environ["RANK"] == "0":
        store.set(key, f"{_own_address(host, port)} {free_port()}")
    address, found = store.get(key).decode().split()
    return {"MASTER_ADDR": address, "MASTER_PORT": found}


def _own_address(host: str, port: int) -> str:
    """Return this host's address for other hosts: the local address of a connection to `host`, or `host` itself."""
    with socket.create_connection((host, port)) as there:
        address = there.getsockname()[0]
    return host if address.startswith("127.") or address == "::1" else address
