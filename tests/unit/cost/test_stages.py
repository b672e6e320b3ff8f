"""How layers lie on pipeline ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import catalog
from meshwright.cost.stages import StageLayers, split_layers
from meshwright.cost.tables import model_row, plan_row
from meshwright.specs.model import Attention, Model
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
    ("pipeline", "first", "last"),
    [(2, 18, 14), (4, 9, 6), (8, 5, 2), (16, 3, 0), (32, 2, 0), (1, 32, 32)],
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
