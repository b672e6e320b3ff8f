"""Time of collectives on a scale-up tier, a scale-out tier and the spine above it.

    network   a fabric seen from one device (`Network`) and a communicator placed on it (`Group`)
    operations  seconds of all-gather, reduce-scatter, all-reduce, all-to-all, dispatch, send-receive
    constants   calibrated efficiencies and latencies, read from data

Every function is plain arithmetic on numbers or arrays; arrays broadcast.
"""

from meshwright.calibration.collectives import (
    CollectiveConstants,
    ScaleOutConstants,
    ScaleUpConstants,
    constants_for,
    constants_from,
)
from meshwright.cost.collectives.network import Group, Network, group, network_row
from meshwright.cost.collectives.operations import (
    all_gather_s,
    all_reduce_s,
    all_to_all_hierarchical_s,
    all_to_all_s,
    distinct_destinations,
    reduce_scatter_s,
    ring_all_reduce_s,
    send_receive_s,
)
