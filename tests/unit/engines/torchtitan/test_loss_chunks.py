"""A loss in chunks takes less memory in torchtitan, too: by the logits that are not there at once."""

from __future__ import annotations

import pytest

from meshwright.planner.estimate import estimate_plan
from meshwright.planner.request import request_for
from meshwright.runfile import loads

RUN = """
model: llama3.1-8b
data: {sequence_length: 8192}
batch: {global_sequences: 8, micro: 1}
cluster: h100-8x1
engine: torchtitan
parallel: {data_shard: 8, sharding: parameters, recompute: full}
"""
VOCAB, HIDDEN = 128_256, 4096


def reserved_bytes(*overrides: str) -> float:
    run = loads(RUN, overrides=overrides)
    return estimate_plan(request_for(run), run.plan).step.memory.reserved_bytes


def test_chunks_hold_their_logits_copies_of_the_hidden_states_and_the_sum_of_the_gradient():
    whole, chunked, finer = (reserved_bytes(*keys) for keys in ([], [f"{KEY}=1024"], [f"{KEY}=512"]))
    assert reserved_bytes(f"{KEY}=all") == whole
    saved = 7168 * VOCAB * 12 - 6 * 8192 * HIDDEN - 4 * VOCAB * HIDDEN
    assert whole - chunked == pytest.approx(saved, rel=0.15)  # of which fragmentation is a share
    assert 0 < chunked - finer == pytest.approx(512 * VOCAB * 12, rel=0.15)


KEY = "kernels.loss_chunk"
