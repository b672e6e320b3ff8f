"""Shapes of sparse and compressed attention: DeepSeek Sparse Attention (V3.2, GLM-5) and DeepSeek-V4's.

Sources: transformers, models/deepseek_v32, glm_moe_dsa and deepseek_v4; DeepSeek-AI 2025, DeepSeek-V3.2-Exp, section 1;
Primus, core/transformer/deepseek_v4_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from meshwright.specs.limits import PER_LAYER, Size, SizeOrZero


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """A lightning indexer: few cheap heads score all earlier keys, and a query attends to the best `top_k`.

    Its queries come from the low-rank query (`Attention.query_lora_rank`), its one key and its heads' weights from the
    layer's input.
    """

    num_heads: Size
    head_dim: Size
    top_k: Size  # keys that a query attends to
    num_layers: SizeOrZero | None = None  # with an indexer; others take the choice of the layer before; None: all
    is_trained: bool = True  # by a KL loss towards the attention that it selects for; False: it runs forward only


@dataclass(frozen=True, kw_only=True)
class Compression:
    """Compressed attention of DeepSeek-V4: beside its window, a query sees keys that stand for several tokens each.

    A compressed key is a gated mean over `stride` tokens. Layers whose stride is `indexed_stride` have windows of twice
    that many, and an indexer with compressed keys of its own; those with a longer one attend to all compressed keys.
    """

    strides: Annotated[tuple[SizeOrZero, ...], PER_LAYER]  # of each layer: tokens of a compressed key; 0: its window
    indexed_stride: Size = 4

    def num_layers(self, *, indexed: bool) -> int:
        """Layers with compressed keys, with or without an indexer."""
        return sum((stride == self.indexed_stride) is indexed for stride in self.strides if stride)

    @property
    def long_stride(self) -> int:
        """Stride of the layers without an indexer; 1 where there are none."""
        return max((s for s in self.strides if s and s != self.indexed_stride), default=1)
