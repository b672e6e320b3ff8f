"""A run as a configuration of `trl sft`. TRL need not be installed.

The keys are those of `engines/trainers/tables`, by which `import` reads the file back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.catalog.family_tensors import MODULES_TO_SAVE
from meshwright.catalog.stacks import switches_of
from meshwright.engines.base import Launch, pinned_plan, refuse
from meshwright.engines.software_line import software_line
from meshwright.engines.trainers.tables import table
from meshwright.engines.trl import VERSION
from meshwright.engines.trl.check import check, module_of, reader_of, source_of, weights_of, without_tilde
from meshwright.json_values import dump_yaml
from meshwright.specs.features import AttentionKernel
from meshwright.specs.model import BaseFormat, Lora, Model
from meshwright.specs.plan import Plan, Recompute, Sharding
from meshwright.specs.run import LearningRateSchedule, Run

CONFIGURATION = "sft.yaml"
COMMENTS = """\
# Learning rates are those of the run file one step later: schedules of transformers begin with step 0.
# Packed documents are cut at max_length (packing_strategy: bfd_split continues them). Of conversations every token
# counts in the loss (assistant_only_loss: true counts answers alone, as `meshwright train` does).
"""


def lower(run: Run, *, folder: Path) -> Launch:
    """Return the configuration and the command of every process. Raises InputError for what `check` refuses."""
    refuse("trl", check(run))
    plan = pinned_plan(run)
    data = ("--dataset_name", "DATASET") if run.data.is_synthetic else ()
    return Launch(
        argv=("python", "-m", "trl.scripts.sft", "--config", str(folder / CONFIGURATION), *data),
        files={CONFIGURATION: configuration_text(run, plan, folder=folder)},
        num_processes=plan.num_devices,
        resumes=False,  # with --resume_from_checkpoint alone, which a first start refuses
    )


def configuration_text(run: Run, plan: Plan, *, folder: Path) -> str:
    """Return the YAML file."""
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.version = (1, 1)  # of TRL's reader: there a bare `no` is false, and 1e-05 a text
    head = (
        f"# {run.name}: {run.model.name} on {plan.num_devices} devices ({plan.describe()}), for TRL {VERSION}.\n"
        "# Written by Meshwright. Absent keys have the values of TRL's SFTConfig and ModelConfig.\n"
        f"{COMMENTS}"
        f"{software_line(run, lacks=('attention',))}"  # FlashAttention 2 has one name there, whichever package it is of
    )
    settings = _settings(run, plan) | (_adapters(run.lora, run.model) if run.lora else {"adapter": False})
    keys = {table("trl").key_of(setting): value for setting, value in settings.items() if value is not None}
    keys |= _sharding(run, plan) | _schedule(run) | _data(run) | _outputs(run, folder)
    return head + dump_yaml(keys, yaml=yaml)


def _settings(run: Run, plan: Plan) -> dict[str, Any]:
    """Values by the names of settings that all trainers share."""
    optimizer, is_sharded, software = run.optimizer, plan.sharding is not Sharding.NONE, switches_of(run)
    return {
        "model": weights_of(run),
        "weights_format": "float32" if run.lora is None else "bfloat16",  # frozen weights need no master
        "attention": "flash_attention_3" if software.attention is AttentionKernel.FA3 else "flash_attention_2",
        "sequence_length": run.sequence_length,
        "packing": True,
        "micro": plan.micro_batch,
        "accumulation": plan.num_micro_batches(run.global_batch),
        **({"steps": run.num_steps} if run.num_steps else {"epochs": run.train.epochs}),
        "optimizer": "adamw_torch_fused",
        "learning_rate": optimizer.learning_rate,
        "weight_decay": optimizer.weight_decay,
        "beta1": optimizer.betas[0],
        "beta2": optimizer.betas[1],
        "epsilon": optimizer.epsilon,
        "gradient_clip": optimizer.gradient_clip or 0.0,
        "bf16": True,
        "recompute": plan.recompute is Recompute.FULL and not is_sharded,
        "compile": bool(software.compiles),
        "offloaded_activations": bool(software.offloaded_activations) or None,
        "label_smoothing": run.train.label_smoothing,
        "neftune_alpha": run.train.neftune_alpha or None,
        "seed": run.train.seed,
    }


def _sharding(run: Run, plan: Plan) -> dict[str, Any]:
    """FSDP2, which recomputes layers itself: the trainer's own recomputation would gather their weights once more.

    Without a reduction of each micro-batch every device adds up gradients of all parameters, unsharded.
    """
    if plan.sharding is Sharding.NONE:
        return {}
    settings = {
        "version": 2,
        "reshard_after_forward": plan.sharding is Sharding.PARAMETERS,
        "activation_checkpointing": plan.recompute is Recompute.FULL,
    }
    reduces = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    return {"fsdp": True, "fsdp_config": settings} | ({} if switches_of(run).reduces_once else reduces)


def _schedule(run: Run) -> dict[str, Any]:
    """Schedule of transformers, whose rates are those of the run one step later: its first step of a warm-up has 0."""
    optimizer, kind, final = run.optimizer, run.optimizer.schedule, run.optimizer.final_ratio
    warm_up = optimizer.warmup_ratio or optimizer.warmup_steps
    more: dict[str, Any] = {}
    name = kind.value
    if kind is LearningRateSchedule.CONSTANT:
        name = "constant_with_warmup" if warm_up else "constant"
    elif kind is LearningRateSchedule.COSINE and final:
        name, more = "cosine_with_min_lr", {"min_lr_rate": final}
    elif kind is LearningRateSchedule.POLYNOMIAL or (kind is LearningRateSchedule.LINEAR and final):
        power = optimizer.power if kind is LearningRateSchedule.POLYNOMIAL else 1.0
        name, more = "polynomial", {"power": power, "lr_end": final * optimizer.learning_rate}
    elif kind is LearningRateSchedule.COSINE_WITH_RESTARTS:
        more = {"num_cycles": optimizer.cycles}
    elif kind is LearningRateSchedule.WSD:
        decay = max(1, round(optimizer.decay_ratio * (run.num_steps or 0))) if optimizer.decay_ratio else 0
        shape = "1-sqrt" if optimizer.decay_shape == "sqrt" else optimizer.decay_shape.value
        name = "warmup_stable_decay"
        more = {"num_decay_steps": decay, "decay_type": shape, "min_lr_ratio": final}
    keys = {"lr_scheduler_type": name, "warmup_steps": warm_up}
    return keys | ({"lr_scheduler_kwargs": more} if more else {})


def _adapters(lora: Lora, model: Model) -> dict[str, Any]:
    of_peft = {ours: theirs for theirs, ours in MODULES_TO_SAVE.items()}
    is_nf4 = lora.base_format in (BaseFormat.NF4, BaseFormat.NF4_DOUBLE)
    return {
        "adapter": True,
        "rank": lora.rank,
        "alpha": lora.alpha,
        "dropout": lora.dropout,
        "targets": [module_of(target, model) for target in lora.targets],
        **({"modules_to_save": [of_peft[name] for name in lora.modules_to_save]} if lora.modules_to_save else {}),
        **({"dora": True} if lora.use_dora else {}),
        **({"in_4_bits": True} if is_nf4 else {}),
        **({"double_quantised": True} if lora.base_format is BaseFormat.NF4_DOUBLE else {}),
        **({"in_8_bits": True} if lora.base_format is BaseFormat.INT8 else {}),
    }


def _data(run: Run) -> dict[str, Any]:
    """The data set, in the words of TRL's script; random tokens have none."""
    if run.data.is_synthetic:
        return {}
    assert isinstance(run.data.source, str)  # `check`
    place, options = source_of(run.data.source)
    keys: dict[str, Any] = {"dataset_text_field": options["text"]} if "text" in options else {}
    if options.get("format") == "messages":
        keys["assistant_only_loss"] = True
    config = {"name": options["config"]} if "config" in options else {}
    reader = reader_of(place)
    named = {"path": reader, "data_files": without_tilde(place)} if reader else {"path": place, **config}
    return {"datasets": [named | {"split": options.get("split", "train")}], **keys}


def _outputs(run: Run, folder: Path) -> dict[str, Any]:
    saves = run.train.checkpoint
    output = without_tilde(saves.folder) if saves else str(folder / "output")
    keys: dict[str, Any] = {"output_dir": output, "save_strategy": "no"}
    if saves:
        keys |= {"save_strategy": "steps", "save_steps": saves.every_steps}
        keys |= {"save_total_limit": saves.keep} if saves.keep else {}
    return keys | {"report_to": [tracker.value for tracker in run.train.trackers] or "none"}
