"""Points: a model's shapes first, then a grid without gaps or repetitions."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from meshwright.catalog.lookup import model
from meshwright.cost.flops import model_flops_per_token
from meshwright.cost.tables import model_row
from meshwright.records.points import (
    KERNELS,
    REACH,
    SHARES,
    TOGETHER_SHARE,
    Point,
    PointFamily,
    Workload,
    gemm_points,
    points_of,
)
from meshwright.specs.plan import Plan

FORMATS = ("fp32", "bf16")


def workload(name: str, **plan: int) -> Workload:
    return Workload(model=model(name), plan=Plan(**plan), seq_len=4096)


def points(family: PointFamily, **changes: object) -> list[Point]:
    return list(points_of(family, **{"device_type": "cpu", "formats": FORMATS, **changes}))


@pytest.mark.parametrize("device_type", REACH)
@pytest.mark.parametrize("family", PointFamily)
def test_points_are_distinct_and_have_work(family, device_type):
    found = points(family, device_type=device_type, num_processes=2)
    if family is PointFamily.TRAINING:  # one process by itself is another number of processes
        found += points(family, device_type=device_type, num_processes=1)
    assert len(set(found)) == len(found)
    assert {p.kernel for p in found} == set(KERNELS[family])
    assert all(p.family is family for p in found)
    assert all(p.flops + p.bytes > 0 or family is PointFamily.LAUNCH for p in found)


def test_the_time_is_shared_out_whole():
    """On a CPU, which is its own host and transfers nothing."""
    assert set(SHARES) == set(PointFamily) - {PointFamily.COLLECTIVES}
    alone = sum(share for family, share in SHARES.items() if family is not PointFamily.TRANSFER)
    assert alone + TOGETHER_SHARE == pytest.approx(1)


def test_the_three_gemms_of_a_linear_layer_have_the_same_flops():
    products = gemm_points(48, 80, 112, format="bf16")
    assert {p.flops for p in products} == {2 * 48 * 80 * 112}
    assert [(p.m, p.n, p.k) for p in products] == [(48, 80, 112), (48, 112, 80), (80, 112, 48)]


def test_a_model_s_gemms_sum_to_its_linear_flops():
    asked = workload("llama3.1-8b")
    shapes = {(p.m, p.n, p.k) for p in islice(points(PointFamily.GEMM, workload=asked, formats=["bf16"]), 3, 3 + 15)}
    row = model_row(asked.model)
    layer = [(4096, 6144, 4096), (4096, 4096, 4096), (4096, 28672, 4096), (4096, 4096, 14336)]
    head = (4096, 128256, 4096)
    assert {*layer, head} <= shapes
    flops = 3 * (32 * sum(2 * m * n * k for m, n, k in layer) + 2 * np.prod([float(x) for x in head]))
    core = 3 * 32 * 4 * 4096 * (4096 + 1) / 2 * row.num_heads * row.qk_dim
    assert (flops + core) / 4096 == pytest.approx(float(model_flops_per_token(row, seq_len=4096)), rel=1e-3)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "llama3.1-70b"])
def test_a_plan_shards_the_shapes(name):
    whole = points(PointFamily.GEMM, workload=workload(name), formats=["bf16"])
    split = points(PointFamily.GEMM, workload=workload(name, tensor=8, data_shard=4), formats=["bf16"])
    assert sum(p.flops for p in split[3:18]) < 0.5 * sum(p.flops for p in whole[3:18])
    assert all(min(p.m, p.n, p.k) > 0 for p in split)


def test_attention_counts_causal_flops():
    p = Point(
        family=PointFamily.ATTENTION,
        kernel="forward",
        format="bf16",
        sequences=2,
        heads=4,
        kv_heads=2,
        seq_len=3,
        head_dim=8,
    )
    assert p.flops == 2 * 4 * (1 + 2 + 3) * 4 * 8  # queries see 1, 2 and 3 keys: q k and p v


def test_any_first_part_of_the_grid_covers_the_space():
    shapes = np.log2([(p.m, p.n, p.k) for p in points(PointFamily.GEMM, formats=["fp32"]) if p.kernel == "forward"])
    low, high = REACH["cpu"].gemm
    for axis in range(3):
        upper = (shapes[1:65, axis] > (low + high) / 2).sum()
        assert 28 <= upper <= 36
