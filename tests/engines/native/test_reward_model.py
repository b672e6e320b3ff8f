"""Reward models: scores and loss of transformers and TRL, under every plan, with adapters, exported and read back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from tests.answer_runs import LORA, lines_of, pairs, run_on
from tests.tiny_runs import tiny_run
from torch import Tensor
from torch.nn.functional import logsigmoid

import meshwright as mw
from meshwright.engines.native.assembly import assemble
from meshwright.engines.native.batch_loader import open_batch_loader
from meshwright.engines.native.check import check
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.engines.native.rehearsal import EPSILON
from meshwright.specs.plan import Plan, Recompute, Sharding
from meshwright.training.models import merge_adapters, rewards_from, saved_modules
from meshwright.training.weights import adapters_of, load_adapters, read_lora, save_adapters, save_weights

pytestmark = pytest.mark.usefixtures("warm_ranks", "without_measuring", "without_page")

NUM, LENGTH, CENTER = 8, 40, 0.02
REWARD = f"train.preference={{loss: reward, center_coefficient: {CENTER}}}"
ALONE = MeshCoordinates(plan=Plan(micro_batch=NUM), device=torch.device("cpu"))
TIED = ("model.tied_embeddings=true",)
RECORDS = pairs(NUM)


def run_of(data, *overrides: str):
    return run_on(data, REWARD, *overrides, length=LENGTH, micro=NUM)


def texts_of(key: str) -> list[Tensor]:
    """The tokens of all prompts with these answers; 256 ends a document."""
    rows = [[*row["prompt"].encode(), *row[key].encode(), 256] for row in RECORDS]
    return [torch.tensor([row[: LENGTH // 2]]) for row in rows]


def theirs(folder):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)


def loss_of_trl(model) -> tuple[Tensor, Tensor]:
    """The loss of TRL's RewardTrainer.compute_loss on a model of transformers, and the scores [2, N]."""
    scores = torch.stack([torch.cat([model(t).logits[:, 0] for t in texts_of(k)]) for k in ("chosen", "rejected")])
    good, bad = scores
    return -logsigmoid(good - bad).mean() + CENTER * (good + bad).square().mean(), scores


@pytest.mark.parametrize("kind", [(), TIED, LORA], ids=["all weights", "tied", "adapters"])
def test_loss_gradients_and_rewards_are_those_of_transformers_and_trl(data, tmp_path, kind):
    run = run_of(data, *kind)
    parts, loader = assemble(run, coordinates=ALONE), open_batch_loader(run, coordinates=ALONE)
    (module,) = parts.modules
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in (p for p in module.parameters() if p.requires_grad):
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    batch = loader.batch(0)
    loss = parts.stepper.forward_backward(batch.tensors, scale=batch.counts.loss_scale)
    gradient = module.head.weight.grad.clone()
    found = rewards_from(parts.collect_reward_sums())
    if kind == LORA:
        assert {*saved_modules(module)} == {"head"}
        merge_adapters(module)
    save_weights(module, tmp_path / "reward", dtype=torch.float32)
    other = theirs(tmp_path / "reward")
    expected, scores = loss_of_trl(other)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, other.score.weight.grad, rtol=1e-4, atol=1e-6)
    if kind != LORA:
        gate = module.get_parameter("layers.0.ffn.gate.weight").grad
        torch.testing.assert_close(gate, other.model.layers[0].mlp.gate_proj.weight.grad, rtol=1e-3, atol=1e-6)
    means = scores.mean(1)
    assert found == pytest.approx(
        {
            "chosen": means[0].item(), "rejected": means[1].item(), "margin": (means[0] - means[1]).item(),
            "accuracy": (scores[0] > scores[1]).float().mean().item(),
        }, rel=1e-4,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft 0.21 with transformers 5.23
@pytest.mark.parametrize("kind", [(), LORA], ids=["all weights", "adapters"])
def test_what_is_exported_scores_what_was_trained(tiny_reward, tmp_path, meshwright, kind):
    """From a model that writes texts to files that transformers and PEFT read."""
    training = tiny_reward(tmp_path / "a", *kind)
    record = training.train()
    assert any("the head that scores is not among the weights" in note for note in record["notes"])
    steps = training.steps()
    assert steps[-1]["validation_loss"] < steps[0]["loss"]
    assert steps[-1]["validation_rewards"]["accuracy"] > 0.8
    merge = ("--merge",) if kind else ()
    outcome = meshwright("checkpoint", "to-hf", tmp_path / "a" / "saved", tmp_path / "hf", *merge, "--dtype", "fp32")
    assert outcome.exit_code == 0, outcome.stderr
    with torch.no_grad():
        model = theirs(tmp_path / "hf")
        good, bad = (torch.cat([model(t).logits for t in texts_of(k)]) for k in ("chosen", "rejected"))
    assert (good > bad).float().mean() > 0.7
    if kind:
        peft = pytest.importorskip("peft")
        outcome = meshwright("checkpoint", "to-hf", tmp_path / "a" / "saved", tmp_path / "adapter", "--dtype", "fp32")
        assert outcome.exit_code == 0, outcome.stderr
        transformers = pytest.importorskip("transformers")
        base = transformers.AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "a" / "base", num_labels=1, dtype=torch.float32
        )
        model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
        with torch.no_grad():
            adapted = torch.cat([model(input_ids=t).logits for t in texts_of("chosen")])
        torch.testing.assert_close(adapted, good, rtol=1e-3, atol=1e-4)
    with pytest.raises(mw.InputError, match="a reward model scores texts"):
        mw.generate(str(tmp_path / "hf"), "1+1=")


PLANS = [
    Plan(data_shard=2, sharding=Sharding.PARAMETERS, recompute=Recompute.FULL, micro_batch=2),
    Plan(tensor=2, micro_batch=2),
    Plan(tensor=2, sequence_parallel=False, micro_batch=2),
]


@pytest.mark.distributed
@pytest.mark.when_touched  # test_preference.py divides pairs, and one process trains reward models above
@pytest.mark.parametrize("kind", [(), LORA], ids=["all weights", "adapters"])
def test_a_plan_equals_one_process(equals_one_process, kind):
    # As in a rehearsal: with the usual one a gradient that is all rounding error moves its weight a whole step.
    run = tiny_run(REWARD, f"optimizer.epsilon={EPSILON}", "batch={global_sequences: 8, micro: 2}", *kind)
    equals_one_process([(run, plan) for plan in PLANS])


def test_adapters_of_a_reward_model_come_back(tmp_path):
    run = tiny_run(REWARD, *LORA)
    (module,) = assemble(run, coordinates=ALONE).modules
    save_adapters(adapters_of(module), tmp_path / "adapter", model=run.model, lora=run.lora, base=None)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    config["modules_to_save"] = ["classifier", "score"]  # as PEFT writes it
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    assert read_lora(tmp_path / "adapter", model=run.model) == run.lora
    (other,) = assemble(replace(run, train=replace(run.train, seed=5)), coordinates=ALONE).modules
    assert not torch.equal(other.head.weight, module.head.weight)
    load_adapters(other, tmp_path / "adapter")
    assert torch.equal(other.head.weight, module.head.weight)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("train.preference={loss: reward, beta: 0.5}",), "train.preference.beta"),
        (("train.preference={loss: reward, margin: 0.5}",), "train.preference.margin"),
        (("train.preference={loss: reward, label_smoothing: 0.1}",), "train.preference.label_smoothing"),
        (("train.preference={loss: dpo, center_coefficient: 0.1}",), "train.preference.center_coefficient"),
        ((REWARD, "model.num_mtp_layers=1"), "model.num_mtp_layers"),
    ],
)
def test_what_a_reward_model_does_not_have_is_refused(overrides, key):
    assert [problem.key for problem in check(tiny_run(*overrides))] == [key]


def test_a_reward_model_trains_on_pairs_alone():
    run = tiny_run(REWARD)
    assert [problem.key for problem in check(replace(run, train=replace(run.train, preference=None)))] == ["model"]


@pytest.fixture
def tiny_reward(tiny_run):
    """A training of a reward model on a base that writes texts."""
    from tests.tiny_folders import tiny_folder

    def make(folder, *kind: str):
        folder.mkdir()
        tiny_folder(folder / "base")
        rows = lines_of(pairs(48))
        (folder / "pairs.jsonl").write_text(rows, encoding="utf-8")
        more = {"task": "lora", "lora": "{rank: 4, targets: [query, value, up, down]}"} if kind else {}
        return tiny_run(
            folder, model="./base", weights="base",
            data=f"{{source: pairs.jsonl, validation: pairs.jsonl, tokenizer: base, sequence_length: {LENGTH}}}",
            train="{steps: 30, preference: reward, evaluate: {every_steps: 30}, "
            "checkpoint: {folder: saved, every_steps: 30}}",
            batch="{global_sequences: 16, micro: 16}", optimizer="{learning_rate: 1.0e-2, schedule: constant}", **more,
        )  # fmt: skip

    return make
