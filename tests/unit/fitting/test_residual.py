"""Whole steps of a machine whose parameters are known: what they show is found again."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from meshwright.calibration.device import DeviceCalibration, Kernels, to_document
from meshwright.calibration.parameters import MeasuredParameter
from meshwright.cost.uncertainty import Z80
from meshwright.fitting.device import calibrate
from meshwright.fitting.residual import FEWEST_STEPS, _cases, _log_steps, _noise, fit_residual
from meshwright.records.device import DeviceRow, Records, read, row_of
from meshwright.records.measurement import Measurement
from meshwright.records.points import Point, PointFamily, points_of

NOISE = 0.02
SAMPLES = 9
BETWEEN_KERNELS = {
    "general_factor": 1.2, "step_s": 2e-3, "head_factor": 1.3, "elementwise_kernels": 30.0,
    "data_layer_s": 8e-4, "data_collective_s": 6e-4, "data_collective_factor": 1.4, "tensor_collective_s": 5e-4,
    "tensor_collective_factor": 1.2, "pipeline_transfer_s": 4e-4,
}  # fmt: skip
SHARED = {1: 1.0, 2: 1.15, 4: 1.3}


def typical_error(logs: np.ndarray) -> float:
    """The median of |predicted / measured - 1|."""
    return float(np.median(np.abs(np.expm1(logs))))


def trainings(num_processes: int, start: int, stop: int) -> list[Point]:
    points = points_of(PointFamily.TRAINING, device_type="cpu", formats=("fp32",), num_processes=num_processes)
    return list(islice(points, start, stop))


def take(
    machine: DeviceCalibration, points: list[Point], *, noise: float = 0.0, samples: int = SAMPLES
) -> list[DeviceRow]:
    """Steps of `machine`, measured with `noise`."""
    rows = [row_of(p, Measurement(seconds=(1.0,) * samples, calls=1, target_ratio=0.03)) for p in points]
    draw, steps_s = random.Random(3), np.exp(_log_steps([machine], _cases(rows), len(rows))[0])
    measured = []
    for row, step_s in zip(rows, steps_s, strict=True):
        seconds_s = step_s * draw.lognormvariate(0, noise)
        about = tuple(seconds_s * (1 + 0.001 * i) for i in range(-(samples // 2), samples - samples // 2))
        measured.append(row_of(row.point, Measurement(seconds=about, calls=1, target_ratio=0.03)))
    return measured


@pytest.fixture(scope="module")
def records(machine, tmp_path_factory) -> Records:
    return read(machine.record(tmp_path_factory.mktemp("few"), count=36))


@pytest.fixture(scope="module")
def kernels(records) -> DeviceCalibration:
    """The calibration of kernels and collectives without steps."""
    return calibrate([records])


@pytest.fixture(scope="module")
def truth(kernels) -> DeviceCalibration:
    between = {name: MeasuredParameter(value=x, sd=0.0) for name, x in BETWEEN_KERNELS.items()}
    return replace(kernels, parameters={**kernels.parameters, **between}, contention=SHARED)


@pytest.fixture(scope="module")
def seen(truth) -> list[DeviceRow]:
    points = trainings(1, 0, 16) + trainings(2, 0, 20) + trainings(4, 0, 15)
    return take(truth, points, noise=NOISE)


@pytest.fixture(scope="module")
def unseen(truth) -> list[DeviceRow]:
    return take(truth, trainings(1, 16, 26) + trainings(2, 20, 30) + trainings(4, 15, 25))


@pytest.fixture(scope="module")
def added(kernels, seen):
    found = fit_residual(kernels, seen)
    assert found is not None
    return found


def errors(machine: DeviceCalibration, rows: list[DeviceRow]) -> np.ndarray:
    """log(predicted / measured)."""
    measured = np.log([row.seconds_median for row in rows])
    return _log_steps([machine], _cases(rows), len(rows))[0] - measured


@pytest.mark.when_touched  # test_steps_that_were_not_seen_are_predicted has the residual
def test_kernels_without_steps_miss_the_residual(kernels, added, seen):
    assert added.before == pytest.approx(errors(kernels, seen))
    assert typical_error(added.before) > 0.1


def test_steps_that_were_not_seen_are_predicted(kernels, added, unseen):
    off = errors(added.device, unseen)
    assert typical_error(off) < 1.5 * NOISE
    assert np.abs(off).max() < 5 * NOISE
    assert typical_error(off) < 0.2 * typical_error(errors(kernels, unseen))


def test_a_step_is_predicted_from_the_others_within_little_more_than_its_noise(added, seen):
    assert typical_error(added.leave_one_out) < 1.5 * NOISE
    fitted = errors(added.device, seen)
    assert np.all(np.abs(added.leave_one_out) >= np.abs(fitted))
    assert np.all(np.sign(added.leave_one_out) == np.sign(fitted))


def test_the_interval_holds_four_of_five_steps_in_leave_one_out(added):
    assert np.mean(np.abs(added.leave_one_out) <= Z80 * added.device.unexplained_sd) >= 0.8


@pytest.mark.when_touched  # leave-one-out errors are held to the noise above
def test_leaving_one_out_says_what_fitting_without_it_does(kernels, added, seen):
    """The linear formula against the fit itself, for the step that it misses most."""
    worst = int(np.argmax(np.abs(added.leave_one_out)))
    without = fit_residual(kernels, seen[:worst] + seen[worst + 1 :])
    assert without is not None
    assert float(errors(without.device, [seen[worst]])[0]) == pytest.approx(added.leave_one_out[worst], abs=0.5 * NOISE)


@pytest.mark.when_touched  # test_steps_that_were_not_seen_are_predicted fits such steps
def test_one_spoiled_step_is_let_go_of(kernels, seen, unseen):
    """It took three times as long, because something else ran."""
    names = ("seconds_median", "seconds_low", "seconds_high")
    spoiled = list(seen)
    spoiled[7] = replace(seen[7], **{name: 3 * getattr(seen[7], name) for name in names})
    found = fit_residual(kernels, spoiled)
    assert found is not None
    assert np.argmax(np.abs(found.leave_one_out)) == 7
    assert found.leave_one_out[7] == pytest.approx(-np.log(3), abs=0.15)
    assert typical_error(errors(found.device, unseen)) < 1.5 * NOISE


def test_too_few_steps_say_nothing(kernels, seen):
    assert fit_residual(kernels, seen[: FEWEST_STEPS - 1]) is None
    assert fit_residual(kernels, []) is None


def test_only_parameters_of_the_measured_axes_are_fitted(kernels, seen):
    """Steps of one process give no information on collectives or contention."""
    found = fit_residual(kernels, [row for row in seen if row.point.num_processes == 1])
    assert found is not None
    assert found.device.contention == {}
    assert not {name for name in found.device.parameters if "exchange" in name}


@pytest.mark.when_touched  # test_calibrating_with_steps has four processes
def test_the_time_of_more_processes_around_collectives_is_found(kernels, truth):
    """Four wait for each other less than half as long as two would say."""
    machine = replace(truth, by_processes={"data_collective_s": {2: 1.0, 4: 0.2}})
    rows = take(machine, trainings(1, 0, 16) + trainings(2, 0, 24) + trainings(4, 0, 24), noise=NOISE)
    found = fit_residual(kernels, rows)
    assert found is not None
    factors = found.device.by_processes["data_collective_s"]
    assert factors[2] == 1
    assert factors[4] < 0.7
    assert typical_error(errors(found.device, take(machine, trainings(4, 24, 34)))) < 2 * NOISE


def test_a_gpu_keeps_what_belongs_to_a_processor(kernels, seen):
    gpu = replace(kernels, shares_host=False, num_devices=4)
    alone = [row for row in seen if row.point.num_processes == 1]
    found = fit_residual(gpu, alone)
    assert found is not None
    new = found.device.parameters.keys() - gpu.parameters.keys()
    assert new <= {"general_factor", "step_s"}


def test_parts_of_the_machine_keep_their_distance_from_the_whole(kernels, seen):
    """A factor on a kernel found from steps also applies with fewer threads."""
    share = Kernels(
        peak_flops_per_s=kernels.accelerator.peak_flops_per_s,
        memory_bytes_per_s=kernels.accelerator.memory_bytes_per_s,
        parameters={"elementwise_factor": MeasuredParameter(value=1.5, sd=0.1)},
        corrections={},
    )
    before = replace(kernels, by_threads={4: share})
    found = fit_residual(before, [row for row in seen if row.point.num_processes == 1])
    assert found is not None
    moved = found.device.parameters["elementwise_factor"].value / kernels.parameters["elementwise_factor"].value
    assert found.device.by_threads[4].parameters["elementwise_factor"].value == pytest.approx(1.5 * moved)


def test_few_repetitions_count_for_less(kernels, seen):
    few = replace(seen[0], samples=2)
    assert _noise(few) > 2 * _noise(seen[0])


@pytest.mark.when_touched  # test_steps_that_were_not_seen_are_predicted has its parts
def test_calibrating_with_steps_does_all_of_this(records, seen, unseen):
    found = calibrate([replace(records, rows=records.rows + tuple(seen))])
    assert found.unexplained_sd is not None
    assert set(found.contention) == {1, 2, 4}
    told = found.details["errors"]["training"]
    assert told["num_points"] == len(seen)
    assert told["median"] < 1.5 * NOISE < told["formula_median"]
    assert typical_error(errors(found, unseen)) < 1.5 * NOISE
    assert json.loads(json.dumps(to_document(found)))["errors"]["training"] == told
