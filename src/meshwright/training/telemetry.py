"""Files of a run: a folder with the resolved run, one line a step, and one record."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from meshwright import runfile
from meshwright.errors import InputError
from meshwright.files import append, write_atomically
from meshwright.json_values import parse_json
from meshwright.records.files import driver_version
from meshwright.records.training import Record
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run
from meshwright.training import device as devices
from meshwright.training.data import Tokenizer
from meshwright.training.data.tokenizer import JsonTokenizer
from meshwright.version import __version__

TOKENIZER = "tokenizer"
STEPS, EVENTS, RECORD, RESOLVED, RUN_FILE = ("steps.jsonl", "events.jsonl", "record.json", "resolved.json", "run.yaml")
PACKAGES = (
    "torch", "torchtitan", "megatron-core", "triton", "numpy", "tokenizers", "safetensors", "transformers",
    "datasets", "pyarrow", "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
    "transformer-engine", "flash-attn", "aiter",
)  # fmt: skip


class StepLogFile:
    """`steps.jsonl`, opened for appending; each line is flushed before the next step begins.

    A resumed run drops the lines of steps after its checkpoint, so every step is there once.
    """

    def __init__(self, folder: Path, *, after_step: int = 0) -> None:
        self.path = folder / STEPS
        self._open(after_step)

    def rewind(self, *, after_step: int) -> None:
        """Drop the lines of later steps, which will be repeated."""
        self.close()
        self._open(after_step)

    def _open(self, after_step: int) -> None:
        try:
            kept = [line for line in _lines(self.path) if line["step"] <= after_step] if after_step else []
            self.last = kept[-1] if kept else None  # the entry of `after_step`
            write_atomically(self.path, "".join(_line(entry) for entry in kept))
            self.stream: TextIO = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def write(self, entry: dict[str, Any]) -> None:
        """Append one step. Raises InputError when the disk is full."""
        try:
            self.stream.write(_line(entry))
            self.stream.flush()
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def sync(self) -> None:
        """Make the lines survive a power cut, as a checkpoint or a record of their steps does."""
        try:
            os.fsync(self.stream.fileno())
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError, InputError):  # a line that did not fit was reported when it was written
            self.sync()
        with suppress(OSError):
            self.stream.close()


def log_event(folder: Path, event: dict[str, Any]) -> None:
    """Append to `events.jsonl`. Raises InputError when the disk is full."""
    path = folder / EVENTS
    try:
        append(path, _line(event))
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> InputError:
    hint = "free space and --resume: checkpoints are whole or absent"
    return InputError(f"cannot write {path}: {error.strerror or error}", hint=hint)


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, allow_nan=True) + "\n"


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of the log; the last one may have been cut by a kill."""
    if not path.is_file():
        return []
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entries.append(parse_json(line))
        except ValueError:
            break
    return entries


def save_run(folder: Path, *, run: Run, plan: Plan) -> None:
    """Put the run file and the resolved run into `folder`."""
    write_atomically(folder / RUN_FILE, runfile.stated_text(run))
    replay = {"run_file": runfile.replay_text(run, plan)}  # by which `meshwright train resolved.json` trains it again
    write_atomically(folder / RESOLVED, as_text(resolved(run, plan=plan) | replay))


def resolved(run: Run, *, plan: Plan) -> dict[str, Any]:
    """The run as JSON: every value, with the plan that is trained; without the file's text."""
    values = asdict(run) | {"plan": asdict(plan), "plan_in_words": plan.describe()}
    if run.train.checkpoint is not None:  # is found from other folders as well
        values["train"]["checkpoint"]["folder"] = str(  # ty: ignore[invalid-argument-type]
            Path(run.train.checkpoint.folder).expanduser().absolute()
        )
    del values["text"]
    return values


def save_tokenizer(folder: Path, tokenizer: Tokenizer | None) -> None:
    """Keep a tokenizer that was trained on the run's own text; others have a file or a name."""
    if isinstance(tokenizer, JsonTokenizer) and tokenizer.name.startswith("bpe:"):
        tokenizer.save(folder / TOKENIZER)


def save_record(folder: Path, record: Record) -> None:
    """Write `record.json`."""
    try:
        write_atomically(folder / RECORD, as_text(asdict(record)))
    except OSError as error:
        raise _unwritable(folder / RECORD, error) from error


def as_text(document: object) -> str:
    """`document` as indented JSON; numbers that JSON lacks become null."""
    return json.dumps(_finite(document), indent=2, default=str) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {str(key): _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def gather_scalars(values: dict[str, float], *, num_ranks: int) -> dict[str, list[float]]:
    """`values` of every process, in the order of their ranks. All processes call it."""
    mine = torch.tensor(list(values.values()), dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(num_ranks)]
    if num_ranks > 1:
        dist.all_gather(rows, mine)
    else:
        rows = [mine]
    return {name: [row[i].item() for row in rows] for i, name in enumerate(values)}


def utc_timestamp(unix_s: float) -> str:
    """A time as ISO 8601 in UTC, to the second.

    >>> utc_timestamp(0)
    '1970-01-01T00:00:00+00:00'
    """
    return datetime.fromtimestamp(unix_s, tz=UTC).isoformat(timespec="seconds")


def device_facts(device: torch.device, *, accelerator: str | None) -> dict[str, Any]:
    """The device as a record names it; `accelerator` is the catalogue's name of it. No name of a host or a user."""
    return {
        "accelerator": accelerator,
        "type": device.type,
        "name": devices.device_name(device),
        "count_on_this_machine": devices.num_devices(device),
        "memory_bytes": devices.memory_bytes(device),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "driver": driver_version(device.type),
        **devices.limits(device),
    }


def software_facts(*others: str) -> dict[str, str]:
    """Versions of Python, PyTorch and the packages that ran, `others` among them."""
    versions = {"meshwright": __version__, "python": platform.python_version()}
    for package in (*PACKAGES, *others):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    if torch.version.hip:
        versions["hip"] = torch.version.hip
    # Of the libraries that are loaded, which may be others than those of packages:
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl: Any = import_module("torch.cuda.nccl")
        versions["rccl" if torch.version.hip else "nccl"] = ".".join(map(str, nccl.version()))
    if (cudnn := torch.backends.cudnn.version()) is not None:
        versions["miopen" if torch.version.hip else "cudnn"] = str(cudnn)
    return versions


def git_commit(folder: Path) -> str | None:
    """The commit checked out in `folder`, with `+` when files differ from it; None where there is no repository."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return commit + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
