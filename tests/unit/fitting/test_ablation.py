"""Mechanisms of the step model switched off one at a time."""

from __future__ import annotations

import numpy as np
import pytest
from tests.shipped_rows import shipped_runs

from meshwright.accuracy.rows import PublishedRun
from meshwright.calibration.parameters import prior
from meshwright.fitting.ablation import MECHANISMS, Mechanism, as_markdown, linearized_errors, measure
from meshwright.fitting.leave_one_source_out import held_out
from meshwright.fitting.published_runs import fit, make_problem

SOURCES = ("megatron_lm_llama_ex", "megatron_seqpar_paper", "megatron_moe_modelzoo")


@pytest.fixture(scope="module")
def runs() -> list[PublishedRun]:
    return [r for r in shipped_runs() if r.reason is None and r.source_key in SOURCES]


def named(name: str) -> Mechanism:
    return next(m for m in MECHANISMS if m.name == name)


@pytest.mark.slow
def test_linearized_errors_are_near_those_of_whole_refits(runs):
    sources = np.array([r.source_key for r in runs])
    linear = linearized_errors(make_problem(runs, prior()), prior(), sources)
    whole = held_out(runs, fit(runs, made="x")).error
    assert np.median(np.abs(linear - whole)) < 0.03


@pytest.mark.when_touched  # test_published_runs.py fits and leaves sources out
def test_without_imbalance_mixtures_are_worse_and_the_page_says_so(runs):
    found = [measure(named(name), runs) for name in ("nothing", "imbalance of experts")]
    assert found[1].moe > found[0].moe
    page = as_markdown(found)
    assert "| nothing | " in page
    assert f"{100 * found[1].moe:.1f} %" in page


def test_names_are_distinct():
    assert len({m.name for m in MECHANISMS}) == len(MECHANISMS)
