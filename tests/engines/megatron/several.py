"""Several trainings one after the other in the same processes: a start costs more than twenty steps do."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    import torch.distributed as dist

    from meshwright.engines.megatron.in_megatron_process.train_loop import train

    dist.init_process_group()
    for folder in sys.argv[1:]:
        train(Path(folder) / "meshwright_run.yaml")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
