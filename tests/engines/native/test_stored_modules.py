"""Runs whose layers keep activations in 8 bits: refusals, and their effect on a training."""

import pytest

torch = pytest.importorskip("torch")
from tests.tiny_runs import tiny_run

from meshwright.engines.native.assembly import store_modules
from meshwright.engines.native.check import check_plan
from meshwright.engines.native.fp8 import caches_weights
from meshwright.engines.native.rehearsal import rehearse
from meshwright.errors import InputError
from meshwright.kernels import stored_activations as stores
from meshwright.specs.plan import Plan, Recompute, Sharding
from meshwright.training.models import build_model, init_weights

BOTH = "kernels.stored_activations={feed_forward: int8, norm: e4m3}"
MIXTURE = ("model.experts={num_experts: 4, top_k: 2, ffn_hidden: 32, num_shared: 1}", "model.ffn_hidden=0")


@pytest.mark.parametrize("model", [(), MIXTURE], ids=["dense", "experts"])
def test_gradients_are_near_those_of_whole_activations(model, monkeypatch):
    monkeypatch.setattr(stores, "SMALLEST", 1)
    run = tiny_run(BOTH, *model)
    tokens_BT = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
    found = []
    for formats in ({}, run.kernels.stored_activations):
        module = build_model(run.model, device="cpu")
        init_weights(module, seed=0)
        store_modules(module.blocks().values(), formats)
        loss = module(tokens_BT, labels_BT=tokens_BT.roll(-1, 1))
        loss.backward()
        found.append((loss.item(), torch.cat([p.grad.flatten() for p in module.parameters()])))
    assert found[0][0] == found[1][0]  # the forward pass is the same
    error = (found[1][1] - found[0][1]).norm() / found[0][1].norm()
    assert 1e-4 < error < 0.03


@pytest.mark.when_touched  # one process stores the same activations above
def test_training_with_several_processes(monkeypatch):
    run = tiny_run(BOTH)
    assert rehearse(run, Plan(data_shard=2, micro_batch=2)).loss_error < 1e-4


@pytest.mark.parametrize(
    ("override", "plan", "key"),
    [
        ("train.compile=true", Plan(), "kernels.stored_activations"),
        ("train.compile=false", Plan(recompute=Recompute.FULL), "kernels.stored_activations"),
        ("train.compile=false", Plan(recompute=Recompute.SELECTIVE, recompute_modules=("mlp",)),
         "kernels.stored_activations.feed_forward"),
    ],
    ids=["compiled", "recomputed", "block recomputed"],
)  # fmt: skip
def test_where_it_is_refused(override, plan, key):
    assert key in {problem.key for problem in check_plan(plan, run=tiny_run(BOTH, override))}


def test_a_list_of_modules_stores_them_in_e4m3():
    stores = tiny_run("kernels.stored_activations=[feed_forward, norm]").kernels.stored_activations
    assert dict(stores) == {"feed_forward": "e4m3", "norm": "e4m3"}


@pytest.mark.parametrize(
    ("value", "words"),
    [("{ffn: int8}", "is no module: got 'ffn', allowed: feed_forward, norm"),
     ("{norm: fp8}", "is no format: got 'fp8', allowed: e4m3, int8"),
     ("[norm, ffn]", "is no module: got 'ffn'"), ("[1]", "stored_activations"),
     ("norm", "must be a list of modules, or a mapping")],
    ids=["module", "format", "listed module", "number", "word"],
)  # fmt: skip
def test_unknown_names(value, words):
    with pytest.raises(InputError, match=words):
        tiny_run(f"kernels.stored_activations={value}")


@pytest.mark.parametrize(
    ("precision", "cache", "plan", "refused"),
    [
        ("bf16", "on", Plan(), True),
        ("bf16", "auto", Plan(), False),
        ("fp8", "on", Plan(data_shard=2), False),
        ("fp8", "off", Plan(data_shard=2, sharding=Sharding.PARAMETERS), False),
        ("fp8", "on", Plan(data_shard=2, sharding=Sharding.PARAMETERS), True),
    ],
    ids=["bf16", "auto", "on", "off", "fsdp"],
)
def test_where_a_weight_cache_is_refused(precision, cache, plan, refused):
    run = tiny_run(f"precision={precision}", f"kernels.weight_cache='{cache}'")
    found = {problem.key for problem in check_plan(plan, run=run)}
    assert ("kernels.weight_cache" in found) is refused


def test_the_run_file_says_whether_weights_are_cached():
    kept = {cache: caches_weights(Plan(), num_micro_batches=1, cache=cache) for cache in ("auto", "on", "off")}
    assert kept == {"auto": False, "on": True, "off": False}
    assert not caches_weights(Plan(), num_micro_batches=4, cache="off")
