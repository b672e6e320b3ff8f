"""MaxText's configurations as run files: a YAML file, followed by `key=value` as on MaxText's command line.

    maxtext.yml                                          written by `export` or by a user
    llama3.1-8b.yml                                      one of MaxText's own models
    "llama3.1_405b.yml ici_fsdp_parallelism=8 steps=10"  with settings

Every key is carried over, ignored because it does not concern training, or named in a note. Absent keys have the
defaults of MaxText's base.yml, not Meshwright's. A `model_name` is one of MaxText's own.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

from meshwright.engines.base import Imported, StatedCluster
from meshwright.engines.maxtext import VERSION
from meshwright.engines.maxtext.config.keys import MaxTextKeys, model_section, own_models
from meshwright.engines.maxtext.kept_tensors import recomputation
from meshwright.engines.maxtext.lower import ATTENTION, NEVER, SPLASH_BLOCKS, has_megablox
from meshwright.engines.maxtext.parameters.leaves import MODULES
from meshwright.engines.software_line import with_stated_software
from meshwright.errors import InputError
from meshwright.json_values import parse_yaml, read_yaml
from meshwright.specs.features import AttentionKernel, runs_on
from meshwright.specs.hardware import Accelerator, Cluster
from meshwright.specs.model import BaseFormat

KERNELS: dict[str, tuple[AttentionKernel, ...]] = {
    **{theirs: (kernel,) for kernel, theirs in ATTENTION.items() if kernel is not None},
    "cudnn_flash_te": (AttentionKernel.CUDNN, AttentionKernel.CK),  # Transformer Engine's, on ROCm another one
    "flash": (AttentionKernel.SPLASH, AttentionKernel.TRITON),  # on GPUs Pallas, which is written in Triton
    "autoselected": (AttentionKernel.SPLASH, AttentionKernel.TRITON, AttentionKernel.UNFUSED),
}
"""Kernels by the values of `attention`; the first that runs on the accelerators counts (layers/attention_op.py)."""
GRADIENTS = {"float32": "fp32", "bfloat16": "bf16"}

AXES = ("data", "fsdp", "fsdp_transpose", "tensor", "tensor_sequence", "context", "expert", "pipeline")
"""Axes of the mesh that are read; data is read first, because the others leave it its slices."""

OWN_BASE = "base.yml"
"""MaxText's own, where no file has this name; `known_keys` has its defaults."""

COUNTED_FROM_ONE = "meshwright_weights.convert"  # of exported configurations, whose state begins at step 1


def import_run(source: str, *, cluster: StatedCluster, ignore: Collection[str] = ()) -> Imported:
    """Return the run on `cluster` that a configuration of MaxText describes, without the keys of `ignore`.

    Raises InputError when it cannot be read or no run file can express it.
    """
    from meshwright.runfile import named_cluster

    parts = shlex.split(source)
    if not parts:
        raise InputError("no configuration is given", got=source)
    path, target = Path(parts[0]), named_cluster(cluster, may_have_parts=True)
    given, base = _read(path)
    for part in parts[1:]:
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError("settings after a configuration are key=value", got=part)
        given[key] = _value(value, what=part)
    name = str(given.get("model_name", base.get("model_name", "default")))
    settings = MaxTextKeys(base | _own_model(name, folder=path.parent) | given, ignore=ignore)
    settings.take("base_config")
    accumulated, length = settings.count("gradient_accumulation_steps"), settings.peek("max_target_length")
    recompute, offloaded = recomputation(settings)
    train, optimizer = _steps(settings)
    tuning = _adapters(settings)
    if settings.peek("routed_score_func") == "sigmoid":
        train["balance_bias_rate"] = settings.take("routed_bias_update_rate")
    has_sinks = settings.peek("decoder_block") == "gpt_oss"
    content = {
        "model": model_section(settings, name=path.stem if name == "default" else name),
        "data": _data(settings),
        **_devices(settings, target, accumulated=accumulated, length=length, recompute=recompute),
        "optimizer": optimizer | _master_weights(settings, is_frozen=bool(tuning)),
        "precision": _precision(settings),
        "cluster": cluster,
        "engine": "maxtext",
        "stack": _stack(settings, target.accelerator, has_sinks=has_sinks)
        | ({"offloaded_activations": offloaded} if offloaded else {}),
        "train": train | _evaluation(settings, accumulated=accumulated),
        **tuning,
    }
    found = Imported(content=content, notes=tuple(settings.notes()))
    return with_stated_software(found, path.read_text(encoding="utf-8"), file=str(path)) if path.exists() else found


def _read(path: Path, *, above: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a YAML file and the files that it names as `base_config`. `above` are its parents.

    Returns the settings, and those of a base.yml, which also a `model_name` overrides. The rules of its mesh are those
    of its version of MaxText.
    """
    if path.name == OWN_BASE and not path.exists():
        return {}, {}
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise InputError(f"{path} is not a configuration of MaxText", hint="it has keys and values")
    base = path.parent / str(values.get("base_config", OWN_BASE))
    if path.name == OWN_BASE and "base_config" not in values:
        return {}, {key: value for key, value in values.items() if key != "logical_axis_rules"}
    if "base_config" not in values or not base.is_file() or base == path:
        return values, {}
    if base in above:
        raise InputError("configurations are based on each other", got=f"{path}: base_config {base.name}")
    below, own_base = _read(base, above=(*above, path))
    return below | values, own_base


def _value(text: str, *, what: str) -> Any:
    from ruamel.yaml import YAMLError

    try:
        return parse_yaml(text)
    except (YAMLError, ValueError) as error:
        raise InputError(f"not a value: {error}", got=what) from None


def _own_model(name: str, *, folder: Path) -> dict[str, Any]:
    """Return the settings of a `model_name`, which MaxText searches in `folder` first, then among its own models."""
    if name == "default":
        return {}
    if (own := folder / "models" / f"{name}.yml").is_file():
        return _read(own)[0]
    if name not in own_models():
        raise InputError(f"MaxText {VERSION} has no model of this name", got=name)
    return own_models()[name]


def _data(settings: MaxTextKeys) -> dict[str, Any]:
    kind = settings.take("dataset_type")
    hub, files = settings.take("hf_path"), settings.take("hf_train_files")
    grain = str(settings.take("grain_train_files")).rpartition("|")[2]
    source = {"synthetic": "synthetic", "hf": files or hub, "grain": grain}.get(kind, "")
    if not source:
        settings.note(f"dataset_type = {kind!r} is not carried over: random tokens are used instead")
    data = {"source": source or "synthetic", "sequence_length": settings.take("max_target_length")}
    tokenizer = settings.take("tokenizer_path")
    is_text = kind == "hf" and bool(source)
    return data | ({"tokenizer": tokenizer} if tokenizer and is_text else {})


def _degree(settings: MaxTextKeys, axis: str, cluster: Cluster) -> int:
    """Return the degree of an axis, within and across slices; 0 if MaxText computes it."""
    left = _slices_left(settings, cluster) if axis == "data" else -1
    within = settings.count(f"ici_{axis}_parallelism", allows_auto=True)
    across = settings.count(f"dcn_{axis}_parallelism", allows_auto=True)
    across = left if across == -1 else across
    return 0 if -1 in (within, across) else within * across


def _slices_left(settings: MaxTextKeys, cluster: Cluster) -> int:
    """Return the slices that the other axes leave to data.

    Where the configuration does not say how many there are, the degrees within a slice fill one of whole nodes; with an
    open one, all devices are one slice. Raises InputError if the other axes do not divide them, which MaxText refuses.
    """
    given = [settings.peek(key) for key in ("num_slices", "compile_topology_num_slices")]
    slices = next((number for number in given if number > 0), 0)
    others = [settings.peek(f"dcn_{axis}_parallelism") for axis in AXES if axis != "data"]
    within = [settings.peek(f"ici_{axis}_parallelism") for axis in AXES]
    shown, filled = cluster.accelerator.jax_devices, math.prod(max(0, degree) for degree in within)
    if not slices and filled and filled % (cluster.devices_per_node * shown) == 0:
        slices = max(1, cluster.num_devices * shown // filled)
        if slices > 1:
            settings.note(f"degrees of {filled} within a slice: the cluster is read as {slices} slices")
    if not slices or -1 in others:
        return 1
    if slices % math.prod(others):
        raise InputError("degrees across slices do not divide num_slices", got=slices, allowed=math.prod(others))
    return slices // math.prod(others)


def _devices(
    settings: MaxTextKeys, cluster: Cluster, *, accumulated: int, length: int, recompute: object
) -> dict[str, Any]:
    """Return the plan and the batch. MaxText counts the devices that JAX shows, a run file those of the cluster."""
    num_devices = cluster.num_devices * cluster.accelerator.jax_devices
    degrees = {axis: _degree(settings, axis, cluster) for axis in AXES}
    others = (
        "tensor_transpose", "sequence", "autoregressive", "context_autoregressive", "context_usp_ulysses", "diloco",
    )  # fmt: skip
    for axis in others:
        if _degree(settings, axis, cluster) != 1:
            raise InputError("an axis that run files do not support", got=f"ici_{axis}_parallelism")
    _fill_open_axis(degrees, num_devices)
    other = degrees.pop("fsdp_transpose")
    if other > 1:  # the other dimension of a matrix: weights and batch are sharded too
        settings.note(f"fsdp_transpose of {other} is read as a part of fully sharded data parallelism")
        degrees["fsdp"] *= other
    _merge(degrees, settings, cluster)
    tensor = degrees["tensor"] * degrees["tensor_sequence"]
    shard, replicas, expert = degrees["fsdp"] * degrees["expert"], degrees["data"], degrees["expert"]
    optimizer = settings.take("shard_optimizer_over_data")
    plan: dict[str, Any] = {"data_shard": shard, "data_replicate": replicas, "sharding": "parameters"}
    if degrees["fsdp"] * degrees["context"] * expert == 1:  # weights are not sharded over any axis
        plan = {"data_shard": replicas, "sharding": "optimizer" if optimizer else "none"}
    plan |= {"tensor": tensor, "context": degrees["context"], "pipeline": degrees["pipeline"], "expert": expert}
    if tensor > 1:
        plan["sequence_parallel"] = degrees["tensor_sequence"] > 1
        plan |= {"expert_tensor": tensor} if settings.peek("num_experts") > 1 else {}
    loaded = settings.take("per_device_batch_size") * num_devices
    micro = loaded / (shard * replicas)
    if degrees["pipeline"] > 1:
        micro = _pipeline(settings, plan, per_rank=loaded / (shard * replicas))
    whole = loaded * accumulated
    if whole != int(whole) or micro != int(micro):
        raise InputError(
            "the batch cannot be split over the data ranks", got=f"{micro} sequences a micro-batch",
            hint=f"per_device_batch_size x {num_devices} devices / {shard * replicas} data ranks must be whole",
        )  # fmt: skip
    plan["recompute"] = recompute
    sizes = {"parallel": plan, "batch": {"global_sequences": int(whole), "micro": int(micro)}}
    if (tiles := settings.count("num_vocab_tiling")) > 1:
        sizes["kernels"] = {"loss_chunk": max(1, int(micro) * length // plan["context"] // tiles)}
    return sizes


def _fill_open_axis(degrees: dict[str, int], num_devices: int) -> None:
    """Assign the remaining devices to the axis of degree 0."""
    given = math.prod(degree or 1 for degree in degrees.values())
    open_axes = [axis for axis, degree in degrees.items() if not degree]
    if len(open_axes) > 1:
        raise InputError("only one axis can be -1", got=", ".join(open_axes))
    if num_devices % given or (not open_axes and given != num_devices):
        raise InputError(f"degrees of {given} do not fill the {num_devices} devices of the cluster")
    for axis in open_axes:
        degrees[axis] = num_devices // given


def _merge(degrees: dict[str, int], settings: MaxTextKeys, cluster: Cluster) -> None:
    """Count devices of the cluster instead of those that JAX shows, in the data axes."""
    shown = cluster.accelerator.jax_devices
    if shown == 1:
        return
    axis = next((axis for axis in ("fsdp", "data") if degrees[axis] % shown == 0), None)
    if axis is None:
        raise InputError(
            f"JAX shows {shown} devices for each {cluster.accelerator.name}, which run files count as one",
            got=f"ici_fsdp_parallelism {degrees['fsdp']}, ici_data_parallelism {degrees['data']}",
            allowed=f"one of them is a multiple of {shown}",
        )
    degrees[axis] //= shown
    settings.note(
        f"ici_{axis}_parallelism counts the {shown} devices that JAX shows for each {cluster.accelerator.name}: "
        f"{degrees[axis] * shown} are {degrees[axis]} here"
    )


def _pipeline(settings: MaxTextKeys, plan: dict[str, Any], *, per_rank: float) -> float:
    """Put schedule and virtual stages into `plan`; return the micro-batch."""
    stages = plan["pipeline"]
    layers = settings.peek("base_num_decoder_layers")
    if (staged := settings.take("pipeline_parallel_layers")) not in (-1, layers):
        raise InputError(
            "layers outside of the pipeline: pipeline_parallel_layers", got=staged, allowed=f"-1, {layers}"
        )
    per_stage = settings.count("num_layers_per_pipeline_stage")
    repeats = settings.count("num_pipeline_repeats", allows_auto=True)
    repeats = layers // (stages * per_stage) if repeats == -1 else repeats
    if stages * repeats * per_stage != layers:
        raise InputError(
            f"{stages} stages x {repeats} repeats x {per_stage} layers are not the model's {layers} layers"
        )
    plan |= {"schedule": "interleaved", "virtual_pipeline": repeats} if repeats > 1 else {"schedule": "gpipe"}
    micro_batches = settings.count("num_pipeline_microbatches", allows_auto=True)
    return per_rank / (stages if micro_batches == -1 else micro_batches)


def _master_weights(settings: MaxTextKeys, *, is_frozen: bool) -> dict[str, bool]:
    """Return the key of the optimizer under which weights are 16 bits wide; frozen ones are in every export."""
    weights = settings.take("weight_dtype")
    if weights not in ("float32", "bfloat16"):
        settings.note(f"weight_dtype = {weights!r} is not carried over: weights are trained in fp32")
    return {"master_weights": False} if weights == "bfloat16" and not is_frozen else {}


def _precision(settings: MaxTextKeys) -> str:
    quantization, dtype = settings.take("quantization"), settings.take("dtype")
    if settings.peek("matmul_precision") == "highest" and dtype == "float32":
        settings.take("matmul_precision")  # implied by fp32
    if quantization == "te_fp8_delayedscaling":
        return "fp8_delayed"
    if quantization in ("fp8", "nanoo_fp8", "fp8_full", "te_fp8_currentscaling"):
        return "fp8"
    if quantization:
        raise InputError("a precision that run files do not support", got=f"quantization = {quantization!r}")
    return "fp32" if dtype == "float32" else "bf16"


def _stack(settings: MaxTextKeys, accelerator: Accelerator, *, has_sinks: bool) -> dict[str, Any]:
    """Return the switches of software. Flags of XLA, `cuda_graphs` among them, are not in a configuration."""
    found: dict[str, Any] = {}
    if settings.peek("num_experts") > 1:
        grouped = settings.take("megablox")
        if grouped != has_megablox(accelerator):
            settings.leave_out("megablox", grouped)
    dtype = settings.take("grad_dtype")
    if dtype in GRADIENTS:
        found["gradient_format"] = GRADIENTS[dtype]
    else:
        settings.note(f"grad_dtype = {dtype!r} is not carried over: gradients are reduced in fp32")
    named = settings.take("attention")
    if has_sinks and named == "autoselected":
        settings.note("attention = 'autoselected' is not carried over: our exports of GPT-OSS have dot_product")
        return found
    kernel = next((kernel for kernel in KERNELS.get(named, ()) if runs_on(kernel, accelerator)), None)
    if kernel is None:
        settings.note(
            f"the run file does not contain attention = {named!r} on {accelerator.name}; the estimate assumes the "
            "kernel of the stack's release"
        )
        return found
    found["attention"] = str(kernel)
    return found | (_splash(settings) if kernel is AttentionKernel.SPLASH else {})


def _splash(settings: MaxTextKeys) -> dict[str, Any]:
    """Return the switches of attention on TPUs."""
    tiles = {f"sa_block_{name}": settings.count(f"sa_block_{name}") for name in SPLASH_BLOCKS}
    tile = tiles[f"sa_block_{SPLASH_BLOCKS[0]}"]
    if others := [f"{key} = {value}" for key, value in tiles.items() if value != tile]:
        settings.note(f"{', '.join(others)} is not carried over: stack.attention_tile is {tile} for all")
    fused = settings.take("sa_use_fused_bwd_kernel")
    return {"attention_tile": tile, "fuses_attention_backward": fused}


def _evaluation(settings: MaxTextKeys, *, accumulated: int) -> dict[str, Any]:
    """Return the evaluation, if there is one. MaxText counts micro-batches, a run file global batches."""
    every, passes = settings.take("eval_interval"), settings.take("eval_steps")
    target = settings.take("target_eval_loss")
    if every <= 0:
        return {}
    if passes <= 0 or passes % accumulated:
        settings.note(f"eval_steps = {passes} is not carried over: run files count global batches")
    batches = {"num_batches": passes // accumulated} if passes >= accumulated else {}
    return {"evaluate": {"every_steps": every, **batches} | ({"target_loss": target} if target else {})}


def _adapters(settings: MaxTextKeys) -> dict[str, Any]:
    """Return the LoRA task, if there is one. The modules with adapters are given by a pattern of their paths."""
    given = settings.take("lora", {})
    if not given.get("enable_lora", False):
        return {}
    pattern = given.get("lora_module_path") or "|".join(f"decoder/layers/{m}" for m in MODULES.values())
    targets = [target for target, module in MODULES.items() if re.fullmatch(pattern, f"decoder/layers/{module}")]
    if settings.peek("num_experts") > 1:
        targets = [target for target in targets if not MODULES[target].startswith("mlp")]
    if not targets:
        raise InputError("adapters of modules that run files do not support", got=f"lora_module_path = {pattern!r}")
    kind = given.get("lora_weight_qtype") or "full"
    if kind not in tuple(BaseFormat):
        settings.note(f"lora_weight_qtype = {kind!r} is not carried over: frozen weights are not quantised")
        kind = "full"
    if path := given.get("lora_restore_path"):
        settings.note(f"lora_restore_path = {path!r} is not carried over: adapters are newly initialised")
    values = {"rank": given.get("lora_rank", 0), "alpha": given.get("lora_alpha", 0.0), "base_format": kind}
    return {"task": "lora", "lora": values | {"targets": targets}}


def _steps(settings: MaxTextKeys) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the `train` section, except for the evaluation, and the `optimizer` section."""
    take = settings.take
    is_export = take("checkpoint_conversion_fn") == COUNTED_FROM_ONE
    steps = settings.count("steps", allows_auto=True)
    scheduled = settings.count("learning_rate_schedule_steps", allows_auto=True)
    steps = scheduled if steps == -1 else steps
    if steps == -1:
        raise InputError("neither steps nor learning_rate_schedule_steps says how long to train")
    scheduled = steps if scheduled == -1 else scheduled
    if scheduled != steps:
        settings.note(f"learning_rate_schedule_steps = {scheduled} is not carried over: rates decay until step {steps}")
    warm = int(scheduled * take("warmup_steps_fraction"))
    schedule = _schedule(settings, whole=scheduled, warm=warm, is_export=is_export)
    kind = take("opt_type")
    if kind not in ("adamw", "adam_pax"):
        raise InputError("an optimizer that run files do not support", got=kind, allowed="adamw")
    clip = take("gradient_clipping_threshold")
    optimizer = {
        "learning_rate": take("learning_rate"),
        "betas": [take("adam_b1"), take("adam_b2")],
        "epsilon": take("adam_eps"),
        "weight_decay": take("adam_weight_decay"),
        "gradient_clip": clip or None,
        "warmup_steps": warm,
        "final_ratio": take("learning_rate_final_fraction"),
        **schedule,
    }
    seed, z_loss = take("init_weights_seed"), take("z_loss_multiplier")
    train: dict[str, Any] = {"steps": steps - 1 if is_export else steps, "seed": seed}
    if not take("enable_dropout"):
        take("dropout_rate")
    return train | ({"z_loss": z_loss} if z_loss else {}) | _checkpoint(settings), optimizer


def _schedule(settings: MaxTextKeys, *, whole: int, warm: int, is_export: bool) -> dict[str, Any]:
    kind, style = settings.take("lr_schedule_type"), settings.take("wsd_decay_style")
    decay = int(whole * settings.take("wsd_decay_steps_fraction"))
    if kind == "cosine":
        return {"schedule": "cosine"}
    if not decay:
        return {"schedule": "constant"}
    if decay == whole - warm and style == "linear":
        return {"schedule": "linear"}
    ratio = (decay - 1) / (whole - 1) if is_export else decay / whole
    return {"schedule": "wsd", "decay_ratio": ratio, "decay_shape": style}


def _checkpoint(settings: MaxTextKeys) -> dict[str, Any]:
    take = settings.take
    saves, every = take("enable_checkpointing"), take("checkpoint_period")
    folder, asynchronous = (take("base_output_directory") or "checkpoints", take("async_checkpointing"))
    keep = take("max_num_checkpoints_to_keep", None)
    if not saves or every == NEVER:
        return {}
    kept = {"keep": keep} if isinstance(keep, int) else {}
    return {"checkpoint": {"folder": folder, "every_steps": every, "asynchronous": asynchronous} | kept}
