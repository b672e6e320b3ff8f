import pytest

from meshwright.cost.goodput import checkpoint_cost, restart_cost, spares_exhausted_ratio, spares_needed
from meshwright.errors import InputError


def test_blocking_save_waits_for_storage_and_asynchronous_save_does_not():
    size = {
        "bytes_per_device": 10e9,
        "num_devices": 1000,
        "given": {"storage_bytes_per_s": 1e11, "staging_bytes_per_s": 1e10},
    }
    blocking = checkpoint_cost(**size, asynchronous=False)
    background = checkpoint_cost(**size)
    assert blocking.stall_s - background.stall_s == pytest.approx(100.0 - 1.0)
    assert (blocking.lag_s, background.lag_s) == (0.0, pytest.approx(100.0))


def test_restart_is_the_sum_of_its_parts():
    given = {"detect_s": 1.0, "reschedule_s": 2.0, "warm_up_s": 4.0, "storage_bytes_per_s": 1e12}
    assert restart_cost(bytes_per_device=8e9, num_devices=1000, given=given).total_s == pytest.approx(15.0)


def test_spares_for_no_waiting_at_all_are_refused():
    with pytest.raises(InputError, match="inside"):
        spares_needed(nodes_in_repair=1.0, waiting_ratio=0.0)


def test_erlang_loss_known_values():
    assert spares_exhausted_ratio(num_spares=0, nodes_in_repair=0.25) == pytest.approx(0.2)
    assert spares_exhausted_ratio(num_spares=9, nodes_in_repair=5.0) == pytest.approx(0.018385, abs=1e-6)


@pytest.mark.parametrize("load", [0.01, 3.0, 140.0, 2000.0])
def test_spares_needed_is_the_smallest_that_suffices(load):
    k = spares_needed(nodes_in_repair=load, waiting_ratio=1e-3)
    assert spares_exhausted_ratio(num_spares=k, nodes_in_repair=load) <= 1e-3
    assert k == 0 or spares_exhausted_ratio(num_spares=k - 1, nodes_in_repair=load) > 1e-3
