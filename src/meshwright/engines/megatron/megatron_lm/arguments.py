"""A run as arguments of Megatron-LM's `pretrain_gpt.py`, one per line. Pure.

    torchrun ... pretrain_gpt.py $(grep -v '^#' megatron_lm.args)

Most arguments have the names of the constructors' arguments (`megatron_core`). The names that its parser accepts, with
the number of their values, are in `options.json`. Megatron-LM has its own shuffling: it trains the same model with the
same plan, but not with the same batches.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.engines.megatron.megatron_core import constructors
from meshwright.engines.megatron.switches import FLASH_ATTENTIONS, gathers_in_fp8, reduces_in_fp32, transformer_switches
from meshwright.engines.megatron.unestimated import names_of_forks
from meshwright.engines.software_line import software_line
from meshwright.specs.model import AttentionKind, RopeScaling
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run

RENAMED = {
    "num_moe_experts": "num-experts", "layernorm_epsilon": "norm-epsilon", "clip_grad": "clip-grad",
    "fp8": "fp8-format", "fp4": "fp4-format", "layernorm_zero_centered_gamma": "apply-layernorm-1p",
}  # fmt: skip
SET_OTHERWISE = {  # under other names, or by other arguments
    "activation_func", "gated_linear_unit", "add_bias_linear", "params_dtype", "pipeline_dtype", "vocab_size",
    "max_sequence_length", "share_embeddings_and_output_weights", "virtual_pipeline_model_parallel_size",
    "overlap_p2p_comm", "batch_p2p_comm", "decoupled_weight_decay", "rope_scaling", "grad_reduce_in_fp32", "lr",
    "cpu_offloading",
    *constructors.UNFUSED,
}  # fmt: skip
LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


@cache
def known_names(*, later: bool = False) -> dict[str, str]:
    """Return the options of Megatron-LM's parser with the number of their values: `nothing`, `one` or `several`.

    `later`: with those that releases after core_v0.16.1 and forks have added.
    """
    found = json.loads(Path(__file__).with_name("options.json").read_text(encoding="utf-8"))
    return (names_of_forks() if later else {}) | found["names"] | (found["later"]["names"] if later else {})


def arguments_text(run: Run, plan: Plan) -> str:
    """Return the text of the file."""
    lacks = ("attention",) if run.stack.features.attention in FLASH_ATTENTIONS else ()
    return software_line(run, lacks=lacks) + "".join(f"{line}\n" for line in arguments(run, plan))


def arguments(run: Run, plan: Plan) -> list[str]:
    """Return the options with their values as lines."""
    settings = constructors.settings_of(run, plan)
    merged: constructors.Settings = settings["transformer"] | transformer_switches(run, plan)
    merged |= settings["ddp"] | settings["optimizer"]
    merged |= {k: v for k, v in settings["gpt"].items() if k != "rotary_base"}
    lines = [line for key, value in merged.items() if key not in SET_OTHERWISE for line in _option(key, value)]
    if merged["cuda_graph_impl"] == "local":
        lines.append("--no-check-for-nan-in-loss-and-grad")  # validate_args demands it: the check synchronizes
    training = [line for key, value in constructors.loop(run, plan).items() for line in _option(key, value)]
    # Formats between ranks that are not the defaults of Megatron-LM.
    formats = [] if reduces_in_fp32(run) else ["--grad-reduce-in-bf16"]
    formats += ["--fp8-param-gather"] if gathers_in_fp8(run) else []
    return [*lines, *formats, *_shape(run), *training, *_data(run)]


def _option(key: str, value: Any) -> list[str]:
    """Return a setting as a line; no line for False and None."""
    if value is None or value is False:
        return []
    name = RENAMED.get(key, key.replace("_", "-"))
    if value is True:
        return [f"--{name}"]
    if key == "pipeline_model_parallel_layout":
        return [f"--{name} {layout_letters(value)}"]
    if key == "moe_layer_freq" and isinstance(value, list):
        return [f"--{name} ([0]*{value.count(0)}+[1]*{value.count(1)})"]
    if key.startswith("window"):
        value = str(value).replace(" ", "") if key.endswith("freq") else ",".join(map(str, value))
    text = " ".join(map(str, value)) if isinstance(value, list) else value
    return [f"--{name} {text}"]


def layout_letters(stages: list[list[str]]) -> str:
    """Return a pipeline layout in Megatron's letters.

    >>> layout_letters([["embedding", "decoder"], ["decoder", "loss"]])
    'Et|tL'
    """
    return "|".join("".join(LETTERS[part] for part in stage) for stage in stages)


def _shape(run: Run) -> list[str]:
    model = run.model
    lines = [
        "--use-mcore-models", *(("--swiglu",) if model.gated_ffn else ()),
        *(() if constructors.biases(model) == constructors.ALL else ("--disable-bias-linear",)),
        *(() if model.attention.kind is AttentionKind.MLA else ("--group-query-attention",)),
        f"--seq-length {run.sequence_length}", f"--max-position-embeddings {run.sequence_length}",
        *(() if model.learned_positions else (f"--rotary-base {round(model.rope.theta)}",)),
        f"--vocab-size {model.vocab}",
        "--make-vocab-size-divisible-by 1",
    ]  # fmt: skip
    fused = constructors.fused_kernels(run)
    lines += [] if fused["apply_rope_fusion"] else ["--no-rope-fusion"]
    # All of `UNFUSED` are defaults of Megatron-LM.
    lines += [line for key, value in fused.items() if key not in constructors.UNFUSED for line in _option(key, value)]
    if not model.tied_embeddings:
        lines.append("--untie-embeddings-and-output-weights")
    return [*lines, "--use-rope-scaling"] if model.rope.scaling is RopeScaling.LLAMA3 else lines


def _data(run: Run) -> list[str]:
    if run.data.is_synthetic:
        return ["--mock-data", "--tokenizer-type NullTokenizer"]
    tokens = token_files(run)
    return [f"--data-path {tokens}", "--tokenizer-type NullTokenizer"] if tokens else []


def token_files(run: Run) -> str | None:
    """Return Megatron's token files without the ending; None: the user must choose the data.

    A mixture is a blend: weights and files in turns.
    """
    places = [source.path for source in run.data.sources.values()]
    if not all(place.endswith((".bin", ".idx")) for place in places):
        return None
    if isinstance(run.data.source, str):
        return places[0][:-4]
    return " ".join(f"{source.weight:g} {source.path[:-4]}" for source in run.data.sources.values())
