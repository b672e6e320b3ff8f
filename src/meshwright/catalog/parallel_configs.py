"""config.json of families whose attention and feed-forward both read the layer's input: from keys to a `Model`.

Source of the keys and their defaults: the configuration classes of Hugging Face transformers
(https://github.com/huggingface/transformers, src/transformers/models). Keys that change numbers and not cost are read
over: positions, the scale of logits.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.catalog.config_keys import ConfigKeys, grouped_attention
from meshwright.catalog.planned_configs import normalized, planned, windows_by_pattern
from meshwright.errors import InputError
from meshwright.specs.model import Attention, Model


def read_cohere(c: ConfigKeys) -> Model:
    """Command R and R+: one norm without a bias. R+ normalises each head of queries and keys by weights of its own,
    as many as a norm over all heads has."""
    attention = grouped_attention(c, bias=c.flag("attention_bias", False))
    if c.flag("use_qk_norm", False):
        attention = normalized(attention, across_heads=True)
    return _cohere(c, attention)


def read_cohere2(c: ConfigKeys) -> Model:
    """Command R7B and Command A: Command R with a sliding window in three of four layers."""
    c.require("use_qk_norm", False)
    for key in ("use_parallel_block", "use_gated_activation"):
        c.require(key, True)
    for key in ("layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct"):
        c.value(key)  # of other programs
    attention = grouped_attention(c, bias=c.flag("attention_bias", False))
    return _cohere(c, windows_by_pattern(c, attention))


def _cohere(c: ConfigKeys, attention: Attention) -> Model:
    c.value("logit_scale")
    epsilon = c.number("layer_norm_eps", 1e-5)
    return replace(planned(c, attention, tied=True), parallel_norms=1, norm_epsilon=epsilon)


def read_falcon(c: ConfigKeys) -> Model:
    """Falcon 7B with one norm and one key/value head, 40B and 180B with two norms. Without `parallel_attn` the
    feed-forward follows attention, as in GPT-2."""
    if c.flag("alibi", False):
        raise InputError(
            f"{c.name}: alibi is not costed: it adds a bias to each score of attention, for which no rate is known",
            got=True, allowed="false", hint="the same shapes with rotary positions are planned with `alibi: false`",
        )  # fmt: skip
    num_heads, new = c.count("num_attention_heads"), c.flag("new_decoder_architecture", False)
    shares, given = c.flag("multi_query", True), c.count("num_kv_heads", num_heads)
    num_norms, parallel = c.count("num_ln_in_parallel_attn", 1 + new), c.flag("parallel_attn", True)
    if num_norms > 1 + new:
        c.refuse(f"num_ln_in_parallel_attn: {num_norms}")
    if new and not parallel:
        c.refuse("parallel_attn: False with new_decoder_architecture")
    c.require("apply_residual_connection_post_layernorm", False)
    kv_heads = given if new else 1 if shares else num_heads
    model = _ungated(
        c, _heads(c, num_heads, kv_heads, bias=c.flag("bias", False)), tied=True,
        width=c.count("ffn_hidden_size", 4 * c.count("hidden_size")), activation="activation",
    )  # fmt: skip
    return replace(model, ffn_bias=model.attention.bias, parallel_norms=parallel * min(num_norms, 2))


def read_gpt_neox(c: ConfigKeys) -> Model:
    """GPT-NeoX and Pythia: biases everywhere, two norms. Without `use_parallel_residual` the feed-forward follows
    attention."""
    num_heads = c.count("num_attention_heads")
    for key in ("attention_probs_dropout_prob", "hidden_dropout_prob"):  # which transformers ignores
        c.require(key, 0)
    for key in ("rotary_pct", "rotary_emb_base", "classifier_dropout"):
        c.value(key)
    attention = _heads(c, num_heads, num_heads, bias=c.flag("attention_bias", True))
    parallel_norms = 2 * c.flag("use_parallel_residual", True)
    return replace(_ungated(c, attention), ffn_bias=True, parallel_norms=parallel_norms)


def read_gptj(c: ConfigKeys) -> Model:
    """GPT-J: one norm, biases of the feed-forward and of the head alone."""
    names = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    c.default({name: c.count(theirs) for name, theirs in names.items()})
    c.require("scale_attn_weights", True)
    for key in ("rotary", "rotary_dim", "n_positions"):
        c.value(key)
    c.require("attn_pdrop", 0)
    num_heads, width = c.count("num_attention_heads"), c.count("n_inner", 4 * c.count("hidden_size"))
    attention = _heads(c, num_heads, num_heads, bias=False)
    model = _ungated(c, attention, width=width, activation="activation_function", usual="gelu_new")
    epsilon = c.number("layer_norm_epsilon", 1e-5)
    return replace(model, ffn_bias=True, head_bias=True, parallel_norms=1, norm_epsilon=epsilon)


def read_phi(c: ConfigKeys) -> Model:
    """Phi-1, Phi-1.5 and Phi-2: one norm, biases everywhere."""
    attention = grouped_attention(c, bias=True)
    if c.flag("qk_layernorm", False):
        attention = normalized(attention)
    return replace(_ungated(c, attention, usual="gelu_new"), ffn_bias=True, head_bias=True, parallel_norms=1)


def _heads(c: ConfigKeys, num_heads: int, num_kv_heads: int, *, bias: bool) -> Attention:
    """Attention whose heads have the model's width together."""
    return Attention(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=c.count("hidden_size") // num_heads, bias=bias
    )


def _ungated(
    c: ConfigKeys,
    attention: Attention,
    *,
    width: int | None = None,
    activation: str = "hidden_act",
    usual: str = "gelu",
    tied: bool = False,
) -> Model:
    """A decoder with LayerNorm and ungated feed-forward blocks; `width`: theirs, where another key has it."""
    c.require("hidden_dropout", 0)
    c.default({"hidden_act": c.value(activation, usual)} | ({"intermediate_size": width} if width else {}))
    epsilon = c.number("layer_norm_epsilon", c.number("layer_norm_eps", 1e-5))
    return replace(planned(c, attention, gated=False, tied=tied), norm_bias=True, norm_epsilon=epsilon)
