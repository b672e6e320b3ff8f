"""A run as a configuration of Megatron-Bridge, and the script that trains with it. Pure.

    torchrun ... megatron_bridge.py [train.train_iters=10 ...]

The configuration is complete, as ConfigContainer.to_yaml writes it and ConfigContainer.from_yaml reads it. It is based
on no recipe. Absent fields have the defaults of their classes. Values are those of `megatron_core`. The sections of
ConfigContainer with their fields and defaults are in `fields.json`, created by scripts/renew_bridge_names.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

from meshwright.engines.megatron import switches
from meshwright.engines.megatron.megatron_core import constructors
from meshwright.engines.megatron.megatron_lm.arguments import layout_letters, token_files
from meshwright.engines.software_line import software_line
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run

CONTAINER = "megatron.bridge.training.config.ConfigContainer"
LOOP_SECTIONS = ("dist", "train", "validation", "checkpoint", "rng", "optimizer", "scheduler")  # with fields of `loop`
BY_PRECISION = ("bf16", "params_dtype", "pipeline_dtype", "fp8", "fp8_recipe", "fp4", "fp4_recipe")
"""Fields that mixed_precision sets in all sections."""
DEFAULT_SPLIT = "969,30,1"  # training, validation, test: Megatron-LM's default
BLOCK = "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec"
LATENT = "megatron.bridge.models.mla_provider.MLAModelProvider"
BACKENDS = "megatron.core.transformer.enums.AttnBackend"
BACKENDS_BY_NAME = {"flash": 1, "fused": 2, "unfused": 3}
BF16 = {"_target_": "torch.bfloat16", "_call_": False}

SCRIPT = '''\
"""Train with Megatron-Bridge as megatron_bridge.yaml says, and the command line behind it: train.train_iters=10."""

import sys
from pathlib import Path

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides
from megatron.bridge.utils.instantiate_utils import InstantiationMode

if __name__ == "__main__":
    path = Path(__file__).with_name("megatron_bridge.yaml")
    config = ConfigContainer.from_yaml(str(path), mode=InstantiationMode.STRICT)
    pretrain(process_config_with_overrides(config, cli_overrides=sys.argv[1:]), forward_step)
'''


@dataclass(frozen=True, kw_only=True)
class BridgeSection:
    """One section of ConfigContainer."""

    target: str  # its class
    fields: dict[str, Any]  # with defaults; one that is not a literal is its source after an equals sign
    computed: tuple[str, ...]  # fields that are computed, not set
    others: tuple[str, ...]  # fields of its other classes, and of an older release
    latent: dict[str, Any]  # fields of the model that differ under latent attention


@cache
def sections() -> dict[str, BridgeSection]:
    """Return the sections of the release in `fields.json`."""
    return {
        name: BridgeSection(
            target=about["class"],
            fields=about["fields"],
            computed=tuple(about["computed"]),
            others=tuple(about["others"]),
            latent=about.get("latent", {}),
        )
        for name, about in _release()["sections"].items()
    }


@cache
def _release() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("fields.json").read_text(encoding="utf-8"))


def configuration_text(run: Run, plan: Plan) -> str:
    """Return the configuration as YAML."""
    from ruamel.yaml import YAML

    stream = StringIO()
    stream.write(f"# Of Megatron-Bridge {_release()['version']} with Megatron-Core {_release()['core']}\n")
    stream.write(software_line(run))
    yaml = YAML()
    yaml.width = 1000  # keeps a pipeline layout on one line
    yaml.dump(configuration(run, plan), stream)
    return stream.getvalue()


def configuration(run: Run, plan: Plan) -> dict[str, Any]:
    """Return the values by section."""
    settings = constructors.settings_of(run, plan)
    layers = settings["transformer"] | switches.transformer_switches(run, plan) | switches.bridge_switches(run, plan)
    states = ("exp_avg_dtype", "exp_avg_sq_dtype")
    narrow = {key: BF16 for key in states if settings["optimizer"].get(key) == "bf16"}
    found: dict[str, constructors.Settings] = {
        "model": _model(run, plan, layers | settings["gpt"]),
        "optimizer": settings["optimizer"] | narrow,
        "ddp": settings["ddp"],
        "dataset": _data(run),
        "tokenizer": _tokenizer(run),
        "checkpoint": {},
        "logger": {},
    }
    if layers["cuda_graph_impl"] == "local":
        # ConfigContainer.validate refuses graphs of the whole iteration with the check, which synchronizes.
        found["rerun_state_machine"] = {"check_for_nan_in_loss": False}
    decay = run.optimizer.weight_decay
    found["scheduler"] = {"start_weight_decay": decay, "end_weight_decay": decay}  # replaces the optimizer's
    for key, value in constructors.loop(run, plan).items():
        if value is not None:
            (section,) = [name for name in LOOP_SECTIONS if key in sections()[name].fields][-1:]
            found.setdefault(section, {})[key] = value
    written: dict[str, Any] = {"_target_": CONTAINER}
    for name in sections():
        if name in found:
            written[name] = _written(name, found[name])
    if run.precision.name != "fp32":
        written["mixed_precision"] = _precision(run)
    return written


def _written(section: str, values: constructors.Settings) -> constructors.Settings:
    """Return the fields of a section that are written. Every name is a field of its class."""
    is_latent = values.get("multi_latent_attention", False)
    latent = sections()[section].latent if is_latent else {}
    known = sections()[section].fields | latent
    assert values.keys() <= known.keys(), values.keys() - known.keys()
    written = {k: v for k, v in values.items() if v is not None or latent.get(k) is not None}
    target = LATENT if is_latent else sections()[section].target
    return {"_target_": target} | {k: v for k, v in written.items() if k not in BY_PRECISION}


def _precision(run: Run) -> str | constructors.Settings:
    """Megatron-Bridge's own recipe for bf16, extended by fp8 or fp4: its recipes for these exclude some layers."""
    wire = {} if switches.reduces_in_fp32(run) else {"grad_reduce_in_fp32": False}
    wire |= {"fp8_param_gather": True} if switches.gathers_in_fp8(run) else {}
    wire |= {"fp8_dot_product_attention": True} if switches.switches_set(run).fp8_attention else {}
    gemm_format = constructors.LOW_PRECISION.get(run.precision.name)
    if gemm_format is None and not wire:
        return "bf16_mixed"
    settings = {"bf16": True, "params_dtype": BF16, "pipeline_dtype": BF16, **(gemm_format or {}), **wire}
    return {"_target_": sections()["mixed_precision"].target} | settings


def _model(run: Run, plan: Plan, settings: constructors.Settings) -> constructors.Settings:
    renamed = {"max_sequence_length": "seq_length"}
    model = {renamed.get(key, key): value for key, value in settings.items()}
    model |= constructors.fused_kernels(run) | {
        **({} if run.model.learned_positions else {"rotary_base": round(run.model.rope.theta)}),
        "vocab_size": run.model.vocab,
        "activation_func": {"_target_": f"torch.nn.functional.{model['activation_func']}", "_call_": False},
    }
    if run.model.vocab % plan.tensor:  # rounded up to the tensor ranks times the divisor
        model |= {"should_pad_vocab": True, "make_vocab_size_divisible_by": 1}
    if model["cuda_graph_impl"] != "none":
        model["use_te_rng_tracker"] = True  # GPTModelProvider refuses graphs without it
    if "attention_backend" in model:
        name = model["attention_backend"]
        model["attention_backend"] = {"_target_": BACKENDS, "_args_": [BACKENDS_BY_NAME[name]], "_name_": name}
    if "pipeline_model_parallel_layout" in model:
        model["pipeline_model_parallel_layout"] = layout_letters(model["pipeline_model_parallel_layout"])
    if isinstance(model.get("moe_layer_freq"), list):  # by default, all layers of the provider have experts
        model["transformer_layer_spec"] = {"_target_": BLOCK, "_partial_": True, "use_transformer_engine": True}
    return model


def _data(run: Run) -> constructors.Settings:
    """Megatron's token files or its mock data; ??? for other data, which the user must choose."""
    settings: constructors.Settings = {
        "seq_length": run.sequence_length,
        "random_seed": run.train.seed or 1234,
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "dataloader_type": "single",
    }
    if run.data.is_synthetic:
        return settings
    files = token_files(run) if isinstance(run.data.source, str) else None  # a blend is the user's to write
    return settings | {"data_path": files or "???", "split": DEFAULT_SPLIT}


def _tokenizer(run: Run) -> constructors.Settings:
    if run.data.is_synthetic or token_files(run):
        return {"tokenizer_type": "NullTokenizer", "vocab_size": run.model.vocab}
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "???"}
