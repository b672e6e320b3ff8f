"""One run of a benchmark in a process of its own: `python -m meshwright.mlperf.worker TASK.json`."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright import runfile
from meshwright.engines.base import Measuring, ObservedEngine, TrainingEngine, TrainOptions, find_engine
from meshwright.errors import InputError, MeshwrightError, printable
from meshwright.files import record_of, toml_table, write_atomically
from meshwright.mlperf.benchmarks import DATA
from meshwright.mlperf.inputs import require_remembered
from meshwright.mlperf.run_log import LogWriter, RunLogger
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run
from meshwright.training.parent_watch import end_with_parent, signal_at_end_of_parent
from meshwright.training.rendezvous import is_main

LOG, TRAINING, TASK = "mllog.txt", "training", "task.json"


@dataclass(frozen=True, kw_only=True)
class RunTask:
    """Everything that one run needs. Folders and files are absolute."""

    folder: str  # of this run: log, results of the training, this task
    run_file: str
    overrides: tuple[str, ...]
    seed: int
    benchmark: str
    train_samples: int
    submission: dict[str, Any]  # org, platform, division, status
    cache_clear: dict[str, Any] | None  # value and what was done; None: the first process of each host does it
    data_paths: tuple[str, ...]
    warm_up_steps: int
    extra: dict[str, Any] | None = None  # further facts, such as the data's hash

    def write(self) -> Path:
        """Write the task into its folder."""
        path = Path(self.folder) / TASK
        write_atomically(path, json.dumps(asdict(self), indent=2) + "\n")
        return path


def read_task(path: Path) -> RunTask:
    """Read a task that `RunTask.write` wrote."""
    return record_of(RunTask, json.loads(path.read_text(encoding="utf-8")))


def run_once(task: RunTask) -> None:
    """Train one run with its log, or be one of its processes. Raises as the engine does."""
    folder = Path(task.folder)
    run = runfile.load(Path(task.run_file), overrides=[*task.overrides, f"train.seed={task.seed}"])
    cleared = _cleared_on_this_host(task, run) if task.cache_clear is None else task.cache_clear
    writer = LogWriter(folder / LOG) if is_main() else None
    if writer is not None:
        writer.event("cache_clear", **cleared)
        writer.start("init_start")
        for key, value in task.submission.items():
            writer.event(f"submission_{key}", value)
        writer.event("submission_benchmark", task.benchmark)
    engine = observed_engine(run)
    options = TrainOptions(
        folder=folder / TRAINING,
        quiet=True,
        measuring=Measuring.NEVER,
        only_steps=True,
        command=("meshwright", "mlperf", "run", task.benchmark),
    )
    start = engine.prepare(run, options=options)
    if writer is not None:
        facts = logged_facts(start.run, start.plan, benchmark=task.benchmark, train_samples=task.train_samples)
        for key, value in (*facts, *(task.extra or {}).items()):
            writer.event(key, value)
        writer.close()  # from here on rank 0 writes
    observer = RunLogger(path=folder / LOG, data_paths=task.data_paths)
    engine.launch_observed(start, observer=observer, warm_up_steps=task.warm_up_steps)


def _cleared_on_this_host(task: RunTask, run: Run) -> dict[str, Any]:
    """Clear the page cache in the first process of each host. Raises InputError where that is not possible."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return {}
    require_remembered(run)  # reads the index, and so comes first
    cleared = clear_page_cache(Path(path) for path in task.data_paths)
    if not cleared["value"] and not is_main():  # the log has what the first host did
        raise InputError(f"the page cache of {socket.gethostname()} cannot be cleared", got=cleared["method"])
    return cleared


class _ObservedTrainingEngine(TrainingEngine, ObservedEngine):
    """An engine with the functions of both."""


def observed_engine(run: Run) -> _ObservedTrainingEngine:
    """The engine of `run`. Raises InputError where it does not report its evaluations."""
    engine = find_engine(run.engine)
    if not isinstance(engine, ObservedEngine):
        reasons = [
            "it does not report when it opens data and what its evaluations are",
            *(str(problem) for problem in engine.check(run)),
        ]
        raise InputError(
            f"a benchmark cannot be run with the engine {run.engine}: {'; '.join(reasons)}", hint="--set engine=native"
        )
    return engine  # pyright: ignore[reportReturnType]


def main() -> int:
    """Run the task that the command line names."""
    signal_at_end_of_parent(signal.SIGKILL)
    end_with_parent(grace_s=1.0)
    try:
        run_once(read_task(Path(sys.argv[1])))
    except MeshwrightError as error:
        print(printable(str(error)), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.filename is None:
            raise
        print(printable(f"{error.filename}: {error.strerror}"), file=sys.stderr)
        return 2
    return 0


DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def clear_page_cache(files: Iterable[Path], *, drop_caches: Path = DROP_CACHES) -> dict[str, Any]:
    """Drop clean pages of the whole machine where that is permitted, otherwise of `files`.

    Returns the entry for `cache_clear`: `value`, and `method` with the action or the reason for none.
    """
    os.sync()
    try:
        drop_caches.write_text("3\n")
        return {"value": True, "method": "drop_caches"}
    except OSError as error:
        reason = error.strerror or str(error)
    try:
        count = sum(_evict(file) for file in files)
    except (OSError, AttributeError) as error:
        return {"value": False, "method": f"none: drop_caches: {reason}; posix_fadvise: {error}"}
    return {"value": True, "method": f"posix_fadvise of {count} files of the data; drop_caches: {reason}"}


def _evict(file: Path) -> int:
    handle = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
    return 1


LOGGED_PRECISIONS = {"bf16": "bfloat16"}
"""Names of number formats where the log has another one than run files."""


def logged_facts(run: Run, plan: Plan, *, benchmark: str, train_samples: int) -> Iterator[tuple[str, Any]]:
    """Keys and values in an order in which a checker that reads once can compare them."""
    optimizer, evaluate = run.optimizer, run.train.evaluate
    assert evaluate is not None
    assert run.num_steps is not None
    yield "seed", run.train.seed
    yield "global_batch_size", run.global_batch
    yield "micro_batch_size", plan.micro_batch
    yield "gradient_accumulation_steps", plan.num_micro_batches(run.global_batch)
    yield "max_sequence_length", run.sequence_length
    yield "train_samples", train_samples
    yield "eval_samples", evaluate.num_sequences
    yield "target_accuracy", evaluate.target_loss
    yield "max_steps", run.num_steps
    yield "opt_name", optimizer.name
    yield "opt_base_learning_rate", optimizer.learning_rate
    yield "opt_end_learning_rate", optimizer.learning_rate * optimizer.final_ratio
    yield "opt_learning_rate_warmup_steps", optimizer.warmup_steps
    yield "opt_learning_rate_decay_steps", run.num_steps - optimizer.warmup_steps
    yield "opt_learning_rate_decay_schedule", toml_table(DATA / "runs.toml")["schedules"][optimizer.schedule]
    yield "opt_learning_rate_training_steps", run.num_steps
    yield "opt_learning_rate_warmup_factor", optimizer.warmup_steps / run.num_steps
    yield "opt_adamw_beta_1", optimizer.betas[0]
    yield "opt_adamw_beta_2", optimizer.betas[1]
    yield "opt_adamw_epsilon", optimizer.epsilon
    yield "opt_adamw_weight_decay", optimizer.weight_decay
    yield "opt_gradient_clip_norm", optimizer.gradient_clip
    if run.lora is not None:
        yield "lora_rank", run.lora.rank
        yield "lora_alpha", run.lora.alpha
        yield "lora_dropout", run.lora.dropout
    # Round 6.1: attention is computed in 16 bits where linear layers multiply in fp8.
    named = run.precision.name in ("fp16", "nvfp4", "mxfp4")
    linear = run.precision.name if named else LOGGED_PRECISIONS.get(run.precision.matmul, run.precision.matmul)
    others = "bfloat16" if run.precision.matmul in ("fp8", "fp4") else linear
    yield "lowest_numerical_precision_in_linear", linear
    yield "lowest_numerical_precision_in_attn", others
    yield "lowest_numerical_precision_in_comm", others
    yield "tensor_parallelism", plan.tensor
    yield "pipeline_parallelism", plan.pipeline
    yield "context_parallelism", plan.context
    yield "expert_parallelism", plan.expert
    yield "config_filename", "run.yaml"
    yield "number_of_ranks", plan.num_devices


if __name__ == "__main__":
    sys.exit(main())
