"""Model families: one record for each architecture of Hugging Face transformers.

A record says how the architecture's `config.json` is read and written, which models the config can express, what
its tensors are called in files, and why Meshwright does not train it where it does not. The catalogue, the training
code and the weights ask it; docs/guides/adding-a-model-family.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.catalog import family_configs as configs
from meshwright.catalog import family_shapes as shapes
from meshwright.catalog import family_tensors as tensors
from meshwright.catalog import linear_configs, planned_configs, sparse_configs
from meshwright.catalog.config_keys import ConfigKeys
from meshwright.catalog.family_tensors import FusedTensor
from meshwright.specs.model import Experts, Model


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """An architecture of Hugging Face transformers.

    `trains` families also need `tensors` and `fits`. Dense layers of a mixture come first.
    """

    architecture: str
    model_type: str  # in config.json
    read: Callable[[ConfigKeys], Model]
    not_trained: str = ""  # the reason why Meshwright does not train it; empty: it does
    shapes_only: bool = False  # its reader leaves out what changes numbers and not cost: no engine may build it
    tensors: Mapping[str, str] = field(default_factory=dict)  # our names within a layer -> names in files
    fused: Mapping[str, FusedTensor] = field(default_factory=dict)  # names in files -> ours in them
    fits: Callable[[Model], bool] = lambda model: False  # True if its config can express the model
    keys: Callable[[Model], dict[str, Any]] = lambda model: {}  # of its config.json alone
    expert_keys: Callable[[Experts], dict[str, Any]] = lambda experts: {}
    has_predictions: bool = False  # multi-token prediction modules
    knows_dense_layers: bool = True  # of a mixture: which layers are dense

    @property
    def trains(self) -> bool:
        return not self.not_trained


_LINEAR = "layers of linear attention: it is planned and estimated, Megatron-LM and NeMo train it"
_SHAPES = "its config is read for its shapes alone: it is planned and estimated"
_SPARSE = "sparse attention: it is planned and estimated, Megatron-LM trains it"
_NOT_TRAINED = (
    ("GPT2LMHeadModel", "gpt2", configs.read_gpt2, "learned positions and LayerNorm"),
    ("Qwen2MoeForCausalLM", "qwen2_moe", configs.read_qwen2_moe, "a gated shared expert"),
    ("DeepseekV32ForCausalLM", "deepseek_v32", sparse_configs.read_deepseek_v32, _SPARSE),
    ("GlmMoeDsaForCausalLM", "glm_moe_dsa", sparse_configs.read_glm_moe_dsa, _SPARSE),
    (
        "DeepseekV4ForCausalLM", "deepseek_v4", sparse_configs.read_deepseek_v4,
        "compressed attention and hyper-connections: it is planned and estimated, AMD's Primus trains it",
    ),
    (
        "NemotronHForCausalLM", "nemotron_h", configs.read_nemotron_h,
        "state-space layers: it is planned and estimated, Megatron-LM and NeMo train it",
    ),
    ("Qwen3NextForCausalLM", "qwen3_next", linear_configs.read_qwen3_next, _LINEAR),
    ("Qwen3_5ForCausalLM", "qwen3_5_text", linear_configs.read_qwen3_5, _LINEAR),
    ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", linear_configs.read_qwen3_5_moe, _LINEAR),
    ("OlmoHybridForCausalLM", "olmo_hybrid", linear_configs.read_olmo_hybrid, _LINEAR),
    ("KimiLinearForCausalLM", "kimi_linear", linear_configs.read_kimi_linear, _LINEAR),
    ("Olmo3ForCausalLM", "olmo3", planned_configs.read_olmo3, _SHAPES),
    ("OlmoeForCausalLM", "olmoe", planned_configs.read_olmoe, _SHAPES),
    ("GraniteForCausalLM", "granite", planned_configs.read_granite, _SHAPES),
    ("GraniteMoeForCausalLM", "granitemoe", planned_configs.read_granitemoe, _SHAPES),
    ("SmolLM3ForCausalLM", "smollm3", planned_configs.read_smollm3, _SHAPES),
    ("SeedOssForCausalLM", "seed_oss", planned_configs.read_seed_oss, _SHAPES),
    ("Ernie4_5ForCausalLM", "ernie4_5", planned_configs.read_ernie4_5, _SHAPES),
    ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", planned_configs.read_ernie4_5_moe, _SHAPES),
    ("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", planned_configs.read_hunyuan_dense, _SHAPES),
    ("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", planned_configs.read_hunyuan_moe, _SHAPES),
    ("Exaone4ForCausalLM", "exaone4", planned_configs.read_exaone4, _SHAPES),
    ("ExaoneMoeForCausalLM", "exaone_moe", planned_configs.read_exaone_moe, _SHAPES),
    ("Dots1ForCausalLM", "dots1", planned_configs.read_dots1, _SHAPES),
    ("SolarOpenForCausalLM", "solar_open", planned_configs.read_solar_open, _SHAPES),
    ("Mistral4ForCausalLM", "mistral4", planned_configs.read_mistral4, _SHAPES),
    ("MinistralForCausalLM", "ministral", planned_configs.read_ministral, _SHAPES),
    ("Ministral3ForCausalLM", "ministral3", planned_configs.read_ministral3, _SHAPES),
    ("Glm4ForCausalLM", "glm4", planned_configs.read_glm4, _SHAPES),
    ("Glm4MoeLiteForCausalLM", "glm4_moe_lite", planned_configs.read_glm4_moe_lite, _SHAPES),
    ("GemmaForCausalLM", "gemma", planned_configs.read_gemma, _SHAPES),
    ("Gemma4ForCausalLM", "gemma4_text", planned_configs.read_gemma4, _SHAPES),
    ("ArceeForCausalLM", "arcee", planned_configs.read_arcee, _SHAPES),
    ("NemotronForCausalLM", "nemotron", planned_configs.read_nemotron, _SHAPES),
    ("Starcoder2ForCausalLM", "starcoder2", planned_configs.read_starcoder2, _SHAPES),
    ("Llama4ForCausalLM", "llama4_text", planned_configs.read_llama4, _SHAPES),
    ("CohereForCausalLM", "cohere", planned_configs.read_cohere, _SHAPES),
    ("Cohere2ForCausalLM", "cohere2", planned_configs.read_cohere2, _SHAPES),
    ("FalconForCausalLM", "falcon", planned_configs.read_falcon, _SHAPES),
    ("GPTNeoXForCausalLM", "gpt_neox", planned_configs.read_gpt_neox, _SHAPES),
    ("GPTJForCausalLM", "gptj", planned_configs.read_gptj, _SHAPES),
    ("PhiForCausalLM", "phi", planned_configs.read_phi, _SHAPES),
)  # fmt: skip
"""Architecture, type, reader, and the reason why Meshwright does not train it."""

_RECORDS = (  # a model that names no family gets the first that fits
    ModelFamily(
        architecture="LlamaForCausalLM",
        model_type="llama",
        read=configs.read_llama,
        tensors=tensors.NORMS | tensors.GROUPED_ATTENTION | tensors.DENSE,
        fits=shapes.fits_llama,
    ),
    ModelFamily(
        architecture="MistralForCausalLM",
        model_type="mistral",
        read=configs.read_mistral,
        tensors=tensors.NORMS | tensors.GROUPED_ATTENTION | tensors.DENSE,
        fits=shapes.fits_mistral,
    ),
    ModelFamily(
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        read=configs.read_mixtral,
        tensors=tensors.NORMS | tensors.GROUPED_ATTENTION | tensors.MIXTRAL_EXPERTS,
        fits=shapes.fits_mixtral,
        expert_keys=shapes.mixtral_keys,
    ),
    ModelFamily(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        read=configs.read_qwen3,
        tensors=tensors.NORMS | tensors.GROUPED_ATTENTION | tensors.DENSE,
        fits=shapes.fits_qwen3,
        knows_dense_layers=False,
        keys=shapes.qwen_keys,
    ),
    ModelFamily(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        read=configs.read_qwen3_moe,
        tensors=tensors.NORMS | tensors.GROUPED_ATTENTION | tensors.EXPERTS,
        fits=shapes.fits_qwen3_moe,
        expert_keys=shapes.qwen3_keys,
        knows_dense_layers=False,
        keys=shapes.qwen_keys,
    ),
    ModelFamily(
        architecture="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        read=configs.read_deepseek_v2,
        tensors=tensors.NORMS | tensors.LATENT_ATTENTION | tensors.DENSE | tensors.EXPERTS,
        fits=shapes.fits_deepseek_v2,
        expert_keys=shapes.deepseek_keys,
    ),
    ModelFamily(
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        read=configs.read_deepseek_v3,
        tensors=tensors.NORMS | tensors.LATENT_ATTENTION | tensors.DENSE | tensors.EXPERTS,
        fits=shapes.fits_deepseek_v3,
        keys=shapes.deepseek_v3_keys,
        expert_keys=shapes.deepseek_keys,
        has_predictions=True,
    ),
    ModelFamily(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        read=configs.read_qwen2,
        tensors=tensors.NORMS | tensors.GROUPED_ATTENTION | tensors.DENSE,
        fits=shapes.fits_qwen2,
        keys=shapes.qwen2_keys,
    ),
    ModelFamily(
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        read=configs.read_olmo2,
        tensors=tensors.OUTPUT_NORMS | tensors.GROUPED_ATTENTION | tensors.DENSE,
        fits=shapes.fits_olmo2,
    ),
    ModelFamily(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        read=configs.read_phi3,
        tensors=tensors.NORMS | tensors.FUSED_ATTENTION | tensors.FUSED_DENSE,
        fused=tensors.FUSED,
        fits=shapes.fits_phi3,
        keys=shapes.phi3_keys,
    ),
    ModelFamily(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        read=configs.read_gemma2,
        tensors=tensors.NORMS_AROUND | tensors.GROUPED_ATTENTION | tensors.DENSE,
        fits=shapes.fits_gemma2,
        keys=shapes.gemma2_keys,
    ),
    ModelFamily(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        read=configs.read_gemma3,
        tensors=tensors.NORMS_AROUND | tensors.GROUPED_ATTENTION | tensors.DENSE,
        fits=shapes.fits_gemma3,
        keys=shapes.gemma3_keys,
    ),
    ModelFamily(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        read=configs.read_gpt_oss,
        tensors=tensors.NORMS | tensors.GROUPED_ATTENTION | tensors.SINKS | tensors.STACKED_EXPERTS,
        fused=tensors.STACKED,
        fits=shapes.fits_gpt_oss,
        expert_keys=shapes.mixtral_keys,
        keys=shapes.gpt_oss_keys,
    ),
    ModelFamily(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        read=configs.read_glm4_moe,
        tensors=tensors.NORMS | tensors.GROUPED_ATTENTION | tensors.DENSE | tensors.EXPERTS,
        fits=shapes.fits_glm4_moe,
        keys=shapes.glm4_moe_keys,
        expert_keys=shapes.deepseek_keys,
        has_predictions=True,
    ),
    ModelFamily(
        architecture="MiniMaxM2ForCausalLM",
        model_type="minimax_m2",
        read=configs.read_minimax_m2,
        tensors=tensors.NORMS | tensors.GROUPED_ATTENTION | tensors.MINIMAX_EXPERTS,
        fits=shapes.fits_minimax_m2,
        keys=shapes.minimax_m2_keys,
        expert_keys=shapes.mixtral_keys,
    ),
    *(
        ModelFamily(architecture=architecture, model_type=kind, read=read, not_trained=why, shapes_only=why is _SHAPES)
        for architecture, kind, read, why in _NOT_TRAINED
    ),
)

NOT_READ: dict[str, str] = {
    "Mamba2ForCausalLM": "layers of state space alone",
    "MambaForCausalLM": "Mamba-1's scan, whose states are of each channel",
    "BambaForCausalLM": "layers that hold a mixer and a feed-forward block, of two kinds of mixer",
    "GraniteMoeHybridForCausalLM": "layers that hold a mixer and experts, of two kinds of mixer",
    "FalconH1ForCausalLM": "layers that run attention and state space side by side",
    "Zamba2ForCausalLM": "attention whose weights several layers share",
    "JambaForCausalLM": "Mamba-1's scan, whose states are of each channel",
    "Lfm2ForCausalLM": "layers of gated short convolutions",
    "Lfm2MoeForCausalLM": "layers of gated short convolutions",
    "MiniMaxForCausalLM": "lightning attention, whose states decay by a constant",
    "BailingHybridForCausalLM": "lightning attention, whose states decay by a constant",
    "ApertusForCausalLM": "an activation with weights of its own (xIELU)",
    "LongcatFlashForCausalLM": "two blocks of attention a layer, and experts that compute nothing",
    "MiMoV2FlashForCausalLM": "other heads in windowed layers than in full ones",
    "Gemma3nForCausalLM": "embeddings of each layer, and keys and values that layers share",
}
"""Architectures that are refused by name, and what of them has no formula here."""

FAMILIES: dict[str, ModelFamily] = {record.architecture: record for record in _RECORDS}
"""Every known family, by architecture."""


def family_that_fits(model: Model) -> ModelFamily | None:
    """The family whose files hold this model: the one it names, or the first that can express its shapes.

    All of them have a class that scores texts.
    """
    model = replace(model, num_labels=0)
    for family in trained_families():
        is_named = family.architecture == (model.family or family.architecture)
        if is_named and family.fits(model) and (family.has_predictions or not model.num_mtp_layers):
            return family
    return None


def trained_families() -> tuple[ModelFamily, ...]:
    """The families that Meshwright trains: their logits and gradients equal transformers'."""
    return tuple(family for family in FAMILIES.values() if family.trains)
