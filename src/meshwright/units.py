"""SI units inside. This module alone converts, formats and parses numbers (but those of YAML: `runfile.document`).

Inside the program every quantity is in seconds, bytes, FLOP, watt, joule or tokens and its name ends in
the unit (`_s`, `_bytes`, `_flops`, `_flops_per_s`, `_bytes_per_s`, `_ratio`). Decimal prefixes are powers
of 1000 (GB), binary ones powers of 1024 (GiB). One multiply-add is 2 FLOP.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

KB, MB, GB, TB = 1e3, 1e6, 1e9, 1e12
KIB, MIB, GIB = 2**10, 2**20, 2**30
TERA, PETA = 1e12, 1e15
MINUTE_S, HOUR_S, DAY_S, YEAR_S = 60.0, 3600.0, 86_400.0, 365.25 * 86_400.0
JOULE_PER_KWH = 3.6e6
MAX_DIGITS = 18
"""Digits of a whole number that fits 64 bits whatever they are."""


def parse_count(text: str) -> int:
    """Return the whole number that `text` spells, 0 or more; its digits may be grouped by underscores.

    Raises ValueError for a sign, a fraction, an exponent, more than 18 digits and anything else.

    >>> parse_count("4_194_304")
    4194304
    """
    if not re.fullmatch(r"[0-9]+(_[0-9]+)*", text) or len(text.replace("_", "")) > MAX_DIGITS:
        raise ValueError(f"not a whole number: {text!r}")
    return int(text)


_SUFFIXES = {"k": (10**3, 2**10), "m": (10**6, 2**20), "g": (10**9, 2**30), "b": (10**9,), "t": (10**12,)}


def digits_hint(text: str) -> str | None:
    """The whole numbers that `text` may mean with a suffix or grouped digits; None where it means none.

    "128k" is 128,000 tokens to some and 131,072 to others, so that no such number is taken for one of them.

    >>> digits_hint("128k"), digits_hint("15T"), digits_hint("8,192"), digits_hint("many")
    ('write the digits: 128000 or 131072', 'write the digits: 15000000000000', 'write the digits: 8192', None)
    """
    plain = text.strip().replace(",", "").lower()
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?(?:e[0-9])?)\s?([kmgbt]?)i?", plain)
    if match is None:
        return None
    numbers = [float(match[1]) * scale for scale in _SUFFIXES.get(match[2], (1,))]
    whole = [f"{number:.0f}" for number in numbers if number == int(number)]
    return f"write the digits: {' or '.join(whole)}" if whole else None


def parse_amount(text: str) -> str:
    """Return digits for billions (B) and trillions (T), which mean one number each; other text as it is.

    >>> parse_amount("15T"), parse_amount("2.5B"), parse_amount("128k")
    ('15000000000000', '2500000000', '128k')
    """
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)\s?([BT])", text.strip())
    return f"{float(match[1]) * _SUFFIXES[match[2].lower()][0]:.0f}" if match else text


def parse_number(text: str) -> float:
    """Return the finite number that `text` spells. Raises ValueError for infinities, NaN and anything else.

    >>> parse_number("1e-4")
    0.0001
    """
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"not a finite number: {text!r}")
    return number


_RATE_UNITS = {
    f"{prefix}{unit}": scale * size
    for prefix, scale in (("G", 1e9), ("T", 1e12))
    for unit, size in (("b/s", 1 / 8), ("bit/s", 1 / 8), ("bps", 1 / 8), ("B/s", 1.0))
}
_MEMORY_UNITS = {"MB": MB, "GB": GB, "TB": TB, "MiB": MIB, "GiB": GIB, "TiB": 2**40}
_QUANTITY = re.compile(r"(?P<number>[0-9]{1,9}(?:\.[0-9]{1,6})?)\s*(?P<unit>[A-Za-z/]+)")


def parse_rate(text: str) -> float:
    """Return the bytes per second that `text` spells: Gb/s and Tb/s count bits, GB/s and TB/s bytes.

    Raises ValueError for another unit, a sign and anything else.

    >>> parse_rate("400Gb/s") / GB, parse_rate("12.5 GB/s") / GB
    (50.0, 12.5)
    """
    return _quantity(text, _RATE_UNITS)


def parse_memory(text: str) -> int:
    """Return the bytes that `text` spells in MB, GB, TB, MiB, GiB or TiB.

    Raises ValueError for another unit, a sign and anything else.

    >>> parse_memory("40GiB"), parse_memory("40 GB")
    (42949672960, 40000000000)
    """
    return int(_quantity(text, _MEMORY_UNITS))


def _quantity(text: str, units: Mapping[str, float]) -> float:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match["unit"] not in units:
        raise ValueError(f"not a number with a unit: {text!r}")
    return float(match["number"]) * units[match["unit"]]


def gib(num_bytes: float) -> float:
    """Bytes to GiB."""
    return num_bytes / GIB


def ms(seconds: float) -> float:
    """Seconds to milliseconds."""
    return seconds * 1e3


def gbit_per_s_to_bytes_per_s(gbit_per_s: float) -> float:
    """Network rates are sold in Gbit/s: 400 Gbit/s is 50e9 bytes/s."""
    return gbit_per_s * 1e9 / 8


def format_bytes(num_bytes: float) -> str:
    """
    >>> format_bytes(80 * GIB)
    '80.0 GiB'
    """
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """
    >>> [format_seconds(x) for x in (2e-6, 0.0123, 4.5, 600, 7200, 200_000)]
    ['2.0 µs', '12.3 ms', '4.50 s', '10.0 min', '2.0 h', '2.3 days']
    """
    if seconds != seconds or math.isinf(seconds):
        return str(seconds)
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 2 * MINUTE_S:
        return f"{seconds:.2f} s"
    if seconds < 2 * HOUR_S:
        return f"{seconds / MINUTE_S:.1f} min"
    if seconds < 2 * DAY_S:
        return f"{seconds / HOUR_S:.1f} h"
    return f"{seconds / DAY_S:.1f} days"


def format_duration(seconds: float) -> str:
    """Return a duration with at most two units, to be read while waiting rather than compared.

    >>> [format_duration(x) for x in (0.4, 12.3, 65, 7_265, 200_000)]
    ['under 1 s', '12 s', '1 min 5 s', '2 h 1 min', '2 days 7 h']
    """
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 1:
        return "under 1 s"
    whole = round(seconds)
    units = (("days", 86_400), ("h", 3600), ("min", 60), ("s", 1))
    first = next(i for i, (_, size) in enumerate(units) if whole >= size)
    (name, size), rest = units[first], units[first + 1 : first + 2]
    parts = [f"{whole // size} {'day' if name == 'days' and whole // size == 1 else name}"]
    parts += [f"{whole % size // below} {unit}" for unit, below in rest if whole % size // below]
    return " ".join(parts)


def format_count(count: float) -> str:
    """Parameters, tokens and devices with a decimal prefix.

    >>> [format_count(x) for x in (950, 12_300, 8.03e9, 2.0e12)]
    ['950', '12.3K', '8.03B', '2T']
    """
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g}{suffix}"
    return f"{count:.0f}"
