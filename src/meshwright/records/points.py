"""Points that `bench device` measures, by family: first the shapes of a model and its plan, then a grid.

docs/reference/bench-records.md has the families, their kernels and sizes (points.toml). Whole steps of small models
show the residual that kernels and collectives do not explain.

The grid is the additive recurrence of the generalised golden ratio (Roberts 2018, "The unreasonable effectiveness of
quasirandom sequences") in logarithms of the shape: any first part of the grid covers the space evenly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any

from meshwright.cost.flops import count_parameters
from meshwright.cost.tables import model_row
from meshwright.files import record_of, toml_table
from meshwright.specs.model import Model
from meshwright.specs.plan import Plan

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}
BYTES_PER_PARAMETER = 28
"""AdamW reads weight, gradient and both optimizer states and writes all but the gradient, 4 bytes each."""

MULTIPLE = 8  # of all widths
GRID_POINTS = 256
MAX_PARAMETERS = 2**26  # of the model's optimizer point


class PointFamily(StrEnum):
    """A kind of work. Its points have one shape space."""

    GEMM = "gemm"
    ATTENTION = "attention"
    MEMORY = "memory"
    ELEMENTWISE = "elementwise"
    OPTIMIZER = "optimizer"
    LAUNCH = "launch"
    TRANSFER = "transfer"
    TRAINING = "training"
    COLLECTIVES = "collectives"


_TABLES = toml_table(Path(__file__).with_name("points.toml"))
SHARES = {PointFamily(name): share for name, share in _TABLES["shares"].items()}
TOGETHER_SHARE = 0.54
"""Share of the budget for several processes together, with their start."""
COLLECTIVES_SHARE = 0.2  # of TOGETHER_SHARE; the rest is for training

KERNELS = {PointFamily(name): tuple(kernels) for name, kernels in _TABLES["kernels"].items()}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One shape to measure. A number that does not apply is 0."""

    family: PointFamily
    kernel: str
    format: str = ""  # of the numbers; empty where only bytes count
    m: int = 0
    n: int = 0
    k: int = 0
    sequences: int = 0
    heads: int = 0
    kv_heads: int = 0
    seq_len: int = 0
    head_dim: int = 0
    layers: int = 0  # of a model of width m with feed-forward blocks of n
    vocab: int = 0
    micro_batches: int = 0  # of a step, each of `sequences` sequences
    num_processes: int = 1
    threads: int = 0  # CPU threads of the kernel; 0: all
    size_bytes: int = 0  # of a copy; of a collective the whole buffer

    @property
    def flops(self) -> float:
        """FLOPs of GEMMs, 2 per multiply-add; 0 where only bytes count. Attention is causal; training excludes it."""
        if self.family is PointFamily.GEMM:
            return 2.0 * self.m * self.n * self.k
        if self.family is PointFamily.ATTENTION:
            keys = (self.seq_len + 1) / 2
            forward = 4.0 * self.sequences * self.seq_len * keys * self.heads * self.head_dim
            return forward if self.kernel == "forward" else 2.5 * forward
        if self.family is PointFamily.TRAINING:
            width = self.head_dim * (2 * self.heads + 2 * self.kv_heads)
            parameters = self.m * (self.layers * (width + 3 * self.n) + self.vocab)
            return 6.0 * parameters * self.sequences * self.seq_len * self.micro_batches
        return 0.0

    @property
    def bytes(self) -> float:
        """Least bytes to read and write; for a collective, bytes of its buffer."""
        element = ELEMENT_BYTES.get(self.format, 1)
        match self.family:
            case PointFamily.GEMM:
                out = max(element, 2)
                return float(element * (self.m * self.k + self.k * self.n) + out * self.m * self.n)
            case PointFamily.ATTENTION:
                rows = self.sequences * self.seq_len * self.head_dim
                passes = 1 if self.kernel == "forward" else 2
                return float(passes * element * rows * 2 * (self.heads + self.kv_heads))
            case PointFamily.ELEMENTWISE:
                return float(element * self.m * self.n * (3 if self.kernel == "swiglu" else 2))
            case PointFamily.OPTIMIZER:
                return float(BYTES_PER_PARAMETER * self.m)
            case PointFamily.MEMORY:
                return 2.0 * self.size_bytes
            case _:
                return float(self.size_bytes)


POINT_FIELDS = tuple(f.name for f in fields(Point))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Model and plan whose shapes are measured first."""

    model: Model
    plan: Plan
    seq_len: int
    formats: tuple[str, ...] | None = None  # None: all that the device supports


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Ranges of the grid as powers of 2. The largest take well under a second on a device of its kind."""

    gemm: tuple[int, int]
    seq_len: tuple[int, int]
    rows: tuple[int, int]
    copy: tuple[int, int]
    message: tuple[int, int]
    hidden: tuple[float, float]  # of models
    head_dim: int
    trained_len: tuple[float, float]
    trained_flops: float  # of the largest step
    vocab: tuple[float, float]


REACH = {device_type: record_of(Reach, row) for device_type, row in _TABLES["reach"].items()}


def points_of(
    family: PointFamily,
    *,
    device_type: str,
    formats: Sequence[str],
    workload: Workload | None = None,
    num_processes: int = 1,
) -> Iterator[Point]:
    """Points of one family: a small one for a first estimate of the speed, then the workload's, then the grid's."""
    reach = REACH[device_type]
    match family:
        case PointFamily.GEMM:
            shapes = chain([(256, 256, 256)], _gemm_shapes(workload), _grid([reach.gemm] * 3))
            return (p for m, n, k in _once(shapes) for f in formats for p in gemm_points(m, n, k, format=f))
        case PointFamily.ATTENTION:
            return _attention_points(reach, [f for f in formats if f != "fp8"], workload)
        case PointFamily.ELEMENTWISE:
            shapes = chain([(64, 256)], _row_shapes(workload), _grid([reach.rows] * 2))
            return (
                Point(family=family, kernel=kernel, format=f, m=m, n=n)
                for m, n in _once(shapes)
                for f in formats
                if f != "fp8"
                for kernel in KERNELS[family]
            )
        case PointFamily.OPTIMIZER:
            return (
                Point(family=family, kernel="adamw", format="fp32", m=m)
                for (m,) in _once(chain([(2**14,)], _parameter_counts(workload), _grid([(12, 26)])))
            )
        case PointFamily.LAUNCH:
            return iter([Point(family=family, kernel="add", format="fp32", m=1)])
        case PointFamily.TRAINING:
            return _training_points(reach, [f for f in formats if f != "fp8"], num_processes=num_processes)
        case PointFamily.COLLECTIVES:
            return _sized(family, reach.message, num_processes=num_processes)
        case PointFamily.MEMORY | PointFamily.TRANSFER:
            return _sized(family, reach.copy)


def gemm_points(m: int, n: int, k: int, *, format: str) -> tuple[Point, ...]:
    """The three GEMMs of a linear layer of m rows, n outputs and k inputs."""
    shapes = ((m, n, k), (m, k, n), (n, k, m))
    return tuple(
        Point(family=PointFamily.GEMM, kernel=kernel, format=format, m=a, n=b, k=c)
        for kernel, (a, b, c) in zip(KERNELS[PointFamily.GEMM], shapes, strict=True)
    )


def _attention_points(reach: Reach, formats: Sequence[str], workload: Workload | None) -> Iterator[Point]:
    shapes: list[tuple[int, ...]] = [(1, 2, 2, 64, 32)]
    if workload is not None:
        model, plan = workload.model, workload.plan
        a, t = model.attention, plan.tensor
        shapes.append(
            (plan.micro_batch, a.num_heads // t, max(1, a.num_kv_heads // t),
             workload.seq_len // plan.context, a.head_dim)
        )  # fmt: skip
    grid = (
        (1, groups * 2**share, groups, length, 32 * 2**width)
        for length, groups, share, width in _grid([reach.seq_len, (0, 3), (0, 3), (0, 2)], multiples=(64, 1, 0, 0))
    )
    for b, h, g, length, width in _once(chain(shapes, grid)):
        for f in formats:
            for kernel in KERNELS[PointFamily.ATTENTION]:
                yield Point(
                    family=PointFamily.ATTENTION, kernel=kernel, format=f,
                    sequences=b, heads=h, kv_heads=g, seq_len=length, head_dim=width,
                )  # fmt: skip


def _training_points(reach: Reach, formats: Sequence[str], *, num_processes: int) -> Iterator[Point]:
    """Small models; kinds of parallelism and formats alternate."""
    n, unit = num_processes, reach.head_dim
    isolated, *others = KERNELS[PointFamily.TRAINING]
    grid = _grid(
        [reach.hidden, (1, 2), (0, 3), reach.trained_len, (0, 2), (0, 2), reach.vocab],
        multiples=(2 * unit, 0.25, 1, 32, 1, 1, 64),
    )
    kernels = [isolated] if n == 1 else others
    for i, (hidden, ratio, layers, length, sequences, micro_batches, vocab) in enumerate(grid):
        kernel, heads = kernels[i % len(kernels)], hidden // unit
        if kernel == "tensor" and (heads % n or length % n or vocab % n):
            continue
        point = Point(
            family=PointFamily.TRAINING, kernel=kernel, format=formats[i // len(kernels) % len(formats)], m=hidden,
            n=round(hidden * ratio), sequences=sequences, seq_len=length, heads=heads,
            kv_heads=heads // 2 if i % 3 and kernel != "tensor" else heads, head_dim=unit, vocab=vocab,
            layers=-(-layers // n) * n if kernel == "pipeline" else layers, num_processes=n,
            micro_batches=micro_batches * (1 if kernel in ("isolated", "concurrent", "tensor") else n),
        )  # fmt: skip
        if point.flops <= reach.trained_flops:
            yield point


def _sized(family: PointFamily, reach: tuple[int, int], *, num_processes: int = 1) -> Iterator[Point]:
    sizes = [2**power for power in range(reach[0], reach[1] + 1)]
    if family is PointFamily.MEMORY:  # the sizes that no cache holds come first
        sizes = [sizes[0], *sizes[:0:-1]]
    for size in sizes[::2] + sizes[1::2]:  # every second one first, so that a short budget covers the range
        for kernel in KERNELS[family]:
            yield Point(family=family, kernel=kernel, size_bytes=size, num_processes=num_processes)


def _gemm_shapes(workload: Workload | None) -> list[tuple[int, int, int]]:
    """Forward GEMMs of one layer and the head, as the cost model counts them, in rising order."""
    if workload is None:
        return []
    r, plan = model_row(workload.model), workload.plan
    tokens, t = workload.seq_len * plan.micro_batch // plan.context, plan.tensor
    up = r.ffn_matrices - 1
    if r.is_mla:
        shapes = [
            (tokens, r.q_rank or r.num_heads * r.qk_dim // t, r.hidden),
            (tokens, r.num_heads * r.qk_dim // t, r.q_rank),
            (tokens, r.kv_rank + r.rope_dim, r.hidden),
            (tokens, r.num_heads * (r.qk_dim - r.rope_dim + r.v_dim) // t, r.kv_rank),
        ]
    else:
        width = r.num_heads * r.qk_dim + r.num_kv_heads * (r.qk_dim + r.v_dim)
        shapes = [(tokens, width // t, r.hidden)]
    shapes += [(tokens, r.hidden, r.num_heads * r.v_dim // t), (tokens, r.vocab // t, r.hidden)]
    for width in (r.ffn // t, r.shared_ffn // t):
        shapes += [(tokens, up * width, r.hidden), (tokens, r.hidden, width)]
    if r.num_experts:
        routed, width = tokens * r.top_k // r.num_experts, r.expert_ffn // plan.expert_tensor
        shapes += [(routed, up * width, r.hidden), (routed, r.hidden, width)]
    whole = [tuple(int(x) for x in shape) for shape in shapes]
    return sorted((s for s in whole if min(s) > 0), key=lambda s: s[0] * s[1] * s[2])  # pyright: ignore[reportReturnType]


def _row_shapes(workload: Workload | None) -> list[tuple[int, ...]]:
    if workload is None:
        return []
    model, plan = workload.model, workload.plan
    tokens = workload.seq_len * plan.micro_batch // plan.context
    width = model.ffn_hidden or (model.experts.ffn_hidden if model.experts else 0)
    return [(tokens, model.hidden), *([(tokens, width // plan.tensor)] if width else [])]


def _parameter_counts(workload: Workload | None) -> list[tuple[int, ...]]:
    if workload is None:
        return []
    total = int(count_parameters(model_row(workload.model)).total) // workload.plan.num_devices
    return [(min(total, MAX_PARAMETERS),)]


def _grid(
    reach: Sequence[tuple[float, float]], *, multiples: Sequence[float] | None = None, count: int = GRID_POINTS
) -> Iterator[tuple[Any, ...]]:
    """Yield shapes spread evenly in logarithms. A multiple of 0 rounds the power to a whole number."""
    dim = len(reach)
    ratio = 1.5
    for _ in range(60):  # the root above 1 of x^(dim+1) = x + 1
        ratio = (1 + ratio) ** (1 / (dim + 1))
    steps = [ratio ** -(i + 1) for i in range(dim)]
    multiples = multiples or [MULTIPLE] * dim
    for number in range(1, count + 1):
        powers = [low + (0.5 + number * s) % 1 * (high - low) for s, (low, high) in zip(steps, reach, strict=True)]
        yield tuple(
            max(of, round(2**power / of) * of) if of else round(power)
            for power, of in zip(powers, multiples, strict=True)
        )


def _once(shapes: Iterator[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    seen = set()
    for shape in shapes:
        if shape not in seen:
            seen.add(shape)
            yield shape
