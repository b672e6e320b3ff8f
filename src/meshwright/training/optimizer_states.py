"""AdamW whose two optimizer states are kept in 16 or 8 bits between steps. The update is fp32: PyTorch's fused kernel.

Masters are placed one after the other in a flat space, in which a step goes from chunk to chunk:

    decode    the states of a chunk into fp32
    update    one fused kernel for all masters of the chunk
    encode    the states back, rounded

so that no more than a chunk of them ever exists in fp32, and a step is a few kernels a chunk, not a few a tensor.

    bf16    first state (exp_avg) rounded to nearest, second (exp_avg_sq) stochastically
    int8    a byte of a table between -1 and 1, or 0 and 1, that is denser near 0 (dynamic tree quantisation), times
            the largest value of a block of 256; both states rounded stochastically

Stochastic rounding goes up with the probability of the distance, so that the mean is kept. The second state
changes by 1 - beta2 of itself a step, 0.001 with the usual beta2; formats this narrow round that to zero, and
the state would never change. In 8 bits the root of the second state is kept: it spans half the decades, as
the first state does, so that a denominator is never rounded to zero under a numerator that is not zero.

The noise of a step is a function of seed and step only: a resumed run rounds as an uninterrupted one, and processes
with copies of the same masters round alike. Source: Dettmers et al. 2021 (8-bit optimizers), sections 1.3 and 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import torch
from torch import Tensor

from meshwright.kernels.adamw import AdamStates, AdamWStep, ByteTables, adamw, divisor
from meshwright.kernels.dispatch import choose
from meshwright.specs.precision import STATE_BLOCK
from meshwright.specs.run import Optimizer as Settings
from meshwright.specs.run import StateFormat

CHUNK = {"cpu": 2**18, "cuda": 2**24}
"""Values of a chunk: few enough for a CPU's cache, enough to fill a GPU."""

SMALLEST = 2.0**-38
"""The least scale of a block. Below it the square of the table's smallest value would not be a normal fp32 number,
and a state would not survive a checkpoint unchanged."""

# What torch.optim.AdamW(fused=True) calls.
fused_adamw = torch._fused_adamw_  # pyright: ignore[reportPrivateImportUsage]


class StoredState(Protocol):
    """One optimizer state of a flat space. Ranges begin at multiples of `STATE_BLOCK`."""

    def decode(self, start: int, stop: int) -> Tensor:
        """Values `start` to `stop` in fp32, a copy."""
        ...

    def encode(self, start: int, values: Tensor, generator: torch.Generator | None) -> None:
        """Keep `values` from `start` on, with noise of `generator`; None: rounded to the nearest."""
        ...

    def stored(self, start: int, stop: int) -> Tensor:
        """Values `start` to `stop` for a checkpoint: live ones where the format is one of PyTorch's, else fp32."""
        ...


class Bf16State:
    """Values in bf16; rounded to the nearest unless `is_stochastic`."""

    def __init__(self, size: int, *, device: torch.device, is_stochastic: bool) -> None:
        self.values = torch.zeros(size, dtype=torch.bfloat16, device=device)
        self.is_stochastic = is_stochastic

    def decode(self, start: int, stop: int) -> Tensor:
        """See `StoredState`."""
        return self.values[start:stop].float()

    def encode(self, start: int, values: Tensor, generator: torch.Generator | None) -> None:
        """A bf16 is the upper 16 bits of a fp32: noise in the lower 16 bits carries at random; then they are cut."""
        if self.is_stochastic and generator is not None:
            noise = _noise(values, generator).int().bitwise_and_(0xFFFF)
            values = noise.add_(values.view(torch.int32)).bitwise_and_(-0x10000).view(torch.float32)
        self.values[start : start + len(values)] = values

    def stored(self, start: int, stop: int) -> Tensor:
        """See `StoredState`."""
        return self.values[start:stop]


class ByteState:
    """Values as bytes of a table, times the largest of each block; with `is_squared` the roots of the values."""

    def __init__(self, size: int, *, device: torch.device, is_squared: bool) -> None:
        table = dynamic_tree(is_signed=not is_squared).to(device)
        self.codes = torch.full((size,), int((table == 0).nonzero()), dtype=torch.uint8, device=device)
        self.scales = torch.full((size // STATE_BLOCK,), SMALLEST, device=device)
        self.is_squared = is_squared
        self.table, self.gaps = table, torch.cat([table.diff(), table.new_ones(1)])
        self.above = torch.cat([table[1:], table.new_full((1,), torch.inf)])  # the next value of each
        # The code at or below the least number with given upper 16 bits of a fp32: codes without a search.
        upper = torch.arange(2**16, dtype=torch.int32, device=device)
        least = torch.where(upper < 2**15, upper << 16, (upper << 16) | 0xFFFF).view(torch.float32)
        least = least.nan_to_num().clamp(table[0], table[-1])
        self.first = (torch.searchsorted(table, least, right=True) - 1).to(torch.uint8)

    def decode(self, start: int, stop: int) -> Tensor:
        """See `StoredState`."""
        values = self.table.index_select(0, self.codes[start:stop].int())
        _blocks(values).mul_(self.scales[start // STATE_BLOCK : stop // STATE_BLOCK, None])
        return values.square_() if self.is_squared else values

    def encode(self, start: int, values: Tensor, generator: torch.Generator | None) -> None:
        """See `StoredState`. Decoded values get their codes again: the largest of a block has the code of
        1, so the scale does not change, and quotients are within a rounding error of the table."""
        values = values.sqrt() if self.is_squared else values
        scales = _blocks(values).abs().amax(dim=1).clamp_(min=SMALLEST)
        ratios = (_blocks(values) / scales[:, None]).flatten()
        codes = self.first.index_select(0, (ratios.view(torch.int32) >> 16).bitwise_and_(0xFFFF)).int()
        codes += self.above.index_select(0, codes) <= ratios  # 16 upper bits span at most one value of the table
        share = (ratios - self.table.index_select(0, codes)) / self.gaps.index_select(0, codes)
        if generator is None:
            codes += share > 0.5
        else:  # noise in the open interval: what is within 1/2^17 of the table stays there
            codes += share > (_noise(values, generator).float() + (2**15 + 0.5)) / 2**16
        if self.is_squared:
            codes = torch.maximum(codes, (values > 0).int())  # a denominator stays one
        self.codes[start : start + len(values)] = codes
        self.scales[start // STATE_BLOCK : start // STATE_BLOCK + len(scales)] = scales

    def stored(self, start: int, stop: int) -> Tensor:
        """See `StoredState`."""
        return self.decode(start, _whole_blocks(stop))[: stop - start]

    def tables(self, start: int, stop: int) -> ByteTables:
        """Scales and tables of the values `start` to `stop`, live."""
        scales = self.scales[start // STATE_BLOCK : _whole_blocks(stop) // STATE_BLOCK]
        return ByteTables(scales=scales, values=self.table, first=self.first)


def dynamic_tree(*, is_signed: bool) -> Tensor:
    """The values of a byte's codes, rising, fp32: 0, and 2^k to 1 of them in each decade below 1, fewer the lower.

    After the sign, leading zeros count decades, a one ends them, and the remaining bits divide the decade
    linearly from 0.1 to 1: the middles of equal parts. The largest value is 1 itself.

    >>> dynamic_tree(is_signed=True).numel(), dynamic_tree(is_signed=False).numel()
    (255, 256)
    """
    num_bits = 7 if is_signed else 8
    parts = []
    for decade in range(num_bits):
        count = 2 ** (num_bits - 1 - decade)
        middles = 0.1 + 0.9 * (torch.arange(count, dtype=torch.float64) + 0.5) / count
        parts.append(middles * 10.0**-decade)
    positive = torch.cat(parts).sort().values
    positive[-1] = 1.0
    zero = positive.new_zeros(1)
    return torch.cat([-positive.flip(0), zero, positive] if is_signed else [zero, positive]).float()


def _blocks(values: Tensor) -> Tensor:
    return values.view(-1, STATE_BLOCK)


def _noise(values: Tensor, generator: torch.Generator) -> Tensor:
    """16 random bits for each of `values`, as int16: four from one 64-bit number, as generators are slow on a CPU."""
    numbers = torch.empty(len(values) // 4, dtype=torch.int64, device=values.device)
    return numbers.random_(-(2**63), None, generator=generator).view(torch.int16)


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatTensor:
    """A tensor in the flat space: its values, and where they begin."""

    local: Tensor
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.local.numel()


class NarrowAdamW:
    """AdamW for fp32 tensors that share a device and a weight decay, with states in a narrow format."""

    def __init__(self, tensors: Sequence[Tensor], *, settings: Settings, weight_decay: float, seed: int) -> None:
        self.settings, self.weight_decay, self.seed = settings, weight_decay, seed
        self.placed: list[FlatTensor] = []
        size = 0
        for tensor in tensors:
            self.placed.append(FlatTensor(local=tensor, start=size))
            size += _whole_blocks(tensor.numel())
        self.size, self.device = size, tensors[0].device
        self.num_steps = 0
        self.generator = torch.Generator(self.device)
        self.first, self.second = _kept(settings.states, size=size, device=self.device)

    def step(self, *, learning_rate: float, gradient_scale: Tensor | None = None) -> None:
        """Update every tensor that has a gradient, times `gradient_scale` (None: 1)."""
        self.num_steps += 1
        one = self.placed[0]
        if choose("adamw", one.local, one.local, self._states_of(one).first) == "triton":
            self._step_in_one_pass(learning_rate, gradient_scale)
            return
        self.generator.manual_seed(_mixed(self.seed, self.num_steps))
        num_steps = torch.tensor(float(self.num_steps), device=self.device)
        gradients = {p.start: p.local.grad.reshape(-1) for p in self.placed if p.local.grad is not None}
        for start in range(0, self.size, CHUNK[self.device.type]):
            stop = min(self.size, start + CHUNK[self.device.type])
            first, second = self.first.decode(start, stop), self.second.decode(start, stop)
            weights, rates, firsts, seconds = [], [], [], []
            for p, its, here in self._within(start, stop):
                if p.start in gradients:
                    weights.append(p.local.view(-1)[its])
                    rates.append(gradients[p.start][its])
                    firsts.append(first[here])
                    seconds.append(second[here])
            if weights:
                fused_adamw(
                    weights, rates, firsts, seconds, [], [num_steps] * len(weights),
                    lr=learning_rate, beta1=self.settings.betas[0], beta2=self.settings.betas[1],
                    weight_decay=self.weight_decay, eps=self.settings.epsilon, amsgrad=False, maximize=False,
                    grad_scale=divisor(gradient_scale),
                )  # fmt: skip
            self.first.encode(start, first, self.generator)
            self.second.encode(start, second, self.generator)

    def _step_in_one_pass(self, learning_rate: float, gradient_scale: Tensor | None) -> None:
        """Decode, update and encode in registers, with noise of the kernel's own generator."""
        step = AdamWStep(
            learning_rate=learning_rate, betas=self.settings.betas, epsilon=self.settings.epsilon,
            weight_decay=self.weight_decay, number=self.num_steps, noise=_mixed(self.seed, self.num_steps),
        )  # fmt: skip
        for p in self.placed:
            if p.local.grad is not None and p.local.numel():
                adamw(p.local, p.local.grad, self._states_of(p), step, scale=gradient_scale)

    def _states_of(self, p: FlatTensor) -> AdamStates:
        """The stored states of one tensor, live."""
        first, second = self.first, self.second
        if isinstance(first, ByteState) and isinstance(second, ByteState):
            tables = (first.tables(p.start, p.stop), second.tables(p.start, p.stop))
            codes = (s.codes[p.start : p.stop] for s in (first, second))
            return AdamStates(first=next(codes), second=next(codes), tables=tables, start=p.start)
        assert isinstance(first, Bf16State)
        assert isinstance(second, Bf16State)
        kept = (s.values[p.start : p.stop] for s in (first, second))
        return AdamStates(first=next(kept), second=next(kept), start=p.start)

    def _within(self, start: int, stop: int) -> Iterator[tuple[FlatTensor, slice, slice]]:
        """Tensors that overlap a chunk: the slice of their values, and the slice of the chunk."""
        for p in self.placed:
            low, high = max(start, p.start), min(stop, p.stop)
            if low < high:
                yield p, slice(low - p.start, high - p.start), slice(low - start, high - start)

    def stored(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Every tensor with both its states, in its shape, as a checkpoint stores them."""
        for p in self.placed:
            states = {"exp_avg": self.first, "exp_avg_sq": self.second}
            yield (p.local, {name: kept.stored(p.start, p.stop).view_as(p.local) for name, kept in states.items()})

    def restore(self, states: Mapping[Tensor, Mapping[str, Tensor]], *, num_steps: int) -> None:
        """Continue from `states` (by tensor) after `num_steps` steps."""
        self.num_steps = num_steps
        for p in self.placed:
            for name, kept in (("exp_avg", self.first), ("exp_avg_sq", self.second)):
                padded = torch.zeros(_whole_blocks(p.local.numel()), device=self.device)
                padded[: p.local.numel()] = states[p.local][name].flatten()
                kept.encode(p.start, padded, None)


def _whole_blocks(count: int) -> int:
    return -(-count // STATE_BLOCK) * STATE_BLOCK


def _mixed(*numbers: int) -> int:
    """One seed of several numbers. All bits count: a CPU's generator takes no more than the lower 32."""
    digest = blake2b(",".join(map(str, numbers)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def _kept(states: StateFormat, *, size: int, device: torch.device) -> tuple[StoredState, StoredState]:
    if states is StateFormat.BF16:
        return (Bf16State(size, device=device, is_stochastic=False), Bf16State(size, device=device, is_stochastic=True))
    return ByteState(size, device=device, is_squared=False), ByteState(size, device=device, is_squared=True)
