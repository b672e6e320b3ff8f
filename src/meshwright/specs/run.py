"""A run: all inputs of one training, resolved once and never edited.

`meshwright.runfile` makes a `Run` from a run file; the planner, the cost model and the engines only read it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, Literal

from meshwright.specs.hardware import Cluster, Stack
from meshwright.specs.limits import (
    BelowOne,
    Count,
    CountOrZero,
    Limits,
    Names,
    NoKey,
    NotNegative,
    Positive,
    Ratio,
    Spelled,
    Tokens,
)
from meshwright.specs.model import Lora, Model
from meshwright.specs.optimizers import OPTIMIZERS
from meshwright.specs.plan import Plan
from meshwright.specs.precision import OPTIMIZER_STATE_BYTES, Precision
from meshwright.specs.reinforcement import Grpo


class Task(StrEnum):
    """Kind of training."""

    PRETRAIN = "pretrain"  # every parameter
    LORA = "lora"  # low-rank adapters on a frozen base


NATIVE = "native"
"""Meshwright's own engine, on torch.distributed: the default of run files."""


class Objective(StrEnum):
    """Quantity that the planner optimizes."""

    THROUGHPUT = "throughput"  # tokens per second and device
    TIME = "time"  # time to train
    COST = "cost"  # money to train
    ENERGY = "energy"  # energy to train


class LearningRateSchedule(StrEnum):
    """Decay of the learning rate after the warm-up."""

    COSINE = "cosine"
    LINEAR = "linear"
    WSD = "wsd"  # warm-up, stable, decay: constant until the last `decay_ratio` of the steps
    CONSTANT = "constant"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"  # `cycles` cosines, each from the peak
    POLYNOMIAL = "polynomial"  # (1 - x)^power of the decay is left after its share x
    INVERSE_SQRT = "inverse_sqrt"  # √(warmup_steps / step), not below the final rate


class DecayShape(StrEnum):
    """Curve of the decay of WSD: f(x) is the share of the fall after the share x of the decay's steps."""

    LINEAR = "linear"  # f(x) = x
    COSINE = "cosine"  # (1 - cos πx) / 2
    SQRT = "sqrt"  # √x
    EXPONENTIAL = "exponential"  # 2 - 2^(1 - x), as in Megatron


class StateFormat(StrEnum):
    """Format in which AdamW stores its two states between steps. The update and the master weights are fp32."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"  # a byte each, and a scale per block


class LearningRateAdjustment(StrEnum):
    """Scale of Muon's orthogonalized update of an A x B matrix."""

    MATCH_RMS_ADAMW = "match_rms_adamw"  # 0.2 sqrt(max(A, B)): as large as AdamW's, so that one learning rate does
    ORIGINAL = "original"  # sqrt(max(1, A / B))


class Tracker(StrEnum):
    """Service that receives the metrics of steps in addition to the output folder."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"  # Weights & Biases
    MLFLOW = "mlflow"


class RateGroup(StrEnum):
    """Parameters with a learning rate of their own. One that two groups name has the first one's."""

    EMBEDDING = "embedding"
    HEAD = "head"  # of models whose embedding is not tied
    LORA_B = "lora_b"  # B of all adapters; a larger rate is LoRA+ (Hayou et al. 2024)
    VECTORS = "vectors"  # norms and biases


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer of `specs.optimizers` and its learning-rate schedule."""

    name: Annotated[str, Names(OPTIMIZERS)] = "adamw"
    learning_rate: Positive = 3e-4
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    gradient_clip: Positive | None = 1.0  # largest gradient norm; None: not clipped
    schedule: LearningRateSchedule = LearningRateSchedule.COSINE
    warmup_steps: CountOrZero = 0
    warmup_ratio: Ratio = 0.0  # share of all steps that warm up; a run that has a length has `warmup_steps` instead
    final_ratio: Ratio = 0.1  # last learning rate over the peak one
    decay_ratio: Ratio = 0.1  # WSD: share of the steps that decay
    decay_shape: DecayShape = DecayShape.LINEAR  # of WSD
    cycles: Count = 1  # of cosine_with_restarts
    power: Positive = 1.0  # of polynomial
    states: StateFormat = StateFormat.FP32  # of AdamW
    master_weights: bool = (
        True  # in fp32; without them it updates weights in 16 bits, gradients and states have as many
    )
    momentum: BelowOne = 0.95  # of Muon, as the four below
    nesterov: bool = True
    newton_schulz_steps: Annotated[int, Limits(gt=0, lt=100)] = 5
    adjust_learning_rate: LearningRateAdjustment = LearningRateAdjustment.MATCH_RMS_ADAMW
    adamw_learning_rate: Positive | None = None  # peak for embedding, head and vectors; None: `learning_rate`
    rate_factors: Mapping[RateGroup, Positive] = field(default_factory=dict, hash=False)  # over the learning rate
    average_decay: BelowOne = 0.0  # of the exponential moving average of the weights (EMA); 0: none is kept


SCHEDULE_KEYS = {
    "decay_ratio": LearningRateSchedule.WSD,
    "decay_shape": LearningRateSchedule.WSD,
    "cycles": LearningRateSchedule.COSINE_WITH_RESTARTS,
    "power": LearningRateSchedule.POLYNOMIAL,
}
"""Keys of the optimizer that one schedule has, and which."""


def precision_with(precision: Precision, optimizer: Optimizer) -> Precision:
    """Return `precision` with the bytes that `optimizer` keeps and moves."""
    traits = OPTIMIZERS[optimizer.name]
    is_narrow = optimizer.states is not StateFormat.FP32
    average_bytes = 4.0 if optimizer.average_decay else 0.0  # kept; an update reads it and the master, and writes it
    state_bytes = OPTIMIZER_STATE_BYTES[optimizer.states] if is_narrow else traits.state_bytes
    if not optimizer.master_weights:
        precision = replace(precision, master_bytes=0.0, grad_bytes=2.0, reduce_bytes=2.0)
        state_bytes = min(state_bytes, OPTIMIZER_STATE_BYTES[StateFormat.BF16])
    return replace(
        precision,
        optimizer_state_bytes=state_bytes + average_bytes,
        adamw_state_bytes=traits.adamw_bytes,
        update_bytes=traits.update_bytes + 3 * average_bytes,
        newton_schulz_steps=float(optimizer.newton_schulz_steps) if optimizer.name == "muon" else 0.0,
    )


MAX_WORKERS = 256
"""More threads of one process than any host has cores for."""


VALIDATION = "validation"
"""Name of the only validation source of a run."""

MEAN = "mean"
"""The loss over the labels of all validation sources."""


SYNTHETIC = "synthetic"
"""Random tokens as a source."""

TRAINING = "training"
"""Name of the only training source of a run."""


@dataclass(frozen=True, kw_only=True)
class WeightedSource:
    """A training source of a mixture."""

    path: str  # a data set's name or path
    weight: Positive = 1.0  # its share of the samples is this over the sum of weights


def _source_name(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name) is None or name == MEAN:
        raise ValueError(f"a source's name has letters, digits, _ and -, and is not {MEAN}")
    return name


def _new_tokens(tokens: tuple[str, ...]) -> tuple[str, ...]:
    if "" in tokens or len(set(tokens)) < len(tokens):
        raise ValueError("each token has text, and is named once")
    return tokens


_Workers = Annotated[int, Limits(ge=0, le=MAX_WORKERS)]
_SourceName = Annotated[str, _source_name]
_Source = Annotated[WeightedSource, Spelled(lambda value: {"path": value} if isinstance(value, str) else value)]
_Mixture = Annotated[Mapping[_SourceName, _Source], Limits(min_length=1, max_length=64)]
_Validation = Annotated[Mapping[_SourceName, str], Limits(min_length=1, max_length=64)]


@dataclass(frozen=True, kw_only=True)
class Data:
    """Data sets and tokenizer."""

    source: str | _Mixture = SYNTHETIC  # a data set's name or path, or several by name
    tokenizer: str | None = None  # None: the model's own
    validation: str | _Validation | None = None  # a source for `train.evaluate`, or several by name
    workers: _Workers | None = None  # threads of a process that read ahead; None: found in the first steps
    added_tokens: Annotated[tuple[str, ...], _new_tokens] = ()  # special tokens that the tokenizer lacks
    added_rows: Literal["mean", "zeros"] = "mean"  # embeddings and head rows of `added_tokens` that the weights lack
    joined_documents: bool = False  # attention, positions and labels run on where a document ends

    @property
    def new_rows(self) -> str | None:
        """Content of the rows of embedding and head that the weights lack; None: they may lack none."""
        return self.added_rows if self.added_tokens else None

    @property
    def is_synthetic(self) -> bool:
        """True if training reads random tokens."""
        return self.source == SYNTHETIC

    @property
    def sources(self) -> Mapping[str, WeightedSource]:
        """Training sources by name, sorted."""
        if isinstance(self.source, str):
            return {TRAINING: WeightedSource(path=self.source)}
        return dict(sorted(self.source.items()))

    @property
    def source_text(self) -> str:
        """The training sources in one line.

        >>> Data(source={"web": WeightedSource(path="a.jsonl", weight=3), "code": WeightedSource(path="b")}).source_text
        'code=b*1, web=a.jsonl*3'
        """
        if isinstance(self.source, str):
            return self.source
        return ", ".join(f"{name}={source.path}*{source.weight:g}" for name, source in self.sources.items())

    @property
    def validation_names(self) -> tuple[str, ...]:
        """Names of the validation losses: without validation sources one for each training source it is held out of."""
        if self.validation is not None:
            return tuple(self.validation_sources)
        return (VALIDATION,) if isinstance(self.source, str) else tuple(self.sources)

    @property
    def validation_sources(self) -> Mapping[str, str]:
        """Validation sources by name; empty: none is given."""
        if self.validation is None:
            return {}
        return {VALIDATION: self.validation} if isinstance(self.validation, str) else self.validation


def with_absolute_paths(data: Data, absolute: Callable[[str], str]) -> Data:
    """`data` with the places of its training sources as `absolute` writes them."""
    if isinstance(data.source, str):
        return replace(data, source=absolute(data.source))
    sources = {name: replace(source, path=absolute(source.path)) for name, source in data.sources.items()}
    return replace(data, source=sources)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Checkpoint settings."""

    folder: str
    every_steps: Count = 1000
    keep: Count | None = None  # newest ones that stay; None: all
    keep_best: bool = False  # the checkpoint of the lowest validation loss stays, too
    asynchronous: bool = True  # written in the background, from a copy in host memory


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Validation settings."""

    every_steps: Count = 1000
    num_batches: Count = 16  # global batches per evaluation
    num_sequences: Count | None = None  # exactly so many of each source, in place of `num_batches`
    skip_first: CountOrZero = 0  # evaluations of the schedule that are left out at the beginning
    workers: _Workers | None = None  # as `Data.workers`, for the batches of an evaluation
    best_by: str = MEAN  # the validation source whose loss is the validation loss of the run; MEAN: all labels of all
    target_loss: Positive | None = None  # training ends when the validation loss is no larger
    patience: Count | None = None  # evaluations without improvement after which training ends; None: never
    min_delta: NotNegative = 0.0  # by which a loss must be lower to be an improvement

    def is_due(self, num_steps: int, *, is_last: bool) -> bool:
        """True if an evaluation follows `num_steps` steps. One always follows the last step.

        >>> [n for n in range(1, 9) if Evaluate(every_steps=2, skip_first=1).is_due(n, is_last=n == 7)]
        [4, 6, 7, 8]
        """
        number, rest = divmod(num_steps, self.every_steps)
        return is_last or (rest == 0 and number > self.skip_first)

    def batches_of(self, global_batch: int) -> int:
        """Most global batches of an evaluation of one source.

        >>> Evaluate(num_sequences=1024).batches_of(96)
        11
        """
        return self.num_batches if self.num_sequences is None else -(-self.num_sequences // global_batch)


MTP_LOSS_WEIGHT = 0.3
"""DeepSeek-V3's for the first 10 T tokens; then 0.1 (section 4.2)."""
BIAS_RATE = 0.001
"""DeepSeek-V3's, section 4.2."""


class FaultAction(StrEnum):
    """Reaction to a step whose loss or gradient norm is not finite or spikes."""

    IGNORE = "ignore"
    STOP = "stop"
    SKIP = "skip"  # no update; the next batch trains the same step
    ROLL_BACK = "roll_back"  # to the newest checkpoint; all batches since then are passed over


_Action = Literal[FaultAction.STOP, FaultAction.SKIP, FaultAction.ROLL_BACK]


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Settings of the non-finite and loss-spike detectors."""

    not_finite: _Action = FaultAction.STOP  # loss or gradient norm is NaN or infinite; never ignored
    spike: FaultAction = FaultAction.IGNORE  # loss or gradient norm is far above the last steps'
    spike_deviations: Positive = 6.0  # robust standard deviations above the median
    spike_window: Annotated[int, Limits(ge=8, le=10**4)] = 128  # steps; judged once half of them are there
    max_events: CountOrZero = 10  # the next one stops the run


def _each_once(trackers: tuple[Tracker, ...]) -> tuple[Tracker, ...]:
    return tuple(dict.fromkeys(trackers))


class PreferenceLoss(StrEnum):
    """Loss of a pair of answers (`training.models.preference` has the formulas)."""

    DPO = "dpo"  # Rafailov et al. 2023; answers are compared with what the initial weights give them
    SIMPO = "simpo"  # Meng et al. 2024
    ORPO = "orpo"  # Hong et al. 2024
    KTO = "kto"  # Ethayarajh et al. 2024, of single answers that are desirable or not
    REWARD = "reward"  # Bradley and Terry 1952: of the scores of a head of one row, at the end of each answer


@dataclass(frozen=True, kw_only=True)
class Preference:
    """Training on pairs of answers to one prompt: a chosen and a rejected one."""

    loss: PreferenceLoss = PreferenceLoss.DPO
    beta: Positive = 0.1  # scale of rewards; of ORPO the weight of the odds ratio
    label_smoothing: Annotated[float, Limits(ge=0, lt=0.5)] = 0.0  # share of pairs that are taken the other way round
    margin: NotNegative | None = None  # of SimPO, by which rewards should differ (gamma); None: 0.5
    desirable_weight: Positive = 1.0  # of KTO, of the losses of desirable answers; as the next
    undesirable_weight: Positive = 1.0
    center_coefficient: NotNegative = 0.0  # of reward, of the squared sum of both scores

    @property
    def has_reference(self) -> bool:
        """True if the loss compares answers with the initial weights."""
        return self.loss in (PreferenceLoss.DPO, PreferenceLoss.KTO)


_Preference = Annotated[Preference, Spelled(lambda value: {"loss": value} if isinstance(value, str) else value)]


@dataclass(frozen=True, kw_only=True)
class Train:
    """Length and settings of a training. At most one of `steps`, `tokens` and `epochs` is given."""

    steps: Count | None = None
    tokens: Tokens | None = None
    epochs: Annotated[float, Limits(gt=0, le=10**6)] | None = None  # becomes `tokens` once the data is counted
    seed: CountOrZero = 0
    balance_loss: NotNegative = 0.0  # coefficient of the experts' auxiliary loss, of every sequence and layer
    router_z_loss: NotNegative = 0.0  # coefficient of the mean of (log Σ exp)² of router logits, of every layer
    balance_bias_rate: NotNegative = BIAS_RATE  # change of the routing biases of sigmoid routers in a step
    z_loss: Ratio = 0.0  # coefficient of the squared log-partition function in the gradient
    label_smoothing: BelowOne = 0.0  # share of the label's probability that all tokens get, in the gradient
    neftune_alpha: NotNegative = 0.0  # scale of the noise on embeddings (NEFTune, Jain et al. 2023)
    residual_dropout: BelowOne = 0.0  # of the outputs of attention and feed-forward, before they are added
    attention_dropout: BelowOne = 0.0  # of the probabilities of attention
    mtp_loss_weight: Positive = MTP_LOSS_WEIGHT  # coefficient of the mean loss of multi-token prediction
    preference: _Preference | None = None  # loss of pairs of answers; None: cross-entropy of tokens
    grpo: Grpo | None = None  # loss of the model's own completions; None: of the data
    log_every: Count | None = None  # steps between two lines of progress; None: a line every ten seconds
    compile: bool = False  # compile each layer with torch.compile at the first step
    checkpoint: Checkpoint | None = None
    evaluate: Evaluate | None = None
    trackers: Annotated[tuple[Tracker, ...], _each_once] = ()
    faults: Faults = field(default_factory=Faults)

    @property
    def has_reference(self) -> bool:
        """True if the loss compares the model with the one before training."""
        pairs, grpo = self.preference, self.grpo
        return (pairs is not None and pairs.has_reference) or (grpo is not None and grpo.beta > 0)


def has_removable_reference(train: Train, lora: Lora | None) -> bool:
    """True if the reference is the model without its adapters; modules that are trained whole stay in it."""
    return train.has_reference and lora is not None and not lora.modules_to_save


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Prices that replace the catalogue's."""

    usd_per_device_hour: NotNegative | None = None
    usd_per_kwh: NotNegative | None = None


PLANNED_FORMAT = "e4m3"
"""Format of activations in 8 bits where none is named: the one that the convergence suite has cleared."""


def _stored_activations(value: object) -> object:
    """A list of modules as the mapping that gives each the default format."""
    if isinstance(value, list) and all(isinstance(module, str) for module in value):
        return dict.fromkeys(value, PLANNED_FORMAT)
    if not isinstance(value, dict):
        raise ValueError("must be a list of modules, or a mapping of modules to formats")
    return value


@dataclass(frozen=True, kw_only=True)
class KernelChoices:
    """Routes of training kernels by operation, and the file of a tuned table; other routes are chosen.

    `stored_activations`: formats in which modules of a layer keep their activations for the backward pass.
    `weight_cache`: "on" keeps 8-bit weights in both orientations from the first micro-batch of a step to the last,
    "off" casts them at each use, "auto" leaves it to the engine.
    `measure`: time the routes of each operation in a layer of the run before the first training on a device; "auto"
    does so where the default was measured on no device of its architecture.
    `loss_chunk`: tokens whose logits are in memory at once, or "all" of a micro-batch; "auto" leaves it to the planner
    and the engine.
    """

    routes: Mapping[str, str] = field(default_factory=dict)
    tuned: str | None = None
    measure: Literal["auto", "on", "off"] = "auto"
    stored_activations: Annotated[Mapping[str, str], Spelled(_stored_activations)] = field(default_factory=dict)
    is_storage_open: Annotated[bool, NoKey] = True  # the run file does not name `stored_activations`: the planner may
    weight_cache: Literal["auto", "on", "off"] = "auto"
    loss_chunk: Count | Literal["auto", "all"] = "auto"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A resolved run file: names are looked up, units are SI, `auto` is None."""

    name: str
    model: Model
    weights: str | None = None  # initial weights: a folder or a Hugging Face name; None: random initialization
    task: Task = Task.PRETRAIN
    lora: Lora | None = None  # not None exactly when the task is LORA
    cluster: Cluster | None  # None: this machine, not measured yet
    cluster_name: str
    calibration: str | None = None  # file of a device's calibration; None: the one that ships
    gemm_tuning: str | None = None  # file of tuned GEMM kernels; None: PyTorch's choice
    kernels: KernelChoices = field(default_factory=KernelChoices)
    sequence_length: int  # tokens
    global_batch: int  # sequences per optimizer step, or of each part of a step with `label_tokens`
    label_tokens: int | None = None  # a step takes global batches until it has so many labels; None: it takes one
    micro_batch: int | None = None  # sequences per replica and micro-batch; None: the planner chooses
    precision: Precision
    plan: Plan | None = None  # None: the planner chooses
    is_data_shard_open: bool = False  # the plan's data_shard of 1 stands for what remains of this machine's devices
    engine: str = NATIVE  # the program that runs the step, as an installed package names it
    is_engine_open: bool = False  # the run file names none
    stack: Stack
    objective: Objective = Objective.THROUGHPUT
    costs: Costs = field(default_factory=Costs)
    optimizer: Optimizer = field(default_factory=Optimizer)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    source: str  # the run file, as the user named it
    text: str = field(default="", repr=False)  # text of the run file ...
    overrides: tuple[str, ...] = ()  # ... and the `key=value` pairs that override it

    @property
    def tokens_per_batch(self) -> int:
        """Tokens of one global batch."""
        return self.global_batch * self.sequence_length

    @property
    def tokens_per_step(self) -> int:
        """Tokens one optimizer step consumes; with `label_tokens` the fewest, as if each token were a label."""
        num_batches = max(1, -(-(self.label_tokens or 0) // self.tokens_per_batch))
        return self.tokens_per_batch * num_batches

    @property
    def num_steps(self) -> int | None:
        """Optimizer steps of the whole run, the last one whole; None when the run file gives no length, or epochs."""
        if self.train.tokens is not None:
            return -(-self.train.tokens // self.tokens_per_step)
        return self.train.steps


def has_dropout(run: Run) -> bool:
    """True if a layer draws random numbers in training."""
    return bool(run.train.residual_dropout or run.train.attention_dropout or (run.lora and run.lora.dropout))


def with_warmup_steps(run: Run) -> Run:
    """Return `run` with the steps of its share of warm-up, rounded up as transformers does, if its length is known."""
    share, num_steps = run.optimizer.warmup_ratio, run.num_steps
    if num_steps is None or not share:
        return run
    optimizer = replace(run.optimizer, warmup_steps=math.ceil(share * num_steps), warmup_ratio=0.0)
    return replace(run, optimizer=optimizer)


def with_plan(run: Run, plan: Plan) -> Run:
    """`run` with `plan` pinned. What the plan says of kernels becomes the run's, as overrides of its file."""
    said = said_kernels(plan)
    is_open = run.kernels.is_storage_open and "stored_activations" not in said
    return replace(
        run,
        plan=replace(plan, stored_activations=None, weight_cache=None, loss_chunk=None),
        micro_batch=plan.micro_batch,
        is_data_shard_open=False,
        kernels=replace(run.kernels, **said, is_storage_open=is_open),
        overrides=(*run.overrides, *(f"kernels.{key}={json.dumps(value)}" for key, value in said.items())),
    )


def with_software(run: Run, stack: Stack) -> Run:
    """Return `run` with the switches of `stack` that the planner chose, as overrides of its file."""
    stated = stack.features.stated()
    said = {name: stated[name] for name in stack.chosen if getattr(run.stack.features, name) is None}
    overrides = (f"stack.{name}={json.dumps(value)}" for name, value in said.items())
    stack = replace(run.stack, features=stack.features, chosen=stack.chosen)
    return replace(run, stack=stack, overrides=(*run.overrides, *overrides))


def said_kernels(plan: Plan) -> dict[str, Any]:
    """Choices of kernels in `plan`, by key of the run file's `kernels`."""
    said: dict[str, Any] = {}
    if plan.stored_activations is not None:
        said["stored_activations"] = dict.fromkeys(plan.stored_activations, PLANNED_FORMAT)
    if plan.weight_cache is not None:
        said["weight_cache"] = plan.weight_cache
    if plan.loss_chunk is not None:
        said["loss_chunk"] = plan.loss_chunk
    return said


def with_label_ratio(run: Run, ratio: float = 1.0) -> Run:
    """A run whose fixed steps are as large as `run`'s if `ratio` of the tokens are labels; see `label_tokens`."""
    if run.label_tokens is None:
        return run
    labels = ratio * run.global_batch * run.sequence_length
    return replace(run, global_batch=run.global_batch * math.ceil(run.label_tokens / labels), label_tokens=None)
