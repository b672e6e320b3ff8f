"""Adapters of PEFT of every kind: read as the function that PEFT computes, or refused by the key that is the reason."""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.rounding import assert_equals
from tests.tiny_models import DENSE

from meshwright.errors import InputError
from meshwright.specs.model import Lora, Rope
from meshwright.training import trained_model
from meshwright.training.conversion import load_merged
from meshwright.training.models import add_adapters, build_model, init_adapters, init_weights, materialize
from meshwright.training.models.initialize import init_from_base
from meshwright.training.models.lora import init_magnitudes
from meshwright.training.weights import (
    adapters_of,
    find_weights,
    initial_adapters,
    load_adapters,
    load_weights,
    plain_adapters,
    read_lora,
    save_adapters,
    save_weights,
)
from meshwright.training.weights.adapter_config import CONFIG, WITHOUT_EFFECT

TIED = replace(DENSE, tied_embeddings=True)
PHI = replace(DENSE, family="Phi3ForCausalLM", rope=Rope(theta=100.0, rotated_share=0.5))
MODULES = {
    DENSE: ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    PHI: ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
}
MODULES[TIED] = MODULES[DENSE]
CHANGING = {
    "task_type": "SEQ_CLS",
    "exclude_modules": ["q_proj"],
    "fan_in_fan_out": True,
    "bias": "all",
    "init_lora_weights": "pissa",
    "layers_pattern": "h",
    "megatron_config": {"tensor_model_parallel_size": 1},
    "trainable_token_indices": [1, 2],
    "loftq_config": {"loftq_bits": 4},
    "corda_config": {"corda_method": "ipm"},
    "lora_ga_config": {"direction": "ArB2r"},
    "velora_config": {"num_groups": 2},
    "alora_invocation_tokens": [3, 4],
    "use_qalora": True,
    "monteclora_config": {"num_samples": 2},
    "layer_replication": [[0, 2], [1, 2]],
    "lora_bias": True,
    "target_parameters": ["q_proj.weight"],
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 1},
    "kasa_config": {"alpha": 1},
    "a_key_of_a_later_version": True,
}
"""Every key of PEFT's config that can make another function, at a value that does."""

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning")


def tokens():
    return torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(3))


@cache
def base_of(model):
    """The folder of random weights, which lasts as long as the process, and transformers' model of it."""
    folder = TemporaryDirectory()
    built = build_model(model, device="cpu")
    init_weights(built, seed=0, std=0.2)
    save_weights(built, Path(folder.name) / "base", dtype=torch.float32)
    path = Path(folder.name) / "base"
    return folder, path, transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")


def theirs(model, folder, values, *, seed=1):
    """Logits of an adapter that PEFT writes, trained as if, and reads again."""
    _, _, base = base_of(model)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # PEFT draws its first matrices from PyTorch's own generator
        made = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**values))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.requires_grad or ".lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    made.save_pretrained(folder)
    return peft.PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()(tokens()).logits


def ours(model, folder):
    _, base, _ = base_of(model)
    built = build_model(model)
    with plain_adapters(Path(folder), base=base) as plain:
        add_adapters(built, read_lora(plain, model=model))
        materialize(built, device="cpu")
        load_weights(built, base)
        load_adapters(built, plain)
    return built.eval()


def assert_read(model, folder, values):
    expected = {"logits": theirs(model, folder, values)}
    built = ours(model, folder)
    assert_equals(lambda: {"logits": built(tokens())}, expected, weights=built.parameters(), terms=61)


PLAIN = {
    "r": st.integers(1, 6),
    "lora_alpha": st.integers(1, 32) | st.floats(0.25, 8),
    "lora_dropout": st.sampled_from([0.0, 0.1]),
    "use_rslora": st.booleans(),
    "use_dora": st.sampled_from([False, False, True]),
    "init_lora_weights": st.sampled_from([True, False, "gaussian"]),
    "task_type": st.sampled_from([None, "CAUSAL_LM"]),
}
NAMES = st.sampled_from([*MODULES[DENSE], *MODULES[PHI], "0.mlp.down_proj"])
ODD = {
    "init_lora_weights": st.sampled_from(["pissa", "pissa_niter_2", "olora", "orthogonal", "eva", "mica"]),
    "bias": st.sampled_from(["all", "lora_only"]),
    "rank_pattern": st.dictionaries(NAMES, st.integers(1, 12), min_size=1),
    "alpha_pattern": st.dictionaries(NAMES, st.integers(1, 64), min_size=1),
    "modules_to_save": st.sampled_from([["lm_head"], ["embed_tokens", "lm_head"], ["norm"]]),
    "ensure_weight_tying": st.booleans(),
    "layers_to_transform": st.sampled_from([0, [0], [1], [0, 1]]),
    "layers_pattern": st.sampled_from(["layers", ["layers"], "h"]),
    "exclude_modules": st.sampled_from([["o_proj"], ["model.layers.0.mlp.down_proj"], "nothing"]),
    "layer_replication": st.just([[0, 2], [1, 2]]),
    "trainable_token_indices": st.just([1, 5]),
    "alora_invocation_tokens": st.just([1, 2]),
    "target_parameters": st.just(["mlp.down_proj.weight"]),
    "fan_in_fan_out": st.just(True),
    "lora_bias": st.just(True),
}  # fmt: skip


@st.composite
def configurations(draw):
    model = draw(st.sampled_from([DENSE, PHI, TIED]))
    modules = draw(st.lists(st.sampled_from(MODULES[model]), min_size=1, unique=True))
    values = {key: draw(drawn) for key, drawn in PLAIN.items()} | {"target_modules": modules}
    odd = draw(st.lists(st.sampled_from(sorted(ODD)), max_size=2, unique=True))
    if "rank_pattern" in odd and draw(st.booleans()):  # as a matrix that is one in the files is written
        odd.append("alpha_pattern")
        values |= {"rank_pattern": {"gate_up_proj": 2 * values["r"]}}
        values |= {"alpha_pattern": {"gate_up_proj": 2 * values["lora_alpha"]}}
    return model, values | {key: draw(ODD[key]) for key in odd if key not in values or key in PLAIN}, odd


@pytest.mark.parametrize("examples", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_an_adapter_of_peft_is_read_as_peft_computes_it_or_refused(examples):
    read = refused = 0

    @settings(max_examples=examples)
    @given(configurations())
    def check(drawn):
        nonlocal read, refused
        model, values, odd = drawn
        with TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected = {"logits": theirs(model, folder, values)}
            except (ValueError, TypeError, RuntimeError, NotImplementedError, AttributeError, KeyError, ImportError):
                assume(False)  # PEFT itself refuses it
            try:
                built = ours(model, folder)
            except InputError:
                assert odd, "a plain adapter is refused"
                refused += 1
                return
            assert_equals(lambda: {"logits": built(tokens())}, expected, weights=built.parameters(), terms=61)
            read += 1

    check()
    assert min(read, refused) > examples // 8


TARGETS = ("query", "key", "value", "output", "gate", "up", "down")


@st.composite
def adapters_of_ours(draw):
    targets = draw(st.lists(st.sampled_from(TARGETS), min_size=1, unique=True))
    places = st.sampled_from([*targets, *(f"{layer}.{target}" for target in targets for layer in range(2))])
    init = draw(st.sampled_from(["standard", "standard", "pissa", "olora"]))
    return Lora(
        rank=draw(st.integers(1, 6)), alpha=draw(st.sampled_from([0.3, 1.0, 2.5, 16.0])), targets=tuple(targets),
        ranks=draw(st.dictionaries(places, st.integers(1, 8), max_size=2)), init=init,
        alphas=draw(st.dictionaries(places, st.sampled_from([0.7, 3.0, 8.0]), max_size=2)),
        layers=draw(st.sampled_from([None, (0,), (1,), (0, 1)])), use_dora=init == "standard" and draw(st.booleans()),
        modules_to_save=draw(st.sampled_from([(), ("head",), ("embedding", "head")])),
    )  # fmt: skip


@pytest.mark.parametrize("examples", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_an_adapter_of_ours_computes_in_peft_merged_and_read_again_what_it_computed(examples):
    @settings(max_examples=examples)
    @given(st.sampled_from([DENSE, TIED]), adapters_of_ours())
    def check(model, lora):
        _, base, plain = base_of(model)
        built = build_model(model)
        add_adapters(built, lora)
        materialize(built, device="cpu")
        load_weights(built, base)
        init_adapters(built, seed=0)
        init_from_base(built, seed=0)
        init_magnitudes(built)
        generator = torch.Generator().manual_seed(0)
        with TemporaryDirectory() as made, torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for tensor in adapters_of(built).values():
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.2)
            folder, tensors = Path(made) / "adapter", adapters_of(built) | initial_adapters(built)
            save_adapters(tensors, folder, model=model, lora=lora, base=str(base))
            theirs = peft.PeftModel.from_pretrained(copy.deepcopy(plain), folder).eval()
            found = {"in PEFT": theirs(tokens()).logits, "read again": ours(model, folder)(tokens())}
            found |= {
                "merged": load_merged(model, find_weights(str(base)), {folder: 1.0}, dtype=torch.float32)(tokens())
            }
            found |= {"merged in PEFT": theirs.merge_and_unload()(tokens()).logits}
        built.eval()
        for name, logits in found.items():
            assert_equals(lambda: {name: built(tokens())}, {name: logits}, weights=built.parameters(), terms=61)  # noqa: B023

    check()


def test_every_key_of_peft_is_read_or_refused():
    """A key that a later version of PEFT adds fails here until somebody decides what it means."""
    keys = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert keys - set(WITHOUT_EFFECT) == CHANGING.keys() - {"a_key_of_a_later_version"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    theirs(DENSE, folder, {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"})
    return folder


def changed(plain, folder, **values):
    for file in plain.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / CONFIG).read_text()) | values
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("key", CHANGING)
def test_a_key_that_changes_the_function_is_refused_by_its_name(plain, tmp_path, key):
    with pytest.raises(InputError, match=f"{key} makes another function") as refused:
        read_lora(changed(plain, tmp_path, **{key: CHANGING[key]}), model=DENSE)
    assert repr(CHANGING[key]) in str(refused.value)
    assert "merge" in str(refused.value.hint)


@pytest.mark.parametrize("key", CHANGING)
@pytest.mark.parametrize("nothing", [None, False, [], {}])
def test_empty_values_mean_nothing(plain, tmp_path, key, nothing):
    assert read_lora(changed(plain, tmp_path, **{key: nothing}), model=DENSE).rank == 4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("r", 0), ("r", "4"), ("r", True), ("r", 4.0), ("r", None), ("lora_alpha", None), ("lora_alpha", -1),
        ("lora_alpha", float("inf")), ("rank_pattern", {"q_proj": 0}), ("alpha_pattern", {"q_proj": "4"}),
        ("rank_pattern", [4]),
        ("layers_to_transform", [-1]), ("layers_to_transform", "0"), ("layers_to_transform", 7),
        ("lora_dropout", 1.0), ("lora_dropout", "0"), ("target_modules", "all-linear"),
        ("target_modules", [1]), ("target_modules", []),
    ],
)  # fmt: skip
def test_values_of_another_kind_are_refused(plain, tmp_path, key, value):
    with pytest.raises(InputError, match=key):
        read_lora(changed(plain, tmp_path, **{key: value}), model=DENSE)


def test_the_scale_of_rslora_is_alpha_over_the_root_of_the_rank(tmp_path):
    assert_read(DENSE, tmp_path, {"r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": ["q_proj", "up_proj"]})
    assert read_lora(tmp_path, model=DENSE).alpha == 12.0


def test_a_larger_rank_of_a_fused_matrix_is_not_read_as_the_ranks_of_its_parts(tmp_path):
    values = {"rank_pattern": {"gate_up_proj": 8}, "alpha_pattern": {"gate_up_proj": 16}}
    values |= {"r": 4, "lora_alpha": 8, "target_modules": ["gate_up_proj", "o_proj"]}
    assert_read(PHI, tmp_path, values)
    assert read_lora(tmp_path, model=PHI).ranks == {"gate": 8, "up": 8}


def test_ranks_and_alphas_of_modules_are_those_of_the_first_pattern_that_matches(tmp_path):
    values = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj", "up_proj"], "use_rslora": True}
    values |= {"rank_pattern": {"0.mlp.down_proj": 6, "down_proj": 2}, "alpha_pattern": {"model.*.up_proj": 3}}
    assert_read(DENSE, tmp_path, values | {"layers_to_transform": [0, 1]})
    read = read_lora(tmp_path, model=DENSE)
    assert (read.ranks, read.layers) == ({"0.down": 6, "1.down": 2}, None)
    assert read.alphas["up"] == 6.0


def test_adapters_of_one_layer_are_read(tmp_path):
    assert_read(DENSE, tmp_path, {"r": 4, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]})
    assert read_lora(tmp_path, model=DENSE).layers == (1,)


def test_embedding_and_head_that_are_trained_whole_are_read(tmp_path):
    values = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    assert_read(DENSE, tmp_path / "both", values)
    assert read_lora(tmp_path / "both", model=DENSE).modules_to_save == ("embedding", "head")
    values |= {"modules_to_save": ["embed_tokens"]}
    assert_read(TIED, tmp_path / "tied", values | {"ensure_weight_tying": True})
    theirs(TIED, tmp_path / "parted", values)
    with pytest.raises(InputError, match="another function than the tied embeddings"):
        ours(TIED, tmp_path / "parted")


@pytest.mark.parametrize("name", ["norm", "q_proj", 3])
def test_other_modules_that_are_trained_whole_are_refused(plain, tmp_path, name):
    with pytest.raises(InputError, match=f"modules_to_save: makes another function.*{name}"):
        read_lora(changed(plain, tmp_path, modules_to_save=[name]), model=DENSE)


def test_targets_in_different_layers_are_refused(tmp_path):
    theirs(DENSE, tmp_path, {"r": 4, "target_modules": ["q_proj", "0.mlp.down_proj"]})
    with pytest.raises(InputError, match="other layers have adapters of down"):
        read_lora(tmp_path, model=DENSE)


@pytest.mark.parametrize(("revision", "asked"), [(None, "owner/base"), ("v2", "owner/base@v2")])
def test_the_base_is_of_the_revision_that_the_adapter_names(plain, tmp_path, monkeypatch, revision, asked):
    def refuse(name):
        raise InputError("asked for", got=name)

    monkeypatch.setattr(trained_model, "find_weights", refuse)
    folder = changed(plain, tmp_path, base_model_name_or_path="owner/base", revision=revision)
    with pytest.raises(InputError, match=f"'{asked}'$"):
        trained_model.load_trained(str(folder))
