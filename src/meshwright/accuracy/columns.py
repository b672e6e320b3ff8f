"""Metrics as the cells of a table: the same columns on the terminal and on the page."""

from __future__ import annotations

from meshwright.accuracy.metrics import Metrics

HEADINGS = ("rows", "predicted", "median", "p90", "bias", "in interval", "memory", "regret", "tau")
"""Rows of the group and those predicted; median and 90th percentile of the absolute error; median signed
error; share of measurements inside the interval; median absolute memory error; mean top-1 regret and
Kendall τ of the groups of plans."""


def cells(m: Metrics) -> tuple[str, ...]:
    """One cell per heading, empty where there is no value."""
    return (
        str(m.num_rows),
        str(m.num_predicted),
        percent(m.median_abs_error),
        percent(m.p90_abs_error),
        signed_percent(m.bias),
        percent(m.interval_coverage),
        percent(m.memory_median_abs_error),
        percent(m.top1_regret_mean),
        _known(m.kendall_tau_mean, ".2f"),
    )


def percent(ratio: float) -> str:
    """
    >>> percent(0.083), percent(float("nan"))
    ('8.3%', '')
    """
    return _known(ratio, ".1%")


def signed_percent(ratio: float) -> str:
    """
    >>> signed_percent(-0.05)
    '-5.0%'
    """
    return _known(ratio, "+.1%")


def rate(tokens_per_s: float) -> str:
    """
    >>> rate(12_345.6)
    '12,346'
    """
    return _known(tokens_per_s, ",.0f")


def _known(value: float, form: str) -> str:
    return "" if value != value else format(value, form)
