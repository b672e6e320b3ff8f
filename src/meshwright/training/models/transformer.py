"""The decoder: embedding, layers of attention and feed-forward, norm, head.

    x = embedding(tokens)
    x = x + attention(norm(x));  x = x + ffn(norm(x))        num_layers times
    logits = head(norm(x))

The first addition of a layer and the norm behind it are one operation (`norm.ResidualNorm`). The second
addition ends the layer: two tensors at the boundary would double the memory of recomputation and the traffic
of pipeline stages.

Norms may be at the outputs of attention and feed-forward instead, or at both (`specs.model.NormPlacement`).

One class serves every family: families differ in the attention and the feed-forward of a layer, which follow
from `specs.model.Model`. A pipeline stage is the same class with some of the layers. They keep their names in
the whole model, so a checkpoint of a stage is a part of a checkpoint of the model.

B sequences, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from meshwright.kernels.cross_entropy import capped
from meshwright.kernels.labels import IGNORED_LABEL
from meshwright.kernels.linear import linear
from meshwright.kernels.linear_cross_entropy import linear_cross_entropy
from meshwright.kernels.traffic import AUTOMATIC
from meshwright.specs.model import AttentionKind, Model, NormPlacement
from meshwright.specs.reinforcement import Grpo
from meshwright.specs.run import MTP_LOSS_WEIGHT, Preference
from meshwright.training.models.attention import GroupedAttention, LatentAttention
from meshwright.training.models.experts import MixtureOfExperts
from meshwright.training.models.families import is_dense
from meshwright.training.models.feed_forward import FeedForward
from meshwright.training.models.multi_token import PredictionModule, prediction_loss, with_gradient_of
from meshwright.training.models.norm import ResidualSum, make_norm
from meshwright.training.models.preference import (
    NUM_SUMS,
    log_probabilities,
    pair_losses,
    reward_losses,
    scores_at_ends,
)
from meshwright.training.models.reinforcement import NUM_SUMS as NUM_SUMS_OF_COMPLETIONS
from meshwright.training.models.reinforcement import completion_losses
from meshwright.training.models.token_layout import Chunks, Suffix, TokenLayout, make_layout


@dataclass(frozen=True, kw_only=True)
class TransformerOptions:
    """Settings of training that a model's shapes do not have."""

    balance_loss: float = 0.0  # coefficient of the experts' auxiliary loss
    router_z_loss: float = 0.0  # coefficient of the mean of (log Σ exp)² of router logits
    z_loss: float = 0.0  # coefficient of the squared log-partition function
    label_smoothing: float = 0.0
    embedding_noise: float = 0.0  # limit of the uniform noise on embeddings in training
    residual_dropout: float = 0.0
    attention_dropout: float = 0.0
    mtp_loss_weight: float = MTP_LOSS_WEIGHT  # coefficient of the mean loss of the prediction modules
    loss_chunk: int | str = "auto"  # tokens whose logits are in memory at once; "all"
    preference: Preference | None = None  # loss of pairs of answers in place of cross-entropy
    grpo: Grpo | None = None  # loss of completions with advantages in place of cross-entropy

    @property
    def num_reward_sums(self) -> int:
        """Sums that are kept for a record; 0 with cross-entropy."""
        return NUM_SUMS if self.preference is not None else 0 if self.grpo is None else NUM_SUMS_OF_COMPLETIONS


class ResidualDropout(nn.Dropout):
    """Dropout of what is added to the residual stream.

    Under sequence parallelism every rank draws for the tokens of all `width` ranks, and keeps the numbers of its own.
    """

    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.own_tokens: Callable[[Tensor], Tensor] = _all_tokens
        self.width = 1

    def forward(self, input: Tensor) -> Tensor:
        """[B, T, D] (the name is nn.Dropout's)."""
        if self.width == 1 or not (self.training and self.p):
            return super().forward(input)
        size, length, width = input.shape
        return input * self.own_tokens(super().forward(input.new_ones(size, length * self.width, width)))


class Block(nn.Module):
    """One layer."""

    def __init__(self, model: Model, index: int, *, options: TransformerOptions) -> None:
        super().__init__()
        latent = model.attention.kind is AttentionKind.MLA
        self.is_windowed = model.windowed_layers[index]
        before = model.norm_placement is not NormPlacement.AFTER
        after = model.norm_placement is not NormPlacement.BEFORE

        def norm(is_here: bool) -> nn.Module:
            return make_norm(model, width=model.hidden) if is_here else nn.Identity()

        self.attention_norm = norm(before)
        self.attention = (LatentAttention if latent else GroupedAttention)(model, windowed=self.is_windowed)
        self.attention.core.dropout.p = options.attention_dropout
        self.dropout = ResidualDropout(options.residual_dropout)
        self.attention_output_norm = norm(after)
        self.ffn_norm = make_norm(model, width=model.hidden, adds_residual=True) if before else ResidualSum()
        self.ffn = (
            FeedForward(model.hidden, model.ffn_hidden, activation=model.activation)
            if is_dense(model, index)
            else MixtureOfExperts(model, balance_loss=options.balance_loss, z_loss=options.router_z_loss)
        )
        self.ffn_output_norm = norm(after)

    def forward(self, x_BTD: Tensor, layout: TokenLayout) -> Tensor:
        """[B, T, D]."""
        here = layout.windowed if self.is_windowed else layout.full
        branch_BTD = self.attention_output_norm(self.attention(self.attention_norm(x_BTD), here))
        normed_BTD, x_BTD = self.ffn_norm(self.dropout(branch_BTD), x_BTD)
        padding = (layout.is_token_BT,) if isinstance(self.ffn, MixtureOfExperts) else ()
        return x_BTD + self.dropout(self.ffn_output_norm(self.ffn(normed_BTD, *padding)))


class Head(nn.Linear):
    """Logits, or with labels the loss, summed or of each token: logits then exist for a chunk of tokens at most.

    The loss is computed here and not in the trainer, because a sharded weight is gathered only in this forward.
    """

    def __init__(self, model: Model, *, options: TransformerOptions) -> None:
        super().__init__(model.hidden, model.head_rows, bias=False)
        self.options, self.cap = options, model.logit_cap

    def forward(self, input: Tensor, labels_BT: Tensor | None = None, weights_BT: Tensor | None = None) -> Tensor:
        """[B, T, V] in the weight's dtype, or a fp32 scalar. `input` is [B, T, D] (the name is nn.Linear's).

        With pairs of answers, or with completions, the losses of tokens, [B, T].
        """
        if labels_BT is None:
            return capped(linear(input, self.weight), self.cap)
        return self.loss(input, self.weight, labels_BT, weights_BT)

    def loss(
        self,
        h_BTD: Tensor,
        weight_VD: Tensor,
        labels_BT: Tensor,
        weights_BT: Tensor | None,
        *,
        group: ProcessGroup | None = None,
    ) -> Tensor:
        """The loss of `weight_VD`; with `group` its ranks have a part of the vocabulary each."""
        sums, cap = not self.options.num_reward_sums, self.cap
        if self.options.grpo is not None and (temperature := self.options.grpo.temperature) != 1:
            h_BTD, cap = h_BTD / temperature, cap / temperature
        losses = linear_cross_entropy(
            h_BTD.flatten(0, 1),
            weight_VD,
            labels_BT.flatten(),
            weights_N=None if weights_BT is None else weights_BT.flatten(),
            group=group,
            z_loss=self.options.z_loss,
            cap=cap,
            chunk_logits=self._chunk_logits(labels_BT.numel(), vocab=weight_VD.shape[0]),
            reduction="sum" if sums else "none",
        )
        if self.options.label_smoothing and self.training:
            smoothed = self._smoothed(h_BTD, weight_VD, labels_BT, weights_BT, group)
            losses = with_gradient_of(losses, self.options.label_smoothing * smoothed)
        return losses if sums else losses.view(labels_BT.shape)

    def _smoothed(
        self, h_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor, weights_BT: Tensor | None, group: ProcessGroup | None
    ) -> Tensor:
        """Sum of the labels' logits less the mean logits, as far as the rows here make them.

        Times the smoothing s it turns -log p(label) into (1 - s) (-log p(label)) + s mean(-log p), without logits: the
        mean logit is that of the mean row (Szegedy et al. 2016, section 7).
        """
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        num = weight_VD.shape[0]
        local_BT = labels_BT - rank * num
        is_here_BT1 = ((local_BT >= 0) & (local_BT < num)).unsqueeze(-1)
        rows_BTD = weight_VD[local_BT.clamp(0, num - 1)] * is_here_BT1 - weight_VD.sum(0) / (num * size)
        counted_BT = (labels_BT != IGNORED_LABEL) * (1.0 if weights_BT is None else weights_BT)
        return ((h_BTD.float() * rows_BTD.float()).sum(-1) * counted_BT).sum()

    def _chunk_logits(self, num_tokens: int, *, vocab: int) -> int:
        """Logits in memory at once. Without gradients, a chunk that was chosen for them is not needed."""
        asked = self.options.loss_chunk
        if asked == "auto" or not torch.is_grad_enabled():
            return AUTOMATIC
        return vocab * (num_tokens if isinstance(asked, str) else asked)


def _predictions(model: Model, options: TransformerOptions) -> dict[str, PredictionModule]:
    """The multi-token prediction modules by layer number, which continues the model's layers."""
    last = model.num_layers - 1
    return {
        str(last + k): PredictionModule(model, block=Block(model, last, options=options))
        for k in range(1, model.num_mtp_layers + 1)
    }


class Transformer(nn.Module):
    """A decoder-only transformer, or a pipeline stage of one.

    `embedding` is None but in the first stage, `norm` and `head` but in the last. `layers` is keyed by the
    number of the layer in the whole model, and so are `predictions`, the multi-token prediction modules of
    the last stage. A last stage that is not the first has a copy of the embedding for `predictions`.
    """

    reward_sums: Tensor

    def __init__(
        self, model: Model, *, layers: range, is_first: bool, is_last: bool, options: TransformerOptions
    ) -> None:
        super().__init__()
        self.model = model
        self.own_tokens: Callable[[Tensor], Tensor] = _all_tokens  # sequence parallelism replaces it
        self.chunks: Chunks | Suffix = Chunks()  # context parallelism and generation replace it
        self.data_group: ProcessGroup | None = None  # processes with other sequences, whose answers KTO compares
        self.embedding = _embedding(model) if is_first else None
        self.layers = nn.ModuleDict({str(i): Block(model, i, options=options) for i in layers})
        self.norm = make_norm(model, width=model.hidden) if is_last else None
        self.head = Head(model, options=options) if is_last else None
        self.options = options
        self.predictions = nn.ModuleDict(_predictions(model, options) if is_last else {})
        has_copy = bool(self.predictions) and not is_first
        self.prediction_embedding = _embedding(model) if has_copy else None
        if is_last and options.num_reward_sums:
            self.register_buffer("reward_sums", torch.zeros(options.num_reward_sums), persistent=False)
        self.tie()

    def blocks(self) -> dict[str, Block]:
        """All blocks of this stage by layer number, with the blocks of the prediction modules."""
        inside = {name: module.block for name, module in self.predictions.items()}
        return cast(dict[str, Block], dict(self.layers.items()) | inside)

    def tie(self) -> None:
        """Share one parameter between embedding and head, where the model ties them and both are in this stage."""
        if self.model.tied_embeddings and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        labels_BT: Tensor | None = None,
        weights_BT: Tensor | None = None,
        stream_BT: Tensor | None = None,
        reference_BX: Tensor | None = None,
        old_BT: Tensor | None = None,
        advantages_B2: Tensor | None = None,
        is_scored: bool = False,
    ) -> Tensor:
        """Return logits [B, T, V]; given labels, the weighted sum of the losses of all tokens (fp32 scalar).

        With pairs of answers the sum of the losses of pairs; `reference_BX` has the reference's log-probabilities of
        the answers, X = 2, or of the tokens of completions, X = T. `is_scored`: log-probabilities [B, X] in place of
        the loss. `reinforcement.completion_losses` explains `old_BT` and `advantages_B2`.

        In training, multi-token prediction adds to the gradient of that loss, not to the loss. A last stage needs the
        tokens for it: `stream_BT`.

        A stage takes the hidden states [B, T, D] of the stage before as `tokens_BT`, and returns its own
        unless it is the last. Positions count from 0 unless given. Tokens attend within their document;
        padding has negative documents; None: one document. Labels are the tokens to be predicted at each
        place, `IGNORED_LABEL` for none; weights are 1 unless given. If `chunks` says that only some tokens of
        each sequence are here, `documents_BT` is of all tokens, and the other arguments are of the tokens
        here.
        """
        layout = self._layout_of(tokens_BT, positions_BT, documents_BT)
        x_BTD = self._through_layers(tokens_BT, layout)
        if self.norm is None or self.head is None:
            return x_BTD
        pairs = None if labels_BT is None else self.options.preference
        if pairs is not None and self.model.num_labels:
            assert documents_BT is not None  # the two answers of a row
            rewards_B2, is_there_B2 = scores_at_ends(self.head(self.norm(x_BTD)), documents_BT=documents_BT)
            losses_B, sums = reward_losses(pairs, rewards_B2, is_there_B2.all(1))
            self.reward_sums += sums
            return losses_B.sum()
        out = self.head(self.norm(x_BTD), labels_BT, weights_BT)
        if self.options.grpo is not None and labels_BT is not None:
            return (
                -out if is_scored else self._loss_of_completions(-out, labels_BT, advantages_B2, old_BT, reference_BX)
            )
        if pairs is not None:
            assert labels_BT is not None
            assert documents_BT is not None
            log_p_B2, lengths_B2 = log_probabilities(out, labels_BT=labels_BT, documents_BT=documents_BT)
            if is_scored:
                return log_p_B2
            losses_B, sums = pair_losses(
                pairs, log_p_B2, lengths_B2, reference_BX,
                is_chosen_first_B=documents_BT[:, 0] == 0, group=self.data_group,
            )  # fmt: skip
            self.reward_sums += sums
            return losses_B.sum()
        if not self.predictions or labels_BT is None or not self.training:
            return out
        embedding = self.embedding if self.prediction_embedding is None else self.prediction_embedding
        assert embedding is not None
        predicted = prediction_loss(
            self.predictions,
            x_BTD,
            tokens_BT=tokens_BT if stream_BT is None else stream_BT,
            layout=layout,
            documents_BT=documents_BT,
            labels_BT=labels_BT,
            weights_BT=weights_BT,
            embed=partial(self._embedded, embedding=embedding),
            head=self.head,
        )
        return with_gradient_of(out, self.options.mtp_loss_weight * predicted)

    def _loss_of_completions(
        self,
        log_p_BT: Tensor,
        labels_BT: Tensor,
        advantages_B2: Tensor | None,
        old_BT: Tensor | None,
        reference_BT: Tensor | None,
    ) -> Tensor:
        assert self.options.grpo is not None
        assert advantages_B2 is not None
        losses_B, sums = completion_losses(
            self.options.grpo, log_p_BT, labels_BT=labels_BT, advantages_B2=advantages_B2, old_BT=old_BT,
            reference_BT=reference_BT,
        )  # fmt: skip
        self.reward_sums += sums
        return losses_B.sum()

    def hidden_states(
        self, tokens_BT: Tensor, positions_BT: Tensor | None = None, documents_BT: Tensor | None = None
    ) -> Tensor:
        """Output of the last layer here, [B, T, D], before the norm. Arguments as in `forward`."""
        return self._through_layers(tokens_BT, self._layout_of(tokens_BT, positions_BT, documents_BT))

    def _layout_of(self, tokens_BT: Tensor, positions_BT: Tensor | None, documents_BT: Tensor | None) -> TokenLayout:
        if positions_BT is None:
            order_T = self.chunks.order(tokens_BT.shape[1], device=tokens_BT.device)
            positions_BT = order_T.expand(len(tokens_BT), -1)
        return self.layout(positions_BT, documents_BT)

    def _through_layers(self, tokens_BT: Tensor, layout: TokenLayout) -> Tensor:
        x_BTD = tokens_BT if self.embedding is None else self._embedded(tokens_BT, self.embedding)
        for layer in self.layers.values():
            x_BTD = layer(x_BTD, layout)
        return x_BTD

    def layout(self, positions_BT: Tensor, documents_BT: Tensor | None) -> TokenLayout:
        """Rotations and masks of all layers."""
        return make_layout(positions_BT, documents_BT, chunks=self.chunks, model=self.model)

    def _embedded(self, tokens_BT: Tensor, embedding: nn.Module) -> Tensor:
        x_BTD = embedding(tokens_BT)
        if self.training and (limit := self.options.embedding_noise):
            shape = (*tokens_BT.shape, x_BTD.shape[-1])  # of all tensor ranks, which draw the same numbers
            x_BTD = x_BTD + self.own_tokens(x_BTD.new_empty(shape).uniform_(-limit, limit))
        if not self.model.scaled_embeddings:
            return x_BTD
        scale = torch.tensor(self.model.hidden**0.5, dtype=x_BTD.dtype)  # rounded, as Gemma was trained
        return x_BTD * scale.item()


def _all_tokens(x_BT: Tensor, /) -> Tensor:
    return x_BT


def _embedding(model: Model) -> nn.Embedding:
    """An embedding with uninitialised weights. Initialising it on the meta device would import the compiler."""
    return nn.Embedding.from_pretrained(torch.empty(model.vocab, model.hidden), freeze=False)
