"""Dropless mixture of experts: every token reaches each of its experts.

    router    scores every expert for every token and picks top_k
    spread    rows, one a (token, expert) pair, sorted by expert
    experts   one feed-forward block each, weights stacked [E, out, in]: expert parallelism shards E
    gather    rows back to tokens, weighted and added

Auxiliary losses of routers: one balances the load of experts, one keeps logits small.

    L = E Σ_e f_e P_e      f_e share of the sequence's rows, P_e its mean score; 1 when balanced
    Z = mean over tokens of z²      z = log Σ_e exp(l_e), l the logits: the z-loss (Zoph et al. 2022, equation 5)

The form of L is Switch's (Fedus et al. 2021, equation 4). The statistics are DeepSeek-V3's (2024, equations
17 to 20): they count one sequence (a row of the batch, without its padding), not a micro-batch. So L does not
depend on which sequences a process happens to hold, and any plan gives the gradients of one process. If a
sequence is sharded over ranks, the counts of all its parts are summed first. Z is a sum over tokens, and each
rank has its own tokens.

Gradients of both are added at the router, not at the end of the model: so they are not passed through pipeline stages,
and reported losses do not include them.

B sequences, T tokens, N = B T, D hidden, F hidden of an expert, E experts, C choices (top_k), M = N C rows.
Sources: Mixtral (Jiang et al. 2024, section 2.1), DeepSeek-V3 (2024, section 2.1.2), Switch (Fedus et al. 2021).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from meshwright.kernels.dispatch import choose
from meshwright.kernels.experts.grouped_gemm import grouped_gemm, joined, parts_of
from meshwright.kernels.experts.permutation import permute, unpermute
from meshwright.kernels.experts.router import RoutedTokens, RouterForm, route_tokens
from meshwright.kernels.fp8.aligned_rows import AlignedRows, align
from meshwright.kernels.fp8.feed_forward import MATRICES, Fp8Block, fp8_feed_forward
from meshwright.kernels.fp8.grouped_gemm import ALIGNMENT
from meshwright.kernels.linear import compiles_shapes, linear
from meshwright.specs.model import Activation, Model, Router
from meshwright.specs.model import Experts as ExpertsSpec
from meshwright.training.models.feed_forward import FeedForward, GatedActivation, GatedBlock

SHAPES = 8
"""Rows of an expert are a multiple of about an eighth of the mean: so its GEMMs have few shapes."""


def router_form(spec: ExpertsSpec) -> RouterForm:
    """The form of a model's router."""
    return RouterForm(
        top_k=spec.top_k,
        is_sigmoid=spec.router is Router.SIGMOID,
        num_groups=spec.num_groups,
        groups_per_token=spec.groups_per_token,
        normalizes=spec.normalize_top_k,
        scale=spec.routed_scale,
    )


class TopKRouter(nn.Module):
    """Router whose scores are always fp32: a flipped choice costs more than a slow GEMM this small.

    `bias_E` of sigmoid scores shifts the choice but not the weight; `expert_load.update_routing_bias` moves
    it. `load_E` counts the rows of tokens, without padding, that each expert got in training since
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
        self.form = router_form(spec)
        bias_E = torch.zeros(spec.num_experts, dtype=torch.float32) if self.form.is_sigmoid else None
        self.register_buffer("bias_E", bias_E)
        self.register_buffer("load_E", torch.zeros(spec.num_experts, dtype=torch.long), persistent=False)

    def forward(self, x_ND: Tensor) -> RoutedTokens:
        """The chosen experts of every token."""
        bias = None if self.bias is None else self.plain(self.bias).float()
        logits_NE = functional.linear(x_ND.float(), self.plain(self.weight).float(), bias)
        return route_tokens(logits_NE, self.bias_E, form=self.form)

    def plain(self, parameter: Tensor) -> Tensor:
        """A parameter as a plain tensor. Tensor parallelism puts its own in this place."""
        return parameter


class RoutedExperts(GatedBlock):
    """All experts of a layer. Expert parallelism (`parallel.expert`) leaves each rank some of them."""

    def __init__(self, hidden: int, spec: ExpertsSpec, *, activation: Activation = Activation.SILU) -> None:
        super().__init__(activation)
        num, width = spec.num_experts, spec.ffn_hidden
        self.gate = nn.Parameter(torch.empty(num, width, hidden))
        self.up = nn.Parameter(torch.empty(num, width, hidden))
        self.down = nn.Parameter(torch.empty(num, hidden, width))
        if spec.bias:
            self.gate_bias = nn.Parameter(torch.empty(num, width))
            self.up_bias = nn.Parameter(torch.empty(num, width))
            self.down_bias = nn.Parameter(torch.empty(num, hidden))

    def align(self, order_M: Tensor, counts_E: Tensor, /) -> AlignedRows | None:
        """The rows that `forward` takes: in 8 bits and for oneDNN with rows of zeros between experts; None: in the
        order given. Expert parallelism, which moves rows before it aligns them, puts its own in this place."""
        if self.fp8_states is not None:
            return align(order_M, counts_E, alignment=ALIGNMENT)
        rows = len(order_M) // len(counts_E) // SHAPES if compiles_shapes(self.gate) else 0
        return align(order_M, counts_E, alignment=1 << rows.bit_length() - 1) if rows > 1 else None

    def forward(self, rows_PD: Tensor, counts_E: Tensor, aligned: AlignedRows | None, /) -> Tensor:
        """Return [P, D]: the first `counts_E[0]` rows that are not zeros go through expert 0, and so on."""
        return self.run(rows_PD, counts_E, aligned, dict(self.named_parameters()))

    def run(
        self, rows_PD: Tensor, counts_E: Tensor, aligned: AlignedRows | None, stacks: Mapping[str, Tensor]
    ) -> Tensor:
        """`forward` with these stacks of weights, in the place of its own parameters."""
        if self.fp8_states is None or aligned is None:
            return run_experts(rows_PD, counts_E, **stacks, activation=self.activation, aligned=aligned)
        block = Fp8Block(kind=self.kind, states=self.fp8_states, aligned=aligned, drops_hidden=self.drops_hidden)
        return run_experts_in_fp8(rows_PD, stacks, block=block)


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
    aligned: AlignedRows | None = None,
) -> Tensor:
    """[M, D]: rows sorted by expert through these stacks of weights, `counts_E[e]` of them through expert e, or as many
    as are `aligned`."""
    counts_E = counts_E if aligned is None else aligned.counts_E
    if torch.compiler.is_compiling() or choose("grouped_gemm", rows_MD, gate, counts_E) != "reference":

        def times(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            out = grouped_gemm(x, weight, counts_E)
            if bias is None:
                return out
            if aligned is not None:
                return out + aligned.of_rows(bias)
            return out + bias.repeat_interleave(counts_E, dim=0, output_size=len(x))

        hidden = activation(times(rows_MD, gate, gate_bias), times(rows_MD, up, up_bias))
        return times(hidden, down, down_bias)

    # One expert after the other through all three matrices: its rows stay in the cache.
    # unbind, not indexing: the gradient of an index is a whole zero stack for every expert
    def linears(weight: Tensor, bias: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
        biases = [None] * len(weight) if bias is None else bias.unbind()
        return list(zip(weight.unbind(), biases, strict=True))

    stacks = (linears(gate, gate_bias), linears(up, up_bias), linears(down, down_bias))
    parts = zip(parts_of(rows_MD, counts_E), *stacks, strict=True)
    return joined(
        [linear(activation(linear(x, *of_gate), linear(x, *of_up)), *of_down) for x, of_gate, of_up, of_down in parts],
        num_rows=len(rows_MD),
    )


def run_experts_in_fp8(rows_PD: Tensor, stacks: Mapping[str, Tensor], *, block: Fp8Block) -> Tensor:
    """`run_experts` of aligned rows, whose GEMMs are in the format of `block`. The host waits for no count on a GPU."""
    assert block.aligned is not None
    matrices = (stacks[name] for name in MATRICES)
    biases = {name: stacks[name] for name in ("gate_bias", "up_bias") if name in stacks}
    out_PD = fp8_feed_forward(rows_PD, *matrices, block=block, **biases)
    return out_PD + block.aligned.of_rows(stacks["down_bias"]) if "down_bias" in stacks else out_PD


class MixtureOfExperts(nn.Module):
    """Routed experts, plus shared experts that see every token.

    `balance_loss` and `z_loss` are coefficients of the auxiliary losses; see `balance` for how they join the gradient,
    and `expert_load.configure_router_losses` for their scale and the ranks that hold other parts of the same sequences.
    Padding passes through experts like tokens, but counts neither as load nor in these losses.
    """

    sequence_group: distributed.ProcessGroup | None

    def __init__(self, model: Model, *, balance_loss: float, z_loss: float = 0.0) -> None:
        super().__init__()
        spec = model.experts
        assert spec is not None
        self.router = TopKRouter(model.hidden, spec)
        self.experts = RoutedExperts(model.hidden, spec, activation=model.activation)
        self.shared = (
            FeedForward(model.hidden, spec.shared_hidden, activation=model.activation) if spec.shared_hidden else None
        )
        self.balance_loss, self.z_loss = balance_loss, z_loss
        self.loss_scale = 1.0
        self.sequence_group = None

    def forward(self, x_BTD: Tensor, is_token_BS: Tensor | None = None) -> Tensor:
        """[B, T, D]. `is_token_BS`: False at padding; without it there is none. S: see `own_tokens`."""
        x_ND = x_BTD.flatten(0, 1)
        routing = self.router(x_ND)
        weights_NC, experts_NC = routing.weights_NC, routing.experts_NC
        with torch.no_grad():
            order_M = experts_NC.flatten().argsort(stable=True)
            counts_E = torch.bincount(experts_NC.flatten(), minlength=routing.scores_NE.shape[1])
        if self.training:
            is_token_BT = None if is_token_BS is None else self.own_tokens(is_token_BS)
            load_BE = count_rows(experts_NC.unflatten(0, x_BTD.shape[:2]), is_token_BT, num=len(counts_E))
            self.router.load_E += load_BE.sum(dim=0)
            if self.balance_loss or self.z_loss:
                loss = self._losses(routing, load_BE, is_token_BT, shape=x_BTD.shape[:2])
                weights_NC = AttachedLoss.apply(weights_NC, loss * self.loss_scale)
        aligned = self.experts.align(order_M, counts_E)
        order_P = order_M if aligned is None else aligned.order_P
        rows_PD = self.experts(permute(x_ND, order_P, top_k=experts_NC.shape[1]), counts_E, aligned)
        out_BTD = unpermute(rows_PD, order_P, weights_NC).view_as(x_BTD)
        return out_BTD if self.shared is None else out_BTD + self.shared(x_BTD)

    def _losses(
        self, routing: RoutedTokens, load_BE: Tensor, is_token_BT: Tensor | None, *, shape: tuple[int, ...]
    ) -> Tensor:
        """The auxiliary losses times their coefficients, a sum over tokens."""
        loss = routing.scores_NE.new_zeros(())
        if self.balance_loss:
            if self.sequence_group is not None:
                distributed.all_reduce(load_BE, group=self.sequence_group)
            scores_BTE = routing.scores_NE.unflatten(0, shape)
            loss = self.balance_loss * balance_loss(scores_BTE, load_BE, is_token_BT)
        if self.z_loss:
            loss = loss + self.z_loss * router_z_loss(routing.logsumexp_N.view(shape), is_token_BT)
        return loss

    def own_tokens(self, is_token_BS: Tensor) -> Tensor:
        """The columns of this layer's input. Sequence parallelism puts its own in this place."""
        return is_token_BS


@torch.no_grad()
def count_rows(experts_BTC: Tensor, is_token_BT: Tensor | None, *, num: int) -> Tensor:
    """Count the rows of each of `num` experts in every sequence, [B, E], without padding.

    >>> experts_BTC = torch.tensor([[[0], [2], [2]]])
    >>> count_rows(experts_BTC, torch.tensor([[True, True, False]]), num=4).tolist()
    [[1, 0, 1, 0]]
    """
    counted_BTC = torch.ones_like(experts_BTC)
    if is_token_BT is not None:
        counted_BTC *= is_token_BT.unsqueeze(-1)
    counts_BE = experts_BTC.new_zeros(len(experts_BTC), num)
    return counts_BE.scatter_add_(1, experts_BTC.flatten(1), counted_BTC.flatten(1))


def balance_loss(scores_BTE: Tensor, counts_BE: Tensor, is_token_BT: Tensor | None = None) -> Tensor:
    """T E Σ f P of one layer, added over sequences: a sum over tokens, as the loss of the tokens is.

    `counts_BE` are the rows of whole sequences without padding, `is_token_BT` is False at padding. Sigmoid scores are
    normalised first (equation 19).
    """
    share_BE = counts_BE / counts_BE.sum(dim=-1, keepdim=True).clamp(min=1)
    score_BTE = scores_BTE / scores_BTE.sum(dim=-1, keepdim=True)
    if is_token_BT is not None:
        score_BTE = score_BTE * is_token_BT.unsqueeze(-1)
    score_BE = score_BTE.sum(dim=1)
    return scores_BTE.shape[-1] * (share_BE * score_BE).sum()


def router_z_loss(logsumexp_BT: Tensor, is_token_BT: Tensor | None = None) -> Tensor:
    """Σ z² of one layer: a sum over tokens. `is_token_BT` is False at padding."""
    squares_BT = logsumexp_BT.square()
    return (squares_BT if is_token_BT is None else squares_BT * is_token_BT).sum()


class AttachedLoss(torch.autograd.Function):
    """Passes its first argument through; its backward gives the second, a loss, the gradient 1."""

    @staticmethod
    def forward(ctx: Any, passed: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return passed.view_as(passed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=ctx.dtype, device=grads[0].device)
