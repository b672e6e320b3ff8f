"""Indexes by name: parameters, combinations, and what is refused."""

from __future__ import annotations

import pytest

from meshwright.bench.ingest.choices import KINDS, parse_index, parse_indexes
from meshwright.errors import InputError


def test_values_are_combined_and_builds_are_shared():
    found = parse_index("usearch:dtype=f32/i8,ef=32/64,m=8")
    assert len(found) == 4
    assert {c.build for c in found} == {"m=8,ef_build=128,dtype=f32", "m=8,ef_build=128,dtype=i8"}
    assert {c.search for c in found} == {"ef=32", "ef=64"}
    assert found[0].name == "usearch m=8,ef_build=128,dtype=f32,ef=32"


def test_the_same_index_counts_once():
    assert len(parse_indexes(("flat", "flat", "usearch", "usearch:m=16"))) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_allowed(kind):
    (choice,) = parse_index(kind)
    assert dict(choice.values) == {n: p.default for n, p in KINDS[kind].parameters.items()}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "unknown index"), ("usearhc", "did you mean 'usearch'"), ("usearch:ef", "no such parameter"),
        ("usearch:efs=3", "no such parameter"), ("flat:m=3", "no such parameter"), ("hnswlib:m=1", "2 to 512"),
        ("hnswlib:m=0x10", "2 to 512"), ("hnswlib:ef=-1", "1 to"), ("hnswlib:ef=", "1 to"),
        ("usearch:dtype=f64", "f32, bf16, f16, i8"), ("usearch:m=4,m=8", "twice"), ("hnswlib:ef=²", "1 to"),
        ("hnswlib:ef=99999999999999999999", "1 to"),
        ("usearch:ef=" + "/".join(str(n) for n in range(1, 202)), "too many"),
    ],
    ids=lambda value: value[:24] or "empty",
)  # fmt: skip
def test_wrong_parameters_are_refused(text, said):
    with pytest.raises(InputError) as refused:
        parse_index(text)
    assert said in str(refused.value)
