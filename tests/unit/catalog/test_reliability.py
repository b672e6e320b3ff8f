import pytest

from meshwright.catalog import reliability
from meshwright.errors import InputError, UnknownNameError
from meshwright.units import HOUR_S


def test_every_rate_is_sourced_and_plausible():
    for name in reliability.failure_rate_names():
        rate = reliability.failure_rate(name)
        assert rate.source
        assert rate.scope
        assert 1e4 < rate.device_mtbf_s / HOUR_S < 1e6


def test_range_is_ordered():
    rates = reliability.failure_range()
    assert rates.low.device_mtbf_s < rates.value.device_mtbf_s < rates.high.device_mtbf_s
    assert rates.reason


def test_every_assumption_has_a_range_and_a_reason():
    for name in reliability.assumption_names():
        a = reliability.assumption(name)
        assert a.low <= a.value <= a.high
        assert a.reason
        assert name.endswith(("_s", "_ratio"))  # the unit


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(UnknownNameError, match="rsc-1"):
        reliability.failure_rate("rsc1")
    with pytest.raises(UnknownNameError, match="detect_s"):
        reliability.assumption("detct_s")


def test_assumptions_can_be_replaced_by_name():
    assert reliability.assumed({"repair_s": 5.0})["repair_s"] == 5.0
    assert reliability.assumed()["repair_s"] == reliability.assumption("repair_s").value
    for wrong in ({"repair_s": -5.0}, {"storage_bytes_per_s": 0.0}):
        with pytest.raises(InputError, match="too small"):
            reliability.assumed(wrong)
    with pytest.raises(UnknownNameError, match="repair_s"):
        reliability.assumed({"repair": 5.0})
