"""Estimates as text: a value with its interval, in the unit a reader expects."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.records.measurement import ValueRange
from meshwright.specs.estimate import Estimate, MemoryEstimate
from meshwright.units import format_bytes, format_seconds, gib

LONG_STEP_S = 1000.0
"""Longer times are given in minutes, hours or days."""


def seconds(value: float) -> str:
    """Step times: four digits, so that neighbours in a ranking differ.

    >>> [seconds(x) for x in (0.01234567, 2.590423, 153.2)]
    ['12.35 ms', '2.590 s', '153.2 s']
    """
    if not 0 < value < LONG_STEP_S:
        return format_seconds(value)
    if value < 1:
        return f"{_digits(value * 1e3)} ms"
    return f"{_digits(value)} s"


def rate(value: float) -> str:
    """Tokens per second.

    >>> rate(25299.3), rate(846.8), rate(12.345)
    ('25,299', '847', '12.35')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else _digits(value)


def percent(value: float) -> str:
    """
    >>> percent(0.4127)
    '41.3 %'
    >>> percent(-1e-9)
    '0.0 %'
    """
    return f"{100 * value:z.1f} %"


def cell(measured: ValueRange | None, form: Callable[[float], str] = rate) -> str:
    """The middle of a measured range; empty for none."""
    return "" if measured is None else form(measured.value)


def cell_with_ends(measured: ValueRange | None) -> str:
    """A rate with both ends of its range, where they differ."""
    if measured is None or measured.low == measured.high:
        return cell(measured)
    return f"{rate(measured.value)} ({rate(measured.low)}–{rate(measured.high)})"


def spread_sentence(most: int, what: str) -> str:
    """Sentence on the range of `what` in a table of at most `most` repeats; empty for single measurements."""
    kind = "95 % interval" if most >= 6 else "range"
    return "" if most < 2 else f" Medians of {most} repeats, {what} with its {kind}."


def memory(needed_bytes: float, available_bytes: float) -> str:
    """
    >>> memory(202 * 2**30, 288 * 2**30)
    '202.0 of 288.0 GiB'
    """
    return f"{gib(needed_bytes):.1f} of {gib(available_bytes):.1f} GiB"


def fit_text(memory: MemoryEstimate) -> str:
    """Verdict on the memory of a plan and the probability that it fits: "fits (93 %)"."""
    share = memory.fit_probability
    known = "over 99 %" if share > 0.99 else "under 1 %" if share < 0.01 else f"{100 * share:.0f} %"
    return f"{memory.verdict} ({known})"


FORMATS: dict[str, Callable[[float], str]] = {
    "s": format_seconds,
    "tokens/s": rate,
    "ratio": percent,
    "bytes": format_bytes,
    "USD": lambda usd: f"{usd / 1e6:.2f} million USD" if usd >= 1e6 else f"{usd:,.0f} USD",
    "MWh": lambda mwh: f"{mwh:,.4g} MWh" if mwh >= 1 else f"{mwh * 1e3:,.4g} kWh",
}


def value_of(estimate: Estimate) -> str:
    """The value alone."""
    form = seconds if estimate.unit == "s" else FORMATS[estimate.unit]
    return form(estimate.value)


def interval_of(estimate: Estimate) -> str:
    """The two ends of the interval, in the unit of the value.

    >>> from meshwright.specs.estimate import Tier
    >>> interval_of(Estimate(value=0.5, low=0.4, high=0.6, unit="ratio", tier=Tier.DATASHEET))
    '40.0 to 60.0 %'
    >>> interval_of(Estimate(value=90.0, low=0.9, high=600, unit="s", tier=Tier.DATASHEET))
    '0.90 to 600.00 s'
    """
    form = FORMATS[estimate.unit]
    if estimate.unit == "s" and 0 < estimate.value < LONG_STEP_S:
        scale, unit = (1e3, "ms") if estimate.value < 1 else (1.0, "s")
        return f"{estimate.low * scale:.2f} to {estimate.high * scale:.2f} {unit}"
    return span(form(estimate.low), form(estimate.high))


def with_ends(name: str, estimate: Estimate) -> dict[str, float]:
    """Return value, low and high end of an estimate as three columns.

    >>> from meshwright.specs.estimate import Tier
    >>> with_ends("step_s", Estimate(value=2.0, low=1.5, high=3.0, unit="s", tier=Tier.MEASURED))
    {'step_s': 2.0, 'step_s_low': 1.5, 'step_s_high': 3.0}
    """
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def span(low: str, high: str) -> str:
    """From `low` to `high`, the unit once where both have the same.

    >>> span("1.5 days", "2.0 days"), span("40.0 h", "2.0 days")
    ('1.5 to 2.0 days', '40.0 h to 2.0 days')
    """
    number, _, unit = low.partition(" ")
    return f"{number} to {high}" if unit and high.partition(" ")[2] == unit else f"{low} to {high}"


def _digits(value: float) -> str:
    """Four significant digits without an exponent."""
    decimals = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
    return f"{value:.{decimals}f}"
