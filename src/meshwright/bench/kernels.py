"""Points as PyTorch calls on one device. The operands are made once; only the call is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from meshwright.kernels.linear import matmul_nt
from meshwright.records.points import Point, PointFamily
from meshwright.training.device import fp8_dtype, multiplies_fp8
from meshwright.training.models.attention import CoreAttention

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class KernelTask:
    """The timed call, and an untimed one that runs before it."""

    run: Callable[[], object]
    before: Callable[[], object] | None = None


def formats_of(device: torch.device) -> tuple[str, ...]:
    """Number formats of GEMMs on `device`."""
    return (*DTYPES, "fp8") if multiplies_fp8(device) else tuple(DTYPES)


def task_of(point: Point, device: torch.device) -> KernelTask:
    """The task of one point. Collectives and training are in `bench.collectives`."""
    return _TASKS[point.family](point, device)


def footprint_bytes(point: Point) -> float:
    """Memory of the operands of `point` and of the tensors saved for backward."""
    return point.bytes * (3 if point.family is PointFamily.ATTENTION else 1)


def _gemm(point: Point, device: torch.device) -> KernelTask:
    """The native engine's own GEMM."""
    m, n, k = point.m, point.n, point.k
    if point.format == "fp8":
        dtype = fp8_dtype(device)
        a_MK, b_NK = (torch.randn(rows, k, device=device).to(dtype) for rows in (m, n))
        one = torch.ones((), device=device)
        return KernelTask(
            run=lambda: torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
                a_MK, b_NK.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
            )
        )
    like = {"dtype": DTYPES[point.format], "device": device}
    if point.kernel == "forward":
        x_MK, w_NK = torch.randn(m, k, **like), torch.randn(n, k, **like)
        return KernelTask(run=lambda: matmul_nt(x_MK, w_NK))
    if point.kernel == "input_gradient":
        grad_MK, w_KN = torch.randn(m, k, **like), torch.randn(k, n, **like)
        return KernelTask(run=lambda: matmul_nt(grad_MK, w_KN.t()))
    grad_KM, x_KN = torch.randn(k, m, **like), torch.randn(k, n, **like)
    return KernelTask(run=lambda: matmul_nt(grad_KM.t(), x_KN.t()))


def _attention(point: Point, device: torch.device) -> KernelTask:
    """The native engine's own attention core."""
    like = {"dtype": DTYPES[point.format], "device": device}
    core = CoreAttention(scale=point.head_dim**-0.5)
    rows = (point.sequences, point.seq_len)
    q_BTHK = torch.randn(*rows, point.heads, point.head_dim, **like)
    k_BTGK, v_BTGK = (torch.randn(*rows, point.kv_heads, point.head_dim, **like) for _ in range(2))
    if point.kernel == "forward":
        return KernelTask(run=lambda: core.attend(q_BTHK, k_BTGK, v_BTGK, ranges=None))
    inputs = [x.requires_grad_() for x in (q_BTHK, k_BTGK, v_BTGK)]
    grad_BTHK = torch.randn_like(q_BTHK)
    out: list[torch.Tensor] = []

    def forward() -> None:
        for x in inputs:
            x.grad = None
        out[:] = [core.attend(*inputs, ranges=None)]

    return KernelTask(run=lambda: out[0].backward(grad_BTHK), before=forward)


def _elementwise(point: Point, device: torch.device) -> KernelTask:
    like = {"dtype": DTYPES[point.format], "device": device}
    x_MN = torch.randn(point.m, point.n, **like)
    if point.kernel == "rms_norm":
        weight_N = torch.ones(point.n, **like)
        return KernelTask(run=lambda: functional.rms_norm(x_MN, (point.n,), weight_N, EPSILON))
    gate_MN = torch.randn(point.m, point.n, **like)
    return KernelTask(run=lambda: functional.silu(gate_MN) * x_MN)


def _memory(point: Point, device: torch.device) -> KernelTask:
    source = torch.ones(point.size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return KernelTask(run=lambda: target.copy_(source))


def _optimizer(point: Point, device: torch.device) -> KernelTask:
    parameter = torch.nn.Parameter(torch.randn(point.m, device=device))
    parameter.grad = torch.randn(point.m, device=device)
    return KernelTask(run=torch.optim.AdamW([parameter], lr=0.0, fused=True).step)


def _launch(point: Point, device: torch.device) -> KernelTask:
    x = torch.ones(point.m, device=device)
    return KernelTask(run=lambda: x.add_(1))


def _transfer(point: Point, device: torch.device) -> KernelTask:
    host = torch.ones(point.size_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    if point.kernel == "host_to_device":
        return KernelTask(run=lambda: there.copy_(host, non_blocking=True))
    return KernelTask(run=lambda: host.copy_(there, non_blocking=True))


_TASKS: dict[PointFamily, Callable[[Point, torch.device], KernelTask]] = {
    PointFamily.GEMM: _gemm,
    PointFamily.ATTENTION: _attention,
    PointFamily.MEMORY: _memory,
    PointFamily.ELEMENTWISE: _elementwise,
    PointFamily.OPTIMIZER: _optimizer,
    PointFamily.LAUNCH: _launch,
    PointFamily.TRANSFER: _transfer,
}
