"""Look-up of what Meshwright knows: models, accelerators, fabrics, clusters, claims, prices, run files.

Every value has its source beside it in `data/`; `entry` returns both.
"""

from meshwright.catalog.accelerators import (
    accelerator,
    accelerator_names,
    accelerator_with_driver_name,
    default_fabric_name,
    driver_name_of_pci_id,
    usual_devices_per_node,
)
from meshwright.catalog.claims import Claim, claim, claims
from meshwright.catalog.clusters import NAMING_RULE, cluster, fabric, fabric_names, placed_fabric
from meshwright.catalog.engines import engine_facts, engine_names
from meshwright.catalog.entries import Entry, Kind, entry
from meshwright.catalog.models import model, model_names
from meshwright.catalog.prices import (
    PowerAssumptions,
    Price,
    power_assumptions,
    price_per_device_hour,
    prices,
)
from meshwright.catalog.run_files import run_file_names, run_file_text

__all__ = [
    "NAMING_RULE",
    "Claim",
    "Entry",
    "Kind",
    "PowerAssumptions",
    "Price",
    "accelerator",
    "accelerator_names",
    "accelerator_with_driver_name",
    "claim",
    "claims",
    "cluster",
    "default_fabric_name",
    "driver_name_of_pci_id",
    "engine_facts",
    "engine_names",
    "entry",
    "fabric",
    "fabric_names",
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
