"""Pipelines: the planner's tables run, every schedule equals one process, both ends may be one tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from tests.tiny_runs import SHARED_EXPERT, tiny_run

from meshwright.cost.pipeline.graph import event_graph
from meshwright.cost.pipeline.schedules import rank_orders, schedule_shortfall, shape_of
from meshwright.cost.stages import layers_per_stage
from meshwright.engines.native.check import check_plan
from meshwright.engines.native.parallel import pipeline_runtime
from meshwright.engines.native.parallel.mesh import MeshCoordinates, last_pipeline_rank
from meshwright.engines.native.parallel.pipeline import layers_of_stages, stages_of_rank
from meshwright.errors import MissingDependencyError
from meshwright.specs.plan import Plan, Schedule, Sharding

pytestmark = pytest.mark.usefixtures("warm_ranks", "without_measuring")

FIVE_LAYERS = ("model.num_layers=5", "batch.global_sequences=6")

ZB, V = {"schedule": Schedule.ZERO_BUBBLE}, {"schedule": Schedule.ZBV, "virtual_pipeline": 2}
INTERLEAVED = {"schedule": Schedule.INTERLEAVED, "virtual_pipeline": 2}
FSDP = {"data_shard": 2, "sharding": Sharding.PARAMETERS}

ON_TWO = [
    Plan(pipeline=2, **ZB),
    Plan(pipeline=2, **V),
    Plan(pipeline=2, schedule=Schedule.GPIPE),
    Plan(pipeline=2, **INTERLEAVED, micro_batch=2),  # 3 micro-batches: no whole rounds of 2 stages
    Plan(pipeline=2, layers_per_stage=(1, 4)),
]
ON_FOUR = [
    Plan(pipeline=2, tensor=2, **ZB),
    Plan(pipeline=2, **FSDP, **ZB),
    Plan(pipeline=2, **FSDP, **V),
    Plan(pipeline=2, **FSDP, **INTERLEAVED),
    Plan(pipeline=4, **ZB, layers_per_stage=(0, 2, 3, 0)),
]
TIED = [Plan(pipeline=2), Plan(pipeline=2, **ZB), Plan(pipeline=2, **V)]


@pytest.fixture
def run():
    return tiny_run(*FIVE_LAYERS)


@pytest.fixture
def tied_run():
    return tiny_run(*FIVE_LAYERS, "model.tied_embeddings=true")


@pytest.fixture
def moe_run():
    return tiny_run(*FIVE_LAYERS, SHARED_EXPERT)


@pytest.mark.distributed
def test_every_schedule_equals_one_process(run, equals_one_process):
    equals_one_process([(run, plan) for plan in ON_TWO])


@pytest.mark.distributed
@pytest.mark.slow
def test_schedules_with_other_axes_equal_one_process(run, equals_one_process):
    equals_one_process([(run, plan) for plan in ON_FOUR])


@pytest.mark.distributed
@pytest.mark.when_touched  # test_every_schedule_equals_one_process has the same stages
def test_tied_ends_equal_one_tensor(tied_run, equals_one_process):
    equals_one_process([(tied_run, plan) for plan in TIED])


@pytest.mark.distributed
@pytest.mark.slow
def test_sharded_tied_ends_and_experts_equal_one_process(tied_run, moe_run, equals_one_process):
    equals_one_process([(tied_run, Plan(pipeline=2, **FSDP, **schedule)) for schedule in (ZB, V)])
    equals_one_process([(moe_run, Plan(pipeline=2, **schedule)) for schedule in (ZB, V)])


@pytest.mark.distributed
@pytest.mark.when_touched  # test_every_schedule_equals_one_process has the same stages
def test_a_v_trains_validates_saves_and_writes(tiny_run, tmp_path):
    text = tmp_path / "corpus.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    model = (
        "{name: tiny, hidden: 32, num_layers: 4, vocab: 257, ffn_hidden: 64, tied_embeddings: true, "
        "attention: {num_heads: 4, num_kv_heads: 2}}"
    )
    training = tiny_run(
        tmp_path / "run",
        model=model,
        data=f"{{source: {text}, tokenizer: bytes, sequence_length: 16}}",
        batch="{global_sequences: 4, micro: 1}",
        precision="fp32",
        optimizer="{learning_rate: 1.0e-3, schedule: constant}",
        train="{steps: 4, checkpoint: {folder: saved, every_steps: 2}, evaluate: {every_steps: 2, num_batches: 1}}",
    )
    plan = "parallel={data_shard: 1, pipeline: 2, virtual_pipeline: 2, schedule: zbv}"
    record = training.train("--set", plan, "--set", "train.steps=2", page=True)
    assert record["sample"]
    alone = training.train("--resume")  # the whole model and one tensor for both ends, in one process
    assert alone["statistics"]["steps"] == 4
    other = replace(training, folder=tmp_path / "alone")
    assert other.train()["statistics"]["validation_loss"] == pytest.approx(
        alone["statistics"]["validation_loss"], rel=1e-5
    )
    assert other.losses() == pytest.approx(training.losses(), rel=1e-5)
    assert other.steps()[1]["validation_loss"] == pytest.approx(record["statistics"]["validation_loss"], rel=1e-5)


# --- where layers are, and in which order they run ---


def test_every_layer_stands_on_one_stage():
    for plan in (Plan(pipeline=3, virtual_pipeline=2), Plan(pipeline=5), Plan(pipeline=8, virtual_pipeline=2)):
        for num_layers in (16, 17, 23, 126):
            stages = layers_of_stages(plan, num_layers=num_layers)
            assert [i for stage in stages for i in stage] == list(range(num_layers))
            held = [i for rank in range(plan.pipeline) for i in stages_of_rank(plan, rank)]
            assert sorted(held) == list(range(len(stages)))


def test_a_v_ends_where_it_began(run):
    plan = Plan(pipeline=4, **V)
    assert [stages_of_rank(plan, rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert last_pipeline_rank(plan) == 0
    assert last_pipeline_rank(replace(plan, schedule=Schedule.ONE_F_ONE_B, virtual_pipeline=1)) == 3
    coordinates = MeshCoordinates(plan=plan, device="cpu", pipeline_rank=0)
    assert coordinates.is_first_stage
    assert coordinates.is_last_stage


def test_the_order_that_runs_is_the_one_that_is_simulated():
    plan = Plan(pipeline=4, **ZB)
    shape = shape_of(plan, num_micro_batches=6)
    graph = event_graph(shape)
    for rank, order in enumerate(rank_orders(shape)):
        mine = slice(graph.rank_bounds[rank], graph.rank_bounds[rank + 1])
        simulated = [
            f"{s}{pipeline_runtime.LETTERS[k]}{m}"
            for s, k, m in zip(graph.stage[mine], graph.kind[mine], graph.micro_batch[mine], strict=True)
        ]
        assert pipeline_runtime.action_names(order) == simulated


def test_another_pytorch_is_refused_in_words(monkeypatch):
    monkeypatch.delattr("torch.distributed.pipelining.schedules._PipelineScheduleRuntime")
    with pytest.raises(MissingDependencyError, match="no pipeline runtime that takes a table"):
        pipeline_runtime.PipelineRuntime(shape_of(Plan(pipeline=2)), [], loss=lambda loss, target: loss)


@pytest.mark.parametrize(
    ("plan", "key", "words"),
    [
        (Plan(pipeline=2, schedule=Schedule.DUALPIPE), "parallel.schedule", "two micro-batches at once"),
        (Plan(pipeline=4, **V), "parallel.schedule", "zbv needs 7 micro-batches"),
        (Plan(pipeline=2, schedule=Schedule.ZBV), "parallel.schedule", "exactly 2 chunks"),
        (Plan(pipeline=2, virtual_pipeline=2), "parallel.schedule", "1f1b has exactly 1 chunk"),
        (Plan(pipeline=3, layers_per_stage=(2, 0, 3)), "parallel.pipeline", "need a layer each"),
        (Plan(virtual_pipeline=2), "parallel.virtual_pipeline", "needs pipeline > 1"),
    ],
)
def test_what_no_pipeline_can_do_is_refused(run, plan, key, words):
    found = {problem.key: problem.reason for problem in check_plan(plan, run=run)}
    assert words in found[key]


def test_the_planner_costs_the_layers_that_run():
    assert layers_per_stage(5, 2) == (2, 3)
    assert layers_per_stage(10, 4) == (2, 3, 3, 2)
    assert schedule_shortfall(shape_of(Plan(pipeline=2), num_micro_batches=1)) is None
