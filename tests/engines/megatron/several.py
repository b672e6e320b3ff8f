"""Several trainings one after the other in the same processes: a start costs more than twenty steps do.

Arguments are the folders of the trainings, and between them `FROM=TO`: a checkpoint that the next ones go on from.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def main() -> None:
    import torch.distributed as dist

    from meshwright.engines.megatron.in_megatron_process.train_loop import train

    dist.init_process_group()
    for argument in sys.argv[1:]:
        source, _, copy = argument.partition("=")
        if not copy:
            train(Path(argument) / "meshwright_run.yaml")
        elif dist.get_rank() == 0:
            shutil.copytree(source, copy)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
