"""One machine, as so many processes that share it see it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from meshwright.calibration.communication import Curve, MeasuredCollectives
from meshwright.calibration.correction import fit_correction
from meshwright.calibration.device import PROCESSOR_SECONDS, Check, DeviceCalibration, Kernels, load, to_document
from meshwright.calibration.parameters import MeasuredParameter, prior
from meshwright.errors import InputError
from meshwright.specs.hardware import Accelerator, Fabric

CORES = 8
PEAKS = {"fp32": 1e12, "bf16": 4e12}


def correction(value: float):
    """Of one axis, the same everywhere."""
    x = np.arange(6.0)[:, None]
    return fit_correction(x, np.full(6, value), np.full(6, 0.02), axes=("elements",))


def kernels(share: float, *, factor: float) -> Kernels:
    """Kernels with a `share` of the machine, whose elementwise kernels move `factor` times the least bytes."""
    return Kernels(
        peak_flops_per_s={name: share * rate for name, rate in PEAKS.items()},
        memory_bytes_per_s=share * 50e9,
        parameters={"elementwise_factor": MeasuredParameter(value=factor, sd=0.1)},
        corrections={"elementwise/swiglu/fp32": correction(math.log(factor))},
    )


def values(machine: DeviceCalibration, count: int) -> dict[str, float]:
    """Parameters of one of `count` processes."""
    return {name: p.prior for name, p in machine.calibration(num_devices=count).parameters.items()}


@pytest.fixture
def machine() -> DeviceCalibration:
    """Eight cores; half of them reach more than half of its memory rate."""
    return DeviceCalibration(
        accelerator=Accelerator(
            name="a device", vendor="this machine", architecture="cpu", peak_flops_per_s=PEAKS,
            memory_bytes=64 * 2**30, memory_bytes_per_s=50e9, num_compute_units=0,
            scale_up_bytes_per_s=25e9, output_tiles=False,
        ),
        fabric=Fabric(
            name="its memory", scale_up_bytes_per_s=25e9, scale_out_bytes_per_s=25e9,
            scale_up_peer_bytes_per_s=25e9, scale_up_domain=2, scale_up_latency_s=1e-5, scale_out_latency_s=1e-5,
        ),
        num_devices=1,
        shares_host=True,
        num_cores=CORES,
        parameters={
            "elementwise_factor": MeasuredParameter(value=2.0, sd=0.1),
            "general_factor": MeasuredParameter(value=1.1, sd=0.0),
            "kernel_s": MeasuredParameter(value=2e-6, sd=0.02),
            "step_s": MeasuredParameter(value=3e-3, sd=0.0),
        },
        corrections={"elementwise/swiglu/fp32": correction(0.5)},
        by_threads={4: kernels(0.6, factor=1.5), 1: kernels(0.2, factor=1.25)},
        collectives=MeasuredCollectives(
            curves={"all_reduce": {2: Curve(size_bytes=(1024.0, 1048576.0), seconds=(1e-4, 1e-3))}}
        ),
        made="by a test",
        details={"errors": {}},
    )  # fmt: skip


class TestKernelsByThreads:
    def test_one_process_has_the_whole_machine(self, machine):
        assert machine.cluster(1).accelerator == machine.accelerator
        assert machine.calibration(num_devices=1).corrections == machine.corrections

    @pytest.mark.parametrize(("count", "threads"), [(2, 4), (8, 1)])
    def test_a_process_is_as_fast_as_was_measured_with_its_threads(self, machine, count, threads):
        own = machine.by_threads[threads]
        accelerator = machine.cluster(count).accelerator
        assert accelerator.peak_flops_per_s == own.peak_flops_per_s
        assert accelerator.memory_bytes_per_s == own.memory_bytes_per_s
        assert accelerator.memory_bytes == machine.accelerator.memory_bytes // count
        calibration = machine.calibration(num_devices=count)
        assert calibration.corrections == own.corrections
        assert values(machine, count)["elementwise_factor"] == own.parameters["elementwise_factor"].value

    def test_threads_that_were_not_measured_are_scaled_from_the_nearest(self, machine):
        """Of four processes each has two threads; four and one are as near, in doublings, so either may be taken."""
        peak = machine.cluster(4).accelerator.peak_flops_per_s["bf16"]
        of_each = [k.peak_flops_per_s["bf16"] * 2 / threads for threads, k in machine.by_threads.items()]
        assert peak in [pytest.approx(x) for x in of_each]
        two = replace(machine, by_threads={4: machine.by_threads[4]})
        assert two.cluster(4).accelerator.peak_flops_per_s["bf16"] == pytest.approx(of_each[0])
        assert two.cluster(4).accelerator.memory_bytes_per_s == pytest.approx(0.6 * 50e9 / 2)

    def test_without_them_processes_have_equal_parts_of_the_machine(self, machine):
        even = replace(machine, by_threads={})
        accelerator = even.cluster(4).accelerator
        assert accelerator.peak_flops_per_s == {name: rate / 4 for name, rate in PEAKS.items()}
        assert accelerator.memory_bytes_per_s == 50e9 / 4
        assert even.calibration(num_devices=4).corrections == machine.corrections


class TestOversubscription:
    @pytest.mark.parametrize(("count", "cpu_oversubscription"), [(1, 1), (2, 1), (8, 1), (12, 1.5), (32, 4)])
    def test_it_is_processes_for_each_core(self, machine, count, cpu_oversubscription):
        assert machine.cpu_oversubscription(count) == cpu_oversubscription
        assert machine.cluster(count).accelerator.cpu_oversubscription == cpu_oversubscription

    def test_those_of_one_core_take_turns(self, machine):
        one, four = machine.cluster(8).accelerator, machine.cluster(32).accelerator
        assert four.memory_bytes_per_s == pytest.approx(one.memory_bytes_per_s / 4)
        assert four.peak_flops_per_s["fp32"] == pytest.approx(one.peak_flops_per_s["fp32"] / 4)

    def test_their_own_seconds_last_longer_too(self, machine):
        at = {count: values(machine, count) for count in (8, 32)}
        for name in PROCESSOR_SECONDS & machine.parameters.keys():
            assert at[8][name] == machine.parameters[name].value
            assert at[32][name] == pytest.approx(4 * machine.parameters[name].value)
        assert at[32]["elementwise_factor"] == at[8]["elementwise_factor"]

    def test_collectives_know_the_processes_of_their_host(self, machine):
        assert machine.calibration(num_devices=8).collectives.processes_per_host == 8

    def test_gpus_are_not_oversubscribed(self, machine):
        gpus = replace(machine, shares_host=False, num_devices=16, num_cores=8)
        assert gpus.cluster(16).accelerator == machine.accelerator
        assert values(gpus, 16)["step_s"] == machine.parameters["step_s"].value
        assert gpus.calibration(num_devices=16).collectives.processes_per_host == 1


class TestSharing:
    def factor(self, machine, count: int) -> float:
        """Factor of contention on a step."""
        return values(machine, count)["general_factor"] / machine.parameters["general_factor"].value

    def test_measured_numbers_of_processes_have_their_own(self, machine):
        shared = replace(machine, contention={1: 1.0, 2: 1.2, 4: 1.5})
        assert [self.factor(shared, n) for n in (1, 2, 4)] == pytest.approx([1.0, 1.2, 1.5])

    def test_others_lie_on_a_line_between_them(self, machine):
        shared = replace(machine, contention={1: 1.0, 2: 1.2, 8: 1.8})
        assert self.factor(shared, 4) == pytest.approx(math.sqrt(1.2 * 1.8))

    def test_beyond_them_it_grows_no_more(self, machine):
        assert self.factor(replace(machine, contention={1: 1.0, 2: 1.2}), 8) == pytest.approx(1.2)

    def test_other_parameters_have_theirs(self, machine):
        shared = replace(machine, by_processes={"elementwise_factor": {2: 1.0, 4: 2.25}})
        plain = [values(machine, n)["elementwise_factor"] for n in (1, 2, 3, 4, 8)]
        found = [values(shared, n)["elementwise_factor"] for n in (1, 2, 3, 4, 8)]
        factors = [b / a for a, b in zip(plain, found, strict=True)]
        assert factors == pytest.approx([1, 1, 2.25 ** math.log2(1.5), 2.25, 2.25])

    def test_without_any_nothing_changes(self, machine):
        assert self.factor(machine, 4) == 1


def test_what_whole_steps_left_unexplained_takes_the_place_of_the_residual(machine):
    """The error of sources that nobody had seen goes with it."""
    of_strangers = replace(prior(), stranger_sd={"dense": 0.3})
    shipped = machine.calibration(of_strangers)
    measured = replace(machine, unexplained_sd=0.04).calibration(of_strangers)
    assert shipped.stranger_sd == of_strangers.stranger_sd
    assert shipped.residual_sd == prior().residual_sd
    assert measured.residual_sd == {"dense": 0.04, "moe": 0.04}
    assert measured.stranger_sd == {}


@pytest.fixture
def complete(machine) -> DeviceCalibration:
    return replace(
        machine,
        contention={1: 1.0, 2: 1.2, 4: 1.5},
        by_processes={"step_s": {2: 1.0, 4: 0.7}},
        checks=(Check(run="a run file", num_processes=2, seconds=0.02, spread=1.1),),
        unexplained_sd=0.05,
    )


@pytest.fixture
def file(complete, tmp_path):
    path = tmp_path / "device.json"
    path.write_text(json.dumps(to_document(complete)))
    return path


def test_a_document_reads_back(complete, file):
    again = load(file)
    assert to_document(again) == to_document(complete)
    for name in (
        "accelerator",
        "fabric",
        "num_cores",
        "contention",
        "by_processes",
        "checks",
        "unexplained_sd",
        "collectives",
        "parameters",
    ):
        assert getattr(again, name) == getattr(complete, name), name
    for count, own in complete.by_threads.items():
        assert again.by_threads[count].parameters == own.parameters
        assert again.by_threads[count].peak_flops_per_s == own.peak_flops_per_s
        assert again.by_threads[count].corrections.keys() == own.corrections.keys()
    assert again.cluster(4) == complete.cluster(4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contention": {"2": 0.0}}, "their contention factors are above 0"),
        ({"contention": {"0": 1.2}}, "numbers of processes and their"),
        ({"by_processes": {"step_s": {"4": -1}}}, "their contention factors are above 0"),
        ({"checks": [{"run": "", "num_processes": 1, "seconds": 0, "spread": 1}]}, "a timed step must have taken time"),
        ({"checks": [{"run": ""}]}, "not a calibration of a device"),
        ({"contention": [1.2]}, "not a calibration of a device"),
        ({"unexplained_sd": "small"}, "not a calibration of a device"),
        ({"num_cores": None}, "not a calibration of a device"),
        ({"measured_collectives": {"all_reduce": {"2": [[2048, 1e-4], [1024, 1e-4]]}}}, "of a collective must rise"),
        ({"by_threads": {"4": {}}}, "'peak_flops_per_s' is missing"),
        ({"by_threads": {"4": {"peak_flops_per_s": {"fp32": -1}, "memory_bytes_per_s": 1e9, "parameters": {},
                               "corrections": {}}}}, "rates of a processor are above 0"),
        ({"by_threads": {"4": {"peak_flops_per_s": {"fp32": 1e9}, "memory_bytes_per_s": 1e9, "corrections": {},
                               "parameters": {"speed": {"value": 1, "sd": 0}}}}}, "has no parameter 'speed'"),
    ],
)  # fmt: skip
def test_an_altered_document_is_refused(file, change, message):
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(InputError, match=message):
        load(file)


@pytest.mark.parametrize(
    "key", ["num_cores", "contention", "by_processes", "checks", "unexplained_sd", "by_threads", "measured_collectives"]
)
def test_a_document_without_one_of_its_parts_is_refused(file, key):
    document = json.loads(file.read_text())
    del document[key]
    file.write_text(json.dumps(document))
    with pytest.raises(InputError, match=f"'{key}' is missing"):
        load(file)
