"""Rows from which the calibration learns."""

from __future__ import annotations

from tests.shipped_rows import shipped_runs

from meshwright.fitting.published_runs import informs
from meshwright.specs.model import BaseFormat


def test_rows_in_doubt_are_predicted_and_inform_no_fit(read_many):
    stated, in_doubt = read_many({"quality": "A-table"}, {"quality": "C-plan-not-stated"})
    assert [run.conditions is not None for run in (stated, in_doubt)] == [True, True]
    assert (informs(stated), informs(in_doubt)) == (True, False)


def test_rows_of_a_quantised_base_are_predicted_and_inform_no_fit():
    predicted = [run for run in shipped_runs() if run.reason is None and run.conditions is not None]
    formats = {run.id: c.lora.base_format for run in predicted if (c := run.conditions) and c.lora}
    quantised = {name for name, form in formats.items() if form is not BaseFormat.FULL}
    assert len(quantised) == 3
    assert not [run for run in predicted if run.id in quantised and informs(run)]
    assert [run for run in predicted if run.id in formats.keys() - quantised and informs(run)]
