"""Copies between host and device: judged by the lanes of the PCIe link."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tests.unit.doctor.conftest import CARD

from meshwright.doctor.verdict import CheckStatus


@pytest.fixture(autouse=True)
def _torch_is_installed(monkeypatch):
    monkeypatch.setattr("meshwright.doctor.checks.rates.find_spec", lambda name: object())


@pytest.mark.parametrize(("rate", "status"), [(55e9, "pass"), (35e9, "warn"), (12e9, "fail")])
def test_copies_to_and_from_the_host_are_judged_by_the_lanes_of_the_link(look, nvidia, rate, status):
    for key in ("to_device_bytes_per_s", "from_device_bytes_per_s"):
        command = next(k for k in nvidia.commands if k.endswith("device"))
        good = json.loads(nvidia.commands[command].splitlines()[-1])
        found = look(dataclasses.replace(nvidia, commands=nvidia.commands | {command: json.dumps(good | {key: rate})}))
        check = "rates.to-device" if key.startswith("to") else "rates.from-device"
        assert {v.status.value for v in found[check]} == {status}
        assert found[check][0].expected == pytest.approx(63.0, rel=0.01)


def test_a_link_of_unknown_generation_is_measured_and_not_judged(look, healthy):
    del healthy.files[CARD.format(1) + "/max_link_speed"]
    first, second = look(healthy)["rates.to-device"][:2]
    assert (first.status, first.measured) == (CheckStatus.SKIPPED, 55.0)
    assert (second.status, second.expected) == (CheckStatus.PASS, pytest.approx(63.0, rel=0.01))
