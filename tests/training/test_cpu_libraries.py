"""Waiting threads sleep soon and few shapes are kept, unless the user has decided otherwise."""

from __future__ import annotations

import os

import pytest

from meshwright.training.cpu_libraries import (
    NUM_PRIMITIVES,
    PRIMITIVES,
    SPIN_COUNT,
    SPINS,
    WAIT_POLICY,
    configure_libraries,
)


@pytest.mark.parametrize(
    ("given", "expected"), [({}, str(SPINS)), ({SPIN_COUNT: "7"}, "7"), ({WAIT_POLICY: "PASSIVE"}, None)]
)
def test_the_users_own_variables_stay(monkeypatch, given, expected):
    for name in (WAIT_POLICY, SPIN_COUNT, PRIMITIVES):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    configure_libraries()
    assert os.environ.get(SPIN_COUNT) == expected


@pytest.mark.parametrize(("given", "expected"), [(None, str(NUM_PRIMITIVES)), ("0", "0")])
def test_the_users_own_number_of_shapes_stays(monkeypatch, given, expected):
    monkeypatch.setenv(PRIMITIVES, given or "")
    if given is None:
        monkeypatch.delenv(PRIMITIVES)
    monkeypatch.setenv(SPIN_COUNT, "7")
    configure_libraries()
    assert os.environ[PRIMITIVES] == expected
