"""Shared parts of tests of kernels: Triton's interpreter, errors against float64, shapes for Hypothesis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from tests.rounding import from_exact, unit_roundoff
from torch import Tensor

from meshwright.kernels.dispatch import KernelRouting, using
from meshwright.kernels.experts.permutation import permute, unpermute
from meshwright.kernels.fp8.aligned_rows import AlignedRows, align
from meshwright.kernels.fp8.grouped_gemm import ALIGNMENT
from meshwright.kernels.triton_route import interpreter_fault, is_interpreted

needs_interpreter = pytest.mark.skipif(
    not is_interpreted() or interpreter_fault() is not None,
    reason=interpreter_fault() or "Triton's interpreter (TRITON_INTERPRET=1)",
)

TERMS = 300
"""The longest sum of most cases. A longer one names a factor, or has terms of one sign, whose errors cancel more."""

BOUNDS: Mapping[torch.dtype, float] = {
    dtype: share * unit_roundoff(dtype) + from_exact(TERMS)
    for dtype, share in ((torch.float32, 1), (torch.float16, 1), (torch.bfloat16, 2))
}
"""Largest ‖got - exact‖ / ‖exact‖ of an operation with fp32 arithmetic: the rounding of its result, and of a sum on the
way. Triton's interpreter cuts fp32 to bf16, an error of two roundings, where GPUs round to the nearest."""

FORMATS = tuple(BOUNDS)
SIZES = st.sampled_from([0, 1, 2, 3, 5, 8, 17, 64, 65, 130])
"""Sizes of a dimension: empty, one, ragged, around powers of two."""
FEW = st.sampled_from([0, 1, 2, 3, 5, 9])
"""Sizes of a dimension that costs a program each: the interpreter takes a millisecond for one."""


def assert_close(
    got: Tensor, exact: Tensor, *, factor: float = 1.0, terms: Tensor | None = None, dtype: torch.dtype | None = None
) -> None:
    """Compare ‖got - exact‖ with the bound of the format times ‖exact‖ and `factor`.

    `terms` are the terms that a result is summed from: where they cancel, fp32's bound of their norm is added.
    """
    assert got.shape == exact.shape
    wide = got.detach().double()
    assert bool(torch.isfinite(wide).all()), f"not finite: {got}"
    norm, distance = float(exact.detach().norm()), float((wide - exact.detach().double()).norm())
    limit = BOUNDS[dtype or got.dtype] * factor * norm
    if terms is not None:
        limit += BOUNDS[torch.float32] * factor * float(terms.detach().double().norm())
    share = f"{distance / norm:.2e} of the norm" if norm else f"{distance:.2e}, exact is zero"
    assert distance <= limit, f"error {share}, allowed {limit:.2e}, {tuple(got.shape)} {got.dtype}"


def relative_error(got: Tensor, exact: Tensor) -> float:
    """‖got - exact‖ / ‖exact‖ in float64, of operations whose bound is not that of a format."""
    assert got.shape == exact.shape
    return float((got.detach().double() - exact.detach().double()).norm() / exact.detach().double().norm())


@contextmanager
def demanding(**routes: str) -> Iterator[KernelRouting]:
    """Demand these routes, by operation."""
    with using(KernelRouting(demanded=routes)) as routing:
        yield routing


def drawn(*shape: int, dtype: torch.dtype, strided: bool = False, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers; `strided`: the second part of a larger tensor, with rows that are not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    if not strided:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)
    wide = (torch.randn(*shape[:-1], 2 * shape[-1] + 3, generator=generator) * scale).to(dtype)
    return wide[..., shape[-1] + 1 : 2 * shape[-1] + 1]


def aligned_rows(counts: Sequence[int]) -> AlignedRows:
    """Rows that are sorted by expert already, with rows of zeros between experts."""
    return align(torch.arange(sum(counts)), torch.tensor(counts), alignment=ALIGNMENT)


def spread(rows_MD: Tensor, aligned: AlignedRows) -> Tensor:
    """[P, D]: rows at their places, and zeros."""
    return permute(rows_MD, aligned.order_P, top_k=1)


def gathered(rows_PD: Tensor, aligned: AlignedRows) -> Tensor:
    """[M, D]: the inverse of `spread`."""
    num_rows = int((aligned.order_P >= 0).sum())
    return unpermute(rows_PD, aligned.order_P, rows_PD.new_ones(num_rows, 1))


@dataclass
class CountedTraffic:
    """Bytes that kernels have read and written in the interpreter."""

    read_bytes: int = 0
    written_bytes: int = 0

    @property
    def moved_bytes(self) -> int:
        """Reads and writes together."""
        return self.read_bytes + self.written_bytes


@contextmanager
def counted_traffic() -> Iterator[CountedTraffic]:
    """Count loads and stores of Triton's interpreter where their masks let them through."""
    from triton.runtime import interpreter

    counted = CountedTraffic()
    builder = type(interpreter.interpreter_builder)
    load, store = builder.create_masked_load, builder.create_masked_store

    def counting_load(self, pointers, mask, *others):
        size = pointers.get_element_ty().primitive_bitwidth // 8
        counted.read_bytes += int(mask.data.sum()) * size
        return load(self, pointers, mask, *others)

    def counting_store(self, pointers, value, mask, *others):
        size = pointers.get_element_ty().primitive_bitwidth // 8
        counted.written_bytes += int(mask.data.sum()) * size
        return store(self, pointers, value, mask, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", counting_load)
        patch.setattr(builder, "create_masked_store", counting_store)
        yield counted
