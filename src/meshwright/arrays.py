"""Structs of arrays: a formula is written once, for one plan and for a million.

A field of a table is a number or a NumPy array; arrays broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

Array = float | NDArray[Any]
"""A number or a NumPy array of numbers. The arrays of one expression broadcast."""

Integers = int | NDArray[Any]
"""An integer or a NumPy array of integers."""

Mask = bool | NDArray[np.bool_]
"""A truth value or a NumPy array of truth values."""


def scalar(value: object) -> float:
    """The number of a table's field that has one row.

    >>> scalar(np.array([[2]])), scalar(3)
    (2.0, 3.0)
    """
    return float(np.ravel(np.asarray(value))[0])


@dataclass(frozen=True, kw_only=True)
class Table:
    """Base of all tables. `stack` makes columns of rows, `take` selects rows."""

    @classmethod
    def stack(cls, rows: Sequence[Self]) -> Self:
        """One table with an array of len(rows) per field; tables inside tables are stacked too.

        A field that is another dataclass (measured efficiency corrections) must be equal in all rows and is kept.
        """
        columns: dict[str, Any] = {}
        for f in fields(cls):
            values = [getattr(r, f.name) for r in rows]
            if isinstance(values[0], Table):
                columns[f.name] = type(values[0]).stack(values)
            elif is_dataclass(values[0]):
                if any(value != values[0] for value in values):
                    raise ValueError(f"rows of one table differ in {f.name}")
                columns[f.name] = values[0]
            else:
                columns[f.name] = np.array(values)
        return cls(**columns)

    def take(self, index: NDArray[np.intp] | int) -> Self:
        """The rows at `index`; fields that are numbers stay as they are."""
        changes = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Table):
                changes[f.name] = value.take(index)
            elif isinstance(value, np.ndarray) and value.ndim:
                changes[f.name] = value[index]
        return replace(self, **changes)

    def numbers(self) -> Self:
        """The one row of a table with Python's numbers, on which arithmetic is faster than on NumPy's."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.numbers() if isinstance(v, Table) else scalar(v) for k, v in values.items()})

    def column(self) -> Self:
        """The same with arrays of n as n x 1: against a table of m rows every formula gives n x m."""
        changes = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Table):
                changes[f.name] = value.column()
            elif isinstance(value, np.ndarray) and value.ndim:
                changes[f.name] = value[:, None]
        return replace(self, **changes)


def distinct_rows(columns: Sequence[Integers]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """(index of one row of each kind, the kind of every row), of rows of integers.

    >>> distinct_rows([np.array([4, 2, 4]), np.array([1, 1, 1])])
    (array([1, 0]), array([1, 0, 1]))
    """
    key, size = np.zeros(np.broadcast_shapes(*map(np.shape, columns)), dtype=np.int64), 1
    for column in map(np.asarray, columns):
        low = int(column.min())
        span = int(column.max()) - low + 1
        if size * span >= 2**63:  # the key would overflow: numbers of kinds are smaller
            key = np.unique(key, return_inverse=True)[1]
            size = int(key.max()) + 1
        key, size = (key * span + (column - low), size * span) if span > 1 else (key, size)
    _, first, kind = np.unique(key, return_index=True, return_inverse=True)
    return first, kind
