"""Weights and adapters of MaxText's checkpoints as safetensors, written by a process in MaxText's environment."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from meshwright.catalog.family_shapes import scaling_keys
from meshwright.engines.maxtext import environment
from meshwright.engines.maxtext.config.models import CLIPPED_AT, is_gpt_oss
from meshwright.engines.maxtext.parameters.leaves import Leaf, all_leaves, as_json
from meshwright.engines.maxtext.results import LAYOUT
from meshwright.errors import InputError, MeshwrightError
from meshwright.specs.model import Model
from meshwright.specs.run import Run

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
SCRIPT = Path(__file__).parent / "in_maxtext_environment" / "meshwright_weights.py"


def export_weights(run: Run, *, step: int | None, folder: Path, dtype: str) -> Path:
    """Write the weights of a checkpoint of `run` with a config.json into the new `folder`; return the checkpoint.

    Adapters are written in PEFT's format. `step` None: the newest checkpoint. Raises InputError if there is no such
    checkpoint, or no plan, which determines the arrays of a checkpoint; MissingDependencyError without MaxText's
    environment.
    """
    from meshwright.training.weights.adapter_config import PREFIX, AdapterSize, write_config
    from meshwright.training.weights.adapters import WEIGHTS
    from meshwright.training.weights.config import config_of
    from meshwright.training.weights.folder import new_folder
    from meshwright.training.weights.safetensors_format import SINGLE

    if run.plan is None:
        raise InputError(
            f"{run.source} has no plan, which determines the arrays of MaxText's checkpoints",
            hint="use meshwright_run.yaml in the folder of the results",
        )
    assert run.train.checkpoint is not None
    saved = LAYOUT.checkpoint_of(Path(run.train.checkpoint.folder), step, program="MaxText")
    python = environment.require()
    leaves = [leaf for leaf in all_leaves(run, run.plan) if leaf.is_adapter or run.lora is None]
    with new_folder(folder) as partial:
        _write(python, leaves, saved, partial / (SINGLE if run.lora is None else WEIGHTS), dtype=dtype)
        if run.lora is not None:
            size = AdapterSize(run.lora.rank, run.lora.alpha)
            modules = {leaf.name.removeprefix(PREFIX).rsplit(".lora_", 1)[0] for leaf in leaves}
            write_config(partial, dict.fromkeys(sorted(modules), size), lora=run.lora, base=run.weights)
            return saved
        describe = gpt_oss_config if is_gpt_oss(run.model) else config_of
        config = describe(run.model, dtype=DTYPES[dtype], max_positions=run.sequence_length)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return saved


def gpt_oss_config(model: Model, *, dtype: str, max_positions: int) -> dict[str, Any]:
    """Return the `config.json` of a GPT-OSS model, a family that the native engine does not have."""

    a, x = model.attention, model.experts
    assert x is not None
    kinds = ("sliding_attention", "full_attention")
    return {
        "architectures": [model.family],
        "model_type": "gpt_oss",
        "torch_dtype": dtype,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "intermediate_size": x.ffn_hidden,
        "num_hidden_layers": model.num_layers,
        "vocab_size": model.vocab,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "attention_bias": True,
        "sliding_window": a.window,
        "layer_types": [kinds[layer % 2] for layer in range(model.num_layers)],
        "num_local_experts": x.num_experts,
        "num_experts_per_tok": x.top_k,
        "swiglu_limit": CLIPPED_AT,
        "max_position_embeddings": max(max_positions, int(model.rope.original_context * model.rope.factor)),
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope.theta,
        "rope_scaling": scaling_keys(model.rope),
        "tie_word_embeddings": model.tied_embeddings,
    }


def _write(python: Path, leaves: list[Leaf], saved: Path, out: Path, *, dtype: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        table = Path(scratch) / "parameters.json"
        table.write_text(json.dumps({"leaves": as_json(leaves)}), encoding="utf-8")
        done = subprocess.run(
            [str(python), str(SCRIPT), str(table), str(saved.absolute()), str(out), DTYPES[dtype]],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise MeshwrightError(f"{saved} was not read: {reason}")
