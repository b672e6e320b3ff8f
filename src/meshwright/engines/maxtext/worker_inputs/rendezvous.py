"""Where JAX's processes meet. torchrun's own store listens on MASTER_PORT, where JAX would listen too."""

from __future__ import annotations

import os
import socket

from meshwright.training.rendezvous import free_port

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torchrun says so where its agent has the store


def place() -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT for JAX, which its first process serves; nothing where they are free.

    Under torchrun the first process finds a port and tells the others through torchrun's store, of each restart anew.
    """
    if os.environ.get(AGENT_STORE) != "True" or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return {}
    from torch.distributed import TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False)
    key = f"meshwright/jax/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if os.environ["RANK"] == "0":
        store.set(key, f"{_own_address(host, port)} {free_port()}")
    address, found = store.get(key).decode().split()
    return {"MASTER_ADDR": address, "MASTER_PORT": found}


def _own_address(host: str, port: int) -> str:
    """What other hosts call this one: the address that reaches `host`, or `host` where that is this machine itself."""
    with socket.create_connection((host, port)) as there:
        address = there.getsockname()[0]
    return host if address.startswith("127.") or address == "::1" else address
