"""Bind this process to the processors near its device, and become the command that follows.

    python -m meshwright.engines.bound python -m meshwright train run.yaml --out runs/first

torchrun does this with --numa-binding node; under Slurm torchrun does not start the processes. The device is that of
LOCAL_RANK, or the only one that is visible. The binding keeps to the processors that the scheduler allows.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from meshwright.errors import MissingDependencyError

NUMA_NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")


def near(address: str) -> set[int]:
    """Return the allowed processors of a PCI device's NUMA node; all allowed ones where the firmware names no node."""
    allowed = os.sched_getaffinity(0)
    try:
        node = int((PCI / address / "numa_node").read_text())
        text = (NUMA_NODES / f"node{max(node, 0)}" / "cpulist").read_text() if node >= 0 else ""
    except (OSError, ValueError):
        return allowed
    spans = re.findall(r"(\d+)(?:-(\d+))?", text)
    listed = {n for first, last in spans for n in range(int(first), int(last or first) + 1)}
    return allowed & listed or allowed


def main(command: list[str]) -> None:
    """Bind, and become `command`."""
    try:
        import torch
    except ImportError:
        print("--numa needs PyTorch, which says where a device is", file=sys.stderr)
        raise SystemExit(MissingDependencyError.exit_code) from None
    if torch.cuda.is_available():
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        own = torch.cuda.get_device_properties(index)
        os.sched_setaffinity(0, near(f"{own.pci_domain_id:04x}:{own.pci_bus_id:02x}:{own.pci_device_id:02x}.0"))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
