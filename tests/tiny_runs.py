"""One run file of a tiny model in fp32, which test files change by `--set` values: `tiny_run("model.vocab=260")`."""

from __future__ import annotations

from meshwright import runfile
from meshwright.specs.run import Run

TEXT = """
model: {name: tiny, hidden: 32, num_layers: 4, vocab: 64, ffn_hidden: 64, attention: {num_heads: 4, num_kv_heads: 2}}
data: {source: synthetic, sequence_length: 16}
batch: {global_sequences: 8}
precision: fp32
cluster: here
optimizer: {learning_rate: 1.0e-2}
train: {steps: 3}
"""
LORA_70B = """
model: llama2-70b
task: lora
lora: {rank: 16, alpha: 32, targets: [qkv, output]}
data: {sequence_length: 8192}
batch: {global_sequences: 8, micro: 1}
precision: fp8
cluster: mi300x-8x1
stack: {framework: mlperf-amd}
"""
"""Not tiny: planned only. Adapters of 70B on one node, which lacks memory for all activations."""
LATENT = (
    "model.attention={kind: mla, num_heads: 4, head_dim: 16, query_lora_rank: 16, kv_lora_rank: 16, "
    "rope_head_dim: 8, value_head_dim: 8}"
)
EXPERTS = "model.experts={num_experts: 4, top_k: 2, ffn_hidden: 32}"
SHARED_EXPERT = "model.experts={num_experts: 4, top_k: 2, ffn_hidden: 32, num_shared: 1, router: sigmoid}"


SMALLEST = {
    "model": "{hidden: 32, num_layers: 1, vocab: 64, ffn_hidden: 64, attention: {num_heads: 4, num_kv_heads: 2}}",
    "batch": "{global_sequences: 4, micro: 4}",
}
"""Sections of the shortest steps, for tests of what is around them."""


def tiny_run(*overrides: str) -> Run:
    """Return the run with these values laid over its file."""
    return runfile.loads(TEXT, overrides=overrides)
