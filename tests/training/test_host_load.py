"""Load of other programs, from the kernel's counters."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from meshwright.training import host_load
from meshwright.training.host_load import LoadSample, cpu_seconds, load_between, sample_load

BEFORE = LoadSample(busy_s=100.0, stolen_s=5.0, own_s=1.0, time_s=10.0, num_cpus=2)


def after(**changes: float) -> LoadSample:
    return replace(BEFORE, time_s=12.0, **changes)


def test_own_time_is_not_a_load():
    assert load_between(BEFORE, after(busy_s=104.0), own_s=4.0) == host_load.HostLoad(
        others_ratio=0.0, stolen_ratio=0.0
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
