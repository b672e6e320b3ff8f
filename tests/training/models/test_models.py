from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from tests.rounding import assert_equals
from tests.tiny_models import DENSE as TINY
from tests.tiny_models import LATENT_ATTENTION

from meshwright.catalog import lookup as catalog
from meshwright.catalog.families import FAMILIES
from meshwright.cost.flops import count_parameters
from meshwright.cost.tables import model_row
from meshwright.errors import InputError
from meshwright.kernels.attention.key_ranges import key_ranges
from meshwright.specs.model import Experts, Rope, RopeScaling, Router
from meshwright.training.models import (
    TransformerOptions,
    build_model,
    collect_expert_load,
    configure_router_losses,
    expert_load_ratio,
    init_weights,
    update_routing_bias,
)
from meshwright.training.models.experts import MixtureOfExperts, balance_loss
from meshwright.training.models.families import check_model

DENSE = replace(TINY, num_layers=4)
MIXTURE = replace(DENSE, ffn_hidden=0, experts=Experts(num_experts=8, top_k=3, ffn_hidden=24, num_shared=1))
SIGMOID = replace(MIXTURE, experts=replace(MIXTURE.experts, router=Router.SIGMOID, routed_scale=2.5))
LATENT = replace(
    SIGMOID,
    ffn_hidden=48,
    attention=LATENT_ATTENTION,
    experts=replace(SIGMOID.experts, num_dense_layers=1, num_groups=4, groups_per_token=2),
)
ALL = [DENSE, MIXTURE, SIGMOID, LATENT]
TERMS = 61
"""The longest sum of these models: over the vocabulary. The next ones are over 48 columns and 40 tokens."""


def filled(model=DENSE, *, seed=0, std=0.2, **options):
    built = build_model(model, device="cpu", **options)
    init_weights(built, seed=seed, std=std)
    return built


def gradients(built):
    return {name: p.grad for name, p in built.named_parameters() if p.grad is not None}


def tokens(batch=2, length=20, *, vocab=61, seed=3):
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


# --- what is built


def is_built(name):
    """Return whether the engine accepts the catalogue's model."""
    try:
        check_model(catalog.model(name))
    except InputError:
        return False
    return True


BUILT = [name for name in catalog.model_names() if is_built(name)]
FLATTEST = {
    model.family: name
    for name, model in sorted(((name, catalog.model(name)) for name in BUILT), key=lambda named: -named[1].num_layers)
}.values()
"""The model with the fewest layers of each architecture."""


def test_what_is_not_built_is_of_a_family_that_is_not_trained_or_has_learned_positions():
    for name in set(catalog.model_names()) - set(BUILT):
        model = catalog.model(name)
        family = FAMILIES.get(model.family)
        is_not_trained = family is not None and not family.trains
        assert model.learned_positions or model.layer_pattern or model.unsupported or is_not_trained, name


@pytest.mark.parametrize(
    "name", [n if n in FLATTEST else pytest.param(n, marks=pytest.mark.when_touched) for n in BUILT]
)  # others of the same architecture have other widths and more layers
def test_parameters_are_as_many_as_the_cost_model_counts(name):
    model = catalog.model(name)
    built = build_model(model)
    counted = int(count_parameters(model_row(model)).total)
    assert sum(p.numel() for p in built.parameters()) == counted
    assert all(p.is_meta for p in built.parameters())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (catalog.model("gpt3-175b"), "learned positions"),
        (replace(DENSE, attention=replace(DENSE.attention, qk_norm_across_heads=True)), "needs qk_norm"),
        (replace(DENSE, attention=replace(DENSE.attention, window_pattern=(True,))), "need attention.window"),
        (replace(LATENT, attention=replace(LATENT.attention, sinks=True, score_cap=5.0)), "no sinks; latent"),
        (replace(LATENT, rope=Rope(rotated_share=0.5)), "rotated_share must be 1"),
        (
            replace(DENSE, rope=Rope(scaling=RopeScaling.LONGROPE, original_context=8, short_factors=(1.0,))),
            "must be 4, here 1 and 0",
        ),
        (replace(DENSE, gated_ffn=False), "without a gate"),
        (replace(DENSE, rope=Rope(scaling=RopeScaling.OTHER)), "this RoPE scaling"),
        (replace(DENSE, attention=replace(DENSE.attention, head_dim=7)), "rotate pairs"),
        (replace(DENSE, family="MambaForCausalLM"), "cannot build this architecture"),
    ],
)
def test_what_cannot_be_built_is_refused(model, message):
    with pytest.raises(InputError, match=message):
        build_model(model)


def test_a_stage_must_be_a_run_of_layers():
    with pytest.raises(InputError, match="a stage is a run of layers"):
        build_model(DENSE, layers=range(2, 9))


def test_routing_biases_and_loads_keep_their_types_in_bf16():
    built = filled(SIGMOID, dtype=torch.bfloat16)
    router = built.layers["0"].ffn.router
    assert (router.weight.dtype, router.bias_E.dtype, router.load_E.dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.int64,
    )
    assert built(tokens()).dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


# --- first weights


@pytest.mark.parametrize("model", ALL)
def test_stages_begin_with_the_weights_of_the_whole_model(model):
    whole = filled(model).state_dict()
    parts = filled(model, layers=range(0, 1)).state_dict() | filled(model, layers=range(1, 4)).state_dict()
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_seeds_names_and_experts_have_streams_of_their_own():
    first, second = filled(MIXTURE, seed=0), filled(MIXTURE, seed=1)
    gate_EFD = first.layers["0"].ffn.experts.gate
    assert not torch.equal(gate_EFD, second.layers["0"].ffn.experts.gate)
    assert not torch.equal(gate_EFD, first.layers["1"].ffn.experts.gate)
    assert not torch.equal(gate_EFD[0], gate_EFD[1])


def test_residual_writers_begin_smaller_and_norms_at_one():
    built = build_model(replace(DENSE, hidden=256, attention=replace(DENSE.attention, head_dim=64)), device="cpu")
    init_weights(built, seed=0)
    layer = built.layers["0"]
    assert layer.attention.query.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.attention.output.weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert torch.equal(layer.ffn_norm.weight, torch.ones(256))


# --- what is computed


@pytest.mark.parametrize("model", ALL)
def test_stages_one_after_the_other_are_the_model(model):
    first, second = filled(model, layers=range(0, 3)), filled(model, layers=range(3, 4))
    assert torch.equal(second(first(tokens())), filled(model)(tokens()))


@pytest.mark.parametrize("model", ALL)
def test_documents_of_a_packed_sequence_do_not_see_each_other(model):
    built = filled(model)
    first, second = tokens(1, 7, seed=1), tokens(1, 13, seed=2)

    def packed():
        out_BTV = built(
            torch.cat([first, second], dim=1),
            positions_BT=torch.cat([torch.arange(7), torch.arange(13)])[None],
            documents_BT=torch.tensor([[0] * 7 + [1] * 13]),
        )
        return {"first": out_BTV[:, :7], "second": out_BTV[:, 7:]}

    alone = {"first": built(first), "second": built(second)}
    assert_equals(packed, alone, weights=built.parameters(), terms=TERMS)


@pytest.mark.parametrize("model", ALL)
def test_one_document_is_the_same_as_none_given(model):
    built = filled(model)
    documents_BT = torch.zeros(2, 20, dtype=torch.long)
    assert_equals(
        lambda: {"logits": built(tokens(), documents_BT=documents_BT)},
        {"logits": built(tokens())},
        weights=built.parameters(),
        terms=TERMS,
    )


def test_windows_are_in_the_last_layers_only():
    model = replace(DENSE, attention=replace(DENSE.attention, window=3, num_windowed_layers=1))
    built = filled(model)
    assert [layer.is_windowed for layer in built.layers.values()] == [False] * 3 + [True]
    assert not torch.allclose(built(tokens()), filled(DENSE)(tokens()))
    wide = replace(DENSE, attention=replace(DENSE.attention, window=20, num_windowed_layers=4))
    assert torch.equal(filled(wide)(tokens()), filled(DENSE)(tokens()))


def test_a_windowed_query_sees_its_last_tokens():
    mask_TS = key_ranges(torch.tensor([[0, 0, 0, 0, 1]]), window=2).mask_B1TS[0, 0]
    assert mask_TS.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("model", ALL)
def test_the_loss_is_cross_entropy_of_the_logits(model):
    built = filled(model)
    labels_BT = tokens().roll(-1, dims=1)
    labels_BT[0, :5] = -100
    expected = torch.nn.functional.cross_entropy(built(tokens()).flatten(0, 1), labels_BT.flatten(), reduction="sum")
    torch.testing.assert_close(built(tokens(), labels_BT=labels_BT), expected)


def test_tied_embeddings_are_one_parameter_that_both_ends_train():
    built = filled(replace(DENSE, tied_embeddings=True))
    assert built.head.weight is built.embedding.weight
    assert "head.weight" not in dict(built.named_parameters())
    built(tokens(), labels_BT=tokens()).backward()
    assert (built.embedding.weight.grad.abs().sum(dim=1) > 0).all()  # the head reaches every row


# --- mixture of experts


@pytest.mark.parametrize("model", [MIXTURE, SIGMOID])
def test_no_token_is_dropped_even_when_all_choose_one_expert(model):
    built = filled(model).train()
    for layer in built.layers.values():
        with torch.no_grad():
            layer.ffn.router.weight.zero_()  # equal scores: every token takes the same experts
    built(tokens(), labels_BT=tokens()).backward()
    load_E = collect_expert_load([built])[0]
    assert load_E.sum() == 2 * 20 * 3
    assert sorted(load_E.unique().tolist()) == [0, 40]


def test_loads_are_counted_in_training_and_start_anew():
    built = filled(MIXTURE).eval()
    built(tokens())
    assert collect_expert_load([built])[0].sum() == 0
    built.train()(tokens())
    built(tokens())
    assert collect_expert_load([built])[3].sum() == 2 * 2 * 20 * 3
    assert collect_expert_load([built])[3].sum() == 0


def test_the_bias_rises_for_idle_experts_and_only_shifts_the_choice():
    built = filled(SIGMOID).train()
    for _ in range(40):
        with torch.no_grad():
            built(tokens())
        load_LE = collect_expert_load([built])
        update_routing_bias([built], load_LE, speed=0.02)
    assert expert_load_ratio(load_LE) < 1.5
    idle = filled(SIGMOID).train()
    idle(tokens())
    before = collect_expert_load([idle])
    assert expert_load_ratio(before) > expert_load_ratio(load_LE)


@pytest.mark.parametrize(
    "options", [{"balance_loss": 0.5}, {"router_z_loss": 0.3}, {"balance_loss": 0.5, "router_z_loss": 0.3}]
)
@pytest.mark.parametrize("model", [MIXTURE, SIGMOID])
def test_attached_losses_of_routers_have_the_gradient_of_added_ones(model, options):
    attached = filled(model, options=TransformerOptions(**options)).train()
    plain = filled(model).train()
    scores = {}
    for name, layer in plain.named_modules():
        if isinstance(layer, MixtureOfExperts):
            layer.router.register_forward_hook(
                lambda router, given, out, name=name: scores.update({name: (router, *given, out)})
            )
    labels_BT = tokens().roll(-1, dims=1)
    loss = plain(tokens(), labels_BT=labels_BT) * 0.25
    for router, x_ND, choice in scores.values():
        logits_NE = x_ND.float() @ router.weight.T
        loss = loss + 0.25 * options.get("router_z_loss", 0) * logits_NE.exp().sum(dim=1).log().square().sum()
        for scores_TE, experts_TC in zip(choice.scores_NE.split(20), choice.experts_NC.split(20), strict=True):
            share_E = torch.bincount(experts_TC.flatten(), minlength=8) / experts_TC.numel()
            scores_TE = scores_TE / scores_TE.sum(dim=1, keepdim=True)
            balance = 20 * 8 * (share_E * scores_TE.mean(dim=0)).sum()
            loss = loss + 0.25 * options.get("balance_loss", 0) * balance
    loss.backward()
    configure_router_losses([attached], scale=0.25)

    def trained():
        attached.zero_grad()
        (attached(tokens(), labels_BT=labels_BT) * 0.25).backward()
        return gradients(attached)

    assert_equals(trained, gradients(plain), weights=attached.parameters(), terms=TERMS)


@pytest.mark.parametrize("model", [MIXTURE, SIGMOID])
def test_padding_counts_neither_as_load_nor_in_the_losses_of_routers(model):
    options = TransformerOptions(balance_loss=0.5, router_z_loss=0.05)

    def trained(built, num_padding):
        built.zero_grad()
        tokens_BT = torch.nn.functional.pad(tokens(), (0, num_padding))
        documents_BT = torch.nn.functional.pad(torch.arange(20).expand(2, -1) // 7, (0, num_padding), value=-1)
        labels_BT = torch.nn.functional.pad(tokens(), (0, num_padding), value=-100)
        positions_BT = torch.nn.functional.pad(torch.arange(20).expand(2, -1) % 7, (0, num_padding))
        built(tokens_BT, positions_BT, documents_BT, labels_BT).backward()
        return gradients(built)

    def updated(built, load_LE):
        update_routing_bias([built], load_LE, speed=0.02)
        return [buffer for name, buffer in built.named_buffers() if name.endswith("bias_E")]

    alone, padded = (filled(model, options=options).train() for _ in range(2))
    expected = trained(alone, 0)
    trained(padded, 13)
    load_LE, padded_LE = (collect_expert_load([built]) for built in (alone, padded))
    assert torch.equal(padded_LE, load_LE)
    assert_equals(lambda: trained(padded, 13), expected, weights=padded.parameters(), terms=TERMS)
    assert all(map(torch.equal, updated(padded, padded_LE), updated(alone, load_LE)))


def test_a_sequence_of_padding_has_no_balance_loss():
    scores_BTE, nowhere_BT = torch.full((1, 16, 4), 0.25), torch.zeros(1, 16, dtype=torch.bool)
    assert balance_loss(scores_BTE, torch.zeros(1, 4), nowhere_BT).item() == 0


def test_balanced_experts_have_a_balance_loss_of_one():
    scores_BTE = torch.full((2, 16, 4), 0.25)
    assert balance_loss(scores_BTE, torch.full((2, 4), 8)).item() / 32 == pytest.approx(1.0)


@pytest.mark.parametrize("model", [MIXTURE, LATENT])
def test_gradients_are_the_same_bits_each_time(model):
    def trained():
        built = filled(model).train()
        built(tokens(), labels_BT=tokens()).backward()
        return [p.grad for p in built.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(trained(), trained(), strict=True))


def test_an_expert_without_tokens_gets_a_zero_gradient():
    built = filled(replace(MIXTURE, experts=replace(MIXTURE.experts, num_experts=64)))
    built(tokens(1, 2), labels_BT=tokens(1, 2)).backward()
    gate_EFD = built.layers["0"].ffn.experts.gate.grad
    assert gate_EFD.shape[0] == 64
    assert (gate_EFD.flatten(1).abs().sum(dim=1) == 0).sum() >= 58


@pytest.mark.slow
@pytest.mark.parametrize("model", [DENSE, MIXTURE, LATENT])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of PyTorch's compiler
def test_compiled_layers_compute_the_same(model):
    plain, compiled = filled(model).train(), filled(model).train()
    for layer in compiled.layers.values():
        layer.compile()

    def trained(built):
        built.zero_grad()
        loss = built(tokens(), labels_BT=tokens())
        loss.backward()
        return gradients(built) | {"loss": loss}

    expected = trained(compiled)
    assert_equals(lambda: trained(plain), expected, weights=plain.parameters(), terms=TERMS)
