"""Generations: every line is in the order in which its accelerators were announced, and names its source."""

from __future__ import annotations

import tomllib

import pytest

from meshwright.catalog import lookup as catalog
from meshwright.catalog.accelerators import line_of_succession, product_lines
from meshwright.catalog.entries import DATA


def announced(name: str) -> str:
    path = DATA / "accelerators" / f"{name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))["announced"]


@pytest.mark.parametrize("line", product_lines(), ids=lambda line: f"{line.vendor} {line.name}")
def test_a_line_is_in_the_order_of_announcement(line):
    first = [min(announced(name) for name in names) for names in line.generations]
    assert first == sorted(first)
    assert line.source
    for name in (n for names in line.generations for n in names):
        assert catalog.accelerator(name).vendor == line.vendor


def test_every_accelerator_of_a_vendor_has_its_place():
    placed = {n for line in product_lines() for names in line.generations for n in names}
    known = {a for a in catalog.accelerator_names() if catalog.accelerator(a).vendor != "generic"}
    assert known == placed


@pytest.mark.parametrize(
    ("older", "newer", "line"),
    [
        ("tpu-v5p", "tpu7x", "TPUs with 3D tori"), ("tpu-v5e", "tpu-v6e", "TPUs with 2D tori"),
        ("tpu-v5p", "tpu-v6e", None), ("gaudi2", "gaudi3", "Gaudi"), ("gaudi3", "gaudi2", None),
        ("a100", "b300", "data centre GPUs"), ("rtx-a6000", "l40s", "workstation and consumer GPUs"),
        ("h100", "mi300x", None), ("h100", "h200", None),
    ],
)  # fmt: skip
def test_succession(older, newer, line):
    found = line_of_succession(older, newer)
    assert (None if found is None else found.name) == line
