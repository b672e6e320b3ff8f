"""Tokens of the busiest expert rank."""

from __future__ import annotations

import pytest

from meshwright.catalog import lookup as catalog
from meshwright.cost.routing import busiest_rank_ratio
from meshwright.cost.tables import model_row, plan_row
from meshwright.specs.plan import Plan


@pytest.mark.parametrize(
    ("model", "expert", "stated", "is_padded", "ratio"),
    [
        ("mixtral-8x7b", 1, 1.4, 0, 1.0),  # a rank with all experts
        ("mixtral-8x7b", 2, 1.4, 0, 1.4),
        ("mixtral-8x7b", 2, 3.0, 0, 2.0),  # all tokens
        ("mixtral-8x7b", 8, 64.0, 0, 4.0),  # two of eight experts a token: no expert has more than all tokens
        ("mixtral-8x7b", 1, 1.5, 1, 1.5),  # a capacity is computed whatever comes
        ("mixtral-8x7b", 1, 1.4, 2, 1.4),  # all experts of a rank compute as many rows as its busiest
        ("mixtral-8x7b", 1, 64.0, 2, 4.0),
        ("llama3-8b", 1, 1.4, 0, 1.0),
    ],
)
def test_ratio(model, expert, stated, is_padded, ratio):
    row, plan = model_row(catalog.model(model)), plan_row(Plan(data_shard=8, expert=expert))
    assert float(busiest_rank_ratio(row, plan, stated=stated, is_padded=is_padded)) == ratio
