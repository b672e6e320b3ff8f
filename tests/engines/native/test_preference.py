"""Pairs of answers: each loss by its paper's formula on whole logits, under every plan, resumed, and validated."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.answer_runs import LORA, lines_of, pairs, run_on
from tests.tiny_runs import EXPERTS, tiny_run
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid

from meshwright.engines.native.assembly import assemble
from meshwright.engines.native.batch_loader import open_batch_loader
from meshwright.engines.native.check import check, check_plan
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.engines.native.reference import score_references
from meshwright.errors import InputError
from meshwright.specs.plan import Plan, Recompute, Sharding
from meshwright.training.conversion import import_weights
from meshwright.training.models import build_model, init_adapters, init_weights, rewards_from
from meshwright.training.named_adapters import with_empty_adapters
from meshwright.training.weights import adapters_of, save_adapters, save_weights

pytestmark = pytest.mark.usefixtures("warm_ranks", "without_measuring", "without_page")

ALONE = MeshCoordinates(plan=Plan(micro_batch=2), device=torch.device("cpu"))
LENGTH = 32
HALF = LENGTH // 2
SETTINGS = {
    "dpo": "{loss: dpo, beta: 0.3}",
    "dpo, smoothed": "{loss: dpo, beta: 0.3, label_smoothing: 0.1}",
    "simpo": "{loss: simpo, beta: 2.0, margin: 0.4}",
    "orpo": "{loss: orpo, beta: 0.2}",
}
RECORDS = pairs(16, longest=9)


def run_of(data, preference: str, *overrides: str):
    return run_on(data, f"train.preference={preference}", *overrides, length=LENGTH, micro=2)


def expected_loss(log_p_P2: Tensor, lengths_P2: Tensor, reference_P2: Tensor, settings: str) -> tuple[Tensor, Tensor]:
    """Mean loss and rewards, from the papers."""
    good, bad = log_p_P2.T
    mean_good, mean_bad = (log_p_P2 / lengths_P2).T
    if settings == "orpo":  # equations 4 to 7: odds = p / (1 - p), of the geometric mean of the tokens
        odds = [m.exp() / (1 - m.exp()) for m in (mean_good, mean_bad)]
        return (-mean_good - 0.2 * logsigmoid((odds[0] / odds[1]).log())).mean(), 0.2 * (log_p_P2 / lengths_P2)
    if settings == "simpo":
        return -logsigmoid(2.0 * mean_good - 2.0 * mean_bad - 0.4).mean(), 2.0 * (log_p_P2 / lengths_P2)
    lead = 0.3 * ((good - reference_P2[:, 0]) - (bad - reference_P2[:, 1]))
    share = 0.1 if "smoothed" in settings else 0.0
    return (-(1 - share) * logsigmoid(lead) - share * logsigmoid(-lead)).mean(), 0.3 * (log_p_P2 - reference_P2)


def log_p_of(module, numbers: list[int]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the answers by whole logits, one sequence after the other, from the bytes of the pairs."""
    rows, found, lengths = RECORDS, [], []
    for number in numbers:
        for key in ("chosen", "rejected"):
            prompt, answer = rows[number]["prompt"].encode(), rows[number][key].encode()
            tokens = torch.tensor([[*prompt, *answer, 256]])[:, :HALF]  # 256 is the end of a document
            log_p = log_softmax(module(tokens)[0, :-1].float(), -1).gather(1, tokens[0, 1:, None])[:, 0]
            found.append(log_p[len(prompt) - 1 :].sum())
            lengths.append(len(log_p) - len(prompt) + 1)
    return torch.stack(found).view(-1, 2), torch.tensor(lengths).view(-1, 2)


SAVED = (*LORA, "lora.modules_to_save=[embedding, head]")


@pytest.mark.parametrize("kind", [(), LORA, SAVED], ids=["all weights", "adapters", "adapters and the head"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_loss_gradients_and_rewards_are_those_of_the_paper(data, settings, kind):
    run = run_of(data, SETTINGS[settings], *kind)
    parts, loader = assemble(run, coordinates=ALONE), open_batch_loader(run, coordinates=ALONE)
    (module,) = parts.modules
    score_references(loader, parts.stepper, num_steps=2)
    numbers = loader.batches.sample_numbers(1)
    reference_P2 = log_p_of(module, numbers)[0].detach()  # adapters begin at zero
    trained = [p for p in module.parameters() if p.requires_grad]
    with torch.no_grad():  # other weights than those of the reference
        generator = torch.Generator().manual_seed(0)
        for parameter in trained:
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    expected, rewards = expected_loss(*log_p_of(module, numbers), reference_P2, settings)
    gradients = torch.autograd.grad(expected, trained)

    batch = loader.batch(1)
    assert batch.counts.num_labels == 8
    loss = parts.stepper.forward_backward(batch.tensors, scale=batch.counts.loss_scale)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for parameter, gradient in zip(trained, gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    found = rewards_from(parts.collect_reward_sums())
    means = rewards.mean(0)
    right = (rewards[:, 0] > rewards[:, 1]).float().mean()
    expectation = {
        "chosen": means[0].item(), "rejected": means[1].item(), "margin": (means[0] - means[1]).item(),
        "accuracy": right.item(),
    }  # fmt: skip
    assert found == pytest.approx(expectation, rel=1e-4)
    assert parts.collect_reward_sums() == [0.0] * 5


PLANS = [
    Plan(data_shard=2, sharding=Sharding.PARAMETERS, recompute=Recompute.FULL, micro_batch=2),
    Plan(tensor=2, micro_batch=2),
    Plan(tensor=2, sequence_parallel=False, micro_batch=2),
]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", [(), LORA], ids=["all weights", "adapters"])
@pytest.mark.when_touched  # test_parallel.py divides models, and one process trains pairs above
def test_a_plan_equals_one_process(equals_one_process, kind):
    run = tiny_run("train.preference=dpo", "batch={global_sequences: 8, micro: 2}", *kind)
    equals_one_process([(run, plan) for plan in PLANS])


@pytest.mark.distributed
@pytest.mark.slow  # the same ways, with experts
def test_a_plan_of_a_mixture_equals_one_process(equals_one_process):
    run = tiny_run("train.preference=simpo", "batch={global_sequences: 8, micro: 2}", EXPERTS)
    equals_one_process([(run, Plan(data_shard=2, expert=2, sharding=Sharding.OPTIMIZER, micro_batch=2))])


@pytest.mark.parametrize(
    "kind",
    [{}, {"task": "lora", "lora": "{rank: 2}"}, {"task": "lora", "lora": "{rank: 2, modules_to_save: [head]}"}],
    ids=["all weights", "adapters", "adapters and the head"],
)
def test_a_resumed_training_takes_the_same_steps_and_validates_pairs(toy_pairs, tmp_path, kind):
    train = (
        "{{steps: {}, preference: dpo, evaluate: {{every_steps: 2}}, checkpoint: {{folder: saved, every_steps: 3}}}}"
    )
    whole, parted = (toy_pairs(tmp_path / name, train.format(6), **kind) for name in ("whole", "parted"))
    whole.train()
    toy_pairs(tmp_path / "parted", train.format(3), **kind).train()
    parted.train("--resume")
    steps, resumed = (training.steps() for training in (whole, parted))
    compared = ("loss", "gradient_norm", "rewards")
    # The first half has another learning rate behind it only from its own number of steps on.
    assert [{k: s[k] for k in compared} for s in resumed] == [{k: s[k] for k in compared} for s in steps]
    validated = [s for s in steps if "validation_loss" in s]
    assert [s["step"] for s in validated] == [2, 4, 6]
    for step in validated:
        assert set(step["validation_rewards"]) == {"chosen", "rejected", "margin", "accuracy"}
    assert steps[0]["rewards"]["margin"] == pytest.approx(0.0, abs=1e-5)  # the model is its own reference
    assert steps[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert validated[-1]["validation_loss"] < validated[0]["validation_loss"]


@pytest.mark.parametrize(
    "loss",
    ["preference: dpo", "preference: kto", "grpo: {beta: 0.1, group: 4, completion_tokens: 4, rewards: [exact]}"],
)
def test_weights_that_are_not_the_reference_are_no_beginning(tmp_path, loss):
    """Adapters of a fine-tuning, or other weights than the run's, would be compared with what the run names."""
    settings = f"train={{steps: 1, {loss}, checkpoint: {{folder: {tmp_path / 'saved'}}}}}"
    plain, other = (tiny_run(), tiny_run())
    for seed, run in enumerate((plain, other)):
        built = build_model(run.model, device="cpu")
        init_weights(built, seed=seed)
        save_weights(built, tmp_path / str(seed), dtype=torch.float32)
    named = f"weights={tmp_path / '0'}"
    with pytest.raises(InputError, match="compares with `weights`") as refused:
        import_weights(tiny_run(settings, named), tmp_path / "1", folder=tmp_path / "saved")
    assert "weights" in refused.value.hint
    import_weights(tiny_run(settings, named), tmp_path / "0", folder=tmp_path / "same")
    for number, keys in enumerate(("rank: 2", "rank: 2, modules_to_save: [head]")):
        run = tiny_run(settings, named, "task=lora", f"lora={{{keys}}}")
        for kind, is_trained in (("fresh", False), ("trained", True)):
            folder, module = tmp_path / f"{kind}{number}", with_empty_adapters(run.model, run.lora)
            init_adapters(module, seed=0)
            for name, tensor in adapters_of(module).items():
                if is_trained and ".lora_b" in name:
                    torch.nn.init.ones_(tensor)
            save_adapters(adapters_of(module), folder, model=run.model, lora=run.lora, base=run.weights)
        with pytest.raises(InputError, match="compares with `weights`") as refused:
            import_weights(run, folder, folder=tmp_path / "saved")
        assert "--merge" in refused.value.hint
    import_weights(tiny_run(settings, named, "task=lora", "lora={rank: 2}"), tmp_path / "fresh0", folder=tmp_path / "b")


@pytest.fixture
def toy_pairs(tiny_run):
    def make(folder, train: str, **sections: str):
        folder.mkdir(exist_ok=True)
        rows = lines_of(pairs(48, longest=9))
        (folder / "pairs.jsonl").write_text(rows, encoding="utf-8")
        return tiny_run(
            folder, data="{source: pairs.jsonl, tokenizer: bytes, sequence_length: 48}", train=train,
            model="{hidden: 32, num_layers: 1, vocab: 260, ffn_hidden: 64, attention: {num_heads: 4}}",
            batch="{global_sequences: 4, micro: 4}", optimizer="{learning_rate: 1.0e-2, schedule: constant}",
            **sections,
        )  # fmt: skip

    return make


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("train.preference={loss: dpo, margin: 1}",), "train.preference.margin"),
        (("train.preference={loss: orpo, label_smoothing: 0.1}",), "train.preference.label_smoothing"),
        (("train.preference=dpo", "train.z_loss=1e-4"), "train.z_loss"),
        (("train.preference=dpo", "train.label_smoothing=0.1"), "train.label_smoothing"),
        (("train.preference=dpo", "train.neftune_alpha=5"), "train.neftune_alpha"),
        (("train.preference=dpo", "task=lora", "lora={rank: 2, dropout: 0.1}"), "lora.dropout"),
        (("train.preference=dpo", "batch.label_tokens=100"), "batch.label_tokens"),
        (("train.preference=dpo", "data.joined_documents=true"), "data.joined_documents"),
        (("train.preference=dpo", "model.num_mtp_layers=1"), "model.num_mtp_layers"),
        (("train.preference=dpo", "train.compile=true"), "train.compile"),
    ],
)
def test_what_a_loss_of_pairs_does_not_have_is_refused(overrides, key):
    assert [problem.key for problem in check(tiny_run(*overrides))] == [key]


@pytest.mark.parametrize("plan", [Plan(pipeline=2), Plan(context=2)])
def test_plans_that_part_a_pair_are_refused(plan):
    problems = check_plan(plan, run=tiny_run("train.preference=dpo"))
    assert "train.preference" in [problem.key for problem in problems]


def test_data_without_pairs_and_pairs_without_their_loss_are_refused(data, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "one"}\n' * 9, encoding="utf-8")
    with pytest.raises(InputError, match="needs pairs of answers"):
        open_batch_loader(run_of(text, "dpo"), coordinates=ALONE)
    with pytest.raises(InputError, match="does not tell apart"):
        open_batch_loader(run_of(data, "null"), coordinates=ALONE)


def test_a_pair_that_was_not_computed_is_refused(data):
    run = run_of(data, "dpo")
    parts, loader = assemble(run, coordinates=ALONE), open_batch_loader(run, coordinates=ALONE)
    score_references(loader, parts.stepper, num_steps=1)
    loader.batch(0)
    with pytest.raises(InputError, match="reference of a pair"):
        loader.batch(1)
