"""GEMMs of one step on one device: their shapes and counts.

Linear layers and the head are counted. Grouped GEMMs of routed experts are not, because their rows change from step
to step; nor are adapters, which are too narrow to matter.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from meshwright.cost.tables import chunk_column
from meshwright.kernels.linear import GemmKind, Linear
from meshwright.kernels.traffic import loss_rows
from meshwright.specs.plan import Plan, Recompute
from meshwright.specs.run import Run
from meshwright.training.models import build_model

COLUMNS = ("query", "query_up", "key", "value", "kv_up", "gate", "up")
ROWS = ("output", "down")
"""Layers that tensor parallelism shards by outputs, or by inputs. `parallel.tensor` has the same names."""


@dataclass(frozen=True, kw_only=True, order=True)
class Gemm:
    """The GEMM of `kernel` of a linear layer of m rows, n outputs and k inputs."""

    format: str
    m: int
    n: int
    k: int
    kernel: GemmKind

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, columns and depth of the GEMM itself."""
        m, n, k = self.m, self.n, self.k
        shapes = {GemmKind.FORWARD: (m, n, k), GemmKind.INPUT_GRADIENT: (m, k, n), GemmKind.WEIGHT_GRADIENT: (n, k, m)}
        return shapes[self.kernel]

    @property
    def flops(self) -> int:
        """2 a multiply-add."""
        return 2 * self.m * self.n * self.k


def count_gemms(run: Run, plan: Plan) -> dict[Gemm, int]:
    """Count each GEMM of a device in one step, on the pipeline stage that has most layers and the head."""
    model = build_model(run.model)
    tokens = run.sequence_length * plan.micro_batch // plan.context
    counts: Counter[Gemm] = Counter()
    micro_batches = plan.num_micro_batches(run.global_batch)
    matmul = run.precision.matmul
    for layer in list(model.layers.values())[:: plan.pipeline]:
        for name, module in layer.named_modules():
            if isinstance(module, Linear):
                n, k = _sharded(name.rpartition(".")[2], module.out_features, module.in_features, plan)
                _count(counts, run, plan, format=matmul, shape=(tokens, n, k), count=micro_batches)
    vocab = run.model.vocab // plan.tensor
    said, sums = chunk_column(run.kernels.loss_chunk), run.lora is None or bool(run.lora.modules_to_save)
    rows = int(loss_rows(tokens, said=said, vocab=vocab, hidden=run.model.hidden, element_bytes=2, sums=sums))
    chunks = micro_batches * (tokens // rows)
    head = "bf16" if matmul in ("fp8", "fp4") else matmul
    _count(counts, run, plan, format=head, shape=(rows, vocab, run.model.hidden), count=chunks, is_head=True)
    return dict(sorted(counts.items(), key=lambda item: (item[0].flops, item[0])))


def _sharded(name: str, n: int, k: int, plan: Plan) -> tuple[int, int]:
    if name in COLUMNS:
        return n // plan.tensor, k
    return (n, k // plan.tensor) if name in ROWS else (n, k)


def _count(
    counts: Counter[Gemm],
    run: Run,
    plan: Plan,
    *,
    format: str,
    shape: tuple[int, int, int],
    count: int,
    is_head: bool = False,
) -> None:
    m, n, k = shape
    is_recomputed = plan.recompute is Recompute.FULL and not is_head
    for kernel in GemmKind:
        is_saved = is_head and run.lora is not None and run.lora.modules_to_save
        if kernel is GemmKind.WEIGHT_GRADIENT and run.lora is not None and not is_saved:
            continue  # the base is frozen
        times = 2 if is_recomputed and kernel is GemmKind.FORWARD else 1
        counts[Gemm(format=format, m=m, n=n, k=k, kernel=kernel)] += times * count
