"""Megatron's distributed checkpoints in Meshwright's folders: complete or absent, verified before they are read.

    FOLDER/step-00000100/    Megatron's files (torch_dist: weights and optimizer states by name, in shards), and a
                             manifest with step, plan, model, and size and SHA-256 of every file

The same plan resumes with Megatron's own format `dp_reshardable`, any other plan with `optimizer_shards`. Megatron's
formats for other plans gather all states in every saving process, and cannot be loaded without Transformer Engine or
Apex: they do not contain the step count of PyTorch's AdamW, but require it when they are loaded. `dp_reshardable` takes
it from the loading optimizer, where it is set beforehand.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch
from megatron.core import dist_checkpointing

from meshwright.engines.megatron.in_megatron_process import optimizer_shards
from meshwright.engines.megatron.in_megatron_process.initial_weights import METADATA
from meshwright.engines.megatron.in_megatron_process.model import ModelAndOptimizer
from meshwright.errors import InputError
from meshwright.runfile.pinned import section_from_plan
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run
from meshwright.training import checkpoints as checkpoint
from meshwright.training.checkpoints import SavedCheckpoint
from meshwright.training.checkpoints.metadata import require_index
from meshwright.training.data import Tokenizer
from meshwright.training.weights import Origin

SHARDING = {"distrib_optim_sharding_type": "dp_reshardable"}


def about(run: Run, plan: Plan, *, weights: Origin | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the part of a run's manifests that is the same for all its checkpoints."""
    return {
        "run": run.name,
        "model": run.model.name,
        "plan": plan.describe(),
        "engine": "megatron",
        "parallel": _parallel(plan),
        **checkpoint.as_manifest(checkpoint.content(run, weights=weights, tokenizer=tokenizer)),
    }


def state_of(parts: ModelAndOptimizer, *, is_loading: bool = False) -> dict[str, Any]:
    """Return the weights and optimizer states of this process with Megatron's names and shards."""
    for module in parts.chunks:
        if module.ddp_config.overlap_param_gather:  # otherwise deferred to the next forward pass
            module.start_param_sync(force_sync=True)
    modules = _weights_of(parts)
    weights = modules if len(modules) > 1 else modules[_chunk(0)]
    optimizer = parts.optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=METADATA | SHARDING)
    return modules | {"optimizer": optimizer}


def _weights_of(parts: ModelAndOptimizer) -> dict[str, Any]:
    return {
        _chunk(i): module.sharded_state_dict(metadata=dict(METADATA)) for i, module in enumerate(parts.unwrapped)
    }  # a copy, because Megatron modifies its argument


def load(parts: ModelAndOptimizer, saved: SavedCheckpoint, *, plan: Plan) -> None:
    """Resume from `saved`; called by every process. Raises InputError for another engine's states."""
    manifest = checkpoint.read_manifest(saved.path)
    is_same = manifest.get("parallel") == _parallel(plan)
    if manifest.get("engine") != "megatron" or not (is_same or optimizer_shards.has_ranges(saved.path)):
        raise InputError(
            f"checkpoint {saved.path} was not saved by this release's Megatron engine",
            got=manifest.get("plan") or "another engine's",
            hint="start from its weights: `meshwright checkpoint to-hf`, and `weights`",
        )
    _make_states(parts, step=saved.step)
    wanted = state_of(parts, is_loading=True) if is_same else _weights_of(parts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        require_index(saved.path)
        found: Any = dist_checkpointing.load(wanted, str(saved.path))
    for index, module in enumerate(parts.unwrapped):
        module.load_state_dict(found[_chunk(index)], strict=False)  # layers have unused fp8 states
    if not is_same:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer_shards.read_states(parts, saved.path)
        return
    with torch.no_grad():  # Megatron copies into the main parameters
        parts.optimizer.load_state_dict(found["optimizer"])
    for optimizer in parts.optimizer.chained_optimizers:
        for state in optimizer.optimizer.state.values():  # all share one counter now, which each would increment
            state["step"] = state["step"].clone()


def _make_states(parts: ModelAndOptimizer, *, step: int) -> None:
    """Create the states of PyTorch's optimizers by a step with learning rate 0, and set their counters to `step`."""
    for module in parts.chunks:
        module.zero_grad_buffer()
    for group in parts.optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    parts.optimizer.step()
    for optimizer in parts.optimizer.chained_optimizers:
        for state in optimizer.optimizer.state.values():
            state["step"].fill_(float(step))


def _parallel(plan: Plan) -> dict[str, Any]:
    """Return the plan in the form of a manifest."""
    return json.loads(json.dumps(section_from_plan(plan), default=str))


def _chunk(index: int) -> str:
    """Return Megatron's name of a stage of a process."""
    return f"model{index}"
