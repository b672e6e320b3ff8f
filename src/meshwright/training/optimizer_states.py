"""AdamW whose two optimizer states are kept in 16 or 8 bits, or in host memory, between steps.

The update is fp32: PyTorch's fused kernel.

Masters are placed one after the other in a flat space, in which a step goes from chunk to chunk:

    decode    the states of a chunk into fp32
    update    one fused kernel for all masters of the chunk
    encode    the states back, rounded

so that no more than a chunk of them ever exists in fp32, and a step is a few kernels a chunk, not a few a tensor.

States in host memory, and masters with them that are no shards of FSDP, stream through the device: while a chunk is
updated there, the next one is copied to it, and the one before to the host. The update is bit for bit the same.

    fp32    as they are
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
from copy import copy
from dataclasses import dataclass, replace
from hashlib import blake2b

import torch
from torch import Tensor

from meshwright.kernels.adamw import SMALLEST, AdamStates, AdamWStep, ByteTables, adamw, fused_adamw
from meshwright.kernels.dispatch import choose
from meshwright.specs.precision import STATE_BLOCK
from meshwright.specs.run import Optimizer as Settings
from meshwright.specs.run import StateFormat
from meshwright.training.host_memory import HostCopies, host_zeros
from meshwright.training.masters import Master, local_part
from meshwright.training.optimizer_updates import adamw_step

CHUNK = {"cpu": 2**18, "cuda": 2**24}
"""Values of a chunk: few enough for a CPU's cache, enough to fill a GPU."""


@dataclass
class PlainState:
    """Values in fp32, or in bf16: rounded to the nearest unless `is_stochastic`.

    One optimizer state of a flat space, as `ByteState` is. Ranges begin at multiples of `STATE_BLOCK`.
    """

    values: Tensor
    is_stochastic: bool = False

    def decode(self, start: int, stop: int) -> Tensor:
        """Values `start` to `stop` in fp32, live or copied: to be changed, and then encoded."""
        return self.values[start:stop].float()

    def encode(self, start: int, values: Tensor, generator: torch.Generator | None) -> None:
        """Keep `values` from `start` on, with noise of `generator`; None: rounded to the nearest.

        A bf16 is the upper 16 bits of a fp32: noise in the lower 16 bits carries at random; then they are cut.
        """
        here = self.values[start : start + len(values)]
        if self.is_stochastic and generator is not None:
            noise = _noise(values, generator).int().bitwise_and_(0xFFFF)
            values = noise.add_(values.view(torch.int32)).bitwise_and_(-0x10000).view(torch.float32)
        if here.data_ptr() != values.data_ptr():  # decoded fp32 values are here already
            here.copy_(values)

    def stored(self, start: int, stop: int) -> Tensor:
        """Values `start` to `stop` for a checkpoint: live ones where the format is one of PyTorch's, else fp32."""
        return self.values[start:stop]

    def arrays(self, start: int, stop: int) -> list[Tensor]:
        """All that is kept of the values `start` to `stop`, live."""
        return [self.values[start:stop]]

    def of(self, arrays: Sequence[Tensor]) -> PlainState:
        """A state that keeps its values, from 0 on, in these `arrays`."""
        return replace(self, values=arrays[0])


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
        """See `PlainState`."""
        values = self.table.index_select(0, self.codes[start:stop].int())
        _blocks(values).mul_(self.scales[start // STATE_BLOCK : stop // STATE_BLOCK, None])
        return values.square_() if self.is_squared else values

    def encode(self, start: int, values: Tensor, generator: torch.Generator | None) -> None:
        """See `PlainState`. Decoded values get their codes again: the largest of a block has the code of
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
        """See `PlainState`."""
        return self.decode(start, _whole_blocks(stop))[: stop - start]

    def arrays(self, start: int, stop: int) -> list[Tensor]:
        """See `PlainState`. Codes and scales."""
        return [self.codes[start:stop], self.scales[start // STATE_BLOCK : stop // STATE_BLOCK]]

    def of(self, arrays: Sequence[Tensor]) -> ByteState:
        """See `PlainState`."""
        other = copy(self)
        other.codes, other.scales = arrays
        return other

    def tables(self, start: int, stop: int) -> ByteTables:
        """Scales and tables of the values `start` to `stop`, live."""
        scales = self.scales[start // STATE_BLOCK : _whole_blocks(stop) // STATE_BLOCK]
        return ByteTables(scales=scales, values=self.table, first=self.first)


StoredState = PlainState | ByteState


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
    """A tensor in the flat space: its values, and where they begin. `master`: of values in host memory."""

    local: Tensor
    start: int
    master: Master | None = None

    @property
    def stop(self) -> int:
        return self.start + self.local.numel()

    @property
    def weights(self) -> Tensor:
        """The values, flat, where they lie."""
        return (self.local if self.master is None else self.master.values).view(-1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """The part of a tensor in one chunk: places of the tensor and of the flat space, and the weights there."""

    tensor: FlatTensor
    its: slice
    start: int
    weights: Tensor

    @property
    def stop(self) -> int:
        return self.start + self.weights.numel()


@dataclass(frozen=True, kw_only=True, eq=False)
class StateChunk:
    """A part of the flat space on the device. `offset`: the place of the first value that its states keep."""

    start: int
    stop: int
    pieces: list[Piece]
    first: StoredState
    second: StoredState
    offset: int = 0

    def states_of(self, piece: Piece) -> AdamStates:
        """The stored states of one piece, live."""
        start, stop = piece.start - self.offset, piece.stop - self.offset
        first, second = self.first, self.second
        tables = None
        if isinstance(first, ByteState) and isinstance(second, ByteState):
            tables = (first.tables(start, stop), second.tables(start, stop))
        kept = [state.arrays(start, stop)[0] for state in (first, second)]
        return AdamStates(first=kept[0], second=kept[1], tables=tables, start=piece.start)


class ChunkedAdamW:
    """AdamW for fp32 tensors that share a device and a weight decay, with states in a narrow format or on the host.

    `copies` keeps the states in host memory; `on_host` are masters, by tensor, whose values lie there too.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        settings: Settings,
        weight_decay: float,
        seed: int,
        copies: HostCopies | None = None,
        on_host: Mapping[Tensor, Master] | None = None,
    ) -> None:
        self.settings, self.weight_decay, self.seed, self.copies = settings, weight_decay, seed, copies
        self.placed: list[FlatTensor] = []
        size = 0
        for tensor in tensors:
            self.placed.append(FlatTensor(local=tensor, start=size, master=(on_host or {}).get(tensor)))
            size += _whole_blocks(tensor.numel())
        self.size, self.device = size, tensors[0].device
        self.num_steps = 0
        self.num_updates = {p.start: 0 for p in self.placed}
        self.generator = torch.Generator(self.device)
        if copies is None:
            self.first, self.second = _kept(settings.states, size=size, device=self.device)
        else:
            self.templates = _kept(settings.states, size=STATE_BLOCK, device=self.device)  # of a chunk's states
            on_cpu = _kept(settings.states, size=STATE_BLOCK, device=torch.device("cpu"))
            self.first, self.second = (_host_state(state, size=size, device=self.device) for state in on_cpu)

    def step(self, *, learning_rate: float, gradient_scale: Tensor | None = None) -> None:
        """Update every tensor that has a gradient, times `gradient_scale` (None: 1)."""
        self.num_steps += 1
        counts_all = self.settings.states is not StateFormat.FP32  # `FusedAdamW` counts steps with a gradient
        for p in self.placed:
            self.num_updates[p.start] += counts_all or p.local.grad is not None
        noise = _mixed(self.seed, self.num_steps)
        self.generator.manual_seed(noise)
        numbers = {n: torch.tensor(float(n), device=self.device) for n in set(self.num_updates.values())}
        step = adamw_step(self.settings, learning_rate=learning_rate, weight_decay=self.weight_decay)
        for chunk in self._chunks():
            pieces = [piece for piece in chunk.pieces if piece.tensor.local.grad is not None]
            if self._in_one_pass():
                for piece in pieces:  # with noise of the kernel's own generator
                    own = replace(step, number=self.num_updates[piece.tensor.start], noise=noise)
                    adamw(piece.weights, _gradient(piece), chunk.states_of(piece), own, scale=gradient_scale)
            else:
                self._update(chunk, pieces, numbers, step, gradient_scale)
            for piece in pieces:
                if piece.tensor.master is not None:
                    rounded = local_part(piece.tensor.master.parameter.detach()).view(-1)
                    rounded[piece.its] = piece.weights

    def _in_one_pass(self) -> bool:
        """True if a kernel decodes, updates and encodes in registers."""
        like = [state.arrays(0, 0)[0] for state in (self.templates if self.copies else (self.first,))]
        local = self.placed[0].local
        return choose("adamw", local, local, like[0]) == "triton"

    def _update(
        self,
        chunk: StateChunk,
        pieces: Sequence[Piece],
        numbers: Mapping[int, Tensor],
        step: AdamWStep,
        gradient_scale: Tensor | None,
    ) -> None:
        """Decode the states of a chunk, update `pieces` of it in one kernel, and encode the states."""
        start, stop = chunk.start - chunk.offset, chunk.stop - chunk.offset
        first, second = chunk.first.decode(start, stop), chunk.second.decode(start, stop)
        if pieces:
            here = [slice(piece.start - chunk.start, piece.stop - chunk.start) for piece in pieces]
            fused_adamw(
                [piece.weights for piece in pieces], [_gradient(piece) for piece in pieces],
                [first[its] for its in here], [second[its] for its in here],
                [numbers[self.num_updates[piece.tensor.start]] for piece in pieces], step, scale=gradient_scale,
            )  # fmt: skip
        chunk.first.encode(start, first, self.generator)
        chunk.second.encode(start, second, self.generator)

    def _chunks(self) -> Iterator[StateChunk]:
        """The chunks of a step, on the device. What is done to one is kept when the next is asked for."""
        if self.copies is None:
            size = max(self.size, 1) if self._in_one_pass() else CHUNK[self.device.type]
            for start in range(0, self.size, size):
                stop = min(self.size, start + size)
                pieces = list(self._within(start, stop))
                yield StateChunk(start=start, stop=stop, pieces=pieces, first=self.first, second=self.second)
            return
        starts = range(0, self.size, CHUNK[self.device.type])
        coming = self._fetch(starts[0])
        leaving: list[tuple[StateChunk, torch.Event | None]] = []
        for start in starts:
            chunk, event = coming
            if start != starts[-1]:
                coming = self._fetch(chunk.stop)
            self.copies.wait(event)
            yield chunk
            leaving.append((chunk, self._store(chunk)))
            if len(leaving) > 1:  # its memory is freed while the next chunk's copy runs
                self.copies.wait(leaving.pop(0)[1])
        for _, event in leaving:
            self.copies.wait(event)

    def _fetch(self, start: int) -> tuple[StateChunk, torch.Event | None]:
        """Begin to copy a chunk to the device: its states, and the weights that lie in host memory."""
        assert self.copies is not None
        stop = min(self.size, start + CHUNK[self.device.type])
        arrays, event = self.copies.fetch(self._on_host(start, stop))
        fetched = iter(arrays)
        first, second = (kept.of([next(fetched) for _ in kept.arrays(0, 0)]) for kept in self.templates)
        pieces = [
            piece if piece.tensor.master is None else replace(piece, weights=next(fetched))
            for piece in self._within(start, stop)
        ]
        return StateChunk(start=start, stop=stop, pieces=pieces, first=first, second=second, offset=start), event

    def _store(self, chunk: StateChunk) -> torch.Event | None:
        """Begin to copy an updated chunk to the host."""
        assert self.copies is not None
        size = chunk.stop - chunk.start
        arrays = [array for state in (chunk.first, chunk.second) for array in state.arrays(0, size)]
        arrays += [piece.weights for piece in chunk.pieces if piece.tensor.master is not None]
        return self.copies.store(self._on_host(chunk.start, chunk.stop), arrays)

    def _on_host(self, start: int, stop: int) -> list[Tensor]:
        """All that lies in host memory of a chunk, live."""
        states = [array for state in (self.first, self.second) for array in state.arrays(start, stop)]
        return states + [piece.weights for piece in self._within(start, stop) if piece.tensor.master is not None]

    def _within(self, start: int, stop: int) -> Iterator[Piece]:
        """Parts of tensors in a chunk, with their weights where these lie."""
        for p in self.placed:
            low, high = max(start, p.start), min(stop, p.stop)
            if low < high:
                its = slice(low - p.start, high - p.start)
                yield Piece(tensor=p, its=its, start=low, weights=p.weights[its])

    def stored(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Every tensor with both its states, in its shape, as a checkpoint stores them."""
        self._settle()
        for p in self.placed:
            states = {"exp_avg": self.first, "exp_avg_sq": self.second}
            yield (p.local, {name: kept.stored(p.start, p.stop).view(p.local.shape) for name, kept in states.items()})

    def restore(self, states: Mapping[Tensor, Mapping[str, Tensor]], *, num_steps: int) -> None:
        """Continue from `states` (by tensor) after `num_steps` steps."""
        self._settle()
        self.num_steps = num_steps
        self.num_updates = dict.fromkeys(self.num_updates, num_steps)
        for p in self.placed:
            for name, kept in (("exp_avg", self.first), ("exp_avg_sq", self.second)):
                loaded = states[p.local][name].flatten()
                padded = torch.zeros(_whole_blocks(p.local.numel()), device=loaded.device)
                padded[: p.local.numel()] = loaded
                kept.encode(p.start, padded, None)

    def _settle(self) -> None:
        if self.copies is not None:
            self.copies.settle()


def _gradient(piece: Piece) -> Tensor:
    gradient = piece.tensor.local.grad
    assert gradient is not None
    return gradient.reshape(-1)[piece.its]


def _whole_blocks(count: int) -> int:
    return -(-count // STATE_BLOCK) * STATE_BLOCK


def _mixed(*numbers: int) -> int:
    """One seed of several numbers. All bits count: a CPU's generator takes no more than the lower 32."""
    digest = blake2b(",".join(map(str, numbers)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def _kept(states: StateFormat, *, size: int, device: torch.device) -> tuple[StoredState, StoredState]:
    """Both states of `size` values on `device`."""
    if states is not StateFormat.INT8:
        is_narrow = states is StateFormat.BF16
        dtype = torch.bfloat16 if is_narrow else torch.float32
        first, second = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
        return PlainState(first), PlainState(second, is_stochastic=is_narrow)
    return ByteState(size, device=device, is_squared=False), ByteState(size, device=device, is_squared=True)


def _host_state(block: StoredState, *, size: int, device: torch.device) -> StoredState:
    """The state of `size` values in host memory, all as those of a `block` there."""
    arrays = []
    for one in block.arrays(0, STATE_BLOCK):
        many = host_zeros(size * len(one) // STATE_BLOCK, dtype=one.dtype, device=device)
        arrays.append(many.fill_(one[0].item()))
    return block.of(arrays)
