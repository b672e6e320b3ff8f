"""Every run file of the examples is estimated; a published rate that one names lies in its interval."""

from pathlib import Path

import pytest

from meshwright import runfile
from meshwright.answers.run_estimate import estimate_run
from meshwright.errors import InputError

RUNS = sorted((Path(__file__).parents[2] / "examples" / "runs").glob("*.yaml"))
PUBLISHED = {"llama3.1-70b-pinned": 1116, "deepseek-v3-pinned": 1543}
"""Tokens/s/device that the comments of a run file quote."""


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_it_can_be_estimated_or_says_why_not(path):
    run = runfile.load(path)
    if run.cluster is None:  # `here`: nothing is known before it is measured
        with pytest.raises(InputError, match="needs a known cluster"):
            estimate_run(run)
        return
    done = estimate_run(run)
    assert done.estimate.step.memory.fits
    rate = done.estimate.step.tokens_per_s_per_device
    assert rate.low < PUBLISHED.get(path.stem, rate.value) < rate.high


def test_the_quoted_rates_stand_in_the_files():
    for path in RUNS:
        if path.stem in PUBLISHED:
            assert f"{PUBLISHED[path.stem]:,}" in path.read_text(encoding="utf-8")
