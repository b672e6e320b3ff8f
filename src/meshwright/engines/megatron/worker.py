"""A process of a training: `python -m meshwright.engines.megatron.worker FOLDER/meshwright_run.yaml`.

Imports little at the top: Megatron's checkpoint writer starts a process that imports this module again.
"""

from __future__ import annotations

import os
from pathlib import Path

from meshwright.training.machine import main_or_refuse

ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def main(path: Path) -> int:
    """Train the run at `path` as one of the processes of a launcher; return the exit code."""
    for name, default in ONE_PROCESS.items():
        os.environ.setdefault(name, default)
    from meshwright.engines.megatron import probe
    from meshwright.engines.observer import observer_of_environment

    probe.require_device(probe.detect())
    observer_of_environment().initializing(rank=int(os.environ["RANK"]))
    import torch
    import torch.distributed as dist

    from meshwright import runfile
    from meshwright.engines.launched_worker import worker_folders
    from meshwright.engines.megatron.in_megatron_process.train_loop import train
    from meshwright.engines.megatron.lower import LAYOUT
    from meshwright.records.training import Ending
    from meshwright.training.signals import STOPPED_EXIT_CODE

    with worker_folders(path.parent, runfile.load(path), layout=LAYOUT):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
        ending = train(path)
        dist.destroy_process_group()
    return STOPPED_EXIT_CODE if ending is Ending.STOPPED else 0  # a scheduler must not count it as done


if __name__ == "__main__":
    main_or_refuse(main)
