"""Emulating a large cluster on a small one by shrinking the batch.

"At-scale AI training on AMD Instinct MI350/MI300X series GPUs" (whitepaper, AMD 2025, table 1) measures 768
devices, two replicas, with the share of the global batch that they would have among W devices:

    batch on the small cluster = global batch x small / W

Each replica then runs as many micro-batches as it would in the large cluster, so the pipeline's bubble and
everything inside a replica are seen. The rest is computed: the same replica, as many as W
devices hold (rounded to whole ones, with the same share of the batch each), and the difference by component.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.errors import InfeasibleError
from meshwright.planner.scaling.curve import efficiency_between
from meshwright.planner.scaling.sizes import Costed, Study, Unreached, costed, replica_devices, resized
from meshwright.specs.estimate import Estimate

UNSEEN: Mapping[str, tuple[str, ...]] = {
    "data parallel": ("data_parallel", "gather"),  # larger groups, more of them across the spine
    "optimizer": ("optimizer",),  # states are sharded over more devices
    "stragglers": ("stragglers",),  # more devices to wait for
}


@dataclass(frozen=True, kw_only=True, eq=False)
class EmulatedPoint:
    """One size and its stand-in. `difference_s`: the large cluster's step minus the small one's, by cause."""

    num_devices: int  # what the small cluster stands for
    emulated: Costed
    efficiency: Estimate  # of the emulation, against the whole batch on the small cluster
    real: Costed | None = None
    real_efficiency: Estimate | None = None
    why_not: str = ""  # there is no real one
    difference_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Emulation:
    """`emulate`'s answer. `base` is the small cluster with the whole batch."""

    base: Costed
    points: tuple[EmulatedPoint, ...]
    unreached: tuple[Unreached, ...]


def emulate(study: Study, sizes: Sequence[int], *, small: int, with_real: bool = True) -> Emulation:
    """Emulate `sizes` on `small` devices with one plan: the study's, or the planner's for the whole batch.

    `with_real` false leaves the large clusters out.
    Raises InfeasibleError when the plan cannot run on the small cluster, InputError when a size has no whole
    nodes.
    """
    request = replace(study.request, cluster=resized(study.request.cluster, small))
    base = costed(study, request)
    if isinstance(base, Unreached):
        raise InfeasibleError(f"the run cannot be emulated on {small:,} devices: {base.why_not}")
    study = replace(study, plan=base.plan, known={})
    found = [_point(study, base, n, with_real=with_real) for n in sorted(set(sizes))]
    return Emulation(
        base=base,
        points=tuple(p for p in found if isinstance(p, EmulatedPoint)),
        unreached=tuple(p for p in found if isinstance(p, Unreached)),
    )


def _point(study: Study, base: Costed, num_devices: int, *, with_real: bool) -> EmulatedPoint | Unreached:
    batch, rest = divmod(base.global_batch * base.num_devices, num_devices)
    if rest or not batch:
        why_not = "its share of the batch is no whole number of sequences"
        return Unreached(num_devices=num_devices, global_batch=batch, why_not=why_not)
    emulated = costed(study, replace(base.request, global_batch=batch))
    if isinstance(emulated, Unreached):
        return replace(emulated, num_devices=num_devices)
    point = EmulatedPoint(
        num_devices=num_devices, emulated=emulated, efficiency=efficiency_between(study, emulated, base)
    )
    real = _real(study, emulated, num_devices) if with_real else None
    if not isinstance(real, Costed):
        return replace(point, why_not=real.why_not if real else "")
    return replace(
        point,
        real=real,
        real_efficiency=efficiency_between(study, real, base),
        difference_s=_difference_s(emulated, real),
    )


def _real(study: Study, emulated: Costed, num_devices: int) -> Costed | Unreached:
    """The nearest whole number of replicas, each with the share of the batch that it has in the emulation."""
    replica = replica_devices(emulated.plan)
    num_replicas = max(1, round(num_devices / replica))
    batch = emulated.global_batch * num_replicas * replica // emulated.num_devices
    cluster = resized(study.request.cluster, num_replicas * replica)
    return costed(study, replace(study.request, cluster=cluster, global_batch=batch))


def _difference_s(emulated: Costed, real: Costed) -> dict[str, float]:
    first, second = (c.estimate.step.components_s for c in (emulated, real))
    parts = {
        cause: sum(second.get(name, 0.0) - first.get(name, 0.0) for name in names) for cause, names in UNSEEN.items()
    }
    parts["everything else"] = real.step_s - emulated.step_s - sum(parts.values())
    return parts
