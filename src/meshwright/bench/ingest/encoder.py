"""Sentence encoder of BERT's shape: embeddings, layers, mean over tokens, length one.

B batch, T tokens of a chunk, H hidden, N heads, D head width. Weights come from a folder of Hugging Face
(BertModel), or are random: then the vectors mean nothing, but the rates hold. Devlin et al. 2019; Reimers and
Gurevych 2019 for the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from meshwright.bench.ingest.chunks import ChunkTokenizer, TokenIds
from meshwright.errors import InfeasibleError, InputError, MissingDependencyError
from meshwright.files import toml_table
from meshwright.inference.ingestion import EncoderShape
from meshwright.json_values import load_json
from meshwright.programs import install_command

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INITIAL_SD = 0.02  # BERT's
_BERT = toml_table(Path(__file__).with_name("bert.toml"))
Vectors = NDArray[np.float32]


class EncoderBlock(nn.Module):
    """Attention and feed-forward block, each followed by a residual addition and a norm."""

    def __init__(self, shape: EncoderShape, eps: float) -> None:
        super().__init__()
        h, f = shape.hidden, shape.ffn
        self.num_heads = shape.num_heads
        self.query, self.key, self.value = nn.Linear(h, h), nn.Linear(h, h), nn.Linear(h, h)
        self.out, self.norm = nn.Linear(h, h), nn.LayerNorm(h, eps=eps)
        self.up, self.down = nn.Linear(h, f), nn.Linear(f, h)
        self.ffn_norm = nn.LayerNorm(h, eps=eps)

    def forward(self, x_BTH: Tensor, mask_B11T: Tensor | None) -> Tensor:
        q, k, v = (
            layer(x_BTH).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask_B11T)
        x_BTH = self.norm(x_BTH + self.out(mixed.transpose(1, 2).flatten(2)))
        return self.ffn_norm(x_BTH + self.down(functional.gelu(self.up(x_BTH))))


class BertEncoder(nn.Module):
    """Token ids to vectors of length one."""

    def __init__(self, shape: EncoderShape, *, eps: float = 1e-12) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.max_positions, shape.hidden)
        self.types = nn.Embedding(shape.num_types, shape.hidden)
        self.norm = nn.LayerNorm(shape.hidden, eps=eps)
        self.blocks = nn.ModuleList(EncoderBlock(shape, eps) for _ in range(shape.num_layers))

    def hidden_states(self, ids_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
        """Outputs of the last layer. `mask_BT` is true at tokens; None: no padding."""
        x_BTH = self.tokens(ids_BT) + self.positions.weight[: ids_BT.shape[1]] + self.types.weight[0]
        x_BTH = self.norm(x_BTH)
        mask_B11T = None if mask_BT is None else mask_BT[:, None, None, :]
        for block in self.blocks:
            x_BTH = block(x_BTH, mask_B11T)
        return x_BTH

    def forward(self, ids_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
        x_BTH = self.hidden_states(ids_BT, mask_BT).float()
        if mask_BT is None:
            return functional.normalize(x_BTH.mean(dim=1), dim=-1)
        weight_BT1 = mask_BT[:, :, None].float()
        return functional.normalize((x_BTH * weight_BT1).sum(dim=1) / weight_BT1.sum(dim=1), dim=-1)


@dataclass(frozen=True, kw_only=True)
class EncoderWeights:
    """An encoder in fp32 on the CPU, and the origin of its weights."""

    model: BertEncoder
    origin: str
    is_random: bool

    @property
    def shape(self) -> EncoderShape:
        return self.model.shape


def random_weights(shape: EncoderShape, *, seed: int) -> EncoderWeights:
    """An encoder with random weights: BERT's initialization."""
    model = BertEncoder(shape)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.normal_(
                parameter, std=INITIAL_SD, generator=generator
            )
    return EncoderWeights(model=model, origin=f"random weights (initialization {seed})", is_random=True)


def load_weights(folder: Path, *, name: str) -> EncoderWeights:
    """Read config.json and model.safetensors of a BertModel. Raises InputError for another architecture."""
    config = _json(folder / "config.json")
    for key, expected in _BERT["required"].items():
        if config.get(key, expected) != expected:
            raise InputError(f"{folder}: {key} of the encoder", got=config[key], allowed=expected)
    _check_pooling(folder)
    try:
        shape = EncoderShape(**{ours: int(config[theirs]) for ours, theirs in _BERT["keys"].items()})
        model = BertEncoder(shape, eps=float(config.get("layer_norm_eps", 1e-12)))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{folder}/config.json: no encoder can be built from it ({error})") from None
    _fill(model, folder / "model.safetensors")
    return EncoderWeights(model=model, origin=name, is_random=False)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = load_json(path)
    except (OSError, ValueError) as error:
        raise InputError(
            f"no encoder: {error}", got=str(path), allowed="a folder with config.json and model.safetensors"
        ) from None
    if not isinstance(found, dict):
        raise InputError("not a mapping", got=str(path))
    return found


def _check_pooling(folder: Path) -> None:
    """Raise InputError if sentence-transformers would pool otherwise than by the mean."""
    path = folder / "1_Pooling" / "config.json"
    if not path.exists():
        return
    others = [key for key, value in _json(path).items() if key.startswith("pooling_mode_") and value is True]
    if others != ["pooling_mode_mean_tokens"]:
        raise InputError(f"{path}: pooling", got=", ".join(others), allowed="pooling_mode_mean_tokens")


def _fill(model: BertEncoder, path: Path) -> None:
    """Copy tensors into the model. Raises InputError for a missing or unknown one."""
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise MissingDependencyError(
            "weights are read with the package safetensors", hint=install_command("ingest")
        ) from None
    try:
        tensors = load_file(path)
    except Exception as error:  # safetensors raises its own kinds
        raise InputError(f"no weights can be read ({error})", got=str(path), allowed="model.safetensors") from None
    found = {name.removeprefix("bert."): t.float() for name, t in tensors.items()}
    found = {
        _renamed(name): t
        for name, t in found.items()
        if not name.startswith(tuple(_BERT["ignored"])) and "position_ids" not in name
    }
    try:
        model.load_state_dict(found)
    except RuntimeError as error:
        raise InputError(f"{path}: {' '.join(str(error).split())[:400]}", allowed="a BertModel") from None


def _renamed(name: str) -> str:
    """Name of a tensor here.

    >>> _renamed("encoder.layer.3.attention.output.dense.weight"), _renamed("embeddings.LayerNorm.bias")
    ('blocks.3.out.weight', 'norm.bias')
    """
    head, end = "", name.rpartition(".")[2]
    middle = name.rpartition(".")[0]
    if middle.startswith("encoder.layer."):
        number, _, middle = middle.removeprefix("encoder.layer.").partition(".")
        head = f"blocks.{number}."
    return f"{head}{_BERT['tensors'].get(middle, middle)}.{end}"


@dataclass(frozen=True, kw_only=True)
class ChunkEncoder:
    """An encoder on one device in one number format."""

    model: BertEncoder
    device: torch.device
    pad: int

    @torch.inference_mode()
    def encode(self, ids: Sequence[TokenIds]) -> Vectors:
        """Vectors of chunks, padded to the longest. Raises InfeasibleError for vectors that are not finite."""
        longest = max(len(part) for part in ids)
        padded = np.full((len(ids), longest), self.pad, dtype=np.int64)
        for row, part in zip(padded, ids, strict=True):
            row[: len(part)] = part
        ids_BT = torch.from_numpy(padded).to(self.device)
        mask_BT = None
        if any(len(part) < longest for part in ids):
            lengths = torch.tensor([len(part) for part in ids], device=self.device)
            mask_BT = torch.arange(longest, device=self.device) < lengths[:, None]
        vectors = self.model(ids_BT, mask_BT).cpu().numpy()
        if not np.isfinite(vectors).all():
            raise InfeasibleError(
                "the encoder gives vectors that are not finite: its weights have NaN or infinite values, or the "
                "number format is too narrow"
            )
        return vectors


def check_vocabulary(weights: EncoderWeights, tokenizer: ChunkTokenizer) -> None:
    """Raise InputError for a tokenizer with more tokens than the encoder."""
    if tokenizer.vocabulary > weights.shape.vocabulary:
        raise InputError(
            "the tokenizer has more tokens than the encoder", got=tokenizer.vocabulary,
            allowed=f"at most {weights.shape.vocabulary}", hint="--tokenizer of the encoder",
        )  # fmt: skip


def placed(weights: EncoderWeights, *, pad: int, precision: str, device: torch.device) -> ChunkEncoder:
    """A copy of the encoder on `device` in `precision`."""
    model = BertEncoder(weights.shape, eps=weights.model.norm.eps)
    model.load_state_dict(weights.model.state_dict())
    return ChunkEncoder(model=model.to(device=device, dtype=DTYPES[precision]).eval(), device=device, pad=pad)
