"""Bytes of the head at the start of the backward pass, and the largest chunk of its loss that memory leaves room for.

A loss in chunks overwrites its logits with their gradient; the gradient of the hidden states is whole, and
several chunks sum the weight gradient in fp32. Otherwise all logits are in memory, and the logits of a
multi-token prediction module wait in 16 bits meanwhile.

    N tokens of a micro-batch on a rank, C of a chunk, D hidden, V vocabulary of the rank, b bytes of a logit

    all at once    N V b + N D e + g V D              e bytes of the gradient of a hidden state, and of its copies
    chunks of C    C V b + N D e + (g + 4) V D        g bytes of the weight gradient before it is accumulated

Each chunk moves the sum of the weight gradient once more, so fewer chunks are faster: the largest that fit are found in
closed form. The engine's own chunk takes about the least memory there is, so smaller ones are never tried.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from meshwright.arrays import Array, Table
from meshwright.calibration.memory import MemoryConstants
from meshwright.cost.tables import ModelTable, PlanTable, PrecisionTable
from meshwright.kernels.traffic import CHUNK_UNIT, automatic_chunk, chunk_rows, num_chunks


@dataclass(frozen=True, kw_only=True)
class LossBytes(Table):
    """Bytes of the head on one rank while its loss is computed."""

    logits: Array
    hidden_gradient: Array
    weight_gradient: Array
    weight_sum: Array  # of the weight gradient over chunks, fp32

    @property
    def total(self) -> Array:
        return self.logits + self.hidden_gradient + self.weight_gradient + self.weight_sum

    def named(self) -> dict[str, Array]:
        """Return the parts by names for readers."""
        return {
            "loss: logits of a chunk": self.logits,
            "loss: gradient of hidden states": self.hidden_gradient,
            "loss: gradient of the head": self.weight_gradient,
            "loss: sum of that over chunks": self.weight_sum,
        }


def loss_bytes(
    model: ModelTable, plan: PlanTable, precision: PrecisionTable, constants: MemoryConstants, tokens: Array
) -> LossBytes:
    """Bytes for `tokens` tokens of a micro-batch. `precision`: as planned, with the chunk that is asked."""
    vocab, logit_bytes = _vocab(model, plan, constants), _logit_bytes(precision, constants)
    logits, chunk, trained = tokens * vocab, constants.chunk_logits, model.trains_head > 0
    said, is_own = np.asarray(precision.loss_chunk), np.asarray(chunk) > 0
    in_chunks = is_own | ((said > 0) & (np.asarray(constants.chunk_hidden_bytes) > 0))
    hidden_bytes = np.where(is_own, precision.activation_bytes, constants.chunk_hidden_bytes)
    automatic = automatic_chunk(tokens, vocab=vocab, hidden=model.hidden, element_bytes=precision.activation_bytes)
    chunk = np.where(trained & (np.asarray(constants.whole_chunk) > 0), automatic, chunk)
    chunk = vocab * chunk_rows(tokens, vocab=vocab, chunk_logits=chunk)
    chunk = np.where(said < 0, chunk, np.where(said == 0, logits, said * vocab))
    whole = logits * (constants.logits_bytes + 2 * model.num_mtp_layers)
    head = model.head_rows * model.hidden / plan.tensor * trained
    return LossBytes(
        logits=np.where(in_chunks, np.minimum(logits, chunk) * logit_bytes, whole),
        hidden_gradient=in_chunks * tokens * model.hidden * hidden_bytes,
        weight_gradient=head * constants.head_gradient_bytes,
        weight_sum=head * 4.0 * (in_chunks & (logits > chunk)),
    )


@dataclass(frozen=True, kw_only=True)
class LossChunks(Table):
    """Chunks of the loss as `PlanTable.loss_chunk` has them, -1 where they stay the engine's own; bytes of the head."""

    loss_chunk: Array
    head_bytes: Array


def largest_chunks(
    model: ModelTable,
    plan: PlanTable,
    precision: PrecisionTable,
    constants: MemoryConstants,
    *,
    tokens: Array,
    room_bytes: Array,
) -> LossChunks:
    """Fewest chunks whose head takes at most `room_bytes`, where they are fewer than the engine's own."""
    vocab, logit_bytes = _vocab(model, plan, constants), _logit_bytes(precision, constants)
    own = loss_bytes(model, plan, precision, constants, tokens)
    whole = loss_bytes(model, plan, replace(precision, loss_chunk=0), constants, tokens)
    usual = num_chunks(tokens, rows=chunk_rows(tokens, vocab=vocab, chunk_logits=constants.chunk_logits))
    usual = np.where(own.weight_sum > 0, usual, 1)
    rest = own.total - own.logits
    rows = np.maximum(room_bytes - rest, 0) / (vocab * logit_bytes)
    rows = np.floor(np.minimum(rows, tokens) / CHUNK_UNIT) * CHUNK_UNIT
    chunks = num_chunks(tokens, rows=np.maximum(rows, 1))
    rows = np.ceil(tokens / chunks / CHUNK_UNIT) * CHUNK_UNIT
    fits = whole.total <= room_bytes
    is_fewer = (usual > 1) & (fits | (chunks < usual))
    larger = np.where(fits, whole.total, rest + rows * vocab * logit_bytes)
    return LossChunks(
        loss_chunk=np.where(is_fewer, np.where(fits, 0, rows), -1).astype(np.int64),
        head_bytes=np.where(is_fewer, larger, own.total),
    )


def _vocab(model: ModelTable, plan: PlanTable, constants: MemoryConstants) -> Array:
    return model.head_rows / np.where(np.asarray(constants.splits_logits) > 0, plan.tensor, 1)


def _logit_bytes(precision: PrecisionTable, constants: MemoryConstants) -> Array:
    """Bytes of a logit of a chunk, as wide as activations where the kernel is one of chunks alone."""
    is_own = np.asarray(constants.chunk_logits) > 0
    return constants.logits_bytes * np.where(is_own, 0.5 * precision.activation_bytes, 1.0)
