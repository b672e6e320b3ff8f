"""Result files for the tests of this folder: synthetic ones, and published ones that are kept compressed."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent


class SyntheticLog:
    """Records of a correct run of CADENCES' benchmarks; tests change them and write them."""

    def __init__(
        self, *, benchmark: str = "llama2_70b_lora", batch: int = 8, evaluations: int = 5, seed: int = 1
    ) -> None:
        start_ms, values, interval, target = CADENCES[benchmark]
        self.benchmark, self.clock = benchmark, start_ms + 10_000_000 * seed
        self.rows: list[dict[str, Any]] = []
        interval = -(-interval // batch) * batch
        skipped = {"llama2_70b_lora": int(0.125 * batch + 2), "qwen35_397b_grpo": 17}.get(benchmark, 0)
        self.add("cache_clear", True)
        self.add("init_start", None, event="INTERVAL_START")
        for key, value in {
            "submission_benchmark": benchmark, "submission_org": "Reference", "submission_division": "closed",
            "submission_status": "onprem", "submission_platform": "1xTest", "seed": 1000 + seed,
            "global_batch_size": batch, "gradient_accumulation_steps": 1, **values,
        }.items():  # fmt: skip
            self.add(key, value)
        self.add("init_stop", None, after=60_000, event="INTERVAL_END")
        self.add("run_start", None, event="INTERVAL_START")
        samples = 0
        for number in range(evaluations):
            step = interval * (skipped + 1) if number == 0 else interval
            self.add("block_start", None, samples=samples, event="INTERVAL_START")
            samples += step
            self.add("block_stop", None, after=step * 350 + seed, samples=samples, event="INTERVAL_END")
            self.add("eval_start", None, samples=samples, event="INTERVAL_START")
            last = number == evaluations - 1
            self.add(
                "eval_accuracy",
                (target - 0.001 if last else target + 0.1 / (number + 1)) - 1e-7 * seed,
                after=5_000,
                samples=samples,
            )
            self.add("eval_stop", None, samples=samples, event="INTERVAL_END")
        self.add("run_stop", None, samples=samples, status="success", event="INTERVAL_END")

    def add(
        self,
        key: str,
        value: object,
        *,
        after: int = 1,
        samples: int | None = None,
        event: str = "POINT_IN_TIME",
        **metadata: Any,
    ) -> None:
        self.clock += after
        count = {} if samples is None else {"samples_count": samples}
        self.rows.append(
            {
                "namespace": "", "time_ms": self.clock, "event_type": event, "key": key, "value": value,
                "metadata": {"file": "train.py", "lineno": 10, **count, **metadata},
            }
        )  # fmt: skip

    def rows_of(self, key: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["key"] == key]

    def row(self, key: str) -> dict[str, Any]:
        return self.rows_of(key)[-1]

    def without(self, *keys: str) -> SyntheticLog:
        self.rows = [row for row in self.rows if row["key"] not in keys]
        return self

    def lines(self) -> list[str]:
        return [f":::MLLOG {json.dumps(row)}" for row in self.rows]

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(self.lines()) + "\n", encoding="latin-1")
        return path


LORA = {
    "train_samples": 3901, "eval_samples": 173, "opt_base_learning_rate": 4e-4,
    "opt_learning_rate_training_steps": 1024,
    "opt_gradient_clip_norm": 0.3, "opt_adamw_weight_decay": 0.0001, "lora_rank": 16, "lora_alpha": 32,
    "opt_learning_rate_warmup_factor": 0.0,
}  # fmt: skip
SMALL = {
    "train_samples": 1574207408, "eval_samples": 1024, "max_sequence_length": 8192, "opt_name": "adamw",
    "opt_base_learning_rate": 4e-4, "opt_end_learning_rate": 4e-5, "opt_learning_rate_warmup_steps": 16,
    "opt_learning_rate_decay_steps": 1199984, "opt_learning_rate_decay_schedule": "cosine with linear warmup",
    "opt_adamw_beta_1": 0.9, "opt_adamw_beta_2": 0.95, "opt_adamw_epsilon": 1e-05, "opt_adamw_weight_decay": 0.1,
    "opt_gradient_clip_norm": 1.0, "max_steps": 1200000,
}  # fmt: skip


LARGE = SMALL | {
    "train_samples": 1574207408, "eval_samples": 5760, "opt_base_learning_rate": 8e-5, "opt_end_learning_rate": 8e-7,
    "opt_learning_rate_warmup_steps": 8000, "opt_learning_rate_decay_steps": 1192000, "init_checkpoint_step": 0,
}  # fmt: skip
GRPO = {
    "train_samples": 17_398, "eval_samples": 251, "max_sequence_length": 65536, "init_checkpoint_step": 0,
    "max_steps": 60,
    "opt_name": "adamw", "opt_base_learning_rate": 1e-6, "opt_adamw_beta_1": 0.9, "opt_adamw_beta_2": 0.999,
    "opt_adamw_epsilon": 1e-8, "opt_adamw_weight_decay": 0.0, "opt_gradient_clip_norm": 0.125,
    "opt_learning_rate_warmup_steps": 0, "opt_learning_rate_decay_schedule": "constant",
    "generation_training_rollout_temperature": 1.0, "generation_training_rollout_top_p": 1.0,
    "generation_validation_rollout_temperature": 0.1, "generation_validation_rollout_top_p": 0.95,
    "num_prompts_per_step": 16, "num_generations_per_prompt": 16, "config_filename": "grpo.sh",
    "lowest_numerical_precision_in_linear": "fp8", "lowest_numerical_precision_in_attn": "bfloat16",
    "lowest_numerical_precision_in_comm": "bfloat16", "tensor_parallelism": 4, "pipeline_parallelism": 1,
    "context_parallelism": 1, "expert_parallelism": 8, "micro_batch_size": 1,
}  # fmt: skip
CADENCES = {
    "qwen35_397b_grpo": (1_790_000_000_000, GRPO, 256, 0.6),
    "llama2_70b_lora": (1_760_000_000_000, LORA, 384, 0.925),
    "llama31_8b": (1_760_000_000_000, SMALL, 12_288, 3.3),
    "llama31_405b": (1_745_000_000_000, LARGE, 46_080, 5.6),  # of round 5.0
}
"""Milliseconds of the start, hyperparameters, samples between evaluations, target."""


@pytest.fixture
def lora_set(tmp_path: Path) -> Callable[..., Path]:
    """Write a set of runs; one entry of `evaluations` for each, the number until its target."""

    def write(*evaluations: int, benchmark: str = "llama2_70b_lora", batch: int = 8) -> Path:
        folder = tmp_path / benchmark
        for i, number in enumerate(evaluations):
            log = SyntheticLog(benchmark=benchmark, batch=batch, evaluations=number, seed=i)
            log.write(folder / f"result_{i}.txt")
        return folder

    return write


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the published sets: v5.1/AMD/results/SYSTEM/BENCHMARK/result_0.txt and so on."""
    folder = tmp_path_factory.mktemp("published")
    with tarfile.open(FOLDER / "published_logs" / "logs.tar.xz") as archive:
        filters = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from Python 3.11.4 on
        archive.extractall(folder, **filters)
    return folder
