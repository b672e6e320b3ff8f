"""Start MaxText's own trainer and write the measurements of its process. Runs in MaxText's environment.

    python meshwright_train.py OUTPUT CPU BATCHES maxtext.yml key=value ...

CPU are comma-separated settings that apply only on a CPU. BATCHES is a folder of arrays for `meshwright_loop`; empty:
MaxText's own loop. RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT have the meaning of torchrun;
MESHWRIGHT_PROCESSOR is the name of a CPU in records.

OUTPUT/process-N.json   device, software, peak memory, and the ending of a training on BATCHES
"""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("maxtext", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def facts() -> dict[str, Any]:
    """Return the device as in a record, and versions of packages."""
    import jax

    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    is_cpu = device.platform == "cpu"
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    software = {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES}
    return {
        "device": {
            "type": device.platform,
            "name": os.environ["MESHWRIGHT_PROCESSOR"] if is_cpu else device.device_kind,
            "count_on_this_machine": 1 if is_cpu else jax.local_device_count(),  # all virtual devices are one
            "memory_bytes": host_bytes if is_cpu else stats.get("bytes_limit"),
            "threads": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
        },
        "software": software,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def peak_memory_bytes() -> int:
    """Return the peak of allocated memory on an accelerator, of resident memory on a CPU."""
    import jax

    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()]
    return max(peaks) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def join_processes() -> None:
    """Initialize JAX's distributed runtime; each process has one device."""
    import jax

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        jax.distributed.initialize(
            coordinator_address=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            num_processes=world,
            process_id=int(os.environ["RANK"]),
            local_device_ids=None if os.environ.get("JAX_PLATFORMS") == "cpu" else [local],
        )


def train(arguments: list[str]) -> None:
    """Train; called by absl with the name of the script and the arguments above."""
    import jax
    from maxtext.trainers.pre_train import train as maxtext

    output = Path(arguments[1])
    path = output / f"process-{os.environ.get('RANK', '0')}.json"
    join_processes()
    hardware = "cpu" if jax.default_backend() == "cpu" else "gpu"
    is_single = str(not jax.distributed.is_initialized()).lower()
    path.write_text(json.dumps(facts()), encoding="utf-8")
    settings = [f"hardware={hardware}", f"skip_jax_distributed_system={is_single}"]
    settings += arguments[2].split(",") if arguments[2] and hardware == "cpu" else []
    sys.argv = [arguments[0], *arguments[4:], *settings]  # `meshwright_weights` reads them
    ending = None
    if arguments[3]:
        import meshwright_loop

        ending = meshwright_loop.main(sys.argv, batches=Path(arguments[3]))
    else:
        maxtext.main(sys.argv)
    path.write_text(json.dumps(facts() | {"ending": ending}), encoding="utf-8")


if __name__ == "__main__":
    from absl import app

    app.run(train, argv=sys.argv)
