"""Accelerator, fabric, cluster and software stack with datasheet values. Measured rates are in `calibration`."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.specs.features import RELEASE_DEFAULTS, Features

MAX_DEVICES = 10**7
"""Most devices of a cluster: a hundred times the largest that was announced. It keeps counts in 64 bits."""

HERE = "here"
"""Name of the cluster that stands for this machine, in a run file and elsewhere."""

THIS_MACHINE = "this machine"
"""Vendor of an accelerator whose rates were measured, where the catalogue has no datasheet."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device as a scheduler counts it (one GPU, one TPU chip, one CPU socket).

    Peaks are dense, without sparsity. `peak_flops_per_s` maps a number format (fp32, bf16, fp8, int8, fp4) to FLOP/s;
    a format that is absent is not supported.
    """

    name: str
    vendor: str
    architecture: str
    peak_flops_per_s: dict[str, float]
    memory_bytes: int
    memory_bytes_per_s: float
    num_compute_units: int  # streaming multiprocessors, compute units, cores
    die: str = ""  # devices with the same die share its rates; "": a die of its own
    rates_of: str = ""  # architecture whose calibrated rates it has; "": its own
    matrix_share: float = 1.0  # matrix FLOP/s of a compute unit, relative to the architecture's fastest device
    output_tiles: bool = True  # its GEMMs are made of large output tiles; the caches of a CPU allow any shape
    cpu_oversubscription: float = 1.0  # processes per core, where there are more processes than cores
    matrix_unit_width: int = 0  # rows and columns of its systolic arrays; 0: it has none
    jax_devices: int = 1  # that JAX shows for one device
    tdp_w: float | None = None
    power_w: float | None = None  # limit below `tdp_w` that a run states; None: the usual one
    clock_ratio: float = 1.0  # of matrix units under `power_w`, against the usual limit
    clock_width: float = 0.0  # half of the 80 % interval of its logarithm
    host_bytes_per_s: float = 32e9  # host link, one direction
    scale_up_domain: int = 8  # devices joined by the scale-up link of the usual system
    scale_up_bytes_per_s: float = 0.0  # one direction per device, all links together
    scale_up_peer_bytes_per_s: float = 0.0  # one direction to one peer; smaller than all links on a mesh
    scale_out_bytes_per_s: float = 0.0  # usual network rate per device, one direction
    aliases: tuple[str, ...] = ()
    driver_names: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)  # field name -> where its value comes from

    @property
    def limited_flops_per_s(self) -> dict[str, float]:
        """The peaks at the clock that the power limit leaves."""
        return {name: peak * self.clock_ratio for name, peak in self.peak_flops_per_s.items()}


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Interconnect of devices: a scale-up tier inside a domain and a scale-out tier between domains.

    Rates are one direction per device. `oversubscription` 1.0 is a full fat tree; 2.0 has half the uplinks.
    """

    name: str
    scale_up_domain: int  # devices per domain: 8 for a node, 72 for an NVL72 rack
    scale_up_bytes_per_s: float
    scale_up_peer_bytes_per_s: float  # to one peer: equal to scale_up on a switch, 1/7 of it on an 8-GPU mesh
    scale_up_latency_s: float
    scale_out_bytes_per_s: float
    scale_out_latency_s: float
    devices_per_nic: float = 1.0  # 2.0: two devices share one network card
    rail_optimized: bool = True  # device i of every node is connected to leaf switch i
    nodes_per_pod: int = 32  # nodes below one pair of leaf switches (one scalable unit)
    oversubscription: float = 1.0  # above the leaves
    network_of: str = ""  # fabric whose kind of network it has; "": its own
    links_of: str = ""  # accelerator of a user's file whose links it has; "": its own
    sources: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`num_nodes` nodes of `devices_per_node` accelerators on one fabric.

    With `parts` accelerator, fabric and `devices_per_node` are what all of them have (`catalog.joint_clusters`).
    """

    name: str
    accelerator: Accelerator
    fabric: Fabric
    devices_per_node: int
    num_nodes: int
    parts: tuple[Cluster, ...] = ()  # of other generations or nodes: each by itself; () for one
    stated: tuple[str, ...] = ()  # what a run states of the hardware in place of the catalogue's, in words
    states_network: bool = False  # one of these is the network or its oversubscription
    host_memory_bytes: float | None = None  # of a node; None: unknown

    @property
    def num_devices(self) -> int:
        return sum(part.num_devices for part in self.parts) or self.devices_per_node * self.num_nodes

    @property
    def host_bytes_per_device(self) -> float | None:
        """Host memory of a node's share for one device, the least of all parts; None where one is unknown."""
        parts = self.parts or (self,)
        known = [part.host_memory_bytes / part.devices_per_node for part in parts if part.host_memory_bytes]
        return min(known) if len(known) == len(parts) else None

    @property
    def node_sizes(self) -> tuple[int, ...]:
        """Devices of a node, each number once, in the order of parts."""
        return tuple(dict.fromkeys(part.devices_per_node for part in self.parts or (self,)))

    @property
    def is_mixed(self) -> bool:
        """True if parts have different accelerators."""
        return len({part.accelerator.name for part in self.parts}) > 1


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The software that runs the step: rates moved 1.8x in nine months on one machine, so it is an input.

    `framework` is a key of the stack catalogue; `vintage` is the date of the software as a decimal year
    (2025.5 is the middle of 2025). None: the newest the catalogue knows. `features`: switches that a run states;
    `preset`: those that its engine sets where it states none. The release decides the others. `is_open`: the planner
    may choose switches that `features` leaves out; `chosen`: names of those in `features` that it chose.
    """

    framework: str
    vintage: float | None = None
    features: Features = RELEASE_DEFAULTS
    preset: Features = RELEASE_DEFAULTS
    is_open: bool = False
    chosen: tuple[str, ...] = field(default=(), compare=False)
