"""Arguments of Megatron-LM's `pretrain_gpt.py` as run files; `options` reads them.

Every option is carried over, ignored because it does not concern training, or named in a note. Notes also name options
that contradict each other. Absent options have the defaults of Megatron-LM core_v0.16.1: megatron/training/arguments.py
and the configuration classes from which it generates options.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from meshwright.engines import refusals
from meshwright.engines.base import Imported, StatedCluster
from meshwright.engines.megatron.megatron_core.constructors import LR_DECAY_STYLES
from meshwright.engines.megatron.megatron_lm.model_options import count_layers, model_section
from meshwright.engines.megatron.megatron_lm.options import MegatronOptions, read
from meshwright.engines.megatron.megatron_lm.parallel_options import ParallelDegrees, clusters_of, plan_section
from meshwright.engines.megatron.megatron_lm.switch_options import stack_section
from meshwright.errors import InputError
from meshwright.specs.hardware import Cluster

FP8 = {"delayed": "fp8_delayed", "tensorwise": "fp8", "blockwise": "fp8_blockwise", "mxfp8": "mxfp8"}
PER_TENSOR = ("delayed", "tensorwise")
"""Recipes of fp8 whose gradients have a format of their own."""
SCHEDULES = {style: schedule.value for schedule, style in LR_DECAY_STYLES.items()}
DECAY_SHAPES = {"minus_sqrt": "sqrt", **{name: name for name in ("linear", "cosine", "exponential")}}
ELSEWHERE = {
    "yaml-cfg": "Megatron-LM takes all settings from that file: import the same settings as options",
    "spec": "layers of a module of its own have other shapes and kernels: leave it out where they are GPT's own layers",
}
"""Options that name a file which describes the run, or its layers, in place of the other options."""
OTHERWISE = (
    "decoder-num-layers", "decoder-seq-length", "encoder-num-layers", "freeze-all-layers", "logits-load-dir",
    "perform-rl-step",
)  # fmt: skip
"""Options with which another model than GPT is trained, or none, or the program distils or generates."""
FROM_CHECKPOINT = {
    "use-checkpoint-args": "the shapes of the model",
    "use-mp-args-from-checkpoint-args": "tensor and pipeline parallelism",
}
"""Flags with which Megatron-LM takes something from the arguments that its checkpoint was trained with."""
Z_LOSS = 1e-4  # of --use-z-loss: tensor_parallel/cross_entropy.py of the forks that have it
DIGITS = 12  # of a ratio of learning rates: `0.1 * lr / lr` is not exactly 0.1


def import_arguments(source: str, *, cluster: StatedCluster, ignore: Collection[str] = ()) -> Imported:
    """Return the run on `cluster` that `source` describes, without the unknown options of `ignore`.

    Raises InputError for what cannot be read, expanded or expressed in a run file.
    """
    options = read(source, ignore=ignore)
    for name, hint in ELSEWHERE.items():
        if values := options.paths(name):
            raise InputError(
                f"{options.where(options.taken[name])}: --{name} names a description of the run that is not read",
                got=" ".join(values), allowed="options that describe the run", hint=hint,
            )  # fmt: skip
    for name in OTHERWISE:
        if options.flag(name):
            where = options.where(options.taken[name])
            raise InputError(
                f"{where}: a training that run files cannot express: --{name}", allowed="a pretraining of GPT"
            )
    return run_of_options(options, cluster=cluster)


def run_of_options(options: MegatronOptions, *, cluster: StatedCluster, model: str | None = None) -> Imported:
    """Return the run on `cluster` that `options` describe, with the catalogue's `model` for options without a model."""
    from meshwright.runfile import named_cluster

    target = named_cluster(cluster, may_have_parts=True)
    count_layers(options)
    degrees = ParallelDegrees.of(options, cluster=target)
    length, limit = options.integer("seq-length", 0), options.integer("max-position-embeddings", 0)
    if not length:
        raise InputError("the arguments lack --seq-length", got=str(options.path))
    if limit and limit < length:
        options.note(f"--seq-length {length} is more than --max-position-embeddings {limit}: Megatron-LM refuses it")
    for name, taken in FROM_CHECKPOINT.items():
        if options.flag(name):
            options.note(f"--{name}: Megatron-LM takes {taken} from the checkpoint; here the arguments decide")
    section = model or model_section(options, name=options.path.stem)
    for name in ("num-layers", "num-experts"):
        options.text(name)  # read, also where the catalogue has the model
    whole, micro = _batch(options, degrees, target)
    train, optimizer = _steps(options, global_batch=whole)
    precision, plan = _precision(options), plan_section(options, degrees)
    content = {
        "model": section,
        "data": {"source": _source(options), "sequence_length": length},
        "batch": {"global_sequences": whole, "micro": micro},
        "optimizer": optimizer,
        "precision": precision,
        "cluster": cluster,
        "engine": "megatron",
        "parallel": plan,
        "stack": stack_section(options, plan, precision=precision, accelerator=target.accelerator),
        "train": train | _losses(options),
    }
    return Imported(content=content, notes=tuple(options.notes()))


def _batch(options: MegatronOptions, degrees: ParallelDegrees, cluster: Cluster) -> tuple[int, int]:
    """Return the sequences of the global batch and of a micro-batch."""
    micro = options.integer("micro-batch-size", 0)
    if micro < 1:
        raise InputError("the arguments lack --micro-batch-size", got=str(options.path))
    whole = options.integer("global-batch-size", micro * degrees.data)
    if whole < 1 or whole % (micro * degrees.data):
        replica = cluster.num_devices // degrees.data
        unit = math.lcm(replica, degrees.pipeline * degrees.expert * degrees.expert_tensor)
        is_whole = whole > 0 and not whole % micro
        raise InputError(
            "the batch cannot be split over the data ranks",
            got=f"--global-batch-size {whole}",
            allowed=f"multiples of {micro} x {degrees.data}",
            hint=clusters_of(cluster, multiple_of=unit, micro_batches=whole // micro, replica=replica)
            if is_whole
            else None,
        )
    return whole, micro


def _source(options: MegatronOptions) -> str:
    paths, is_mock = options.paths("data-path"), options.flag("mock-data")
    named = ("train-data-path", "data-args-path", "per-split-data-args-path")
    blend = [path for name in named for path in options.paths(name)]
    if len(paths) == 1 and not is_mock and options.is_known("data-path"):
        return f"{paths[0]}.bin"
    if (paths or blend) and not is_mock:
        options.note(f"data of {' '.join((*paths, *blend))} is not carried over: random tokens are used instead")
    return "synthetic"


def _precision(options: MegatronOptions) -> str:
    is_fp16, is_bf16 = options.flag("fp16"), options.flag("bf16")
    fp8, fp4 = options.text("fp8-format"), options.text("fp4-format")
    if (fp8 or fp4) and not is_bf16:
        options.note("8 and 4 bits without --bf16 are carried over with weights in bf16")
    recipe = options.text("fp8-recipe", "delayed")
    if is_fp16 and is_bf16:
        raise InputError("--fp16 and --bf16 are both given")
    if fp4:
        if (recipe4 := options.text("fp4-recipe", "nvfp4")) != "nvfp4":
            raise InputError(
                "a precision that run files do not support", got=f"--fp4-recipe {recipe4}", allowed="nvfp4"
            )
        return "nvfp4"
    if fp8:
        if recipe not in FP8:
            allowed = ", ".join(FP8)
            raise InputError("a precision that run files do not support", got=f"--fp8-recipe {recipe}", allowed=allowed)
        if fp8 == "e4m3" and recipe in PER_TENSOR:
            options.note("--fp8-format e4m3 is not carried over: gradients are in E5M2, which has a larger range")
        return FP8[recipe]
    return "fp16" if is_fp16 else "bf16" if is_bf16 else "fp32"


def _steps(options: MegatronOptions, *, global_batch: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the `train` section, except for losses, and the `optimizer` section."""

    def steps_of(name: str) -> int:
        samples, tokens = (options.integer(f"{name}-{unit}", 0) for unit in ("samples", "tokens"))
        steps = options.integer(f"{name}-iters", samples // global_batch)
        of_tokens = tokens // (global_batch * options.integer("seq-length", 1))
        return min(steps or of_tokens, of_tokens) if tokens and name == "train" else of_tokens or steps

    steps = steps_of("train")
    scheduled = steps_of("lr-decay") or steps
    if steps and scheduled != steps:
        options.note(f"Megatron-LM decays the rate until step {scheduled}, Meshwright until the last of {steps} steps")
    kind, rate = options.text("optimizer", "adam"), options.number("lr", 0.0)
    if kind not in ("adam", "adamw"):
        raise InputError("an optimizer that run files do not support", got=kind, allowed="adam")
    if rate <= 0:
        raise InputError("the arguments lack --lr", got=str(options.path))
    ratio = options.number("min-lr", 0.0) / rate
    if ratio > 1:
        raise InputError("--min-lr is more than --lr", got=ratio * rate, allowed=f"<= {rate}")
    warmup = _warmup(options, steps_of("lr-warmup"), scheduled=scheduled, steps=steps)
    optimizer = {
        "learning_rate": rate,
        "betas": [options.number("adam-beta1", 0.9), options.number("adam-beta2", 0.999)],
        "epsilon": options.number("adam-eps", 1e-8),
        "weight_decay": options.number("weight-decay", 0.01),
        "gradient_clip": options.number("clip-grad", 1.0) or None,
        "warmup_steps": warmup,
        "final_ratio": float(f"{ratio:.{DIGITS}g}"),
        **_states(options),
        **_schedule(options, num_decay=steps_of("lr-wsd-decay"), steps=scheduled, warmup=warmup),
    }
    _note_unsupported_rates(options)
    train = {"steps": steps} if steps else {}
    return train | {"seed": options.integer("seed", 1234)} | _checkpoint(options), optimizer


def _states(options: MegatronOptions) -> dict[str, str]:
    """Return the format of the optimizer states. Only the precision-aware optimizer has others than fp32."""

    def dtype_of(name: str) -> str:
        dtype = options.text(name, "fp32").rpartition(".")[2]
        return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(dtype, dtype)

    dtypes = {name: dtype_of(name) for name in ("exp-avg-dtype", "exp-avg-sq-dtype")}
    is_precision_aware = options.flag("use-precision-aware-optimizer")
    for name in ("main-grads-dtype", "main-params-dtype"):
        if (dtype := dtype_of(name)) != "fp32":
            options.note(f"--{name} {dtype} is not carried over: it is fp32")
    if {*dtypes.values()} == {"fp32"}:
        return {}
    if not is_precision_aware:
        options.note("--exp-avg-dtype without --use-precision-aware-optimizer: Megatron-LM refuses it")
    elif {*dtypes.values()} == {"bf16"}:
        return {"states": "bf16"}
    given = " ".join(f"--{name} {dtype}" for name, dtype in dtypes.items())
    options.note(f"{given} are not carried over: optimizer states are fp32")
    return {}


def _warmup(options: MegatronOptions, given_steps: int, *, scheduled: int, steps: int) -> int:
    fraction = options.number("lr-warmup-fraction", 0.0)
    if fraction and given_steps:
        options.note("--lr-warmup-fraction and a number of warm-up steps are both given: Megatron-LM refuses that")
    warmup = int(fraction * scheduled) if fraction else given_steps
    if steps and warmup > steps:
        options.note(f"the warm-up of {warmup} steps is longer than the training: it is cut to {steps}")
        return steps
    return warmup


def _schedule(options: MegatronOptions, *, num_decay: int, steps: int, warmup: int) -> dict[str, Any]:
    kind, style = options.text("lr-decay-style", "linear"), options.text("lr-wsd-decay-style", "exponential")
    if kind not in SCHEDULES:
        allowed = ", ".join(SCHEDULES)
        got = f"--lr-decay-style {kind}"
        raise InputError("a schedule that run files do not support", got=got, allowed=allowed)
    if kind != "WSD":
        return {"schedule": SCHEDULES[kind]}
    if style not in DECAY_SHAPES:
        raise InputError("an unknown decay", got=f"--lr-wsd-decay-style {style}", allowed=", ".join(DECAY_SHAPES))
    ratio = {"decay_ratio": num_decay / steps} if num_decay and steps else {}
    for note in refusals.early_fall_note(decay=num_decay, steps=steps, warmup=warmup) if ratio else ():
        options.note(note)
    return {"schedule": "wsd", **ratio, "decay_shape": DECAY_SHAPES[style]}


def _note_unsupported_rates(options: MegatronOptions) -> None:
    """Add notes on changing rates and batches that run files do not support."""
    for name in ("decoupled-lr", "decoupled-min-lr", "start-weight-decay", "end-weight-decay", "lr-warmup-init"):
        if value := options.number(name, 0.0):
            options.note(f"--{name} {value:g} is not carried over: all parameters have one rate")
    for name in ("rampup-batch-size", "step-batch-size-schedule"):
        if ramp := options.values(name):
            options.note(f"--{name} {' '.join(ramp)} is not carried over: the batch size is constant")


def _checkpoint(options: MegatronOptions) -> dict[str, Any]:
    folder, every = "".join(options.paths("save")), options.integer("save-interval", 0)
    loaded, is_asynchronous = "".join(options.paths("load")), options.flag("async-save")
    if loaded and loaded != folder and options.is_known("load"):
        options.note(f"--load {loaded} is not carried over: training starts from random weights")
    evaluates, every_eval = options.integer("eval-iters", 100), options.integer("eval-interval", 1000)
    if evaluates and any(name in options for name in ("eval-iters", "eval-interval")):
        options.note(f"evaluation is not carried over: {evaluates} batches every {every_eval} steps")
    if not folder or not every:
        return {}
    if not options.is_known("save"):
        options.note(f"--save {folder} cannot be expanded: checkpoints go to ./checkpoints")
        folder = "checkpoints"
    return {"checkpoint": {"folder": folder, "every_steps": every, "asynchronous": is_asynchronous}}


def _losses(options: MegatronOptions) -> dict[str, Any]:
    """Return the losses and bias updates of experts, and the weight of multi-token prediction."""
    kinds = [*options.values("moe-router-load-balancing-type")] or ["aux_loss"]
    weights, rate = ([*options.values("moe-aux-loss-coeff")], options.number("moe-router-bias-update-rate", 1e-3))
    z_loss = options.number("z-loss-strength", Z_LOSS if options.flag("use-z-loss") else 0.0)
    given: dict[str, Any] = {"z_loss": z_loss} if z_loss else {}
    if options.integer("mtp-num-layers", 0):
        given["mtp_loss_weight"] = options.number("mtp-loss-scaling-factor", 0.1)
    if "num-experts" not in options:
        return given
    if router_z_loss := options.number("moe-z-loss-coeff", 0.0):
        given["router_z_loss"] = router_z_loss
    if options.text("moe-router-score-function") == "sigmoid":
        given["balance_bias_rate"] = rate
    if len(kinds) > 1 or kinds[0] == "sinkhorn":
        options.note(f"--moe-router-load-balancing-type {' '.join(kinds)} is not carried over")
        return given
    try:
        weight = float(weights[0]) if weights and kinds[0] != "none" else 0.0
    except ValueError:
        raise InputError("--moe-aux-loss-coeff is not a number", got=weights[0]) from None
    if weight and kinds[0] != "seq_aux_loss":
        options.note(f"{kinds[0]} is not computed per sequence, unlike the run file's train.balance_loss")
    return given | ({"balance_loss": weight} if weight else {})
