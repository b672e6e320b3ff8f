"""The toy that other engines train as the native engine does: one run file, and a text to learn."""

from __future__ import annotations

MODEL = """
model: {name: toy, family: LlamaForCausalLM, hidden: 64, num_layers: 2, vocab: 257, ffn_hidden: 128,
  attention: {num_heads: 4, num_kv_heads: 2}}
"""
REST = """
data: {source: notes.txt, tokenizer: bytes, sequence_length: 64}
batch: {global_sequences: 8, micro: 2}
optimizer: {learning_rate: 2.0e-3, warmup_steps: 4, schedule: cosine}
precision: fp32
cluster: here
"""
"""All but the model, the engine and the number of steps."""


def multiplication(num_rows: int) -> str:
    """A text that a small model learns within some steps, in `num_rows` documents."""
    return "".join(
        f"{i} times {j} is {i * j}. " + ("\n\n" if j == 12 else "") for i in range(num_rows) for j in range(13)
    )
