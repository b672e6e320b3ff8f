"""Pairs of nodes: every one once, the slow ones named, measured in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.doctor.pairs import PairRates, measure_pairs, rounds
from meshwright.errors import InputError
from meshwright.training.rendezvous import free_port


def rates(num_nodes: int, *, slow: dict[tuple[int, int], float], **fields: object) -> PairRates:
    return PairRates(**{
        "hosts": tuple(f"node-{i}" for i in range(num_nodes)),
        "bytes_per_s": {pair: 50e9 * slow.get(pair, 1.0) for pair in combinations(range(num_nodes), 2)},
        "wrong": (), "all_reduce_bytes_per_s": 1e9, "all_to_all_bytes_per_s": 1e9,
        "clock_offsets_s": (0.0,) * num_nodes, "clock_errors_s": (1e-4,) * num_nodes, **fields,
    })  # fmt: skip


@given(st.integers(min_value=2, max_value=40))
def test_every_pair_meets_once_and_no_node_has_two_partners(num_nodes):
    found = rounds(num_nodes)
    assert sorted(pair for pairs in found for pair in pairs) == sorted(combinations(range(num_nodes), 2))
    assert len(found) == num_nodes - 1 + num_nodes % 2
    for pairs in found:
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes))


def test_a_slow_node_is_named_and_its_pairs_are_not():
    found = rates(6, slow={pair: 0.5 for pair in combinations(range(6), 2) if 3 in pair})
    assert (found.slow_nodes, found.slow_pairs) == ((3,), ())


def test_a_slow_link_is_named_and_its_nodes_are_not():
    found = rates(6, slow={(1, 4): 0.5, (0, 2): 0.85})
    assert (found.slow_nodes, found.slow_pairs) == ((), ((1, 4),))
    assert found.document()["slow_pairs"] == [["node-1", "node-4"]]


def test_clocks_are_judged_by_what_is_certain_of_their_offset():
    found = rates(5, slow={}, clock_offsets_s=(0.0, 0.5, -40.0, 0.05, 2.0), clock_errors_s=(0.0, 0.01, 1.0, 0.0, 1.95))
    assert [clock["status"] for clock in found.document()["clocks"]] == ["pass", "warn", "fail", "pass", "pass"]
    assert found.excluded == (2,)


SKEWED = """
import sys, time
import meshwright.doctor.pairs as pairs
skew_s = float(sys.argv.pop(1))
pairs.wall_s = lambda: time.time() + skew_s
from meshwright.cli.main import main
main()
"""


def test_one_process_alone_is_told_how_to_start(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match="torchrun starts this on every node"):
        measure_pairs(size_bytes=1024, timeout_s=1.0)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(InputError, match="two nodes or more"):
        measure_pairs(size_bytes=1024, timeout_s=1.0)


def test_three_processes_as_three_nodes_measure_their_pairs(tmp_path):
    peers = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    peers |= {"MASTER_PORT": str(free_port())}
    options = ["doctor", "--pairs", "--pair-bytes", "1MiB", "--json", "--exclude-file", str(tmp_path / "exclude.txt")]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SKEWED, str(skew_s), *options],
            env=os.environ | peers | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, skew_s in enumerate((0.0, 0.0, 100.0))
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    found = json.loads(outputs[0])
    assert outputs[1:] == ["", ""]
    assert len(found["pairs"]) == 3
    assert all(pair["bytes_per_s"] > 0 for pair in found["pairs"])
    assert found["wrong"] == []
    assert found["all_reduce_bytes_per_s"] > 0 < found["all_to_all_bytes_per_s"]
    assert [clock["status"] for clock in found["clocks"]] == ["pass", "pass", "fail"]
    assert abs(found["clocks"][2]["offset_s"] - 100.0) < 5.0
    assert [process.returncode for process in processes] == [1, 0, 0]
    assert found["hosts"][2] in (tmp_path / "exclude.txt").read_text().split()
