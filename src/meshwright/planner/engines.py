"""Facts about an engine before it runs: the choices that it offers, and the plans that it refuses.

Each engine's own `facts` holds this, read in the validators of the version that its adapter targets. Only what an
engine lists is offered; what upstream cannot do is a legality rule with a reason, never a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from meshwright.arrays import Mask
from meshwright.catalog import lookup as catalog
from meshwright.cost.tables import BatchTable, ModelTable, PlanTable
from meshwright.specs.features import RELEASE_DEFAULTS, Features, Preset
from meshwright.specs.hardware import Accelerator
from meshwright.specs.model import Model
from meshwright.specs.plan import RECOMPUTE_MODULES, AxisOrder, Recompute, Schedule, Sharding
from meshwright.specs.run import Optimizer

CHEAP = ("norm", "activation")


class AnyValue:
    """All values of a switch: of a number, for instance."""

    def __contains__(self, value: object) -> bool:
        return True


class Scope(IntEnum):
    """Part of a plan that a rule needs; the search applies each rule as early as it can."""

    SHAPE = 0  # degrees and schedule
    BATCH = 1  # ... and the micro-batch
    CHOICE = 2  # ... and sharding, recomputation, offload
    CHOICE_ONLY = 3  # these, whatever the shape and the micro-batch


class Severity(Enum):
    """Meaning of a broken rule."""

    REFUSED = "refused"  # the engine does not run it
    DISCOURAGED = "discouraged"  # it runs, and is known to be slow


@dataclass(frozen=True, kw_only=True)
class LegalityContext:
    """Everything but the plan that legality depends on."""

    model: ModelTable
    batch: BatchTable
    num_devices: int
    domain: int  # devices joined by the scale-up link
    facts: EngineFacts
    stored: frozenset[str] = frozenset()  # modules whose activations the run stores in 8 bits
    narrow_weights: bool = False  # GEMMs multiply 8 bits or fewer
    element_bytes: float = 2.0  # of an activation between layers
    precision: str = "bf16"  # name of the recipe
    optimizer: Optimizer = field(default_factory=Optimizer)
    is_compiled: bool = False
    counts_labels: bool = False  # steps take as many micro-batches as their labels ask for
    has_pairs: bool = False  # the loss is one of pairs of answers
    has_completions: bool = False  # or of completions of the model
    drops_attention: bool = False  # probabilities of attention are dropped
    caches_weights: bool = False  # the run asks for a cache of 8-bit weights
    loss_chunk: int = -1  # tokens whose logits are in memory at once, as the run asks; 0: all; -1: the engine's
    jax_devices: int = 1  # that JAX shows for one device
    software: Features = RELEASE_DEFAULTS  # all its switches


@dataclass(frozen=True, kw_only=True)
class Rule:
    """`holds` is true where a plan keeps the rule; `says` explains one plan that does not, or all of them."""

    name: str
    scope: Scope = Scope.CHOICE
    holds: Callable[[LegalityContext, PlanTable], Mask]
    says: Callable[[LegalityContext, PlanTable], str] | str
    severity: Severity = Severity.REFUSED
    after: str | None = None
    """Of an engine's own rule: the shared one behind which messages have it. None: it comes last."""
    key: str = "parallel"
    """Of a run file, to which an engine's refusal points."""
    hint: Callable[[LegalityContext, PlanTable], str | None] | str | None = None
    """A change with which one plan, or every plan, keeps the rule."""

    def explained(self, context: LegalityContext, plan: PlanTable) -> tuple[str, str | None]:
        """Return message and hint for the one plan of a table."""
        says, hint = self.says, self.hint
        message = says(context, plan) if callable(says) else says
        return message, hint(context, plan) if callable(hint) else hint


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """The choices that one engine offers; it has no others."""

    title: str  # in messages, with the version that this is about
    stack: str  # the framework whose measurements stand for it, as `meshwright.catalog.stacks` has it
    stack_by_vendor: tuple[tuple[str, str], ...] = ()  # (vendor, another one on its accelerators)
    vendors: tuple[str, ...] = ()
    """Of the catalogue's accelerators on which it runs; empty: all. This machine is asked before a training."""
    vendors_source: str = ""  # where that was read
    precisions: tuple[str, ...] = ()  # recipes that a program of it trains in; empty: all
    schedules: tuple[Schedule, ...]
    shardings: tuple[Sharding, ...]
    recomputes: tuple[Recompute, ...]
    selective: tuple[tuple[str, ...], ...] | None = ()  # sets of modules it can name; None: any set
    partial_full: bool = False  # full recomputation of the first k layers of a rank
    dense_activation: bool = False  # recomputes activations of dense feed-forward blocks apart
    uneven_layers: bool = False  # first and last stage may hold fewer layers
    any_vocabulary: bool = False  # tensor ranks need not divide it: it is padded, or split unevenly
    repeats_kv_heads: bool = False  # where there are fewer than tensor ranks
    any_replicas: bool = False  # replicas of shards with whole parameters too
    whole_sequences: bool = False  # experts under tensor parallelism without sequence parallelism
    splits_no_experts: bool = False  # some or all experts under tensor parallelism need whole sequences
    short_interleaving: bool = False  # fewer interleaved micro-batches than pipeline ranks
    axis_orders: tuple[AxisOrder, ...] = (AxisOrder.PIPELINE_OUTERMOST,)
    narrow_states: bool = False  # optimizer states in 16 bits, stored activations in 8
    updates_16_bits: bool = False  # weights without an fp32 copy
    offloads_optimizer: bool = False  # keeps its states in host memory
    stored_modules: tuple[str, ...] = ()  # that can keep their activations in 8 bits
    weight_caches: tuple[str, ...] = ()  # of 8-bit weights, besides what it does by itself
    loss: str = "logits of all tokens of a micro-batch at once"  # how the head's loss is computed
    loss_chunks: bool = False  # the tokens whose logits are in memory at once are a choice of the plan
    context_block: int = 1  # tokens: the slices of context parallelism are multiples of it
    switches: tuple[tuple[str, Container[object]], ...] = ()
    """Switches of software (`specs.features`) with the values that the engine sets where a run file states them."""
    preset: Callable[[Model, Preset, Accelerator | None], Features] = lambda *_: RELEASE_DEFAULTS
    """Those that `export` and `train` set for a model on a device where a run file states none.

    None: as the release does. The device is None where it is not known.
    """
    agreed: Callable[[Features, Features], Features] = lambda *_: RELEASE_DEFAULTS
    """Switches in place of a recipe's that do not run together, of what a run states and of all that it would have."""
    compiles_on_request: bool = False  # a compiler fuses kernels where `train.compile` is true, and only there
    exported_switches: tuple[tuple[str, Container[object]], ...] = ()
    """Further ones, which only files for its own programs set."""
    rules: tuple[Rule, ...] = ()  # what this engine alone refuses
    configurations: tuple[str, ...] = ()
    """Endings of its own configurations' names (".toml"), by which `import` knows them; ":" is MODULE:FUNCTION."""
    source: str  # where all this was read


def engine_facts(engine: str) -> EngineFacts:
    """Facts about the engine of this name. Raises as `catalog.engine_facts`."""
    return catalog.engine_facts(engine)


def selective_sets(facts: EngineFacts, *, is_moe: bool, is_mla: bool, has_shared: bool) -> list[tuple[str, ...]]:
    """Sets of modules worth recomputing, cheapest first, that the engine can name.

    A module is worth naming when it frees much memory per second of work: norms and activations first, the
    latent up-projection of MLA next, whole feed-forward blocks last.
    """
    block = "moe" if is_moe else "mlp"
    ladder = [("core_attention",), ("norm",), ("activation",), CHEAP, ("norm", block), (block,)]
    if has_shared:
        ladder.append((*CHEAP, "shared_experts"))
    if is_mla:
        ladder += [("mla_up_projection",), ("mla_up_projection", *CHEAP), ("mla_up_projection", "norm", block)]
    if facts.selective is not None:
        ladder = sets_for(facts.selective, is_moe=is_moe)
    return [tuple(m for m in RECOMPUTE_MODULES if m in modules) for modules in ladder]


def sets_for(sets: Iterable[tuple[str, ...]], *, is_moe: bool) -> list[tuple[str, ...]]:
    """Return the sets without feed-forward blocks of the other kind: some engines have one name for both."""
    absent = "mlp" if is_moe else "moe"
    return [modules for modules in sets if absent not in modules]
