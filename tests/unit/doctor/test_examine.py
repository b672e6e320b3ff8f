"""Whole nodes: parts that are well, faults, and parts that could not be seen."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from importlib import util as importlib_util
from pathlib import Path

import pytest
from tests.every_member import check_every

from meshwright.doctor.checks import GROUP_NAMES, groups
from meshwright.doctor.checks.process import container, memory_limit_bytes, processor_limit
from meshwright.doctor.host import CommandOutput, Unseen, run_command
from meshwright.doctor.verdict import CheckStatus, judge, limits

RECORDED = Path(__file__).parent / "recorded"
CARD = "/sys/class/drm/card{}/device"
PORT = "/sys/class/infiniband/mlx5_{}/ports/1"


@pytest.fixture(autouse=True)
def _torch_is_installed(monkeypatch):
    """Measurements are recorded, so these tests are the same with PyTorch and without."""
    monkeypatch.setattr("meshwright.doctor.checks.rates.find_spec", lambda name: object())


def statuses(verdicts):
    return [v.status.value for v in verdicts]


def bad(found):
    return {(v.check, v.where) for v in found[""].verdicts if v.status in (CheckStatus.WARN, CheckStatus.FAIL)}


# --- healthy nodes ---


def test_a_healthy_node_of_eight_mi355x(look, healthy):
    found = look(healthy)
    assert bad(found) == set()
    assert found[""].status is CheckStatus.PASS
    assert {v.check for v in found[""].verdicts if v.status is CheckStatus.SKIPPED} == set()
    devices = found[""].node.devices
    assert [d.accelerator for d in devices.found] == ["mi355x"] * 8
    assert (devices.driver, devices.runtime) == ("6.14.14", "ROCm 7.0.0-38")
    one = devices.found[3]
    assert (one.address, one.scale_up_links, one.highest_clock_mhz, one.clock_mhz) == ("0000:75:00.0", 7, 2400, 133)
    assert (one.uncorrected_errors, one.corrected_errors, one.power_limit_w) == (0, 3, 1400)


def test_a_healthy_node_of_eight_h200(look, nvidia):
    found = look(nvidia)
    assert bad(found) == set()
    devices = found[""].node.devices
    assert [d.accelerator for d in devices.found] == ["h200"] * 8
    assert (devices.driver, devices.runtime, devices.tool_seconds) == ("570.172.08", "CUDA 12.8", 0.9)
    one = devices.found[0]
    assert (one.scale_up_links, one.pcie_width, one.slowdown_temperature_c) == (18, 16, 87)
    assert found[""].facts["device links"] == "8 x PCIe 5 x16"
    assert (one.uncorrected_errors, one.corrected_errors) == (0, 7), "since the driver started, not for ever"
    assert one.select.startswith("CUDA_VISIBLE_DEVICES=GPU-")


def test_every_check_name_is_a_limit_or_decides_by_itself(look, healthy):
    named = {v.check for v in look(healthy)[""].verdicts}
    rare = {"rates.all-reduce", "clocks.credible", "devices.repair", "stress.rate"}
    assert set(limits()) - named <= rare
    assert tuple(groups()) == GROUP_NAMES


def test_every_limit_has_a_source_and_is_crossed_somewhere():
    for limit in limits().values():
        assert limit.source, limit.name
        low, high = (1e-9, 1e12) if limit.fail_below or limit.warn_below or limit.fail_below == 0.0 else (0.0, 1e12)
        if limit.fail_below == 0.0:
            low = -1.0
        seen = {judge(limit.name, value, expected=1.0).status for value in (low, high)}
        assert seen - {CheckStatus.PASS}, limit.name


# --- devices ---


def test_a_device_that_its_driver_lost(look, healthy):
    healthy.remove(CARD.format(4))
    found = look(healthy, num_expected_devices=8)
    lost, counted = found["devices.present"]
    assert (lost.status, lost.where) == (CheckStatus.FAIL, "0000:75:00.0")
    assert (counted.status, counted.measured, counted.expected) == (CheckStatus.FAIL, 7, 8)


def test_a_device_that_is_only_not_shown_is_a_warning(look, healthy):
    healthy.remove(CARD.format(4))
    environment = {"SLURM_JOB_GPUS": "0,1,2,4,5,6,7"}
    assert look(healthy, environment=environment)["devices.present"][0].status is CheckStatus.WARN


def test_a_device_off_the_bus_is_lost_wherever_one_looks(look, healthy, tmp_path):
    healthy.remove(CARD.format(4))
    config = tmp_path / "node/sys/bus/pci/devices/0000:75:00.0/config"
    config.parent.mkdir(parents=True)
    config.write_bytes(b"\xff" * 64)
    verdict = look(healthy, environment={"SLURM_JOB_GPUS": "0"})["devices.present"][0]
    assert (verdict.status, verdict.message) == (CheckStatus.FAIL, "it no longer answers on the bus")


def test_devices_are_selected_as_the_compute_driver_counts_them(look, healthy):
    """The node with the highest bus address comes first in its list."""
    first, last = ("/sys/class/kfd/kfd/topology/nodes/2/properties", "/sys/class/kfd/kfd/topology/nodes/9/properties")
    healthy.files[first], healthy.files[last] = healthy.files[last], healthy.files[first]
    selected = [d.select.partition("=")[2] for d in look(healthy)[""].node.devices.found]
    assert selected == ["7", "1", "2", "3", "4", "5", "6", "0"]


def test_a_lost_device_of_nvidia_speaks_instead_of_a_value(look, nvidia):
    log = nvidia.commands["nvidia-smi -q -x"]
    text = log.stdout.replace("<product_name>NVIDIA H200<", "<product_name>Unknown Error<", 1)
    nvidia.commands["nvidia-smi -q -x"] = dataclasses.replace(log, stdout=text)
    assert look(nvidia)["devices.present"][0].where == "0000:05:00.0"


def test_a_driver_that_differs_from_its_library(look, nvidia):
    text = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.172"
    nvidia.commands["nvidia-smi -q -x"] = CommandOutput(code=18, stdout=text)
    verdict = look(nvidia)["devices.present"][0]
    assert (verdict.status, verdict.measured) == (CheckStatus.FAIL, 0)
    assert "570.172" in verdict.message


def test_a_tool_that_is_slow(look, nvidia):
    log = nvidia.commands["nvidia-smi -q -x"]
    nvidia.commands["nvidia-smi -q -x"] = dataclasses.replace(log, seconds=31.0)
    assert bad(look(nvidia)) == {("devices.tool-seconds", "")}


def test_fewer_devices_than_usual_is_a_warning_unless_expected(look, healthy):
    for index in (6, 7):
        healthy.remove(CARD.format(index + 1))
        healthy.remove(f"/sys/bus/pci/devices/0000:{('e5', 'f5')[index - 6]}:00.0")
    assert statuses(look(healthy)["devices.present"]) == ["warn"]
    assert statuses(look(healthy, num_expected_devices=6)["devices.present"]) == ["pass"]


def test_an_unknown_device_is_unknown_and_never_another_one(look, healthy):
    for index in range(8):
        healthy.files[CARD.format(index + 1) + "/device"] = "0x7fff\n"
    found = look(healthy)
    assert statuses(found["devices.known"]) == ["warn"] * 8
    assert found["devices.known"][0].measured == "PCI device 1002:7fff"
    assert set(statuses(found["rates.gemm"])) == {"skipped"}
    assert found["rates.gemm"][0].measured == 1400.0, "measured all the same"
    assert found["rates.gemm"][0].expected is None


@pytest.mark.parametrize(
    ("command", "document"),
    [
        ("amd-smi", [{"gpu": 0, "asic": {"market_name": "AMD Instinct MI999X"}, "bus": {"bdf": "0000:05:00.0"}}]),
        ("amd-smi", {"gpu_data": [{"asic": {"market_name": "AMD Instinct MI999X"}, "bus": {"bdf": "0000:05:00.0"}}]}),
        ("rocm-smi", {"card0": {"Card Series": "AMD Instinct MI999X", "PCI Bus": "0000:05:00.0"}, "system": {}}),
    ],
)  # fmt: skip
def test_the_tool_names_what_the_table_does_not(look, healthy, command, document):
    healthy.files[CARD.format(1) + "/device"] = "0x7fff\n"
    del healthy.commands["amd-smi"]
    healthy.commands[command] = json.dumps(document)
    verdict = look(healthy)["devices.known"][0]
    assert (verdict.measured, verdict.status) == ("AMD Instinct MI999X", CheckStatus.WARN)


def test_a_clock_that_was_left_low(look, healthy):
    healthy.files[CARD.format(3) + "/pp_dpm_sclk"] = "0: 500Mhz *\n1: 1300Mhz\n"
    verdict = look(healthy)["clocks.highest"][2]
    assert (verdict.status, verdict.measured, verdict.expected) == (CheckStatus.FAIL, 1300, 2400)


def test_a_clock_that_cannot_be_is_not_believed(look, healthy):
    healthy.files[CARD.format(3) + "/pp_dpm_sclk"] = "0: 500Mhz\n1: 65535Mhz *\n"
    found = look(healthy)
    assert bad(found) == {("clocks.credible", "device 2")}
    assert len(found["clocks.highest"]) == 7


def test_a_device_that_slows_itself_down(look, nvidia):
    log = nvidia.commands["nvidia-smi -q -x"]
    tag = "clocks_event_reason_hw_thermal_slowdown>"
    text = log.stdout.replace(f"<{tag}Not Active", f"<{tag}Active", 1).replace(">29 C<", ">88 C<", 1)
    nvidia.commands["nvidia-smi -q -x"] = dataclasses.replace(log, stdout=text)
    found = look(nvidia)
    assert bad(found) == {("clocks.slowdown", "device 0"), ("temperature.margin", "device 0")}
    assert found["clocks.slowdown"][0].measured == "too hot (hardware)"


def test_older_drivers_call_events_throttling(look, nvidia):
    log = nvidia.commands["nvidia-smi -q -x"]
    text = log.stdout.replace("clocks_event_reason", "clocks_throttle_reason").replace(
        "gpu_power_readings", "power_readings"
    )
    text = text.replace("clocks_throttle_reason_hw_slowdown>Not Active", "clocks_throttle_reason_hw_slowdown>Active", 1)
    nvidia.commands["nvidia-smi -q -x"] = dataclasses.replace(log, stdout=text)
    assert bad(look(nvidia)) == {("clocks.slowdown", "device 0")}


def test_memory_errors_and_rows_that_cannot_be_replaced(look, nvidia):
    log = nvidia.commands["nvidia-smi -q -x"]
    text = log.stdout.replace("<dram_uncorrectable>0<", "<dram_uncorrectable>2<", 1)
    text = text.replace("<remapped_row_failure>No<", "<remapped_row_failure>Yes<", 1)
    nvidia.commands["nvidia-smi -q -x"] = dataclasses.replace(log, stdout=text)
    assert bad(look(nvidia)) == {("devices.errors", "device 0"), ("devices.repair", "device 0")}


@pytest.mark.parametrize(
    ("vram", "status", "name"),
    [
        (64 * 2**30, CheckStatus.FAIL, "python3"),
        (2**28, CheckStatus.WARN, "exporter"),
        (64 * 2**30, CheckStatus.FAIL, None),
    ],
)
def test_somebody_elses_process(look, healthy, vram, status, name):
    healthy.files["/sys/class/kfd/kfd/proc/4711/vram_5002"] = f"{vram}\n"
    if name is None:
        healthy.files["/.dockerenv"] = ""
    else:
        healthy.files["/proc/4711/comm"] = f"{name}\n"
    verdict = look(healthy)["devices.processes"][2]
    assert (verdict.status, verdict.measured) == (status, 4711)
    assert verdict.message.startswith(name or "a process that cannot be seen from this container")


def test_a_link_between_two_devices_is_down(look, healthy, nvidia):
    for node in (2, 5):
        healthy.remove(f"/sys/class/kfd/kfd/topology/nodes/{node}/io_links/6")
    assert bad(look(healthy)) == {("links.scale-up", "device 0"), ("links.scale-up", "device 3")}


def test_an_nvlink_is_down(look, nvidia):
    text = nvidia.commands["nvidia-smi nvlink --status"]
    nvidia.commands["nvidia-smi nvlink --status"] = text.replace("Link 3: 26.562 GB/s", "Link 3: <inactive>", 1)
    assert bad(look(nvidia)) == {("links.scale-up", "device 0")}


ALL_INACTIVE = "NVML: Unable to retrieve NVLink information as all links are inActive\n"


def without_links(text, index, *, said=ALL_INACTIVE):
    """The answer of nvidia-smi when a device has no active link."""
    return re.sub(rf"(GPU {index}: .*\n)(?:\t Link .*\n)+", lambda m: m[1] + said, text)


@pytest.mark.parametrize("said", [ALL_INACTIVE, ""])
def test_a_device_whose_links_are_not_listed_has_lost_them(look, nvidia, said):
    text = nvidia.commands["nvidia-smi nvlink --status"]
    nvidia.commands["nvidia-smi nvlink --status"] = without_links(text, 3, said=said)
    assert bad(look(nvidia)) == {("links.scale-up", "device 3")}


def test_a_list_with_one_link_less(look, nvidia):
    text = nvidia.commands["nvidia-smi nvlink --status"]
    nvidia.commands["nvidia-smi nvlink --status"] = text.replace("\t Link 17: 26.562 GB/s\n", "", 1)
    assert bad(look(nvidia)) == {("links.scale-up", "device 0")}


def test_all_links_of_all_devices_are_down(look, nvidia):
    text = nvidia.commands["nvidia-smi nvlink --status"]
    for index in range(8):
        text = without_links(text, index)
    nvidia.commands["nvidia-smi nvlink --status"] = text
    assert bad(look(nvidia)) == {("links.scale-up", f"device {i}") for i in range(8)}
    # cards without a bridge are well
    nvidia.commands["nvidia-smi nvlink --status"] = text.replace("NVIDIA H200", "NVIDIA H100 PCIe")
    assert bad(look(nvidia)) == set()


def test_temperatures_as_distances_to_a_limit(look, nvidia):
    output = nvidia.commands["nvidia-smi -q -x"]
    log = output.stdout.replace("<gpu_temp_slow_threshold>87 C</gpu_temp_slow_threshold>",
                                "<gpu_temp_slow_tlimit_threshold>-2 C</gpu_temp_slow_tlimit_threshold>")  # fmt: skip
    nvidia.commands["nvidia-smi -q -x"] = dataclasses.replace(output, stdout=log)
    found = look(nvidia)
    assert bad(found) == set()
    assert found["temperature.margin"][0].measured == 57 + 2
    nvidia.commands["nvidia-smi -q -x"] = dataclasses.replace(
        output, stdout=log.replace("tlimit>57 C", "tlimit>-3 C", 1)
    )
    assert bad(look(nvidia)) == {("temperature.margin", "device 0")}


@pytest.mark.parametrize(
    ("state", "status", "is_bad"),
    [("Completed", "Success", False), ("In Progress", "N/A", True), ("Completed", "Failure", True),
     ("Not Supported", "N/A", False)],
)  # fmt: skip
def test_registration_with_the_switches(look, nvidia, state, status, is_bad):
    output = nvidia.commands["nvidia-smi -q -x"]
    fabric = f"<fabric><state>{state}</state><status>{status}</status></fabric></gpu>"
    nvidia.commands["nvidia-smi -q -x"] = dataclasses.replace(output, stdout=output.stdout.replace("</gpu>", fabric, 1))
    assert bad(look(nvidia)) == ({("links.fabric", "device 0")} if is_bad else set())


def test_one_partitioned_device_of_eight(look, nvidia):
    output = nvidia.commands["nvidia-smi -q -x"]
    mode = "<mig_mode><current_mig>{}</current_mig>"
    assert mode.format("Disabled") in re.sub(r"\s+", "", output.stdout)
    log = re.sub(r"(<mig_mode>\s*<current_mig>)Disabled", r"\1Enabled", output.stdout, count=1)
    nvidia.commands["nvidia-smi -q -x"] = dataclasses.replace(output, stdout=log)
    assert ("devices.partition", "") in bad(look(nvidia))


def test_memory_errors_of_kernels_with_aca(look, healthy):
    card = CARD.format(8)
    for file in [name for name in healthy.files if name.startswith(f"{card}/ras/")]:
        healthy.remove(file)
    healthy.files[f"{card}/ras/aca_umc"] = "ue: 4\nce: 1\nde: 0\n"
    assert bad(look(healthy)) == {("devices.errors", "device 7")}


def test_a_device_with_fewer_lanes_and_a_power_cap(look, healthy):
    healthy.files[CARD.format(8) + "/current_link_width"] = "8\n"
    healthy.files[CARD.format(8) + "/hwmon/hwmon10/power1_cap"] = "1000000000\n"
    found = look(healthy)
    assert bad(found) == {("links.pcie", "device 7"), ("power.limit", "device 7")}
    assert found["power.limit"][7].message == "71% of the expected value"


# --- rates ---


def test_rates_are_judged_by_what_the_catalogue_expects_of_that_device(look, healthy, nvidia):
    from meshwright.doctor.checks.rates import expected_of

    slow = json.loads(healthy.commands[next(k for k in healthy.commands if k.endswith("device"))].splitlines()[-1])
    amd, other = expected_of("mi355x", num_devices=8), expected_of("h200", num_devices=8)
    assert amd.gemm_flops_per_s > 1.5 * other.gemm_flops_per_s
    key = next(k for k in healthy.commands if k.endswith("device"))
    # a good H200 is a bad MI355X
    healthy.commands[key] = json.dumps(slow | {"gemm_flops_per_s": 720e12})
    assert set(statuses(look(healthy)["rates.gemm"])) == {"fail"}
    assert set(statuses(look(nvidia)["rates.gemm"])) == {"pass"}


def test_a_device_that_hangs_while_it_is_measured_fails(look, healthy):
    key = next(k for k in healthy.commands if k.endswith("device"))
    healthy.commands[f"{key} --select HIP_VISIBLE_DEVICES=3 "] = Unseen("did not end within 120 s")
    found = look(healthy)
    assert [(v.where, v.status) for v in found["rates.gemm"] if v.status is not CheckStatus.PASS] == [
        ("device 3", CheckStatus.FAIL)
    ]
    assert len(found["rates.copy"]) == 7
    assert found["rates.all-reduce"][0].status is CheckStatus.SKIPPED


def test_a_device_that_computes_wrongly_fails_whatever_its_speed(look, healthy):
    key = next(k for k in healthy.commands if k.endswith("device"))
    good = json.loads(healthy.commands[key].splitlines()[-1])
    healthy.commands[f"{key} --select HIP_VISIBLE_DEVICES=3 "] = json.dumps(good | {"is_repeatable": False})
    assert bad(look(healthy)) == {("rates.result", "device 3")}


def test_a_slow_collective_and_a_wrong_one(look, healthy):
    key = next(k for k in healthy.commands if k.endswith("all-reduce"))
    healthy.commands[key] = json.dumps({"all_reduce_bytes_per_s": 20e9, "is_right": True})
    assert bad(look(healthy)) == {("rates.all-reduce", "")}
    healthy.commands[key] = json.dumps({"all_reduce_bytes_per_s": 190e9, "is_right": False})
    assert look(healthy)["rates.all-reduce"][0].message == "the sum is wrong"


def test_pytorch_for_the_cpu_on_a_node_with_devices(look, healthy):
    key = next(k for k in healthy.commands if k.endswith("device"))
    good = json.loads(healthy.commands[key].splitlines()[-1])
    healthy.commands[key] = json.dumps(good | {"device": "cpu"})
    assert set(statuses(look(healthy)["rates.gemm"])) == {"skipped"}


@pytest.mark.parametrize(("options", "word"), [({"rates": False}, "--no-rates"), ({}, "PyTorch is not installed")])
def test_why_nothing_was_measured(look, healthy, monkeypatch, options, word):
    monkeypatch.setattr("meshwright.doctor.checks.rates.find_spec", lambda name: None)
    verdict = look(healthy, **options)["rates.device"][0]
    assert (verdict.status, word in verdict.message) == (CheckStatus.SKIPPED, True)


# --- network ---


def test_a_port_that_is_down_where_its_like_are_up(look, healthy):
    healthy.files[PORT.format(5) + "/state"] = "1: DOWN\n"
    found = look(healthy)
    assert ("rdma.state", "mlx5_5/1") in bad(found)
    assert found["rdma.state"][5].status is CheckStatus.FAIL
    assert found["rdma.total"][0].status is CheckStatus.WARN


def test_an_unused_port_is_a_warning(look, healthy):
    card = "/sys/class/infiniband/mlx5_bond"
    healthy.files |= {f"{card}/board_id": "MT_storage\n", f"{card}/ports/1/state": "1: DOWN\n"}
    assert bad(look(healthy)) == {("rdma.state", "mlx5_bond/1")}


def test_slow_ports_errors_firmware_and_addresses(look, healthy):
    healthy.files[PORT.format(1) + "/rate"] = "200 Gb/sec (2X NDR)\n"
    healthy.files[PORT.format(2) + "/counters/symbol_error"] = "90210\n"
    healthy.files["/sys/class/infiniband/mlx5_3/fw_ver"] = "28.39.0000\n"
    healthy.files[PORT.format(4) + "/gid_attrs/types/3"] = "IB/RoCE v1\n"
    assert bad(look(healthy)) == {
        ("rdma.rate", "mlx5_1/1"), ("rdma.total", ""), ("rdma.errors", "mlx5_2/1"),
        ("rdma.firmware", "MT_0000000838"), ("rdma.address", "mlx5_4/1"),
    }  # fmt: skip


def test_a_card_in_a_slow_slot_and_another_mtu(look, healthy):
    card = "/sys/class/infiniband/mlx5_{}/device/"
    healthy.files[card.format(2) + "current_link_width"] = "8\n"
    healthy.files[card.format(3) + "current_link_speed"] = "16.0 GT/s PCIe\n"
    healthy.files[card.format(4) + "net/eth4/mtu"] = "1500\n"
    healthy.files |= {card.format(5) + f"{which}_link_speed": "Unknown\n" for which in ("current", "max")}
    found = look(healthy)
    assert bad(found) == {("rdma.pcie", "mlx5_2/1"), ("rdma.pcie", "mlx5_3/1"), ("rdma.mtu", "MT_0000000838")}
    facts = found[""].facts
    assert facts["card links"] == "1 x 16.0 GT/s PCIe x16, 5 x 32.0 GT/s PCIe x16, 1 x 32.0 GT/s PCIe x8"
    assert facts["card MTU"] == "1 x 1500, 7 x 9000"


# --- host, limits, log ---


def test_small_shared_memory_of_a_container(look, healthy, tmp_path):
    healthy.files |= {
        "/.dockerenv": "",
        "/proc/self/limits": "Max open files  512 512 files\nMax locked memory  65536 65536 bytes\n",
    }
    healthy.commands[f"df -P -k {tmp_path}/node/dev/shm"] = (
        "Filesystem 1024-blocks Used Available\nshm 65536 0 65536 0% /dev/shm\n"
    )
    healthy.files["/sys/fs/cgroup/user.slice/memory.max"] = f"{64 * 2**30}\n"
    healthy.files["/sys/fs/cgroup/user.slice/cpu.max"] = "1600000 100000\n"
    found = look(healthy)
    assert bad(found) == {
        ("limits.shared-memory", ""), ("limits.open-files", ""), ("limits.locked-memory", ""), ("limits.memory", ""),
        ("limits.processors-per-device", ""),
    }  # fmt: skip
    assert found["limits.shared-memory"][0].measured == 0.0625
    assert found["limits.locked-memory"][0].status is CheckStatus.FAIL
    assert found["limits.processors-per-device"][0].measured == 2.0
    assert found[""].facts["container"] == "docker"


def test_locked_memory_matters_less_without_a_card(look, healthy):
    healthy.remove("/sys/class/infiniband")
    healthy.files["/proc/self/limits"] = "Max locked memory  65536 65536 bytes\n"
    assert look(healthy)["limits.locked-memory"][0].status is CheckStatus.WARN


def test_control_groups_of_both_versions(make_host):
    host = make_host({
        "/proc/self/cgroup": "4:memory:/kubepods/pod1\n1:cpu,cpuacct:/kubepods/pod1\n0::/\n",
        "/sys/fs/cgroup/memory/kubepods/memory.limit_in_bytes": "1000\n",
        "/sys/fs/cgroup/memory/kubepods/pod1/memory.limit_in_bytes": "9223372036854771712\n",
        "/sys/fs/cgroup/cpu/kubepods/pod1/cpu.cfs_quota_us": "250000\n",
        "/sys/fs/cgroup/cpu/kubepods/pod1/cpu.cfs_period_us": "100000\n",
    })  # fmt: skip
    assert (memory_limit_bytes(host), processor_limit(host)) == (1000, 2.5)


CONTAINERS = (
    ({"/proc/1/cgroup": "0::/"}, {}, None),
    ({"/proc/1/cgroup": "1:name=systemd:/kubepods/burstable/x"}, {}, "kubepods"),
    ({"/run/.containerenv": ""}, {}, "podman"),
    ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
    ({}, {"APPTAINER_CONTAINER": "/images/x.sif"}, "apptainer"),
)


def test_kinds_of_containers(make_host, tmp_path):
    def check(case):
        files, environment, kind = case
        shutil.rmtree(tmp_path / "node", ignore_errors=True)
        assert container(make_host(files, {}, environment)) == kind

    check_every(CONTAINERS, check)


def test_a_busy_host_with_bad_memory_and_a_wrong_clock(look, healthy):
    healthy.files |= {
        "/proc/loadavg": "120.00 90 80 4/4000 1\n", "/sys/devices/system/cpu/online": "0-63\n",
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        "/proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 50000 kB\nSwapTotal: 9000000 kB\nSwapFree: 0 kB\n",
        "/sys/devices/system/edac/mc/mc0/ue_count": "1\n",
        "/sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:       0 kB\n",
    }  # fmt: skip
    healthy.commands["chronyc"] = "System time     : 41.2 seconds fast of NTP time\nLeap status     : Normal\n"
    healthy.commands["df -P -k"] = "Filesystem 1024-blocks Used Available\n/dev/md0 100000000 1 100 99% /\n"
    assert bad(look(healthy, chosen=("host",))) == {
        ("host.load", ""), ("host.processors", ""), ("host.governor", ""), ("host.numa", ""), ("memory.free", ""),
        ("memory.swap-used", ""), ("memory.errors", ""), ("disk.free", "/"), ("time.offset", ""),
    }  # fmt: skip


@pytest.mark.parametrize(("others", "unit"), [((), "node"), ((1,), "nodes")])
def test_one_numa_node_is_singular(look, healthy, others, unit):
    healthy.files = {name: text for name, text in healthy.files.items() if "/system/node/" not in name}
    for i in (0, *others):
        folder = f"/sys/devices/system/node/node{i}"
        healthy.files |= {f"{folder}/meminfo": "Node 0 MemTotal: 9 kB\n", f"{folder}/cpulist": "0-63\n"}
    found = look(healthy, chosen=("host",))["host.numa"][0]
    assert (found.measured, found.unit) == (1 + len(others), unit)


CLOCKS = (
    ({"chronyc": "System time : 0.0 seconds slow\nLeap status     : Not synchronised\n"}, CheckStatus.WARN),
    ({"timedatectl": "yes\n"}, CheckStatus.PASS),
    ({"timedatectl": "no\n"}, CheckStatus.WARN),
    ({}, CheckStatus.SKIPPED),
)


def test_who_says_that_the_clock_is_right(look, healthy):
    del healthy.commands["chronyc"]

    def check(case):
        commands, status = case
        node = dataclasses.replace(healthy, commands=healthy.commands | commands)
        assert look(node, chosen=("host",))["time.offset"][0].status is status

    check_every(CLOCKS, check)


def test_the_log_says_what_happened_in_the_last_hours(look, healthy):
    healthy.commands["dmesg"] = (RECORDED / "dmesg-trouble.txt").read_text()
    found = {v.where: v for v in look(healthy, chosen=("log",))["log.kernel"]}
    assert "machine-check" not in found, "older than a day"
    fails = {name for name, v in found.items() if v.status is CheckStatus.FAIL}
    assert fails == {"device-reset", "xid-of-hardware", "storage-error", "pcie-error", "network-card-error"}
    assert set(found) - fails == {"device-ring-timeout", "xid-of-a-program", "hung-task", "out-of-memory"}
    assert "fallen off the bus" in found["xid-of-hardware"].message
    whole = {v.where for v in look(healthy, chosen=("log",), log_hours=100.0)["log.kernel"]}
    assert "machine-check" in whole


def test_a_log_that_may_not_be_read(look, healthy):
    healthy.commands["dmesg"] = CommandOutput(
        code=1, stdout="", stderr="dmesg: read kernel buffer failed: Operation not permitted\n"
    )
    verdict = look(healthy, chosen=("log",))["log.kernel"][0]
    assert verdict.status is CheckStatus.SKIPPED
    assert "Operation not permitted" in verdict.message
    assert "root" in verdict.message
    healthy.commands["journalctl"] = (RECORDED / "dmesg-healthy.txt").read_text()
    assert look(healthy, chosen=("log",))["log.kernel"][0].status is CheckStatus.PASS


def test_a_machine_of_which_nothing_can_be_seen_is_skipped_and_not_well(look, make_host):
    from meshwright.doctor.checks import Node
    from meshwright.doctor.devices import find_devices
    from meshwright.doctor.examine import examine

    host = make_host({})
    found = examine(Node(host=host, devices=find_devices(host)), chosen=GROUP_NAMES)
    assert found.status is CheckStatus.SKIPPED
    assert all(v.message for v in found.verdicts)
    assert found.host == "unknown"


# --- the real thing, on this machine ---


@pytest.mark.skipif(importlib_util.find_spec("torch") is None, reason="needs torch")
def test_a_device_is_measured_here(capsys, monkeypatch):
    """In this process, which has PyTorch loaded; a processor needs no half second to reach its clock."""
    from meshwright.doctor import measure

    monkeypatch.setitem(measure.best_s.__kwdefaults__, "warm_up_s", 0.0)

    measure.main(["device", "--gemm-size", "64", "--copy-bytes", "65536"])
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["is_finite"]
    assert answer["is_repeatable"]
    assert answer["gemm_flops_per_s"] > 0 < answer["copy_bytes_per_s"]


@pytest.mark.when_touched  # test_a_device_is_measured_here measures, tests of training reduce between processes
@pytest.mark.skipif(importlib_util.find_spec("torch") is None, reason="needs torch")
def test_a_collective_is_measured_here():
    """By the command, which starts processes of its own."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("of processors: devices may be fewer than two")
    command = [sys.executable, "-m", "meshwright.doctor.measure", "all-reduce"]
    two = run_command([*command, "--processes", "2", "--bytes", "4096"], 120)
    assert json.loads(two.stdout.splitlines()[-1])["is_right"], two.stderr
