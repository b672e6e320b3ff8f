"""Upper bound of the encoder's rate: its FLOPs at the rate that its own GEMMs reach on this device.

Attention's FLOPs count at the same rate; norms, activations and the embedding take no time. The encoder
cannot be faster than this bound, and its share of the bound shows how much the ignored work costs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from meshwright.bench.harness import measure
from meshwright.bench.ingest.encoder import DTYPES
from meshwright.inference.ingestion import EncoderShape
from meshwright.training import device as devices

BUDGET_S = 0.2  # of one GEMM


def encoder_bound(
    shape: EncoderShape, *, batch: int, length: int, precision: str, device: torch.device
) -> dict[str, float]:
    """Rates of the GEMMs of one layer with `batch` x `length` tokens, and the bound of tokens/s."""
    h, f, tokens = shape.hidden, shape.ffn, batch * length
    seconds = flops = 0.0
    for n, k, count in ((h, h, 4), (f, h, 1), (h, f, 1)):
        seconds += count * _gemm_s(tokens, n, k, DTYPES[precision], device)
        flops += count * 2.0 * tokens * n * k
    rate = flops / seconds
    per_token = shape.gemm_flops_per_token + shape.attention_flops_per_token(length)
    return {"gemm_flops_per_s": rate, "flops_per_token": per_token, "tokens_per_s": rate / per_token}


def _gemm_s(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)
    run: Callable[[], object] = lambda: torch.mm(a, b.T, out=out)  # noqa: E731
    with torch.inference_mode():
        return min(measure(run, synchronize=lambda: devices.synchronize(device), budget_s=BUDGET_S).seconds)
