"""Check a run against this engine. Every setting that it cannot honour is refused here, with the reason.

Imports no torch, so that a dry run works without it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from meshwright.catalog.families import FAMILIES, family_that_fits
from meshwright.cost.pipeline.schedules import SCHEDULE_RECORDS, schedule_shortfall, shape_of
from meshwright.cost.stages import layers_per_stage
from meshwright.engines import refusals
from meshwright.engines.base import Unsupported
from meshwright.engines.native.facts import NARROW_UNITS, NOT_TRIED, RULES
from meshwright.engines.refusals import applying
from meshwright.specs.model import QKV, AttentionKind, BaseFormat, Lora, Model
from meshwright.specs.model_parts import NOT_BUILT, contradictions, parts_of
from meshwright.specs.plan import RECOMPUTE_MODULES, Plan, Recompute
from meshwright.specs.reinforcement import NEEDS, Grpo
from meshwright.specs.run import (
    BIAS_RATE,
    FaultAction,
    Preference,
    PreferenceLoss,
    RateGroup,
    Run,
    has_removable_reference,
)

OWN_RULES = frozenset(rule.name for rule in RULES) - set(NOT_TRIED)

WITHOUT_CHUNKS = {"reference": "has all logits at once", "liger": "chooses chunks by itself"}
"""Routes of the loss that take no chunk from outside."""


def check(run: Run) -> tuple[Unsupported, ...]:
    """Return every setting of `run` that this engine does not support; empty when it supports all."""
    problems = list(_settings(run))
    if run.plan is not None:
        problems += check_plan(run.plan, run=run)
    return tuple(problems)


def _settings(run: Run) -> Iterator[Unsupported]:
    yield from refusals.foreign_devices(run)
    yield from refusals.other_precisions(run, reason="is not trained by this version")
    yield from refusals.unsupported_config(run)
    yield from refusals.decisive_switches(run)
    if run.train.epochs is None:  # which `train` counts, on every host
        yield from refusals.endless(run)
    yield from refusals.nothing_to_validate_on(run)
    yield from refusals.absent_experts(run)
    yield from refusals.absent_parts(run)
    yield from _model(run.model)
    yield from _loss_chunk(run)
    yield from applying(
        (run.train.label_smoothing and run.model.logit_cap, "train.label_smoothing",
         "the model caps its logits: must be 0"),
        (run.train.attention_dropout and run.model.attention.score_cap, "train.attention_dropout",
         "attention with capped scores has no kernel that drops probabilities: must be 0"),
        (run.model.num_labels and run.train.preference is None, "model",
         "its head scores texts: train.preference: reward trains it"),
    )  # fmt: skip
    if run.train.preference is not None:
        yield from _preference(run.train.preference, run)
    if run.train.grpo is not None:
        yield from _grpo(run.train.grpo, run)
    yield from _rate_factors(run)
    if run.lora is not None:
        yield from _lora(run.lora, run)


def _grpo(grpo: Grpo, run: Run) -> Iterator[Unsupported]:
    key, train = "train.grpo", run.train
    divides = run.global_batch % grpo.group == 0
    steps_left = train.checkpoint is not None and train.checkpoint.every_steps % grpo.iterations
    reacts = {train.faults.not_finite, train.faults.spike} & {FaultAction.SKIP, FaultAction.ROLL_BACK}
    noise = "completions would be compared under noise: must be 0"
    for name, is_stated, reason in (
        (f"{key}.group", not divides, f"{grpo.group} does not divide batch.global_sequences = {run.global_batch}"),
        (
            f"{key}.completion_tokens",
            grpo.completion_tokens >= run.sequence_length,
            f"a prompt and its completion are in data.sequence_length = {run.sequence_length}: must be less",
        ),
        (
            f"{key}.beta",
            grpo.beta and not has_removable_reference(train, run.lora),
            "the reference is the model without its adapters, and there is no such model: must be 0",
        ),
        ("train.checkpoint.every_steps", steps_left, f"must be a multiple of {key}.iterations = {grpo.iterations}"),
        (
            "train.steps",
            (run.num_steps or 0) % grpo.iterations,
            f"{run.num_steps} steps are no multiple of {key}.iterations = {grpo.iterations}",
        ),
        ("train.faults", grpo.iterations > 1 and reacts, f"with {key}.iterations above 1 a fault can only stop"),
        ("train.preference", train.preference is not None, f"{key} is another loss: leave out one of both"),
        (
            "train.evaluate.target_loss",
            train.evaluate and train.evaluate.target_loss,
            f"the validation loss of {key} is the mean reward with a minus sign: leave it out",
        ),
        ("model", run.model.num_labels, "its head scores texts, and writes none"),
        ("model.experts", run.model.experts is not None, f"{key} is not tested with experts"),
        ("model.num_mtp_layers", run.model.num_mtp_layers, "not trained on completions: must be 0"),
        ("lora.base_format", run.lora and run.lora.base_format is not BaseFormat.FULL, f"not tested with {key}"),
        ("precision", run.precision.name not in ("fp32", "bf16"), f"{key} is not tested in {run.precision.name}"),
        ("data.source", run.data.is_synthetic, "random tokens have no answers: name prompts with answers"),
        ("data.joined_documents", run.data.joined_documents, "a completion sees its own prompt only"),
        ("batch.label_tokens", run.label_tokens, "steps are counted in completions: leave it out"),
        ("train.z_loss", train.z_loss, "the loss of completions has no z-loss: must be 0"),
        ("train.label_smoothing", train.label_smoothing, "the loss of completions has none: must be 0"),
        ("train.neftune_alpha", train.neftune_alpha, noise),
        ("train.residual_dropout", train.residual_dropout, noise),
        ("train.attention_dropout", train.attention_dropout, noise),
        ("lora.dropout", run.lora and run.lora.dropout, noise),
        ("train.compile", train.compile, "compiled layers have one length, and completions grow: leave it out"),
    ):
        yield from applying((is_stated, name, reason))
    for place, reward in enumerate(grpo.rewards):
        needed = NEEDS.get(reward.verifier)
        for name in ("pattern", "most_tokens", "command"):
            value, at = getattr(reward, name), f"{key}.rewards[{place}].{name}"
            if (value is None) == (name == needed):
                says = f"{reward.verifier} needs it" if name == needed else f"not of {reward.verifier}: leave it out"
                yield Unsupported(key=at, reason=says)


UNSMOOTHED = (PreferenceLoss.ORPO, PreferenceLoss.KTO, PreferenceLoss.REWARD)


def _preference(pairs: Preference, run: Run) -> Iterator[Unsupported]:
    key, loss = "train.preference", pairs.loss
    is_reward = loss is PreferenceLoss.REWARD
    noise = "rewards would compare noise: must be 0"
    is_weighted = {pairs.desirable_weight, pairs.undesirable_weight} != {1.0}
    for name, is_stated, reason in (
        (f"{key}.margin", pairs.margin is not None and loss is not PreferenceLoss.SIMPO, f"{loss.value} has no margin"),
        (f"{key}.label_smoothing", pairs.label_smoothing and loss in UNSMOOTHED, f"{loss.value} has none: must be 0"),
        (f"{key}.center_coefficient", pairs.center_coefficient and not is_reward, "only of reward: must be 0"),
        ("model", run.model.num_labels and not is_reward, "its head scores texts: train.preference: reward trains it"),
        (f"{key}.beta", is_reward and pairs.beta != Preference.beta, "rewards of reward have no scale: leave it out"),
        (
            "model.num_mtp_layers",
            is_reward and run.model.num_mtp_layers,
            "a reward model predicts no tokens: must be 0",
        ),
        ("data.added_tokens", is_reward and run.data.added_tokens, "not of a reward model: leave it out"),
        (f"{key}.desirable_weight", is_weighted and loss is not PreferenceLoss.KTO, "only of kto: must be 1"),
        ("train.z_loss", run.train.z_loss, "the loss of pairs has no z-loss: must be 0"),
        ("train.label_smoothing", run.train.label_smoothing, f"of pairs it is {key}.label_smoothing: must be 0"),
        ("train.neftune_alpha", run.train.neftune_alpha, noise),
        ("train.residual_dropout", run.train.residual_dropout, noise),
        ("train.attention_dropout", run.train.attention_dropout, noise),
        ("lora.dropout", run.lora and run.lora.dropout, noise),
        ("train.compile", run.train.compile, "layers are not compiled with pairs of answers: leave it out"),
        ("batch.label_tokens", run.label_tokens, "steps of pairs are counted in pairs: leave it out"),
        ("data.joined_documents", run.data.joined_documents, "the answers of a pair must not see each other"),
        (
            "model.num_mtp_layers",
            run.model.num_mtp_layers and not is_reward and run.lora is None,
            "not trained on pairs: must be 0",
        ),
    ):
        yield from applying((is_stated, name, reason))


def _rate_factors(run: Run) -> Iterator[Unsupported]:
    """Groups of `optimizer.rate_factors` that train no parameter."""
    saved = ("embedding", "head") if run.lora is None else run.lora.modules_to_save
    absent = {
        RateGroup.EMBEDDING: "" if "embedding" in saved else "the embedding is frozen: lora.modules_to_save trains it",
        RateGroup.HEAD: "the head is the embedding's matrix" if run.model.tied_embeddings
        else "" if "head" in saved else "the head is frozen: lora.modules_to_save trains it",
        RateGroup.LORA_B: "" if run.lora is not None else "the run has no adapters",
        RateGroup.VECTORS: "" if run.lora is None else "norms and biases are frozen with the base",
    }  # fmt: skip
    for group in run.optimizer.rate_factors:
        reason = "muon's other rate is adamw_learning_rate" if run.optimizer.name == "muon" else absent[group]
        if reason:
            yield Unsupported(key=f"optimizer.rate_factors.{group}", reason=reason)


def _lora(lora: Lora, run: Run) -> Iterator[Unsupported]:
    model, targets, is_latent = run.model, {*lora.targets}, run.model.attention.kind is AttentionKind.MLA
    dense = ", ".join(sorted(targets & {"gate", "up", "down"}))
    is_quantised, key = lora.base_format is not BaseFormat.FULL, "targets" if QKV in targets else "base_format"
    yield from applying(
        (model.experts is not None and dense, "lora.targets",
         f"in a mixture of experts only attention is adapted, not {dense}", "allowed: query, key, value, qkv, output"),
        (QKV in targets and is_latent, "lora.targets",
         "latent attention has no one matrix of query, key and value to adapt as qkv",
         "allowed: query, key, value, output"),
    )  # fmt: skip
    if is_latent and {"key", "value"} <= targets:
        yield from _equal_sizes(lora, ("key", "value"), model, "latent attention has one matrix for both")
    whole = ["embedding"] if model.tied_embeddings else ["embedding", "head"]
    lacks_rows = run.data.added_tokens and not {*whole} <= {*lora.modules_to_save}
    yield from applying(
        (lora.use_dora and (QKV in targets or is_quantised), f"lora.{key}",
         "DoRA is not implemented for qkv as one matrix, nor on a quantised base", "lora.use_dora: false"),
        *((lora.moves_base and is_stated, "lora.init", f"with {lora.init} {reason}: must be standard")
          for is_stated, reason in (
            (QKV in targets, "query, key and value as one matrix are not decomposed"),
            (lora.use_dora, "DoRA begins at the matrix as it is"),
            (is_quantised, "a quantised base loses nothing"),
            (has_removable_reference(run.train, lora), "the model without adapters is not the reference"),
          )),
        (lacks_rows, "data.added_tokens", "adapters train no rows of new tokens",
         f"lora.modules_to_save: [{', '.join(whole)}] trains them"),
        (model.num_mtp_layers, "model.num_mtp_layers",
         "multi-token prediction is not trained with adapters: must be 0", "--set model.num_mtp_layers=0"),
        (run.train.balance_bias_rate not in (BIAS_RATE, 0.0), "train.balance_bias_rate",
         "routing biases are frozen with the base"),
        (run.precision.name in NARROW_UNITS, "precision", "adapters need frozen weights in bf16 or fp32",
         "precision: bf16"),
        (is_quantised and run.weights is None, "weights", "there is nothing to quantise: the run names none",
         "--set weights=FOLDER with Hugging Face safetensors, or OWNER/NAME on the hub"),
        (is_quantised and model.experts is not None, "lora.base_format", "experts are not quantised: must be full"),
    )  # fmt: skip
    yield from _fused_adapters(lora, model)


def _fused_adapters(lora: Lora, model: Model) -> Iterator[Unsupported]:
    """Adapters of only some parts of a matrix that files hold as one: PEFT's format could not say them."""
    family = family_that_fits(model)
    if family is None:
        return
    for name, fused in family.fused.items():
        parts = {part.removesuffix(".weight").rsplit(".", 1)[-1] for part in fused.parts}
        if (some := parts & set(lora.matrices)) and some != parts:
            held = f"files of {family.architecture} hold {name} as one matrix"
            yield Unsupported(key="lora.targets", reason=f"{held}: adapters of it need {', '.join(sorted(parts))}")
        elif some:
            yield from _equal_sizes(lora, parts, model, f"files of {family.architecture} hold them as one matrix")


def _equal_sizes(lora: Lora, parts: Collection[str], model: Model, reason: str) -> Iterator[Unsupported]:
    """Different ranks or alphas of matrices that have one adapter, or one in files."""
    if any(len({lora.at(part, layer=i) for part in parts}) > 1 for i in range(model.num_layers)):
        yield Unsupported(key="lora.ranks", reason=f"{' and '.join(sorted(parts))} need one rank and alpha: {reason}")


def _model(model: Model) -> Iterator[Unsupported]:
    if model.layer_pattern or model.linear_attention:
        yield from refusals.hybrids(model)
        return
    if sparse := list(refusals.sparse_attention(model)):
        yield from sparse
        return
    other_blocks = f"{model.name} has LayerNorm or an ungated feed-forward block"
    yield from applying(
        (model.learned_positions, "model", f"{model.name} has learned positions; rotary ones are built"),
        *((True, "model", f"{model.name}: {reason}") for reason in contradictions(model)),
        (model.norm_bias or not model.gated_ffn, "model", other_blocks),
        *((path in NOT_BUILT, "model", f"{path} of {model.name} is {str(value).lower()}, which is not built")
          for path, value in parts_of(model).items()),
    )  # fmt: skip
    if (family := FAMILIES.get(model.family)) and not family.knows_dense_layers:
        unknown = f"are dense, and which ones is not known for {family.architecture}"
        reason, has_dense = f"{model.num_dense_layers} layers of {model.name} {unknown}", model.num_dense_layers > 0
        yield from applying((model.experts is not None and has_dense, "model.experts.num_dense_layers", reason))


def check_plan(plan: Plan, *, run: Run) -> list[Unsupported]:
    """Return every setting of `plan` that this engine does not support."""
    return [
        *refusals.by_planner_rules(plan, run=run, engine="native", among=OWN_RULES),
        *_recompute(plan, run),
        *_context(plan, run),
        *_tensor(plan, run),
        *_experts(plan, run),
        *_pipeline(plan, run),
    ]


def _recompute(plan: Plan, run: Run) -> Iterator[Unsupported]:
    key, names = "parallel.recompute", set(plan.recompute_modules)
    if plan.recompute is Recompute.SELECTIVE:
        if not names:
            yield Unsupported(key=key, reason="names no modules")
        if absent := sorted(names - _modules(run.model)):
            yield Unsupported(key=key, reason=f"{run.model.name} has no {', '.join(absent)}")


def _loss_chunk(run: Run) -> Iterator[Unsupported]:
    """A chunk of the loss for a route that has none, or its own."""
    route = run.kernels.routes.get("linear_cross_entropy")
    if run.kernels.loss_chunk != "auto" and route in WITHOUT_CHUNKS:
        yield Unsupported(
            key="kernels.loss_chunk",
            reason=f"the route {route} of linear_cross_entropy {WITHOUT_CHUNKS[route]}: leave out one of both",
        )


def _modules(model: Model) -> set[str]:
    """Modules of a model that `recompute` can name."""
    x = model.experts
    absent = {
        "mlp": x is not None and not model.num_dense_layers,
        "moe": x is None,
        "shared_experts": x is None or not x.shared_hidden,
        "mla_up_projection": model.attention.kind is not AttentionKind.MLA,
    }
    return {name for name in RECOMPUTE_MODULES if not absent.get(name)}


def _context(plan: Plan, run: Run) -> Iterator[Unsupported]:
    """Two chunks a rank, each split over tensor ranks: the planner has the same condition."""
    width = 2 * plan.context
    unit = width * (plan.tensor if plan.sequence_parallel else 1)
    if plan.context > 1 and run.sequence_length % unit:
        yield Unsupported(
            key="parallel.context",
            reason=f"a sequence of {run.sequence_length} tokens does not divide into {width} chunks"
            + (f", each over tensor = {plan.tensor}" if unit > width else ""),
            hint=f"allowed: multiples of {unit} tokens",
        )


def _tensor(plan: Plan, run: Run) -> Iterator[Unsupported]:
    if plan.tensor == 1:
        return
    key, model, width = "parallel.tensor", run.model, plan.tensor
    for what, count in (
        ("query heads", model.attention.num_heads),
        ("key/value heads", model.attention.num_kv_heads),
        ("feed-forward columns", model.ffn_hidden),
        ("columns of shared experts", model.experts.shared_hidden if model.experts else 0),
        ("vocabulary entries", model.vocab),
    ):
        if count % width:
            yield Unsupported(key=key, reason=f"{width} does not divide the {count} {what}")
    if plan.sequence_parallel and run.sequence_length % width:
        yield Unsupported(
            key="parallel.sequence_parallel",
            reason=f"tensor = {width} does not divide the {run.sequence_length} tokens of a sequence",
        )


def _experts(plan: Plan, run: Run) -> Iterator[Unsupported]:
    experts, width = run.model.experts, plan.expert * plan.expert_tensor
    if experts is None:
        if width > 1:
            yield Unsupported(key="parallel.expert", reason=f"{run.model.name} has no experts: must be 1")
        return
    if plan.tensor > 1 and not plan.sequence_parallel:
        yield Unsupported(
            key="parallel.sequence_parallel",
            reason="experts take different tokens from every tensor rank: must be true where tensor > 1",
        )
    ranks = plan.num_devices // plan.pipeline
    for key, divisor, what, count in (
        ("expert", plan.expert, "experts", experts.num_experts),
        ("expert_tensor", plan.expert_tensor, "columns of an expert", experts.ffn_hidden),
        ("expert", width, "ranks of a pipeline stage", ranks),
    ):
        if count % divisor:
            yield Unsupported(key=f"parallel.{key}", reason=f"{divisor} does not divide the {count} {what}")


def _pipeline(plan: Plan, run: Run) -> Iterator[Unsupported]:
    if plan.pipeline == 1:
        if plan.virtual_pipeline > 1:
            yield Unsupported(key="parallel.virtual_pipeline", reason="needs pipeline > 1")
        return
    shape = shape_of(plan, num_micro_batches=plan.num_micro_batches(run.global_batch))
    if SCHEDULE_RECORDS[plan.schedule].overlaps_pairs:
        yield Unsupported(
            key="parallel.schedule",
            reason=f"{plan.schedule} runs passes of two micro-batches at once, which the pipeline runtime does not",
            hint="zbv has a small bubble, too, with one copy of the weights",
        )
    elif shortfall := schedule_shortfall(shape):
        yield Unsupported(key="parallel.schedule", reason=shortfall)
    usual = layers_per_stage(run.model.num_layers, plan.pipeline * plan.virtual_pipeline)
    if 0 in (plan.layers_per_stage or usual)[1:-1]:
        yield Unsupported(key="parallel.pipeline", reason="stages between the first and the last need a layer each")
