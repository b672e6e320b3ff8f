from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from tests.rounding import assert_equals
from tests.tiny_models import DENSE, LATENT, MIXTURE

from meshwright.catalog import lookup as catalog
from meshwright.cost.flops import count_parameters
from meshwright.cost.tables import model_row
from meshwright.errors import InputError
from meshwright.specs.model import Lora, Rope
from meshwright.training.models import (
    adapted,
    adapter_matrices,
    add_adapters,
    build_model,
    init_adapters,
    init_weights,
    materialize,
    merge_adapters,
)
from meshwright.training.models.lora import beginning
from meshwright.training.weights import adapters_of, load_adapters, load_weights, read_lora, save_adapters, save_weights

ALL = ("query", "key", "value", "output", "gate", "up", "down")

PEFT = {
    "attention.query": "q_proj",
    "attention.key": "k_proj",
    "attention.value": "v_proj",
    "attention.output": "o_proj",
    "ffn.gate": "gate_proj",
    "ffn.up": "up_proj",
    "ffn.down": "down_proj",
}
PHI = replace(
    DENSE, family="Phi3ForCausalLM", rope=Rope(theta=100.0, rotated_share=0.5)
)  # query, key and value are one matrix in its files, and gate and up
FUSED = ("qkv", "output", "gate", "up", "down")  # one adapter of query, key and value
CASES = [
    (DENSE, ALL), (MIXTURE, ALL[:4]), (LATENT, ALL[:4]), (PHI, ALL), (PHI, ALL[:4]), (DENSE, FUSED),
    (MIXTURE, FUSED[:2]), (PHI, FUSED), (PHI, FUSED[:2]),
]  # fmt: skip
PATTERNED = [
    (DENSE, Lora(rank=4, targets=ALL, ranks={"down": 2, "1.query": 6}, alphas={"up": 8.0, "0.query": 5.0})),
    (DENSE, Lora(rank=4, targets=("qkv", "down"), ranks={"qkv": 3}, layers=(1,))),
    (LATENT, Lora(rank=4, targets=ALL[:4], ranks={"query": 3}, layers=(0,))),
    (PHI, Lora(rank=4, targets=ALL, ranks={"gate": 2, "up": 2}, alphas={"0.gate": 6.0, "0.up": 6.0})),
    (PHI, Lora(rank=4, targets=FUSED, ranks={"0.qkv": 6}, alphas={"qkv": 6.0})),
    (DENSE, Lora(rank=4, modules_to_save=("embedding", "head"))),
    (DENSE, Lora(rank=4, alpha=16.0, targets=ALL, use_dora=True)),
    (replace(DENSE, attention=replace(DENSE.attention, bias=True)), Lora(targets=ALL[:4], use_dora=True)),
    (LATENT, Lora(rank=4, targets=ALL[:4], use_dora=True)),
    (PHI, Lora(rank=4, targets=ALL, ranks={"down": 2}, use_dora=True)),
    (PHI, Lora(rank=4, targets=FUSED, modules_to_save=("head",))),
    (replace(DENSE, tied_embeddings=True), Lora(rank=4, targets=("query",), modules_to_save=("embedding",))),
]
LORAS = [(model, Lora(rank=4, alpha=16.0, targets=targets)) for model, targets in CASES] + PATTERNED
TERMS = 61
"""The longest sum of these models: over the vocabulary."""


def adapted_model(model=DENSE, *, lora, seed=0, trained=True):
    built = build_model(model)
    add_adapters(built, lora)
    materialize(built, device="cpu")
    init_weights(built, seed=seed, std=0.2)
    if trained:
        generator = torch.Generator().manual_seed(seed)
        for name, matrix in adapter_matrices(built):
            if not name.endswith(".lora_a"):
                with torch.no_grad():
                    matrix.weight.normal_(0, 0.2, generator=generator)
        for _, layer in adapted(built):
            if layer.lora_magnitude is not None:
                with torch.no_grad():
                    layer.lora_magnitude.mul_(1 + torch.rand(layer.lora_magnitude.shape, generator=generator))
    return built


def tokens():
    return torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(3))


def test_an_untrained_adapter_changes_nothing():
    plain = build_model(DENSE, device="cpu")
    init_weights(plain, seed=0, std=0.2)
    assert torch.equal(adapted_model(lora=Lora(), trained=False)(tokens()), plain(tokens()))


@pytest.mark.parametrize(("model", "lora"), LORAS)
def test_only_adapters_and_saved_modules_are_trained(model, lora):
    built = adapted_model(model, lora=lora)
    built(tokens(), labels_BT=tokens()).backward()
    with_gradient = {name for name, p in built.named_parameters() if p.grad is not None}
    saved = {f"{name}.weight" for name in lora.modules_to_save}
    assert with_gradient == {name for name, _ in built.named_parameters() if ".lora_" in name} | saved


@pytest.mark.parametrize(("model", "lora"), LORAS)
def test_the_cost_model_counts_as_many_parameters(model, lora):
    built = build_model(model)
    add_adapters(built, lora)
    held = sum(p.numel() for p in built.parameters() if p.requires_grad)
    row = model_row(model, lora=lora)
    assert held == pytest.approx(model.num_layers * count_parameters(row).lora_layer + row.saved_parameters)


def test_gradients_equal_those_of_the_product_written_out():
    lora = Lora(rank=4, alpha=8.0, targets=("query",))
    built = adapted_model(lora=lora)
    layer = next(layer for _, layer in adapted(built))
    x = torch.randn(3, 32)
    a, b = (w.weight.detach().clone().requires_grad_() for w in (layer.lora_a, layer.lora_b))
    (x @ (layer.weight + 2.0 * b @ a).T).square().sum().backward()

    def trained():
        layer.zero_grad()
        layer(x).square().sum().backward()
        return {"a": layer.lora_a.weight.grad, "b": layer.lora_b.weight.grad}

    assert_equals(trained, {"a": a.grad, "b": b.grad}, weights=layer.parameters(), terms=x.shape[1])


@pytest.mark.parametrize(("model", "lora"), LORAS)
def test_merging_keeps_the_logits_and_leaves_plain_layers(model, lora):
    built = adapted_model(model, lora=lora)
    before = built(tokens())
    merge_adapters(built)
    assert not list(adapter_matrices(built))
    assert_equals(lambda: {"": built(tokens())}, {"": before}, weights=built.parameters(), terms=TERMS)
    assert [n for n, _ in built.named_parameters()] == [n for n, _ in build_model(model).named_parameters()]


def test_a_merged_model_has_one_format():
    built = build_model(DENSE, dtype=torch.bfloat16)
    add_adapters(built, Lora(modules_to_save=("embedding", "head")))
    materialize(built, device="cpu")
    init_weights(built, seed=0)
    assert built.get_parameter("head.weight").dtype == torch.float32
    merge_adapters(built)
    assert built(tokens()).dtype == torch.bfloat16


def test_an_untrained_magnitude_changes_nothing_but_roundings():
    plain = build_model(DENSE, device="cpu")
    init_weights(plain, seed=0, std=0.2)
    expected = {"": plain(tokens())}
    built = adapted_model(lora=Lora(use_dora=True), trained=False)
    assert_equals(lambda: {"": built(tokens())}, expected, weights=plain.parameters(), terms=TERMS)


def test_dropout_of_dora_is_that_of_peft(tmp_path):
    """PEFT's layer drops the input of the change, and not of the frozen matrix."""
    peft = pytest.importorskip("peft")
    ours = next(m for _, m in adapted(adapted_model(lora=Lora(rank=4, alpha=8.0, dropout=0.3, use_dora=True)).train()))
    base = torch.nn.Linear(32, 32, bias=False)
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.3, use_dora=True, target_modules=["0"])
    theirs = peft.get_peft_model(torch.nn.Sequential(base), config).train()
    layer = theirs.base_model.model[0]
    with torch.no_grad():
        base.weight.copy_(ours.weight)
        layer.lora_A.default.weight.copy_(ours.lora_a.weight)
        layer.lora_B.default.weight.copy_(ours.lora_b.weight)
        layer.lora_magnitude_vector.default.weight.copy_(ours.lora_magnitude)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    found = []
    for module in (ours, theirs):
        torch.manual_seed(0)
        found.append(module(x))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_dropout_is_for_training_only():
    built = adapted_model(lora=Lora(rank=4, dropout=0.5))
    built.train()
    assert not torch.equal(built(tokens()), built(tokens()))
    built.eval()
    assert torch.equal(built(tokens()), built(tokens()))


def test_adapters_stay_fp32_on_a_bf16_base():
    built = build_model(DENSE, dtype=torch.bfloat16)
    add_adapters(built, Lora())
    materialize(built, device="cpu")
    init_weights(built, seed=0)
    layer = next(layer for _, layer in adapted(built))
    assert (layer.weight.dtype, layer.lora_a.weight.dtype) == (torch.bfloat16, torch.float32)
    assert built(tokens()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("model", "targets", "message"),
    [
        (MIXTURE, ("gate",), "only attention is adapted"),
        (LATENT, ("up",), "only attention is adapted"),
        (DENSE, ("keys",), "no such LoRA target"),
        (LATENT, ("qkv",), "no such LoRA target"),
    ],
)
def test_targets_that_no_layer_has_are_refused(model, targets, message):
    with pytest.raises(InputError, match=message):
        add_adapters(build_model(model), Lora(targets=targets))


@pytest.mark.parametrize(("model", "lora"), LORAS)
def test_saved_adapters_come_back(model, lora, tmp_path):
    lora = replace(lora, dropout=0.1)
    built = adapted_model(model, lora=lora).eval()
    save_adapters(adapters_of(built), tmp_path / "adapter", model=model, lora=lora, base="tiny")
    assert read_lora(tmp_path / "adapter", model=model) == lora
    again = adapted_model(model, lora=lora, trained=False).eval()
    load_adapters(again, tmp_path / "adapter")
    assert torch.equal(again(tokens()), built(tokens()))


def test_adapters_of_other_targets_are_refused(tmp_path):
    lora = Lora(rank=4, targets=("query",))
    adapters = adapters_of(adapted_model(lora=lora))
    save_adapters(adapters, tmp_path / "adapter", model=DENSE, lora=lora, base="tiny")
    with pytest.raises(InputError, match="4 are missing and 4 unexpected"):
        load_adapters(adapted_model(lora=Lora(rank=4, targets=("key",))), tmp_path / "adapter")
    with pytest.raises(InputError, match="another shape"):
        load_adapters(adapted_model(lora=Lora(rank=8, targets=("query",))), tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(InputError, match="not the config of a LoRA adapter"):
        read_lora(tmp_path / "adapter", model=DENSE)


@pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"  # peft 0.21 with transformers 5.23
)
@pytest.mark.parametrize(("model", "lora"), LORAS)
def test_peft_loads_what_we_save_and_we_load_what_peft_saves(model, lora, tmp_path):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    ours = adapted_model(model, lora=lora).eval()
    save_weights(ours, tmp_path / "base", dtype=torch.float32)
    save_adapters(adapters_of(ours), tmp_path / "adapter", model=model, lora=lora, base=str(tmp_path / "base"))

    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    expected = {"logits": theirs(tokens()).logits}
    assert_equals(lambda: {"logits": ours(tokens())}, expected, weights=ours.parameters(), terms=TERMS)

    theirs.save_pretrained(tmp_path / "theirs")
    again = build_model(model)
    add_adapters(again, read_lora(tmp_path / "theirs", model=model))
    materialize(again, device="cpu")
    load_weights(again, tmp_path / "base")
    init_adapters(again, seed=1)
    load_adapters(again, tmp_path / "theirs")
    assert torch.equal(again.eval()(tokens()), ours(tokens()))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_an_adapter_of_a_whole_fused_matrix_is_read(tmp_path):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    save_weights(adapted_model(PHI, lora=Lora()), tmp_path / "base", dtype=torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["qkv_proj", "down_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(base, config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    lora = read_lora(tmp_path / "theirs", model=PHI)
    assert lora == Lora(rank=4, alpha=8.0, targets=("qkv", "down"))
    ours = adapted_model(PHI, lora=lora)
    load_weights(ours, tmp_path / "base")
    load_adapters(ours, tmp_path / "theirs")
    ours.eval()
    expected = {"logits": theirs(tokens()).logits}
    assert_equals(lambda: {"logits": ours(tokens())}, expected, weights=ours.parameters(), terms=TERMS)


def test_adapters_of_one_part_of_a_fused_matrix_are_refused(tmp_path):
    lora = Lora(targets=("query", "value"))
    adapters = adapters_of(adapted_model(PHI, lora=lora))
    with pytest.raises(InputError, match="only some parts have adapters"):
        save_adapters(adapters, tmp_path / "adapter", model=PHI, lora=lora, base="tiny")


def test_one_adapter_of_query_key_and_value_equals_one_of_the_matrix_they_make():
    """Against plain PyTorch: one fused matrix, one A, one dropout, one B; gradients and five AdamW steps."""
    built = adapted_model(lora=Lora(rank=4, alpha=16.0, dropout=0.3, targets=("qkv",))).train()
    attention = next(iter(built.layers.values())).attention
    parts = (attention.query, attention.key, attention.value)
    w = torch.cat([part.weight for part in parts]).detach()
    a = attention.qkv.lora_a.weight.detach().clone().requires_grad_()
    b = torch.cat([part.weight for part in attention.qkv.lora_b.values()]).detach().clone().requires_grad_()
    assert b.shape == (w.shape[0], 4)
    ours = list(attention.qkv.parameters())
    optimizers = [torch.optim.AdamW(parameters, lr=1e-2) for parameters in (ours, [a, b])]
    for step in range(5):
        x = torch.randn(3, 32, generator=torch.Generator().manual_seed(step))
        torch.manual_seed(step)
        found = torch.cat([part(x) + more for part, more in zip(parts, attention.qkv(x), strict=True)], dim=-1)
        torch.manual_seed(step)
        expected = x @ w.T + 4.0 * torch.nn.functional.dropout(x, 0.3) @ a.T @ b.T
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for optimizer, out in zip(optimizers, (found, expected), strict=True):
            optimizer.zero_grad()
            out.square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(attention.qkv.lora_a.weight, a, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat(ours[1:]), b, rtol=1e-4, atol=1e-5)


def test_adapters_of_the_fused_matrix_of_llama_2_70b_are_those_of_mlperf():
    model, lora = catalog.model("llama2-70b"), Lora(rank=16, targets=("qkv", "output"))
    built = build_model(model)
    add_adapters(built, lora)
    counted = sum(p.numel() for p in built.parameters() if p.requires_grad)
    assert counted == 44_564_480
    assert model.num_layers * count_parameters(model_row(model, lora=lora)).lora_layer == counted


def test_three_adapters_are_not_read_as_one(tmp_path):
    three, one = Lora(rank=4, targets=("query", "key", "value")), Lora(rank=4, targets=("qkv",))
    for model in (DENSE, PHI):
        folder = tmp_path / model.family
        save_adapters(adapters_of(adapted_model(model, lora=three)), folder, model=model, lora=three, base=None)
        assert read_lora(folder, model=model) == three
        with pytest.raises(InputError, match="an adapter each"):
            load_adapters(adapted_model(model, lora=one), folder)


def with_gradients_of_peft(model, *, lora, folder):
    """A step of the adapted model, which returns the model, and PEFT's gradients of the same weights and loss."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    ours = adapted_model(model, lora=lora)
    save_weights(ours, folder / "base", dtype=torch.float32)
    save_adapters(adapters_of(ours), folder / "adapter", model=model, lora=lora, base="base")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
    labels = tokens().roll(-1, dims=1)
    labels[:, -1] = -100
    theirs(tokens(), labels=tokens()).loss.backward()  # transformers shifts labels itself

    def trained():
        ours.zero_grad()
        (ours(tokens(), labels_BT=labels) / (labels >= 0).sum()).backward()
        return ours

    return trained, {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_gradients_of_a_fused_matrix_equal_those_of_peft(tmp_path):
    trained, theirs = with_gradients_of_peft(
        PHI, lora=Lora(rank=4, alpha=16.0, targets=("qkv", "output")), folder=tmp_path
    )
    expected = {name: gradient for name, gradient in theirs.items() if "qkv_proj.lora_" in name}

    def ours():
        found = {}
        for index, layer in trained().layers.items():
            name = f"base_model.model.model.layers.{index}.self_attn.qkv_proj.lora_"
            adapter = layer.attention.qkv
            found[f"{name}A.default.weight"] = adapter.lora_a.weight.grad
            found[f"{name}B.default.weight"] = torch.cat([b.weight.grad for b in adapter.lora_b.values()])
        return found

    assert_equals(ours, expected, weights=trained().parameters(), terms=TERMS)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("use_dora", [False, True])
def test_gradients_equal_those_of_peft(tmp_path, use_dora):
    lora = Lora(rank=4, alpha=16.0, targets=ALL, modules_to_save=("embedding", "head"), use_dora=use_dora)
    trained, theirs = with_gradients_of_peft(DENSE, lora=lora, folder=tmp_path)
    whole = {"embedding.weight": "model.embed_tokens", "head.weight": "lm_head"}

    def named(ours):
        if ours in whole:
            return f"base_model.model.{whole[ours]}.modules_to_save.default.weight"
        place, part = ours.removesuffix(".weight").split(".lora_")
        part = "magnitude_vector" if part == "magnitude" else part.upper()
        index, where = place.removeprefix("layers.").split(".", 1)
        end = f"{PEFT[where]}.lora_{part}."
        (name,) = [name for name in theirs if f"layers.{index}." in name and end in name]
        return name

    def ours():
        return {named(name): parameter.grad for name, parameter in adapters_of(trained()).items()}

    assert_equals(ours, theirs, weights=trained().parameters(), terms=TERMS)


def test_pissa_by_iterations_begins_as_pefts():
    """With the same random vectors; those of a run are of its seed, and each matrix has its own."""
    peft = pytest.importorskip("peft")
    layer = torch.nn.Sequential(torch.nn.Linear(24, 16, bias=False))
    weight = layer[0].weight.detach().clone()
    config = peft.LoraConfig(r=3, lora_alpha=4, target_modules=["0"])
    theirs = peft.get_peft_model(layer, config).base_model.model[0]
    torch.manual_seed(7)
    theirs.pissa_init("default", "pissa_niter_2")
    before = torch.get_rng_state()
    a, b = beginning(weight, "pissa_niter_2", rank=3, scale=4 / 3, seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    expected = {"a": theirs.lora_A["default"].weight, "b": theirs.lora_B["default"].weight}
    assert_equals(lambda: {"a": a, "b": b}, expected, weights=[weight], terms=24)
    exact = beginning(weight, "pissa", rank=3, scale=4 / 3)
    assert not torch.allclose(b @ a, exact[1] @ exact[0], atol=1e-4)
    many, _ = (beginning(weight, f"pissa_niter_{n}", rank=3, scale=4 / 3, seed=7) for n in (200, 1))
    assert torch.allclose(many[1] @ many[0], exact[1] @ exact[0], atol=1e-5)
