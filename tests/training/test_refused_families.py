"""A refusal of an architecture does not list the refused one as allowed."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from meshwright import runfile
from meshwright.catalog.families import trained_families
from meshwright.errors import InputError
from meshwright.training.weights import family_of

FAMILIES = [family.architecture for family in trained_families()]


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize(
    "change", [{"norm_bias": True}, {"gated_ffn": False}, {"num_mtp_layers": 3}, {"ffn_bias": True}, {}], ids=range(5)
)
def test_the_refused_name_is_not_among_the_allowed(tiny_text, architecture, change):
    model = replace(runfile.loads(tiny_text).model, family=architecture, **change)
    try:
        assert family_of(model).architecture == architecture
    except InputError as error:
        _, _, allowed = error.message.partition("allowed: ")
        assert architecture not in allowed.split(", ")
        for other in filter(None, allowed.split(", ")):  # and those that are listed hold the shapes
            assert family_of(replace(model, family=other)).architecture == other
