"""Rates between nodes, in the processes of torchrun: every pair of nodes, all-reduce and all-to-all over all of them.

A collective is as slow as the slowest link, which tells nobody where it is. So every pair of nodes sends data by
itself, in rounds in which each node has one partner: all processes of a node send to, and receive from, the process
with the same local rank on the other node, as the rails of a cluster run.

A clock's offset is read as NTP reads it: the first node asks a partner for its time, so the offset is known to half of
the time that this takes. The fastest of several rounds counts.

PyTorch is imported by name, because this package works without it.
"""

from __future__ import annotations

import importlib
import os
import platform
import statistics
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from meshwright.doctor.compare import EXCLUDE
from meshwright.doctor.measure import best_s, device_here
from meshwright.doctor.verdict import DATA, CheckStatus, CheckVerdict, judge
from meshwright.errors import InfeasibleError, InputError
from meshwright.files import toml_table

Pair = tuple[int, int]
CLOCK_ROUNDS = 10
wall_s = time.time


@dataclass(frozen=True, kw_only=True)
class PairRates:
    """Rates between nodes, which are numbered as `hosts`: bytes that each end of a pair sends in a second."""

    hosts: tuple[str, ...]
    bytes_per_s: dict[Pair, float]
    wrong: tuple[Pair, ...]  # pairs that received other data than was sent
    all_reduce_bytes_per_s: float
    all_to_all_bytes_per_s: float
    clock_offsets_s: tuple[float, ...]  # of each node from the median of all
    clock_errors_s: tuple[float, ...]  # how far an offset may be off

    @property
    def clocks(self) -> tuple[CheckVerdict, ...]:
        """The verdict on each node's clock, by the part of its offset that is certain."""
        certain = (max(0.0, abs(o) - e) for o, e in zip(self.clock_offsets_s, self.clock_errors_s, strict=True))
        return tuple(judge("time.offset", offset_s) for offset_s in certain)

    @property
    def excluded(self) -> tuple[int, ...]:
        """Nodes that are slow, and those whose clock fails."""
        failed = {node for node, verdict in enumerate(self.clocks) if verdict.status is CheckStatus.FAIL}
        return tuple(sorted({*self.slow_nodes, *failed}))

    @property
    def median_bytes_per_s(self) -> float:
        """The median over all pairs."""
        return statistics.median(self.bytes_per_s.values())

    @property
    def slow_nodes(self) -> tuple[int, ...]:
        """Nodes that are slow with most partners: the median of their pairs is below the share of that of all."""
        return tuple(node for node in range(len(self.hosts)) if self._is_slow(statistics.median(self.rates_of(node))))

    @property
    def slow_pairs(self) -> tuple[Pair, ...]:
        """Pairs that are slow between nodes that are not: the link or the switch between them."""
        nodes = set(self.slow_nodes)
        return tuple(pair for pair, rate in self.bytes_per_s.items() if self._is_slow(rate) and not nodes & {*pair})

    def rates_of(self, node: int) -> list[float]:
        """Rates of the pairs of one node."""
        return [rate for pair, rate in self.bytes_per_s.items() if node in pair]

    def document(self) -> dict[str, Any]:
        """Return the document of `meshwright doctor --pairs --json`."""
        named = {pair: [self.hosts[node] for node in pair] for pair in self.bytes_per_s}
        return {
            "report": "meshwright doctor --pairs", "version": 1, "hosts": self.hosts,
            "pairs": [{"hosts": named[pair], "bytes_per_s": rate} for pair, rate in self.bytes_per_s.items()],
            "median_bytes_per_s": self.median_bytes_per_s, "all_reduce_bytes_per_s": self.all_reduce_bytes_per_s,
            "all_to_all_bytes_per_s": self.all_to_all_bytes_per_s,
            "slow_nodes": [self.hosts[node] for node in self.slow_nodes],
            "slow_pairs": [named[pair] for pair in self.slow_pairs], "wrong": [named[pair] for pair in self.wrong],
            "clocks": [
                {"host": host, "offset_s": offset_s, "error_s": error_s, "status": verdict.status}
                for host, offset_s, error_s, verdict in zip(
                    self.hosts, self.clock_offsets_s, self.clock_errors_s, self.clocks, strict=True
                )
            ],
        }  # fmt: skip

    def _is_slow(self, rate: float) -> bool:
        return rate < toml_table(DATA / "compare.toml")["measures"]["pairs.rate"][EXCLUDE] * self.median_bytes_per_s


def rounds(num_nodes: int) -> list[list[Pair]]:
    """Return every pair of nodes once, in rounds in which no node has two partners.

    >>> rounds(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    places = [*range(num_nodes), *([None] if num_nodes % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        ends = zip(places[: len(places) // 2], reversed(places), strict=False)
        found.append(sorted((min(a, b), max(a, b)) for a, b in ends if a is not None and b is not None))
        places = [places[0], places[-1], *places[1:-1]]
    return found


def measure_pairs(*, size_bytes: int, timeout_s: float) -> PairRates | None:
    """Measure all pairs in this process and its peers; the first process has the answer, the others None.

    Raises InputError outside of torchrun and for fewer than two nodes, InfeasibleError where a partner does not answer.
    """
    rank, world, each = (_of_torchrun(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    num_nodes = world // each
    if num_nodes < 2 or world % each:
        raise InputError("pairs of nodes need two nodes or more", got=f"{world} processes, {each} a node")
    torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    device, _ = device_here(torch, rank % each)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a partner without an answer is an error and no abort
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_s))
    try:
        hosts: list[str] = [""] * world
        dist.all_gather_object(hosts, platform.node())
        sent = torch.full((size_bytes,), rank % 251, dtype=torch.uint8, device=device)
        own = _transfers(torch, dist, sent, rank=rank, each=each, hosts=hosts)
        gathered: list[list[tuple[Pair, float, bool]]] = [[] for _ in range(world)]
        dist.all_gather_object(gathered, own)
        clocks = _clocks(torch, dist, rank=rank, each=each, num_nodes=num_nodes, device=device)
        rates = [size_bytes / _slowest_s(torch, dist, run) for run in _collectives(torch, dist, sent, world)]
    finally:
        dist.destroy_process_group()
    if rank:
        return None
    middle_s = statistics.median(offset_s for offset_s, _ in clocks)
    seconds: dict[Pair, float] = {}
    for pair, took_s, _ in (entry for entries in gathered for entry in entries):
        seconds[pair] = max(took_s, seconds.get(pair, 0.0))
    return PairRates(
        hosts=tuple(hosts[::each]),
        bytes_per_s={pair: each * size_bytes / took_s for pair, took_s in sorted(seconds.items())},
        wrong=tuple(sorted({pair for entries in gathered for pair, _, is_right in entries if not is_right})),
        all_reduce_bytes_per_s=rates[0],
        all_to_all_bytes_per_s=rates[1],
        clock_offsets_s=tuple(offset_s - middle_s for offset_s, _ in clocks),
        clock_errors_s=tuple(error_s for _, error_s in clocks),
    )


def _of_torchrun(name: str) -> int:
    if name not in os.environ:
        command = "torchrun --nnodes N --nproc-per-node D --rdzv-backend c10d --rdzv-endpoint HOST:29500"
        raise InputError(
            f"torchrun starts this on every node, and {name} is not set", hint=f"{command} -m meshwright doctor --pairs"
        )
    return int(os.environ[name])


def _transfers(
    torch: Any, dist: Any, sent: Any, *, rank: int, each: int, hosts: list[str]
) -> list[tuple[Pair, float, bool]]:
    """Send to the partner of every round and receive from it.

    Return the pair, the seconds of the fastest repetition, and whether the data was right.
    """
    found, node = [], rank // each
    received = torch.empty_like(sent)
    for pairs in rounds(len(hosts) // each):
        dist.barrier()  # pairs of one round run at once, and those of the next one after them
        pair = next((pair for pair in pairs if node in pair), None)
        if pair is None:
            continue
        peer = (pair[0] + pair[1] - node) * each + rank % each

        def transfer(peer: int = peer) -> None:
            ends = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
            for work in dist.batch_isend_irecv(ends):
                work.wait()

        received.fill_(255)
        try:
            took_s = best_s(torch, transfer, warm_up_s=0.0)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise InfeasibleError(f"{hosts[rank]} has no answer from {hosts[peer]} (rank {peer}): {reason}") from None
        found.append((pair, took_s, bool((received == peer % 251).all())))
    return found


def _clocks(torch: Any, dist: Any, *, rank: int, each: int, num_nodes: int, device: Any) -> list[tuple[float, float]]:
    """Offset of each node's clock from the first node's, and its error, in the first process; all take part."""
    found, now = [(0.0, 0.0)], torch.zeros(1, dtype=torch.float64, device=device)
    for peer in range(each, each * num_nodes, each):
        rounds_s: list[tuple[float, float]] = []
        for _ in range(CLOCK_ROUNDS if rank in (0, peer) else 0):
            if rank == peer:
                dist.recv(now, 0)
                dist.send(now.fill_(wall_s()), 0)
                continue
            sent_s = wall_s()
            dist.send(now, peer)
            dist.recv(now, peer)
            there_s, back_s = now.item(), wall_s()
            rounds_s.append(((back_s - sent_s) / 2, there_s - (sent_s + back_s) / 2))
        if rounds_s:
            error_s, offset_s = min(rounds_s)
            found.append((offset_s, error_s))
        dist.barrier()
    return found


def _collectives(torch: Any, dist: Any, sent: Any, world: int) -> tuple[Any, Any]:
    """All-reduce and all-to-all of as many bytes as `sent` has."""
    numbers = torch.zeros(max(1, sent.numel() // 4), dtype=torch.float32, device=sent.device)
    parts = sent[: max(1, sent.numel() // world) * world]
    return lambda: dist.all_reduce(numbers), lambda: dist.all_to_all_single(torch.empty_like(parts), parts)


def _slowest_s(torch: Any, dist: Any, run: Any) -> float:
    device, _ = device_here(torch, int(os.environ.get("LOCAL_RANK", "0")))
    seconds = torch.tensor(best_s(torch, run, warm_up_s=0.0), device=device, dtype=torch.float32)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)
