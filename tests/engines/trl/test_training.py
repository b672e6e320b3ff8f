"""An exported file trains under TRL, on this CPU: its losses are those of the native engine, step by step.

Every document is the same and fills one sequence, so that neither order nor packing matters. The rate is constant:
schedules of transformers are one step behind.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiny_folders import tiny_folder

pytest.importorskip("trl")

LENGTH, STEPS = 64, 6
RUN = """
name: same
model: start
weights: start
data: {source: same.jsonl, sequence_length: 64}
batch: {global_sequences: 8, micro: 2}
optimizer: {learning_rate: 2.0e-3, schedule: constant, weight_decay: 0.1}
engine: trl
cluster: h100-2x1
train: {steps: 6}
"""
SHARDED = "{data_shard: 2, sharding: parameters, recompute: full}"
STARTED = """\
# accelerate shards over GPUs alone: processes of a CPU are named as its FSDP asks for.
import inspect, runpy, textwrap
import accelerate.state as state
import torch
from accelerate.accelerator import Accelerator

found = {}
text = textwrap.dedent(inspect.getsource(state.AcceleratorState.__init__))
changed = text.replace("DistributedType.MULTI_GPU,", "DistributedType.MULTI_GPU, DistributedType.MULTI_CPU,", 1)
assert changed != text
exec(changed, state.__dict__, found)
state.AcceleratorState.__init__ = found["__init__"]
clip = Accelerator.clip_grad_norm_

def clipped(self, parameters, *args, **keys):
    held = [p for p in parameters if p.grad is not None]
    print("HELD", type(held[0]).__name__, {str(p.dtype) for p in held} | {str(p.grad.dtype) for p in held}, flush=True)
    return clip(self, held, *args, **keys)

Accelerator.clip_grad_norm_ = clipped
runpy.run_module("trl.scripts.sft", run_name="__main__")
"""
ON_CPU = ("--use_cpu", "true", "--attn_implementation", "sdpa", "--bf16", "false", "--logging_steps", "1")


def meshwright(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "meshwright", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("parallel", [SHARDED, "{data_shard: 2, sharding: none}"])
def test_losses_are_those_of_the_native_engine(parallel, tmp_path):
    tiny_folder(tmp_path / "start")
    (tmp_path / "run.yaml").write_text(f"{RUN}parallel: {parallel}\n")
    text = "".join(chr(97 + (7 * number) % 26) for number in range(LENGTH - 1))  # and the token of its end
    (tmp_path / "same.jsonl").write_text(f"{json.dumps({'text': text})}\n" * 100)
    meshwright(tmp_path, "export", "run.yaml", "--out", "files")

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    (tmp_path / "started.py").write_text(STARTED)
    command = [*torchrun, "started.py", "--config", "files/sft.yaml", *ON_CPU]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    kind = "DTensor" if parallel == SHARDED else "Parameter"
    assert f"HELD {kind} {{'torch.float32'}}" in done.stdout
    theirs = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", done.stdout + done.stderr)]

    here = ["--set", "engine=native", "--set", "precision=fp32", "--set", "cluster=here", "--no-measure"]
    here += ["--set", "data.tokenizer=bytes"]
    meshwright(tmp_path, "train", "run.yaml", "--out", "ours", *here, "--set", "parallel={data_shard: 1}")
    ours = [json.loads(line)["loss"] for line in (tmp_path / "ours" / "steps.jsonl").read_text().splitlines()]
    assert len(ours) == STEPS
    assert theirs == pytest.approx(ours, rel=1e-3)  # TRL prints four digits
    assert ours[-1] < ours[0] - 0.5
