import numpy as np
import pytest

from meshwright.cost.energy import PowerModel, activity_ratio, device_power_w, facility_power_w, run_energy
from meshwright.errors import InputError
from meshwright.units import HOUR_S

H100 = PowerModel(idle_w=100.0, tdp_w=700.0, node_w=350.0, pue_ratio=1.1)


def test_power_spans_idle_to_design_power():
    assert device_power_w(power=H100, activity_ratio=np.array([0.0, 0.5, 1.0])).tolist() == [100, 400, 700]


def test_a_full_node_draws_what_was_measured():
    """8 H100 near full use: 8.4 kW at the node (Latif et al., arXiv 2412.08602)."""
    node = PowerModel(idle_w=100.0, tdp_w=700.0, node_w=350.0, pue_ratio=1.0)
    assert facility_power_w(power=node, activity_ratio=1.0, num_devices=8) == pytest.approx(8400)


def test_activity_weighs_components_by_time():
    intensity = {"matmul": 1.0, "attention": 0.8, "other": 0.2}
    components = {"matmul": 6.0, "attention": 2.0, "bubble": 1.0, "exposed tensor": 1.0}
    assert activity_ratio(components_s=components, intensity_ratio=intensity) == pytest.approx(0.8)


def test_activity_needs_a_value_for_the_rest():
    with pytest.raises(InputError, match="other"):
        activity_ratio(components_s={"matmul": 1.0}, intensity_ratio={"matmul": 1.0})


def test_energy_of_a_run():
    """1000 devices at (400 + 350) W x 1.1 for 100 h: 82.5 MWh."""
    run = run_energy(
        power=H100, activity_ratio=0.5, num_devices=1000, wall_s=100 * HOUR_S, num_tokens=1e12, grid_kg_per_kwh=0.4
    )
    assert run.facility_mwh == pytest.approx(82.5)
    assert run.facility_j_per_token == pytest.approx(0.297)
    assert run.co2_kg == pytest.approx(33_000)
    assert run.device_j / run.facility_j == pytest.approx(400 / 825)


def test_idle_time_draws_idle_power():
    half = run_energy(power=H100, activity_ratio=1.0, num_devices=1, wall_s=1.0, num_tokens=1, idle_ratio=0.5)
    assert half.device_w == pytest.approx((700 + 100) / 2)


@pytest.mark.parametrize("wrong", [{"idle_w": 800.0}, {"pue_ratio": 0.9}])
def test_impossible_power_is_refused(wrong):
    values = {"idle_w": 100.0, "tdp_w": 700.0, "node_w": 350.0, "pue_ratio": 1.1}
    with pytest.raises(InputError, match="got"):
        PowerModel(**(values | wrong))
