"""Parts of a run that Megatron-Core 0.16 does not support, with reasons. Pure: Megatron need not be installed.

Training here does not use Transformer Engine. Megatron-LM and Megatron-Bridge do, so that the files for them support
more (`check_export`) than training here (`check`).

Plans are checked with the planner's rules for this engine, so that the planner proposes only what the engine accepts.
Conditions on the machine are checked in `contract.prepare`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshwright.catalog.stacks import switches_of
from meshwright.engines import refusals
from meshwright.engines.base import Unsupported
from meshwright.engines.megatron.megatron_core.constructors import LR_DECAY_STYLES, OF_ENGINE, biases
from meshwright.engines.megatron.switches import fuses_experts, keeps_fp8_on_the_wire, offloaded_layers
from meshwright.specs.features import FUSED_IN, CudaGraphs, Dispatcher, WireFormat
from meshwright.specs.model import AttentionKind, Experts, Model, Rope, RopeScaling, Router
from meshwright.specs.model_parts import parts_of
from meshwright.specs.plan import Offload, Plan
from meshwright.specs.run import Run, StateFormat, Task

if TYPE_CHECKING:
    from meshwright.training.data import Corpus

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
    problems = [*_model(run.model, trains_here=trains_here), *_numbers(run, trains_here=trains_here), *_training(run)]
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
        if is_unsupported:
            yield Unsupported(key="model", reason=f"{what} of {model.name} are not lowered")
    has: dict[str, Any] = {} if is_latent else {"rope.rotated_share": model.rope.rotated_share}
    has |= {} if trains_here else {path: value for path, value in parts_of(model).items() if path in OF_ENGINE}
    has |= {"attention.output_bias": a.output_bias, "ffn_bias": model.ffn_bias}
    yield from refusals.model_parts(model, has=has)
    if trains_here:
        yield from refusals.predictions(model)
    if a.kind is AttentionKind.GQA and a.v_dim != a.head_dim:
        yield Unsupported(key="model", reason=f"values of {model.name} have another width than keys")
    yield from _latent_rope(model.rope) if is_latent and not trains_here else _rope(model.rope)
    if model.experts is not None:
        yield from _experts(model.experts)


def _rope(rope: Rope) -> Iterator[Unsupported]:
    if rope.scaling not in (RopeScaling.NONE, RopeScaling.LLAMA3):
        yield Unsupported(key="model", reason="RoPE scaling must be llama3 or none")
    fixed = (rope.original_context, rope.low_frequency, rope.high_frequency)
    if rope.scaling is RopeScaling.LLAMA3 and fixed != (LLAMA3_CONTEXT, 1.0, 4.0):
        yield Unsupported(
            key="model",
            reason=f"Megatron's llama3 RoPE scaling has original context {LLAMA3_CONTEXT} and frequencies 1 and 4",
        )


def _latent_rope(rope: Rope) -> Iterator[Unsupported]:
    fixed = (rope.original_context, rope.beta_fast, rope.beta_slow, rope.truncate)
    if rope.scaling is RopeScaling.YARN and fixed != (YARN_CONTEXT, 32.0, 1.0, True):
        yield Unsupported(
            key="model",
            reason=f"Megatron-LM's YARN has an original context of {YARN_CONTEXT}, beta_fast 32 and beta_slow 1",
        )
    if rope.scaling not in (RopeScaling.NONE, RopeScaling.YARN):
        yield Unsupported(key="model", reason="RoPE scaling of latent attention must be yarn or none")


def _experts(x: Experts) -> Iterator[Unsupported]:
    sigmoid = x.router is Router.SIGMOID
    if sigmoid and not x.normalize_top_k:
        yield Unsupported(key="model", reason="Megatron normalises the weights of sigmoid routers")
    num_best = 2 if sigmoid else 1
    if x.num_groups and x.top_k // max(1, x.groups_per_token) != num_best:
        yield Unsupported(
            key="model",
            reason=f"Megatron scores a group by its {x.top_k // max(1, x.groups_per_token)} best experts, "
            f"the model by {num_best}",
        )


def _numbers(run: Run, *, trains_here: bool) -> Iterator[Unsupported]:
    if trains_here:
        reason = "needs Transformer Engine, which is not used"
        yield from refusals.other_precisions(run, among=PRECISIONS, reason=reason)
    else:
        yield from refusals.other_precisions(run)
    if run.optimizer.states is not StateFormat.FP32 and trains_here:
        yield Unsupported(key="optimizer.states", reason="16-bit states need Transformer Engine: must be fp32")
    if run.model.learned_positions not in (0, run.sequence_length):
        rows = run.model.learned_positions
        yield Unsupported(
            key="data.sequence_length",
            reason=f"Megatron-Bridge has a learned position for each token of a sequence, {run.model.name} has {rows}",
            hint=f"data.sequence_length: {rows}",
        )
    yield from refusals.absent_experts(run)
    yield from refusals.capacity_without_experts(run)
    yield from _switches(run, trains_here=trains_here)
    yield from _balance(run)
    yield from refusals.other_schedules(run, LR_DECAY_STYLES)
    yield from refusals.regularisers(run)
    yield from refusals.absent_parts(run)


def _switches(run: Run, *, trains_here: bool) -> Iterator[Unsupported]:
    """Switches of software that need Transformer Engine, and their conditions there."""
    features = switches_of(run)
    for key in ("fp8_attention", "fuses_experts", "offloaded_activations"):
        if getattr(features, key) and trains_here:
            yield Unsupported(key=f"stack.{key}", reason="needs Transformer Engine, which is not used")
    if features.gradient_format is WireFormat.BF16 and run.precision.name == "fp32":
        yield Unsupported(
            key="stack.gradient_format",
            reason="gradients of weights in fp32 are reduced in fp32",
            hint="stack.gradient_format: fp32",
        )
    if trains_here:
        return
    if run.stack.features.parameter_format is WireFormat.FP8 and not keeps_fp8_on_the_wire(run.precision):
        yield Unsupported(
            key="stack.parameter_format",
            reason=f"weights are not gathered in 8 bits under {run.precision.name}: leave it out",
        )
    if features.fp8_attention and run.precision.name not in FP8_ATTENTION:
        yield Unsupported(
            key="stack.fp8_attention",
            reason=f"Transformer Engine has no attention in fp8 under {run.precision.name}",
            hint=f"precision: {', '.join(FP8_ATTENTION)}",
        )
    if fuses_experts(run) and run.precision.name != FUSED_IN:
        yield Unsupported(
            key="stack.fuses_experts",
            reason=f"fused kernels of experts exist only in {FUSED_IN}",
            hint=f"precision: {FUSED_IN}",
        )
    if features.has_capacity and features.dispatcher is Dispatcher.DEEPEP:
        yield Unsupported(
            key="stack.dispatcher",
            reason="DeepEP does not pad experts to a capacity (moe_pad_expert_input_to_capacity)",
            hint="stack.dispatcher: all-to-all or hybridep",
        )


def _offloading(run: Run) -> Iterator[Unsupported]:
    """Conditions of `cpu_offloading`, which keeps the activations of whole layers in host memory, for any plan."""
    key, layers, num_layers = "stack.offloaded_activations", offloaded_layers(run), run.model.num_layers
    if not layers:
        return
    if layers != int(layers) or layers >= num_layers:
        best = min(max(round(layers), 1), num_layers - 1)
        yield Unsupported(
            key=key,
            reason=f"Megatron keeps whole layers in host memory, at most {num_layers - 1} of {num_layers}, and "
            f"{switches_of(run).offloaded_activations:g} of them are {layers:.4g}",
            hint=f"--set {key}={best / num_layers:.4g} is {best} layers",
        )
    if switches_of(run).cuda_graphs not in (None, CudaGraphs.NONE):
        yield Unsupported(key=key, reason="Megatron does not offload activations under CUDA graphs")


def _balance(run: Run) -> Iterator[Unsupported]:
    x = run.model.experts
    if run.train.balance_loss and x is not None and (x.router is Router.SIGMOID or x.num_groups):
        yield Unsupported(
            key="train.balance_loss",
            reason="Megatron counts experts with the highest scores, not those that routing biases or groups choose: "
            "must be 0",
            hint="train.balance_bias_rate balances sigmoid routers" if x.router is Router.SIGMOID else None,
        )


def _training(run: Run) -> Iterator[Unsupported]:
    yield from refusals.training(run)
    if run.task is not Task.PRETRAIN:
        yield Unsupported(key="task", reason="Megatron-Core has no adapters: must be pretrain")
    if run.train.compile:
        yield Unsupported(key="train.compile", reason="is not lowered: must be false")
    if run.train.trackers:
        yield Unsupported(key="train.trackers", reason="only the step log is written: leave it out")


def check_plan(plan: Plan, *, run: Run, trains_here: bool = True) -> list[Unsupported]:
    """Parts of `plan` that Megatron-Core 0.16 does not support; `trains_here`: without Transformer Engine."""
    return [
        *refusals.by_planner_rules(plan, run=run, engine="megatron"),
        *(_without_transformer_engine(plan) if trains_here else _offloading(run)),
    ]


def _without_transformer_engine(plan: Plan) -> Iterator[Unsupported]:
    if plan.offload is Offload.OPTIMIZER:
        yield Unsupported(
            key="parallel.offload",
            reason="optimizer states in host memory are copied by streams of CUDA, which is not used: must be none",
        )
    if plan.context > 1:
        yield Unsupported(
            key="parallel.context",
            reason="needs attention of Transformer Engine, which is not used: must be 1",
            hint="`meshwright plan --fix context=1` plans without it, `meshwright export` writes it for Megatron-LM",
        )
    if "activation" in plan.recompute_modules:
        yield Unsupported(
            key="parallel.recompute",
            reason="activations of experts are recomputed in grouped GEMMs of Transformer Engine, which is not used",
        )


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
