"""The budget of a device's memory and its verdict."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshwright.specs.memory_budget import FitVerdict, MemoryBudget

SIZES = st.floats(1.0, 1e12)
ORDER = [FitVerdict.DOES_NOT_FIT, FitVerdict.MAY_FIT, FitVerdict.FITS]


@given(SIZES, SIZES, st.floats(0.1, 1.0), st.floats(0.01, 1.0))
def test_less_memory_fits_at_least_as_well(size, other, ratio, log_sd):
    budget = MemoryBudget(capacity_bytes=1e9, ratio=ratio, log_sd=log_sd)
    less, more = sorted((size, other))
    assert budget.probability(less) >= budget.probability(more)
    assert ORDER.index(budget.verdict(less)) >= ORDER.index(budget.verdict(more))


@given(SIZES, st.floats(0.1, 1.0), st.floats(0.0, 1.0))
def test_what_the_estimate_says_fits_does(size, ratio, log_sd):
    """With an uncertainty or none: more than half of the probability lies below."""
    budget = MemoryBudget(capacity_bytes=1e9, ratio=ratio, log_sd=log_sd)
    if abs(size / budget.usable_bytes - 1) > 1e-9:
        assert (budget.verdict(size) is FitVerdict.FITS) == budget.fits(size)
