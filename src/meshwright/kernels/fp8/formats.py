"""Quantisation in plain PyTorch: the specification of every cast in this folder, on any device.

    x ≈ scale * value        scale = max |x| over the values that share it / largest value of the format

    scaling    values that share a scale                         scales of x [M, K]
    tensor     all                                               [1, 1]
    row        a row                                             [M, 1]
    block      128 values of a row                               [M, ceil(K / 128)]
    square     128 x 128 (weights: rows of W and of its          [ceil(M / 128), ceil(K / 128)]
               transpose share them)
    mx         32 values of a row; scales are powers of two      [M, ceil(K / 32)]
               of 8 bits (e8m0)

A group whose values are all 0 has the scale 1. A NaN or an infinity makes NaN of its whole group, in every format:
training that overflows shows it. Values beyond the format's largest saturate, which delayed scaling needs.

The MX scale is 2^(floor(log2 max |x|) - e), where e is the exponent of the format's largest value. Sources: OCP
Microscaling Formats (MX) v1.0, sections 5.2, 5.3 and 6.3; OCP OFP8 v1.0; DeepSeek-V3 (2024), section 3.3.2 (blocks);
Micikevicius et al. 2022 (formats and scaling of tensors).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.errors import InputError

BLOCK = 128
MX_BLOCK = 32
E8M0_BIAS, E8M0_NAN = 127, 255
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of e2m1 by code; the sign is the fourth bit."""


class Element(StrEnum):
    """Number format of the values."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    E4M3_FNUZ = "e4m3fnuz"  # MI300X and MI325X: one value of zero and no infinities
    E5M2_FNUZ = "e5m2fnuz"
    E2M1 = "e2m1"  # two values a byte, the first one in the lower bits


class Scaling(StrEnum):
    """Groups of values that share a scale."""

    TENSOR = "tensor"
    ROW = "row"
    BLOCK = "block"
    SQUARE = "square"
    MX = "mx"


DTYPES = {
    Element.E4M3: torch.float8_e4m3fn,
    Element.E5M2: torch.float8_e5m2,
    Element.E4M3_FNUZ: torch.float8_e4m3fnuz,
    Element.E5M2_FNUZ: torch.float8_e5m2fnuz,
    Element.E2M1: torch.uint8,
}
LARGEST = {e: FP4_VALUES[-1] if e is Element.E2M1 else torch.finfo(DTYPES[e]).max for e in Element}
MANTISSA_BITS = {Element.E4M3: 3, Element.E5M2: 2, Element.E4M3_FNUZ: 3, Element.E5M2_FNUZ: 2, Element.E2M1: 1}
MX_EXPONENTS = {Element.E4M3: 8, Element.E5M2: 15, Element.E2M1: 2}
"""Exponent of the largest value: 448 = 1.75 * 2^8, 57344 = 1.75 * 2^15, 6 = 1.5 * 2^2."""


@dataclass(frozen=True, kw_only=True)
class CastForm:
    """Format and scales of a cast, and the orientations that are wanted."""

    element: Element
    scaling: Scaling
    power_of_two: bool = False
    with_rows: bool = True
    with_columns: bool = True

    @property
    def sides(self) -> tuple[bool, bool]:
        """The orientations."""
        return self.with_rows, self.with_columns


@dataclass(frozen=True, kw_only=True, eq=False)
class ScaledValues:
    """Narrow values, and the scales that groups of them share."""

    values: Tensor
    scales: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantized(ScaledValues):
    """A matrix of `shape`, or a stack of such matrices, each with scales of its own, as the weights of experts are.

    `scales` are fp32, of MX e8m0 in uint8.
    """

    element: Element
    scaling: Scaling
    shape: tuple[int, int]

    @property
    def is_stack(self) -> bool:
        """True if values and scales have a first dimension, of matrices."""
        return self.values.dim() == 3

    def matrix(self, index: int) -> Quantized:
        """One of the matrices of a stack."""
        return replace(self, values=self.values[index], scales=self.scales[index])

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix that values and scales stand for, computed in fp32."""
        rows, columns = self.shape
        values = unpack_fp4(self.values)[:, :columns] if self.element is Element.E2M1 else self.values.float()
        scales = decode_e8m0(self.scales) if self.scaling is Scaling.MX else self.scales
        return (values * spread(scales, rows=rows, columns=columns, scaling=self.scaling)).to(dtype)


def require_scalings(op: str, a: Quantized, b: Quantized) -> None:
    """Raise InputError unless a GEMM of `a` and `b` finds a scale of each for every part of its sum."""
    alike = a.scaling == b.scaling and a.scaling is not Scaling.SQUARE
    if not alike and (a.scaling, b.scaling) != (Scaling.BLOCK, Scaling.SQUARE):
        raise InputError(
            f"{op}: factors with scales that do not fit together", got=f"{a.scaling} and {b.scaling}",
            allowed="both alike but not square, or block and square",
        )  # fmt: skip


def stacked(matrices: Sequence[Quantized]) -> Quantized:
    """Return the stack of matrices of one form."""
    values, scales = (torch.stack([getattr(m, name) for m in matrices]) for name in ("values", "scales"))
    return replace(matrices[0], values=values, scales=scales)


def group_shape(scaling: Scaling, *, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    match scaling:
        case Scaling.TENSOR:
            return max(rows, 1), max(columns, 1)
        case Scaling.ROW:
            return 1, max(columns, 1)
        case Scaling.BLOCK:
            return 1, BLOCK
        case Scaling.SQUARE:
            return BLOCK, BLOCK
        case Scaling.MX:
            return 1, MX_BLOCK


def scales_shape(scaling: Scaling, *, rows: int, columns: int) -> tuple[int, int]:
    """Shape of the scales of a matrix, which may be empty.

    >>> scales_shape(Scaling.BLOCK, rows=3, columns=130), scales_shape(Scaling.TENSOR, rows=0, columns=5)
    ((3, 2), (1, 1))
    """
    match scaling:
        case Scaling.TENSOR:
            return 1, 1
        case Scaling.ROW:
            return rows, 1
        case _:
            height, width = group_shape(scaling, rows=rows, columns=columns)
            return -(-rows // height), -(-columns // width)


def quantize(
    x_MK: Tensor, *, element: Element, scaling: Scaling, amax: Tensor | None = None, power_of_two: bool = False
) -> Quantized:
    """Quantise a matrix.

    `amax`: the largest magnitudes to scale by, in the shape of the scales (delayed scaling); None: from
    `x_MK`. `power_of_two` rounds scales up to a power of two, so that dividing by them is exact.
    """
    (rows, columns), x = x_MK.shape, x_MK.float()
    if amax is None:
        amax = group_amax(x, scaling)
    if scaling is Scaling.MX:
        codes = e8m0_codes(amax, element)
        scales, divisors = codes, decode_e8m0(codes)
    else:
        scales = divisors = scale_of(amax, element=element, power_of_two=power_of_two)
    unit = x / spread(divisors, rows=rows, columns=columns, scaling=scaling)
    values = _encoded(unit.clamp(-LARGEST[element], LARGEST[element]), element)
    return Quantized(values=values, scales=scales, element=element, scaling=scaling, shape=(rows, columns))


def scale_of(amax: Tensor, *, element: Element, power_of_two: bool = False) -> Tensor:
    """Scales of groups whose largest magnitudes are `amax`, fp32."""
    scale = amax.float() / LARGEST[element]
    tiny = torch.finfo(torch.float32).tiny
    if power_of_two:
        scale = torch.exp2(torch.log2(scale.clamp(min=tiny)).ceil()).where(amax != 0, scale)
    scale = torch.where(amax == 0, 1.0, scale.clamp(min=tiny))
    return torch.where(torch.isfinite(amax), scale, torch.nan)


def group_amax(x_MK: Tensor, scaling: Scaling) -> Tensor:
    """Largest magnitude of each group; 0 for an empty one."""
    rows, columns = x_MK.shape
    height, width = group_shape(scaling, rows=rows, columns=columns)
    if not x_MK.numel():
        return x_MK.new_zeros(scales_shape(scaling, rows=rows, columns=columns))
    padded = functional.pad(x_MK.abs(), (0, -columns % width, 0, -rows % height))
    grouped = padded.unflatten(0, (-1, height)).unflatten(-1, (-1, width))
    return grouped.amax(dim=(1, 3))


def spread(scales: Tensor, *, rows: int, columns: int, scaling: Scaling) -> Tensor:
    """Return scales that broadcast to a matrix of `rows` x `columns`."""
    if scaling in (Scaling.TENSOR, Scaling.ROW):
        return scales
    height, width = group_shape(scaling, rows=rows, columns=columns)
    return scales.repeat_interleave(height, dim=0)[:rows].repeat_interleave(width, dim=1)[:, :columns]


def e8m0_codes(amax: Tensor, element: Element) -> Tensor:
    """Biased exponents of MX scales, uint8; 255 stands for NaN.

    Subnormal magnitudes count as 2^-127, and the scale of the format is then the smallest one.
    """
    exponents = (amax.float().view(torch.int32) >> 23 & 0xFF) - E8M0_BIAS - MX_EXPONENTS[element]
    codes = (exponents.clamp(-E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS).to(torch.uint8)
    return torch.where(torch.isfinite(amax), codes, torch.full_like(codes, E8M0_NAN))


def decode_e8m0(codes: Tensor) -> Tensor:
    """Scales in fp32. The smallest, 2^-127, is a subnormal number of fp32."""
    scales = torch.exp2(codes.double() - E8M0_BIAS).float()
    return torch.where(codes == E8M0_NAN, torch.nan, scales)


def pack_fp4(unit_MK: Tensor) -> Tensor:
    """Round to e2m1, ties to even, two codes a byte [M, ceil(K / 2)]; an odd last column is followed by 0."""
    ladder = torch.tensor(FP4_VALUES, device=unit_MK.device)
    middles = (ladder[1:] + ladder[:-1]) / 2
    # A tie goes to the even code: below for middles 0, 2, 4, 6; above for 1, 3, 5, whose limit is a little lower.
    limits = torch.where(torch.arange(7, device=middles.device) % 2 == 1, middles.nextafter(ladder[:-1]), middles)
    unit_MK = unit_MK.contiguous()
    codes = torch.bucketize(unit_MK.abs(), limits).to(torch.uint8) | (torch.signbit(unit_MK).to(torch.uint8) << 3)
    codes = functional.pad(codes, (0, codes.shape[-1] % 2))
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack_fp4(packed_MX: Tensor) -> Tensor:
    """Values of e2m1 codes, [M, 2 X] in fp32."""
    codes = torch.stack([packed_MX & 15, packed_MX >> 4], dim=-1).flatten(-2)
    ladder = torch.tensor([*FP4_VALUES, *(-v for v in FP4_VALUES)], device=packed_MX.device)
    return ladder[codes.int()]


def _encoded(unit_MK: Tensor, element: Element) -> Tensor:
    if element is Element.E2M1:
        return pack_fp4(unit_MK)
    return unit_MK.to(DTYPES[element])
