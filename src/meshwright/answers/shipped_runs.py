"""The run files that ship, on the devices of the published documents that they come from."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright import runfile
from meshwright.answers.run_estimate import RunEstimate, estimate_run
from meshwright.catalog import lookup as catalog
from meshwright.errors import InfeasibleError

DEVICES = ("mi300x", "mi325x", "mi355x", "h100", "h200", "b200")
MOST_DOUBLINGS = 5


def on_each_device(name: str) -> Iterator[RunEstimate]:
    """The run file `name` on each of `DEVICES`; see `on_device`."""
    for device in DEVICES:
        yield on_device(name, device)


def on_device(name: str, device: str) -> RunEstimate:
    """The planner's best plan of the run file `name` on nodes of `device`, with its estimate.

    The number of nodes is the file's, doubled until a plan fits. Raises InfeasibleError when none
    does.
    """
    cluster = runfile.load(name).cluster
    assert cluster is not None  # files that ship name one
    num_nodes = cluster.num_nodes
    for _ in range(MOST_DOUBLINGS):
        try:
            return _estimate(name, device, num_nodes)
        except InfeasibleError:
            num_nodes *= 2
    return _estimate(name, device, num_nodes)


def _estimate(name: str, device: str, num_nodes: int) -> RunEstimate:
    cluster = f"{device}-{catalog.usual_devices_per_node(device)}x{num_nodes}"
    return estimate_run(runfile.load(name, overrides=[f"cluster={cluster}"]))
