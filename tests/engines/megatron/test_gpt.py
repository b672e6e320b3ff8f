"""Layers of GPT-2 and GPT-3 with Megatron-Core on this CPU, held against Hugging Face's GPT-2 step by step.

The native engine has no LayerNorm, no blocks without a gate and no learned positions.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.engines.megatron.test_training import LOADED, ON_CPU, TOLERANCE, steps
from tests.toy_training import REST, multiplication
from tests.warm import Server
from tests.warm_workers import workers_from

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from meshwright import runfile
from meshwright.engines import local
from meshwright.engines.base import Launch, find_engine
from meshwright.kernels.attention.key_ranges import key_ranges
from meshwright.training import data
from meshwright.training.data import Batches
from meshwright.training.models.initialize import initial_weight
from meshwright.training.optimizer import learning_rate

RUN = (
    """
model: {name: gpt, hidden: 64, num_layers: 4, vocab: 257, ffn_hidden: 256, gated_ffn: false, norm_bias: true,
  learned_positions: 64, tied_embeddings: true, attention: {num_heads: 4, bias: true}, ffn_bias: true}
"""
    + REST
    + """
engine: megatron
train: {steps: 4}
"""
)
PLANS = {
    "replicas": "{data_shard: 2, sharding: none}",
    "tensor and sequence": "{tensor: 2, data_shard: 1, sharding: optimizer}",
    "pipeline": "{pipeline: 2, data_shard: 1, sharding: none, recompute: full}",
}
NAMES = {
    "wte": "embedding", "wpe": "positions", "ln_f": "norm", "ln_1": "attention_norm",
    "ln_2": "ffn_norm", r"attn\.c_proj": "attention.output", r"mlp\.c_fc": "ffn.in", r"mlp\.c_proj": "ffn.down",
    "h": "layers",
}  # fmt: skip
"""Names of Hugging Face's GPT-2, or their parts, by ours."""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> runfile.Run:
    text = tmp_path_factory.mktemp("toy") / "notes.txt"
    text.write_text(multiplication(60))
    return runfile.loads(RUN.replace("notes.txt", str(text)), overrides=["parallel={data_shard: 2, sharding: none}"])


@pytest.fixture(scope="module")
def found(run, tmp_path_factory) -> dict[str, list[dict[str, float]]]:
    """Steps of each plan, by the same two processes."""
    folder, engine = tmp_path_factory.mktemp("gpt"), find_engine("megatron")
    places = {name: folder / name.replace(" ", "-") for name in PLANS}
    for name, plan in PLANS.items():
        planned = runfile.loads(run.text, overrides=[f"parallel={plan}"])
        local.write_files(engine.lower(planned, folder=places[name]), places[name])
    argv = ("python", str(Path(__file__).with_name("several.py")), *map(str, places.values()))
    server = Server(LOADED, environment=ON_CPU | {"PYTHONWARNINGS": "ignore"})
    with workers_from(server):
        local.run(Launch(argv=argv, files={}, env=ON_CPU, num_processes=2), folder=folder / "several")
    return {name: steps(place / "megatron" / "steps.jsonl") for name, place in places.items()}


def ours(name: str) -> str:
    """Our name of a tensor of Hugging Face's GPT-2."""
    return re.sub(
        r"\b(" + "|".join(NAMES) + r")\b",
        lambda part: NAMES[part[1].replace(".", r"\.")],
        name.removeprefix("transformer."),
    )


def first_weight(run: runfile.Run, name: str, *, shape: tuple[int, ...]) -> torch.Tensor:
    return initial_weight(run.model, name, shape=shape, expert=None, seed=run.train.seed, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def expected(run) -> list[dict[str, float]]:
    """Steps of Hugging Face's GPT-2, with PyTorch's AdamW."""
    own = {"n_layer": 4, "n_head": 4, "n_embd": 64, "n_positions": 64, "vocab_size": 257, "n_inner": 256}
    own |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    config = transformers.GPT2Config(**own, activation_function="gelu")
    built = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            parts = ("query", "key", "value") if "c_attn" in name else ("",)
            names = [ours(name).replace("attn.c_attn", f"attention.{part}") for part in parts]
            target = parameter.mT if ".c_" in name and parameter.ndim > 1 else parameter  # of a Conv1D
            shape = (len(target) // len(names), *target.shape[1:])
            target.copy_(torch.cat([first_weight(run, one, shape=shape) for one in names]))
    groups = [
        {"params": [p for p in built.parameters() if (p.ndim > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, run.optimizer.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, betas=run.optimizer.betas, eps=run.optimizer.epsilon)
    corpus, found = data.open_data(run), []
    batches = Batches(samples=corpus.train, global_batch=run.global_batch, seed=run.train.seed, vocab=257)
    for step, batch in enumerate(batches.iterate(stop=4)):
        rate = learning_rate(run.optimizer, step=step, num_steps=4)
        for group in optimizer.param_groups:
            group["lr"] = rate
        mask = key_ranges(batch.documents_BT).mask_B1TS
        logits = built(batch.tokens_BT, position_ids=batch.positions_BT, attention_mask=mask).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(built.parameters(), run.optimizer.gradient_clip)
        optimizer.step()
        found.append({"loss": loss.item(), "gradient_norm": norm.item(), "learning_rate": rate})
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("name", PLANS)
def test_losses_are_those_of_hugging_face(found, expected, name):
    assert len(found[name]) == len(expected) == 4
    for mine, theirs in zip(found[name], expected, strict=True):
        for key in ("learning_rate", "loss", "gradient_norm"):
            assert mine[key] == pytest.approx(theirs[key], rel=TOLERANCE), (mine["step"], key)
    assert found[name][-1]["loss"] < found[name][0]["loss"] - 0.3
