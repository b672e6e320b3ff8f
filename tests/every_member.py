"""One test for all members of a table: each is checked, and each that fails is named.

A test of its own for each member costs pytest more than such a check takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

Member = TypeVar("Member")


def check_every(
    members: Iterable[Member], check: Callable[[Member], None], *, name: Callable[[Member], object] = str
) -> None:
    """Call `check` with every member, and fail with the name and the error of each that failed."""
    failures, number = [], 0
    for member in members:
        number += 1
        try:
            check(member)
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:  # a skip would hide the others
            failures.append(f"{name(member)}: {type(error).__name__}: {error}")
    assert number, "nothing was checked"
    if failures:
        pytest.fail(f"{len(failures)} of {number} fail:\n" + "\n".join(failures), pytrace=False)
