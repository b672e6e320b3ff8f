"""Ingestion by arithmetic: FLOPs of the encoder, stages that alternate or overlap, vectors in memory or streamed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.catalog.lookup import claim
from meshwright.inference.claims import predict_serving_claim
from meshwright.inference.ingestion import MINILM_L6, IngestSystem, IngestWork, resident, streamed

SYSTEM = IngestSystem(encode_flops_per_s=1e15, distance_flops_per_s=5e14, host_bytes_per_s=5e10, memory_bytes=1e11)
WORK = IngestWork(shape=MINILM_L6, num_chunks=10**6, chunk_tokens=256, num_lists=4000, num_passes=25)


def test_flops_of_the_encoder_are_counted_from_its_matrices():
    matrices = 6 * (4 * 384 * 384 + 2 * 384 * 1536)
    assert MINILM_L6.gemm_flops_per_token == 2 * matrices
    scores_and_sum = 2 * 2 * 256 * 256 * 384 * 6  # of one chunk
    assert MINILM_L6.flops(num_chunks=1, length=256) == 2 * matrices * 256 + scores_and_sum


def test_the_ratio_of_index_builds_is_the_closed_form_whatever_the_number_of_vectors():
    for num in (10**5, 10**8):
        work = replace(WORK, num_chunks=num)
        index, transfer = resident(work, SYSTEM).index, streamed(work, SYSTEM).transfer
        into_passes = transfer * (work.num_passes + 1) / (work.num_passes + 2)  # without the one out of the encoder
        closed = 1 + 4 * SYSTEM.distance_flops_per_s / (2 * work.num_lists * SYSTEM.host_bytes_per_s)
        assert (index + into_passes) / index == pytest.approx(closed)


def test_memory_alone_gains_nothing_where_stages_overlap_and_the_encoder_is_slowest():
    slow = replace(SYSTEM, encode_flops_per_s=1e13)
    assert streamed(WORK, slow).overlapped == resident(WORK, slow).overlapped
    assert streamed(WORK, slow).alternating > resident(WORK, slow).alternating


def test_seconds_fall_with_every_rate():
    before = streamed(WORK, SYSTEM)
    for name, stage in (
        ("encode_flops_per_s", "encode"),
        ("distance_flops_per_s", "index"),
        ("host_bytes_per_s", "transfer"),
    ):
        faster = streamed(WORK, replace(SYSTEM, **{name: 2 * getattr(SYSTEM, name)}))
        assert getattr(faster, stage) == pytest.approx(getattr(before, stage) / 2)


def test_the_published_speed_up_of_an_index_build():
    """2.1 needs few lists and transfers that do not overlap; with the encoder's time it is near 1."""
    found = predict_serving_claim(claim("s65_17"))
    assert found.is_inside
    assert found.value.low == 1.0
    assert 1.4 < found.value.value < 1.7
    assert found.value.high - 1 < 2.3 * (found.value.value - 1)  # the gain: the interval is a factor of it
    assert any("with the encoder, stages alternate: 1.1" in plan for plan in found.plans)
