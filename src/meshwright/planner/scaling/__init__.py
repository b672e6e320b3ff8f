"""Scaling: strong and weak scaling, emulation, replica sizes, sensitivity.

sizes        cluster, batch and plan at another size     curve      each size against the first
emulation    a small cluster that stands for a large one  replicas   which replica is best
sensitivity  what the answer owes to each assumption      spread     the interval of a comparison
"""

from meshwright.planner.scaling.curve import (
    ScaleCurve,
    ScalePoint,
    exposed_data_parallel_s,
    scale,
    tokens_in,
    with_simulations,
    with_tokens,
)
from meshwright.planner.scaling.deadline import Deadline, least_devices
from meshwright.planner.scaling.emulation import EmulatedPoint, Emulation, emulate
from meshwright.planner.scaling.replicas import Replica, rank_replicas
from meshwright.planner.scaling.sensitivity import AssumptionSwing, Sensitivity, curve_ends, emulation_ends, sensitivity
from meshwright.planner.scaling.sizes import (
    Costed,
    Mode,
    Study,
    Unreached,
    at_size,
    replica_devices,
    request_at,
    resized,
    widened,
)
from meshwright.planner.training import Training
