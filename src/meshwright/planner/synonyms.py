"""Words of other tools for fields of a plan and their values: Megatron, DeepSpeed, PyTorch, Hugging Face.

`--fix` understands them where they mean the same; where they mean something else, `OTHER` says what and the way on.
"""

from __future__ import annotations

from dataclasses import fields

from meshwright.runfile.synonyms import key_for
from meshwright.specs.plan import Plan

SHORT = {
    "tp": "tensor", "cp": "context", "pp": "pipeline", "vpp": "virtual_pipeline", "ep": "expert",
    "etp": "expert_tensor", "mbs": "micro_batch", "dp": "data_shard", "fsdp": "data_shard", "order": "axis_order",
}  # fmt: skip
"""Short names of the degrees, as papers have them, and Megatron-Core's name of the order of ranks."""

_YES, _NO = "true yes on 1", "false no off 0"

_VALUES = {
    "sharding": {
        "none": "0 zero0 stage0 ddp noshard",
        "optimizer": "1 zero1 stage1 distributedoptimizer optim",
        "gradients": "2 zero2 stage2 shardgradop optimgrads",
        "parameters": "3 zero3 stage3 fsdp fsdp2 fullshard optimgradsparams",
    },
    "schedule": {
        "1f1b": "onefoneb pipedreamflush",
        "interleaved": "interleaved1f1b",
        "zero_bubble": "zb zbh1 zb1p zerobubble",
        "zbv": "zbvzerobubble",
        "dualpipev": "",
    },
    "recompute": {"none": _NO, "full": "fulllayers"},
    "offload": {"none": _NO, "optimizer": "optimizerstates"},
    "sequence_parallel": {"true": _YES, "false": _NO},
    "axis_order": {"tp-cp-dp-pp": "tpcpepdppp tpcpdpeppp tpdppp", "tp-cp-pp-dp": "tpcpepppdp tpcpppepdp tpppdp"},
    "recompute_modules": {
        "core_attention": "coreattn coreattention attn",
        "norm": "layernorm rmsnorm",
        "activation": "moeact act swiglu",
        "mla_up_projection": "mlaupproj",
        "mlp": "ffn feedforward",
    },
}  # fmt: skip
"""Our word -> words of other tools for it, without case, hyphens, underscores and PyTorch's `Schedule` in front."""

OTHER = {
    ("sharding", "hsdp"): "sharding=parameters,data_replicate=N: N replicas of one sharded copy",
    ("sharding", "hybridshard"): "sharding=parameters,data_replicate=N: N replicas of one sharded copy",
    ("offload", "cpu"): "offload=optimizer: optimizer states; weights and gradients in host memory are not planned",
    ("offload", "true"): "offload=optimizer: optimizer states; weights and gradients in host memory are not planned",
    ("recompute", "block"): "recompute=full,recompute_layers=N: that many layers of a pipeline rank",
    ("recompute", "uniform"): "recompute=full,recompute_layers=all: every layer keeps its input",
    ("schedule", "interleavedzerobubble"): "interleaved and zero_bubble are schedules, their combination is not costed",
}
"""Values that mean something else here -> the way on."""

OTHER_FIELDS = {
    "ulysses": "the field is 'context', whose ranks pass keys and values on; an all-to-all over heads is not costed",
    "deepspeed_sequence_parallel": "the field is 'context', whose ranks pass keys and values on; an all-to-all over "
    "heads is not costed",
    "gradient_accumulation_steps": "it follows: global batch over micro_batch and data width; hold micro_batch and "
    "data_shard",
    "num_micro_batches": "it follows: global batch over micro_batch and data width; hold micro_batch and data_shard",
    "num_layers_per_virtual_pipeline_stage": "virtual_pipeline counts the stages of a rank: layers over pipeline and "
    "layers of a stage",
    "decoder_first_pipeline_num_layers": "layers_per_stage has the layers of each stage, as in 7,8x14,7",
    "decoder_last_pipeline_num_layers": "layers_per_stage has the layers of each stage, as in 7,8x14,7",
    "pipeline_model_parallel_layout": "layers_per_stage has the layers of each stage, as in 7,8x14,7",
}  # fmt: skip
"""Settings of other tools that are no field of a plan -> the fields that say the same."""


def field_for(name: str) -> str | None:
    """The field of a plan that `name` means, in any tool's words; None where there is none.

    >>> field_for("tensor_model_parallel_size"), field_for("MBS"), field_for("zero-stage"), field_for("precision")
    ('tensor', 'micro_batch', 'sharding', None)
    """
    known = [f.name for f in fields(Plan)]
    word = name.lower().replace("-", "_")
    if word in OTHER_FIELDS:
        return None
    key = key_for(word) or ""
    field = "micro_batch" if key == "batch.micro" else key.removeprefix("parallel.")
    return next((w for w in (word, SHORT.get(word), field) if w in known), None)


def hint_for(name: str) -> str | None:
    """The way on for a name that is no field of a plan; None for a name that no tool has.

    >>> hint_for("gpus")
    "it is the run's and no choice of its plan: the key is 'cluster'"
    """
    word = name.lower().replace("-", "_")
    if word in OTHER_FIELDS:
        return OTHER_FIELDS[word]
    key = key_for(word)
    return key and f"it is the run's and no choice of its plan: the key is {key!r}"


def our_value(field: str, text: str) -> str:
    """`text` in the word that we have for it; as it is where no tool has it.

    >>> our_value("sharding", "FULL_SHARD"), our_value("schedule", "ScheduleZBVZeroBubble"), our_value("tensor", "8")
    ('parameters', 'zbv', '8')
    """
    word = plain(text)
    for ours, others in _VALUES.get(field, {}).items():
        if word in (plain(ours), *others.split()):
            return ours
    return text


def plain(text: str) -> str:
    """`text` without case, hyphens, underscores and `Schedule` in front.

    >>> plain("ZB-H1"), plain("Schedule1F1B")
    ('zbh1', '1f1b')
    """
    return text.lower().replace("-", "").replace("_", "").removeprefix("schedule")
