"""Trees of torchtitan's configurations (`config_text.tree`) as run files. Imports no torch.

Every setting that is not at torchtitan's default is carried over, ignored because it does not concern training, or
named in a note. Notes also name settings that contradict each other.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright import runfile
from meshwright.cost.stages import layers_per_stage
from meshwright.engines.base import Imported, StatedCluster, not_estimated
from meshwright.engines.key_classes import key_classes
from meshwright.engines.software_line import with_stated_software
from meshwright.engines.torchtitan import lower
from meshwright.engines.torchtitan.config_module.models import DISPATCHERS
from meshwright.engines.torchtitan.config_trees.contradictions import contradictions
from meshwright.engines.torchtitan.config_trees.models import ImportedModel, Node, another_version, read_model
from meshwright.engines.torchtitan.config_trees.pipeline_stages import layers_on_stages, schedule_of
from meshwright.errors import InputError, MeshwrightError
from meshwright.json_values import picked
from meshwright.specs.features import AttentionKernel, Dispatcher, runs_on
from meshwright.specs.hardware import Accelerator
from meshwright.specs.model import Router
from meshwright.specs.run import BIAS_RATE, SCHEDULE_KEYS, Run

KEYS = key_classes("torchtitan")
RECOMPUTE = {"FullAC": "full", "SelectiveAC": {"modules": ["alternate_matmuls"]}}
RUN_FILE_LOADERS = ("RunFileDataLoader", "Batches")  # of exported configurations; the second one is its older name
TEXT = "HuggingFaceTextDataLoader"
FORMATS = {"float32": "fp32", "bfloat16": "bf16"}
LOSS, CHUNKED = "CrossEntropyLoss", "ChunkedLossWrapper"
"""The losses of our exports and of the estimate: logits of all tokens of a micro-batch at once, or of a chunk."""

VARLEN = {"Ampere": AttentionKernel.FA2, "Ada": AttentionKernel.FA2, "Hopper": AttentionKernel.FA3}
"""Kernels of the backend `varlen` by the architecture; FlashAttention 4 of Blackwell is none of ours."""


RENAMED = {
    "parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "training.max_context_length": "training.seq_len",
    "training.num_tokens_per_microbatch_per_dp_rank": "training.local_batch_size",
    "training.num_tokens_per_train_step": "training.global_batch_size",
}
"""Keys before and after 0.3.0; sizes of the last two are in tokens."""


class _Values(dict[str, Any]):
    """Values by `section.key`."""

    def __missing__(self, key: str) -> Any:
        raise another_version(key)


class TrainerSettings:
    """A `Trainer.Config` as `section.key` -> value; settings that nothing reads become notes."""

    def __init__(self, tree: Node) -> None:
        self.values: dict[str, Any] = _Values()
        self.given: set[str] = set()
        self._unestimated: list[str] = []
        self._add(tree, "")
        self._rename()

    def _add(self, tree: Node, above: str) -> None:
        for name, value in tree["fields"].items():
            path = f"{above}{name}"
            if isinstance(value, dict) and "is" in value and path != "model_spec":
                self.values[f"{path}.is"] = value["is"]
                self._add(value, f"{path}.")
                continue
            self.values[path] = value
            if name in tree["given"]:
                self.given.add(path)

    def _rename(self) -> None:
        """Give keys of other versions the names and units of 0.3.0."""
        in_tokens = "training.max_context_length" in self.values
        for old, new in RENAMED.items():
            if old in self.values:
                self.values[new] = self.values.pop(old)
                if old in self.given:
                    self.given = self.given - {old} | {new}
        for name in ("local", "global"):  # in tokens after 0.3.0
            tokens, length = self.values.get(f"training.{name}_batch_size", 0), self.values["training.seq_len"]
            if in_tokens and tokens > 0:
                if tokens % length:
                    raise InputError(f"the {name} batch is no multiple of sequences of {length} tokens", got=tokens)
                self.values[f"training.{name}_batch_size"] = tokens // length

    def take(self, path: str) -> Any:
        """Return the value at `path`; None if the configuration's class has no such field."""
        self.given.discard(path)
        return self.values.get(path)

    def leave_out(self, text: str) -> None:
        """Add what the estimate does not include to the note that names all of it."""
        self._unestimated.append(text)

    def unread(self) -> list[str]:
        """Return notes on the settings that nothing has read."""
        notes = []
        for path in sorted(self.given - {"model_spec"}):
            value = self.values[path]
            if path in KEYS.unestimated:
                is_idle = path.startswith("compile.") and not self.values["compile.enable"]
                if value not in KEYS.unestimated[path] and not is_idle:
                    self.leave_out(f"{path} = {value!r}")
            elif not KEYS.is_harmless(path):
                notes.append(f"{path} = {value!r} is not carried over")
        return [*notes, *not_estimated(self._unestimated)]


def import_tree(tree: Node, *, cluster: StatedCluster) -> Imported:
    """Return the run on `cluster` of a `Trainer.Config` tree. Raises InputError for what no run file can express."""
    settings = TrainerSettings(tree)
    model = read_model(settings.values["model_spec"])
    own = _own_run(settings)
    notes = [*model.notes, *contradictions(settings.values, given=settings.given, model=model)]
    parallel = parallel_section(settings, num_layers=model.model.num_layers)
    width = data_width(parallel, cluster=cluster)
    content: dict[str, Any] = {
        "model": model.content,
        **weights_section(settings, own, notes),
        **({"task": "lora", "lora": model.lora} if model.lora else {}),
        "data": _data(settings, own, notes),
        "batch": batch_section(settings, parallel, notes, width=width),
        **number_formats(settings, model, _optimizer(settings, notes, adapts=model.lora is not None)),
        "cluster": cluster,
        "parallel": parallel,
        "engine": "torchtitan",
        "stack": stack_section(settings, parallel, model, notes, cluster=cluster),
        "train": train_section(settings, model, notes),
    }
    content["train"] |= evaluation(settings, content, own, notes, width=width)
    content |= _loss(settings, content)
    found = Imported(content=content, notes=(*notes, *settings.unread()))
    return with_stated_software(found, tree.get("software", ""), file="the configuration")


def _loss(settings: TrainerSettings, content: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of a chunk of the loss as the run file's `kernels`; none for the loss of all tokens at once."""
    loss = settings.values["loss.is"]
    if loss == CHUNKED and settings.values["loss.loss_fn.is"] == LOSS:
        chunks = settings.values["loss.num_chunks"]
        length = content["data"]["sequence_length"] // content["parallel"]["context"]
        if length % chunks:
            raise InputError(
                "the chunks of the loss do not divide the sequence of a rank", got=f"loss.num_chunks = {chunks}",
                allowed=f"divisors of {length}",
            )  # fmt: skip
        return {"kernels": {"loss_chunk": content["batch"]["micro"] * length // chunks}}
    if loss != LOSS:
        settings.leave_out(f"loss = {loss}")
    return {}


def _own_run(settings: TrainerSettings) -> Run | None:
    """Return the run file that `RunFileDataLoader` reads; None: another data loader is configured."""
    if settings.values["dataloader.is"] not in RUN_FILE_LOADERS:
        return None
    return runfile.load(settings.take("dataloader.dataset_path"))


def _data(settings: TrainerSettings, own: Run | None, notes: list[str]) -> dict[str, Any]:
    length = settings.take("training.seq_len")
    if own is not None:
        source = own.data.source if isinstance(own.data.source, str) else asdict(own.data)["source"]
        names = ("tokenizer", "validation", "joined_documents")
        said = {"source": source, **picked(own.data, *names)}
        return {key: value for key, value in said.items() if value} | {"sequence_length": length}
    if (kind := settings.values["dataloader.is"]) != TEXT:
        notes.append(f"dataloader: {kind} is not carried over: its data set is imported as text")
    source = settings.take("dataloader.dataset_path") or settings.take("dataloader.dataset")
    settings.take("dataloader.dataset")
    return {"source": source or "synthetic", "sequence_length": length}


def weights_section(settings: TrainerSettings, own: Run | None, notes: list[str]) -> dict[str, str]:
    """Return the initial weights, under the name that they have in the run file of the module."""
    path = settings.take("checkpoint.initial_load_path")
    if not path or not settings.take("checkpoint.initial_load_in_hf"):
        if path:
            notes.append(f"checkpoint.initial_load_path = {path!r} is not carried over: not Hugging Face weights")
        return {}
    name = None if own is None else own.weights
    return {"weights": name if name and _is_same_folder(name, path) else path}


def _is_same_folder(name: str, path: str) -> bool:
    from meshwright.training.weights import find_weights

    try:
        return find_weights(name).folder.samefile(path)
    except (MeshwrightError, OSError):
        return False


def parallel_section(settings: TrainerSettings, *, num_layers: int) -> dict[str, Any]:
    """Return the plan. Devices that no degree mentions are left to `data_shard`."""

    def take(name: str) -> Any:
        return settings.take(f"parallelism.{name}")

    shard, replicate = take("data_parallel_shard_degree"), take("data_parallel_replicate_degree")
    pipeline, reshards = take("pipeline_parallel_degree"), take("fsdp_reshard_after_forward")
    context = take("context_parallel_degree")
    # torchtitan shards over the ranks of data and of context parallelism together (`ParallelDims.fsdp_enabled`).
    is_sharded = shard != 1 or context != 1
    always = reshards == "always" or (reshards == "default" and pipeline == 1 and is_sharded)
    plan: dict[str, Any] = {
        "data_replicate": replicate,
        "tensor": take("tensor_parallel_degree"),
        "sequence_parallel": take("enable_sequence_parallel"),
        "context": context,
        "pipeline": pipeline,
        "expert": take("expert_parallel_degree"),
        "sharding": "parameters" if always else "gradients",
        "recompute": _recompute(settings),
    }
    if shard > 0:
        plan["data_shard"] = shard
    if not is_sharded and not always:  # only replicas, or one process: nothing is sharded
        plan |= {"data_shard": replicate, "data_replicate": 1, "sharding": "none"}
    if settings.take("training.enable_cpu_offload"):
        raise InputError("parameters in host memory, which run files do not support", got="training.enable_cpu_offload")
    take("module_fqns_per_model_part")
    for name in ("schedule", "layers_per_stage", "microbatch_size"):
        take(f"pipeline_parallel_{name}")
    if pipeline > 1:
        plan["schedule"] = schedule_of(settings.values)
        stages = layers_on_stages(settings.values, num_layers=num_layers)
        plan["virtual_pipeline"] = len(stages) // pipeline
        is_explicit = settings.values["parallelism.module_fqns_per_model_part"]
        if is_explicit and stages != layers_per_stage(num_layers, len(stages)):
            plan["layers_per_stage"] = list(stages)
    return plan


def _recompute(settings: TrainerSettings) -> Any:
    settings.take("activation_checkpoint")  # None: nothing is recomputed
    kind = settings.take("activation_checkpoint.is")
    if kind == "ActivationCheckpointConfig":  # before 0.3.0
        mode = settings.take("activation_checkpoint.mode")
        kind = {"none": None, "full": "FullAC", "selective": "SelectiveAC"}.get(mode, mode)
    if kind is None:
        return "none"
    if kind not in RECOMPUTE:
        raise InputError("recomputation that run files do not support", got=kind, allowed=", ".join(RECOMPUTE))
    return RECOMPUTE[kind]


def data_width(parallel: dict[str, Any], *, cluster: StatedCluster) -> int:
    """Return the number of data-parallel ranks: the given one, or the cluster divided by the other degrees."""
    if "data_shard" in parallel:
        return parallel["data_shard"] * parallel["data_replicate"]
    others = parallel["tensor"] * parallel["context"] * parallel["pipeline"]
    target = runfile.named_cluster(cluster, may_have_parts=True)
    num_devices = target.num_devices
    if num_devices % (others * parallel["data_replicate"]):
        raise InputError(f"degrees of {others} do not divide the {num_devices} devices of {target.name}")
    return num_devices // others


def batch_section(
    settings: TrainerSettings, parallel: dict[str, Any], notes: list[str], *, width: int
) -> dict[str, Any]:
    """Return the batch. Torchtitan drains the pipeline after every local batch, Meshwright after the global batch."""
    local, given = settings.take("training.local_batch_size"), settings.take("training.global_batch_size")
    micro = settings.take("parallelism.pipeline_parallel_microbatch_size")
    whole = given if given > 0 else local * width
    is_staged = parallel["pipeline"] > 1
    if is_staged and local % micro:
        raise InputError(
            "micro-batches do not divide the local batch", got=f"training.local_batch_size = {local}",
            allowed=f"multiples of {micro}",
        )  # fmt: skip
    if is_staged and whole > local * width:
        notes.append(
            f"torchtitan drains the pipeline after {local // micro} micro-batches, {whole // (local * width)} times a "
            "step, Meshwright once, so that the estimated bubble is too small: training.local_batch_size = "
            f"{whole // width} would be equivalent"
        )
    return {"global_sequences": whole, "micro": micro if is_staged else local}


def _optimizer(settings: TrainerSettings, notes: list[str], *, adapts: bool) -> dict[str, Any]:
    """Return AdamW of the group of all parameters; notes name other groups, except vectors without weight decay."""
    settings.take("optimizer.param_groups")
    groups = [group["fields"] for group in settings.values["optimizer.param_groups"]]
    others, last = groups[:-1], groups[-1]
    kwargs = last["optimizer_kwargs"]
    if last["optimizer_name"] != "AdamW":
        raise InputError("an optimizer that run files do not support", got=last["optimizer_name"], allowed="AdamW")
    if others == [{**last, "pattern": lower.VECTORS, "optimizer_kwargs": {**kwargs, "weight_decay": 0.0}}]:
        others = []
    elif not (others or adapts) and kwargs.get("weight_decay", 0.01):
        notes.append("optimizer: weight decay of norms is not carried over")
    notes += [f"optimizer.param_groups: {group['pattern']} is not carried over" for group in others]
    bf16 = settings.values["optimizer.implementation"] == "fused_opt_states_bf16"
    clip = float(settings.take("training.max_norm"))
    return {
        "learning_rate": kwargs["lr"],
        "betas": list(kwargs.get("betas", (0.9, 0.999))),  # torch's defaults
        "epsilon": kwargs.get("eps", 1e-8),
        "weight_decay": kwargs.get("weight_decay", 0.01),
        "gradient_clip": None if clip == float("inf") else clip,
        **({"states": "bf16"} if bf16 else {}),
        **learning_rates(settings, notes),
    }


def learning_rates(settings: TrainerSettings, notes: list[str]) -> dict[str, Any]:
    """Return the schedule: falls of the whole training after its warm-up, or of its last `decay_ratio`."""

    def take(name: str) -> Any:
        return settings.take(f"lr_scheduler.{name}")

    def wsd(ratio: Any) -> dict[str, Any]:
        return {"decay_ratio": ratio, "decay_shape": kind}

    steps = settings.values["training.steps"]
    total, warmup, ratio, kind = map(take, ("total_steps", "warmup_steps", "decay_ratio", "decay_type"))
    if total not in (None, steps):
        notes.append(f"lr_scheduler.total_steps = {total} is not carried over: rates decay within {steps} steps")
    rates: dict[str, Any] = {"warmup_steps": min(warmup, steps), "final_ratio": take("min_lr_factor")}
    if schedule := take("schedule"):  # of `RunLearningRates`
        own = [key for key, owner in SCHEDULE_KEYS.items() if owner == schedule]
        return rates | {"schedule": schedule} | (wsd(ratio) if schedule == "wsd" else {key: take(key) for key in own})
    if ratio is None and kind != "sqrt":
        return rates | {"schedule": kind}
    return rates | {"schedule": "wsd"} | wsd(1.0 if ratio is None else ratio)


def number_formats(settings: TrainerSettings, model: ImportedModel, optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return the precision recipe and the optimizer: without master weights where parameters have 16 bits.

    The recipe is that of the model's matrices if they have one, else of mixed precision.
    """
    is_narrow = settings.take("training.dtype") != "float32"
    in_fp32 = settings.take("training.mixed_precision_param") == "float32"
    recipe = model.recipe or ("fp32" if in_fp32 and not is_narrow else "bf16")
    return {"optimizer": optimizer | ({"master_weights": False} if is_narrow else {}), "precision": recipe}


def stack_section(
    settings: TrainerSettings,
    parallel: dict[str, Any],
    model: ImportedModel,
    notes: list[str],
    *,
    cluster: StatedCluster,
) -> dict[str, Any]:
    """Return the switches of software.

    Absent settings have torchtitan's defaults, which are not those of its published measurements.
    """
    found: dict[str, Any] = {
        "cuda_graphs": "full" if settings.take("training.disable_cuda_graphs") is False else "none",
        "compiles": _compiles_model(settings),
        "gradient_format": _gradient_format(settings.take("training.mixed_precision_reduce")),
    }
    if parallel["tensor"] > 1:
        is_async = settings.take("compile.enable_async_tensor_parallel")
        found["overlaps_tensor"] = is_async or model.overlaps_tensor
    accelerator = runfile.named_cluster(cluster, may_have_parts=True).accelerator
    if model.attention == "varlen" and accelerator.architecture in VARLEN:
        found["attention"] = str(VARLEN[accelerator.architecture])
    elif model.attention != "flex":
        settings.leave_out(f"attn_backend {model.attention} on {accelerator.name}")
    return found | (_dispatcher(model.comm_backend, accelerator, notes) if model.comm_backend else {})


def _dispatcher(backend: str, accelerator: Accelerator, notes: list[str]) -> dict[str, str]:
    kernels = [kind for kind, theirs in DISPATCHERS.items() if theirs == backend and runs_on(kind, accelerator)]
    if not kernels:
        notes.append(
            f"the run file does not contain comm_backend {backend} of experts on {accelerator.name}; "
            "the estimate assumes that it is standard"
        )
    return {"dispatcher": str(kernels[0] if kernels else Dispatcher.ALL_TO_ALL)}


def _gradient_format(dtype: str) -> str:
    if dtype not in FORMATS:
        raise InputError("gradients in a format that run files do not support", got=dtype, allowed=", ".join(FORMATS))
    return FORMATS[dtype]


def _compiles_model(settings: TrainerSettings) -> bool:
    """Return True if torch.compile fuses the kernels of layers."""
    is_on, components = settings.take("compile.enable"), settings.values["compile.components"] or []
    return bool(is_on) and "model" in components


def train_section(settings: TrainerSettings, model: ImportedModel, notes: list[str]) -> dict[str, Any]:
    """Return the `train` section except for the evaluation."""
    train: dict[str, Any] = {
        "steps": settings.take("training.steps"),
        "seed": settings.take("debug.seed") or 0,
        "compile": _compiles_model(settings),
    }
    experts = model.model.experts
    if experts is not None and experts.router is Router.SIGMOID and model.lora is None:
        rate = model.balance_rate or 0.0
        train |= {"balance_bias_rate": rate} if rate != BIAS_RATE else {}
    elif model.balance_rate and model.lora is None:
        notes.append("model_spec: routing biases of softmax routers are not carried over")
    trackers = [name for name in ("tensorboard", "wandb") if settings.take(f"metrics.enable_{name}")]
    if saves := _checkpoint(settings):
        train["checkpoint"] = saves
    return train | ({"trackers": trackers} if trackers else {})


def _checkpoint(settings: TrainerSettings) -> dict[str, Any] | None:
    def take(name: str) -> Any:
        return settings.take(f"checkpoint.{name}")

    folder = Path(settings.values["dump_folder"]) / take("folder")
    keep, interval, mode = take("keep_latest_k"), take("interval"), take("async_mode")
    if not take("enable") or take("load_only"):
        return None
    here = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    saves = {"folder": os.fspath(here), "every_steps": interval, "asynchronous": mode != "disabled"}
    return saves | ({"keep": keep} if keep else {})


def evaluation(
    settings: TrainerSettings, content: dict[str, Any], own: Run | None, notes: list[str], *, width: int
) -> dict[str, Any]:
    """Return `train.evaluate`, and put its data into `content`.

    Torchtitan counts local batches, a run file global batches.
    """
    every, steps = settings.take("validator.freq"), settings.take("validator.steps")
    if not settings.take("validator.enable"):
        return {}
    batch = content["batch"]
    if own is None:
        content["data"]["validation"] = settings.take("validator.dataloader.dataset")
    if steps < 0:
        notes.append("validator.steps = -1, all data, is not carried over")
        return {"evaluate": {"every_steps": every}}
    local = settings.values["training.local_batch_size"]
    per_batch = max(1, batch["global_sequences"] // (local * width))
    if steps % per_batch:
        notes.append(f"validator.steps = {steps} local batches are not a multiple of global batches: rounded up")
    stated = (
        {} if own is None or own.train.evaluate is None else picked(own.train.evaluate, "target_loss", "skip_first")
    )
    kept = {key: value for key, value in stated.items() if value}  # of `RunValidator`
    return {"evaluate": {"every_steps": every, "num_batches": -(-steps // per_batch), **kept}}
