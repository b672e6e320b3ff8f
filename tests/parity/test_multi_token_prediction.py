"""Multi-token prediction against the definition of the DeepSeek-V3 report, written down on transformers' layers.

The reference reads the files that we write, by their published names, and shares no code with what is tested.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file
from tests.rounding import assert_equals
from torch.nn import functional
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

from meshwright.catalog.huggingface import model_from_config, model_from_path
from meshwright.errors import InputError
from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.training.models import TransformerOptions, build_model, init_weights
from meshwright.training.weights import load_weights, save_weights
from meshwright.training.weights.origin import differences

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 32, "num_hidden_layers": 3,
    "intermediate_size": 48, "moe_intermediate_size": 16, "vocab_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "hidden_act": "silu", "num_nextn_predict_layers": 2,
    "attention_bias": False, "rope_interleave": True,
}  # fmt: skip
WEIGHT, DEPTH, LENGTH = 0.3, 2, 12


@pytest.fixture(scope="module")
def built():
    model = build_model(
        model_from_config(CONFIG, name="v3"), device="cpu", options=TransformerOptions(mtp_loss_weight=WEIGHT)
    )
    init_weights(model, seed=0, std=0.2)
    return model


@pytest.fixture(scope="module")
def folder(built, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "v3"
    save_weights(built, path, dtype=torch.float32)
    return path


@pytest.fixture(scope="module")
def batch():
    stream = torch.randint(0, 96, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    labels = stream[:, 1:].clone()
    labels[0, 5] = IGNORED_LABEL
    return stream[:, :-1], labels


def stacked(tensors):
    """Experts in one tensor, as transformers holds them in memory."""
    found = {name: t for name, t in tensors.items() if ".experts." not in name}

    def experts(kind):
        return [tensors[f"mlp.experts.{e}.{kind}.weight"] for e in range(CONFIG["n_routed_experts"])]

    pairs = zip(experts("gate_proj"), experts("up_proj"), strict=True)
    found["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
    return found | {"mlp.experts.down_proj": torch.stack(experts("down_proj"))}


class Reference:
    """Equations 21 to 25 of the report, on the modules of transformers."""

    def __init__(self, folder):
        self.main = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.main.train()
        files = load_file(folder / "model.safetensors")
        self.modules = []
        for k in range(DEPTH):
            prefix = f"model.layers.{CONFIG['num_hidden_layers'] + k}."
            own = {name.removeprefix(prefix): t for name, t in files.items() if name.startswith(prefix)}
            assert torch.equal(own.pop("embed_tokens.weight"), files["model.embed_tokens.weight"])
            assert torch.equal(own.pop("shared_head.head.weight"), files["lm_head.weight"])
            outside = {
                name: own.pop(name).requires_grad_()
                for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
            }
            block = DeepseekV3DecoderLayer(self.main.config, layer_idx=2)
            block.load_state_dict(stacked(own))
            self.modules.append((outside, block))

    def norm(self, x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * weight

    def losses(self, tokens, labels):
        """Sums over positions: of the main model, and of each module."""
        seen = {}
        hook = self.main.model.norm.register_forward_pre_hook(lambda _, inputs: seen.update(h=inputs[0]))
        logits = self.main(tokens).logits
        hook.remove()
        assert isinstance(self.main.model.norm, DeepseekV3RMSNorm)
        found = [self.entropy(logits, labels)]
        h, length = seen["h"], tokens.shape[1]
        for k, (outside, block) in enumerate(self.modules, start=1):
            kept = length - k  # positions whose token t_(i+k) is in the sequence
            embedded = self.main.model.embed_tokens(tokens[:, k:])
            both = torch.cat(
                [self.norm(embedded, outside["enorm.weight"]), self.norm(h[:, :kept], outside["hnorm.weight"])], dim=-1
            )
            x = functional.linear(both, outside["eh_proj.weight"])
            order = torch.arange(kept)[None]
            mask = torch.full((kept, kept), -torch.inf).triu(1)[None, None]
            h = block(
                x, attention_mask=mask, position_ids=order, position_embeddings=self.main.model.rotary_emb(x, order)
            )
            h = h[0] if isinstance(h, tuple) else h
            logits = self.main.lm_head(self.norm(h, outside["shared_head.norm.weight"]))
            found.append(self.entropy(logits, labels[:, k:]))
        return found

    def entropy(self, logits, labels):
        return functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
        )


def test_loss_and_gradients_are_those_of_the_report(built, folder, batch):
    tokens, labels = batch
    reference = Reference(folder)
    main, *predicted = reference.losses(tokens, labels)
    (main + WEIGHT / DEPTH * sum(predicted)).backward()
    built.train()
    theirs = {
        "loss": main,  # what is shown is the main loss
        "embedding.weight": reference.main.model.embed_tokens.weight.grad,
        "head.weight": reference.main.lm_head.weight.grad,
        "layers.2.attention.output.weight": reference.main.model.layers[2].self_attn.o_proj.weight.grad,
    }
    for k, (outside, block) in enumerate(reference.modules):
        ours_of, at = f"predictions.{3 + k}.", {"embedding_norm": "enorm", "hidden_norm": "hnorm"}
        at |= {"projection": "eh_proj", "norm": "shared_head.norm"}
        theirs |= {f"{ours_of}{a}.weight": outside[f"{b}.weight"].grad for a, b in at.items()}
        theirs[f"{ours_of}block.attention.output.weight"] = block.self_attn.o_proj.weight.grad
        theirs[f"{ours_of}block.ffn.shared.down.weight"] = block.mlp.shared_experts.down_proj.weight.grad

    def trained():
        built.zero_grad()
        loss = built(tokens, labels_BT=labels)
        loss.backward()
        ours = {name: p.grad for name, p in built.named_parameters()} | {"loss": loss}
        return {name: ours[name] for name in theirs}

    assert_equals(trained, theirs, weights=built.parameters(), terms=CONFIG["vocab_size"])


def test_without_gradients_the_model_predicts_as_one_without_modules(built, folder, batch):
    tokens, labels = batch
    plain = build_model(replace(built.model, num_mtp_layers=0), device="cpu")
    load_weights(plain, folder)
    built.eval()
    assert torch.equal(built(tokens, labels_BT=labels), plain(tokens, labels_BT=labels))
    assert torch.equal(built(tokens), plain(tokens))


def test_documents_of_one_sequence_are_trained_as_by_themselves(built):
    built.train()
    lengths = (5, 4, 3)
    stream = torch.randint(0, 96, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    parts = list(stream.split(lengths, dim=1))
    labels = [torch.cat([part[:, 1:], torch.full((1, 1), IGNORED_LABEL)], dim=1) for part in parts]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]

    def gradients(*calls):
        built.zero_grad()
        for arguments in calls:
            built(**arguments).backward()
        return {name: p.grad.clone() for name, p in built.named_parameters() if p.grad is not None}

    whole = {
        "tokens_BT": stream,
        "labels_BT": torch.cat(labels, 1),
        "positions_BT": positions,
        "documents_BT": documents,
    }
    single = gradients(*({"tokens_BT": part, "labels_BT": of} for part, of in zip(parts, labels, strict=True)))
    assert_equals(lambda: gradients(whole), single, weights=built.parameters(), terms=CONFIG["vocab_size"])


def test_files_come_back_and_may_be_read_without_the_modules(built, folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == DEPTH
    assert model_from_path(folder).num_mtp_layers == DEPTH
    again = build_model(built.model, device="cpu")
    load_weights(again, folder)
    for name, tensor in built.named_parameters():
        assert torch.equal(dict(again.named_parameters())[name], tensor), name
    assert differences(folder, built.model) == []
    without = replace(built.model, num_mtp_layers=0)
    assert differences(folder, without) == ["model.num_mtp_layers is 0; the config.json of the weights says 2"]
    plain = build_model(without, device="cpu")
    load_weights(plain, folder)
    save_weights(plain, tmp_path / "plain", dtype=torch.float32)
    assert json.loads((tmp_path / "plain" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    with pytest.raises(InputError, match=r"missing model\.layers\.3\.") as caught:
        load_weights(again, tmp_path / "plain")
    assert caught.value.hint.startswith("--set model.num_mtp_layers=0")
