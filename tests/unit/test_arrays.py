"""Rows of one kind among columns of integers."""

import numpy as np
import pytest

from meshwright.arrays import distinct_rows


@pytest.mark.parametrize("largest", [3, 2**40])  # the second one: a key of all columns would not fit into 64 bits
def test_rows_are_of_one_kind_where_all_columns_are_equal(largest):
    rng = np.random.default_rng(0)
    columns = [rng.choice([-1, 0, largest], size=300) for _ in range(4)]
    first, kind = distinct_rows([*columns, 5])
    rows = np.stack(columns, axis=1)
    assert len(first) == len(np.unique(rows, axis=0))
    assert np.array_equal(rows[first][kind], rows)
