"""One of MaxText's processes: `python -m meshwright.engines.maxtext.worker FOLDER`.

Writes the run's batches where they are not there yet (the first process; the others wait), starts MaxText's trainer in
its environment, and keeps the step log from what MaxText writes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from meshwright import __version__, runfile
from meshwright.catalog import accelerator_with_driver_name
from meshwright.engines.external_record import ENDING, FACTS, STEPS, VALIDATION
from meshwright.engines.maxtext import environment
from meshwright.engines.maxtext.lower import CONFIGURATION, DATA, INDEX, OUTPUT, PARAMETERS, RUN_FILE
from meshwright.engines.maxtext.results import (
    LOSS,
    METRICS,
    smoothed,
    step_entry,
    validation_entry,
    whole_lines,
)
from meshwright.engines.maxtext.worker_inputs import adapters, batch_files, rendezvous
from meshwright.errors import MeshwrightError
from meshwright.specs.run import Run
from meshwright.training.data.cache import MANIFEST
from meshwright.training.machine import main_or_refuse, processor_name

INSIDE = Path(__file__).parent / "in_maxtext_environment"
POLL_S = 0.05


def main(folder: Path) -> int:
    """Train as the configuration in `folder` says; return the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run = runfile.load(folder / RUN_FILE)
    assert run.plan is not None
    python = environment.require()
    rank, world = (int(os.environ.get(name, alone)) for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1")))
    output = folder / OUTPUT
    output.mkdir(parents=True, exist_ok=True)
    batches = _write_data(run, output, rank=rank, world=world)
    ours = str(batches) if batch_files.is_for_our_loop(batches) else ""
    arguments = [str(folder / CONFIGURATION), *_of_this_machine(run, output, rank=rank)]
    arguments += ["dataset_type=synthetic"] if ours else [f"mmap_eod_id={batch_files.end_token(batches)}"]
    (output / ENDING).unlink(missing_ok=True)  # of a training that is resumed
    child = subprocess.Popen(
        [str(python), str(INSIDE / "meshwright_train.py"), str(output), _on_a_cpu(run), ours, *arguments],
        env=os.environ | rendezvous.place() | _environment(folder, num_devices=run.plan.num_devices // world),
    )
    log = _Log(output, rank=rank, is_exact=bool(ours))
    try:
        while child.poll() is None:
            log.take()
            time.sleep(POLL_S)
    finally:
        child.terminate()
    log.take()
    code = log.close(exit_code=child.returncode)
    _require_our_order(output)
    return code


def _write_data(run: Run, output: Path, *, rank: int, world: int) -> Path:
    """Batches and first adapters, by the first process; return the folder of the batches."""
    assert run.plan is not None
    folder = output / DATA
    if rank == 0:
        if run.lora is not None:
            adapters.write_first(run, output)
            adapters.note_base(run)
        batch_files.write(run, folder, asked_for=batch_files.wanted(run, run.plan, num_processes=world))
    while not (folder / MANIFEST).is_file():
        time.sleep(POLL_S)
    return folder


def _of_this_machine(run: Run, output: Path, *, rank: int) -> list[str]:
    """Settings that no configuration can know beforehand."""
    saves = run.train.checkpoint
    base = Path(saves.folder) if saves else output
    values = {
        "base_output_directory": base.absolute(),
        "load_full_state_path": _start(run, output, rank=rank).absolute(),
    }
    if rank:
        values["metrics_file"] = ""
    return [f"{name}={value}" for name, value in values.items()]


def _on_a_cpu(run: Run) -> str:
    """XLA on a CPU has no exchange of ragged parts: there every device multiplies its experts with all tokens."""
    return "sparse_matmul=False" if run.plan is not None and run.plan.expert > 1 else ""


def _start(run: Run, output: Path, *, rank: int) -> Path:
    """The folder of the weights; one with a single number where they are drawn: MaxText wants to read something."""
    if run.weights is not None:
        from meshwright.training.weights import find_weights

        return find_weights(run.weights).folder
    import torch

    from meshwright.training.weights.safetensors_format import SINGLE, TensorEntry, write_file

    folder = output / "drawn"
    if rank == 0 and not (folder / SINGLE).is_file():
        folder.mkdir(exist_ok=True)
        zero = TensorEntry(name="drawn", shape=(1,), dtype=torch.float32, make=lambda: torch.zeros(1))
        write_file(folder / SINGLE, [zero])
    return folder


def _environment(folder: Path, *, num_devices: int) -> dict[str, str]:
    """On a CPU a process has as many virtual devices as the plan gives it; accelerators do not look at the flag."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={num_devices}"
    return {
        "DECOUPLE_GCLOUD": "TRUE",
        "XLA_FLAGS": flags.strip(),
        "PYTHONPATH": str(INSIDE),  # and nothing of this environment
        "MESHWRIGHT_PROCESSOR": processor_name(),
        "MESHWRIGHT_PARAMETERS": str((folder / PARAMETERS).absolute()),
        "MESHWRIGHT_ADAPTERS": str((folder / OUTPUT / adapters.FIRST / adapters.FILE).absolute()),
    }


def _require_our_order(output: Path) -> None:
    """MaxText writes indices of its own, shuffled, where it does not find ours."""
    index = output / DATA / INDEX  # absent where our loop has trained
    if len(list(index.glob("*-shuffle_index.npy"))) > 1:
        raise MeshwrightError(f"MaxText has not read its batches in our order: see {index}")


class _Log:
    """The step log, kept by the first process; what each process has measured, by all."""

    def __init__(self, output: Path, *, rank: int, is_exact: bool) -> None:
        self.output, self.rank, self.is_exact = output, rank, is_exact
        self.entries: list[dict[str, Any]] = []
        metrics = output / METRICS
        self.place = metrics.stat().st_size if metrics.is_file() else 0  # of a training that goes on
        self.steps = output / STEPS
        self.begin = self.steps.stat().st_size if self.steps.is_file() else 0

    def take(self) -> None:
        """Copy what MaxText has written since."""
        if self.rank:
            return
        lines, self.place = whole_lines(self.output / METRICS, start=self.place)
        new = [step_entry(line, ended_s=time.time()) for line in lines if LOSS in line]
        self.entries += new
        _append(self.steps, new)
        _append(self.output / VALIDATION, [e for line in lines if (e := validation_entry(line))])

    def close(self, *, exit_code: int) -> int:
        """Write what is known at the end; return the exit code, 0 where the numbers and not the program failed."""
        path = self.output / f"process-{self.rank}.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        peak = known["peak_memory_bytes"] if known else 0
        entries = [entry | {"memory_bytes": peak} for entry in self.entries]
        entries = entries if self.is_exact else smoothed(entries)
        if self.rank == 0:
            self._rewrite(entries)
            if known:
                software = {"meshwright": __version__} | known["software"]
                device = {"accelerator": accelerator_with_driver_name(known["device"]["name"])} | known[
                    "device"
                ]
                facts = {"device": device, "software": software}
                (self.output / FACTS).write_text(json.dumps(facts), encoding="utf-8")
        mine = {"step_s": [entry["step_s"] for entry in entries], "peak_memory_bytes": peak}
        (self.output / f"rank-{self.rank}.json").write_text(json.dumps(mine), encoding="utf-8")
        if entries and exit_code and not abs(entries[-1]["loss"]) < float("inf"):
            (self.output / ENDING).write_text(json.dumps({"ending": "diverged"}), encoding="utf-8")
            return 0
        if self.rank == 0 and known and known.get("ending"):
            (self.output / ENDING).write_text(json.dumps({"ending": known["ending"]}), encoding="utf-8")
        return exit_code

    def _rewrite(self, entries: list[dict[str, Any]]) -> None:
        """Smoothed times in place of those that were said meanwhile."""
        if not self.steps.is_file():
            return
        with self.steps.open("r+", encoding="utf-8") as stream:
            stream.truncate(self.begin)
        _append(self.steps, entries)


def _append(path: Path, entries: list[dict[str, Any]]) -> None:
    if not entries:
        return
    with path.open("a", encoding="utf-8") as stream:
        stream.write("".join(json.dumps(entry) + "\n" for entry in entries))


if __name__ == "__main__":
    main_or_refuse(main)
