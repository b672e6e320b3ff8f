"""Fabric of a source's description."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from importlib.resources import files

import pytest
from tests.shipped_rows import shipped_runs

from meshwright.accuracy.tables import cluster_of
from meshwright.catalog import lookup as catalog
from meshwright.catalog.clusters import placed_fabric
from meshwright.catalog.interconnects import fabric_named_by

RULES = tomllib.loads((files("meshwright.catalog") / "data" / "interconnects.toml").read_text(encoding="utf-8"))[
    "interconnect"
]


@pytest.mark.parametrize(
    ("description", "accelerator", "fabric"),
    [
        ("NVLink4 8-GPU; AWS EFA between nodes", "h100", "aws-efa-p5"),
        ("NVLink3 8-GPU; 4x100 Gb/s Omni-Path per node (Jean Zay)", "a100", "omni-path-100-a100"),
        ("meta grand teton", "h100-96gb", "grand-teton-roce"),
        ("NVLink intra-node (4 GPUs); InfiniBand NDR 400 Gb/s", "h200", "nvlink-4-mesh-ndr"),
        ("NVLink4 8-GPU, 4 GPUs used", "h200", None),
        ("AWS EFA", "b200", None),  # a rule for another accelerator
        ("", "h100", None),
        ("NVLink4 8-GPU + IB (platform default, not stated on page)", "h100", None),  # "dEFAult"
    ],
)
def test_description(description, accelerator, fabric):
    assert fabric_named_by(description, accelerator) == fabric


@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r['description']}-{r['fabric']}")
def test_every_rule_names_what_the_catalogue_has(rule):
    re.compile(rule["description"])
    assert rule["fabric"] in catalog.fabric_names()
    assert all(catalog.accelerator(name).name == name for name in rule["accelerators"])


@pytest.fixture(scope="module")
def published():
    return [run for run in shipped_runs() if run.conditions is not None]


def test_every_rule_is_used_by_a_published_run(published):
    """A rule that matches nothing is a typing error or a leftover."""
    used = {fabric_named_by(r.conditions.fabric_hint, r.conditions.accelerator.name) for r in published}
    assert {rule["fabric"] for rule in RULES} - used == set()


def test_text_without_a_rule_runs_on_the_usual_fabric(published):
    for run in published[::50]:
        c = run.conditions
        named = fabric_named_by(c.fabric_hint, c.accelerator.name)
        assert cluster_of(c).fabric.name == (named or catalog.default_fabric_name(c.accelerator.name))


def test_two_of_four_joined_devices_have_a_third_of_the_links():
    assert placed_fabric("nvlink-4-mesh-ndr", devices_per_node=2, num_nodes=1).scale_up_bytes_per_s == 150e9


def test_a_description_of_smaller_nodes_than_the_run_has_names_no_fabric(published):
    whole = next(r.conditions for r in published if r.conditions.accelerator.name == "h200")
    described = replace(whole, fabric_hint="NVLink (4 GPUs)", devices_per_node=8, num_nodes=1)
    assert cluster_of(described).fabric.scale_up_domain == 8
    four = replace(described, devices_per_node=4)
    assert cluster_of(four).fabric.name == "nvlink-4-mesh-ndr"
