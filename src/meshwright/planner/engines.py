"""What each engine accepts, read in the validators of the version that its adapter targets.

Only what an engine lists is offered; what upstream cannot do is a legality rule with a reason, never a patch.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.specs.plan import RECOMPUTE_MODULES, Recompute, Schedule, Sharding
from meshwright.specs.run import Engine

CHEAP = ("norm", "activation")


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """The choices one engine offers."""

    engine: Engine
    version: str
    schedules: tuple[Schedule, ...]
    shardings: tuple[Sharding, ...]
    recomputes: tuple[Recompute, ...]
    selective: tuple[tuple[str, ...], ...] | None  # sets of modules it can name; None: any set
    partial_full: bool  # full recomputation of the first k layers of a rank
    uneven_layers: bool  # first and last stage may hold fewer layers
    source: str

    @property
    def title(self) -> str:
        return f"{self.engine.value} {self.version}".strip()


_ALL_SHARDINGS = tuple(Sharding)
_ALL_RECOMPUTES = tuple(Recompute)

ENGINES: dict[Engine, EngineFacts] = {
    facts.engine: facts
    for facts in (
        EngineFacts(
            engine=Engine.NATIVE,
            version="",
            # DualPipe holds every stage on two ranks, which the runtime under it does not know.
            schedules=tuple(s for s in Schedule if s is not Schedule.DUALPIPE),
            shardings=_ALL_SHARDINGS,
            recomputes=_ALL_RECOMPUTES,
            selective=None,
            partial_full=True,
            uneven_layers=True,
            source="Meshwright's own engine",
        ),
        EngineFacts(
            engine=Engine.TORCHTITAN,
            version="0.3.0",
            # Its zero-bubble schedules are interleaved or V-shaped, its DualPipe is V-shaped.
            schedules=(Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.ZBV),
            shardings=(Sharding.NONE, Sharding.GRADIENTS, Sharding.PARAMETERS),
            recomputes=_ALL_RECOMPUTES,
            selective=(("alternate_matmuls",),),  # its policy by operation keeps every second product
            partial_full=False,
            uneven_layers=True,
            source="torchtitan 0.3.0: config/configs.py, distributed/*.py",
        ),
        EngineFacts(
            engine=Engine.MEGATRON,
            version="0.16",
            schedules=(Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED),
            shardings=(Sharding.NONE, Sharding.OPTIMIZER, Sharding.PARAMETERS),
            recomputes=_ALL_RECOMPUTES,
            selective=None,
            partial_full=True,
            uneven_layers=True,
            source="megatron-core 0.16.1: transformer/transformer_config.py, pipeline_parallel/schedules.py",
        ),
        EngineFacts(
            engine=Engine.MAXTEXT,
            version="0.2.5",
            schedules=(
                Schedule.GPIPE,
                Schedule.INTERLEAVED,
            ),  # scan over iterations; "circular" when repeated
            shardings=(Sharding.NONE, Sharding.OPTIMIZER, Sharding.PARAMETERS),
            recomputes=(Recompute.SELECTIVE, Recompute.FULL),
            selective=(CHEAP, ("core_attention", *CHEAP), (*CHEAP, "mlp"), (*CHEAP, "moe")),
            partial_full=False,
            uneven_layers=False,
            source="MaxText 0.2.5: configs/types.py (RematPolicy, pipeline checks)",
        ),
    )
}


def engine_facts(engine: Engine) -> EngineFacts:
    """What `engine` accepts."""
    return ENGINES[engine]


def selective_sets(
    facts: EngineFacts, *, is_moe: bool, is_mla: bool, has_shared: bool
) -> list[tuple[str, ...]]:
    """Sets of modules worth recomputing, cheapest first, that `facts.engine` can name.

    A module is worth naming when it frees much memory per second of work: norms and activations first, the
    latent up-projection of MLA next, whole feed-forward blocks last.
    """
    block = "moe" if is_moe else "mlp"
    ladder = [("core_attention",), ("norm",), ("activation",), CHEAP, ("norm", block), (block,)]
    if has_shared:
        ladder.append((*CHEAP, "shared_experts"))
    if is_mla:
        ladder += [
            ("mla_up_projection",),
            ("mla_up_projection", *CHEAP),
            ("mla_up_projection", "norm", block),
        ]
    if facts.selective is not None:
        ladder = [modules for modules in facts.selective if _exists(modules, is_moe=is_moe)]
    return [_ordered(modules) for modules in ladder]


def _exists(modules: tuple[str, ...], *, is_moe: bool) -> bool:
    return ("mlp" if is_moe else "moe") not in modules


def _ordered(modules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(m for m in RECOMPUTE_MODULES if m in modules)
