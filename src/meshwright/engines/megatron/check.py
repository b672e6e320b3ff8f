"""Parts of a run that Megatron-Core 0.16 does not support, with reasons. Pure: Megatron need not be installed.

Training here does not use Transformer Engine. Megatron-LM and Megatron-Bridge do, so that the files for them support
more (`check_export`) than training here (`check`).

Plans are checked with the planner's rules for this engine, so that the planner proposes only what the engine accepts.
Conditions on the machine are checked in `contract.prepare`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from meshwright.catalog.stacks import switches_of
from meshwright.engines import refusals
from meshwright.engines.base import Unsupported
from meshwright.engines.megatron.megatron_core.constructors import LR_DECAY_STYLES, OF_ENGINE, biases
from meshwright.engines.megatron.switches import fuses_experts, keeps_fp8_on_the_wire, offloaded_layers
from meshwright.engines.refusals import applying
from meshwright.specs.features import FUSED_IN, CudaGraphs, Dispatcher, WireFormat
from meshwright.specs.model import AttentionKind, Experts, Model, Rope, RopeScaling, Router
from meshwright.specs.model_parts import parts_of
from meshwright.specs.plan import Offload, Plan
from meshwright.specs.run import Run, StateFormat, Task

if TYPE_CHECKING:
    from meshwright.training.data import Corpus

NEEDS_ENGINE = "needs Transformer Engine, which is not used"
PRECISIONS = ("fp32", "bf16")
FP8_ATTENTION = ("fp8", "fp8_delayed", "mxfp8")  # its recipes by block and NVFP4 refuse fp8_dpa
YARN_CONTEXT = 4096  # original context of latent attention's YARN scaling: Megatron-LM has no option for it
LLAMA3_CONTEXT = 8192  # original context of Megatron's Llama 3.1 scaling, fixed as are the frequencies 1 and 4


def check(run: Run) -> tuple[Unsupported, ...]:
    """Parts of `run` that training here does not support; empty if it supports all."""
    return _problems(run, trains_here=True)


def check_export(run: Run) -> tuple[Unsupported, ...]:
    """Parts of `run` that the files for Megatron-LM and Megatron-Bridge do not support either."""
    return _problems(run, trains_here=False)


def _problems(run: Run, *, trains_here: bool) -> tuple[Unsupported, ...]:
    checks = (partial(_model, run.model), partial(_numbers, run), partial(_training, run))
    problems = [problem for check in checks for problem in check(trains_here=trains_here)]
    if not trains_here:
        problems += _offloading(run)
    if run.plan is not None:
        problems += check_plan(run.plan, run=run, trains_here=trains_here)
    return tuple(problems)


def _model(model: Model, *, trains_here: bool) -> Iterator[Unsupported]:
    """Reasons for which GPTModel does not support `model`."""
    a, is_latent = model.attention, model.attention.kind is AttentionKind.MLA
    for is_unsupported, what in (
        (trains_here and not model.gated_ffn and model.experts is not None, "experts without a gate"),
        (biases(model) is None or (a.bias and is_latent), "biases of some matrices of layers"),
        (trains_here and model.num_windowed_layers > 0, "windows, which need Transformer Engine,"),
        (trains_here and is_latent, "latent attention, which needs Transformer Engine,"),
    ):
        yield from applying((is_unsupported, "model", f"{what} of {model.name} are not lowered"))
    has: dict[str, Any] = {} if is_latent else {"rope.rotated_share": model.rope.rotated_share}
    has |= {} if trains_here else {path: value for path, value in parts_of(model).items() if path in OF_ENGINE}
    has |= {"attention.output_bias": a.output_bias, "ffn_bias": model.ffn_bias}
    yield from refusals.model_parts(model, has=has)
    if trains_here:
        yield from refusals.predictions(model)
    other_width = a.kind is AttentionKind.GQA and a.v_dim != a.head_dim
    yield from applying((other_width, "model", f"values of {model.name} have another width than keys"))
    yield from _latent_rope(model.rope) if is_latent and not trains_here else _rope(model.rope)
    if model.experts is not None:
        yield from _experts(model.experts)


def _rope(rope: Rope) -> Iterator[Unsupported]:
    is_scaled, is_llama3 = rope.scaling is not RopeScaling.NONE, rope.scaling is RopeScaling.LLAMA3
    fixed = (rope.original_context, rope.low_frequency, rope.high_frequency)
    llama3 = f"Megatron's llama3 RoPE scaling has original context {LLAMA3_CONTEXT} and frequencies 1 and 4"
    return applying(
        (is_scaled and not is_llama3, "model", "RoPE scaling must be llama3 or none"),
        (is_llama3 and fixed != (LLAMA3_CONTEXT, 1.0, 4.0), "model", llama3),
    )


def _latent_rope(rope: Rope) -> Iterator[Unsupported]:
    is_scaled, is_yarn = rope.scaling is not RopeScaling.NONE, rope.scaling is RopeScaling.YARN
    fixed = (rope.original_context, rope.beta_fast, rope.beta_slow, rope.truncate)
    yarn = f"Megatron-LM's YARN has an original context of {YARN_CONTEXT}, beta_fast 32 and beta_slow 1"
    return applying(
        (is_yarn and fixed != (YARN_CONTEXT, 32.0, 1.0, True), "model", yarn),
        (is_scaled and not is_yarn, "model", "RoPE scaling of latent attention must be yarn or none"),
    )


def _experts(x: Experts) -> Iterator[Unsupported]:
    sigmoid = x.router is Router.SIGMOID
    num_best, of_megatron = 2 if sigmoid else 1, x.top_k // max(1, x.groups_per_token)
    by_group = f"Megatron scores a group by its {of_megatron} best experts, the model by {num_best}"
    return applying(
        (sigmoid and not x.normalize_top_k, "model", "Megatron normalises the weights of sigmoid routers"),
        (x.num_groups and of_megatron != num_best, "model", by_group),
    )


def _numbers(run: Run, *, trains_here: bool) -> Iterator[Unsupported]:
    if trains_here:
        yield from refusals.other_precisions(run, among=PRECISIONS, reason=NEEDS_ENGINE)
    else:
        yield from refusals.other_precisions(run)
    states = run.optimizer.states
    narrow_states = trains_here and states is not StateFormat.FP32
    rows, name = run.model.learned_positions, run.model.name
    positions = f"Megatron-Bridge has a learned position for each token of a sequence, {name} has {rows}"
    yield from applying(
        (narrow_states, "optimizer.states", "16-bit states need Transformer Engine: must be fp32"),
        (states is StateFormat.INT8, "optimizer.states", "Transformer Engine's AdamW has none in int8: fp32 or bf16"),
        (rows not in (0, run.sequence_length), "data.sequence_length", positions, f"data.sequence_length: {rows}"),
    )
    yield from refusals.absent_experts(run)
    yield from _switches(run, trains_here=trains_here)
    yield from _balance(run)
    yield from refusals.other_schedules(run, LR_DECAY_STYLES)
    yield from refusals.regularisers(run)
    yield from refusals.absent_parts(run)


def _switches(run: Run, *, trains_here: bool) -> Iterator[Unsupported]:
    """Switches of software that need Transformer Engine, and their conditions there."""
    features, precision = switches_of(run), run.precision.name
    of_engine = ("fp8_attention", "fuses_experts", "offloaded_activations") if trains_here else ()
    capacity = "drops_tokens" if features.capacity_factor is None else "capacity_factor"
    yield from applying(
        *((getattr(features, key), f"stack.{key}", NEEDS_ENGINE) for key in of_engine),
        (run.model.experts is None and features.has_capacity, f"stack.{capacity}",
         f"{run.model.name} has no experts: leave it out"),
        (features.gradient_format is WireFormat.BF16 and precision == "fp32", "stack.gradient_format",
         "gradients of weights in fp32 are reduced in fp32", "stack.gradient_format: fp32"),
    )  # fmt: skip
    yield from refusals.stated_reductions(run)
    if trains_here:
        return
    gathers_in_fp8 = run.stack.features.parameter_format is WireFormat.FP8
    yield from applying(
        (gathers_in_fp8 and not keeps_fp8_on_the_wire(run.precision), "stack.parameter_format",
         f"weights are not gathered in 8 bits under {precision}: leave it out"),
        (features.fp8_attention and precision not in FP8_ATTENTION, "stack.fp8_attention",
         f"Transformer Engine has no attention in fp8 under {precision}", f"precision: {', '.join(FP8_ATTENTION)}"),
        (fuses_experts(run) and precision != FUSED_IN, "stack.fuses_experts",
         f"fused kernels of experts exist only in {FUSED_IN}", f"precision: {FUSED_IN}"),
        (features.has_capacity and features.dispatcher is Dispatcher.DEEPEP, "stack.dispatcher",
         "DeepEP does not pad experts to a capacity (moe_pad_expert_input_to_capacity)",
         "stack.dispatcher: all-to-all or hybridep"),
    )  # fmt: skip


def _offloading(run: Run) -> Iterator[Unsupported]:
    """Conditions of `cpu_offloading`, which keeps the activations of whole layers in host memory, for any plan."""
    key, layers, num_layers = "stack.offloaded_activations", offloaded_layers(run), run.model.num_layers
    if not layers:
        return
    best = min(max(round(layers), 1), num_layers - 1)
    share = switches_of(run).offloaded_activations or 0.0
    whole = (
        f"Megatron keeps whole layers in host memory, at most {num_layers - 1} of {num_layers}, and {share:g} of them "
        f"are {layers:.4g}"
    )
    has_graphs = switches_of(run).cuda_graphs not in (None, CudaGraphs.NONE)
    is_possible = layers == int(layers) and layers < num_layers
    yield from applying(
        (not is_possible, key, whole, f"--set {key}={best / num_layers:.4g} is {best} layers"),
        (has_graphs, key, "Megatron does not offload activations under CUDA graphs"),
    )


def _balance(run: Run) -> Iterator[Unsupported]:
    x = run.model.experts
    sigmoid = x is not None and x.router is Router.SIGMOID
    is_other = run.train.balance_loss and x is not None and (sigmoid or x.num_groups)
    reason = (
        "Megatron counts experts with the highest scores, not those that routing biases or groups choose: must be 0"
    )
    hint = "train.balance_bias_rate balances sigmoid routers" if sigmoid else None
    return applying((is_other, "train.balance_loss", reason, hint))


def _training(run: Run, *, trains_here: bool) -> Iterator[Unsupported]:
    yield from refusals.training(run, own=refusals.OF_OWN_DATA if trains_here else ())
    yield from applying(
        (run.task is not Task.PRETRAIN, "task", "Megatron-Core has no adapters: must be pretrain"),
        (run.train.compile, "train.compile", "is not lowered: must be false"),
        (run.train.trackers, "train.trackers", "only the step log is written: leave it out"),
    )


def check_plan(plan: Plan, *, run: Run, trains_here: bool = True) -> list[Unsupported]:
    """Parts of `plan` that Megatron-Core 0.16 does not support; `trains_here`: without Transformer Engine."""
    return [
        *refusals.by_planner_rules(plan, run=run, engine="megatron"),
        *(_without_transformer_engine(plan) if trains_here else ()),
    ]


def _without_transformer_engine(plan: Plan) -> Iterator[Unsupported]:
    return applying(
        (plan.offload is Offload.OPTIMIZER, "parallel.offload",
         "optimizer states in host memory are copied by streams of CUDA, which is not used: must be none"),
        (plan.context > 1, "parallel.context",
         "needs attention of Transformer Engine, which is not used: must be 1",
         "`meshwright plan --fix context=1` plans without it, `meshwright export` writes it for Megatron-LM"),
        ("activation" in plan.recompute_modules, "parallel.recompute",
         "activations of experts are recomputed in grouped GEMMs of Transformer Engine, which is not used"),
    )  # fmt: skip


def notes_on_data(run: Run, corpus: Corpus) -> Iterator[str]:
    """A note if the losses or biases of the router are of padding too, which it counts as tokens."""
    x, train = run.model.experts, run.train
    has_biases = x is not None and x.router is Router.SIGMOID and train.balance_bias_rate > 0
    counts = {"balance loss": train.balance_loss, "z-loss": train.router_z_loss, "routing biases": has_biases}
    if x is None or not any(counts.values()):
        return
    where = " and ".join(name for name, is_on in counts.items() if is_on)
    for name, usage in corpus.train_usages.items():
        if usage.num_padded:
            yield (
                f"{100 * usage.padding_ratio:.1f} % of the positions of {name} are padding, which Megatron's router "
                f"counts in its {where}; the native engine does not"
            )
