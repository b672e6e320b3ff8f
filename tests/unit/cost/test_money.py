import numpy as np
import pytest

from meshwright.cost.money import capital_recovery_ratio, owned_usd_per_device_hour, run_cost, usd_per_million_tokens
from meshwright.units import HOUR_S, YEAR_S


def test_cost_of_a_run():
    cost = run_cost(num_devices=1000, wall_s=100 * HOUR_S, num_tokens=2e12, usd_per_device_hour=2.5)
    assert cost.device_hours == pytest.approx(100_000)
    assert cost.usd == pytest.approx(250_000)
    assert cost.usd_per_million_tokens == pytest.approx(0.125)


def test_spares_are_paid_for():
    with_spares, without = (
        run_cost(num_devices=90, num_spare_devices=k, wall_s=HOUR_S, num_tokens=1e6, usd_per_device_hour=1.0).usd
        for k in (10, 0)
    )
    assert (with_spares, without) == (100, 90)


def test_rate_and_run_agree():
    """A run whose wall time follows from rate and goodput has the price per token of the rate."""
    num_devices, rate, goodput, num_tokens = 512, 8000.0, 0.9, 1e12
    wall_s = num_tokens / (num_devices * rate * goodput)
    run = run_cost(num_devices=num_devices, wall_s=wall_s, num_tokens=num_tokens, usd_per_device_hour=3.0)
    assert usd_per_million_tokens(
        usd_per_device_hour=3.0, tokens_per_s_per_device=rate, goodput_ratio=goodput
    ) == pytest.approx(run.usd_per_million_tokens)


def test_capital_recovery_repays_the_loan():
    rate, years = 0.08, 5
    balance = 1.0
    for _ in range(years):
        balance = balance * (1 + rate) - capital_recovery_ratio(yearly_rate_ratio=rate, life_years=years)
    assert balance == pytest.approx(0.0, abs=1e-12)
    assert capital_recovery_ratio(yearly_rate_ratio=np.array([0.0, 0.08]), life_years=5) == pytest.approx(
        [0.2, 0.25046], rel=1e-4
    )


def test_owned_device_without_interest():
    """40,000 USD over 5 years, a quarter comes back, 1.5 kW at 0.08 USD/kWh, in use half of the hours."""
    price = owned_usd_per_device_hour(
        capital_usd=40_000,
        life_years=5,
        yearly_rate_ratio=0.0,
        residual_ratio=0.25,
        facility_w=1500,
        usd_per_kwh=0.08,
        utilization_ratio=0.5,
    )
    assert price == pytest.approx((30_000 / (5 * YEAR_S / HOUR_S) + 0.12) / 0.5)


def test_residual_value_is_worth_its_discounted_amount():
    """Owning with residual S costs what owning at capital C - S/(1+r)^n would."""
    owned = {"life_years": 4, "yearly_rate_ratio": 0.1}
    with_residual = owned_usd_per_device_hour(capital_usd=30_000, residual_ratio=0.2, **owned)
    assert with_residual == pytest.approx(owned_usd_per_device_hour(capital_usd=30_000 - 6_000 / 1.1**4, **owned))
