"""Ports of compute units: streaming kernels where memory is fast for the number of units."""

from __future__ import annotations

import pytest

from meshwright.calibration.parameters import MeasuredParameter, prior
from meshwright.catalog import lookup as catalog
from meshwright.cost.rates import system_rates
from meshwright.cost.unit_ports import UNIT_PORT_BYTES_PER_S, unit_bytes_per_s, unit_pace
from meshwright.specs.hardware import Stack
from meshwright.specs.precision import PRECISIONS


def rates(cluster: str, **measured: float):
    calibration = prior()
    if measured:
        values = {name: MeasuredParameter(value=value, sd=0.01) for name, value in measured.items()}
        calibration = calibration.with_measured(values, made="here")
    stack = Stack(framework="megatron-bridge")
    return system_rates(catalog.cluster(cluster), PRECISIONS["bf16"], stack, calibration=calibration).device


def test_more_memory_bandwidth_is_faster_and_less_of_it_is_reached():
    h100, h200, b200 = (rates(f"{name}-8x2") for name in ("h100", "h200", "b200"))
    assert h100.streaming_bytes_per_s < h200.streaming_bytes_per_s < b200.streaming_bytes_per_s
    shares = [d.streaming_bytes_per_s / d.memory_bytes_per_s for d in (h100, h200, b200)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == pytest.approx(0.77, abs=0.01)
    assert shares[2] == pytest.approx(0.65, abs=0.01)


def test_no_unit_loads_more_than_its_port():
    for name in ("h20", "b200", "mi355x", "vr200"):
        assert unit_bytes_per_s(catalog.accelerator(name)) < UNIT_PORT_BYTES_PER_S


def test_tpus_have_no_such_ports():
    assert unit_pace(catalog.accelerator("tpu7x")) == 0
    assert rates("tpu7x-4x4").streaming_bytes_per_s == pytest.approx(0.92 * 7.38e12)


def test_a_measured_copy_has_the_ports_in_it():
    device = rates("b200-8x2", memory_ratio=0.8)
    assert device.streaming_bytes_per_s == pytest.approx(0.8 * device.memory_bytes_per_s)
