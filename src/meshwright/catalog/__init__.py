"""Look-up of what Meshwright knows: models, accelerators, fabrics, clusters, claims, prices, run files.

Every value has its source beside it in `data/`; `entry` returns both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.catalog.accelerators import (
    accelerator,
    accelerator_names,
    accelerator_with_driver_name,
    default_fabric_name,
    driver_name_of_pci_id,
    usual_devices_per_node,
)
from meshwright.catalog.claims import Claim, all_claims, claim
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

if TYPE_CHECKING:
    from meshwright.report.catalog_listing import CatalogListing

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
    "accelerators",
    "all_claims",
    "claim",
    "claims",
    "cluster",
    "clusters",
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
    "models",
    "placed_fabric",
    "power_assumptions",
    "price_per_device_hour",
    "prices",
    "run_file_names",
    "run_file_text",
    "runs",
    "usual_devices_per_node",
]


# The listings of the Python API. They show parameters that the cost model counts, so they are made above this room
# and imported when they are called. They come after the imports: modules of this room have the same names.


def models() -> CatalogListing:
    """List all models with their parameters and shapes. See `meshwright.api.catalog`."""
    from meshwright.api import catalog

    return catalog.models()


def accelerators() -> CatalogListing:
    """List all accelerators with dense peak rates, memory and links. See `meshwright.api.catalog`."""
    from meshwright.api import catalog

    return catalog.accelerators()


def clusters() -> CatalogListing:
    """List all fabrics that clusters are made of; `listing[name]` is a cluster. See `meshwright.api.catalog`."""
    from meshwright.api import catalog

    return catalog.clusters()


def claims(*, predict: bool = False) -> CatalogListing:
    """List all published claims. See `meshwright.api.catalog`."""
    from meshwright.api import catalog

    return catalog.claims(predict=predict)


def runs(*, predict: bool = False) -> CatalogListing:
    """List the run files that ship. See `meshwright.api.catalog`."""
    from meshwright.api import catalog

    return catalog.runs(predict=predict)
