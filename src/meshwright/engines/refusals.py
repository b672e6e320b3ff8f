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
from meshwright.errors import InputError
from meshwright.planner.engines import Severity, engine_facts
from meshwright.planner.legality import run_context, violations
from meshwright.specs.model import QKV, BaseFormat, Lora, Model, Router
from meshwright.specs.model_parts import ABSENT, parts_of
from meshwright.specs.plan import Plan, Recompute
from meshwright.specs.run import BIAS_RATE, MTP_LOSS_WEIGHT, FaultAction, KernelChoices, LearningRateSchedule, Run


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


def plain_adapters(lora: Lora, title: str) -> Iterator[Unsupported]:
    """Adapters that other programs lack: one A for query, key and value, dropout, and ranks by matrix."""
    if QKV in lora.targets:
        yield Unsupported(
            key="lora.targets",
            reason=f"{title}'s adapters have an A for each matrix, and qkv has one for three",
            hint="allowed: query, key, value",
        )
    if lora.dropout:
        yield Unsupported(key="lora.dropout", reason=f"{title}'s adapters have no dropout: must be 0")
    for key in ("ranks", "alphas", "layers", "use_dora", "modules_to_save"):
        if getattr(lora, key):
            yield Unsupported(
                key=f"lora.{key}", reason=f"{title} has adapters of one size, and nothing else: leave it out"
            )


def quantised_base(lora: Lora, reason: str) -> Iterator[Unsupported]:
    """Frozen matrices in 8 or 4 bits, with the engine that trains on them."""
    if lora.base_format is not BaseFormat.FULL:
        yield Unsupported(key="lora.base_format", reason=f"{reason}: must be full", hint="--engine native has one")


def unsupported_config(run: Run) -> Iterator[Unsupported]:
    """Keys of the model's Hugging Face config that change its logits and that no engine here computes."""
    family = FAMILIES.get(run.model.family)
    if family is not None and family.shapes_only:
        yield Unsupported(
            key="model",
            reason=f"a config of {family.architecture} is read for its shapes alone, which no engine here builds",
            hint="`estimate` and `plan --engine any` cost it",
        )
    if run.model.unsupported:
        yield Unsupported(
            key="model",
            reason=f"no engine computes parts of {run.model.name}: {'; '.join(run.model.unsupported)}",
            hint="`estimate` and `plan --engine any` cost it",
        )


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
        if value != expected:
            yield Unsupported(
                key="model",
                reason=f"{path} of {model.name} is {_said(value)}, which is not lowered: must be {_said(expected)}",
            )
    family = FAMILIES.get(model.family)
    if family is not None and family.fused and not reads_fused:
        yield Unsupported(
            key="model",
            reason=f"files of {model.family} hold {next(iter(family.fused))} as one tensor, which is not lowered",
        )


HYBRID_PARTS = ("state_space", "layer_pattern", "mtp_pattern", "linear_attention")

SPARSE_PARTS = (
    "attention.indexer", "attention.compression", "attention.output_groups", "residual_streams",
    "experts.num_hashed_layers",
)  # fmt: skip


def sparse_attention(model: Model) -> Iterator[Unsupported]:
    """Indexers, compressed keys and residual streams."""
    if has := [path for path in parts_of(model) if path in SPARSE_PARTS]:
        streams = model.residual_streams > 1
        trains = "AMD's Primus" if streams else "Megatron-LM (experimental_attention_variant: dsa)"
        yield Unsupported(
            key="model.attention",
            reason=f"{model.name} has sparse attention ({', '.join(has)}), which no engine here builds",
            hint=f"`estimate` and `plan --engine any` cost it; {trains} trains it",
        )


def hybrids(model: Model) -> Iterator[Unsupported]:
    """Layers of state space, of linear attention, or of one block each."""
    if model.linear_attention:
        yield Unsupported(
            key="model.linear_attention",
            reason=f"{model.name} has layers of linear attention ({model.linear_attention.kind}), which no engine here "
            "builds",
            hint="`estimate` and `plan --engine any` cost it; Megatron-LM and NeMo train Gated DeltaNet",
        )
    if model.layer_pattern:
        yield Unsupported(
            key="model.layer_pattern",
            reason=f"{model.name} has layers of one block each, with state space, which no engine here builds",
            hint="`estimate` and `plan --engine any` cost it; Megatron-LM's pretrain_mamba.py and NeMo train it",
        )


def _said(value: Any) -> str:
    """A value as run files have it."""
    return str(getattr(value, "value", value)).replace("True", "true").replace("False", "false")


def endless(run: Run) -> Iterator[Unsupported]:
    """A run without a number of steps or tokens. `train` has counted its epochs before."""
    if run.train.epochs is not None:
        hint = "for example --set train.epochs=null --set train.steps=100"
        yield Unsupported(key="train.epochs", reason="only `train` counts the data: give a number of steps", hint=hint)
    elif run.num_steps is None:
        yield Unsupported(key="train", reason="says neither steps nor tokens", hint="for example --set train.steps=100")


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
        yield Unsupported(
            key="precision",
            reason=f"{run.precision.name} {reason}",
            hint=f"precision: {nearest} is the nearest that devices and engine run: {', '.join(usable)}"
            if usable
            else None,
        )


def predictions(model: Model) -> Iterator[Unsupported]:
    """Multi-token prediction, for an engine that lacks it."""
    if model.num_mtp_layers:
        yield Unsupported(
            key="model.num_mtp_layers",
            reason=f"multi-token prediction of {model.name} is not lowered: must be 0",
            hint="--set model.num_mtp_layers=0",
        )


def absent_predictions(run: Run) -> Iterator[Unsupported]:
    """A weight of multi-token prediction for a model without it."""
    if run.train.mtp_loss_weight != MTP_LOSS_WEIGHT and not run.model.num_mtp_layers:
        yield Unsupported(
            key="train.mtp_loss_weight", reason=f"{run.model.name} has no multi-token prediction: leave it out"
        )


def regularisers(run: Run) -> Iterator[Unsupported]:
    """Terms of the loss, noise, averages of weights and new tokens, which the engine does not have."""
    values = {f"train.{name}": getattr(run.train, name) for name in ("z_loss", "label_smoothing", "neftune_alpha")}
    values |= {
        "optimizer.average_decay": run.optimizer.average_decay,
        "optimizer.rate_factors": run.optimizer.rate_factors,
        "data.added_tokens": run.data.added_tokens,
    }
    for key in (key for key, value in values.items() if value):
        yield Unsupported(key=key, reason="only the native engine has it in this form: leave it out")


def other_schedules(run: Run, schedules: Collection[LearningRateSchedule]) -> Iterator[Unsupported]:
    """A schedule of learning rates that the engine does not have among its `schedules`."""
    if run.optimizer.schedule not in schedules:
        allowed = ", ".join(schedules)
        yield Unsupported(key="optimizer.schedule", reason=f"the engine has no {run.optimizer.schedule}: {allowed}")


def absent_experts(run: Run) -> Iterator[Unsupported]:
    """Losses of routers for a model without experts."""
    losses = {"balance_loss": run.train.balance_loss, "router_z_loss": run.train.router_z_loss}
    for name, coefficient in losses.items():
        if coefficient and run.model.experts is None:
            yield Unsupported(key=f"train.{name}", reason=f"{run.model.name} has no experts: must be 0")


def router_z_loss(run: Run) -> Iterator[Unsupported]:
    """A z-loss of routers, which the engine does not add."""
    if run.train.router_z_loss:
        x = run.model.experts
        reason = f"{run.model.name} has no experts" if x is None else "the engine has no z-loss of routers"
        yield Unsupported(key="train.router_z_loss", reason=f"{reason}: must be 0")


def absent_routing_biases(run: Run, *, hint: str | None = None) -> Iterator[Unsupported]:
    """An update rate of routing biases for a model without them."""
    experts = run.model.experts
    if run.train.balance_bias_rate != BIAS_RATE and (experts is None or experts.router is not Router.SIGMOID):
        yield Unsupported(key="train.balance_bias_rate", reason=f"{run.model.name} has no routing biases", hint=hint)


def switches_that_change_numbers(run: Run) -> Iterator[Unsupported]:
    """Switches of software without which an engine trains other numbers, where it does not set them.

    Of others, which change only speed and memory, a note says that they are not set.
    """
    features, known = switches_of(run), dict(engine_facts(run.engine).switches)
    for key, what in (
        ("capacity_factor", "experts have no capacity there"),
        ("drops_tokens", "experts have no capacity there"),
        ("fp8_attention", "scores and values are multiplied in 16 bits there"),
    ):
        value = getattr(features, key)
        if value and value not in known.get(key, ()):
            yield Unsupported(
                key=f"stack.{key}", reason=f"{what}: leave it out",
                hint="`plan` and `estimate` of `engine: any` cost it",
            )  # fmt: skip


def capacity_without_experts(run: Run) -> Iterator[Unsupported]:
    """A capacity of experts for a model without them."""
    if run.model.experts is None and switches_of(run).has_capacity:
        key = "drops_tokens" if switches_of(run).capacity_factor is None else "capacity_factor"
        yield Unsupported(key=f"stack.{key}", reason=f"{run.model.name} has no experts: leave it out")


def absent_parts(run: Run) -> Iterator[Unsupported]:
    """Settings of routing biases and of multi-token prediction for a model without them."""
    yield from absent_routing_biases(run)
    yield from absent_predictions(run)


def training(run: Run, *, has_target: bool = False) -> Iterator[Unsupported]:
    """Settings of the training that an engine in a process of its own does not support."""
    yield from unsupported_config(run)
    yield from endless(run)
    yield from keys_of_the_native_engine(run, has_target=has_target)
    yield from nothing_to_validate_on(run)


def nothing_to_validate_on(run: Run) -> Iterator[Unsupported]:
    """Evaluation of a run on synthetic data."""
    if run.train.evaluate is not None and run.data.is_synthetic and run.data.validation is None:
        yield Unsupported(key="train.evaluate", reason="random tokens have no validation data")


def keys_of_the_native_engine(run: Run, *, has_target: bool = False) -> Iterator[Unsupported]:
    """Keys that only the native engine supports: optimizers other than AdamW, steps by labels, pairs of answers,
    several validation sources, GEMM tuning, routes of kernels, loader processes, joined documents, evaluation of a
    number of sequences or without the first ones, rollbacks, lines of progress, the best checkpoint, patience, and a
    target loss unless the engine supports it too (`has_target`).
    """
    if len(run.data.validation_names) > 1 and (run.data.validation or run.train.evaluate):
        yield Unsupported(key="data.validation", reason="the engine validates on one source: name one")
    if run.optimizer.name != "adamw":
        yield Unsupported(
            key="optimizer.name",
            reason=f"{run.optimizer.name} is trained by the native engine only",
            hint="optimizer.name: adamw; or engine: native",
        )
    if run.label_tokens is not None:
        yield Unsupported(
            key="batch.label_tokens", reason="the engine takes as many sequences in each step: leave it out"
        )
    if run.train.preference is not None:
        yield Unsupported(
            key="train.preference", reason="the engine trains cross-entropy alone", hint="--engine native has it"
        )
    if run.gemm_tuning is not None:
        yield Unsupported(key="gemm_tuning", reason="only the native engine tunes GEMMs: leave it out")
    kernels = replace(run.kernels, loss_chunk="auto") if engine_facts(run.engine).loss_chunks else run.kernels
    if kernels != KernelChoices():
        yield Unsupported(key="kernels", reason="the engine has kernels of its own: leave it out")
    evaluate, faults = run.train.evaluate, run.train.faults
    for key, workers in (("data.workers", run.data.workers), ("train.evaluate.workers", evaluate and evaluate.workers)):
        if workers is not None:
            yield Unsupported(key=key, reason="the engine prefetches data in its own way: leave it out")
    if run.data.joined_documents:
        yield Unsupported(key="data.joined_documents", reason="samples end documents: must be false")
    if evaluate is not None and evaluate.num_sequences is not None:
        yield Unsupported(
            key="train.evaluate.num_sequences",
            reason="global batches are evaluated",
            hint="give num_batches in its place",
        )
    if evaluate is not None and evaluate.skip_first:
        yield Unsupported(key="train.evaluate.skip_first", reason="no evaluation is left out: must be 0")
    if faults.not_finite is not FaultAction.STOP:
        yield Unsupported(key="train.faults.not_finite", reason="a non-finite loss ends the training: must be stop")
    if faults.spike is not FaultAction.IGNORE:
        yield Unsupported(key="train.faults.spike", reason="loss spikes are not detected: must be ignore")
    if run.train.log_every is not None:
        yield Unsupported(key="train.log_every", reason="the engine decides when it logs: leave it out")
    if run.train.checkpoint is not None and run.train.checkpoint.keep_best:
        yield Unsupported(key="train.checkpoint.keep_best", reason="the engine keeps the newest: must be false")
    if evaluate is not None and evaluate.patience is not None:
        yield Unsupported(key="train.evaluate.patience", reason="training ends only after all steps")
    if not has_target and evaluate is not None and evaluate.target_loss is not None:
        yield Unsupported(key="train.evaluate.target_loss", reason="training ends only after all steps")
