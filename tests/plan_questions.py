"""Drawn questions to the planner of every engine."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import strategies as st

from meshwright.catalog import accelerators
from meshwright.catalog import lookup as catalog
from meshwright.catalog.lookup import engine_names
from meshwright.catalog.stacks import notes_on_framework, stack_names
from meshwright.errors import InputError
from meshwright.planner.engines import engine_facts
from meshwright.runfile import from_options, loads
from meshwright.specs.features import AttentionKernel, runs_on
from meshwright.specs.hardware import Stack
from meshwright.specs.plan import Recompute, Schedule, Sharding
from meshwright.specs.precision import PRECISIONS
from meshwright.specs.run import Run

PLAIN = ("llama3.1-8b", "llama3.2-1b", "qwen3-8b", "qwen3-14b", "qwen3-30b-a3b", "gpt-oss-20b", "llama3.1-70b")
"""Dense and of experts, with tied embeddings and with windows: models that most engines run."""
OF = {
    "native": ("mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3", "glm-4.5-air", "gemma2-9b", "olmo2-7b", "phi4"),
    "torchtitan": ("deepseek-v2-lite", "qwen3-4b", "gpt-oss-120b"),
    "megatron": ("mixtral-8x7b", "deepseek-v2-lite", "moe-2t", "qwen3-1.7b"),
    "maxtext": ("mixtral-8x7b", "deepseek-v2-lite", "qwen3-235b-a22b"),
    "trl": ("qwen3-1.7b", "qwen2.5-7b", "gemma2-9b", "phi4"),
}
"""Further ones."""
DEVICES = ("h100", "b200", "mi300x", "mi355x")
TPUS = ("tpu-v5p", "tpu-v6e", "tpu7x")
NODES = ((1, 1), (2, 1), (4, 1), (3, 2), (6, 1), (8, 1), (8, 2), (8, 3), (8, 4), (8, 16))
KEYS = {
    "native": (
        "train.compile=true", "optimizer={name: adamw8bit}", "optimizer={name: muon}", "kernels.weight_cache='on'",
        "kernels.stored_activations=[norm]", "batch.label_tokens=4000000", "task=lora",
    ),
    "torchtitan": (
        "train.compile=true", "optimizer.states=bf16", "task=lora", "kernels.loss_chunk=512",
        "optimizer.master_weights=false",
    ),
    "megatron": (
        "optimizer.states=bf16", "train.balance_loss=0.01", "stack.preset=recipe", "stack.cuda_graphs=partial",
        "stack.overlaps_experts=true",
    ),
    "maxtext": (
        "task=lora", "optimizer.states=bf16", "kernels.loss_chunk=512", "optimizer.master_weights=false",
        "stack.offloaded_activations=1",
    ),
    "trl": (
        "train.compile=true", "task=lora",
        "optimizer={schedule: linear, warmup_ratio: 0.1}", "optimizer={schedule: wsd, decay_shape: sqrt}",
        "train={epochs: 2}", "stack.attention=fa3",
    ),
}  # fmt: skip
FIXED = [
    *(f"{name}={width}" for name in ("tensor", "context", "pipeline", "expert") for width in (1, 2, 4)),
    *(f"{name}={width}" for name in ("virtual_pipeline", "expert_tensor", "data_replicate") for width in (1, 2)),
    *(f"sharding={sharding.name.lower()}" for sharding in Sharding),
    *(f"schedule={schedule.value}" for schedule in Schedule),
    *(f"recompute={kind.value}" for kind in Recompute),
    "sequence_parallel=false", "micro_batch=1", "recompute_layers=4", "recompute_modules=alternate_matmuls",
]  # fmt: skip
OWN_ACCELERATOR = Path(accelerators.__file__).parent / "data" / "accelerator_template.toml"
"""A user's file of an accelerator of 80 GB."""
STATED = {
    "network": ("25Gb/s", "4x100Gb/s", "3.2Tb/s"), "fabric": ("nvswitch-3-hdr", "pcie-5"),
    "device_memory": ("40GiB",), "host_memory": ("500GB",), "oversubscription": (2.0,),
}  # fmt: skip
CONFIGS = {
    "LlamaForCausalLM": {"model_type": "llama", "attention_bias": (True, False)},
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": (None, 1024)},
    "Qwen2ForCausalLM": {"model_type": "qwen2"},
    "Qwen3ForCausalLM": {"model_type": "qwen3"},
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe", "num_experts": (8, 60), "num_experts_per_tok": (1, 4), "norm_topk_prob": True,
        "moe_intermediate_size": (512, 1408),
    },
    "DeepseekV3ForCausalLM": {
        "model_type": "deepseek_v3", "n_routed_experts": (16, 64), "num_experts_per_tok": (2, 6), "n_group": 1,
        "topk_group": 1, "n_shared_experts": (1, 2), "moe_intermediate_size": 1408, "first_k_dense_replace": (0, 3),
        "q_lora_rank": (None, 512), "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
        "v_head_dim": (64, 128), "num_key_value_heads": 20, "head_dim": 32,
    },
}  # fmt: skip
"""Keys of configs with their values, or a tuple of values to draw from."""
SHAPES = {
    "hidden_size": (1024, 2048, 2560), "num_attention_heads": 20, "num_key_value_heads": (1, 4, 20),
    "head_dim": (64, 80, 128), "num_hidden_layers": (4, 7, 24), "intermediate_size": (5504, 11008),
    "vocab_size": (32001, 151669), "tie_word_embeddings": (True, False), "rms_norm_eps": (1e-5, 1e-6),
}  # fmt: skip
"""Those of all of them: heads that do not make up the width, and vocabularies that do not divide."""
_FOLDERS = TemporaryDirectory()


@cache
def _folder(text: str) -> str:
    """A new folder whose config.json is `text`."""
    folder = Path(_FOLDERS.name) / f"config-{len(list(Path(_FOLDERS.name).iterdir()))}"
    folder.mkdir()
    (folder / "config.json").write_text(text)
    return str(folder)


@st.composite
def folders(draw) -> str:
    """Return a folder with the config.json of a drawn model of a family that is trained."""
    name = draw(st.sampled_from(list(CONFIGS)))
    keys = SHAPES | CONFIGS[name]
    drawn = {key: draw(st.sampled_from(value)) if isinstance(value, tuple) else value for key, value in keys.items()}
    return _folder(json.dumps({"architectures": [name], **drawn}))


@st.composite
def hardware(draw, name: str) -> dict[str, Any]:
    """Return a cluster as a run file has it: of a user's accelerator or of two sizes of nodes, with stated hardware."""
    device, _, size = name.rpartition("-")
    kind = draw(st.sampled_from(["named", "parts"] + ([] if device in TPUS else ["own", "inline"])))
    width, _, nodes = size.partition("x")
    if kind == "inline":
        found = {"accelerator": str(OWN_ACCELERATOR), "devices_per_node": int(width), "num_nodes": int(nodes)}
    elif kind == "own":
        found = {"name": f"{OWN_ACCELERATOR.stem}-{size}", "accelerator": str(OWN_ACCELERATOR)}
    else:
        found = {"name": f"{name}+{device}-{draw(st.sampled_from([1, 2, 4]))}x1" if kind == "parts" else name}
    return found | draw(st.fixed_dictionaries({}, optional={key: st.sampled_from(of) for key, of in STATED.items()}))


def stated_cluster(run: Run) -> str | dict[str, Any]:
    """The cluster of a drawn run as its import states it."""
    said = [text.removeprefix("cluster=") for text in run.overrides if text.startswith("cluster=")]
    return json.loads(said[-1]) if said else run.cluster_name


@st.composite
def questions_of_own_files(draw, engines: tuple[str, ...] = ()) -> tuple[Run, tuple[str, ...]]:
    """Return a question of a cluster with stated hardware, of a model of a config.json, or of both."""
    run, fixed = draw(questions(engines))
    keys = [key for key in run.overrides if not key.startswith("model=")]
    if draw(st.booleans()):
        folder = json.dumps(draw(folders()))
        keys += [f"model={folder}", *([f"weights={folder}"] if run.engine == "trl" else [])]
    if draw(st.booleans()):
        keys.append(f"cluster={json.dumps(draw(hardware(run.cluster_name)))}")
    try:
        return loads(run.text, overrides=keys), fixed
    except InputError:  # the device has less memory, the fabric smaller nodes, or no such number format
        return run, fixed


@st.composite
def questions(draw, engines: tuple[str, ...] = ()) -> tuple[Run, tuple[str, ...]]:
    """Return a run with one of `engines` (empty: of all) and the fields of its plan that are fixed."""
    engine = draw(st.sampled_from(engines or engine_names()))
    model = draw(st.sampled_from(PLAIN + OF[engine]) | st.sampled_from(catalog.model_names()))
    device = draw(st.sampled_from(DEVICES + (TPUS if engine == "maxtext" else ())))
    width, nodes = draw(st.sampled_from(NODES))
    precision = draw(st.sampled_from(["bf16", *PRECISIONS]))
    possible = [key for key in KEYS[engine] if catalog.model(model).experts or "balance_loss" not in key]
    keys = ["train.steps=100", *draw(st.lists(st.sampled_from(possible), max_size=1))]
    if draw(st.booleans()):
        keys.append(f"model={{base: {model}, {draw(st.sampled_from(['num_mtp_layers: 0', 'vocab: 151669']))}}}")
    asked = {
        "model": model,
        "cluster": f"{device}-{min(width, 4) if device in TPUS else width}x{nodes}",
        "global_batch": draw(st.sampled_from([1, 6, 8, 24, 64, 96, 256, 512, 1024])),
        "sequence_length": draw(st.sampled_from([512, 2048, 3000, 4096, 6144, 8192, 32768])),
        "engine": engine,
    }
    try:
        run = from_options(**asked, precision=precision, overrides=keys)
    except InputError:  # the device does not multiply this format
        run = from_options(**asked, precision="bf16", overrides=keys[:1])
    return run, tuple(draw(st.lists(st.sampled_from(FIXED), max_size=2, unique_by=lambda word: word.split("=")[0])))


@st.composite
def questions_of_software(draw, engines: tuple[str, ...]) -> tuple[Run, tuple[str, ...]]:
    """Return a question whose run states of which software of its engine it is estimated, with a release's date."""
    run, fixed = draw(questions(engines))
    vendor = run.cluster.accelerator.vendor if run.cluster else ""
    kernels = [AttentionKernel.UNFUSED, AttentionKernel.FA2, AttentionKernel.FLEX]
    if run.cluster:
        kernels = [kernel for kernel in kernels if runs_on(kernel, run.cluster.accelerator)]
    own = [name for name in stack_names() if not notes_on_framework(run.engine, Stack(framework=name), vendor=vendor)]
    stated = {
        "framework": st.sampled_from(own),
        "preset": st.sampled_from(["engine", "recipe"]),
        "vintage": st.floats(2023.0, 2027.0),
        "attention": st.sampled_from(kernels),
        "attention_tile": st.sampled_from([64, 512]),
        "parameter_format": st.sampled_from(["fp32", "bf16"]),
        "gradient_format": st.sampled_from(["fp32", "bf16"]),
        "reduces_once": st.booleans(),
        "expert_imbalance": st.just(1.4),
    }
    shares = dict(engine_facts(run.engine).switches).get("offloaded_activations", ())
    if able := [share for share in (0.5, 1.0) if share in shares]:  # others are refused
        stated["offloaded_activations"] = st.sampled_from(able)
    keys = draw(st.fixed_dictionaries({}, optional=stated))
    stack = [f"stack.{key}={value}" for key, value in keys.items()]
    return loads(run.text, overrides=(*run.overrides, *stack)), fixed
