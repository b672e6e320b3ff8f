"""A process of a training: `python -m meshwright.engines.maxtext.worker FOLDER`.

The first process writes the run's batches, unless they exist; the others wait. Every process starts MaxText's trainer
in MaxText's environment and writes the step log from MaxText's metrics.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright import runfile
from meshwright.catalog.lookup import accelerator_with_driver_name
from meshwright.engines.external_record import ENDING, FACTS, STEPS, VALIDATION
from meshwright.engines.launched_worker import worker_folders
from meshwright.engines.maxtext import environment, results
from meshwright.engines.maxtext.lower import CONFIGURATION, DATA, INDEX, NAME, OUTPUT, PARAMETERS, RUN_FILE, xla_flags
from meshwright.engines.maxtext.worker_inputs import adapters, batch_files
from meshwright.errors import MeshwrightError, printable
from meshwright.files import append, write_atomically
from meshwright.json_values import load_json
from meshwright.records.files import driver_version, whole_lines
from meshwright.specs.run import Run
from meshwright.training.data.cache import MANIFEST
from meshwright.training.machine import main_or_refuse, processor_name
from meshwright.training.profiling.hlo import summarize_executions
from meshwright.training.profiling.steps import FOLDER, SUMMARY, TRACE, ProfileSteps, steps_of_environment
from meshwright.training.rendezvous import free_port
from meshwright.version import __version__

MODULE = "jit_train_step"  # name of the step in JAX, of MaxText's loop and of Meshwright's
HLO = "hlo"  # folder of the text, in the folder of the measurements
TEXT = f"*.{MODULE}.*_after_optimizations.txt"


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """The profile of one process: `steps` count, `done` were taken before it started.

    MaxText's profiler (`profiler=xplane`) covers one range of steps and waits for the device at both ends. JAX writes
    TENSORBOARD/plugins/profile/TIME/HOST.trace.json.gz. XLA writes the text of the compiled step, from which the
    instructions in the trace get their categories, only when it compiles: JAX's cache of programs is off.
    """

    steps: ProfileSteps
    done: int
    output: Path  # folder of the measurements, in the folder of the results
    base: Path  # MaxText's `base_output_directory`

    @property
    def traced(self) -> ProfileSteps:
        """The steps in the trace: also the one before the first that counts, in which buffers are allocated."""
        return ProfileSteps(first=max(self.done + 1, self.steps.first - 1), last=self.steps.last)

    def slows(self, step: int) -> bool:
        """Return True if the time of `step` is not usual: MaxText counts the writing of the trace to the next step."""
        return self.traced.first <= step <= self.traced.last + 1

    @property
    def settings(self) -> list[str]:
        """Settings of MaxText. It counts skipped steps from the first one that it takes."""
        traced = self.traced
        return [
            "profiler=xplane",
            f"skip_first_n_steps_for_profiler={traced.first - self.done - 1}",
            f"profiler_steps={traced.last - traced.first + 1}",
            "jax_cache_dir=",
        ]

    @property
    def xla_flags(self) -> str:
        """Flags with which XLA writes the text of the step."""
        folder = (self.output / HLO).absolute()
        return f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re={MODULE}"

    def write(self) -> None:
        """Write `profile/` of the results, and remove what MaxText wrote, whose names contain that of the host.

        Raises ValueError if the trace or the text is missing, or does not contain the steps.
        """
        profiles = self.base / NAME / "tensorboard" / "plugins" / "profile"
        traces = sorted(profiles.glob("*/*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
        texts = sorted((self.output / HLO).glob(TEXT), key=lambda path: path.stat().st_mtime)
        if not traces or not texts:
            raise ValueError("MaxText wrote no trace" if texts else "XLA wrote no text of the step")
        with gzip.open(traces[-1], "rt", encoding="utf-8") as stream:
            trace = json.load(stream)
        folder = self.output.parent / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(traces[-1], folder / TRACE)
        hlo = texts[-1].read_text(encoding="utf-8")
        shutil.rmtree(profiles, ignore_errors=True)
        shutil.rmtree(self.output / HLO, ignore_errors=True)
        found = summarize_executions(trace, module=MODULE, hlo=hlo, traced=self.traced, steps=self.steps)
        write_atomically(folder / SUMMARY, json.dumps(found, indent=2) + "\n")


SCRIPTS = Path(__file__).parent / "in_maxtext_environment"
POLL_S = 0.05


def main(folder: Path) -> int:
    """Train with the configuration in `folder`; return the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run = runfile.load(folder / RUN_FILE)
    with worker_folders(folder, run, layout=results.LAYOUT):
        return _train(run, folder)


def _train(run: Run, folder: Path) -> int:
    assert run.plan is not None
    python = environment.require()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    output = folder / OUTPUT
    output.mkdir(parents=True, exist_ok=True)
    batches = _write_data(run, output, rank=rank, world=world)
    arrays = str(batches) if batch_files.has_arrays(batches) else ""  # for Meshwright's loop
    values: dict[str, Any] = {
        "base_output_directory": _base(run, output).absolute(),
        "load_full_state_path": _weights_folder(run, output, rank=rank).absolute(),
    }
    if rank:
        values["metrics_file"] = ""
    arguments = [str(folder / CONFIGURATION), *[f"{name}={value}" for name, value in values.items()]]
    arguments += ["dataset_type=synthetic"] if arrays else [f"mmap_eod_id={batch_files.end_token(batches)}"]
    profile = _profile(run, output)
    arguments += [] if profile is None else profile.settings
    flags = " ".join([xla_flags(run), *([] if profile is None else [profile.xla_flags])])
    (output / ENDING).unlink(missing_ok=True)  # of a training that is resumed
    child = subprocess.Popen(
        [str(python), str(SCRIPTS / "meshwright_train.py"), str(output), _cpu_settings(run), arrays, *arguments],
        env=os.environ
        | rendezvous_variables()
        | _environment(folder, num_devices=run.plan.num_devices // world, xla=flags),
    )
    log = _StepLogWriter(output, rank=rank, is_exact=bool(arrays), profile=profile)
    try:
        while child.poll() is None:
            log.update()
            time.sleep(POLL_S)
    finally:
        child.terminate()
    log.update()
    code = log.close(exit_code=child.returncode)
    # MaxText writes indices of its own, shuffled ones, if it did not find the given ones.
    index = output / DATA / INDEX  # absent for arrays
    if len(list(index.glob("*-shuffle_index.npy"))) > 1:
        raise MeshwrightError(f"MaxText has not read its batches in the given order: see {index}")
    if profile is not None and rank == 0:
        # A training does not fail because of its profile: the record then has none, with a note.
        try:
            profile.write()
        except (OSError, ValueError) as error:
            print(printable(f"warning: there is no profile: {error}"), file=sys.stderr, flush=True)
    return code


def _profile(run: Run, output: Path) -> StepProfile | None:
    """Return the profile that this process is to write, if any."""
    steps, saves = steps_of_environment(), run.train.checkpoint
    if steps is None:
        return None
    done = results.LAYOUT.newest_step(Path(saves.folder)) if saves else None
    return StepProfile(steps=steps, done=done or 0, output=output, base=_base(run, output))


def _write_data(run: Run, output: Path, *, rank: int, world: int) -> Path:
    """Write batches and initial adapters in the first process; return the folder of the batches."""
    assert run.plan is not None
    folder = output / DATA
    if rank == 0:
        if run.lora is not None:
            adapters.write_initial_adapters(run, output)
            adapters.write_base(run)
        request = batch_files.batch_request(run, run.plan, num_processes=world)
        batch_files.write(run, folder, request=request)
    while not (folder / MANIFEST).is_file():
        time.sleep(POLL_S)
    return folder


def _base(run: Run, output: Path) -> Path:
    """Return the folder below which MaxText writes its checkpoints and traces."""
    saves = run.train.checkpoint
    return Path(saves.folder) if saves else output


def _cpu_settings(run: Run) -> str:
    """Settings for CPUs: XLA has no ragged all-to-all there, so that each device applies its experts to all tokens."""
    return "sparse_matmul=False" if run.plan is not None and run.plan.expert > 1 else ""


def _weights_folder(run: Run, output: Path, *, rank: int) -> Path:
    """Return the folder of the weights. For random weights it contains one number: MaxText requires a file."""
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


def _environment(folder: Path, *, num_devices: int, xla: str) -> dict[str, str]:
    """Return variables for MaxText's process. On a CPU it has a virtual device for each of its devices in the plan."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {xla} --xla_force_host_platform_device_count={num_devices}"
    return {
        "DECOUPLE_GCLOUD": "TRUE",
        "XLA_FLAGS": flags.strip(),
        "PYTHONPATH": str(SCRIPTS),  # without packages of this environment
        "MESHWRIGHT_PROCESSOR": processor_name(),
        "MESHWRIGHT_PARAMETERS": str((folder / PARAMETERS).absolute()),
        "MESHWRIGHT_ADAPTERS": str((folder / OUTPUT / adapters.FOLDER / adapters.FILE).absolute()),
    }


class _StepLogWriter:
    """Writes the step log in the first process, and the measurements of every process."""

    def __init__(self, output: Path, *, rank: int, is_exact: bool, profile: StepProfile | None) -> None:
        self.output, self.rank, self.is_exact, self.profile = output, rank, is_exact, profile
        self.entries: list[dict[str, Any]] = []
        metrics = output / results.METRICS
        self.position = metrics.stat().st_size if metrics.is_file() else 0  # after lines of a resumed training
        self.steps = output / STEPS
        before = self.steps.read_text(encoding="utf-8", errors="replace") if self.steps.is_file() else ""
        self.before = whole_lines(before)

    def update(self) -> None:
        """Copy the lines that MaxText has written since the last call."""
        if self.rank:
            return
        lines, self.position = results.complete_lines(self.output / results.METRICS, start=self.position)
        new = [self._marked(results.step_entry(line, ended_s=time.time())) for line in lines if results.LOSS in line]
        self.entries += new
        losses = [(int(line["step"]), line[results.VALIDATION_LOSS]) for line in lines if results.LOSS not in line]
        evaluated = [{"step": step, "validation_loss": loss} for step, loss in losses]
        for path, entries in ((self.steps, new), (self.output / VALIDATION, evaluated)):
            if entries:
                append(path, _lines(entries))

    def close(self, *, exit_code: int) -> int:
        """Write the final files; return the exit code, which is 0 if the training diverged."""
        path = self.output / f"process-{self.rank}.json"
        known = load_json(path) if path.is_file() else None
        peak = known["peak_memory_bytes"] if known else 0
        entries = [entry | {"memory_bytes": peak} for entry in self.entries]
        entries = entries if self.is_exact else results.smoothed(entries)
        if self.rank == 0:
            self._rewrite(entries)
            if known:
                software = {"meshwright": __version__} | known["software"]
                device = {"accelerator": accelerator_with_driver_name(known["device"]["name"])} | known["device"]
                device |= {"driver": driver_version(device["type"]), "power_limit_w": None, "highest_clock_mhz": None}
                facts = {"device": device, "software": software}
                write_atomically(self.output / FACTS, json.dumps(facts))
        usual = [entry["step_s"] for entry in entries if not entry.get("profiled")]
        measured = {"step_s": usual, "peak_memory_bytes": peak}
        write_atomically(self.output / f"rank-{self.rank}.json", json.dumps(measured))
        if entries and exit_code and not abs(entries[-1]["loss"]) < float("inf"):
            write_atomically(self.output / ENDING, json.dumps({"ending": "diverged"}))
            return 0
        if self.rank == 0 and known and known.get("ending"):
            write_atomically(self.output / ENDING, json.dumps({"ending": known["ending"]}))
        return exit_code

    def _marked(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Return the entry, which says so if its step ran under the profiler."""
        is_profiled = self.profile is not None and self.profile.slows(entry["step"])
        return entry | ({"profiled": True} if is_profiled else {})

    def _rewrite(self, entries: list[dict[str, Any]]) -> None:
        """Replace the entries of this training, whose times are now smoothed."""
        if self.steps.is_file():
            write_atomically(self.steps, self.before + _lines(entries))


def _lines(entries: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # set by torchrun if its agent has the store


def rendezvous_variables() -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT of JAX's coordinator; empty if the given port is free.

    Under torchrun, whose store listens on MASTER_PORT, the first process chooses a port and sends it to the others
    through that store, at every restart.
    """
    if os.environ.get(AGENT_STORE) != "True" or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return {}
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  not in __all__

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False)
    key = f"meshwright/jax/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if os.environ["RANK"] == "0":
        store.set(key, f"{_own_address(host, port)} {free_port()}")
    address, found = store.get(key).decode().split()
    return {"MASTER_ADDR": address, "MASTER_PORT": found}


def _own_address(host: str, port: int) -> str:
    """Return this host's address for other hosts: the local address of a connection to `host`, or `host` itself."""
    with socket.create_connection((host, port)) as there:
        address = there.getsockname()[0]
    return host if address.startswith("127.") or address == "::1" else address


if __name__ == "__main__":
    main_or_refuse(main)
