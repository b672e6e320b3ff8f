"""`meshwright inference capacity`: options and help."""

from __future__ import annotations

from meshwright.cli.options import json_option
from meshwright.cli.verbs import verb


@verb(
    "capacity",
    question="meshwright.api.inference:inference_capacity",
    body="meshwright.cli.inference_capacity:run",
    examples=[
        "meshwright inference capacity --model llama3.1-405b --cluster mi355x-1x1 --precision fp4 --context 8192",
        "meshwright inference capacity --model llama3.1-70b --cluster mi355x-1x1 --kv-precision bf16 --context 131072",
        "meshwright inference capacity --model deepseek-v3 --cluster h200-8x1 --precision fp8 --context 32768 --json",
    ],
)
@json_option
def command() -> None:
    """Compute the sessions and tokens that fit into memory.

    Counts weights with the scales of their format, the KV cache (grouped heads, latents, sliding windows), activations
    of one step and what an engine reserves. Without degrees, the layout that holds most tokens is found.

    Exits with 1 if not one session of this length fits.
    """
