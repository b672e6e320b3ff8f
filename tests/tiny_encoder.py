"""A sentence encoder of a few thousand weights in the layout of Hugging Face, with a tokenizer, for tests."""

from __future__ import annotations

import json
from pathlib import Path

TEXTS = ["def add(a, b): return a + b", "class Index: pass  # finds the nearest vectors", "import os, sys", "x = 1"]
NAMES = {
    "tokens": "embeddings.word_embeddings", "positions": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings", "norm": "embeddings.LayerNorm",
}  # fmt: skip
BLOCK_NAMES = {
    "query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value",
    "out": "attention.output.dense", "norm": "attention.output.LayerNorm", "up": "intermediate.dense",
    "down": "output.dense", "ffn_norm": "output.LayerNorm",
}  # fmt: skip
CONFIG = {
    "model_type": "bert", "hidden_act": "gelu", "num_hidden_layers": 2, "hidden_size": 32,
    "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64, "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}  # fmt: skip


def write_encoder(folder: Path, *, seed: int = 1, **config: object) -> Path:
    """Write config.json, model.safetensors and tokenizer.json."""
    import torch
    from safetensors.torch import save_file

    from meshwright.bench.ingest.chunks import train_chunk_tokenizer
    from meshwright.bench.ingest.encoder import random_weights
    from meshwright.inference.ingestion import EncoderShape

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_chunk_tokenizer(TEXTS, vocabulary=200)
    tokenizer.tokenizer.save(str(folder / "tokenizer.json"))
    whole = {**CONFIG, "vocab_size": tokenizer.vocabulary, **config}
    (folder / "config.json").write_text(json.dumps(whole))
    shape = EncoderShape(
        num_layers=2, hidden=32, num_heads=4, ffn=64, vocabulary=tokenizer.vocabulary, max_positions=64
    )
    torch.manual_seed(seed)
    tensors = {}
    for name, tensor in random_weights(shape, seed=seed).model.state_dict().items():
        owner, end = name.rpartition(".")[0], name.rpartition(".")[2]
        if owner.startswith("blocks."):
            _, number, part = owner.split(".")
            theirs = f"encoder.layer.{number}.{BLOCK_NAMES[part]}"
        else:
            theirs = NAMES[owner]
        tensors[f"{theirs}.{end}"] = tensor + 0.3 * torch.randn_like(tensor)
    save_file(tensors, folder / "model.safetensors")
    return folder
