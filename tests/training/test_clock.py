"""Phases of a training add up to its wall time."""

from __future__ import annotations

import contextlib
import time

import pytest

pytest.importorskip("torch")

from meshwright.training.clock import Clock, TrainingPhase


@pytest.fixture
def now_s(monkeypatch):
    """A clock that stands still until it is set."""
    now = {"s": 0.0}
    monkeypatch.setattr(time, "perf_counter", lambda: now["s"])
    monkeypatch.setattr(time, "time", lambda: 1000.0 + now["s"])
    return now


def test_every_second_belongs_to_one_phase(now_s):
    clock = Clock(started_s=997.0)  # imports took three seconds before there was a clock
    now_s["s"] = 5.0
    clock.enter(TrainingPhase.TRAINING)
    now_s["s"] = 7.0
    with clock.during(TrainingPhase.VALIDATION):
        now_s["s"] = 11.0
    now_s["s"] = 12.0
    found = {name: s for name, s in clock.seconds().items() if s}
    assert found == {"start_up": 8.0, "training": 3.0, "validation": 4.0, "total": 15.0}


def test_a_phase_that_fails_ends_too(now_s):
    clock = Clock(started_s=1000.0)
    with contextlib.suppress(OSError), clock.during(TrainingPhase.CHECKPOINT):
        now_s["s"] = 2.0
        raise OSError("full")
    assert clock.phase is TrainingPhase.START_UP
    assert clock.seconds()["checkpoint"] == 2.0


def test_a_system_clock_that_was_set_back_makes_no_negative_time():
    assert Clock(started_s=time.time() + 3600).seconds()["start_up"] < 1
