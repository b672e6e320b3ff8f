import re
from math import log

import pytest
from tests.every_member import check_every

from meshwright.catalog.lookup import accelerator, market_prices, power_assumptions, price_per_device_hour, prices
from meshwright.catalog.prices import market_sentence
from meshwright.errors import InputError, UnknownNameError
from meshwright.specs.estimate import Tier


@pytest.mark.parametrize(("name", "usd"), [("mi300x", 48.00 / 8), ("h100", 98.32 / 8), ("h200", 84.80 / 8)])
def test_a_region_has_the_price_of_the_documents(name, usd):
    price = price_per_device_hour(name, region="East US 2")
    assert price.usd_per_device_hour == pytest.approx(usd)
    assert "East US 2" in price.offer
    assert price.date == "2025-06-10"


def test_every_price_has_its_source():
    assert len(prices()) == 6
    assert all(price.source and price.offer for price in prices())


def test_the_market_stands_beside_the_documents():
    found = market_prices()
    assert {p.accelerator for p in found} >= {"h100", "h200", "b200", "b300", "gb200", "a100", "mi300x"}
    for price in found:
        assert accelerator(price.accelerator).name == price.accelerator
        assert price.date > "2026-08"
        assert "http" in price.source or "github:" in price.source
        node = re.search(r": ([\d.]+) USD per hour for (?:a node of )?(\d+)", price.offer)
        if node is not None:
            assert price.usd_per_device_hour == pytest.approx(float(node[1]) / int(node[2]))
    assert market_sentence("h100").startswith("2.69 to 12.29 USD per device-hour, 6 offers")


def test_the_price_is_the_median_of_the_market():
    def check(name):
        price = price_per_device_hour(name)
        own = sorted((p for p in market_prices() if p.accelerator == name), key=lambda p: p.usd_per_device_hour)
        assert own[0].usd_per_device_hour <= price.usd_per_device_hour <= own[-1].usd_per_device_hour
        assert price.date == max(p.date for p in own)
        assert all(p.source in price.source for p in own)
        assert price.offer == (f"median of {len(own)} offers" if len(own) > 1 else own[0].offer)

    check_every(sorted({p.accelerator for p in market_prices()}), check)
    assert price_per_device_hour("h100").usd_per_device_hour == pytest.approx((3.99 + 6.155) / 2)


def test_unknown_price_asks_for_one():
    with pytest.raises(InputError, match="no price is known") as caught:
        price_per_device_hour("mi355x")
    assert "costs.usd_per_device_hour" in caught.value.hint


def test_price_of_an_unknown_device_is_an_unknown_device():
    with pytest.raises(UnknownNameError):
        price_per_device_hour("h1000")


def test_the_clock_under_a_power_limit_agrees_with_every_measured_one():
    power = power_assumptions()
    for one in power.capped:
        clock, width = power.clock_under(tdp_w=one["from_w"], limit_w=one["to_w"])
        assert abs(log(one["rate_ratio"] / clock)) < width, one["chip"]
        assert one["source"]
    clock, width = power.clock_under(tdp_w=700, limit_w=699.9)
    assert clock == pytest.approx(1, abs=1e-3)
    assert width == pytest.approx(0, abs=1e-3)


def test_power_assumptions_are_plausible_and_called_guesses():
    power = power_assumptions()
    assert power.tier is Tier.GUESSED
    assert 1.0 <= power.pue < 2.0
    assert 0 < power.idle_ratio < 0.5
    assert 0 < power.node_overhead_ratio < 1
    assert {"pue", "idle_ratio", "node_overhead_ratio"} <= set(power.sources)
