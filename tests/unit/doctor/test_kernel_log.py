"""Lines of the kernel's log: each has the class that its maker's documents give it."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.doctor.checks import kernel_log

RECORDED = Path(__file__).parent / "recorded"
XID = "NVRM: Xid (PCI:0000:cb:00): "


@pytest.mark.parametrize(
    ("line", "name", "status"),
    [
        (XID + "63, pid=1896, Row Remapper: New row marked for remapping", "xid-of-memory", "warn"),
        (XID + "92, High single-bit ECC error rate", "xid-of-memory", "warn"),
        (XID + "94, pid=7194, name=python, Contained: SM (0x1). RST: No, D-RST: No", "xid-of-memory", "warn"),
        (XID + "95, pid='<unknown>', Uncontained: FBHUB.", "xid-of-hardware", "fail"),
        (XID + "109, pid=8, name=python, CTX SWITCH TIMEOUT", "xid-of-hardware", "fail"),
        (XID + "145, RLW_REMAP Fatal XC0 i0 Link 12 (0x00000043 0x80)", "xid-of-nvlink", "fail"),
        (XID + "149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000)", "xid-of-nvlink", "fail"),
        (XID + "149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 08 (0x0 0x0)", "xid-of-nvlink-recovered", "warn"),
        (XID + "154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot)", "xid-recovery", "fail"),
        (XID + "154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", None, None),
        (XID + "31, pid=1, name=python, MMU Fault", "xid-of-a-program", "warn"),
        ("nvidia-nvswitch3: SXid (PCI:0000:c2:00.0): 20034, Fatal, Link 30 LTSSM Fault Up", "nvswitch-error", "fail"),
        ("nvidia-nvswitch0: SXid (PCI:0000:06:00.0): 12028, Non-fatal, egress", "nvswitch-error-recovered", "warn"),
        ("amdgpu 0000:05:00.0: amdgpu: Fatal error during GPU init", "device-does-not-start", "fail"),
        ("NVRM: GPU 0000:c1:00.0: RmInitAdapter failed! (0x24:0x65:1589)", "device-does-not-start", "fail"),
        ("ionic 0000:66:00.0: AdminQ command timed out", "network-card-error", "fail"),
    ],
)  # fmt: skip
def test_a_line_of_the_log_has_the_class_of_its_makers_table(line, name, status):
    found = [(n, kind.status.value) for n, kind in kernel_log.classes().items() if kind.pattern.search(line)]
    assert found[:1] == ([] if name is None else [(name, status)])


def test_the_patterns_match_nothing_in_a_healthy_log():
    text = (RECORDED / "dmesg-healthy.txt").read_text()
    assert not [n for n, kind in kernel_log.classes().items() if kind.pattern.search(text)]
