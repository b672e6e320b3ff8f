"""Nodes made of files: a fake root folder and recorded command outputs.

`healthy()` is a node of eight MI355X with eight 400 Gbit/s cards; a test changes one thing in it.
"""

from __future__ import annotations

import json
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshwright.doctor.host import CommandOutput, Host, Unseen


class Commands:
    """Recorded outputs by the beginning of the command line; a command that is not there is not installed."""

    def __init__(self, outputs: Mapping[str, Any]) -> None:
        self.outputs = dict(outputs)
        self.asked: list[str] = []

    def __call__(self, arguments: Sequence[str], timeout_s: float) -> CommandOutput:
        line = " ".join(arguments)
        self.asked.append(line)
        for beginning, output in sorted(self.outputs.items(), key=lambda item: -len(item[0])):
            if line.startswith(beginning):
                if isinstance(output, Unseen):
                    raise output
                return output if isinstance(output, CommandOutput) else CommandOutput(code=0, stdout=output)
        raise Unseen(f"{arguments[0]} is not installed")


@pytest.fixture
def make_host(tmp_path: Path) -> Callable[..., Host]:
    """`make_host({"/proc/x": "1\\n"}, {"dmesg": "..."})`."""

    def make(files: Mapping[str, str], commands: Mapping[str, Any] | None = None, environment: Any = None) -> Host:
        root = tmp_path / "node"
        for name, text in files.items():
            path = root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        root.mkdir(exist_ok=True)
        return Host(root=root, runner=Commands(commands or {}), environment=environment or {})

    return make


RECORDED = Path(__file__).parent / "recorded"
GPU = "/sys/bus/pci/devices/{}"
CARD = "/sys/class/drm/card{}/device"
KFD = "/sys/class/kfd/kfd/topology/nodes/{}"
PORT = "/sys/class/infiniband/mlx5_{}/ports/1"
ADDRESSES = [f"0000:{bus:02x}:00.0" for bus in (0x05, 0x15, 0x65, 0x75, 0x85, 0x95, 0xE5, 0xF5)]
MEASURE = f"{sys.executable} -m meshwright.doctor.measure"
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max processes             9286034              9286034              processes
Max open files            1048576              1048576              files
Max locked memory         unlimited            unlimited            bytes
"""


@dataclass
class Fake:
    """Files and commands of a node, to be changed before the checks run."""

    files: dict[str, str]
    commands: dict[str, Any]

    def remove(self, beginning: str) -> None:
        """Take away all files below a folder."""
        self.files = {name: text for name, text in self.files.items() if not name.startswith(beginning)}


def host_files() -> dict[str, str]:
    return {
        "/proc/sys/kernel/hostname": "gpu-017\n",
        "/proc/sys/kernel/osrelease": "6.8.0-60-generic\n",
        "/proc/sys/kernel/random/boot_id": "2b1e8c8e-0000-4000-8000-000000000000\n",
        "/etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.2 LTS"\n',
        "/proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 9575F 64-Core Processor\n",
        "/proc/meminfo": "MemTotal:  2377981492 kB\nMemAvailable: 2301200000 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n",
        "/proc/loadavg": "1.02 0.90 0.77 2/4021 91823\n",
        "/proc/uptime": "95000.12 12000000.00\n",
        "/proc/self/limits": LIMITS,
        "/proc/self/cgroup": "0::/user.slice\n",
        "/proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-127\n",
        "/proc/1/cgroup": "0::/init.scope\n",
        "/sys/fs/cgroup/user.slice/memory.max": "max\n",
        "/sys/fs/cgroup/user.slice/cpu.max": "max 100000\n",
        "/sys/devices/system/cpu/online": "0-127\n",
        "/sys/devices/system/cpu/present": "0-127\n",
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
        "/sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       1188990000 kB\n",
        "/sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:       1188990000 kB\n",
        "/sys/devices/system/node/node0/cpulist": "0-63\n",
        "/sys/devices/system/node/node1/cpulist": "64-127\n",
        "/sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
        "/sys/devices/system/edac/mc/mc0/ue_count": "0\n",
    }


def df(size_kib: int, free_kib: int) -> str:
    head = "Filesystem 1024-blocks Used Available Capacity Mounted on"
    return f"{head}\n/dev/md0 {size_kib} {size_kib - free_kib} {free_kib} 5% /\n"


def card_files(index: int, address: str) -> dict[str, str]:
    card, bus, node = CARD.format(index + 1), GPU.format(address), KFD.format(index + 2)
    location = int(address[5:7], 16) << 8
    return {
        f"{bus}/vendor": "0x1002\n",
        f"{bus}/class": "0x120000\n",
        f"{bus}/aer_dev_correctable": "RxErr 0\nBadTLP 0\nTOTAL_ERR_COR 0\n",
        f"{card}/vendor": "0x1002\n",
        f"{card}/device": "0x75a3\n",
        f"{card}/class": "0x120000\n",
        f"{card}/uevent": f"DRIVER=amdgpu\nPCI_CLASS=120000\nPCI_ID=1002:75A3\nPCI_SLOT_NAME={address}\n",
        f"{card}/numa_node": f"{index // 4}\n",
        f"{card}/mem_info_vram_total": "309220868096\n",
        f"{card}/mem_info_vram_used": "297422848\n",
        f"{card}/gpu_busy_percent": "0\n",
        f"{card}/pp_dpm_sclk": "0: 500Mhz\n1: 133Mhz *\n2: 2400Mhz\n",
        f"{card}/power_dpm_force_performance_level": "auto\n",
        f"{card}/current_link_width": "16\n",
        f"{card}/max_link_width": "16\n",
        f"{card}/max_link_speed": "32.0 GT/s PCIe\n",
        f"{card}/current_compute_partition": "SPX\n",
        f"{card}/current_memory_partition": "NPS1\n",
        f"{card}/vbios_version": "113-M3550100-101\n",
        f"{card}/ras/umc_err_count": "ue: 0\nce: 3\n",
        f"{card}/ras/xgmi_wafl_err_count": "ue: 0\nce: 0\n",
        f"{card}/hwmon/hwmon{index + 3}/temp2_input": "38000\n",
        f"{card}/hwmon/hwmon{index + 3}/temp2_crit": "110000\n",
        f"{card}/hwmon/hwmon{index + 3}/temp3_input": "41000\n",
        f"{card}/hwmon/hwmon{index + 3}/temp3_crit": "105000\n",
        f"{card}/hwmon/hwmon{index + 3}/power1_input": "241000000\n",
        f"{card}/hwmon/hwmon{index + 3}/power1_cap": "1400000000\n",
        f"{card}/hwmon/hwmon{index + 3}/power1_cap_default": "1400000000\n",
        f"{node}/gpu_id": f"{5000 + index}\n",
        f"{node}/properties": f"cpu_cores_count 0\nsimd_count 1024\nlocation_id {location}\ndomain 0\n",
        **{f"{node}/io_links/{k}/properties": "type 11\nversion_major 0\nnode_from 2\n" for k in range(7)},
        f"{node}/io_links/7/properties": "type 2\nnode_from 2\nnode_to 0\n",
    }


def port_files(index: int) -> dict[str, str]:
    port = PORT.format(index)
    return {
        f"/dev/infiniband/uverbs{index}": "",
        f"/sys/class/infiniband/mlx5_{index}/board_id": "MT_0000000838\n",
        f"/sys/class/infiniband/mlx5_{index}/fw_ver": "28.42.1000\n",
        f"/sys/class/infiniband/mlx5_{index}/device/current_link_speed": "32.0 GT/s PCIe\n",
        f"/sys/class/infiniband/mlx5_{index}/device/max_link_speed": "32.0 GT/s PCIe\n",
        f"/sys/class/infiniband/mlx5_{index}/device/current_link_width": "16\n",
        f"/sys/class/infiniband/mlx5_{index}/device/max_link_width": "16\n",
        f"/sys/class/infiniband/mlx5_{index}/device/net/eth{index}/mtu": "9000\n",
        f"{port}/state": "4: ACTIVE\n",
        f"{port}/phys_state": "5: LinkUp\n",
        f"{port}/rate": "400 Gb/sec (4X NDR)\n",
        f"{port}/link_layer": "Ethernet\n",
        f"{port}/gid_attrs/types/0": "IB/RoCE v1\n",
        f"{port}/gid_attrs/types/3": "RoCE v2\n",
        f"{port}/counters/symbol_error": "0\n",
        f"{port}/counters/link_downed": "0\n",
        f"{port}/counters/port_rcv_packets": "9000000000\n",
        f"{port}/hw_counters/out_of_sequence": "12\n",
    }


def measured(gemm_tflops: float = 1400.0, copy_gb_per_s: float = 6400.0, **other: Any) -> str:
    answer = {
        "gemm_flops_per_s": gemm_tflops * 1e12, "copy_bytes_per_s": copy_gb_per_s * 1e9, "is_finite": True,
        "to_device_bytes_per_s": 55e9, "from_device_bytes_per_s": 54e9, "is_repeatable": True,
        "torch": "2.9.0+rocm7.0", "device": "AMD Instinct MI355X",
    }  # fmt: skip
    return "some library greets\n" + json.dumps(answer | other) + "\n"


def host_commands() -> dict[str, Any]:
    return {
        "df": df(3_500_000_000, 3_000_000_000),
        "dmesg": (RECORDED / "dmesg-healthy.txt").read_text(),
        "chronyc": (RECORDED / "chronyc-tracking.txt").read_text(),
    }


@pytest.fixture
def healthy() -> Fake:
    """Eight MI355X, all well."""
    files = host_files() | {
        "/sys/module/amdgpu/version": "6.14.14\n",
        "/opt/rocm/.info/version": "7.0.0-38\n",
        "/sys/class/kfd/kfd/proc/readme": "",
        KFD.format(0) + "/properties": "cpu_cores_count 64\nsimd_count 0\nlocation_id 0\n",
    }
    for index, address in enumerate(ADDRESSES):
        files |= card_files(index, address) | port_files(index)
    commands = host_commands() | {
        "amd-smi": CommandOutput(code=0, stdout="[]", seconds=1.2),
        f"{MEASURE} device": measured(),
        f"{MEASURE} all-reduce": json.dumps({"all_reduce_bytes_per_s": 190e9, "is_right": True}),
    }
    return Fake(files=files, commands=commands)


@pytest.fixture
def nvidia() -> Fake:
    """Eight H200, all well."""
    files, blocks, links = host_files(), [], []
    files["/proc/driver/nvidia/version"] = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.172.08  Release\n"
    )
    template = string.Template((RECORDED / "nvidia-smi-gpu.xml").read_text())
    for index, address in enumerate(ADDRESSES):
        uuid = f"GPU-00000000-0000-4000-8000-00000000000{index}"
        blocks.append(template.substitute(ADDRESS=f"0000{address.upper()}", UUID=uuid, INDEX=index))
        states = "".join(f"\t Link {k}: 26.562 GB/s\n" for k in range(18))
        links.append(f"GPU {index}: NVIDIA H200 (UUID: {uuid})\n{states}")
        bus = GPU.format(address)
        files |= {f"{bus}/vendor": "0x10de\n", f"{bus}/class": "0x030200\n", f"{bus}/numa_node": f"{index // 4}\n"}
        files |= port_files(index)
    head = '<?xml version="1.0" ?>\n<nvidia_smi_log>\n<driver_version>570.172.08</driver_version>\n'
    head += "<cuda_version>12.8</cuda_version>\n<attached_gpus>8</attached_gpus>\n"
    log = f"{head}{''.join(blocks)}</nvidia_smi_log>\n"
    commands = host_commands() | {
        "nvidia-smi -q -x": CommandOutput(code=0, stdout=log, seconds=0.9),
        "nvidia-smi nvlink --status": "".join(links),
        f"{MEASURE} device": measured(720.0, 4100.0, device="NVIDIA H200"),
        f"{MEASURE} all-reduce": json.dumps({"all_reduce_bytes_per_s": 250e9, "is_right": True}),
    }
    return Fake(files=files, commands=commands)


@pytest.fixture
def look(make_host: Callable[..., Host]) -> Callable[..., Any]:
    """`look(fake)["rdma.state"]`: all verdicts of a node by check, and the examination under ""."""
    from meshwright.doctor.checks import GROUP_NAMES, Node
    from meshwright.doctor.devices import find_devices
    from meshwright.doctor.examine import examine

    def run(fake: Fake, *, environment: Any = None, chosen: Any = GROUP_NAMES, **options: Any) -> dict[str, Any]:
        host = make_host(fake.files, fake.commands, environment)
        found = examine(Node(host=host, devices=find_devices(host), **options), chosen=chosen)
        verdicts: dict[str, Any] = {"": found}
        for verdict in found.verdicts:
            verdicts.setdefault(verdict.check, []).append(verdict)
        return verdicts

    return run
