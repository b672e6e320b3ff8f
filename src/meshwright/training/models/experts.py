"""Dropless mixture of experts: every token reaches each of its experts.

    router    scores every expert for every token and picks top_k
    spread    rows, one a (token, expert) pair, sorted by expert
    experts   one feed-forward block each, weights stacked [E, out, in]: expert parallelism shards E
    gather    rows back to tokens, weighted and added

B sequences, T tokens, N = B T, D hidden, F hidden of an expert, E experts, C choices (top_k), M = N C rows.
Sources: Mixtral (Jiang et al. 2024, section 2.1), DeepSeek-V3 (2024, section 2.1.2), Switch (Fedus et al. 2021).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from meshwright.specs.model import Activation, Model, Router
from meshwright.specs.model import Experts as ExpertsSpec
from meshwright.training.models.balance import attach_loss, balance_loss
from meshwright.training.models.feed_forward import ACTIVATIONS, FeedForward, GatedActivation


class Routing(NamedTuple):
    """The experts of every token, and their weights."""

    weights_NC: Tensor  # fp32
    experts_NC: Tensor  # integers below E
    scores_NE: Tensor  # fp32, for the balance loss


class TopKRouter(nn.Module):
    """Scores in fp32 whatever the weights are: a flipped choice costs more than a slow GEMM this small.

    With sigmoid scores `bias_E` shifts the choice but not the weight; `expert_load.update_routing_bias` moves it.
    `load_E` counts the rows of tokens, without padding, that each expert got in training since
    `expert_load.collect_expert_load`.
    """

    bias: nn.Parameter | None  # learned, of the logits
    bias_E: Tensor | None
    load_E: Tensor

    def __init__(self, hidden: int, spec: ExpertsSpec) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.num_experts, hidden))
        self.bias = nn.Parameter(torch.empty(spec.num_experts)) if spec.bias else None
        sigmoid = spec.router is Router.SIGMOID
        bias_E = torch.zeros(spec.num_experts, dtype=torch.float32) if sigmoid else None
        self.register_buffer("bias_E", bias_E)
        self.register_buffer("load_E", torch.zeros(spec.num_experts, dtype=torch.long), persistent=False)

    def forward(self, x_ND: Tensor) -> Routing:
        """The chosen experts of every token."""
        bias = None if self.bias is None else self.plain(self.bias).float()
        logits_NE = functional.linear(x_ND.float(), self.plain(self.weight).float(), bias)
        sigmoid = self.spec.router is Router.SIGMOID
        scores_NE = logits_NE.sigmoid() if sigmoid else logits_NE.softmax(dim=-1)
        with torch.no_grad():
            shifted_NE = scores_NE if self.bias_E is None else scores_NE + self.bias_E
            experts_NC = self._limit_groups(shifted_NE).topk(self.spec.top_k, dim=-1).indices
        weights_NC = scores_NE.gather(1, experts_NC)
        if self.spec.normalize_top_k:
            weights_NC = weights_NC / (weights_NC.sum(dim=-1, keepdim=True) + 1e-20)
        return Routing(weights_NC * self.spec.routed_scale, experts_NC, scores_NE)

    def plain(self, parameter: Tensor) -> Tensor:
        """A parameter as a plain tensor. Tensor parallelism puts its own in this place."""
        return parameter

    def _limit_groups(self, scores_NE: Tensor) -> Tensor:
        """Mask all but the best groups of each token. A group scores as its two best experts (V3), or its best (V2)."""
        if not self.spec.num_groups:
            return scores_NE
        num_best = 2 if self.spec.router is Router.SIGMOID else 1
        grouped_NGX = scores_NE.unflatten(-1, (self.spec.num_groups, -1))
        worth_NG = grouped_NGX.topk(num_best, dim=-1).values.sum(dim=-1)
        best = worth_NG.topk(self.spec.groups_per_token, dim=-1).indices
        kept_NG = torch.zeros_like(worth_NG, dtype=torch.bool).scatter_(1, best, True)
        return grouped_NGX.masked_fill(~kept_NG.unsqueeze(-1), float("-inf")).flatten(-2)


class RoutedExperts(nn.Module):
    """All experts of a layer. Expert parallelism (`parallel.expert`) leaves each rank some of them."""

    def __init__(self, hidden: int, spec: ExpertsSpec, *, activation: Activation = Activation.SILU) -> None:
        super().__init__()
        num, width = spec.num_experts, spec.ffn_hidden
        self.gate = nn.Parameter(torch.empty(num, width, hidden))
        self.up = nn.Parameter(torch.empty(num, width, hidden))
        self.down = nn.Parameter(torch.empty(num, hidden, width))
        if spec.bias:
            self.gate_bias = nn.Parameter(torch.empty(num, width))
            self.up_bias = nn.Parameter(torch.empty(num, width))
            self.down_bias = nn.Parameter(torch.empty(num, hidden))
        self.activation = ACTIVATIONS[activation]

    def forward(self, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        """[M, D]: the first `counts_E[0]` rows go through expert 0, and so on."""
        return run_experts(rows_MD, counts_E, **dict(self.named_parameters()), activation=self.activation)


def run_experts(
    rows_MD: Tensor,
    counts_E: Tensor,
    *,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    activation: GatedActivation,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """[M, D]: rows sorted by expert through these stacks of weights, `counts_E[e]` of them through expert e."""
    is_grouped = rows_MD.is_cuda and rows_MD.dtype is torch.bfloat16 and hasattr(functional, "grouped_mm")
    if is_grouped and len(rows_MD):  # under expert parallelism a rank may have no rows at all
        ends_E = counts_E.cumsum(0).to(torch.int32)

        def times(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            out = functional.grouped_mm(x, weight.transpose(-2, -1), offs=ends_E)
            return out if bias is None else out + bias.repeat_interleave(counts_E, dim=0, output_size=len(x))

        hidden = activation(times(rows_MD, gate, gate_bias), times(rows_MD, up, up_bias))
        return times(hidden, down, down_bias)

    # unbind, not indexing: the gradient of an index is a whole zero stack for every expert
    def linears(weight: Tensor, bias: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
        biases = [None] * len(weight) if bias is None else bias.unbind()
        return list(zip(weight.unbind(), biases, strict=True))

    stacks = (linears(gate, gate_bias), linears(up, up_bias), linears(down, down_bias))
    parts = zip(rows_MD.split(counts_E.tolist()), *stacks, strict=True)
    return torch.cat(
        [
            functional.linear(
                activation(functional.linear(x, *of_gate), functional.linear(x, *of_up)), *of_down
            )
            for x, of_gate, of_up, of_down in parts
        ]
    )


class MixtureOfExperts(nn.Module):
    """Routed experts, plus shared ones that see every token.

    `balance_loss` is the coefficient of the auxiliary loss; see `balance` for how it joins the gradient, and
    `expert_load.configure_balance_loss` for its scale and the ranks that hold other parts of the same sequences.
    Padding passes through experts like tokens, but counts neither as load nor in the balance loss.
    """

    sequence_group: distributed.ProcessGroup | None

    def __init__(self, model: Model, *, balance_loss: float) -> None:
        super().__init__()
        spec = model.experts
        assert spec is not None
        self.router = TopKRouter(model.hidden, spec)
        self.experts = RoutedExperts(model.hidden, spec, activation=model.activation)
        self.shared = (
            FeedForward(model.hidden, spec.shared_hidden, activation=model.activation)
            if spec.shared_hidden
            else None
        )
        self.balance_loss = balance_loss
        self.loss_scale = 1.0
        self.sequence_group = None

    def forward(self, x_BTD: Tensor, is_token_BS: Tensor | None = None) -> Tensor:
        """[B, T, D]. `is_token_BS`: False at padding; without it there is none. S: see `own_tokens`."""
        x_ND = x_BTD.flatten(0, 1)
        weights_NC, experts_NC, scores_NE = self.router(x_ND)
        with torch.no_grad():
            order_M = experts_NC.flatten().argsort(stable=True)
            counts_E = torch.bincount(experts_NC.flatten(), minlength=scores_NE.shape[1])
        if self.training:
            is_token_BT = None if is_token_BS is None else self.own_tokens(is_token_BS)
            load_BE = count_rows(experts_NC.unflatten(0, x_BTD.shape[:2]), is_token_BT, num=len(counts_E))
            self.router.load_E += load_BE.sum(dim=0)
            if self.balance_loss:
                if self.sequence_group is not None:
                    distributed.all_reduce(load_BE, group=self.sequence_group)
                loss = balance_loss(scores_NE.unflatten(0, x_BTD.shape[:2]), load_BE, is_token_BT)
                weights_NC = attach_loss(weights_NC, loss * (self.balance_loss * self.loss_scale))
        rows_MD = _Spread.apply(x_ND, order_M, experts_NC.shape[1])
        rows_MD = self.experts(rows_MD, counts_E)
        chosen_NCD = _Unsort.apply(rows_MD, order_M).unflatten(0, experts_NC.shape)
        out_ND = (chosen_NCD * weights_NC.to(x_ND.dtype).unsqueeze(-1)).sum(dim=1)
        out_BTD = out_ND.view_as(x_BTD)
        return out_BTD if self.shared is None else out_BTD + self.shared(x_BTD)

    def own_tokens(self, is_token_BS: Tensor) -> Tensor:
        """The columns of this layer's input. Sequence parallelism puts its own in this place."""
        return is_token_BS


@torch.no_grad()
def count_rows(experts_BTC: Tensor, is_token_BT: Tensor | None, *, num: int) -> Tensor:
    """Rows of each of `num` experts in every sequence, [B, E], without those of padding.

    >>> experts_BTC = torch.tensor([[[0], [2], [2]]])
    >>> count_rows(experts_BTC, torch.tensor([[True, True, False]]), num=4).tolist()
    [[1, 0, 1, 0]]
    """
    counted_BTC = torch.ones_like(experts_BTC)
    if is_token_BT is not None:
        counted_BTC *= is_token_BT.unsqueeze(-1)
    counts_BE = experts_BTC.new_zeros(len(experts_BTC), num)
    return counts_BE.scatter_add_(1, experts_BTC.flatten(1), counted_BTC.flatten(1))


class _Spread(torch.autograd.Function):
    """Copies every token to its rows. The gradient sums them in a fixed order: no atomics, same bits each time."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_M: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order_M)
        ctx.top_k = top_k
        return x_ND[order_M // top_k]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order_M,) = ctx.saved_tensors
        return unsort(grads[0], order_M).unflatten(0, (-1, ctx.top_k)).sum(dim=1), None, None


class _Unsort(torch.autograd.Function):
    """Puts rows sorted by expert back in the order of tokens."""

    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, order_M: Tensor) -> Tensor:
        ctx.save_for_backward(order_M)
        return unsort(rows_MD, order_M)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (order_M,) = ctx.saved_tensors
        return grads[0][order_M], None


def unsort(rows_MD: Tensor, order_M: Tensor) -> Tensor:
    """Invert the permutation `order_M` of rows."""
    out_MD = torch.empty_like(rows_MD)
    out_MD[order_M] = rows_MD
    return out_MD
