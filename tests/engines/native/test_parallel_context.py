"""Sequences divided over ranks give the losses, gradients and weights of one process."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from tests.tiny_runs import LATENT, tiny_run

from meshwright.engines.base import TrainOptions
from meshwright.engines.native import engine
from meshwright.engines.native.check import check_plan
from meshwright.kernels.attention.key_ranges import key_ranges
from meshwright.specs.model import Attention, Model
from meshwright.specs.plan import Plan, Recompute, Schedule, Sharding
from meshwright.specs.run import Data, Evaluate, Train
from meshwright.training.models import build_model, init_weights
from meshwright.training.models.token_layout import Chunks

pytestmark = pytest.mark.usefixtures("warm_ranks", "without_measuring")

FULL = Sharding.PARAMETERS
LONGER = ("model.vocab=260", "model.num_layers=2", "data.sequence_length=32", "batch.global_sequences=4")


@pytest.fixture(scope="module")
def run():
    return tiny_run(*LONGER)


@pytest.fixture
def text(run, tmp_path, monkeypatch):
    """A run whose samples hold several documents, which end inside chunks and at other places in each."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(120):
        (folder / f"{n:02d}.txt").write_text(f"{n} and {n * n}, " * (1 + n % 3))
    return replace(run, data=Data(source=str(folder), tokenizer="bytes"))


@pytest.fixture
def answers(run, tmp_path, monkeypatch):
    """A run on records whose prompts are not trained on, packed with padding."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "answers.jsonl"
    records = [{"prompt": f"{n}+{n}=", "completion": f"{2 * n}" * (1 + n % 4)} for n in range(90)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return replace(run, data=Data(source=str(file), tokenizer="bytes"))


def windowed(run, window, num_layers=1):
    attention = replace(run.model.attention, window=window, num_windowed_layers=num_layers)
    return replace(run, model=replace(run.model, attention=attention))


@pytest.mark.distributed
def test_two_ranks_equal_one(run, text, answers, equals_one_process):
    latent = tiny_run(*LONGER, LATENT)
    pair = Plan(context=2, micro_batch=2)
    equals_one_process(
        [
            (run, replace(pair, sharding=FULL, recompute=Recompute.FULL)),
            (text, pair),
            (windowed(run, 5), pair),  # within a chunk and into the one before
            (latent, pair),
        ]
    )


@pytest.mark.when_touched  # test_two_ranks_equal_one has documents, windows and latent attention
@pytest.mark.distributed
def test_other_data_on_two_ranks_equals_one(run, text, answers, equals_one_process):
    pair = Plan(context=2, micro_batch=2)
    equals_one_process(
        [
            (run, replace(pair, sharding=Sharding.NONE)),
            (answers, pair),
            (windowed(answers, 6), pair),
            (answers, Plan(tensor=2, micro_batch=2)),
            (windowed(run, 20), pair),
            (windowed(text, 12), pair),
        ]
    )


@pytest.mark.when_touched  # test_two_ranks_equal_one has context parallelism
@pytest.mark.distributed
def test_four_ranks_equal_one(run, text, equals_one_process):
    equals_one_process(
        [
            (windowed(text, 12), Plan(context=4)),
            (text, Plan(context=2, tensor=2, micro_batch=2)),
            (text, Plan(context=2, data_shard=2, sharding=FULL)),
            (text, Plan(context=2, pipeline=2)),
        ]
    )


@pytest.mark.distributed
@pytest.mark.slow
def test_more_combinations_equal_one(run, equals_one_process):
    equals_one_process(
        [
            (run, Plan(context=4, sharding=Sharding.GRADIENTS)),
            (run, Plan(context=2, data_replicate=2, sharding=FULL)),
            (run, Plan(context=2, tensor=2, sequence_parallel=False, micro_batch=2)),
            (
                replace(run, model=replace(run.model, num_layers=4)),
                Plan(context=2, pipeline=2, virtual_pipeline=2, schedule=Schedule.INTERLEAVED),
            ),
        ]
    )


@pytest.mark.distributed
@pytest.mark.parametrize(
    "degrees",
    [
        {"context": 2},
        pytest.param({"context": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"pipeline": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.when_touched  # test_two_ranks_equal_one trains over context ranks
def test_a_divided_model_validates_and_writes_as_a_whole_one(text, tmp_path, degrees):
    text = replace(text, train=Train(steps=3, evaluate=Evaluate(num_batches=1)))
    options = TrainOptions(folder=tmp_path / "out", quiet=True)
    whole, divided = (
        engine.train(replace(text, plan=plan), options=options)
        for plan in (Plan(micro_batch=4), Plan(micro_batch=4, **degrees))
    )
    assert divided.sample == whole.sample
    assert whole.sample
    loss = whole.statistics["validation_loss"]
    assert divided.statistics["validation_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_chunks_cover_a_sequence_and_share_the_work(width):
    order_S = torch.arange(16)
    parts = [Chunks(rank=rank, width=width).of(order_S[None])[0] for rank in range(width)]
    assert torch.cat(parts).sort().values.equal(order_S)
    pairs = {int((part + 1).sum()) for part in parts}  # token t looks at t + 1 keys
    assert len(pairs) == 1


def test_masks_of_chunks_are_rows_of_the_whole_mask():
    documents_BS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 2, 2, -1]])
    whole_B1SS = key_ranges(documents_BS, window=3).mask_B1TS
    order_T = Chunks(rank=1, width=2).order(4)
    assert order_T.tolist() == [2, 3, 4, 5]
    assert key_ranges(documents_BS, window=3, order_T=order_T).mask_B1TS.equal(whole_B1SS[:, :, order_T])


def test_positions_are_those_of_the_sequence():
    model = build_model(
        Model(
            name="tiny",
            hidden=16,
            num_layers=1,
            vocab=32,
            ffn_hidden=16,
            attention=Attention(num_heads=2, num_kv_heads=2, head_dim=8),
        ),
        device="cpu",
    )
    init_weights(model, seed=1)
    whole = model.layout(torch.arange(8)[None], None)
    model.chunks = Chunks(rank=0, width=2)
    part = model.layout(model.chunks.of(torch.arange(8)[None]), None)
    assert part.full.cos_BT1J.equal(whole.full.cos_BT1J[:, [0, 1, 6, 7]])


@pytest.mark.parametrize(
    ("length", "plan", "problems"),
    [
        (32, Plan(context=4), 0),
        (36, Plan(context=4), 1),
        (36, Plan(context=2, tensor=2), 1),
        (34, Plan(context=2, tensor=2, sequence_parallel=False), 1),
        (36, Plan(context=2, tensor=2, sequence_parallel=False), 0),
    ],
)
def test_a_sequence_divides_into_two_chunks_a_rank(run, length, plan, problems):
    found = check_plan(plan, run=replace(run, sequence_length=length))
    assert len([p for p in found if p.key == "parallel.context"]) == problems
