"""Arguments of Megatron-LM's `pretrain_gpt.py` as run files; `options` says where they are read from.

Every option is carried, known to mean nothing here, or named in a note; so are options that contradict each other.
What is not said takes the defaults of Megatron-LM core_v0.16.1: megatron/training/arguments.py and the configurations
of which it makes options.
"""

from __future__ import annotations

from typing import Any

from meshwright.engines.base import Imported
from meshwright.engines.megatron.megatron_lm.model_options import model_section
from meshwright.engines.megatron.megatron_lm.options import Options, read
from meshwright.engines.megatron.megatron_lm.parallel_options import Degrees, plan_section
from meshwright.errors import InputError

FP8 = {"delayed": "fp8", "tensorwise": "fp8", "blockwise": "fp8_blockwise", "mxfp8": "mxfp8"}
PEAKS = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
DIGITS = 12  # of a quotient of rates: `0.1 * lr / lr` is not 0.1 to the last bit


def import_arguments(source: str, *, cluster: str) -> Imported:
    """The run that `source` describes on `cluster`.

    Raises InputError for what cannot be read, expanded or said in a run file.
    """
    return run_of_options(read(source), cluster=cluster)


def run_of_options(options: Options, *, cluster: str, model: str | None = None) -> Imported:
    """The run that `options` describe on `cluster`, with the catalogue's `model` where they say none."""
    from meshwright import catalog

    degrees = Degrees.of(options, num_devices=catalog.cluster(cluster).num_devices)
    length, longest = options.whole("seq-length", 0), options.whole("max-position-embeddings", 0)
    if not length:
        raise InputError("the arguments lack --seq-length", got=str(options.path))
    if longest and longest < length:
        options.note(
            f"--seq-length {length} is more than --max-position-embeddings {longest}: Megatron-LM refuses it"
        )
    section = model or model_section(options, name=options.path.stem)
    for name in ("num-layers", "num-experts"):
        options.word(name)  # of the catalogue's model too
    micro = options.whole("micro-batch-size", 0)
    if micro < 1:
        raise InputError("the arguments lack --micro-batch-size", got=str(options.path))
    whole = options.whole("global-batch-size", micro * degrees.data)
    if whole < 1 or whole % (micro * degrees.data):
        raise InputError(
            "the batch cannot be split over the data ranks", got=f"--global-batch-size {whole}",
            allowed=f"multiples of {micro} x {degrees.data}",
        )  # fmt: skip
    train, optimizer = _steps(options, global_batch=whole)
    content = {
        "model": section,
        "data": {"source": _source(options), "sequence_length": length},
        "batch": {"global_sequences": whole, "micro": micro},
        "optimizer": optimizer,
        "precision": _precision(options),
        "cluster": cluster,
        "engine": "megatron",
        "parallel": plan_section(options, degrees),
        "train": train | _losses(options),
    }
    return Imported(content=content, notes=tuple(options.notes()))


def _source(options: Options) -> str:
    paths, is_mock = options.words("data-path"), options.flag("mock-data")
    named = ("train-data-path", "data-args-path", "per-split-data-args-path")
    blend = [path for name in named for path in options.words(name)]
    if len(paths) == 1 and not is_mock and "$" not in paths[0]:
        return f"{paths[0]}.bin"
    if (paths or blend) and not is_mock:
        options.note(
            f"data of {' '.join((*paths, *blend))} are not carried over: random tokens are used instead"
        )
    return "synthetic"


def _precision(options: Options) -> str:
    narrow, wide = options.flag("fp16"), options.flag("bf16")
    fp8, fp4 = options.word("fp8-format"), options.word("fp4-format")
    recipe = options.word("fp8-recipe", "delayed")
    if narrow and wide:
        raise InputError("--fp16 and --bf16 are both said")
    if fp4:
        if (recipe4 := options.word("fp4-recipe", "nvfp4")) != "nvfp4":
            raise InputError(
                "a precision that run files do not support", got=f"--fp4-recipe {recipe4}", allowed="nvfp4"
            )
        return "nvfp4"
    if fp8:
        if recipe not in FP8:
            allowed = ", ".join(FP8)
            raise InputError(
                "a precision that run files do not support", got=f"--fp8-recipe {recipe}", allowed=allowed
            )
        return FP8[recipe]
    return "fp16" if narrow else "bf16" if wide else "fp32"


def _steps(options: Options, *, global_batch: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """How long to train, and the optimizer."""

    def steps_of(name: str) -> int:
        samples = options.whole(f"{name}-samples", 0)
        return options.whole(f"{name}-iters", samples // global_batch)

    steps = steps_of("train")
    scheduled = steps_of("lr-decay") or steps
    if steps and scheduled != steps:
        options.note(f"the rate falls until step {scheduled} there, here until the last of {steps}")
    kind, rate = options.word("optimizer", "adam"), options.number("lr", 0.0)
    if kind not in ("adam", "adamw"):
        raise InputError("an optimizer that run files do not support", got=kind, allowed="adam")
    if rate <= 0:
        raise InputError("the arguments lack --lr", got=str(options.path))
    ratio = options.number("min-lr", 0.0) / rate
    if ratio > 1:
        raise InputError("--min-lr is more than --lr", got=ratio * rate, allowed=f"<= {rate}")
    optimizer = {
        "learning_rate": rate,
        "betas": [options.number("adam-beta1", 0.9), options.number("adam-beta2", 0.999)],
        "epsilon": options.number("adam-eps", 1e-8),
        "weight_decay": options.number("weight-decay", 0.01),
        "gradient_clip": options.number("clip-grad", 1.0) or None,
        "warmup_steps": _warmup(options, steps_of("lr-warmup"), scheduled=scheduled, steps=steps),
        "final_ratio": float(f"{ratio:.{DIGITS}g}"),
        **_states(options),
        **_falling(options, falling=steps_of("lr-wsd-decay"), steps=scheduled),
    }
    _refuse_other_rates(options)
    train = {"steps": steps} if steps else {}
    return train | {"seed": options.whole("seed", 1234)} | _checkpoint(options), optimizer


def _states(options: Options) -> dict[str, str]:
    """How the two moments are kept. Others than fp32 are the precision-aware optimizer's alone."""

    def kind_of(name: str) -> str:
        word = options.word(name, "fp32").rpartition(".")[2]
        return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(word, word)

    kinds = {name: kind_of(name) for name in ("exp-avg-dtype", "exp-avg-sq-dtype")}
    is_aware = options.flag("use-precision-aware-optimizer")
    for name in ("main-grads-dtype", "main-params-dtype"):
        if (kind := kind_of(name)) != "fp32":
            options.note(f"--{name} {kind} is not carried over: it is fp32")
    if {*kinds.values()} == {"fp32"}:
        return {}
    if not is_aware:
        options.note("--exp-avg-dtype without --use-precision-aware-optimizer: Megatron-LM refuses it")
    elif {*kinds.values()} == {"bf16"}:
        return {"states": "bf16"}
    words = " ".join(f"--{name} {kind}" for name, kind in kinds.items())
    options.note(f"{words} are not carried over: moments are fp32")
    return {}


def _warmup(options: Options, counted: int, *, scheduled: int, steps: int) -> int:
    share = options.number("lr-warmup-fraction", 0.0)
    if share and counted:
        options.note("--lr-warmup-fraction is said beside a number of steps: Megatron-LM refuses both")
    warm = int(share * scheduled) if share else counted
    if steps and warm > steps:
        options.note(f"the warm-up of {warm} steps is longer than the training: it is cut to {steps}")
        return steps
    return warm


def _falling(options: Options, *, falling: int, steps: int) -> dict[str, Any]:
    kind, style = options.word("lr-decay-style", "linear"), options.word("lr-wsd-decay-style", "exponential")
    if kind not in PEAKS:
        raise InputError(
            "rates that run files do not support", got=f"--lr-decay-style {kind}", allowed=", ".join(PEAKS)
        )
    if kind != "WSD":
        return {"schedule": PEAKS[kind]}
    if style != "linear":
        options.note(f"--lr-wsd-decay-style {style} is not carried over: the rate falls linearly")
    return {"schedule": "wsd"} | ({"decay_ratio": falling / steps} if falling and steps else {})


def _refuse_other_rates(options: Options) -> None:
    """Rates and batches that change where a run file's do not."""
    for name in (
        "decoupled-lr",
        "decoupled-min-lr",
        "start-weight-decay",
        "end-weight-decay",
        "lr-warmup-init",
    ):
        if value := options.number(name, 0.0):
            options.note(f"--{name} {value:g} is not carried over: one rate is everywhere")
    if ramp := options.words("rampup-batch-size"):
        options.note(
            f"--rampup-batch-size {' '.join(ramp)} is not carried over: the batch has its whole size at once"
        )


def _checkpoint(options: Options) -> dict[str, Any]:
    folder, every = options.word("save"), options.whole("save-interval", 0)
    loaded, is_asynchronous = options.word("load"), options.flag("async-save")
    if loaded and loaded != folder and "$" not in loaded:
        options.note(f"--load {loaded} is not carried over: training starts from random weights")
    evaluates, every_eval = options.whole("eval-iters", 100), options.whole("eval-interval", 1000)
    if evaluates and any(name in options for name in ("eval-iters", "eval-interval")):
        options.note(f"evaluation is not carried over: {evaluates} batches every {every_eval} steps")
    if not folder or not every:
        return {}
    if "$" in folder:
        options.note(f"--save {folder} cannot be expanded: checkpoints go to checkpoints")
        folder = "checkpoints"
    return {"checkpoint": {"folder": folder, "every_steps": every, "asynchronous": is_asynchronous}}


def _losses(options: Options) -> dict[str, Any]:
    """What is added to the loss of a mixture."""
    kinds = options.words("moe-router-load-balancing-type") or ("aux_loss",)
    weights, rate = options.words("moe-aux-loss-coeff"), options.number("moe-router-bias-update-rate", 1e-3)
    if "num-experts" not in options:
        return {}
    given = {"balance_bias_rate": rate} if options.word("moe-router-score-function") == "sigmoid" else {}
    if len(kinds) > 1 or kinds[0] == "sinkhorn":
        options.note(f"--moe-router-load-balancing-type {' '.join(kinds)} is not carried over")
        return given
    try:
        weight = float(weights[0]) if weights and kinds[0] != "none" else 0.0
    except ValueError:
        raise InputError("--moe-aux-loss-coeff is not a number", got=weights[0]) from None
    if weight and kinds[0] != "seq_aux_loss":
        options.note(f"{kinds[0]} is not counted in every sequence, as the run file's train.balance_loss is")
    return given | ({"balance_loss": weight} if weight else {})
