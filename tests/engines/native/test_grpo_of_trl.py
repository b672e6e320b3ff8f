"""The loss and gradients of TRL's GRPOTrainer on the same completions, of a model that transformers has read."""

from __future__ import annotations

import logging

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from tests.answer_runs import lines_of, run_on, sums

from meshwright.engines.native.assembly import assemble
from meshwright.engines.native.batch_loader import open_batch_loader
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.engines.native.rollouts import Rollouts
from meshwright.specs.plan import Plan
from meshwright.training.weights import save_weights

NUM, GROUP, LONGEST = 8, 4, 6
ALONE = MeshCoordinates(plan=Plan(micro_batch=NUM), device=torch.device("cpu"))


def trainer_of(folder, rows, **settings):
    """TRL's trainer on the model in `folder`."""
    import datasets
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = Tokenizer(WordLevel({"a": 0, "<end>": 256}, unk_token="<end>"))
    arguments = GRPOConfig(
        output_dir=str(folder / "out"), per_device_train_batch_size=NUM, num_generations=GROUP, use_cpu=True,
        bf16=False, max_completion_length=LONGEST, report_to=[], gradient_checkpointing=False, **settings,
    )  # fmt: skip
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions), args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<end>", eos_token="<end>"),
    )  # fmt: skip


def padded(rows: list[list[int]], *, at_left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as one tensor, and its mask."""
    width = max(map(len, rows))
    rows_with = [[0] * (width - len(r)) + r if at_left else r + [0] * (width - len(r)) for r in rows]
    masks = [[0] * (width - len(r)) + [1] * len(r) if at_left else [1] * len(r) + [0] * (width - len(r)) for r in rows]
    return torch.tensor(rows_with), torch.tensor(masks)


@pytest.mark.slow  # test_grpo.py has the same formulas by hand, and TRL takes long to import
@pytest.mark.filterwarnings("ignore")  # of TRL and what it imports
@pytest.mark.parametrize("form", ["grpo", "dr_grpo", "dapo"])
def test_loss_and_gradients_are_those_of_trl(tmp_path, form):
    rows = [{"prompt": p, "answer": a} for p, a, _ in sums(16)]
    (tmp_path / "sums.jsonl").write_text(lines_of(rows), encoding="utf-8")
    settings = (
        f"{{group: {GROUP}, completion_tokens: {LONGEST}, loss: {form}, iterations: 2, epsilon: 0.05, "
        'temperature: 0.9, rewards: [{verifier: regex, pattern: "[0-9]"}, {verifier: length, most_tokens: 5}]}'
    )
    run = run_on(tmp_path / "sums.jsonl", f"train.grpo={settings}", length=24, micro=NUM)
    parts, loader = assemble(run, coordinates=ALONE), open_batch_loader(run, coordinates=ALONE)
    (module,) = parts.modules
    rollouts = Rollouts(run, assembly=parts, loader=loader, coordinates=ALONE)
    rollouts.batch(0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # other weights than those that wrote the completions
        for parameter in module.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator)
    batch = rollouts.batch(1)
    loss = parts.stepper.forward_backward(batch.tensors, scale=batch.counts.loss_scale)

    save_weights(module, tmp_path / "model", dtype=torch.float32)
    logging.disable(logging.WARNING)
    trainer = trainer_of(tmp_path / "model", rows, loss_type=form, epsilon=0.05, temperature=0.9, num_iterations=2)
    t, is_label = batch.tensors, batch.tensors["labels_BT"] != -100
    starts = is_label.int().argmax(1) + 1
    said = [labels[mask].tolist() for labels, mask in zip(t["labels_BT"], is_label, strict=True)]
    asked = [tokens[:start].tolist() for tokens, start in zip(t["tokens_BT"], starts, strict=True)]
    prompts, prompt_mask = padded(asked, at_left=True)
    completions, mask = padded(said, at_left=False)
    old = torch.zeros(mask.shape)
    old[mask.bool()] = t["old_BT"][is_label]
    advantages = t["advantages_B2"][:, 0]
    assert advantages.abs().max() > 0
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    expected = trainer._compute_loss(trainer.model, {
        "prompt_ids": prompts, "prompt_mask": prompt_mask, "completion_ids": completions, "completion_mask": mask,
        "advantages": advantages, "old_per_token_logps": old, "num_items_in_batch": mask.sum(),
    })  # fmt: skip
    expected.backward()
    logging.disable(logging.NOTSET)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(module.head.weight.grad, trainer.model.lm_head.weight.grad, rtol=1e-4, atol=1e-6)
    gate = module.get_parameter("layers.0.ffn.gate.weight").grad
    torch.testing.assert_close(gate, trainer.model.model.layers[0].mlp.gate_proj.weight.grad, rtol=1e-3, atol=1e-6)
