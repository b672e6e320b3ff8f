"""Look-ups of the catalogue, for all rooms above: `from meshwright.catalog import lookup as catalog`."""

from __future__ import annotations

from meshwright.catalog.accelerators import (
    accelerator,
    accelerator_names,
    accelerator_with_driver_name,
    default_fabric_name,
    driver_name_of_pci_id,
    usual_devices_per_node,
)
from meshwright.catalog.claim_answers import Claim, all_claims, claim
from meshwright.catalog.clusters import NAMING_RULE, cluster, fabric, fabric_names, placed_fabric
from meshwright.catalog.engines import engine_facts, engine_names
from meshwright.catalog.entries import CatalogEntry, CatalogKind, entry
from meshwright.catalog.joint_clusters import joint_cluster
from meshwright.catalog.models import model, model_names
from meshwright.catalog.prices import (
    PowerAssumptions,
    Price,
    market_prices,
    power_assumptions,
    price_per_device_hour,
    prices,
)
from meshwright.catalog.run_files import run_file_names, run_file_text

__all__ = [
    "NAMING_RULE",
    "CatalogEntry",
    "CatalogKind",
    "Claim",
    "PowerAssumptions",
    "Price",
    "accelerator",
    "accelerator_names",
    "accelerator_with_driver_name",
    "all_claims",
    "claim",
    "cluster",
    "default_fabric_name",
    "driver_name_of_pci_id",
    "engine_facts",
    "engine_names",
    "entry",
    "fabric",
    "fabric_names",
    "joint_cluster",
    "market_prices",
    "model",
    "model_names",
    "placed_fabric",
    "power_assumptions",
    "price_per_device_hour",
    "prices",
    "run_file_names",
    "run_file_text",
    "usual_devices_per_node",
]
