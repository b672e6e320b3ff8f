"""Software stacks by name: their lineage and the traits the cost model asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from meshwright.catalog.engines import ANY, engine_facts
from meshwright.catalog.entries import DATA
from meshwright.errors import UnknownNameError
from meshwright.files import record_of, toml_table
from meshwright.specs.features import FORCED_BALANCE, AttentionKernel, CudaGraphs, Dispatcher, Features, WireFormat
from meshwright.specs.hardware import Accelerator, Stack
from meshwright.specs.run import Run

_FILE = DATA / "stacks.toml"
PADS_TO_CAPACITY, PADS_TO_BUSIEST = 1, 2


@dataclass(frozen=True, kw_only=True)
class Release:
    """Switches of a stack since a date, on all accelerators and in all number formats or on those named."""

    since: float = 0.0
    features: Features
    on: tuple[str, ...] = ()  # architectures or accelerators; empty: all
    formats: tuple[str, ...] = ()  # precision recipes; empty: all
    name: str = ""  # of the release whose date `since` is; releases without one share the name before them


@dataclass(frozen=True, kw_only=True)
class StackFacts:
    """Facts about a framework. `newest`: the latest vintage with data, as a decimal year."""

    name: str
    title: str
    lineage: str
    source: str
    newest: float
    releases: tuple[Release, ...] = ()
    unfused_norm: bool = False
    overlaps_data: bool = False
    remakes_logits: bool = False  # of a chunk of the loss in the backward pass, as none are kept
    stops_recompute: bool = False  # before the last GEMM of a layer, whose output no gradient needs
    stops_until: float = 10_000.0  # the same of layers that no compiler has: until this vintage
    rates_of: str = ""  # the stack whose measured rates stand for this one; empty: its own
    eager: bool = False
    updates_on_host: bool = False  # offloaded optimizer states, on one thread of each process
    keeps_masters: bool = False  # on the device where FSDP shards them, when optimizer states are offloaded
    gathers_keys: bool = False  # of context ranks before attention, which is one kernel then
    ragged_tile_rows: int = 0  # of a tile of its grouped GEMM, which experts share at their ends; 0: they share none
    one_grouped_kernel: bool = False  # experts' GEMMs are one kernel, not one for each expert
    copies_rows: bool = False  # to each rank that holds a part of an expert, instead of gathering there
    pads_to_busiest: bool = False  # every expert of a rank to the rows of the busiest
    routed_copies: tuple[tuple[float, float, float], ...] = ()  # (since, accesses, accesses where it compiles)
    regathers: bool = False  # a layer for its backward pass where a pipeline keeps gradients unreduced
    copies_shards: bool = False  # of layers from and to the buffers of their collectives
    narrow_gathers: tuple[str, ...] = ()  # precisions whose casts tensor ranks gather
    narrow_reductions: tuple[str, ...] = ()  # precisions in which gradients that FSDP shards are reduced in 16 bits
    own_kernels: bool = False  # element-wise work and loss run by `meshwright.kernels`

    def release_name(self, vintage: float) -> str:
        """The last named release up to `vintage`, in the order of their dates; the year where none is named."""
        named = [(r.since, r.name) for r in self.releases if r.name and r.since <= vintage]
        return max(named)[1] if named else str(int(vintage))

    def pads_experts(self, features: Features) -> int:
        """Return to what experts are padded under these switches; 0: they compute the rows that they have."""
        return PADS_TO_CAPACITY if features.pads_experts else PADS_TO_BUSIEST * self.pads_to_busiest

    def shard_bytes(self, features: Features, precision: str) -> float:
        """Bytes in which a gradient that FSDP shards is reduced, where they are not those of others; else 0."""
        return 2.0 * (features.gradient_format is None and precision in self.narrow_reductions)

    @property
    def unfused_attention(self) -> bool:
        """True if the stack writes the scores of attention to memory."""
        return features_of(Stack(framework=self.name)).attention is AttentionKernel.UNFUSED


def stack_names() -> list[str]:
    """All frameworks of the catalogue."""
    return sorted(toml_table(_FILE))


@cache
def stack_facts(framework: str) -> StackFacts:
    """Facts about one framework; UnknownNameError names the nearest known one."""
    if framework not in stack_names():
        error = UnknownNameError("stack", framework, known=stack_names())
        error.hint = f"{error.hint}; another trainer is `other`, with its sharding held: --fix sharding=parameters"
        raise error
    values = toml_table(_FILE)[framework]
    releases = tuple(_release(entry) for entry in values.get("releases", ()))
    return record_of(StackFacts, values, name=framework, releases=releases)


def _release(entry: dict[str, Any]) -> Release:
    own = {key: entry[key] for key in ("since", "name", "on", "formats") if key in entry}
    switches = {key: value for key, value in entry.items() if key not in (*own, "source")}
    return record_of(Release, own, features=features_from(switches))


def features_from(switches: Mapping[str, Any]) -> Features:
    """Switches as a table of the catalogue writes them."""
    kinds = {
        "cuda_graphs": CudaGraphs, "dispatcher": Dispatcher, "attention": AttentionKernel,
        "gradient_format": WireFormat, "parameter_format": WireFormat, "capacity_factor": float,
        "expert_imbalance": float, "attention_tile": int,
    }  # fmt: skip
    return Features(**{key: kinds.get(key, bool)(value) for key, value in switches.items()})


_PLAIN = Features(
    cuda_graphs=CudaGraphs.NONE,
    dispatcher=Dispatcher.ALL_TO_ALL,
    overlaps_experts=False,
    drops_tokens=False,
    attention=AttentionKernel.FA2,
    fuses_attention_backward=True,
    fp8_attention=False,
    compiles=False,
    overlaps_tensor=False,
    fuses_experts=False,
    reduces_once=False,
    offloaded_activations=0.0,
    expert_imbalance=FORCED_BALANCE,
)
"""Switches that no run, engine or release sets. Formats on the wire come from the precision recipe."""


def features_of(stack: Stack, accelerator: Accelerator | None = None, *, precision: str = "") -> Features:
    """All switches of a stack: its own, else its engine's, its release's, a plain stack's.

    The latest release up to the stack's vintage decides each switch; one for some accelerators precedes one for all,
    and of these one for some number formats. `precision`: name of the run's recipe; empty: none of those.
    """
    facts = stack_facts(stack.framework)
    vintage = facts.newest if stack.vintage is None else stack.vintage
    found = stack.features.or_else(stack.preset)
    names = {accelerator.name, accelerator.architecture} if accelerator else set[str]()
    known = [
        r
        for r in facts.releases
        if r.since <= vintage and (not r.on or names & set(r.on)) and (not r.formats or precision in r.formats)
    ]
    for release in sorted(known, key=lambda r: (r.since, bool(r.on), bool(r.formats)), reverse=True):
        of_release = release.features
        if precision == "fp32":  # gradients have the format of their weights, unless a run states another
            of_release = replace(of_release, gradient_format=None)
        found = found.or_else(of_release)
    return found.or_else(_PLAIN)


def switches_of(run: Run) -> Features:
    """All switches of `run`, with which it is estimated and which its engine sets."""
    accelerator = run.cluster.accelerator if run.cluster else None
    return features_of(run.stack, accelerator, precision=run.precision.name)


def stack_for_engine(engine: str, *, vendor: str = "") -> Stack:
    """The stack that stands for an engine on a vendor's accelerators, at the newest vintage with data."""
    facts = engine_facts(engine)
    return Stack(framework=dict(facts.stack_by_vendor).get(vendor, facts.stack))


def notes_on_framework(engine: str, stack: Stack, *, vendor: str) -> tuple[str, ...]:
    """Return a note where `stack` is of another program than `engine`, as its estimate then is.

    NeMo, Megatron-Bridge and AMD's Primus all run Megatron-Core, Primus-torchtitan runs torchtitan; `engine: any` is no
    program.
    """
    own = stack_facts(stack_for_engine(engine, vendor=vendor).framework)
    asked = stack_facts(stack.framework)
    of_megatron = all(facts.lineage.startswith("megatron-core") for facts in (own, asked))
    if engine == ANY or of_megatron or asked.name.endswith(own.name):
        return ()
    return (
        f"stack.framework: estimates are of {asked.name}, as the run asks, and {engine_facts(engine).title} is another "
        f"program: without the key they are of {own.name}",
    )
