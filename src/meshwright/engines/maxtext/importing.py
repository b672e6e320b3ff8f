"""MaxText's configurations as run files: a YAML file, with `key=value` behind it as on MaxText's command line.

    maxtext.yml                                          one that `export` has written, or a user
    llama3.1-8b.yml                                      a model of MaxText's own
    "llama3.1_405b.yml ici_fsdp_parallelism=8 steps=10"  and settings

Every key is carried, known to mean nothing here, or named in a note. What is not said takes the defaults of MaxText's
base.yml, not Meshwright's; a `model_name` is looked up in the environment of MaxText, where it was made.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from meshwright.engines.base import Imported
from meshwright.engines.maxtext import VERSION, environment
from meshwright.engines.maxtext.config.keys import Settings, model_section
from meshwright.engines.maxtext.lower import ENDLESS, REMATERIALISATION
from meshwright.engines.maxtext.parameters.leaves import MODULES
from meshwright.errors import InputError, MissingDependencyError
from meshwright.specs.model import BaseFormat
from meshwright.specs.plan import RECOMPUTE_MODULES

COUNTED_FROM_ONE = "meshwright_weights.convert"  # its state begins at step 1, in configurations that we wrote


def import_run(source: str, *, cluster: str) -> Imported:
    """The run that a configuration of MaxText describes, on `cluster`.

    Raises InputError when it cannot be read or holds what no run file can express, MissingDependencyError where a
    `model_name` is to be looked up and MaxText's environment was not made.
    """
    from meshwright import catalog

    words = shlex.split(source)
    if not words:
        raise InputError("no configuration is given", got=source)
    path, num_devices = Path(words[0]), catalog.cluster(cluster).num_devices
    given = _read(path)
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals:
            raise InputError("settings behind a configuration are key=value", got=word)
        given[key] = _value(value, what=word)
    settings = Settings(_with_model(given, beside=path.parent))
    settings.take("base_config", None)
    accumulated = settings.count("gradient_accumulation_steps", 1)
    train, optimizer = _steps(settings)
    tuning = _adapters(settings)
    if settings.peek("routed_score_func", "") == "sigmoid":
        train["balance_bias_rate"] = settings.take("routed_bias_update_rate", 0.0)
    content = {
        "model": model_section(settings, name=str(given.get("model_name", path.stem))),
        "data": _data(settings),
        **_devices(settings, num_devices=num_devices, accumulated=accumulated),
        "optimizer": optimizer,
        "precision": _precision(settings, is_frozen=bool(tuning)),
        "cluster": cluster,
        "engine": "maxtext",
        "train": train | _evaluation(settings, accumulated=accumulated),
        **tuning,
    }
    return Imported(content=content, notes=tuple(settings.notes()))


def _read(path: Path, *, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A YAML file over those that it names as `base_config`, but for MaxText's own; `above` name it."""
    from ruamel.yaml import YAML, YAMLError

    try:
        values = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the configuration: {error.strerror or error}", got=str(path)) from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} is not a configuration of MaxText", hint="it has keys and values")
    base = path.parent / str(values.get("base_config", "base.yml"))
    if "base_config" not in values or not base.is_file() or base == path:
        return values
    if base in above:
        raise InputError("configurations stand on each other", got=f"{path}: base_config {base.name}")
    return _read(base, above=(*above, path)) | values


def _value(text: str, *, what: str) -> Any:
    from ruamel.yaml import YAML, YAMLError

    try:
        return YAML(typ="safe").load(text)
    except YAMLError as error:
        raise InputError(f"not a value: {error}", got=what) from None


def _with_model(given: dict[str, Any], *, beside: Path) -> dict[str, Any]:
    """`given` over the model that it names, which MaxText looks for in a folder beside it, and then among its own."""
    name = str(given.get("model_name", "default"))
    if name == "default":
        return given
    if (own := beside / "models" / f"{name}.yml").is_file():
        return _read(own) | given
    python = environment.find()
    if python is None:
        raise MissingDependencyError(
            f"model_name: {name} is looked up in MaxText {VERSION}, whose environment was not made",
            hint=environment.COMMAND,
        )
    found = list(python.parent.parent.glob(f"lib/python*/site-packages/maxtext/configs/models/{name}.yml"))
    if not found:
        raise InputError(f"MaxText {VERSION} has no model of this name", got=name)
    return _read(found[0]) | given


def _data(settings: Settings) -> dict[str, Any]:
    kind = settings.take("dataset_type", "synthetic")
    hub, files = settings.take("hf_path", ""), settings.take("hf_train_files", "")
    grain = str(settings.take("grain_train_files", "")).rpartition("|")[2]
    source = {"synthetic": "synthetic", "hf": files or hub, "grain": grain}.get(kind, "")
    if not source:
        settings.note(f"dataset_type = {kind!r} is not carried over: random tokens are used instead")
    data = {"source": source or "synthetic", "sequence_length": settings.take("max_target_length", 2048)}
    tokenizer = settings.take("tokenizer_path", "")
    is_text = kind == "hf" and bool(source)
    return data | ({"tokenizer": tokenizer} if tokenizer and is_text else {})


def _degree(settings: Settings, axis: str) -> int:
    """The whole degree of an axis: within slices and across them; 0 where MaxText fills it up."""
    within = settings.count(f"ici_{axis}_parallelism", -1 if axis == "fsdp" else 1, filled_up=True)
    across = settings.count(f"dcn_{axis}_parallelism", 1, filled_up=True)
    across = 1 if axis == "data" and across == -1 else across  # filled up: one slice
    return 0 if -1 in (within, across) else within * across


def _devices(settings: Settings, *, num_devices: int, accumulated: int) -> dict[str, Any]:
    """The plan and the batch."""
    axes = ("data", "fsdp", "tensor", "tensor_sequence", "context", "expert", "pipeline")
    degrees = {axis: _degree(settings, axis) for axis in axes}
    for axis in ("fsdp_transpose", "sequence", "autoregressive", "context_autoregressive", "diloco"):
        if _degree(settings, axis) != 1:
            raise InputError("an axis that run files do not support", got=f"ici_{axis}_parallelism")
    _fill(degrees, num_devices)
    tensor = degrees["tensor"] * degrees["tensor_sequence"]
    shard, replicas, expert = degrees["fsdp"] * degrees["expert"], degrees["data"], degrees["expert"]
    optimizer = settings.take("shard_optimizer_over_data", False)
    plan: dict[str, Any] = {"data_shard": shard, "data_replicate": replicas, "sharding": "parameters"}
    if degrees["fsdp"] * degrees["context"] * expert == 1:  # weights are not sharded over any axis
        plan = {"data_shard": replicas, "sharding": "optimizer" if optimizer else "none"}
    plan |= {
        "tensor": tensor,
        "context": degrees["context"],
        "pipeline": degrees["pipeline"],
        "expert": expert,
    }
    if tensor > 1:
        plan["sequence_parallel"] = degrees["tensor_sequence"] > 1
        plan |= {"expert_tensor": tensor} if settings.peek("num_experts", 1) > 1 else {}
    per_pass = settings.take("per_device_batch_size", 12.0) * num_devices
    micro = per_pass / (shard * replicas)
    if degrees["pipeline"] > 1:
        micro = _pipeline(settings, plan, per_pass=per_pass / (shard * replicas))
    whole = per_pass * accumulated
    if whole != int(whole) or micro != int(micro):
        raise InputError(
            "the batch cannot be split over the data ranks", got=f"{micro} sequences a micro-batch",
            hint=f"per_device_batch_size x {num_devices} devices / {shard * replicas} data ranks must be whole",
        )  # fmt: skip
    plan["recompute"] = _recompute(settings)
    return {"parallel": plan, "batch": {"global_sequences": int(whole), "micro": int(micro)}}


def _fill(degrees: dict[str, int], num_devices: int) -> None:
    """Give the axis that is not said what the others leave of the devices."""
    said = 1
    for degree in degrees.values():
        said *= degree or 1
    open_axes = [axis for axis, degree in degrees.items() if not degree]
    if len(open_axes) > 1:
        raise InputError("only one axis is filled up", got=", ".join(open_axes))
    if num_devices % said or (not open_axes and said != num_devices):
        raise InputError(f"degrees of {said} do not fill the {num_devices} devices of the cluster")
    for axis in open_axes:
        degrees[axis] = num_devices // said


def _pipeline(settings: Settings, plan: dict[str, Any], *, per_pass: float) -> float:
    """Schedule and virtual stages; the micro-batch."""
    stages = plan["pipeline"]
    layers = settings.peek("base_num_decoder_layers", 16)
    per_stage = settings.count("num_layers_per_pipeline_stage", 1)
    repeats = settings.count("num_pipeline_repeats", -1, filled_up=True)
    repeats = layers // (stages * per_stage) if repeats == -1 else repeats
    if stages * repeats * per_stage != layers:
        raise InputError(
            f"{stages} stages x {repeats} repeats x {per_stage} layers are not the model's {layers} layers"
        )
    plan |= {"schedule": "interleaved", "virtual_pipeline": repeats} if repeats > 1 else {"schedule": "gpipe"}
    micro_batches = settings.count("num_pipeline_microbatches", -1, filled_up=True)
    return per_pass / (stages if micro_batches == -1 else micro_batches)


def _recompute(settings: Settings) -> Any:
    policy = settings.take("remat_policy", "full")
    known = {name: modules for modules, name in REMATERIALISATION.items() if "moe" not in modules}
    known["minimal_flash"] = known["minimal_with_context"]  # its older name
    if policy in known:
        swap = {"mlp": "moe"} if settings.peek("num_experts", 1) > 1 else {}
        modules = {swap.get(module, module) for module in known[policy]}
        return {"modules": [module for module in RECOMPUTE_MODULES if module in modules]}
    if policy != "full":
        settings.note(f"remat_policy = {policy!r} is not carried over: full recomputation is used instead")
    return "full"


def _precision(settings: Settings, *, is_frozen: bool) -> str:
    quantization = settings.take("quantization", "")
    dtype, weights = settings.take("dtype", "bfloat16"), settings.take("weight_dtype", "float32")
    if weights != "float32" and not is_frozen:
        settings.note(f"weight_dtype = {weights!r} is not carried over: weights are trained in fp32")
    if settings.peek("matmul_precision", "default") == "highest" and dtype == "float32":
        settings.take("matmul_precision", "default")  # what fp32 means here
    if quantization in ("fp8", "nanoo_fp8", "fp8_full", "te_fp8_delayedscaling", "te_fp8_currentscaling"):
        return "fp8"
    if quantization:
        raise InputError("a precision that run files do not support", got=f"quantization = {quantization!r}")
    return "fp32" if dtype == "float32" else "bf16"


def _evaluation(settings: Settings, *, accumulated: int) -> dict[str, Any]:
    """When it evaluates, if at all; its batches are a pass's, a run file's a step's."""
    every, passes = settings.take("eval_interval", -1), settings.take("eval_steps", -1)
    target = settings.take("target_eval_loss", 0.0)
    if every <= 0:
        return {}
    if passes <= 0 or passes % accumulated:
        settings.note(f"eval_steps = {passes} is not carried over: whole batches of a step are evaluated")
    batches = {"num_batches": passes // accumulated} if passes >= accumulated else {}
    return {"evaluate": {"every_steps": every, **batches} | ({"target_loss": target} if target else {})}


def _adapters(settings: Settings) -> dict[str, Any]:
    """The task, where it is one of adapters: which modules have one is a pattern of their paths."""
    given = settings.take("lora", {})
    if not given.get("enable_lora", False):
        return {}
    pattern = given.get("lora_module_path") or "|".join(f"decoder/layers/{m}" for m in MODULES.values())
    targets = [
        target for target, module in MODULES.items() if re.fullmatch(pattern, f"decoder/layers/{module}")
    ]
    if settings.peek("num_experts", 1) > 1:
        targets = [target for target in targets if not MODULES[target].startswith("mlp")]
    if not targets:
        raise InputError("adapters of no module that run files name", got=f"lora_module_path = {pattern!r}")
    kind = given.get("lora_weight_qtype") or "full"
    if kind not in tuple(BaseFormat):
        settings.note(f"lora_weight_qtype = {kind!r} is not carried over: frozen weights are not rounded")
        kind = "full"
    if path := given.get("lora_restore_path"):
        settings.note(f"lora_restore_path = {path!r} is not carried over: adapters begin anew")
    values = {"rank": given.get("lora_rank", 0), "alpha": given.get("lora_alpha", 0.0), "base_format": kind}
    return {"task": "lora", "lora": values | {"targets": targets}}


def _steps(settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """How long to train, and the optimizer."""
    take = settings.take
    ours = take("checkpoint_conversion_fn", "none") == COUNTED_FROM_ONE
    steps = settings.count("steps", 150_001, filled_up=True)
    scheduled = settings.count("learning_rate_schedule_steps", -1, filled_up=True)
    steps = scheduled if steps == -1 else steps
    if steps == -1:
        raise InputError("neither steps nor learning_rate_schedule_steps says how long to train")
    scheduled = steps if scheduled == -1 else scheduled
    if scheduled != steps:
        settings.note(
            f"learning_rate_schedule_steps = {scheduled} is not carried over: rates fall until step {steps}"
        )
    warm = int(scheduled * take("warmup_steps_fraction", 0.1))
    schedule = _schedule(settings, whole=scheduled, warm=warm, ours=ours)
    kind = take("opt_type", "adamw")
    if kind not in ("adamw", "adam_pax"):
        raise InputError("an optimizer that run files do not support", got=kind, allowed="adamw")
    clip = take("gradient_clipping_threshold", 1.0)
    optimizer = {
        "learning_rate": take("learning_rate", 3e-5),
        "betas": [take("adam_b1", 0.9), take("adam_b2", 0.95)],
        "epsilon": take("adam_eps", 1e-8),
        "weight_decay": take("adam_weight_decay", 0.1),
        "gradient_clip": clip or None,
        "warmup_steps": warm,
        "final_ratio": take("learning_rate_final_fraction", 0.1),
        **schedule,
    }
    seed, z_loss = take("init_weights_seed", 0), take("z_loss_multiplier", 0.0)
    train: dict[str, Any] = {"steps": steps - 1 if ours else steps, "seed": seed}
    if not take("enable_dropout", True):
        take("dropout_rate", 0.0)
    return train | ({"z_loss": z_loss} if z_loss else {}) | _checkpoint(settings), optimizer


def _schedule(settings: Settings, *, whole: int, warm: int, ours: bool) -> dict[str, Any]:
    kind, style = settings.take("lr_schedule_type", "cosine"), settings.take("wsd_decay_style", "linear")
    falls = int(whole * settings.take("wsd_decay_steps_fraction", 0.1))
    if kind == "cosine":
        return {"schedule": "cosine"}
    if style != "linear":
        settings.note(f"wsd_decay_style = {style!r} is not carried over: the rate falls linearly")
    if not falls:
        return {"schedule": "constant"}
    if falls == whole - warm:
        return {"schedule": "linear"}
    return {"schedule": "wsd", "decay_ratio": (falls - 1) / (whole - 1) if ours else falls / whole}


def _checkpoint(settings: Settings) -> dict[str, Any]:
    take = settings.take
    saves, every = take("enable_checkpointing", True), take("checkpoint_period", 10_000)
    folder, asynchronous = (
        take("base_output_directory", "") or "checkpoints",
        take("async_checkpointing", True),
    )
    keep = take("max_num_checkpoints_to_keep", None)
    if not saves or every == ENDLESS:
        return {}
    kept = {"keep": keep} if isinstance(keep, int) else {}
    return {"checkpoint": {"folder": folder, "every_steps": every, "asynchronous": asynchronous} | kept}
