import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import units


def test_network_rates_are_bits_and_ours_are_bytes():
    assert units.gbit_per_s_to_bytes_per_s(400) == 50e9


def test_decimal_and_binary_prefixes_differ():
    assert units.gib(units.GB) == pytest.approx(0.9313, abs=1e-4)
    assert units.gib(192 * units.GB) == pytest.approx(178.81, abs=0.01)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (288e9, "268.2 GiB"), (2**40, "1.0 TiB"), (-2048, "-2.0 KiB")],
)
def test_format_bytes(num_bytes, text):
    assert units.format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 µs"), (1, "1.00 s"), (22.8 * units.DAY_S, "22.8 days"), (math.inf, "inf"), (math.nan, "nan")],
)
def test_format_seconds(seconds, text):
    assert units.format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (405.8e9, "406B"), (671e9, "671B"), (32_768, "32.8K"), (-2e6, "-2M")]
)
def test_format_count(count, text):
    assert units.format_count(count) == text


SECONDS_BY_UNIT = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "days": 86_400.0}


@given(st.floats(min_value=1e-6, max_value=1e9))
def test_a_formatted_time_reads_back_to_within_its_last_digit(seconds):
    number, unit = units.format_seconds(seconds).split()
    assert float(number) * SECONDS_BY_UNIT[unit] == pytest.approx(seconds, rel=0.051)


@pytest.mark.parametrize(("text", "count"), [("0", 0), ("007", 7), ("4_194_304", 4_194_304), ("9" * 18, 10**18 - 1)])
def test_counts(text, count):
    assert units.parse_count(text) == count


@pytest.mark.parametrize("text", ["", "-1", "+1", "1.0", "1e3", "_1", "1__0", "1_", "٣", "0x10", " 1", "9" * 19])
def test_what_is_no_count(text):
    with pytest.raises(ValueError, match="whole number"):
        units.parse_count(text)


@pytest.mark.parametrize("text", ["", "x", "nan", "inf", "-inf", "1e999"])
def test_what_is_no_number(text):
    with pytest.raises(ValueError):  # noqa: PT011 float's own message for most
        units.parse_number(text)


def test_numbers():
    assert (units.parse_number("-1.5"), units.parse_number("2e3")) == (-1.5, 2000.0)
