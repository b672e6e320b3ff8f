"""Comparison of the planner's layouts with layouts that others shipped or measured as best.

    python benchmarks/found_layouts.py [--markdown]

Each published run gives the question (model, devices, batch, sequence length, precision, software) and the axes that
its authors did not vary. The result is the rank of the published layout among all of the planner's, its predicted time
over that of the planner's best, and that best layout. A layout is a set of degrees without virtual stages. It takes
some minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from meshwright.accuracy.metrics import plan_group
from meshwright.accuracy.predict import predict
from meshwright.accuracy.rows import PublishedRun, RunConditions, read_runs
from meshwright.accuracy.shipped import measured_runs_path
from meshwright.accuracy.tables import cluster_of, tables_of
from meshwright.catalog.engines import ANY
from meshwright.cost.memory import memory_constants
from meshwright.cost.rates import system_rates
from meshwright.planner import PlanRequest, RecomputeChoice, default_space, search
from meshwright.planner.screen import CostModel, cost_model_with
from meshwright.specs.memory_budget import WHOLE_DEVICE_RATIO
from meshwright.specs.plan import Plan, Recompute, Schedule, Sharding
from meshwright.specs.precision import PRECISIONS

SHOWN = 400
"""Layouts looked through; one further down counts as not found."""

ONE_F_ONE_B = {"schedule": Schedule.ONE_F_ONE_B, "virtual_pipeline": 1, "context": 1}
ZERO_1 = {"sharding": Sharding.OPTIMIZER}
NO_SEQUENCE_PARALLELISM = {"sequence_parallel": False}
HAGEMANN = {**ONE_F_ONE_B, **ZERO_1}
VTRAIN = {**ONE_F_ONE_B, **NO_SEQUENCE_PARALLELISM, "sharding": Sharding.NONE}
BLOOM = {**ONE_F_ONE_B, **NO_SEQUENCE_PARALLELISM, **ZERO_1}
KEPT = (RecomputeChoice(),)
RECOMPUTED = (RecomputeChoice(kind=Recompute.FULL),)
EITHER = KEPT + RECOMPUTED
INTERLEAVED = {**ZERO_1, "schedule": Schedule.INTERLEAVED}
IN_TURN = {**ZERO_1, "schedule": Schedule.ONE_F_ONE_B}
FSDP_INTERLEAVED = {"sharding": Sharding.PARAMETERS, "schedule": Schedule.INTERLEAVED}
FSDP_IN_TURN = {"sharding": Sharding.PARAMETERS, "schedule": Schedule.ONE_F_ONE_B}


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published choice: the row of the measured runs, and the axes that its authors fixed."""

    id: str
    title: str
    fixed: Mapping[str, object]
    recompute: tuple[RecomputeChoice, ...] = ()  # none: as the planner chooses
    engine: str = "megatron"  # whose rules hold; the programs of mixtures have others than any engine here


DENSE = tuple(
    Published(id=id, title=title, fixed=fixed, recompute=recompute)
    for id, title, fixed, recompute in (
        ("hagemann_layouts-0001", "LLaMA 13B, best on 32 A100", HAGEMANN, EITHER),
        ("hagemann_layouts-0173", "LLaMA 30B, best on 64 A100", HAGEMANN, EITHER),
        ("hagemann_layouts-0166", "LLaMA 30B, 8192 tokens, best on 64 A100", HAGEMANN, EITHER),
        ("hagemann_layouts-0306", "LLaMA 65B, best on 64 A100", HAGEMANN, EITHER),
        ("hagemann_layouts-0331", "LLaMA 65B, best on 128 A100", HAGEMANN, EITHER),
        ("vtrain_multi-0019", "GPT 3.6B, best on 64 A100", VTRAIN, RECOMPUTED),
        ("vtrain_multi-0004", "GPT 18.4B, best on 256 A100", VTRAIN, RECOMPUTED),
        ("vtrain_multi-0050", "GPT 39.1B, best on 512 A100", VTRAIN, RECOMPUTED),
        ("vtrain_multi-0096", "GPT-3 175B, best on 512 A100", VTRAIN, RECOMPUTED),
        ("bloom_prequel-0001", "BLOOM 176B, final, 384 A100", BLOOM, RECOMPUTED),
        ("megatron_bridge-0108", "Llama 3 70B, shipped, 64 H100", ZERO_1, KEPT),
        ("megatron_bridge-0089", "Llama 3 70B, shipped, 64 GB200", ZERO_1, KEPT),
        ("megatron_bridge-0181", "Llama 3.1 405B, shipped, 1024 H100", ZERO_1, KEPT),
        ("megatron_bridge-0145", "Llama 3.1 405B, shipped, 128 B200", ZERO_1, KEPT),
        ("megatron_bridge-0178", "Llama 3.1 405B, shipped, 256 GB200", ZERO_1, KEPT),
    )
)
MIXTURES = tuple(
    Published(id=id, title=title, fixed=fixed, engine=ANY)
    for id, title, fixed in (
        ("megatron_bridge-0266", "Qwen3 235B, FP8, shipped, 256 H100", INTERLEAVED),
        ("megatron_moe_modelzoo-0005", "Qwen3 235B, BF16, shipped, 256 H100", INTERLEAVED),
        ("megatron_bridge-0241", "Qwen3 235B, MXFP8, shipped, 64 B200", INTERLEAVED),
        ("megatron_bridge-0036", "DeepSeek-V3, FP8, shipped, 1024 H100", INTERLEAVED),
        ("megatron_bridge-0023", "DeepSeek-V3, MXFP8, shipped, 256 B200", IN_TURN),
        ("megatron_bridge-0035", "DeepSeek-V3, MXFP8, shipped, 256 GB200", INTERLEAVED),
        ("nemo_automodel-0004", "Kimi K2, BF16, shipped, 256 H100", FSDP_INTERLEAVED),
        ("nemo_automodel-0003", "GPT-OSS 120B, BF16, shipped, 64 H100", FSDP_IN_TURN),
        ("megatron_bridge-0053", "GPT-OSS 120B, BF16, shipped, 64 B200", IN_TURN),
        ("megatron_bridge-0074", "GPT-OSS 120B, MXFP8, shipped, 64 GB200", IN_TURN),
    )
)
CHOICES = DENSE + MIXTURES


@dataclass(frozen=True, kw_only=True)
class Found:
    """Rank of a published layout. `gap`: its predicted step time over that of the best, minus 1."""

    choice: Published
    plan: Plan  # as published
    fits: bool  # with the published recomputation
    rank: int | None  # of all layouts, 1 is the best; None: beyond `SHOWN`
    gap: float | None
    best: Plan
    rank_of_measured: int  # of the plans that were measured for the same question
    num_measured: int


@cache
def published_runs() -> dict[str, PublishedRun]:
    return {run.id: run for run in read_runs(measured_runs_path()) if run.conditions is not None}


def request_of(conditions: RunConditions, fixed: Mapping[str, object], *, engine: str = "megatron") -> PlanRequest:
    """The authors' question as a request. They ran close to the limit of memory, so no margin is kept.

    Layers lie as theirs did: software of those years splits them evenly.
    """
    fixed = {"layers_per_stage": conditions.plan.layers_per_stage, **fixed}
    return PlanRequest(
        model=conditions.model,
        cluster=cluster_of(conditions),
        seq_len=conditions.seq_len,
        global_batch=conditions.global_batch,
        precision=PRECISIONS[conditions.precision],
        stack=conditions.stack,
        engine=engine,
        fixed=fixed,
        usable_memory_ratio=WHOLE_DEVICE_RATIO,
    )


def cost_of(request: PlanRequest, conditions: RunConditions) -> CostModel:
    """The cost model with the kernels that the row names where they are not its stack's."""
    rates = tables_of([conditions])
    facts = rates.facts.take(0)
    system = system_rates(request.cluster, request.precision, request.stack)
    device = replace(system.device, unfused_attention=facts.unfused_attention, unfused_norm=facts.unfused_norm)
    constants = memory_constants(
        request.stack, unfused_attention=bool(facts.unfused_attention), fused_norm=conditions.fused_norm
    )
    return cost_model_with(request, rates=replace(system, device=device), constants=constants)


def find(choice: Published) -> Found:
    """Search for the authors' question, and look up their layout in the result."""
    conditions = published_runs()[choice.id].conditions
    assert conditions is not None
    request = request_of(conditions, choice.fixed, engine=choice.engine)
    usual = default_space(request)
    space = replace(usual, recompute=choice.recompute or usual.recompute)
    result = search(request, top=SHOWN, space=space, model=cost_of(request, conditions))
    ranked: dict[tuple[int, ...], float] = {}
    for plan in result.plans:
        ranked.setdefault(degrees(plan.plan), plan.step_s)
    published = degrees(conditions.plan)
    rank = list(ranked).index(published) + 1 if published in ranked else None
    assert result.best is not None, choice.id
    return Found(
        choice=choice,
        plan=conditions.plan,
        rank=rank,
        gap=None if rank is None else ranked[published] / result.best.step_s - 1,
        best=result.best.plan,
        **among_measured(choice),
    )


def among_measured(choice: Published) -> dict[str, Any]:
    """Rank of the published plan among the plans measured for the same question."""
    group = plan_group(published_runs()[choice.id])
    runs = [run for run in published_runs().values() if plan_group(run) == group]
    predictions = predict(runs)
    own = next(i for i, run in enumerate(runs) if run.id == choice.id)
    rates: dict[Plan, float] = {}
    for run, rate in zip(runs, predictions.tokens_per_s_per_device, strict=True):
        assert run.conditions is not None
        rates[run.conditions.plan] = max(float(rate), rates.get(run.conditions.plan, 0.0))
    faster = sum(rate > predictions.tokens_per_s_per_device[own] * (1 + 1e-9) for rate in rates.values())
    return {"fits": bool(predictions.fits[own]), "rank_of_measured": 1 + faster, "num_measured": len(rates)}


def degrees(plan: Plan) -> tuple[int, ...]:
    """Key of a layout. Virtual stages are not in it, because authors seldom vary them."""
    return (plan.tensor, plan.context, plan.pipeline, plan.expert, plan.expert_tensor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="as the table of docs/reference/found-layouts.md")
    markdown = parser.parse_args().markdown
    if markdown:
        print("| published | layout | fits | rank | gap | ours | among measured |\n|---|---|---|--:|--:|---|---|")
    for choice in CHOICES:
        found = find(choice)
        rank = "none" if found.rank is None else str(found.rank)
        gap = "" if found.gap is None else f"{found.gap:.1%}"
        measured = f"{found.rank_of_measured} of {found.num_measured}" if found.num_measured > 1 else ""
        fits = "yes" if found.fits else "no"
        cells = (choice.title, found.plan.describe(), fits, rank, gap, found.best.describe(), measured)
        print(f"| {' | '.join(cells)} |" if markdown else "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
