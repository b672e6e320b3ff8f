"""Hugging Face folders of tiny models with a tokenizer of bytes, and checkpoints of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from meshwright import runfile
from meshwright.specs.run import Run
from meshwright.training import checkpoints, conversion
from meshwright.training.data.tokenizer import ByteTokenizer
from meshwright.training.data.tokenizer_files import write_tokenizer
from meshwright.training.models import Transformer, add_adapters, build_model, init_weights
from meshwright.training.weights import adapters_of, find_weights, save_weights

END = ByteTokenizer.end
RUN = """
name: tiny
model:
  {name: tiny, family: LlamaForCausalLM, hidden: 32, num_layers: 2, vocab: 257, ffn_hidden: 64,
   attention: {num_heads: 4, num_kv_heads: 2}}
data: {source: python-stdlib, tokenizer: bytes, sequence_length: 256}
batch: {global_sequences: 4, micro: 2}
precision: fp32
cluster: here
parallel: {data_shard: 1}
train: {steps: 4}
"""
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_run(*overrides: str) -> Run:
    return runfile.loads(RUN, overrides=overrides)


def random_model(*overrides: str, seed: int = 5) -> Transformer:
    """Large weights, so that the most probable token is far ahead of the next."""
    built = build_model(tiny_run(*overrides).model, device="cpu")
    init_weights(built, seed=seed, std=0.3)
    return built.eval()


def tiny_folder(
    folder: Path, *, template: str | None = None, generation: dict[str, Any] | None = None, **config: Any
) -> Path:
    """Weights, config, tokenizer, and where they are given a chat template and a generation_config.json."""
    save_weights(random_model(), folder, dtype=torch.float32)
    write_tokenizer(ByteTokenizer(), folder)
    change(folder / "config.json", **({"eos_token_id": END, "max_position_embeddings": 256} | config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def tiny_checkpoint(folder: Path, *overrides: str, step: int = 3, seed: int = 5) -> Path:
    """A checkpoint as a training of the run with these overrides saves it; adapters are random."""
    run = tiny_run(*overrides)
    origin = None if run.weights is None else find_weights(run.weights)
    module = random_model(*overrides, seed=seed)
    state = conversion._weights(module)
    if run.lora is not None:
        add_adapters(module, run.lora)
        generator = torch.Generator().manual_seed(seed)
        for adapter in adapters_of(module).values():
            torch.nn.init.normal_(adapter, std=0.3, generator=generator)
        state = {f"weights.{name}": tensor.detach() for name, tensor in adapters_of(module).items()}
    about = checkpoints.as_manifest(checkpoints.content(run, weights=origin, tokenizer=ByteTokenizer()))
    return checkpoints.save(state, folder=folder, step=step, about=about | {"run": run.name}, keep=None)
