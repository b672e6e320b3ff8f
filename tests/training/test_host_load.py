"""Load of other programs, from the kernel's counters."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

pytest.importorskip("torch")

from meshwright.training import host_load
from meshwright.training.host_load import HostLoad, LoadSample, cpu_seconds, load_between, sample_load

BEFORE = LoadSample(busy_s=100.0, stolen_s=5.0, own_s=1.0, time_s=10.0, num_cpus=2)


def after(**changes: float) -> LoadSample:
    return replace(BEFORE, time_s=12.0, **changes)


def test_own_time_is_not_a_load():
    assert load_between(BEFORE, after(busy_s=104.0), own_s=4.0) == host_load.HostLoad(
        others_ratio=0.0, stolen_ratio=0.0, num_cpus=2
    )


def test_time_of_others_is_a_share_of_all_processors():
    load = load_between(BEFORE, after(busy_s=103.0), own_s=1.0)
    assert load is not None
    assert load.others_ratio == pytest.approx(0.5)  # 2 of 2 x 2 seconds
    assert load.is_busy
    assert "50 %" in load.text


def test_time_that_the_hypervisor_withholds_counts():
    load = load_between(BEFORE, after(busy_s=104.0, stolen_s=5.4), own_s=4.0)
    assert load is not None
    assert load.stolen_ratio == pytest.approx(0.1)
    assert load.is_busy
    assert "withheld 10 %" in load.text


@given(others=st.integers(0, 64), threads=st.integers(1, 64), cpus=st.integers(1, 64), stolen=st.floats(0, 0.9))
def test_the_slowdown_is_that_of_threads_that_share_processors_fairly(others, threads, cpus, stolen):
    """Counters of a machine on which every thread gets the same time lead back to its slowdown."""
    share = min(1.0, cpus / (others + threads))  # of a processor, for each thread
    used = others * share / cpus
    assume(used <= 0.95)
    found = HostLoad(others_ratio=used, stolen_ratio=stolen, num_cpus=cpus).slowdown(num_threads=threads)
    alone = min(1.0, cpus / threads)
    assert found == pytest.approx(alone / share / (1 - stolen))


def test_a_load_that_leaves_nothing_has_a_slowdown():
    assert HostLoad(others_ratio=1.0, stolen_ratio=1.0, num_cpus=4).slowdown(num_threads=4) <= 400.1


def test_too_short_an_interval_says_nothing():
    assert load_between(BEFORE, replace(BEFORE, time_s=10.1), own_s=0.0) is None
    assert load_between(None, BEFORE, own_s=0.0) is None


def test_a_system_without_counters_has_no_load(monkeypatch, tmp_path):
    monkeypatch.setattr(host_load, "STAT", tmp_path / "stat")
    assert sample_load() is None


def test_processors_that_this_process_may_not_use_do_not_count():
    text = "cpu  30 0 0 0 0 0 0 0 0 0\ncpu0 10 0 0 0 0 0 0 0 0 0\ncpu1 20 0 0 0 0 0 0 0 0 0\nintr 5\n"
    assert cpu_seconds(text, cpus={0}) == (0.1, 0.0, 1)
    assert cpu_seconds(text, cpus={0, 1}) == pytest.approx((0.3, 0.0, 2))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counters of Linux")
def test_a_program_that_computes_is_found():
    first = sample_load()
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.7)
        load = load_between(first, sample_load(), own_s=0.0)
    finally:
        other.kill()
        other.wait()
    assert load is not None
    assert load.others_ratio > 0.1  # at least a part of one of the processors, however many others want it
