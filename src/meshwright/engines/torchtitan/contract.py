"""The contract of the torchtitan engine (`engines.base`). Imports torch only to detect this machine's devices."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from meshwright import runfile
from meshwright.engines import external_record, external_workers
from meshwright.engines.base import Imported, StatedCluster, TrainOptions, refuse
from meshwright.engines.external_workers import WorkersStart, expected
from meshwright.engines.observer import TrainingObserver
from meshwright.engines.torchtitan import VERSION, probe
from meshwright.engines.torchtitan.check import check, check_plan, notes_on_data
from meshwright.engines.torchtitan.config_text.tree import read_tree
from meshwright.engines.torchtitan.config_trees.run_content import import_tree
from meshwright.engines.torchtitan.lower import FUNCTION, LAYOUT, MODULE, RUN_FILE, lower, module_text
from meshwright.engines.torchtitan.probe import TorchtitanMachine
from meshwright.engines.torchtitan.toml_files.run_content import import_toml
from meshwright.errors import InputError, MissingDependencyError
from meshwright.records.training import Record
from meshwright.specs.plan import Plan, Sharding
from meshwright.specs.run import Run, StateFormat

CONVERT = "meshwright.engines.torchtitan.in_torchtitan_process.convert_checkpoint"
ONE_PROCESS = Plan(sharding=Sharding.NONE)

__all__ = [
    "check", "expected", "export_weights", "import_run", "launch", "launch_observed", "lower", "prepare", "read",
    "takes_warm_up",
]  # fmt: skip


def prepare(run: Run, *, options: TrainOptions) -> WorkersStart:
    """Decide everything; write nothing and start no process of the training."""
    refuse("torchtitan", check(run))
    machine = probe.machine()
    _require_device(run, machine)
    start = external_workers.start(
        run, options=options, engine="torchtitan", machine=machine, check_plan=check_plan, layout=LAYOUT
    )
    if start.plan.pipeline > 1 and machine.lacks_in_pipeline:
        raise MissingDependencyError(
            f"PyTorch {machine.torch} lacks {', '.join(machine.lacks_in_pipeline)}, which torchtitan {VERSION} "
            "calls in a pipeline", hint="a nightly build of PyTorch has it",
        )  # fmt: skip
    return start


def _require_device(run: Run, machine: TorchtitanMachine) -> None:
    """Raise an error if the run does not fit this machine's devices, their number formats or PyTorch."""
    probe.require_device(machine)
    if machine.device_type == "cpu" and run.precision.matmul == "fp8":
        raise InputError("fp8 needs a GPU of compute capability 8.9 or AMD's gfx942 and newer", hint="precision: bf16")
    if machine.device_type == "cpu" and run.optimizer.states is not StateFormat.FP32:
        raise InputError("optimizer states in bf16 need a GPU", hint="optimizer.states: fp32")


def launch(start: WorkersStart) -> None:
    """Train with one process per device, or as the process of a launcher; then write the record."""
    lowered = lower(start.run, folder=start.options.folder)
    external_workers.launch(start, lowered, notes_on_data=notes_on_data)


takes_warm_up = False


def launch_observed(start: WorkersStart, *, observer: TrainingObserver, warm_up_steps: int) -> None:
    """See `base.ObservedEngine`."""
    launch(external_workers.observed(start, observer, warm_up_steps=warm_up_steps))


def read(folder: Path) -> Record:
    """Return the record of a training that has ended; compose it from its files if there is none yet."""
    return external_record.read(folder, LAYOUT)


def export_weights(run: Run, *, step: int | None, folder: Path, dtype: str) -> Path:
    """Write the weights of a checkpoint of `run` in `dtype` (bf16, fp32); a process of its own converts them."""
    probe.require_version()
    if run.lora is not None:
        raise InputError("adapters that torchtitan trained are not exported", got=run.source)
    if run.train.checkpoint is None:
        raise InputError("there is no checkpoint of torchtitan", got=run.source)
    checkpoint = LAYOUT.checkpoint_of(Path(run.train.checkpoint.folder), step, program="torchtitan")
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


def import_run(source: str, *, cluster: StatedCluster, ignore: Collection[str] = ()) -> Imported:
    """Return the run on `cluster` that a configuration of torchtitan describes; only a TOML file has keys to ignore.

    llama3_8b.toml                              a file of torchtitan up to 0.2
    llama3:llama3_8b, folder/module.py:train    a function of later versions, read as text by `config_text`
    """
    path = Path(source)
    if path.suffix == ".toml" or (path.suffix != ".py" and path.is_file()):
        return import_toml(path, cluster=cluster, ignore=ignore)
    if ignore:
        raise InputError("--ignore is for keys of TOML files, and this is none", got=source)
    module, _, function = (f"{source}:{FUNCTION}" if source.endswith(".py") else source).rpartition(":")
    if not module or not function.isidentifier():
        raise InputError(
            "no configuration of torchtitan", got=source, allowed="MODULE:FUNCTION, PATH.py:FUNCTION, or a TOML file"
        )
    tree = read_tree(module, function)
    if (kind := tree.get("is") if isinstance(tree, dict) else type(tree).__name__) != "Trainer":
        raise InputError(f"{source} is no Trainer.Config", got=kind)
    return import_tree(tree, cluster=cluster)
