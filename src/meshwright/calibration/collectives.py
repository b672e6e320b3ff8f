"""Calibrated constants of collectives: one entry per link technology, read from data with its sources."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from meshwright.files import toml_table
from meshwright.specs.estimate import Tier
from meshwright.specs.hardware import Fabric

T = TypeVar("T")

_FILE = Path(__file__).parent / "data" / "collectives.toml"

GENERIC = "generic"
"""Technology of a fabric that the data does not name: guessed values between known technologies."""


@dataclass(frozen=True, kw_only=True)
class ScaleUpConstants:
    """Efficiency of a scale-up link and overhead of a collective on it."""

    efficiency: float  # ratio of the nominal rate that ring traffic reaches on large messages
    all_to_all_efficiency: float  # the same for all-to-all and for a pair of ranks
    in_switch_efficiency: float  # the same where the switch reduces (NVLS); 0: it cannot
    launch_s: float  # per collective, on the device
    step_s: float  # software per dependent step, on top of the fabric's nominal latency
    fill_s: float  # pipeline fill of the bulk protocol, paid in full by large messages
    fill_bytes: float  # message size at which half of fill_s is paid


@dataclass(frozen=True, kw_only=True)
class ScaleOutConstants:
    """Efficiency of a network and overhead of a step over it."""

    efficiency: float  # ratio of the nominal rate that ring traffic reaches on large messages
    all_to_all_efficiency: float  # the same for all-to-all
    step_s: float  # software per dependent step, on top of the fabric's nominal latency
    message_s: float  # per remote peer of a flat all-to-all
    routing_efficiency: float  # of the spine, after the collisions of flows hashed onto links
    congestion_exponent: float  # the rate falls as (domains/2)^-x; 0 on a quiet fabric
    log_gather: int  # 1: the library has all-gather and reduce-scatter in log2(domains) steps


@dataclass(frozen=True, kw_only=True)
class CollectiveConstants:
    """Both tiers of one fabric. `tier` is the worse of the two entries' tiers."""

    up: ScaleUpConstants
    out: ScaleOutConstants
    overlap_ratio: float  # share of the shorter tier's time that hierarchical all-reduce hides
    tier: Tier


def constants_for(fabric: Fabric) -> CollectiveConstants:
    """The constants of a fabric, by its name; a fabric that the data does not name gets `generic` ones.

    `network_of` names the constants of its network, where a run states another kind of network.
    """
    known = toml_table(_FILE)["fabrics"]
    own, network = known.get(fabric.name, {}), known.get(fabric.network_of or fabric.name, {})
    return constants_from(scale_up=own.get("scale_up", GENERIC), scale_out=network.get("scale_out", GENERIC))


def constants_from(*, scale_up: str = GENERIC, scale_out: str = GENERIC) -> CollectiveConstants:
    """The constants of a pair of link technologies, named as in the data."""
    data = toml_table(_FILE)
    up, out = data["scale_up"][scale_up], data["scale_out"][scale_out]
    return CollectiveConstants(
        up=_build(ScaleUpConstants, up),
        out=_build(ScaleOutConstants, out),
        overlap_ratio=data["hierarchical"]["overlap_ratio"],
        tier=max(Tier[up["tier"].upper()], Tier[out["tier"].upper()]),
    )


def _build(kind: type[T], entry: dict[str, Any]) -> T:
    return kind(**{f.name: entry[f.name] for f in fields(kind)})  # pyright: ignore[reportArgumentType]
