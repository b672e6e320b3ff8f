"""A run as arguments of Megatron-LM's `pretrain_gpt.py`, one a line. Pure.

    torchrun ... pretrain_gpt.py $(cat megatron_lm.args)

Most of them are the constructors' arguments (`settings`) under their own names; which names its parser has, and how
many values each takes, is in `options.json`. Megatron-LM shuffles by its own rule and has its own fusions, so that
it trains the same model in the same plan, not the same batches.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.engines.megatron.megatron_core.constructors import UNFUSED, Settings, loop, settings_of
from meshwright.specs.model import AttentionKind, RopeScaling
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run

RENAMED = {
    "num_moe_experts": "num-experts",
    "layernorm_epsilon": "norm-epsilon",
    "clip_grad": "clip-grad",
    "fp8": "fp8-format",
    "fp4": "fp4-format",
}
OF_THE_LOOP = {  # set otherwise there, or by what other arguments say
    "activation_func", "gated_linear_unit", "add_bias_linear", "params_dtype", "pipeline_dtype", "vocab_size",
    "max_sequence_length", "share_embeddings_and_output_weights", "virtual_pipeline_model_parallel_size",
    "overlap_p2p_comm", "batch_p2p_comm", "decoupled_weight_decay", "rope_scaling", "grad_reduce_in_fp32", "lr",
    *UNFUSED,
}  # fmt: skip
LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


@cache
def known_names() -> dict[str, str]:
    """Options of Megatron-LM's parser: `nothing`, `one` or `several` values."""
    path = Path(__file__).with_name("options.json")
    return json.loads(path.read_text(encoding="utf-8"))["names"]


def arguments_text(run: Run, plan: Plan) -> str:
    """The file."""
    return "".join(f"{line}\n" for line in arguments(run, plan))


def arguments(run: Run, plan: Plan) -> list[str]:
    """Options with their values, one a line."""
    settings = settings_of(run, plan)
    merged: Settings = settings["transformer"] | settings["ddp"] | settings["optimizer"]
    merged |= {k: v for k, v in settings["gpt"].items() if k != "rotary_base"}
    lines = [line for key, value in merged.items() if key not in OF_THE_LOOP for line in _option(key, value)]
    training = [line for key, value in loop(run, plan).items() for line in _option(key, value)]
    return [*lines, *_shape(run), *training, *_data(run)]


def _option(key: str, value: Any) -> list[str]:
    """One setting as an option; what is off, or not said, is left out."""
    if value is None or value is False:
        return []
    name = RENAMED.get(key, key.replace("_", "-"))
    if value is True:
        return [f"--{name}"]
    if key == "pipeline_model_parallel_layout":
        return [f"--{name} {lettered(value)}"]
    if key == "moe_layer_freq" and isinstance(value, list):
        return [f"--{name} ([0]*{value.count(0)}+[1]*{value.count(1)})"]
    words = " ".join(map(str, value)) if isinstance(value, list) else value
    return [f"--{name} {words}"]


def lettered(stages: list[list[str]]) -> str:
    """A layout in Megatron's letters.

    >>> lettered([["embedding", "decoder"], ["decoder", "loss"]])
    'Et|tL'
    """
    return "|".join("".join(LETTERS[part] for part in stage) for stage in stages)


def _shape(run: Run) -> list[str]:
    model = run.model
    lines = [
        "--use-mcore-models", "--swiglu", "--disable-bias-linear",
        *(() if model.attention.kind is AttentionKind.MLA else ("--group-query-attention",)),
        f"--seq-length {run.sequence_length}", f"--max-position-embeddings {run.sequence_length}",
        f"--rotary-base {round(model.rope.theta)}", f"--vocab-size {model.vocab}",
        "--make-vocab-size-divisible-by 1",
    ]  # fmt: skip
    if not model.tied_embeddings:
        lines.append("--untie-embeddings-and-output-weights")
    return [*lines, "--use-rope-scaling"] if model.rope.scaling is RopeScaling.LLAMA3 else lines


def _data(run: Run) -> list[str]:
    if run.data.source == "synthetic":
        return ["--mock-data", "--tokenizer-type NullTokenizer"]
    tokens = token_files(run)
    return [f"--data-path {tokens}", "--tokenizer-type NullTokenizer"] if tokens else []


def token_files(run: Run) -> str | None:
    """Where Megatron's token files lie, without their endings; other data are for who starts it to say."""
    source = run.data.source
    return source[:-4] if source.endswith((".bin", ".idx")) else None
