"""Configurations of Megatron-Bridge as run files: its fields become options of Megatron-LM, and these a run file.

`files` reads the fields, `megatron_lm` the options. Most names differ only by dashes for underscores. Messages use the
names of the fields. Absent fields have the defaults of their classes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from meshwright.catalog import lookup as catalog
from meshwright.engines import refusals
from meshwright.engines.base import Imported, StatedCluster
from meshwright.engines.megatron.megatron_bridge.configuration import sections
from meshwright.engines.megatron.megatron_bridge.files import DISTILLATION, FIELDS, RECIPE, BridgeFields, read
from meshwright.engines.megatron.megatron_core.constructors import UNFUSED
from meshwright.engines.megatron.megatron_lm.arguments import LETTERS, RENAMED, layout_letters
from meshwright.engines.megatron.megatron_lm.options import MegatronOptions, Option
from meshwright.engines.megatron.megatron_lm.run_content import run_of_options
from meshwright.engines.megatron.unestimated import KEYS
from meshwright.errors import InputError

OPTION_NAMES: dict[str, str] = RENAMED | FIELDS["option_names"]
OPPOSITE: dict[str, str] = FIELDS["opposite"]
COMBINED = tuple(FIELDS["combined"].split())
ADAPTED: dict[str, list[str]] = FIELDS["adapted"]
REFUSED: list[tuple[str, str]] = [(one, other) for one, other in FIELDS["refused"]]

OPTION_SECTIONS = ("model", "train", "validation", "optimizer", "scheduler", "ddp", "dist", "checkpoint", "rng")
"""Sections whose fields are options. Of other sections, only a few fields concern the training."""

SWITCHED_OFF = ("model", "optimizer", "ddp", "dist")
"""Sections in which a field that is on by default is an option where it is off."""

PROVIDERS = re.compile(
    r"(GPT|MLA|Mistral)ModelProvider|GPTProvider\w+|MistralSmall3ModelProvider24B|KimiK2Provider|"
    r"(Code)?Llama(2|3|31|32)?ModelProvider\w*|Qwen(2|25|3|3MoE)ModelProvider\w*|MoonlightModelProvider16B|"
    r"GPTOSSProvider\w*|Qwen3NextModelProvider\w*|"
    r"DeepSeek(V2|V2Lite|V3)?ModelProvider|(GLMMoE|GLM45|GLM45Air)ModelProvider\w*"
)
"""Classes of models that are determined by their fields."""

ACTIVATIONS = (
    ("silu", True), ("quick_gelu", True), ("gelu", False), ("fast_gelu", False), ("squared_relu", False),
)  # fmt: skip
"""Activation functions of run files, and whether their blocks have a gate."""

DATA = ("GPTDatasetConfig", "MockGPTDatasetConfig")

PRECISIONS = {"mxfp8": "mxfp8", "current": "tensorwise", "delayed": "delayed", "subchannel": "blockwise"}
BF16_ENDS = ("current", "super")
"""Words in names of recipes that keep the first and last layers in 16 bits (training/mixed_precision.py)."""
GATHERED_IN_FP8 = ("mxfp8", "tensorwise", "delayed")
"""Of these, recipes of Megatron-Bridge that set fp8_param_gather."""
OF_RECIPES: dict[str, dict[str, Any]] = {
    "delayed": {"fp8-amax-history-len": 1024, "fp8-amax-compute-algo": "max"},
    "mxfp8": {"reuse-grad-buf-for-mxfp8-param-ag": True},
}
"""Options that recipes of Megatron-Bridge set besides the format."""
MONITORS = ("nvrx_straggler.enabled", "tensor_inspect.enabled")
"""Fields without an option of their own that switch on what observes kernels or tensors in each step."""


def import_configuration(source: str, *, cluster: StatedCluster, ignore: Collection[str] = ()) -> Imported:
    """Return the run on `cluster` that `source` describes, without the unknown fields of `ignore`.

    Raises InputError for what cannot be read or expressed in a run file.
    """
    fields = read(source, ignore=ignore)
    names = {_option_name(name.partition(".")[2]): name for name in fields.given}
    try:
        options = _options(fields)
        found = run_of_options(options, cluster=cluster, model=fields.model)
        content = found.content | _adapters(fields)
    except InputError as error:
        hint = with_field_names(error.hint, fields=names) if error.hint else None
        raise InputError(with_field_names(error.message, fields=names), hint=hint) from None
    translated = [with_field_names(note, fields=names) for note in options.notes()]
    notes = [*contradictions(fields), *translated]
    return Imported(content=content, notes=tuple(dict.fromkeys([*notes, *refusals.ignored_note(ignore)])))


def with_field_names(text: str, *, fields: Mapping[str, str]) -> str:
    """Replace names of options in a message by names of fields; `fields` are those of the configuration by option.

    >>> with_field_names("--num-experts 8 is refused", fields={})
    'model.num_moe_experts 8 is refused'
    """
    known = _fields_of_options() | dict(fields)
    text = re.sub(r"--([a-z][a-z0-9-]*)", lambda found: known.get(found[1], found[0]), text)
    text = text.replace("Megatron-LM", "Megatron-Bridge")
    return text.replace("the arguments lack", "the configuration lacks")


@cache
def _fields_of_options() -> dict[str, str]:
    """Return the fields by their options; of a name in several sections, the first one."""
    found: dict[str, str] = {}
    for section in (*OPTION_SECTIONS, "dataset"):
        declared = sections()[section]
        for key in (*declared.fields, *declared.latent, *declared.others):
            found.setdefault(_option_name(key), f"{section}.{key}")
    opposite = {option: f"model.{field}: false" for field, option in OPPOSITE.items()}
    opposite |= {f"no-{option}": f"{field}: false" for option, field in found.items()}
    others = {name.partition(".")[2]: name for name in DISTILLATION} | {"swiglu": "model.gated_linear_unit"}
    return found | opposite | others | FIELDS["replaced"]


def _option_name(key: str) -> str:
    return OPTION_NAMES.get(key, key.replace("_", "-"))


def _options(fields: BridgeFields) -> MegatronOptions:
    """Return the given fields as options. Of two fields for one option, the later one counts."""
    _check_model(fields)
    found: dict[str, Option] = {}
    changed = {*fields.changed()}
    for name in fields.given:
        option, values = _option_of(name, fields, is_changed=name in changed)
        if values is not None:
            found[option] = Option(values=tuple(values), line=fields.given[name].line)
    if fields.is_complete:  # the fields that a file lacks have the defaults of their classes, which may be off
        absent = [key for key in UNFUSED if f"model.{key}" not in fields.given and fields[f"model.{key}"] is False]
        found |= {f"no-{_option_name(key)}": Option(values=(), line=0) for key in absent}
    lines = {_option_name(name.partition(".")[2]): field.line for name, field in fields.given.items()}
    for option, value in _combined(fields).items():
        values = _values(option, value)
        if values is not None:
            found[option] = Option(values=tuple(values), line=lines.get(option, 0))
    options = MegatronOptions(found, path=fields.path)
    for name in MONITORS:
        if fields[name]:
            options.leave_out(name)
    if not fields.is_complete:
        theirs = "values that all recipes of a kind share, not of one" if fields.recipe else ""
        theirs = theirs or "defaults of their classes, not of a recipe"
        options.note(f"fields that these overrides lack have the {theirs}")
    return options


def _option_of(name: str, fields: BridgeFields, *, is_changed: bool) -> tuple[str, list[str] | None]:
    """Return the option of a given field, and its values; None: it is at its default, harmless, or read with others."""
    section, _, key = name.partition(".")
    option, value = OPPOSITE.get(key) or _option_name(key), fields[name]
    if key in UNFUSED or (section in SWITCHED_OFF and key not in OPPOSITE and fields.defaults.get(name) is True):
        is_harmless = option in KEYS.harmless or name.startswith(COMBINED)
        return f"no-{option}", [] if value is False and not is_harmless else None
    if option in KEYS.unestimated:
        return option, _values(key, value) if is_changed else None
    is_ignored = option in KEYS.harmless or name.startswith(COMBINED) or value in FIELDS["layers"].split()
    if not is_changed or is_ignored or section not in OPTION_SECTIONS:
        return option, None
    return option, _values(key, value)


def _values(key: str, value: Any) -> list[str] | None:
    """Return the values of an option; None: the option is absent."""
    if key in OPPOSITE:
        return None if value else []
    if value is None or value is False or value == []:
        return None
    if value is True:
        return []
    if key == "pipeline_model_parallel_layout" and isinstance(value, list):
        known = all(isinstance(stage, list) and {*stage} <= LETTERS.keys() for stage in value)
        return [layout_letters(value) if known else str(value)]
    if key.endswith("_freq"):
        return [str(value).replace(" ", "")]
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]


def _check_model(fields: BridgeFields) -> None:
    """Raise InputError for models that their fields do not determine, and for files without a model."""
    provider = fields.targets.get("model", "GPTModelProvider")
    if not PROVIDERS.fullmatch(provider):
        raise InputError("a model that run files cannot express", got=provider)
    if fields.model is None and "model.num_layers" not in fields.given:
        raise InputError(
            f"{fields.path} does not contain the model: it changes a recipe",
            hint=f'name its kind (pretrain, sft, peft) and the model, "{fields.path.name} recipe=pretrain '
            f'model=llama3.1-8b", or put the recipe before it; {RECIPE}',
        )


def _combined(fields: BridgeFields) -> dict[str, Any]:
    """Return options that depend on several fields, or whose default differs from the field's."""
    is_on = fields["model.cpu_offloading"] and fields["model.cpu_offloading_activations"]
    multiple = fields.integer("model.make_vocab_size_divisible_by") if fields["model.should_pad_vocab"] else 1
    return {
        **_model(fields),
        **_precision(fields),
        **_data(fields),
        **_training(fields),
        **_overlaps(fields),
        "cpu-offloading-num-layers": fields["model.cpu_offloading_num_layers"] if is_on else None,
        "optimizer-cpu-offload": bool(
            fields["optimizer.optimizer_cpu_offload"] and fields["optimizer.optimizer_offload_fraction"]
        ),  # the field's share is 0 by default, the option's 1
        "make-vocab-size-divisible-by": multiple,
        "cross-entropy-loss-fusion": bool(fields["model.cross_entropy_loss_fusion"]),
    }


def _overlaps(fields: BridgeFields) -> dict[str, Any]:
    """Return which communication is overlapped. A section `comm_overlap` replaces fields of the model and of `ddp`."""
    own = fields.has_section("comm_overlap")
    is_distributed = fields["ddp.use_distributed_optimizer"] or fields["optimizer.use_distributed_optimizer"]
    splits_sequence = fields.integer("model.tensor_model_parallel_size") > 1 and fields["model.sequence_parallel"]

    def overlaps(key: str, *, section: str, default: bool = False) -> bool:
        asked = fields[f"comm_overlap.{key}"] if own else fields[f"{section}.{key}"]
        return default if asked is None else bool(asked)

    gathers = fields["optimizer.overlap_param_gather"] and not own
    data = "comm_overlap" if own and is_distributed else "ddp"
    found = {
        "tp-comm-overlap": overlaps("tp_comm_overlap", section="model") and (splits_sequence or not own),
        "overlap-moe-expert-parallel-comm": overlaps("overlap_moe_expert_parallel_comm", section="model"),
        "delay-wgrad-compute": overlaps("delay_wgrad_compute", section="model") or fields["ddp.delay_wgrad_compute"],
        "no-overlap-p2p-communication": not overlaps("overlap_p2p_comm", section="model", default=True),
    }
    for key in ("overlap_grad_reduce", "overlap_param_gather"):
        asked = fields[f"{data}.{key}"]
        found[_option_name(key)] = data == "comm_overlap" if asked is None else bool(asked)
    return found | ({"overlap-param-gather": True} if gathers else {})


def _model(fields: BridgeFields) -> dict[str, Any]:
    activation, is_gated = fields["model.activation_func"], bool(fields["model.gated_linear_unit"])
    if (activation, is_gated) not in ACTIVATIONS:
        got = f"model.activation_func {activation} {'with' if is_gated else 'without'} a gate"
        raise InputError("a model that run files cannot express", got=got)
    shapes = _shapes(fields)
    experts = shapes.get("num-experts") or fields["model.num_moe_experts"]
    tensor = fields.integer("model.tensor_model_parallel_size")
    expert_tensor = fields["model.expert_tensor_parallel_size"]
    if experts and expert_tensor is None:
        expert_tensor = 1 if fields.integer("model.expert_model_parallel_size") > 1 else tensor
    latent = ("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "rotary_scaling_factor")
    return {
        "swiglu": activation == "silu",
        "quick-geglu": is_gated and activation == "quick_gelu",
        "squared-relu": activation == "squared_relu",
        "activation-func-clamp-value": fields["model.activation_func_clamp_value"],
        "group-query-attention": bool(fields["model.num_query_groups"]),
        "expert-tensor-parallel-size": expert_tensor,
        "rope-scaling-factor": fields["model.rope_scaling_factor"] if fields["model.rope_scaling"] else None,
        **({_option_name(name): fields[f"model.{name}"] for name in latent} if fields.is_latent else {}),
        **shapes,
    }


def _shapes(fields: BridgeFields) -> dict[str, Any]:
    if fields.model is not None:
        known = catalog.model(fields.model)
        experts = known.experts.num_experts if known.experts is not None else None
        return {"num-layers": known.num_layers, "num-experts": experts}
    null = fields["tokenizer.tokenizer_type"] == "NullTokenizer"
    vocab = (fields["tokenizer.vocab_size"] if null else None) or fields["model.vocab_size"]
    if not vocab:
        raise InputError(
            "the size of the vocabulary is in the file of the tokenizer",
            hint=f'give the size: "{fields.path.name} model.vocab_size=32000"',
        )
    learned = fields["model.position_embedding_type"] == "learned_absolute"
    return {
        "vocab-size": vocab,
        "ffn-hidden-size": fields["model.ffn_hidden_size"] or 4 * fields.integer("model.hidden_size"),
        "max-position-embeddings": fields["model.seq_length"] if learned else None,
    }


def _precision(fields: BridgeFields) -> dict[str, Any]:
    """Return the precision of `mixed_precision`, else of the model, and the formats between ranks."""
    named = fields["mixed_precision"]
    if isinstance(named, str):
        parts = named.replace("-", "_").split("_")
        if not {"bf16", "fp16"} & {*parts}:
            raise InputError("a precision that run files do not support", got=f"mixed_precision {named}")
        recipe = next((theirs for part, theirs in PRECISIONS.items() if part in parts), None)
        recipe = "blockwise" if "nanov2" in parts else recipe  # of this one, the name says something else
        return {
            "fp16": "fp16" in parts,
            "bf16": "bf16" in parts,
            "fp8-format": "hybrid" if recipe else None,
            "fp8-recipe": recipe,
            "fp4-format": "e2m1" if "nvfp4" in parts else None,
            "first-last-layers-bf16": bool({*BF16_ENDS} & {*parts}),
            **OF_RECIPES.get(recipe or "", {}),
            **_wire(reduces_in_fp32="bf16" in parts, gathers_in_fp8=recipe in GATHERED_IN_FP8),
        }
    mixed = fields.has_section("mixed_precision")
    section, ddp = ("mixed_precision", "mixed_precision") if mixed else ("model", "ddp")
    return {
        "fp16": fields[f"{section}.fp16"],
        "bf16": fields[f"{section}.bf16"],
        "fp8-format": fields[f"{section}.fp8"],
        "fp8-recipe": fields[f"{section}.fp8_recipe"] if fields[f"{section}.fp8"] else None,
        "fp4-format": fields[f"{section}.fp4"],
        "fp8-dot-product-attention": fields[f"{section}.fp8_dot_product_attention"],
        **_wire(
            reduces_in_fp32=bool(fields[f"{ddp}.grad_reduce_in_fp32"]),
            gathers_in_fp8=bool(fields[f"{ddp}.fp8_param_gather"] or fields[f"{section}.fp8_param"]),
        ),
    }


def _wire(*, reduces_in_fp32: bool, gathers_in_fp8: bool) -> dict[str, bool]:
    """Return the formats of gradients and parameters between data-parallel ranks as options of Megatron-LM."""
    return {
        "accumulate-allreduce-grads-in-fp32": reduces_in_fp32,
        "grad-reduce-in-bf16": not reduces_in_fp32,
        "fp8-param-gather": gathers_in_fp8,
    }


def _data(fields: BridgeFields) -> dict[str, Any]:
    """Return the data: one file of tokens. Notes name all other data."""
    length = fields["dataset.seq_length"] if fields.has_section("dataset") else None
    length = length or fields["dataset.sequence_length"] or fields["model.seq_length"]
    paths, blend = fields["dataset.data_path"] or [], fields["dataset.blend"]
    if isinstance(blend, list) and blend:
        paths = blend[0]
    paths = paths.split() if isinstance(paths, str) else paths
    kind = fields.targets.get("dataset", "GPTDatasetConfig")
    others = [fields[f"dataset.{name}"] for name in ("blend_per_split", "dataset_root", "dataset_name", "source")]
    blends = [str(other) for other in (None if kind in DATA else kind, *others) if other]
    masks = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    return {
        "seq-length": length,
        "data-path": paths or None,
        "train-data-path": blends or None,
        **{_option_name(name): fields[f"dataset.{name}"] for name in masks},
    }


def _training(fields: BridgeFields) -> dict[str, Any]:
    style, steps = fields["scheduler.lr_decay_style"], fields["scheduler.lr_decay_iters"]
    decay_steps = fields["scheduler.max_steps"] or steps
    sharded = fields["ddp.use_megatron_fsdp"] or fields["dist.use_megatron_fsdp"]
    batches = fields["train.eval_iters"] or fields["validation.eval_iters"]
    interval = fields["train.eval_interval"] or fields["validation.eval_interval"]
    wsd = fields["scheduler.lr_wsd_decay_iters"] or decay_steps or fields["train.train_iters"]
    is_wsd = style == "WSD" and not fields["scheduler.lr_wsd_decay_samples"]
    is_distributed = fields["ddp.use_distributed_optimizer"] or fields["optimizer.use_distributed_optimizer"]
    decay = fields["scheduler.end_weight_decay"]
    return {
        "lr-decay-iters": decay_steps,
        "lr-wsd-decay-iters": wsd if is_wsd else None,
        "data-parallel-sharding-strategy": fields["ddp.data_parallel_sharding_strategy"] if sharded else None,
        "eval-iters": batches if batches and interval else None,
        "eval-interval": interval if batches and interval else None,
        "weight-decay": fields["optimizer.weight_decay"] if decay is None else decay,
        "use-distributed-optimizer": is_distributed,
    }


def _adapters(fields: BridgeFields) -> dict[str, Any]:
    """Return LoRA adapters as the run file's task."""
    kind = fields.targets.get("peft", "LoRA")
    if not fields.has_section("peft"):
        return {}
    if kind != "LoRA":
        raise InputError("adapters that run files cannot express", got=kind, allowed="LoRA")
    modules, dropout = fields["peft.target_modules"], fields["peft.dropout"] or 0.0
    return lora_task(modules, rank=fields["peft.dim"] or 32, alpha=fields["peft.alpha"] or 32, dropout=dropout)


def lora_task(modules: list[str] | None, *, rank: int, alpha: float, dropout: float) -> dict[str, Any]:
    """Return the run file's task for adapters of Megatron's `modules`; None: those of all of `ADAPTED`.

    Raises InputError for a module that run files do not adapt.
    """
    targets: list[str] = []
    for module in modules or ADAPTED:
        if module not in ADAPTED:
            raise InputError("a module that run files do not adapt", got=module, allowed=", ".join(ADAPTED))
        targets += ADAPTED[module]
    return {"task": "lora", "lora": {"rank": rank, "alpha": alpha, "dropout": dropout, "targets": targets}}


def contradictions(fields: BridgeFields) -> Iterator[str]:
    """Yield notes on `fields`, except for parallelism, which `megatron_lm` checks."""
    given = fields.given
    lengths = [fields[name] for name in ("model.seq_length", "dataset.seq_length") if name in given]
    if len(lengths) == 2 and lengths[0] != lengths[1]:
        yield f"model.seq_length {lengths[0]} is not dataset.seq_length {lengths[1]}: Megatron-Bridge refuses it"
    for one, other in REFUSED:
        if fields[one] and fields[other]:
            yield f"{one} and {other} are both given: Megatron-Bridge refuses them together"
    decay, scheduled = fields["optimizer.weight_decay"], fields["scheduler.end_weight_decay"]
    if "optimizer.weight_decay" in given and scheduled not in (None, decay):
        yield f"optimizer.weight_decay {decay} has no effect: scheduler.end_weight_decay is {scheduled}"
    first = fields["scheduler.start_weight_decay"]
    if first not in (None, scheduled):
        yield f"weight decay that begins with {first} is not carried over"
    named = fields["mixed_precision"]
    for key in ("bf16", "fp16"):
        wanted = (named is not None and key in str(named)) or fields[f"mixed_precision.{key}"]
        if (named or fields.has_section("mixed_precision")) and fields[f"model.{key}"] and not wanted:
            yield f"model.{key} has no effect: mixed_precision differs"
    sharded = fields["ddp.use_megatron_fsdp"] or fields["dist.use_megatron_fsdp"]
    if sharded and fields["checkpoint.save"] and fields["checkpoint.ckpt_format"] != "fsdp_dtensor":
        yield "use_megatron_fsdp needs checkpoint.ckpt_format fsdp_dtensor: Megatron-Bridge refuses others"
    context, length = fields.integer("model.context_parallel_size"), fields.integer("model.seq_length")
    if context > 1 and "model.seq_length" in given and length % (2 * context):
        yield f"model.seq_length {length} is no multiple of 2 x context {context}: Megatron-Bridge refuses it"
    if fields.has_section("peft") and not fields["checkpoint.pretrained_checkpoint"]:
        yield "peft without checkpoint.pretrained_checkpoint is refused by Megatron-Bridge"
