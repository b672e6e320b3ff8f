"""Map a source's description of links and network, and the kind of network that a run states, to a fabric."""

from __future__ import annotations

import re
from functools import cache

from meshwright.catalog.entries import DATA
from meshwright.files import toml_table

_FILE = DATA / "interconnects.toml"


def network_kinds() -> dict[str, str]:
    """Return the kinds of network that a run may state, each with the fabric whose latency and efficiency it has.

    >>> network_kinds()["EFA"]
    'aws-efa-p5'
    """
    return toml_table(_FILE)["networks"]


@cache
def fabric_named_by(description: str, accelerator: str) -> str | None:
    """Return the fabric of the first rule that matches, or None for the accelerator's usual fabric.

    >>> fabric_named_by("NVLink4 8-GPU; AWS EFA between nodes", "h100")
    'aws-efa-p5'
    """
    for rule in toml_table(_FILE)["interconnect"]:
        if accelerator in rule["accelerators"] and re.search(rule["description"], description, re.IGNORECASE):
            return rule["fabric"]
    return None


@cache
def says_no_bridge(description: str) -> bool:
    """Return True if a source says that the cards of its nodes have no NVLink.

    >>> says_no_bridge("PCIe only"), says_no_bridge("NVLink bridges; PCIe Gen5")
    (True, False)
    """
    return re.search(toml_table(_FILE)["without_bridge"]["words"], description, re.IGNORECASE) is not None


def fabric_without_bridge(fabric: str) -> str:
    """Return what is left of a fabric of cards without its NVLink bridges; the fabric itself if it has none.

    >>> fabric_without_bridge("nvlink-bridge"), fabric_without_bridge("pcie-4")
    ('pcie-5', 'pcie-4')
    """
    return toml_table(_FILE)["without_bridge"]["fabrics"].get(fabric, fabric)
