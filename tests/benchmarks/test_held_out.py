"""Rows left out at random: every row once, in parts of equal size; the table has medians and 90th percentiles."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from benchmarks import held_out


def test_every_row_is_in_one_of_ten_equal_parts():
    labels = held_out.folds(103, seed=1)
    sizes = Counter(labels.tolist())
    assert (len(sizes), sum(sizes.values())) == (10, 103)
    assert set(sizes.values()) == {10, 11}
    assert (labels != held_out.folds(103, seed=2)).any()


def test_a_line_has_each_kind_of_model_and_no_sweeps():
    model = SimpleNamespace(attention_share=np.array([1.0, 1.0, 0.1, 1.0]))
    problem: Any = SimpleNamespace(
        tables=SimpleNamespace(model=model),
        is_moe=np.array([False, True, True, False]),
        is_sweep=np.array([False, False, False, True]),
    )
    error = np.log([1.05, 0.9, 1.2, 9.0])
    found = held_out.line("rows", [error, error], cast("Any", problem))
    assert found == "| rows | 10.0 %, 18 % | 5.0 %, 5 % | 10.0 %, 10 % | 20.0 %, 20 % |"
