"""Checkpoints of torchtitan as Hugging Face weights, converted in a separate process. Imports no torch."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from meshwright import runfile
from meshwright.engines.torchtitan.lower import MODULE, RUN_FILE, module_text
from meshwright.engines.torchtitan.probe import require_version
from meshwright.engines.torchtitan.results import checkpoints
from meshwright.errors import InputError
from meshwright.specs.plan import Plan, Sharding
from meshwright.specs.run import Run

CONVERT = "meshwright.engines.torchtitan.in_torchtitan_process.convert_checkpoint"
ONE_PROCESS = Plan(sharding=Sharding.NONE)


def export_weights(run: Run, *, step: int | None, folder: Path, dtype: str) -> Path:
    """Write the weights of a checkpoint of `run` as safetensors with a config.json, in `dtype` (bf16, fp32)."""
    require_version()
    if run.lora is not None:
        raise InputError("adapters that torchtitan trained are not exported", got=run.source)
    checkpoint = _find_checkpoint(run, step)
    with tempfile.TemporaryDirectory() as inputs:
        single = replace(run, plan=ONE_PROCESS, weights=None, train=replace(run.train, checkpoint=None))
        (Path(inputs) / MODULE).write_text(module_text(single, ONE_PROCESS), encoding="utf-8")
        (Path(inputs) / RUN_FILE).write_text(runfile.stated_text(run), encoding="utf-8")
        command = [sys.executable, "-m", CONVERT, inputs, str(checkpoint), str(folder), dtype]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise InputError(f"checkpoint {checkpoint} is not converted: {reason}")
    return checkpoint


def _find_checkpoint(run: Run, step: int | None) -> Path:
    saves = run.train.checkpoint
    found = checkpoints(Path(saves.folder)) if saves is not None else []
    steps = {int(path.name.rpartition("-")[2]): path for path in found}
    if not steps:
        raise InputError("there is no checkpoint of torchtitan", got=saves.folder if saves else run.source)
    if step is not None and step not in steps:
        raise InputError("no checkpoint of this step", got=step, allowed=", ".join(map(str, steps)))
    return steps[max(steps) if step is None else step]
