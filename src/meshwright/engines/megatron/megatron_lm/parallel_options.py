"""The parallelism of Megatron-LM's options, as a run file's `parallel`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.cost.stages import layers_per_stage
from meshwright.engines.megatron.megatron_core.constructors import MODULES, recomputed_per_rank
from meshwright.engines.megatron.megatron_lm.arithmetic import MAX_LENGTH
from meshwright.engines.megatron.megatron_lm.model_options import idle_layers
from meshwright.engines.megatron.megatron_lm.options import MegatronOptions
from meshwright.errors import InputError
from meshwright.specs.hardware import Cluster
from meshwright.specs.plan import AxisOrder

STRATEGIES = {"no_shard": "none", "optim": "optimizer", "optim_grads": "gradients", "optim_grads_params": "parameters"}
MODULE_NAMES = {theirs: ours for ours, theirs in MODULES.items()}
SHARDED_WEIGHTS = ("tensor-parallel-num-weight-shards", "expert-tensor-parallel-num-weight-shards")
LAYOUT = "pipeline-model-parallel-layout"


@dataclass(frozen=True, kw_only=True)
class ParallelDegrees:
    """Widths of the parallel dimensions."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    data: int

    @classmethod
    def of(cls, options: MegatronOptions, *, cluster: Cluster) -> ParallelDegrees:
        """Return the degrees in `options`. Raises InputError if they do not fit the devices."""
        num_devices = cluster.num_devices
        tensor = options.integer("tensor-model-parallel-size", 1)
        pipeline = options.integer("pipeline-model-parallel-size", 1)
        context = options.integer("context-parallel-size", 1)
        expert = options.integer("expert-model-parallel-size", 1)
        has_experts = "num-experts" in options
        expert_tensor = options.integer("expert-tensor-parallel-size", tensor if has_experts else 1)
        given = tensor * pipeline * context
        for name in SHARDED_WEIGHTS:
            if name in options:
                got = options.text(name)
                raise InputError(f"--{name}: weights that are sharded over more than tensor ranks", got=got)
        if min(tensor, pipeline, context, expert, expert_tensor) < 1:
            raise InputError("degrees must be positive", got=f"TP{tensor} PP{pipeline} CP{context} EP{expert}")
        of_experts = pipeline * expert * expert_tensor if has_experts else 1
        hint = clusters_of(cluster, multiple_of=math.lcm(given, of_experts))
        if num_devices % given:
            got = f"tensor {tensor} x pipeline {pipeline} x context {context} = {given}"
            raise InputError(f"degrees that do not divide the cluster's {num_devices} devices", got=got, hint=hint)
        if num_devices % of_experts:
            got = f"expert {expert} x expert-tensor {expert_tensor} = {expert * expert_tensor}"
            ranks = num_devices // pipeline
            raise InputError(f"degrees that do not divide the {ranks} devices of a pipeline stage", got=got, hint=hint)
        return cls(
            tensor=tensor, pipeline=pipeline, context=context, data=num_devices // given,
            expert=expert if has_experts else 1, expert_tensor=expert_tensor if has_experts else 1,
        )  # fmt: skip


def clusters_of(cluster: Cluster, *, multiple_of: int, micro_batches: int = 0, replica: int = 1) -> str | None:
    """Return a hint: the smallest cluster of such nodes with a multiple of devices; None: there is none.

    `micro_batches`: instead the largest up to `cluster` whose replicas of `replica` devices get as many each.
    """
    nodes = cluster.devices_per_node
    counts = range(multiple_of, (cluster.num_devices if micro_batches else multiple_of * nodes) + 1, multiple_of)
    fitting = [n for n in counts if (n % nodes == 0 or n < nodes) and not micro_batches % (n // replica)]
    if cluster.parts or not fitting:
        return None
    found = fitting[-1] if micro_batches else fitting[0]
    return f"--cluster {cluster.accelerator.name}-{min(found, nodes)}x{max(1, found // nodes)} would do"


def plan_section(options: MegatronOptions, degrees: ParallelDegrees) -> dict[str, Any]:
    """Return the plan; add notes on contradictions."""
    plan: dict[str, Any] = {
        "tensor": degrees.tensor, "context": degrees.context, "pipeline": degrees.pipeline,
        "expert": degrees.expert, "expert_tensor": degrees.expert_tensor, **_sharding(options, degrees.data),
    }  # fmt: skip
    sequence = options.flag("sequence-parallel")
    if degrees.tensor > 1:
        plan["sequence_parallel"] = sequence
    elif sequence:
        options.note("--sequence-parallel has no effect without tensor parallelism")
    has_experts = "num-experts" in options
    if has_experts and degrees.tensor > 1 and not sequence:
        options.note("experts under tensor parallelism need --sequence-parallel: Megatron-LM refuses them without")
    if not has_experts:
        wanted = [name for name in options.unread if name.startswith("moe-")]
        if options.integer("expert-model-parallel-size", 1) > 1 or wanted:
            options.note("options of experts have no effect without --num-experts")
        for name in wanted:
            options.values(name)
    plan |= _stages(options, degrees)
    num_layers = options.integer("num-layers", 0) - len(idle_layers(options))
    num_stages = degrees.pipeline * plan.get("virtual_pipeline", 1)
    counts = plan.get("layers_per_stage") or layers_per_stage(num_layers, num_stages)
    plan["recompute"] = _recompute(options, counts, pipeline=degrees.pipeline)
    share = options.unread.get("optimizer-offload-fraction")
    if options.flag("optimizer-cpu-offload") and not (share and {*share.values} <= {"0", "0.0"}):
        plan["offload"] = "optimizer"
    if options.flag("use-tp-pp-dp-mapping"):
        plan["axis_order"] = AxisOrder.DATA_OUTERMOST.value
    return plan


def _sharding(options: MegatronOptions, data: int) -> dict[str, Any]:
    instances = options.integer("num-distributed-optimizer-instances", 1)
    sharding = "optimizer" if options.flag("use-distributed-optimizer") else "none"
    strategy, is_megatron_fsdp = (
        options.text("data-parallel-sharding-strategy", "no_shard"),
        options.flag("use-megatron-fsdp"),
    )
    if options.flag("use-torch-fsdp2"):
        sharding = "gradients" if options.flag("torch-fsdp2-no-reshard-after-forward") else "parameters"
    elif is_megatron_fsdp and strategy in STRATEGIES:
        sharding = STRATEGIES[strategy]
    elif strategy != "no_shard":
        options.note(f"--data-parallel-sharding-strategy {strategy} has no effect without --use-megatron-fsdp")
    if "overlap-param-gather" in options and sharding == "none":
        options.note("--overlap-param-gather has no effect without --use-distributed-optimizer")
    if instances < 1 or data % instances:
        raise InputError(f"--num-distributed-optimizer-instances does not divide {data} data ranks", got=instances)
    return {"data_shard": data // instances, "data_replicate": instances, "sharding": sharding}


def _stages(options: MegatronOptions, degrees: ParallelDegrees) -> dict[str, Any]:
    """Return the schedule, the virtual stages and the layers of each."""
    layers, pipeline = options.integer("num-layers", 0), degrees.pipeline
    idle = idle_layers(options)
    per_chunk = options.integer("num-layers-per-virtual-pipeline-stage", 0)
    chunks = options.integer("num-virtual-stages-per-pipeline-rank", 0)
    first, last = (options.integer(f"decoder-{end}-pipeline-num-layers", 0) for end in ("first", "last"))
    ends = [options.flag(f"account-for-{end}-in-pipeline-split") for end in ("embedding", "loss")]
    layout = options.text(LAYOUT)
    if pipeline == 1:
        if per_chunk or chunks > 1:
            options.note("virtual stages have no effect without --pipeline-model-parallel-size")
        return {}
    if layout:
        # The layers of every stage of a layout such as `Et*3|(tt|)*2,tL`.
        text = re.sub(r"[\s,]", "", layout)
        for repeated in (r"\(([^()]*)\)\*(\d+)", r"([A-Za-z|])\*(\d+)"):
            text = re.sub(repeated, lambda found: found[1] * min(int(found[2]), MAX_LENGTH), text)[: 10 * MAX_LENGTH]
        if not re.fullmatch(r"[EtmL|]+", text):
            raise InputError(f"--{LAYOUT} cannot be read", got=layout, allowed="E, t, m, L, |, and (...)*n")
        counts = [stage.count("t") for stage in text.split("|")]
        if len(counts) % pipeline or sum(counts) != layers:
            raise InputError(
                f"--{LAYOUT} does not assign {layers} layers to {pipeline} ranks",
                got=f"{sum(counts)} layers in {len(counts)} stages",
            )
        return _schedule(counts, pipeline)
    if (listed := options.text("num-layer-list")) and not idle:  # of MindSpeed-LLM
        counts = [int(one) if one.isdecimal() else 0 for one in listed.split(",")]
        if len(counts) != pipeline or sum(counts) != layers or 0 in counts:
            raise InputError(f"--num-layer-list does not assign {layers} layers to {pipeline} ranks", got=listed)
        return _schedule(counts, pipeline)
    if per_chunk:
        if layers % pipeline or (layers // pipeline) % per_chunk:
            raise InputError(
                f"--num-layers-per-virtual-pipeline-stage does not divide {layers} layers of {pipeline} ranks",
                got=per_chunk,
            )
        chunks = layers // pipeline // per_chunk

    counts = _even(layers, pipeline, max(1, chunks), first=first, last=last, ends=ends)
    stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
    return _schedule([count - sum(stage_of[k] == stage for k in idle) for stage, count in enumerate(counts)], pipeline)


def _even(layers: int, pipeline: int, chunks: int, *, first: int, last: int, ends: list[bool]) -> list[int]:
    """Return the layers of every stage in the order of the model: equal, except for the ranks with other options."""
    stages = pipeline * chunks
    if first or last:
        rest = layers - first - last
        ranks = pipeline - bool(first) - bool(last)
        if (rest and (not ranks or rest % (ranks * chunks))) or first % chunks or last % chunks:
            raise InputError(f"{rest} layers cannot be split over {ranks} ranks of {chunks} stages")
        middle = rest // (ranks * chunks) if ranks else 0
        one = [first // chunks if first else middle, *[middle] * (pipeline - 2), last // chunks if last else middle]
        return one * chunks
    whole = layers + sum(ends)
    if whole % stages:
        raise InputError(f"{layers} layers cannot be split over {stages} stages",
                         hint="Megatron-LM has --pipeline-model-parallel-layout for that")  # fmt: skip
    counts = [whole // stages] * stages
    counts[0] -= ends[0]
    counts[-1] -= ends[1]
    return counts


def _schedule(counts: list[int], pipeline: int) -> dict[str, Any]:
    chunks = len(counts) // pipeline
    section: dict[str, Any] = {"schedule": "1f1b"}
    if chunks > 1:
        section = {"virtual_pipeline": chunks, "schedule": "interleaved"}
    default = list(layers_per_stage(sum(counts), len(counts)))
    return section if counts == default else section | {"layers_per_stage": counts}


def _recompute(options: MegatronOptions, counts: Sequence[int], *, pipeline: int) -> Any:
    """Return the recomputation; `counts` are the layers of every stage. Megatron counts per stage, we per rank."""
    kind = "selective" if options.flag("recompute-activations") else ""
    kind = options.text("recompute-granularity", kind)
    method, count = options.text("recompute-method"), options.integer("recompute-num-layers", 0)
    modules = options.values("recompute-modules") or ("core_attn",)
    if options.flag("moe-layer-recompute") and not kind:
        kind, modules = "selective", ("moe",)
    if kind != "full" and (method or count):
        options.note(
            "--recompute-method and --recompute-num-layers have no effect without --recompute-granularity full"
        )
    if kind == "full":
        if not method:
            raise InputError("--recompute-granularity full needs --recompute-method", allowed="uniform, block")
        if method == "block":
            per_rank = recomputed_per_rank(count, counts, pipeline=pipeline)
            totals = [sum(counts[rank::pipeline]) for rank in range(pipeline)]
            most = max(per_rank)
            if per_rank != [min(most, total) for total in totals]:
                options.note(
                    f"--recompute-num-layers {count}: ranks recompute {min(per_rank)} to {most} layers, here {most}"
                )
            return {"layers": most}
        if count > 1:
            options.note(
                f"--recompute-num-layers {count}: the inputs of every layer are saved, not of every group of layers"
            )
        return "full"
    if kind == "selective":
        for module in modules:
            if module not in MODULE_NAMES:
                allowed = ", ".join(MODULE_NAMES)
                raise InputError("a module that run files do not recompute", got=module, allowed=allowed)
        return {"modules": [MODULE_NAMES[module] for module in modules]}
    return "none"
