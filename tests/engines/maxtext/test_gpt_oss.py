"""GPT-OSS with MaxText on this CPU, held against transformers' model under PyTorch's AdamW, step by step.

No other engine of ours trains it in fp32 from the same files: what is compared with is its published code.

    B sequences   T tokens of one
"""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="batches and the reference need PyTorch")
transformers = pytest.importorskip("transformers", reason="the reference is its model")

MODEL = """
model: {name: toy, family: GptOssForCausalLM, activation: clamped_swiglu, hidden: 64, num_layers: 4, vocab: 258,
  attention: {num_heads: 4, num_kv_heads: 2, head_dim: 16, bias: true, window: 16,
    window_pattern: [true, false], sinks: true},
  experts: {num_experts: 4, top_k: 2, ffn_hidden: 32, bias: true},
  rope: {theta: 10000, scaling: yarn, factor: 4, original_context: 32, truncate: false}}
"""


def reference(folder: Path) -> list[dict[str, float]]:
    """The steps of the run as transformers' model takes them, and the weights that it starts from."""
    from meshwright.training.optimizer import learning_rate

    model = first_model()
    model.save_pretrained(folder / "start")
    run, batches = run_and_batches(folder)
    o = run.optimizer
    named = dict(model.named_parameters())
    decays = {name: p.ndim > 1 and not name.endswith("bias") for name, p in named.items()}
    groups = [
        {"params": [p for name, p in named.items() if decays[name] is is_decayed], "weight_decay": decay}
        for is_decayed, decay in ((True, o.weight_decay), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, betas=o.betas, eps=o.epsilon)
    taken = []
    for step, batch in enumerate(batches.iterate(stop=run.num_steps)):
        rate = learning_rate(o, step=step, num_steps=run.num_steps)
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in named.values()]).norm()
        for p in named.values():
            p.grad *= min(1.0, o.gradient_clip / norm)
        adamw.step()
        taken.append({"step": step + 1, "loss": loss.item(), "gradient_norm": norm.item(), "learning_rate": rate})
    return taken


def run_and_batches(folder: Path):
    from meshwright import runfile
    from meshwright.training import data

    with chdir(folder):
        run = runfile.load(Path("run.yaml"))
        samples = data.open_data(run).train
    return run, data.Batches(samples=samples, global_batch=run.global_batch, seed=run.train.seed)


def first_model():
    config = transformers.GptOssConfig(
        vocab_size=258, hidden_size=64, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        max_position_embeddings=128, attn_implementation="eager", experts_implementation="eager",
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        },
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.GptOssForCausalLM(config).float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("bias", "sinks")):  # begin at zero, where a swap would not show
                p.normal_(std=0.3)
    return model


def loss_of(model, batch) -> torch.Tensor:
    """The mean over the labels of a batch; tokens see their own documents."""
    same_BTT = batch.documents_BT[:, :, None] == batch.documents_BT[:, None, :]
    places_T = torch.arange(batch.tokens_BT.shape[1])
    distance_TT = places_T[:, None] - places_T[None, :]
    masks = {
        name: (same_BTT & (distance_TT >= 0) & (distance_TT < window))[:, None]
        for name, window in (("full_attention", 10**6), ("sliding_attention", model.config.sliding_window))
    }
    masks = {name: torch.zeros(m.shape).masked_fill(~m, float("-inf")) for name, m in masks.items()}
    out = model(batch.tokens_BT.long(), attention_mask=masks, position_ids=batch.positions_BT.long())
    return torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), batch.labels_BT.flatten().long())


@pytest.fixture(scope="module")
def toy(make_toy):
    return make_toy("gpt-oss", MODEL, reference=reference)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["sharded", "experts", "context"])
def test_losses_are_those_of_transformers(toy, plan):
    toy.assert_native(toy.train(plan, plan=plan))


@pytest.mark.slow
def test_weights_go_back_into_transformers(toy):
    saves = "train.checkpoint={folder: saved, every_steps: 12}"
    toy.assert_native(toy.train("one", saves))
    code, stderr = toy.run("checkpoint", "to-hf", "one/meshwright_run.yaml", "twelve", "--step=12", "--dtype=fp32")
    assert code == 0, stderr
    model, told = transformers.GptOssForCausalLM.from_pretrained(
        toy.folder / "twelve", attn_implementation="eager", output_loading_info=True
    )
    assert not any(told.values())
    _, batches = run_and_batches(toy.folder)
    loss = loss_of(model, batches.at(12)).item()
    assert loss == pytest.approx(toy.native[12]["loss"], rel=3e-6)
