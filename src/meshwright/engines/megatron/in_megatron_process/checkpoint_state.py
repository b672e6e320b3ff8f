"""Megatron's distributed checkpoints, in the folders of ours: whole or absent, checked before they are read.

    FOLDER/step-00000100/    Megatron's files (torch_dist: weights and optimizer states by name, in shards), and a
                             manifest with step, plan, model, and size and SHA-256 of every file

The plan that saved goes on by Megatron's own `dp_reshardable`, another one by `pieces`. Megatron's forms that another
plan could read gather all states on every process that saves, and cannot be read back without Transformer Engine or
Apex: they leave out the counter of PyTorch's AdamW, and then ask for it. `dp_reshardable` takes it from the optimizer
that reads, where it is put before.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch
from megatron.core import dist_checkpointing

from meshwright.engines.megatron.in_megatron_process import optimizer_shards as pieces
from meshwright.engines.megatron.in_megatron_process.initial_weights import METADATA
from meshwright.engines.megatron.in_megatron_process.model import Parts
from meshwright.errors import InputError
from meshwright.runfile.pinned import section_from_plan
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run
from meshwright.training import checkpoints as checkpoint
from meshwright.training.checkpoints import SavedCheckpoint
from meshwright.training.weights import Origin

SHARDING = {"distrib_optim_sharding_type": "dp_reshardable"}


def about(run: Run, plan: Plan, *, weights: Origin | None) -> dict[str, Any]:
    """What the manifests of a run's checkpoints say of it."""
    return {
        "run": run.name,
        "model": run.model.name,
        "plan": plan.describe(),
        "engine": "megatron",
        "parallel": _parallel(plan),
        **checkpoint.as_manifest(checkpoint.content(run, weights=weights)),
    }


def state_of(parts: Parts, *, is_loading: bool = False) -> dict[str, Any]:
    """Weights and optimizer states of this process, as Megatron names and shards them."""
    for module in parts.chunks:
        if module.ddp_config.overlap_param_gather:  # else the next step's forward pass would do it
            module.start_param_sync(force_sync=True)
    modules = _weights_of(parts)
    weights = modules if len(modules) > 1 else modules[_chunk(0)]
    optimizer = parts.optimizer.sharded_state_dict(
        weights, is_loading=is_loading, metadata=METADATA | SHARDING
    )
    return modules | {"optimizer": optimizer}


def _weights_of(parts: Parts) -> dict[str, Any]:
    return {
        _chunk(i): module.sharded_state_dict(metadata=dict(METADATA)) for i, module in enumerate(parts.plain)
    }  # Megatron adds to what it is given


def load(parts: Parts, saved: SavedCheckpoint, *, plan: Plan) -> None:
    """Go on from `saved`. Every process calls it. Raises InputError for another engine's states."""
    manifest = checkpoint.read_manifest(saved.path)
    is_same = manifest.get("parallel") == _parallel(plan)
    if manifest.get("engine") != "megatron" or not (is_same or pieces.has_pieces(saved.path)):
        raise InputError(
            f"checkpoint {saved.path} was not saved by this release's Megatron engine",
            got=manifest.get("plan") or "another engine's",
            hint="start anew from its weights: `meshwright checkpoint to-hf`, and `weights`",
        )
    _make_states(parts, step=saved.step)
    wanted = state_of(parts, is_loading=True) if is_same else _weights_of(parts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = dist_checkpointing.load(wanted, str(saved.path))
    for index, module in enumerate(parts.plain):
        module.load_state_dict(
            found[_chunk(index)], strict=False
        )  # layers keep states of fp8 that nobody has
    if not is_same:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pieces.read_states(parts, saved.path)
        return
    with torch.no_grad():  # Megatron writes into the main parameters
        parts.optimizer.load_state_dict(found["optimizer"])
    for optimizer in parts.optimizer.chained_optimizers:
        for state in optimizer.optimizer.state.values():  # one counter for all is left: each would move it
            state["step"] = state["step"].clone()


def _make_states(parts: Parts, *, step: int) -> None:
    """PyTorch's optimizers have states after their first step alone: one that moves nothing. They count from `step`."""
    for module in parts.chunks:
        module.zero_grad_buffer()
    for group in parts.optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    parts.optimizer.step()
    for optimizer in parts.optimizer.chained_optimizers:
        for state in optimizer.optimizer.state.values():
            state["step"].fill_(float(step))


def _parallel(plan: Plan) -> dict[str, Any]:
    """The plan as a manifest holds it."""
    return json.loads(json.dumps(section_from_plan(plan), default=str))


def _chunk(index: int) -> str:
    """As Megatron calls the stages of a process."""
    return f"model{index}"
