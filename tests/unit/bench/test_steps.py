"""Whole steps: a point names a run and a plan that planner and engine both take, and its step really trains."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import pytest

from meshwright.catalog import lookup as catalog
from meshwright.cost.flops import model_flops_per_token
from meshwright.cost.tables import model_row
from meshwright.engines.native.check import check
from meshwright.planner.engines import Severity
from meshwright.planner.legality import legality_context, violations
from meshwright.planner.request import request_for
from meshwright.records.points import KERNELS, REACH, Point, PointFamily, points_of
from meshwright.records.steps import plan_of, run_of
from meshwright.specs.plan import Sharding
from meshwright.specs.run import Run

pytestmark = pytest.mark.usefixtures("warm_ranks")

FORMATS = ("fp32", "bf16")
APART = {"isolated", "concurrent"}  # each process trains a model of its own
SMALL = Point(
    family=PointFamily.TRAINING, kernel="isolated", format="fp32", m=64, n=96, sequences=1, heads=2, kv_heads=1,
    head_dim=32, seq_len=32, layers=2, vocab=512, micro_batches=2,
)  # fmt: skip


def points(num_processes: int, *, device_type: str = "cpu", count: int = 60) -> list[Point]:
    found = points_of(PointFamily.TRAINING, device_type=device_type, formats=FORMATS, num_processes=num_processes)
    return list(islice(found, count))


def planned(point: Point) -> Run:
    """The point as the planner is asked about it: on so many devices of one machine."""
    cluster = catalog.cluster("h100-8x1")
    count = plan_of(point).num_devices
    fabric = replace(cluster.fabric, scale_up_domain=count)
    cluster = replace(cluster, devices_per_node=count, fabric=fabric)
    return replace(run_of(point), cluster=cluster, plan=plan_of(point))


@pytest.mark.parametrize("num_processes", [1, 2, 3, 4, 8])
def test_planner_and_engine_take_every_point(num_processes):
    for point in points(num_processes):
        run = planned(point)
        assert run.plan is not None
        assert run.plan.num_devices == (1 if point.kernel in APART else num_processes)
        assert check(run) == (), point
        setting = legality_context(request_for(run))
        refused = [v for v in violations(run.plan, context=setting) if v.severity is Severity.REFUSED]
        assert refused == [], point


def test_a_run_has_the_numbers_of_its_point():
    run, plan = run_of(SMALL), plan_of(SMALL)
    model = run.model
    assert (model.hidden, model.num_layers, model.vocab, model.ffn_hidden) == (64, 2, 512, 96)
    assert (model.attention.num_heads, model.attention.num_kv_heads, model.attention.head_dim) == (2, 1, 32)
    assert (run.sequence_length, run.global_batch, run.micro_batch) == (32, 2, 1)
    assert plan.num_devices == 1
    assert run.precision.matmul == "fp32"
    assert run_of(replace(SMALL, format="bf16")).precision.matmul == "bf16"


@pytest.mark.parametrize("kernel", KERNELS[PointFamily.TRAINING])
def test_a_plan_shards_the_axis_of_its_name(kernel):
    n = 1 if kernel in APART else 4
    plan = plan_of(replace(SMALL, kernel=kernel, num_processes=1 if kernel == "isolated" else 4))
    assert plan.num_devices == n
    divided = {"tensor": plan.tensor, "pipeline": plan.pipeline}
    assert divided.get(kernel, plan.data) == n
    sharded = {"zero1": Sharding.OPTIMIZER, "fsdp": Sharding.PARAMETERS, "ddp": Sharding.NONE}
    assert plan.sharding is sharded.get(kernel, plan.sharding)


@pytest.mark.parametrize("device_type", REACH)
@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_kinds_and_formats_take_turns(num_processes, device_type):
    """Whatever the time allows, no kind is left behind."""
    found = points(num_processes, device_type=device_type)
    kinds = ("isolated",) if num_processes == 1 else KERNELS[PointFamily.TRAINING][1:]
    counts = Counter((p.kernel, p.format) for p in found)
    assert counts.keys() == {(kind, name) for kind in kinds for name in FORMATS}
    assert {p.kernel for p in found[: 4 * len(kinds)]} == set(kinds)


def test_flops_are_those_of_its_model_without_attention():
    for point in points(1):
        run = run_of(point)
        row, tokens = model_row(run.model), run.global_batch * run.sequence_length
        core = 3 * point.layers * 4 * point.seq_len / 2 * point.heads * point.head_dim
        of_model = float(model_flops_per_token(row, seq_len=point.seq_len)) - core
        assert point.flops == pytest.approx(tokens * of_model, rel=1e-6)


def test_a_step_multiplies_what_its_point_says():
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    from meshwright.bench.collectives import step_of
    from meshwright.kernels.linear import OWN_GEMMS

    step = step_of(SMALL, torch.device("cpu"))
    step()
    products = {operation.overloadpacket: _flops for operation in OWN_GEMMS}
    with FlopCounterMode(display=False, custom_mapping=products) as counter:
        step()
    assert counter.get_total_flops() == pytest.approx(SMALL.flops, rel=0.15)  # attention comes on top


def _flops(x: Sequence[int], weight: Sequence[int], *_: object, **__: object) -> int:
    """Of [..., K] with [N, K]."""
    return 2 * math.prod(x) * weight[0]


def small(kernel: str) -> Point:
    """Of two processes."""
    num_micro = 2 if kernel in ("concurrent", "tensor") else 4
    return replace(SMALL, kernel=kernel, num_processes=2, kv_heads=2, micro_batches=num_micro)


@pytest.mark.when_touched  # test_device.py measures whole steps in a process of its own
@pytest.mark.distributed
def test_two_processes_communicate_and_train_in_every_way(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    from meshwright.bench import device as campaign
    from meshwright.records.device import DeviceRecorder, PointStatus, read

    kinds = KERNELS[PointFamily.TRAINING][1:]
    gather = Point(family=PointFamily.COLLECTIVES, kernel="all_gather", size_bytes=4096, num_processes=2)

    def few(family: PointFamily, *, num_processes: int = 1, **_: object) -> list[Point]:
        if family is PointFamily.COLLECTIVES:
            return [gather]
        return [SMALL] if num_processes == 1 else [small(kernel) for kernel in kinds]

    monkeypatch.setattr(campaign, "points_of", few)
    monkeypatch.setattr(campaign, "LONGEST_POINT_S", 0.3)
    request = campaign.DeviceBenchRequest(
        families=(PointFamily.TRAINING, PointFamily.COLLECTIVES), budget_s=300.0, num_processes=(1, 2)
    )
    cpu = torch.device("cpu")
    recorder = DeviceRecorder(tmp_path, sidecar=campaign.sidecar_of(cpu, request), resume=False)
    outcome = campaign.measure_device(request, device=cpu, recorder=recorder)
    assert [note for note in outcome.notes if "busy" not in note] == []
    rows = read(tmp_path).rows
    assert [row.point for row in rows] == [SMALL, gather, *map(small, kinds), SMALL, SMALL]  # its windows
    assert all(row.status is not PointStatus.FAILED and row.seconds_median > 0 for row in rows)
    assert sum(outcome.counts[PointFamily.TRAINING].values()) == 1 + len(kinds)
    assert sum(outcome.counts[PointFamily.COLLECTIVES].values()) == 1
