"""A process of a training: `python -m meshwright.engines.torchtitan.worker FOLDER/meshwright_run.py`.

Does the same as torchtitan's `train` with `--module meshwright_run --config train`, with the module given by its path.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from meshwright import runfile
from meshwright.engines.launched_worker import worker_folders
from meshwright.engines.observer import observer_of_environment
from meshwright.engines.torchtitan.lower import FUNCTION, LAYOUT, RUN_FILE
from meshwright.training.machine import main_or_refuse


def main(path: Path) -> None:
    """Train as the configuration module at `path` says."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    for name, default in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, default)
    from meshwright.engines.torchtitan import probe

    probe.require_device(probe.detect())
    observer_of_environment().initializing(rank=int(os.environ["RANK"]))
    from torchtitan.train import main as train

    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    sys.argv = [sys.argv[0], "--module", path.stem, "--config", FUNCTION]
    folder = path.parent
    with worker_folders(folder, runfile.load(folder / RUN_FILE), layout=LAYOUT):
        train()


if __name__ == "__main__":
    main_or_refuse(main)
