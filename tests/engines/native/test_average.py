"""Averages of weights: those of PyTorch's AveragedModel, resumed, under plans, validated, exported and estimated."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch.nn import ParameterDict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from meshwright import runfile
from meshwright.engines.native.batch_loader import open_batch_loader
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.specs.plan import Plan
from meshwright.specs.precision import PRECISIONS
from meshwright.specs.run import Optimizer, precision_with
from meshwright.training import checkpoints
from meshwright.training.conversion import load_saved
from meshwright.training.trained_model import load_trained

pytestmark = pytest.mark.usefixtures("warm_ranks", "without_measuring", "without_page")

DECAY = 0.6
MODEL = "{hidden: 32, num_layers: 1, vocab: 260, ffn_hidden: 64, attention: {num_heads: 4}}"
TRAIN = "{{steps: {}, evaluate: {{every_steps: 2, num_batches: 1}}, checkpoint: {{folder: saved, every_steps: 1}}}}"
CPU = torch.device("cpu")


@pytest.fixture
def toy(tiny_run):
    def make(folder, num_steps: int = 4, **sections: str):
        folder.mkdir(exist_ok=True)
        (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 99)
        return tiny_run(
            folder, data="{source: text.txt, tokenizer: bytes, sequence_length: 16}", train=TRAIN.format(num_steps),
            model=MODEL, batch="{global_sequences: 4, micro: 2}", precision="fp32",
            optimizer=f"{{learning_rate: 1.0e-2, schedule: constant, average_decay: {DECAY}}}", **sections,
        )  # fmt: skip

    return make


def module_at(folder, step: int, kind: str) -> torch.nn.Module:
    saved = checkpoints.choose(folder / "saved", step)
    content = checkpoints.content_of(checkpoints.read_manifest(saved.path))
    assert content is not None
    return load_saved(saved, replace(content, is_averaged=kind == "average"), dtype=torch.float32)


def weights_at(folder, step: int, kind: str) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in module_at(folder, step, kind).named_parameters()}


PARALLEL = ["{data_shard: 1}", "{data_shard: 2, sharding: parameters}", "{tensor: 2}"]


@pytest.mark.parametrize("parallel", PARALLEL, ids=["one process", "FSDP", "tensor"])
def test_averages_are_those_of_pytorch(toy, tmp_path, parallel):
    toy(tmp_path / "a", parallel=parallel).train()
    trained = [
        ParameterDict({name.replace(".", "/"): p for name, p in weights_at(tmp_path / "a", step, "weights").items()})
        for step in range(1, 5)
    ]
    theirs = AveragedModel(trained[0], multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for weights in trained:
        theirs.update_parameters(weights)
    found = weights_at(tmp_path / "a", 4, "average")
    for name, expected in theirs.module.items():
        torch.testing.assert_close(found[name.replace("/", ".")], expected.detach(), rtol=1e-6, atol=1e-7)
        assert not torch.equal(expected, trained[-1][name])


@pytest.mark.parametrize("kind", [{}, {"task": "lora", "lora": "{rank: 2}"}], ids=["all weights", "adapters"])
def test_a_resumed_training_has_the_same_averages(toy, tmp_path, kind):
    whole, parted = (toy(tmp_path / name, **kind) for name in ("whole", "parted"))
    whole.train()
    toy(tmp_path / "parted", 2, **kind).train()
    parted.train("--resume")
    names = ("loss", "gradient_norm", "validation_loss")
    assert [[s.get(n) for n in names] for s in parted.steps()] == [[s.get(n) for n in names] for s in whole.steps()]


def test_validation_export_and_generation_use_the_averages(toy, tmp_path, monkeypatch):
    run = toy(tmp_path / "a")
    run.train()
    monkeypatch.chdir(tmp_path / "a")
    loaded = runfile.load(tmp_path / "a" / "run.yaml")
    loader = open_batch_loader(loaded, coordinates=MeshCoordinates(plan=Plan(micro_batch=2), device=CPU))
    batch = loader.validation_batch("validation", 0)
    losses = {}
    for kind in ("average", "weights"):
        module = module_at(tmp_path / "a", 4, kind).eval()
        losses[kind] = (module(**batch.tensors) * batch.counts.loss_scale).item()
    assert run.steps()[-1]["validation_loss"] == pytest.approx(losses["average"], rel=1e-5)
    assert losses["average"] != pytest.approx(losses["weights"], rel=1e-4)
    averages = weights_at(tmp_path / "a", 4, "average")
    exported = load_trained(str(tmp_path / "a" / "saved"))
    for name, p in exported.module.named_parameters():
        torch.testing.assert_close(p, averages[name])


def test_an_average_is_counted_in_memory_and_in_the_update():
    plain, averaged = (precision_with(PRECISIONS["bf16"], Optimizer(average_decay=decay)) for decay in (0.0, DECAY))
    assert averaged.optimizer_state_bytes == plain.optimizer_state_bytes + 4
    assert averaged.update_bytes == plain.update_bytes + 12
