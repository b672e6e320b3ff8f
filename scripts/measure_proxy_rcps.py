"""Measure the reference convergence points of a proxy: 20 runs for each batch, seeds from the system.

    python scripts/measure_proxy_rcps.py proxy_pretrain_xs 16:4e-3:16 OUT.json

A point is BATCH:LEARNING_RATE:WARMUP_STEPS[:TRAINING_STEPS]. OUT.json has the schema of `mlperf-logging`; points
that it holds already are kept. Points can be measured side by side into files of their own.
"""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from meshwright import runfile
from meshwright.files import write_atomically
from meshwright.mlperf.benchmarks import PROXIES, load_benchmark
from meshwright.mlperf.log import read_log
from meshwright.mlperf.proxy_data import build_proxy_data
from meshwright.mlperf.run_files import benchmark_run
from meshwright.mlperf.worker import LOG, RunTask, run_once

NUM_RUNS = 20
FAILED = 1_000_000_000


def main() -> None:
    """Measure one point and add it to the file."""
    torch.set_num_threads(1)
    name, point, out = sys.argv[1], sys.argv[2].split(":"), Path(sys.argv[3])
    num_runs = int(sys.argv[4]) if len(sys.argv) > 4 else NUM_RUNS
    batch, rate, warmup = int(point[0]), float(point[1]), int(point[2])
    overrides = [f"batch.global_sequences={batch}"]
    overrides += [f"optimizer.learning_rate={rate}", f"optimizer.warmup_steps={warmup}"]
    hyperparameters = {"opt_base_learning_rate": rate, "gradient_accumulation_steps": 1}
    if len(point) > 3:
        overrides.append(f"train.steps={point[3]}")
        hyperparameters |= {
            "opt_learning_rate_training_steps": int(point[3]),
            "opt_learning_rate_warmup_factor": warmup / int(point[3]),
        }
    else:
        hyperparameters["opt_learning_rate_warmup_steps"] = warmup
    benchmark = load_benchmark(name)
    data = build_proxy_data(benchmark)
    base = benchmark.training.get("base")
    run = benchmark_run(
        benchmark, overrides=tuple(overrides), train=str(data / "train"), validation=str(data / "validation"),
        weights=None if base is None else str(PROXIES / base),
    )  # fmt: skip
    counts = [samples_of(run, benchmark.name) for _ in range(num_runs)]
    points = json.loads(out.read_text()) if out.is_file() else {}
    points[f"{name}_ref_{batch}"] = {
        "Benchmark": name,
        "Creator": "Meshwright",
        "When": "reference runs of the proxy's rules, version 1",
        "Platform": "CPU, one thread a run",
        "Precision": "FP32",
        "BS": batch,
        "Hyperparams": hyperparameters,
        "Epochs to converge": counts,
    }
    write_atomically(out, json.dumps(points, indent=2) + "\n")


def samples_of(run: runfile.Run, name: str) -> int:
    """Samples to convergence of one run; FAILED where it does not reach the target."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(run.text, encoding="utf-8")
        run_once(
            RunTask(
                folder=folder, run_file=str(path), overrides=run.overrides, seed=secrets.randbelow(10**9),
                benchmark=name, train_samples=0, submission={}, cache_clear={"value": False},
                data_paths=(), warm_up_steps=0,
            )
        )  # fmt: skip
        log = read_log(Path(folder) / LOG)
    end, last = log.last("run_stop"), log.last("eval_accuracy")
    assert end is not None
    assert last is not None
    losses = [round(record.value, 3) for record in log.all("eval_accuracy")]
    is_reached = end.metadata["status"] == "success"
    samples = int(last.samples or 0)
    print(
        run.global_batch,
        samples,
        is_reached,
        losses,
        f"{end.time_ms - log.first('run_start').time_ms:.0f} ms",
        flush=True,
    )
    return samples if is_reached else FAILED


if __name__ == "__main__":
    main()
