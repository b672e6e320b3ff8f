"""Layers of each pipeline rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.catalog import lookup as catalog
from meshwright.cost.pipeline.schedules import shape_of
from meshwright.cost.stages import StageLayers, balanced_layers, layers_per_stage, split_layers
from meshwright.cost.tables import model_row, plan_row
from meshwright.specs.model import Attention, Experts, Model
from meshwright.specs.plan import Plan, Schedule

# The model of 8.86 billion parameters in the HF Ultra-Scale Playbook; its head counts as 2.2 layers.
PLAYBOOK = Model(
    name="playbook",
    hidden=4096,
    num_layers=32,
    vocab=131072,
    attention=Attention(num_heads=32, num_kv_heads=32, head_dim=128),
    ffn_hidden=14336,
)


def split(model: Model, pipeline: int, virtual: int = 1, *, by_cost: int = 0) -> StageLayers:
    schedule = Schedule.INTERLEAVED if virtual > 1 else Schedule.ONE_F_ONE_B
    plan = Plan(pipeline=pipeline, virtual_pipeline=virtual, schedule=schedule)
    return split_layers(model_row(model), plan_row(plan), by_cost=by_cost)


@pytest.mark.parametrize(
    ("layers", "pipeline", "virtual", "expected"),
    [
        (80, 4, 1, (20, 20, 20)),
        (80, 4, 5, (20, 20, 20)),
        (126, 8, 1, (15, 16, 15)),  # Llama 3.1 405B, arXiv 2407.21783, section 3.3.2
        (126, 16, 8, (7, 8, 7)),
        (70, 12, 1, (5, 6, 5)),  # BLOOM: 70 layers, embedding and head counted as one each
        (32, 1, 1, (32, 32, 32)),
    ],
)
def test_layers_per_rank(layers: int, pipeline: int, virtual: int, expected: tuple[int, ...]) -> None:
    stages = split(replace(PLAYBOOK, num_layers=layers), pipeline, virtual)
    assert (stages.first, stages.middle, stages.last) == expected


@pytest.mark.parametrize(
    ("pipeline", "first", "last"), [(2, 18, 14), (4, 9, 6), (8, 5, 2), (16, 3, 0), (32, 2, 0), (1, 32, 32)]
)
def test_nanotron_fills_early_ranks(pipeline: int, first: int, last: int) -> None:
    stages = split(PLAYBOOK, pipeline, by_cost=1)
    assert (stages.first, stages.last) == (first, last)


@pytest.mark.parametrize("by_cost", [0, 1])
@pytest.mark.parametrize("pipeline", [2, 3, 4, 8, 16])
def test_no_layer_is_lost(pipeline: int, by_cost: int) -> None:
    stages = split(PLAYBOOK, pipeline, by_cost=by_cost)
    assert stages.first + (pipeline - 2) * stages.middle + stages.last == pytest.approx(PLAYBOOK.num_layers)


def test_dense_layers_of_a_mixture_come_first() -> None:
    stages = split(catalog.model("deepseek-v3"), 4)
    assert (stages.first_dense, stages.middle_dense, stages.last_dense) == (3, 0, 0)
    assert stages.first_moe == stages.first - 3


def test_dense_layers_are_counted_once() -> None:
    """On 16 ranks DeepSeek-V3's three dense layers lie on the first two; no rank between them and the last has any."""
    model = catalog.model("deepseek-v3")
    stages = split(model, 16)
    assert (stages.first, stages.middle, stages.last) == (2, 4, 3)
    assert (stages.first_dense, stages.middle_dense, stages.last_dense) == (2, 0, 0)


def test_a_plan_may_name_its_layers() -> None:
    plan = Plan(pipeline=16, layers_per_stage=(4,) * 15 + (1,))
    stages = split_layers(model_row(catalog.model("deepseek-v3")), plan_row(plan))
    assert (stages.first_dense, stages.first_moe, stages.middle_moe, stages.last_moe) == (3, 1, 4, 1)


SHAPES = [
    (4, 1, Schedule.ONE_F_ONE_B),
    (4, 2, Schedule.INTERLEAVED),
    (3, 3, Schedule.INTERLEAVED),
    (4, 2, Schedule.ZBV),
    (4, 1, Schedule.DUALPIPE),
]


@given(layers=st.integers(18, 90), dense=st.integers(0, 20), shape=st.sampled_from(SHAPES))
def test_the_ranks_hold_what_their_stages_do(layers: int, dense: int, shape: tuple[int, int, Schedule]) -> None:
    """First and last rank of the usual split by adding up stages, of each placement, dense layers first."""
    pipeline, virtual, schedule = shape
    model = replace(
        PLAYBOOK,
        num_layers=layers,
        experts=Experts(num_experts=8, top_k=2, ffn_hidden=512, num_dense_layers=min(dense, layers - 1)),
    )
    plan = Plan(pipeline=pipeline, virtual_pipeline=virtual, schedule=schedule)
    of_stage = layers_per_stage(layers, pipeline * virtual)
    if layers - (pipeline * virtual - 2) * -(-layers // (pipeline * virtual)) < 0:
        return  # as even as can be: costed by the mean
    found = split_layers(model_row(model), plan_row(plan))
    pipe = shape_of(plan)
    for name, rank in (("first", 0), ("middle", pipeline - 2), ("last", pipeline - 1)):
        total = dense_total = 0
        for stage in pipe.stages_of(rank):
            before = sum(of_stage[:stage])
            total += of_stage[stage]
            dense_total += min(max(model.num_dense_layers - before, 0), of_stage[stage])
        held = pipe.record.stages_held
        assert getattr(found, name) == pytest.approx(total / held)
        assert getattr(found, f"{name}_dense") == pytest.approx(dense_total / held)


@given(
    weights=st.lists(st.sampled_from([1.0, 0.7]), min_size=1, max_size=9),
    num_stages=st.integers(1, 5),
    end=st.floats(0, 4),
)
def test_no_split_has_a_lighter_heaviest_stage(weights: list[float], num_stages: int, end: float) -> None:
    if num_stages > len(weights):
        return

    def heaviest(split: Sequence[int]) -> float:
        stops = [0, *accumulate(split)]
        sums = [sum(weights[a:b]) for a, b in pairwise(stops)]
        return max([*sums[:-1], sums[-1] + end])

    every = [
        tuple(b - a for a, b in pairwise((0, *cuts, len(weights))))
        for cuts in combinations(range(1, len(weights)), num_stages - 1)
    ]
    found = balanced_layers(weights, num_stages, end=end)
    assert found in every
    assert heaviest(found) <= min(map(heaviest, every)) * (1 + 1e-5)
