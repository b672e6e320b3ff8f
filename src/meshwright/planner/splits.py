"""Uneven splits of the layers over pipeline stages that are worth trying: lighter ends.

The last stage also holds the head, its loss and modules of multi-token prediction, and leading dense layers of a
mixture of experts weigh less than its others. With equal stages the heaviest one sets the pace of all. For each
number of stages the splits are tried whose heaviest stage is lighter than with the usual one, where that exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from meshwright.cost.flops import attention_core_flops_per_token, count_parameters, keys_seen
from meshwright.cost.sparse_attention import has_sparse_attention, index_score_flops, scored_keys
from meshwright.cost.stages import balanced_layers, layers_per_stage
from meshwright.cost.tables import ModelTable, prediction_module
from meshwright.planner.request import PlanRequest

HEAD_RATIOS = (1.0, 0.6)
"""Tried ratios of the head's seconds per FLOP to a layer's: the head is one large GEMM in 16 bits, while
layers also have attention, element-wise work and communication."""


LEAST_GAIN = 0.99
"""Largest ratio of the heaviest stage to the usual split's heaviest up to which an uneven split is tried."""

LEAST_BALANCE = 0.9
"""Mean stage over the heaviest from which a split is tried: below, other numbers of stages are faster."""


def lighter_ends(request: PlanRequest) -> tuple[tuple[int, ...], ...]:
    """Splits of `request`'s layers with lighter ends, for all numbers of stages up to the number of layers."""
    weights, end = layer_weights(request)
    return _lighter_ends(tuple(weights), end)


@lru_cache(maxsize=32)
def _lighter_ends(weights: tuple[float, ...], end: float) -> tuple[tuple[int, ...], ...]:
    """The same by the weights of layers and of the end: searches with other software ask again."""
    num_layers, found = len(weights), []
    for stages in range(2, num_layers + 1):
        for ratio in HEAD_RATIOS:
            fullest = -(-num_layers // stages) * min(weights)
            if sum(weights) + ratio * end < LEAST_BALANCE * stages * fullest:
                continue  # one stage has that many layers, whatever the split
            split = balanced_layers(weights, stages, end=ratio * end)
            heaviest = _heaviest(split, weights, ratio * end)
            if sum(weights) + ratio * end < LEAST_BALANCE * stages * heaviest:
                continue
            usual = layers_per_stage(num_layers, stages)
            if not is_usual(num_layers, stages) or heaviest < LEAST_GAIN * _heaviest(usual, weights, ratio * end):
                found.append(split)
    return tuple(dict.fromkeys(found))


def is_usual(num_layers: int, num_stages: int) -> bool:
    """True if equal stages leave no less than nothing for the two ends."""
    return num_layers - (num_stages - 2) * -(-num_layers // num_stages) >= 0


def layer_weights(request: PlanRequest) -> tuple[list[float], float]:
    """FLOPs per token of every layer, and of what the last stage holds besides; both against the heaviest layer."""
    table, seq_len = request.model_table, request.seq_len
    num_dense, num_moe = int(table.num_dense_layers), int(table.num_moe_layers)
    dense, moe = (_layer_flops(table, seq_len, is_moe=is_moe) for is_moe in (False, True))
    heaviest = max(moe if num_moe else 0.0, dense if num_dense else 0.0)
    module = _layer_flops(prediction_module(table), seq_len, is_moe=num_moe > 0)
    head = float(table.vocab * table.hidden)
    end = head + float(table.num_mtp_layers) * (module + float(count_parameters(table).mtp_projection) + head)
    return [weight / heaviest for weight in [dense] * num_dense + [moe] * num_moe], end / heaviest


def _layer_flops(table: ModelTable, seq_len: int, *, is_moe: bool) -> float:
    """Forward multiply-adds per token of one layer, or of a hybrid's mean layer."""
    p = count_parameters(table)
    core = table.attention_share * table.query_heads * (table.qk_dim + table.v_dim) * keys_seen(seq_len)
    if has_sparse_attention(table):
        without = replace(table, num_mtp_layers=0)
        core = attention_core_flops_per_token(without, seq_len=seq_len) / (2 * table.num_layers)
        core = core + index_score_flops(table, scored_keys(table, seq_len)) / 2
    experts = table.moe_share * table.top_k * p.expert
    ffn = p.shared_layer + p.router_layer + experts if is_moe else p.dense_ffn_layer
    return float(p.attention_layer + ffn + core)


def _heaviest(split: tuple[int, ...], weights: Sequence[float], end: float) -> float:
    sums = np.add.reduceat(np.append(weights, 0.0), np.append(0, np.cumsum(split)[:-1])) * (np.array(split) > 0)
    sums[-1] += end
    return float(sums.max())
