"""Spellings of accelerators in tables of others."""

from tests.every_member import check_every

from meshwright.accuracy.spelling import spelled
from meshwright.catalog.accelerators import accelerator_names


def test_parts_forms_and_memory_are_told_apart():
    def check(spelling, name):
        assert spelled(spelling) == name

    check_every(
        [
            ("H100 SXM5 80GB", "h100"),
            ("8x NVIDIA H100 80GB HBM3", "h100"),
            ("H100 96 GB", "h100-96gb"),
            ("H100-NVL", "h100-nvl"),
            ("NVIDIA H100 PCIe 80GB", "h100-pcie"),
            ("A100-80G", "a100"),
            ("A100 40GB SXM4", "a100-40gb"),
            ("A100 PCIe 80GB", "a100-pcie"),
            ("NVIDIA B200 192GB", "b200"),
            ("HGX H200", "h200"),
            ("GB200 NVL72", "gb200"),
            ("AMD Instinct MI300X OAM", "mi300x"),
            ("Google TPU v5p", "tpu-v5p"),
            ("H200 NVL", None),
            ("A100 PCIe 40GB", None),
            ("GH200 480GB", None),
            ("H100 SXM5 (700W)", "h100"),
            ("H100 SXM5 (600W)", "h100"),  # its limit of power is a condition
            ("H100 (350W)", None),  # may be the card
            ("H100 SXM5 80GB (500W)", "h100"),
            ("H100 SXM5 (500W)", None),  # or the part with 96 GB
            ("GH200 144G", None),
            ("B200 NVL", None),
            ("H100-SXM5-80GB", "h100"),
            ("MI300X OAM", "mi300x"),
            ("L40S", "l40s"),
            ("TPU v6e (Trillium)", "tpu-v6e"),
            ("H100 SXM5 80GB MIG 1g", None),
            ("H100 and A100", None),
            ("RTX 4090 Laptop", None),
            ("", None),
        ],
        lambda case: check(*case),
    )


def test_names_of_the_catalogue_spell_themselves_or_nothing():
    def check(name):
        assert spelled(name) in (name, None)

    check_every(accelerator_names(), check)
