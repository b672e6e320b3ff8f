"""Recovery from failures: costs of a checkpoint and of a restart, and the spare nodes that a run needs.

Times that are published for no system are assumptions of the catalogue (`catalog.reliability`). Each
function takes `given`, a mapping from the name of an assumption to the value that the caller knows better.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshwright.arrays import Array
from meshwright.catalog import reliability
from meshwright.errors import InputError


@dataclass(frozen=True, kw_only=True)
class CheckpointCost:
    """Cost of one checkpoint: `stall_s` (delta) blocks training, `lag_s` (L) passes until it can be
    restored."""

    stall_s: Array
    lag_s: Array = 0.0


@dataclass(frozen=True, kw_only=True)
class RestartCost:
    """The parts of R: notice, get nodes and start processes, read the checkpoint, reach full speed."""

    detect_s: Array
    reschedule_s: Array
    load_s: Array
    warm_up_s: Array

    @property
    def total_s(self) -> Array:
        return self.detect_s + self.reschedule_s + self.load_s + self.warm_up_s


def checkpoint_cost(
    *, bytes_per_device: Array, num_devices: Array, given: Mapping[str, float] | None = None, asynchronous: bool = True
) -> CheckpointCost:
    """Stall and lag of one save.

    An asynchronous save blocks for a fixed part and the copy to host memory, then writes behind the next
    steps. A blocking one waits for storage, whose rate is the whole cluster's.
    """
    known = reliability.assumed(given)
    write_s = bytes_per_device * num_devices / known["storage_bytes_per_s"]
    if not asynchronous:
        return CheckpointCost(stall_s=known["save_overhead_s"] + write_s)
    copy_s = bytes_per_device / known["staging_bytes_per_s"]
    return CheckpointCost(stall_s=known["save_overhead_s"] + copy_s, lag_s=write_s)


def restart_cost(
    *, bytes_per_device: Array, num_devices: Array, given: Mapping[str, float] | None = None
) -> RestartCost:
    """The parts of R. Every state is read from storage once; replicas get it over the network."""
    known = reliability.assumed(given)
    return RestartCost(
        detect_s=known["detect_s"],
        reschedule_s=known["reschedule_s"],
        load_s=bytes_per_device * num_devices / known["storage_bytes_per_s"],
        warm_up_s=known["warm_up_s"],
    )


def nodes_in_repair(*, mtbf_s: Array, repair_s: Array, replaced_ratio: Array = 1.0) -> Array:
    """Expected number of nodes out of service: rho = replaced_ratio * repair / M (Little's law)."""
    return replaced_ratio * repair_s / mtbf_s


def spares_exhausted_ratio(*, num_spares: int, nodes_in_repair: Array) -> Array:
    """Share of time that the run waits for a node, with k spares.

    While it waits nothing fails, so at most k + 1 nodes are in repair: Erlang's loss formula B(k + 1, rho),
    by its recursion, valid for any distribution of repair times (A. K. Erlang 1917; L. Takacs 1969 for the
    insensitivity).
    """
    blocked = np.ones_like(nodes_in_repair, dtype=float)
    for servers in range(1, num_spares + 2):
        blocked = nodes_in_repair * blocked / (servers + nodes_in_repair * blocked)
    return blocked[()]


def spares_needed(*, nodes_in_repair: float, waiting_ratio: float = 0.001) -> int:
    """The smallest number of spare nodes with which the run waits at most `waiting_ratio` of the time.

    >>> spares_needed(nodes_in_repair=10.0)
    20
    """
    if not 0 < waiting_ratio < 1:
        raise InputError("the share of waiting must be inside (0, 1)", got=waiting_ratio)
    blocked, servers = 1.0, 0
    while blocked > waiting_ratio or servers == 0:
        servers += 1
        blocked = nodes_in_repair * blocked / (servers + nodes_in_repair * blocked)
    return servers - 1
