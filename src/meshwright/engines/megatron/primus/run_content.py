"""Configurations of Primus as run files: their fields become options of Megatron-LM, and these a run file.

`files` merges the fields. Those that are fields of Megatron-LM's parser reach it; of the others, Primus's own patches
use some (primus/backends/megatron/patches at fd1eeabb), and the rest has no effect. Messages use the fields' names.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.engines import refusals
from meshwright.engines.base import Imported, StatedCluster
from meshwright.engines.megatron.megatron_bridge.run_content import ADAPTED, lora_task
from meshwright.engines.megatron.megatron_lm.arguments import known_names
from meshwright.engines.megatron.megatron_lm.options import MegatronOptions, Option
from meshwright.engines.megatron.megatron_lm.run_content import run_of_options
from meshwright.engines.megatron.primus.files import PrimusFields, read
from meshwright.errors import InputError

_FIELDS = tomllib.loads(Path(__file__).with_name("fields.toml").read_text(encoding="utf-8"))
RENAMED: dict[str, str] = _FIELDS["renamed"]
SWITCHED_OFF: dict[str, str] = _FIELDS["switched_off"]
REFUSED = tuple(_FIELDS["refused"].split())
HARMLESS = re.compile(
    r"log_|mlflow_|disable_(wandb|tensorboard|mlflow|last_saving|profiler)|torch_profiler_|odc_|rl_|retro_|inference_|"
    r"(stderr_|file_)?sink_level|wall_clock|auto_continue|use_rocm_mem|dump_pp|trainable|hf_path|bases|model$|stage$|"
    r"legacy_tokenizer|mock_dataset|original_max_position|model_type|enable_primus_turbo|encoder_.*parallel_size|"
    r"async_tensor_model|moe_use_legacy_grouped_gemm|moe_extended_tp|max_samples_per_sequence|sft_|lora$"
)
"""Fields of Primus without effect on the step: logs, profiles, other kinds of training, and those of an older
Megatron-LM."""
TOKENIZERS = ("DeepSeek", "HuggingFace", "KimiK2", "Lfm2", "Llama", "Mixtral")
"""Beginnings of types of tokenizers that Primus loads from Hugging Face."""
MOCK_VOCABULARY = 131_072  # patches/args/mock_data_patches.py
DEEPEP_STAGE = 2  # of turbo_sync_free_moe_stage, from which patches/args/rocm_arg_validation.py takes DeepEP
LORA = {"dim": 32, "alpha": 32, "dropout": 0.0}  # backends/megatron/peft/lora.py
FRAMEWORK = "primus-megatron"


def import_primus(source: str, *, cluster: StatedCluster, ignore: Collection[str] = ()) -> Imported:
    """Return the run on `cluster` that `source` describes, without the unknown fields of `ignore`.

    Raises InputError for what cannot be read or expressed in a run file.
    """
    given = read(source)
    unknown = {name for name in given.of_model if name not in REFUSED and _is_own(name, given)} & {*ignore}
    refusals.unknown_keys(unknown, given.fields.keys() - unknown, program="Primus", ignore=ignore)
    given = replace(given, fields=given.fields | dict.fromkeys(ignore))
    if given.framework != "megatron":
        hint = "import the configuration of that program itself, where `meshwright import --help` names its engine"
        got = f"framework: {given.framework}"
        raise InputError(f"{given.path}: configurations of Primus are read for Megatron-LM", got=got, hint=hint)
    _refuse(given)
    try:
        options = _options(given)
        found = run_of_options(options, cluster=cluster)
    except InputError as error:
        hint = _with_field_names(re.sub(r"(--vocab-size) ", r"\1=", error.hint)) if error.hint else None
        raise InputError(_with_field_names(error.message), hint=hint) from None
    notes = (*(_with_field_names(note) for note in found.notes), *refusals.ignored_note(ignore))
    content = found.content | _adapters(given.fields) | {"stack": found.content["stack"] | {"framework": FRAMEWORK}}
    return replace(found, content=content, notes=notes)


def _adapters(fields: dict[str, Any]) -> dict[str, Any]:
    """Return LoRA adapters as the run file's task."""
    given = fields.get("lora") or {}
    if not given.get("enabled"):
        return {}
    values = LORA | {key: given[key] for key in LORA if given.get(key) is not None}
    modules = given.get("target_modules") or [*ADAPTED]
    if fields.get("multi_latent_attention"):  # has other matrices than linear_qkv
        modules = [module for module in modules if module != "linear_qkv"]
    return lora_task(modules, rank=values["dim"], alpha=values["alpha"], dropout=values["dropout"])


def _refuse(given: PrimusFields) -> None:
    """Raise one InputError with all fields that no run file can express."""
    fields = given.fields
    kind = fields.get("model_type") or "gpt"
    found = [name for name in REFUSED if fields.get(name)]
    found += sorted(name for name in given.of_model if _is_own(name, given))
    if kind != "gpt" or fields.get("spec"):
        found = ["model_type" if kind != "gpt" else "spec"]
    if found:
        got = ", ".join(f"{name}: {fields[name]}" for name in found)
        way = [f"--ignore {name}" for name in found if name in given.of_model and name not in REFUSED]
        hint = f"{' '.join(way)} leaves out what does not concern the step" if way else None
        raise InputError(f"{given.path}: fields that run files cannot express", got=got, hint=hint)


def _is_own(name: str, given: PrimusFields) -> bool:
    """Return True for a field of Primus that differs from its presets and concerns the step."""
    value = given.fields[name]
    is_default = value in (None, False, [], given.presets.get(name))
    return not (is_default or _option_of(name) or name in _without_effect() or name.isupper() or HARMLESS.match(name))


def _option_of(name: str) -> str | None:
    """Return the option of a field of Megatron-LM's parser; None: it is no such field."""
    dashed = name.replace("_", "-")
    if name in RENAMED or name in SWITCHED_OFF:
        return RENAMED.get(name) or SWITCHED_OFF[name]
    if name in _without_effect():
        return None
    return next((one for one in (f"no-{dashed}", f"disable-{dashed}", dashed) if one in known_names()), None)


def _without_effect() -> set[str]:
    return {option.replace("-", "_") for option in RENAMED.values()}


def _options(given: PrimusFields) -> MegatronOptions:
    fields = given.fields | _patched(given.fields)
    found: dict[str, Option] = {}
    for name, value in fields.items():
        option = _option_of(name)
        if option is None or (name.startswith("moe_") and not fields.get("num_experts")):
            continue
        is_inverted = option != name.replace("_", "-") and name not in RENAMED  # `no_save_optim` is a field too
        if (values := _values(value, is_inverted=is_inverted)) is not None:
            found[option] = Option(values=tuple(values), line=0)
    defaults = [
        option for name in given.presets if fields.get(name) == given.presets[name] and (option := _option_of(name))
    ]
    options = MegatronOptions(found, path=given.path, defaults=defaults)
    unknown = sorted(_without_effect() | {name for name in fields if name.isupper()})  # such as of the environment
    ignored = [f"{name} {fields[name]}" for name in unknown if fields.get(name)]
    if ignored:
        options.note(f"no field of Megatron-LM, which Primus does not pass on: {', '.join(ignored)}")
    if dataset := fields.get("sft_dataset_name"):
        length = fields.get("seq_length")
        options.note(f"data of {dataset} are not carried over: all sequences have {length} tokens, which are random")
    for name in sorted(fields):
        if name not in given.of_model and _is_own(name, replace(given, fields=fields)):
            options.leave_out(f"{name}: {fields[name]}")
    return options


def _values(value: Any, *, is_inverted: bool) -> list[str] | None:
    """Return the values of an option; None: it is absent."""
    if value is None or value == []:
        return None
    if is_inverted or isinstance(value, bool):
        return None if bool(value) == is_inverted else []
    return [str(one) for one in value] if isinstance(value, list) else str(value).split() or None


def _patched(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that Primus sets by others before it starts Megatron-LM."""
    found: dict[str, Any] = {}
    if fields.get("mock_data"):
        found = dict.fromkeys(("data_path", "train_data_path", "valid_data_path", "test_data_path"))
        found |= {"tokenizer_type": "NullTokenizer", "vocab_size": fields.get("vocab_size") or MOCK_VOCABULARY}
    elif str(fields.get("tokenizer_type")).startswith(TOKENIZERS):
        found["tokenizer_type"] = "HuggingFaceTokenizer"
    if fields.get("tensor_model_parallel_size") == 1:
        found["sequence_parallel"] = False
    if (replicas := fields.get("data_parallel_replicate_degree") or 1) > 1:
        found["num_distributed_optimizer_instances"] = replicas
    stage = fields.get("turbo_sync_free_moe_stage") or 0
    if fields.get("enable_primus_turbo") and stage:
        found["moe_permute_fusion"] = True
    if fields.get("enable_primus_turbo") and (fields.get("use_turbo_deepep") or stage >= DEEPEP_STAGE):
        found |= {"moe_enable_deepep": True, "moe_token_dispatcher_type": "flex"}
    return found


def _with_field_names(text: str) -> str:
    """Replace names of options in a message by names of fields.

    >>> _with_field_names("--num-experts 8 is refused, --disable-bias-linear too: --cluster h100-8x1 would do")
    'num_experts 8 is refused, add_bias_linear: false too: --cluster h100-8x1 would do'
    """
    names = {option: field for field, option in RENAMED.items()} | {"cluster": "--cluster"}
    names |= {option: f"{field}: false" for field, option in SWITCHED_OFF.items()}
    return re.sub(r"--([a-z][a-z0-9-]*)", lambda one: names.get(one[1], one[1].replace("-", "_")), text)
