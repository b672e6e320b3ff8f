"""Reasons for refusal that several engines have. An engine's `check` uses those that apply to it.

Reasons of a single engine are in that engine's `check`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from meshwright.catalog.engines import runs_on, says_where
from meshwright.catalog.families import FAMILIES
from meshwright.catalog.precisions import nearest_precision, usable_precisions
from meshwright.catalog.stacks import switches_of
from meshwright.engines.base import Unsupported
from meshwright.engines.software_line import is_of_another_program
from meshwright.errors import InputError
from meshwright.planner.engines import Severity, engine_facts
from meshwright.planner.legality import run_context, violations
from meshwright.specs.features import WIRE_BYTES, Preset
from meshwright.specs.model import QKV, BaseFormat, Lora, Model, Router
from meshwright.specs.model_parts import ABSENT, parts_of
from meshwright.specs.plan import Plan, Recompute
from meshwright.specs.run import (
    BIAS_RATE,
    MTP_LOSS_WEIGHT,
    Evaluate,
    FaultAction,
    KernelChoices,
    LearningRateSchedule,
    Run,
)


def unknown_keys(
    given: Iterable[str], known: Collection[str], *, program: str, ignore: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the keys of `given` that are ignored: those of `ignore`, which must be unknown keys of `given`.

    Raises InputError with every other key that `program` does not have, each with the nearest known one.
    """
    unknown = dict.fromkeys(str(key) for key in given if key not in known)
    if kept := [key for key in ignore if key in known]:
        raise InputError(
            f"--ignore is for keys that {program} does not have, and this one is read", got=", ".join(kept),
            hint="change its value in a copy of the configuration",
        )  # fmt: skip
    if absent := [key for key in ignore if key not in unknown]:
        raise InputError("--ignore: the configuration has no such key", got=", ".join(absent))
    if left := [key for key in unknown if key not in ignore]:
        near = {key: difflib.get_close_matches(key, known, n=1) for key in left}
        hints = [f"did you mean {found[0]} for {key}?" for key, found in near.items() if found]
        hint = f"did you mean {near[left[0]][0]}?" if len(left) == len(hints) == 1 else " ".join(hints)
        way = f"{' '.join(f'--ignore {key}' for key in left)} leaves out what does not concern the step"
        raise InputError(f"{program} has no such key", got=", ".join(left), hint=f"{hint} {way}".strip())
    return tuple(ignore)


def ignored_note(keys: Collection[str]) -> list[str]:
    """Return the note on keys that were ignored; none if there are none."""
    return [f"--ignore left out {', '.join(keys)}, which is not known"] if keys else []


def early_fall_note(*, decay: int, steps: int, warmup: int) -> list[str]:
    """Return the note on a decay of WSD that would begin within the warm-up; none for another."""
    if decay <= steps - warmup:
        return []
    note = (
        f"the decay of {decay} steps begins within the warm-up of {warmup}, after which its rate jumps down; the run's"
    )
    return [f"{note} falls from the peak over the {max(0, steps - warmup)} steps that are left"]


def by_planner_rules(
    plan: Plan, *, run: Run, engine: str, among: Collection[str] | None = None
) -> Iterator[Unsupported]:
    """Refusals of `plan` by the planner's rules for `engine`: the planner proposes only what the engine accepts.

    `among`: names of the rules that are asked; None: all.
    """
    for violation in violations(plan, context=run_context(run, plan, engine=engine)):
        if violation.severity is Severity.REFUSED and (among is None or violation.rule in among):
            yield Unsupported(
                key=violation.key, reason=violation.message, hint=violation.hint or _hint(violation.rule, run, engine)
            )


def _hint(rule: str, run: Run, engine: str) -> str | None:
    """Hint with the values that `engine` supports where `rule` is violated; None for rules about degrees."""
    facts = engine_facts(engine)
    if rule == "schedule":
        return " or ".join(f"--set parallel.schedule={schedule.value}" for schedule in facts.schedules)
    if rule not in ("recomputation", "recomputed modules"):
        return None
    whole = [kind.value for kind in facts.recomputes if kind is not Recompute.SELECTIVE]
    absent = "moe" if run.model.experts is None else "mlp" if not run.model.num_dense_layers else ""
    lists = [f"{{modules: [{', '.join(names)}]}}" for names in facts.selective or () if absent not in names]
    return " or ".join(f"--set 'parallel.recompute={kind}'" for kind in (*whole, *lists))


def applying(*reasons: tuple[object, str, str] | tuple[object, str, str, str | None]) -> Iterator[Unsupported]:
    """Yield the refusals that apply: each of `reasons` says whether it does, the key, the reason and perhaps a hint."""
    for applies, key, reason, *hint in reasons:
        if applies:
            yield Unsupported(key=key, reason=reason, hint=hint[0] if hint else None)


ONLY_ESTIMATES = "`estimate` and `plan --engine any` cost it"


def plain_adapters(lora: Lora, title: str) -> Iterator[Unsupported]:
    """Adapters that other programs lack: one A for query, key and value, dropout, and ranks by matrix."""
    one_for_three = f"{title}'s adapters have an A for each matrix, and qkv has one for three"
    one_size = f"{title} has adapters of one size, and nothing else: leave it out"
    others = ("ranks", "alphas", "layers", "use_dora", "modules_to_save")
    return applying(
        (QKV in lora.targets, "lora.targets", one_for_three, "allowed: query, key, value"),
        (lora.moves_base, "lora.init", f"{title}'s adapters begin at zero: must be standard"),
        (lora.dropout, "lora.dropout", f"{title}'s adapters have no dropout: must be 0"),
        *((getattr(lora, key), f"lora.{key}", one_size) for key in others),
    )


def quantised_base(lora: Lora, reason: str) -> Iterator[Unsupported]:
    """Frozen matrices in 8 or 4 bits, with the engine that trains on them."""
    is_quantised, hint = lora.base_format is not BaseFormat.FULL, "--engine native has one"
    return applying((is_quantised, "lora.base_format", f"{reason}: must be full", hint))


def unsupported_config(run: Run) -> Iterator[Unsupported]:
    """Keys of the model's Hugging Face config that change its logits and that no engine here computes."""
    family = FAMILIES.get(run.model.family)
    parts = f"no engine computes parts of {run.model.name}: {'; '.join(run.model.unsupported)}"
    if family is not None and family.shapes_only:
        reason = f"a config of {family.architecture} is read for its shapes alone, which no engine here builds"
        yield Unsupported(key="model", reason=reason, hint=ONLY_ESTIMATES)
    yield from applying((run.model.unsupported, "model", parts, ONLY_ESTIMATES))


def model_parts(
    model: Model, *, has: Mapping[str, Any] = MappingProxyType({}), reads_fused: bool = False
) -> Iterator[Unsupported]:
    """Parts of `model` that an engine lacks. `has`: those that its layers of this family have, with their one value.

    `reads_fused`: it reads files of this family that hold several matrices as one tensor.
    """
    found = parts_of(model)
    yield from hybrids(model)
    yield from sparse_attention(model)
    for path, absent in ABSENT.items():
        if path in HYBRID_PARTS or path in SPARSE_PARTS:
            continue
        value, expected = found.get(path, absent), has.get(path, absent)
        reason = f"{path} of {model.name} is {_said(value)}, which is not lowered: must be {_said(expected)}"
        yield from applying((value != expected, "model", reason))
    fused = next(iter(family.fused), None) if (family := FAMILIES.get(model.family)) else None
    reason = f"files of {model.family} hold {fused} as one tensor, which is not lowered"
    yield from applying((fused and not reads_fused, "model", reason))


HYBRID_PARTS = ("state_space", "layer_pattern", "mtp_pattern", "linear_attention")

SPARSE_PARTS = (
    "attention.indexer", "attention.compression", "attention.output_groups", "residual_streams",
    "experts.num_hashed_layers",
)  # fmt: skip


def sparse_attention(model: Model) -> Iterator[Unsupported]:
    """Indexers, compressed keys and residual streams."""
    has = [path for path in parts_of(model) if path in SPARSE_PARTS]
    reason = f"{model.name} has sparse attention ({', '.join(has)}), which no engine here builds"
    trains = "AMD's Primus" if model.residual_streams > 1 else "Megatron-LM (experimental_attention_variant: dsa)"
    return applying((has, "model.attention", reason, f"{ONLY_ESTIMATES}; {trains} trains it"))


def hybrids(model: Model) -> Iterator[Unsupported]:
    """Layers of state space, of linear attention, or of one block each."""
    kind = model.linear_attention and model.linear_attention.kind
    linear = f"{model.name} has layers of linear attention ({kind}), which no engine here builds"
    blocks = f"{model.name} has layers of one block each, with state space, which no engine here builds"
    by_nemo, by_mamba = "Megatron-LM and NeMo train Gated DeltaNet", "Megatron-LM's pretrain_mamba.py and NeMo train it"
    return applying(
        (model.linear_attention, "model.linear_attention", linear, f"{ONLY_ESTIMATES}; {by_nemo}"),
        (model.layer_pattern, "model.layer_pattern", blocks, f"{ONLY_ESTIMATES}; {by_mamba}"),
    )


def _said(value: Any) -> str:
    """A value as run files have it."""
    return str(getattr(value, "value", value)).replace("True", "true").replace("False", "false")


def endless(run: Run) -> Iterator[Unsupported]:
    """A run without a number of steps or tokens. `train` has counted its epochs before."""
    has_epochs, hint = run.train.epochs is not None, "for example --set train.steps=100"
    counted = "`train`, and of data on this machine `export` and `launch`, count it: give a number of steps"
    return applying(
        (has_epochs, "train.epochs", counted, "for example --set train.epochs=null --set train.steps=100"),
        (not has_epochs and run.num_steps is None, "train", "says neither steps nor tokens", hint),
    )


def foreign_devices(run: Run) -> Iterator[Unsupported]:
    """Devices on which the engine does not run."""
    if run.cluster is not None and not runs_on(run.engine, run.cluster.accelerator):
        reason, hint = says_where(run.engine, run.cluster.accelerator)
        yield Unsupported(key="engine", reason=reason, hint=hint)


def other_precisions(run: Run, *, among: Collection[str] = (), reason: str = "is not lowered") -> Iterator[Unsupported]:
    """A precision in which the engine does not train; `among`: those in which it does here, empty: all of its facts.

    The hint names the nearest one that the run's devices multiply too.
    """
    trained = among or engine_facts(run.engine).precisions
    if trained and run.precision.name not in trained:
        usable = usable_precisions(run.cluster, engine=run.engine, among=trained)
        nearest = nearest_precision(run.precision, usable) if usable else ""
        hint = f"precision: {nearest} is the nearest that devices and engine run: {', '.join(usable)}"
        yield Unsupported(key="precision", reason=f"{run.precision.name} {reason}", hint=hint if usable else None)
    yield from _master_weights(run)


def _master_weights(run: Run) -> Iterator[Unsupported]:
    """Weights without an fp32 copy, for an engine that keeps one, or in a precision whose weights are as wide."""
    absent, key, facts = not run.optimizer.master_weights, "optimizer.master_weights", engine_facts(run.engine)
    is_wide = run.precision.name == "fp32"
    yield from applying(
        (absent and is_wide, key, "weights of fp32 are their own masters: must be true"),
        (absent and not is_wide and not facts.updates_16_bits, key,
         f"{facts.title} updates an fp32 copy of the weights: must be true"),
    )  # fmt: skip


def predictions(model: Model) -> Iterator[Unsupported]:
    """Multi-token prediction, for an engine that lacks it."""
    key, reason = "model.num_mtp_layers", f"multi-token prediction of {model.name} is not lowered: must be 0"
    return applying((model.num_mtp_layers, key, reason, "--set model.num_mtp_layers=0"))


REGULARISERS = ("z_loss", "label_smoothing", "neftune_alpha", "residual_dropout", "attention_dropout")


def regularisers(run: Run) -> Iterator[Unsupported]:
    """Terms of the loss, noise, averages of weights and new tokens, which the engine does not have."""
    reason = "only the native engine has it in this form: leave it out"
    return applying(
        *((getattr(run.train, key), f"train.{key}", reason) for key in REGULARISERS),
        (run.optimizer.average_decay, "optimizer.average_decay", reason),
        (run.optimizer.rate_factors, "optimizer.rate_factors", reason),
        (run.data.added_tokens, "data.added_tokens", reason),
    )


def other_schedules(run: Run, schedules: Collection[LearningRateSchedule]) -> Iterator[Unsupported]:
    """A schedule of learning rates that the engine does not have among its `schedules`."""
    schedule = run.optimizer.schedule
    reason = f"the engine has no {schedule}: {', '.join(schedules)}"
    return applying((schedule not in schedules, "optimizer.schedule", reason))


def absent_experts(run: Run) -> Iterator[Unsupported]:
    """Losses of routers for a model without experts."""
    is_dense, reason = run.model.experts is None, f"{run.model.name} has no experts: must be 0"
    return applying(
        (is_dense and run.train.balance_loss, "train.balance_loss", reason),
        (is_dense and run.train.router_z_loss, "train.router_z_loss", reason),
    )


def router_z_loss(run: Run) -> Iterator[Unsupported]:
    """A z-loss of routers, which the engine does not add."""
    is_dense = run.model.experts is None
    reason = f"{run.model.name} has no experts" if is_dense else "the engine has no z-loss of routers"
    return applying((run.train.router_z_loss, "train.router_z_loss", f"{reason}: must be 0"))


def decisive_switches(run: Run) -> Iterator[Unsupported]:
    """Switches that an engine does not set and without which it trains other numbers, or lacks memory that a plan has.

    Of others, which change only speed, a note says that they are not set.
    """
    features, known = switches_of(run), dict(engine_facts(run.engine).switches)
    for key, what in (
        ("capacity_factor", "experts have no capacity there"),
        ("drops_tokens", "experts have no capacity there"),
        ("fp8_attention", "scores and values are multiplied in 16 bits there"),
        ("offloaded_activations", "the engine keeps no such share of them in host memory"),
    ):
        value = getattr(features, key)
        lacks = value and value not in known.get(key, ())
        yield from applying((lacks, f"stack.{key}", f"{what}: leave it out", ONLY_ESTIMATES))
    yield from stated_reductions(run)


def stated_reductions(run: Run) -> Iterator[Unsupported]:
    """Formats of gathers and reductions, and gradients reduced once a step, for which the engine has no setting.

    Memory and time follow from them. An estimate of another program, as a note says, has those of that program.
    """
    if is_of_another_program(run.engine, run.stack.framework):
        return
    facts, stated, usual = engine_facts(run.engine), run.stack.features, run.precision
    by_itself = facts.preset(run.model, Preset.ENGINE, run.cluster and run.cluster.accelerator)
    for key, num_bytes in (
        ("gradient_format", usual.reduce_bytes), ("parameter_format", usual.gather_bytes), ("reduces_once", None),
    ):  # fmt: skip
        value, own = getattr(stated, key), getattr(by_itself, key)
        is_usual = not value or WIRE_BYTES.get(value) == (WIRE_BYTES[own] if own else num_bytes or 0)
        has = any(name == key and value in values for name, values in (*facts.switches, *facts.exported_switches))
        reason = f"the engine has no setting for {_said(value)}: leave it out"
        yield from applying((not is_usual and not has, f"stack.{key}", reason, ONLY_ESTIMATES))


def absent_parts(run: Run) -> Iterator[Unsupported]:
    """Settings of routing biases and of multi-token prediction for a model without them."""
    model, train = run.model, run.train
    has_biases = model.experts is not None and model.experts.router is Router.SIGMOID
    no_biases, no_predictions = (f"{model.name} has no {part}" for part in ("routing biases", "multi-token prediction"))
    return applying(
        (train.balance_bias_rate != BIAS_RATE and not has_biases, "train.balance_bias_rate", no_biases,
         "only sigmoid routers have: leave it out"),
        (train.mtp_loss_weight != MTP_LOSS_WEIGHT and not model.num_mtp_layers, "train.mtp_loss_weight",
         f"{no_predictions}: leave it out"),
    )  # fmt: skip


OF_OWN_DATA = ("joined_documents", "target_loss", "skip_first", "num_sequences")
"""Keys that engines have whose batches and evaluations are this package's own."""


def training(run: Run, *, own: Collection[str] = ()) -> Iterator[Unsupported]:
    """Settings of the training that an engine in a process of its own does not support."""
    yield from unsupported_config(run)
    yield from endless(run)
    yield from keys_of_the_native_engine(run, own=own)
    yield from nothing_to_validate_on(run)


def nothing_to_validate_on(run: Run) -> Iterator[Unsupported]:
    """Evaluation of a run on synthetic data."""
    has_none = run.data.is_synthetic and run.data.validation is None
    reason = "random tokens have no validation data"
    return applying((has_none and run.train.evaluate is not None, "train.evaluate", reason))


def keys_of_the_native_engine(run: Run, *, own: Collection[str] = ()) -> Iterator[Unsupported]:
    """Keys that only the native engine supports; `own`: last parts of those that this engine has, too."""
    data, train, evaluate, faults = run.data, run.train, run.train.evaluate, run.train.faults
    kernels = replace(run.kernels, loss_chunk="auto") if engine_facts(run.engine).loss_chunks else run.kernels
    has_several = len(data.validation_names) > 1 and (data.validation or evaluate)
    own_prefetch = "the engine prefetches data in its own way: leave it out"
    all_steps = "training ends only after all steps"

    parts = evaluate and evaluate.num_sequences and evaluate.num_sequences % run.global_batch

    def evaluates(key: str) -> bool:
        usual = getattr(Evaluate(), key)
        return key not in own and getattr(evaluate, key, usual) != usual

    return applying(
        (has_several, "data.validation", "the engine validates on one source: name one"),
        (run.optimizer.name != "adamw", "optimizer.name", f"{run.optimizer.name} is trained by the native engine only",
         "optimizer.name: adamw; or engine: native"),
        (run.label_tokens is not None, "batch.label_tokens",
         "the engine takes as many sequences in each step: leave it out"),
        (train.preference is not None, "train.preference", "the engine trains cross-entropy alone",
         "--engine native has it"),
        (train.grpo is not None, "train.grpo", "the engine writes no completions", "--engine native does"),
        (run.gemm_tuning is not None, "gemm_tuning", "only the native engine tunes GEMMs: leave it out"),
        (kernels != KernelChoices(), "kernels", "the engine has kernels of its own: leave it out"),
        (data.workers is not None, "data.workers", own_prefetch),
        (evaluates("workers"), "train.evaluate.workers", own_prefetch),
        (data.joined_documents and "joined_documents" not in own, "data.joined_documents",
         "samples end documents: must be false"),
        (evaluates("num_sequences"), "train.evaluate.num_sequences", "global batches are evaluated",
         "give num_batches in its place"),
        ("num_sequences" in own and parts, "train.evaluate.num_sequences", "whole global batches are evaluated",
         f"must be a multiple of {run.global_batch}"),
        (evaluates("skip_first"), "train.evaluate.skip_first", "no evaluation is left out: must be 0"),
        (faults.not_finite is not FaultAction.STOP, "train.faults.not_finite",
         "a non-finite loss ends the training: must be stop"),
        (faults.spike is not FaultAction.IGNORE, "train.faults.spike", "loss spikes are not detected: must be ignore"),
        (train.log_every is not None, "train.log_every", "the engine decides when it logs: leave it out"),
        (train.checkpoint and train.checkpoint.keep_best, "train.checkpoint.keep_best",
         "the engine keeps the newest: must be false"),
        (evaluates("patience"), "train.evaluate.patience", all_steps),
        (evaluates("target_loss"), "train.evaluate.target_loss", all_steps),
    )  # fmt: skip
