"""Laws between the figures of one device and of devices of one architecture: printed peaks are units x FLOP x clock."""

import pytest
from tests.every_member import check_every

from meshwright.catalog.lookup import accelerator, accelerator_names

FLOPS_PER_UNIT_AND_CLOCK = {
    # dense bf16 (fp16 on Volta) with fp32 sums, from each architecture's whitepaper: tensor cores x FLOP of each
    "Volta": 1024,
    "Ampere": 2048,
    "Hopper": 4096,
    "Blackwell": 8192,
    "Blackwell Ultra": 8192,
    "CDNA 2": 1024,
    "CDNA 3": 2048,
    "CDNA 4": 4096,
}
CLOCK_HZ = (1.4e9, 2.45e9)  # A100's boost clock, and more than MI355X's
LOWERED = {"h20"}  # for export: as many units as 78, at a third of their rate
SHARE_OF_RATE = {"rtx-a6000": 1 / 2, "a10": 1 / 2, "rtx-3090": 1 / 4}
"""GA102 has half of GA100's tensor rate, and a GeForce half of that with fp32 sums."""

EIGHT_TO_SIXTEEN_BITS = {
    "Hopper": 2,
    "Ada": 2,
    "Blackwell": 2,
    "Blackwell Ultra": 2,
    "RTX Blackwell": 2,
    "CDNA 3": 2,
    "CDNA 4": 2,
    "Rubin": 4.375,  # NVIDIA's table: 17.5 and 4 PFLOP/s
}
FOUR_TO_EIGHT_BITS = {"Blackwell": 2, "Blackwell Ultra": 3, "CDNA 4": 2, "Rubin": 2}
NVLINK_BYTES_PER_S = {"Volta": 25e9, "Ampere": 25e9, "Hopper": 25e9, "Blackwell": 50e9, "Blackwell Ultra": 50e9}
"""One direction of one link."""

GPUS = [name for name in accelerator_names() if accelerator(name).architecture in FLOPS_PER_UNIT_AND_CLOCK]
NVIDIA = [name for name in accelerator_names() if accelerator(name).vendor == "NVIDIA"]


def of_architectures(ratios: dict[str, float]) -> list[str]:
    return [name for name in accelerator_names() if accelerator(name).architecture in ratios]


def test_a_peak_is_units_times_rate_at_a_clock_that_the_device_has() -> None:
    def check(name: str) -> None:
        a = accelerator(name)
        rate = FLOPS_PER_UNIT_AND_CLOCK[a.architecture] * SHARE_OF_RATE.get(name, 1)
        peak = a.peak_flops_per_s.get("bf16") or a.peak_flops_per_s["fp16"]
        assert CLOCK_HZ[0] <= peak / (a.num_compute_units * rate) <= CLOCK_HZ[1]

    check_every([n for n in GPUS if n not in LOWERED], check)


def test_eight_bits_are_dense_as_sixteen_are() -> None:
    def check(name: str) -> None:
        a = accelerator(name)
        ratio = a.peak_flops_per_s["fp8"] / a.peak_flops_per_s["bf16"]
        assert ratio == pytest.approx(EIGHT_TO_SIXTEEN_BITS[a.architecture], rel=0.013)  # L40S: 362 and 733

    check_every(of_architectures(EIGHT_TO_SIXTEEN_BITS), check)


@pytest.mark.parametrize("name", of_architectures(FOUR_TO_EIGHT_BITS))
def test_four_bits_are_dense_as_eight_are(name: str) -> None:
    a = accelerator(name)
    ratio = a.peak_flops_per_s["fp4"] / a.peak_flops_per_s["fp8"]
    assert ratio == pytest.approx(FOUR_TO_EIGHT_BITS[a.architecture], rel=0.011)  # MI355X: 5000 and 10100


@pytest.mark.parametrize(
    ("name", "flops", "clock_hz", "four_bits"), [("rtx-5090", 512, 2.407e9, 8), ("rtx-pro-6000", 1024, 2.617e9, 4)]
)
def test_rtx_blackwell_has_the_rates_of_its_boost_clock(name: str, flops: int, clock_hz: float, four_bits: int) -> None:
    """A GeForce sums 16 and 8 bits in fp32 at half of the chip's rate, and 4 bits at all of it."""
    a = accelerator(name)
    assert a.peak_flops_per_s["bf16"] == pytest.approx(a.num_compute_units * flops * clock_hz, rel=1e-3)
    assert a.peak_flops_per_s["fp4"] == pytest.approx(four_bits * a.peak_flops_per_s["bf16"], rel=1e-3)
    assert a.rates_of == "Ada"


def test_tf32_has_half_the_rate_of_16_bits() -> None:
    def check(name: str) -> None:
        peaks = accelerator(name).peak_flops_per_s
        if "tf32" not in peaks:
            return  # prints none
        assert peaks["tf32"] == pytest.approx(peaks["bf16"] / 2, rel=0.012)  # L40S: 183 and 362

    check_every(NVIDIA, check)


def test_devices_of_one_die_and_as_many_units_share_their_peaks_unless_their_clock_is_another() -> None:
    for name in ("h200", "h800", "gh200", "h100-96gb"):
        assert accelerator(name).peak_flops_per_s == accelerator("h100").peak_flops_per_s
    assert accelerator("mi325x").peak_flops_per_s == accelerator("mi300x").peak_flops_per_s
    assert accelerator("h800").memory_bytes_per_s == accelerator("h100").memory_bytes_per_s
    b200, b300 = (accelerator(name).peak_flops_per_s for name in ("b200", "b300"))
    assert all(b200[number] == b300[number] for number in ("fp32", "tf32", "bf16", "fp8"))


def test_a_die_has_half_of_its_module() -> None:
    die, module = accelerator("mi250x-gcd"), accelerator("mi250x")
    assert {number: 2 * peak for number, peak in die.peak_flops_per_s.items()} == module.peak_flops_per_s
    assert (2 * die.num_compute_units, 2 * die.memory_bytes) == (module.num_compute_units, module.memory_bytes)
    assert 2 * die.memory_bytes_per_s == pytest.approx(module.memory_bytes_per_s, rel=1e-3)


def test_nvlink_is_a_whole_number_of_links_in_one_direction() -> None:
    def check(name: str) -> None:
        a = accelerator(name)
        link = NVLINK_BYTES_PER_S.get(a.architecture)
        if link is None or a.scale_up_bytes_per_s <= a.host_bytes_per_s:
            return  # joined by PCIe, or announced only
        assert (a.scale_up_bytes_per_s / link).is_integer()
        assert a.scale_up_bytes_per_s <= 18 * link  # the most links of any of them: both directions would be 36

    check_every(NVIDIA, check)


def test_a_processor_shared_by_two_devices_gives_each_half() -> None:
    """NVLink-C2C: 450 GB/s in one direction from Grace, 900 from Vera."""
    assert accelerator("gh200").host_bytes_per_s == 450e9
    assert accelerator("gb200").host_bytes_per_s == accelerator("gb300").host_bytes_per_s == 450e9 / 2
    assert accelerator("vr200").host_bytes_per_s == 900e9 / 2
