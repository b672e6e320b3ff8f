import pytest

from meshwright.catalog import power_assumptions, price_per_device_hour, prices
from meshwright.errors import InputError, UnknownNameError
from meshwright.specs.estimate import Tier


@pytest.mark.parametrize(("name", "usd"), [("mi300x", 48.00 / 8), ("h100", 98.32 / 8), ("h200", 84.80 / 8)])
def test_lowest_offer_is_the_price(name, usd):
    price = price_per_device_hour(name)
    assert price.usd_per_device_hour == pytest.approx(usd)
    assert "East US 2" in price.offer
    assert price.date == "2025-06-10"


def test_every_price_has_its_source():
    assert len(prices()) == 6
    assert all(price.source and price.offer for price in prices())


def test_unknown_price_asks_for_one():
    with pytest.raises(InputError, match="no price is known") as caught:
        price_per_device_hour("b300")
    assert "USD per device-hour" in caught.value.hint


def test_price_of_an_unknown_device_is_an_unknown_device():
    with pytest.raises(UnknownNameError):
        price_per_device_hour("h1000")


def test_power_assumptions_are_plausible_and_called_guesses():
    power = power_assumptions()
    assert power.tier is Tier.GUESSED
    assert 1.0 <= power.pue < 2.0
    assert 0 < power.idle_ratio < 0.5
    assert 0 < power.node_overhead_ratio < 1
    assert {"pue", "idle_ratio", "node_overhead_ratio"} <= set(power.sources)
