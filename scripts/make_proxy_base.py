"""Train the frozen base of `proxy_lora_xs` again and write it beside the rules, in bf16.

    python scripts/make_proxy_base.py

The shipped file is part of the proxy's rules: with another one its reference convergence points are measured anew.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from meshwright import runfile
from meshwright.engines.base import Measuring, TrainOptions
from meshwright.engines.native import engine
from meshwright.mlperf.benchmarks import PROXIES, load_benchmark
from meshwright.mlperf.proxy_data import build_proxy_data
from meshwright.training import checkpoints, conversion

STEPS = 256


def main() -> None:
    """Train, and write the weights."""
    torch.set_num_threads(1)
    lora, pretrain = load_benchmark("proxy_lora_xs"), load_benchmark("proxy_pretrain_xs")
    with TemporaryDirectory() as scratch:
        content = {
            "name": "base",
            "model": lora.training["run"]["model"],
            "data": {
                "source": str(build_proxy_data(pretrain) / "train"),
                "sequence_length": lora.sequence_length,
                "joined_documents": True,
            },
            "batch": {"global_sequences": 16, "micro": 16},
            "precision": "fp32",
            "cluster": "here",
            "parallel": {"data_shard": 1},
            "optimizer": {**pretrain.training["run"]["optimizer"], "learning_rate": 4e-3, "warmup_steps": 16},
            "train": {"steps": STEPS, "checkpoint": {"folder": f"{scratch}/saved", "every_steps": STEPS}},
        }
        options = TrainOptions(folder=Path(scratch) / "out", measuring=Measuring.NEVER, only_steps=True)
        record = engine.train(runfile.from_mapping(content), options=options)
        saved = checkpoints.newest(Path(scratch) / "saved")
        target = PROXIES / lora.training["base"]
        shutil.rmtree(target, ignore_errors=True)
        held = checkpoints.content_of(checkpoints.read_manifest(saved.path))
        conversion.export_weights(saved, held, target, dtype="bf16")
        print(f"loss {record.statistics['last_loss']:.4f}; wrote {target}")


if __name__ == "__main__":
    main()
