"""Parts that few models have, as options of Megatron-LM, and the models of the catalogue that have them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright import runfile
from meshwright.engines.megatron import contract
from meshwright.errors import InputError
from meshwright.specs.model import Activation, Model
from meshwright.specs.model_parts import parts_of

REST = "--micro-batch-size 1 --global-batch-size 64 --seq-length 512 --max-position-embeddings 8192 --lr 1e-4 --bf16"
PLAIN = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --swiglu --disable-bias-linear --vocab-size 512
--position-embedding-type rope --normalization RMSNorm --untie-embeddings-and-output-weights"""
CLAMPED = "--quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1"
MIXTURE = "--num-experts 4 --moe-ffn-hidden-size 32"

GPT_OSS = """--num-layers 24 --hidden-size 2880 --num-attention-heads 64 --group-query-attention --num-query-groups 8
--kv-channels 64 --quick-geglu --activation-func-clamp-value 7.0 --glu-linear-offset 1.0 --window-size 127,0
--window-attn-skip-freq 2 --softmax-type learnable --position-embedding-type yarn --rotary-base 150000
--rotary-scaling-factor 32 --yarn-original-max-position-embeddings 4096 --no-yarn-correction-range-round-to-int
--normalization RMSNorm --untie-embeddings-and-output-weights --vocab-size 201088 --num-experts 32
--moe-router-topk 4 --moe-ffn-hidden-size 2880"""
QWEN3_NEXT = """--num-layers 48 --hidden-size 2048 --num-attention-heads 16 --group-query-attention --num-query-groups 2
--kv-channels 256 --ffn-hidden-size 5120 --swiglu --attention-output-gate --qk-layernorm --apply-layernorm-1p
--experimental-attention-variant gated_delta_net --linear-attention-freq "([1]*3+[0])*12" --norm-epsilon 1e-6
--position-embedding-type rope --rotary-base 10000000 --rotary-percent 0.25 --normalization RMSNorm
--disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 151936 --num-experts 512
--moe-router-topk 10 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate
--mtp-num-layers 1"""
NEMOTRON_H = """--hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8
--kv-channels 128 --ffn-hidden-size 21504 --squared-relu --mamba-num-heads 128 --position-embedding-type none
--hybrid-override-pattern M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M- --is-hybrid-model
--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 131072
--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"""
NEMOTRON_3 = """--hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 2
--kv-channels 128 --squared-relu --mamba-num-heads 128 --position-embedding-type none --is-hybrid-model
--mtp-use-repeated-layer
--hybrid-layer-pattern MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME/*E/*E
--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 131072
--num-experts 512 --moe-router-topk 22 --moe-ffn-hidden-size 2688 --moe-shared-expert-intermediate-size 5376
--moe-latent-size 1024 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
--moe-router-topk-scaling-factor 5.0"""
GPT3 = """--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --max-position-embeddings 2048 --seq-length 2048
--vocab-size 50257"""


def model_of(folder: Path, *options: str, program: str = "") -> Model:
    path = folder / ("own.sh" if program else "own.args")
    path.write_text(" ".join((*(("torchrun", program) if program else ()), REST, *options)).replace("\n", " "))
    found = contract.import_run(str(path), cluster="h100-8x8")
    return runfile.from_mapping(found.content).model


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ("--attention-output-gate", {"attention.output_gate": True}),
        ("--softmax-type learnable", {"attention.sinks": True}),
        ("--apply-layernorm-1p", {"zero_centered_norms": True}),
        (f"{MIXTURE} --moe-latent-size 16", {"experts.latent": 16}),
        (f"{MIXTURE} --moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate", {"experts.shared_gate": True}),
        ("--mtp-num-layers 2 --mtp-use-repeated-layer", {"mtp_shared": True}),
        (CLAMPED, {"activation": Activation.CLAMPED_SWIGLU}),
        ("--window-size -1,0", {}),
        ("--linear-num-key-heads 2", {}),
    ],
)  # fmt: skip
def test_parts_of_options(options, parts, tmp_path):
    assert parts_of(model_of(tmp_path, PLAIN, options)) == parts


@pytest.mark.parametrize(
    ("options", "window", "windowed"),
    [
        ("--window-size 127,0", 128, (True, True, True, True)),  # the token itself is the 128th
        (r'--window-size "(7,-1)" --window-attn-skip-freq 2', 8, (True, False, True, False)),
        ("--window-size 7,0 --window-attn-skip-freq [1,1,0,1]", 8, (True, True, False, True)),
    ],
)
def test_a_window_counts_the_token_itself(options, window, windowed, tmp_path):
    model = model_of(tmp_path, PLAIN, options)
    assert (model.attention.window, model.windowed_layers) == (window, windowed)


@pytest.mark.parametrize(
    ("name", "options", "program"),
    [
        ("gpt-oss-20b", GPT_OSS, "pretrain_gpt.py"),
        ("qwen3-next-80b-a3b", QWEN3_NEXT, "pretrain_gpt.py"),
        ("nemotron-h-8b", NEMOTRON_H, "pretrain_mamba.py"),
        ("nemotron3-super", NEMOTRON_3, "pretrain_hybrid.py"),
        ("gpt3-175b", GPT3, "pretrain_gpt.py"),
    ],
)
def test_models_of_the_catalogue_are_known_by_their_options(name, options, program, tmp_path):
    assert model_of(tmp_path, options, program=program).name == name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--softmax-type off-by-one", "cannot express: --softmax-type: got 'off-by-one'"),
        ("--experimental-attention-variant dsa", "cannot express: --experimental-attention-variant: got 'dsa'"),
        ("--quick-geglu", "--activation-func-clamp-value: got 0.0, allowed: 7.0"),
        ("--glu-linear-offset 1", "--glu-linear-offset: got 1.0, allowed: 0.0"),
        ("--window-size 7,7", "not the tokens before and after: got '7,7', allowed: 127,0"),
        ("--window-size 7,0 --window-attn-skip-freq [1,0]", "--window-attn-skip-freq: got '2 layers'"),
        ("--hybrid-override-pattern M-M*|M-", "unequal pipeline stages or modules"),
        ("--hybrid-override-pattern SDH*", "layer_pattern names 'D', 'H', 'S'"),
        ("--position-embedding-type relative", "positions that run files cannot express: got 'relative"),
    ],
)  # fmt: skip
def test_what_is_refused(options, words, tmp_path):
    with pytest.raises(InputError, match=re.escape(words)):
        model_of(tmp_path, PLAIN, options)
