"""Input of every contender of `train_cpu`, and the line that it writes after each step. Imports only PyTorch.

The folder of a task:  task.json     shapes, batch, precision, steps
                       weights/      initial weights in the format of Hugging Face
                       adapter/      initial adapters in the format of PEFT, if only they are trained
                       batches.npz   tokens and labels of every step, int64 [steps, sequences, tokens]
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True)
class Task:
    """One training, the same for all contenders."""

    folder: Path
    model: dict  # hidden, num_layers, vocab, ffn_hidden, num_heads, num_kv_heads, norm_epsilon, rope_theta
    precision: str  # fp32 or bf16
    sequences: int  # of a step
    micro: int  # sequences of a micro-batch
    length: int  # tokens of a sequence
    steps: int
    threads: int
    learning_rate: float
    betas: tuple[float, float]
    epsilon: float
    clip: float
    compile: bool = False
    out: Path = field(default=Path())

    @property
    def weights(self) -> Path:
        return self.folder / "weights"

    @property
    def adapter(self) -> Path:
        return self.folder / "adapter"

    @property
    def num_micro_batches(self) -> int:
        return self.sequences // self.micro

    def batches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels, [steps, sequences, tokens]; the label of a token is the one that follows it."""
        arrays = np.load(self.folder / "batches.npz")
        return torch.from_numpy(arrays["tokens"]), torch.from_numpy(arrays["labels"])

    def adamw(self) -> dict:
        """Arguments of torch.optim.AdamW."""
        return {"lr": self.learning_rate, "betas": self.betas, "eps": self.epsilon, "weight_decay": 0.0}


def read_task() -> Task:
    """The task that the command line names; sets the number of threads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--compile", action="store_true", help="under torch.compile")
    arguments = parser.parse_args()
    values = json.loads((arguments.folder / "task.json").read_text())
    values |= {"betas": tuple(values["betas"]), "compile": arguments.compile}
    task = Task(folder=arguments.folder, out=arguments.out, **values)
    torch.set_num_threads(task.threads)
    return task


class Steps:
    """`steps.jsonl`, as Meshwright writes it: the loss of a step and the time it ended, from the first one's begin."""

    def __init__(self, task: Task) -> None:
        task.out.mkdir(parents=True, exist_ok=True)
        self.stream: TextIO = (task.out / "steps.jsonl").open("w")
        self.num = 0
        self.start_s = time.perf_counter()

    def write(self, loss: float) -> None:
        self.num += 1
        line = {"step": self.num, "loss": loss, "elapsed_s": time.perf_counter() - self.start_s}
        self.stream.write(json.dumps(line) + "\n")
        self.stream.flush()
