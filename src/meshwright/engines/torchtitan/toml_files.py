"""Torchtitan's TOML files (up to 0.2) as run files. Imports no torch.

Every key is carried, known to mean nothing here, or named in a note: nothing is dropped without a word. What the file
does not say takes torchtitan's defaults, not Meshwright's.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.engines.base import Imported
from meshwright.errors import InputError

MODELS = {
    ("llama3", "8B"): "llama3.1-8b",
    ("llama3", "70B"): "llama3.1-70b",
    ("llama3", "405B"): "llama3.1-405b",
    ("deepseek_v3", "16B"): "deepseek-v2-lite",
    ("deepseek_v3", "671B"): "deepseek-v3",
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
    **{("qwen3", size): f"qwen3-{size.lower()}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
    ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
    ("qwen3", "235B-A22B"): "qwen3-235b-a22b",
}
"""Torchtitan's presets by the catalogue's names."""

SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved",
    "zbvzerobubble": "zbv",
    "dualpipev": "dualpipe",
}
MEANS_NOTHING_HERE = (
    "job",
    "profiling",
    "comm",
    "debug",
    "experimental",
    "fault_tolerance",
    "memory_estimation",
)
"""Sections about the program that ran the file, not about what was trained."""


class _Settings:
    """The keys of a TOML file, each taken once; what is left over becomes notes."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = {f"{section}.{key}": value for section, key, value in _flat(values)}

    def take(self, key: str, default: Any = None, *, also: str | None = None) -> Any:
        """The value of `key`, or of `also`, its older name; `default` where neither is there."""
        older = self.values.pop(also, default) if also else default
        return self.values.pop(key, older)

    def left(self) -> list[str]:
        """Keys that nobody took, with their values."""
        kept = {k: v for k, v in self.values.items() if k.partition(".")[0] not in MEANS_NOTHING_HERE}
        return [f"{key} = {value!r} is not carried over" for key, value in kept.items()]


def _flat(values: dict[str, Any], above: str = "") -> Iterator[tuple[str, str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}.{name}" if above else name)
        else:
            yield above, name, value


def import_toml(path: Path, *, cluster: str) -> Imported:
    """The run that a TOML file of torchtitan describes, on `cluster`.

    Raises InputError when the file cannot be read, names a model that the catalogue lacks, or holds what no run file
    can say.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the configuration: {error.strerror or error}", got=str(path)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no TOML: {error}") from None
    if "training" not in values or "model" not in values:
        raise InputError(f"{path} is no configuration of torchtitan", hint="it has [model] and [training]")
    settings = _Settings(values)
    parallel, pipeline = _parallel(settings)
    content = {
        "model": _model(settings),
        "data": _data(settings),
        "batch": _batch(settings, parallel, pipeline=pipeline, cluster=cluster),
        "optimizer": _optimizer(settings),
        "precision": _precision(settings),
        "cluster": cluster,
        "parallel": parallel,
        "engine": "torchtitan",
        "train": _train(settings),
    }
    return Imported(content=content, notes=tuple(settings.left()))


def _model(settings: _Settings) -> str:
    asked = (settings.take("model.name"), settings.take("model.flavor"))
    settings.take("model.hf_assets_path", also="model.tokenizer_path")
    if asked not in MODELS:
        known = ", ".join(" ".join(names) for names in MODELS)
        raise InputError(
            "no model of the catalogue is this preset", got=" ".join(map(str, asked)), allowed=known
        )
    return MODELS[asked]


def _data(settings: _Settings) -> dict[str, Any]:
    source = settings.take("training.dataset_path") or settings.take("training.dataset", "c4_test")
    settings.take("training.dataset")
    return {"source": source, "sequence_length": settings.take("training.seq_len", 2048)}


def _parallel(settings: _Settings) -> tuple[dict[str, Any], int]:
    """The plan, and its pipeline's micro-batch; what of the devices is not said is sharded over."""
    take = settings.take
    shard = take("parallelism.data_parallel_shard_degree", -1)
    reshards = take("parallelism.fsdp_reshard_after_forward", "default")
    pipeline = take("parallelism.pipeline_parallel_degree", 1)
    always = reshards == "always" or (reshards == "default" and pipeline == 1)
    plan: dict[str, Any] = {
        "data_replicate": take("parallelism.data_parallel_replicate_degree", 1),
        "tensor": take("parallelism.tensor_parallel_degree", 1),
        "context": take("parallelism.context_parallel_degree", 1),
        "pipeline": pipeline,
        "expert": take("parallelism.expert_parallel_degree", 1),
        "sharding": "parameters" if always else "gradients",
        "recompute": _recompute(settings),
    }
    if shard > 0:
        plan["data_shard"] = shard
    if shard == 1 and plan["data_replicate"] > 1:  # replicas alone: nothing is sharded
        plan |= {"data_shard": plan["data_replicate"], "data_replicate": 1, "sharding": "none"}
    schedule = take("parallelism.pipeline_parallel_schedule", "1F1B")
    micro = take("parallelism.pipeline_parallel_microbatch_size", 1)
    if pipeline > 1:
        if schedule.lower() not in SCHEDULES:
            raise InputError(
                "a schedule that run files do not know", got=schedule, allowed=", ".join(SCHEDULES)
            )
        plan["schedule"] = SCHEDULES[schedule.lower()]
        if plan["schedule"] in ("interleaved", "zbv"):
            plan["virtual_pipeline"] = 2  # torchtitan's default
    return plan, micro


def _recompute(settings: _Settings) -> Any:
    mode = settings.take("activation_checkpoint.mode", "selective")
    option = settings.take("activation_checkpoint.selective_ac_option", "op")
    if mode == "selective" and option != "op":
        raise InputError("recomputing every n-th layer", got=option, allowed="selective_ac_option = 'op'")
    return {"modules": ["alternate_matmuls"]} if mode == "selective" else mode


def _batch(settings: _Settings, parallel: dict[str, Any], *, pipeline: int, cluster: str) -> dict[str, Any]:
    from meshwright import catalog

    local = settings.take("training.local_batch_size", 8, also="training.batch_size")
    given = settings.take("training.global_batch_size", -1)
    others = parallel["tensor"] * parallel["context"] * parallel["pipeline"]
    num_devices = catalog.cluster(cluster).num_devices
    if num_devices % others:
        raise InputError(f"degrees of {others} do not divide the {num_devices} devices of {cluster}")
    whole = given if given > 0 else local * (num_devices // others)
    return {"global_sequences": whole, "micro": pipeline if parallel["pipeline"] > 1 else local}


def _optimizer(settings: _Settings) -> dict[str, Any]:
    take = settings.take
    name = take("optimizer.name", "AdamW")
    if name != "AdamW":
        raise InputError("an optimizer that run files do not know", got=name, allowed="AdamW")
    take("optimizer.implementation")
    decay, kind = take("lr_scheduler.decay_ratio"), take("lr_scheduler.decay_type", "linear")
    if kind not in ("linear", "cosine") or (decay is not None and kind != "linear"):
        raise InputError(
            "a learning-rate schedule that run files do not know", got=f"{kind}, decay_ratio {decay}"
        )
    schedule = {"schedule": kind} if decay is None else {"schedule": "wsd", "decay_ratio": decay}
    return {
        "learning_rate": take("optimizer.lr", 8e-4),
        "betas": [take("optimizer.beta1", 0.9), take("optimizer.beta2", 0.95)],
        "epsilon": take("optimizer.eps", 1e-8),
        "weight_decay": take("optimizer.weight_decay", 0.1),
        "gradient_clip": float(take("training.max_norm", 1.0)),
        "warmup_steps": take("lr_scheduler.warmup_steps", 200),
        "final_ratio": take("lr_scheduler.min_lr_factor", 0.0),
        **schedule,
    }


def _precision(settings: _Settings) -> str:
    converters = settings.take("model.converters", [])
    recipe = settings.take("quantize.linear.float8.recipe_name", also="float8.recipe_name")
    if "float8" in converters or "quantize.linear.float8" in converters:
        return "fp8_rowwise" if recipe == "rowwise" else "fp8"
    param = settings.take("training.mixed_precision_param", "bfloat16")
    return "fp32" if param == "float32" else "bf16"


def _train(settings: _Settings) -> dict[str, Any]:
    take = settings.take
    train: dict[str, Any] = {
        "steps": take("training.steps", 10_000),
        "seed": take("training.seed", 0) or 0,
        "compile": take("compile.enable", False, also="training.compile"),
    }
    take("compile.components")
    folder, interval = take("checkpoint.folder", "checkpoint"), take("checkpoint.interval", 500)
    mode, keep = take("checkpoint.async_mode", "disabled"), take("checkpoint.keep_latest_k", 10)
    if take("checkpoint.enable", False, also="checkpoint.enable_checkpoint"):
        saves = {"folder": folder, "every_steps": interval, "asynchronous": mode != "disabled"}
        train["checkpoint"] = saves | ({"keep": keep} if keep else {})
    if take("metrics.enable_tensorboard", False):
        train["trackers"] = ["tensorboard"]
    for key in ("log_freq", "save_tb_folder", "disable_color_printing"):
        take(f"metrics.{key}")
    return train
