"""Make a `Run` of a checked run file: look names up, fill in defaults that follow, refuse the impossible.

Only what no machine and no engine could do is refused here (a batch that does not divide, degrees that do not
multiply to the number of devices), and an engine that is named for devices on which it does not run. What else one
engine cannot do is the planner's business.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from meshwright.calibration import device as device_calibration
from meshwright.catalog import lookup as catalog
from meshwright.catalog import stacks
from meshwright.catalog.engines import ANY, refuse_engine
from meshwright.catalog.entries import CatalogEntry
from meshwright.catalog.joint_clusters import names_device
from meshwright.catalog.models import model_of_repository
from meshwright.catalog.precisions import multiplied_on, refuse_precision
from meshwright.errors import InputError, MeshwrightError, nearest, value_named
from meshwright.hub import is_hub_name
from meshwright.kernels.operations import OPERATIONS, STORED_FORMATS
from meshwright.runfile import schema
from meshwright.runfile.accelerator_file import accelerator_name, is_accelerator_file, read_accelerator
from meshwright.runfile.document import RunFileDocument
from meshwright.runfile.hardware import with_hardware
from meshwright.runfile.inline import changed_model, inline_model, same_fields
from meshwright.runfile.pinned import plan_from_section
from meshwright.runfile.problems import BelowError, KeyPath, RunFileProblem, as_error
from meshwright.runfile.validate import validated
from meshwright.specs import run as specs
from meshwright.specs.features import AttentionKernel, Dispatcher, Features, Preset, runs_on
from meshwright.specs.hardware import HERE, MAX_DEVICES, Accelerator, Cluster, Stack
from meshwright.specs.model import Lora, Model, reward_model
from meshwright.specs.optimizers import OPTIMIZERS, OWN_KEYS
from meshwright.specs.plan import STORED_MODULES, Plan
from meshwright.specs.precision import PRECISIONS, Precision
from meshwright.specs.run import SCHEDULE_KEYS

T = TypeVar("T")
MAX_LAYERS = 2000  # the search tries every number of virtual stages: a million layers take minutes
MAX_WIDTH = 10**7  # of hidden states and vocabulary, as the schema has it for inline shapes
_STORES: Mapping[str, tuple[str, ...]] = dict.fromkeys(map(str, STORED_MODULES), STORED_FORMATS)


class _Problems(list[RunFileProblem]):
    """Collects what goes wrong, so that one message can say all of it."""

    def attempt(self, path: str, function: Callable[..., T], *arguments: Any) -> T | None:
        """`function(*arguments)`, or None with its error noted at `path`, which the error may lengthen."""
        try:
            return function(*arguments)
        except BelowError as error:
            self.append(RunFileProblem(path=_path(f"{path}.{error.key}"), message=error.message, hint=error.hint))
        except MeshwrightError as error:
            self.append(RunFileProblem(path=_path(path), message=error.message, hint=error.hint))
        return None


def resolve(document: RunFileDocument, file: schema.RunFile, *, name: str, here: Cluster | None) -> specs.Run:
    """The run that `file` (validated from `document`) describes. Raises one `RunFileError` with
    all problems."""
    problems = _Problems()
    model = problems.attempt("model", _model, file.model)
    pairs = file.train.preference
    if model is not None and pairs is not None and pairs.loss is specs.PreferenceLoss.REWARD:
        model = reward_model(model)
    lora = problems.attempt("lora", _lora, file, model)
    here = problems.attempt("calibration", _calibrated_here, file) or here
    cluster = problems.attempt("cluster", _cluster, file.cluster, here)
    if cluster is not None and document.stated("engine"):
        problems.attempt("engine", refuse_engine, file.engine, cluster)
    precision = problems.attempt("precision", _precision, file, cluster)
    global_batch = problems.attempt("batch", _global_batch, file.batch, file.data.sequence_length)
    framework = problems.attempt("stack.framework", _framework, file, cluster)
    stack = problems.attempt("stack", _stack, file, cluster, framework, model) if framework and model else None
    problems.attempt("train", _refuse_train, file, document)
    micro = problems.attempt("batch", _micro, file)
    data = problems.attempt("data", _data, file.data)
    problems.extend(_foreign_keys(file.optimizer, document.stated("optimizer") or {}))
    problems.extend(_unknown_choices(file.kernels))
    plan = None
    if isinstance(file.parallel, schema.ParallelSection) and not problems:
        plan = problems.attempt("parallel", _plan, file.parallel, micro, model, cluster, global_batch)
    elif micro and global_batch and global_batch % micro:
        problems.attempt("batch", _refuse_batch, global_batch, micro)
    if problems or not (model and precision and global_batch and stack and data):
        raise document.error(problems)
    run = specs.Run(
        name=file.name or name,
        model=model,
        weights=file.weights,
        task=file.task,
        lora=lora,
        cluster=cluster,
        cluster_name=_cluster_name(file.cluster),
        calibration=file.calibration,
        gemm_tuning=file.gemm_tuning,
        kernels=replace(file.kernels, is_storage_open=document.stated("kernels", "stored_activations") is None),
        sequence_length=file.data.sequence_length,
        global_batch=global_batch,
        label_tokens=file.batch.label_tokens,
        micro_batch=micro,
        precision=precision,
        plan=plan,
        is_data_shard_open=plan is not None and cluster is None and not document.stated("parallel", "data_shard"),
        engine=file.engine,
        is_engine_open=document.stated("engine") is None,
        stack=stack,
        objective=file.objective,
        costs=file.costs,
        optimizer=file.optimizer,
        data=data,
        train=file.train,
        source=document.file,
        text=document.text,
    )
    return specs.with_warmup_steps(run)


def _foreign_keys(optimizer: specs.Optimizer, given: Mapping[str, Any]) -> Iterator[RunFileProblem]:
    """Keys that the `optimizer` section gives and its optimizer or its schedule does not have."""
    name, schedule = optimizer.name, optimizer.schedule
    for key, owner in SCHEDULE_KEYS.items():
        if given.get(key) is not None and schedule is not owner:
            hint = f"leave it out; only {owner} has it"
            yield RunFileProblem(
                path=("optimizer", key), message=f"is no setting of the schedule {schedule}", hint=hint
            )
    if optimizer.warmup_ratio and optimizer.warmup_steps:
        message = "and optimizer.warmup_steps are both given"
        yield RunFileProblem(path=("optimizer", "warmup_ratio"), message=message, hint="give one of them")
    for key in OWN_KEYS:
        if given.get(key) is not None and key not in OPTIMIZERS[name].keys:
            having = [other for other, traits in OPTIMIZERS.items() if key in traits.keys]
            yield RunFileProblem(
                path=("optimizer", key), message=f"is no setting of {name}",
                hint=f"leave it out; only {having[0]} has it" if len(having) == 1
                else f"leave it out; {', '.join(having)} have it",
            )  # fmt: skip


def _unknown_choices(kernels: specs.KernelChoices) -> Iterator[RunFileProblem]:
    """Operations and their routes, modules and their formats, that this version does not have."""
    routes = {op: one.routes for op, one in OPERATIONS.items()}
    for section, given, known, (key, value) in (
        ("routes", kernels.routes, routes, ("operation", "route")),
        ("stored_activations", kernels.stored_activations, _STORES, ("module", "format")),
    ):
        for name, choice in given.items():
            got, allowed, what = (choice, known[name], value) if name in known else (name, known, key)
            if got not in allowed:
                close = nearest(got, allowed)
                yield RunFileProblem(
                    path=("kernels", section, name),
                    message=f"is no {what}: got {got!r}, allowed: {', '.join(allowed)}",
                    hint=None if close is None else f"did you mean {close!r}?",
                )  # fmt: skip


def _path(key: str) -> KeyPath:
    return tuple(part for part in key.split(".") if part)


def _model(given: str | schema.InlineModel | schema.ModelVariant) -> Model:
    if isinstance(given, schema.ModelVariant):
        model = changed_model(_named_or_inline_model(given.base), given)
    else:
        model = _named_or_inline_model(given)
    if model.num_layers > MAX_LAYERS:
        raise InputError("has more layers than can be planned", got=model.num_layers, allowed=f"<= {MAX_LAYERS:,}")
    if max(model.hidden, model.vocab) > MAX_WIDTH:
        got = max(model.hidden, model.vocab)
        raise InputError("is wider than can be planned", got=got, allowed=f"<= {MAX_WIDTH:,}")
    return model


def _named_or_inline_model(given: str | schema.InlineModel) -> Model:
    if isinstance(given, schema.InlineModel):
        return inline_model(given)
    if given in catalog.model_names():
        return catalog.model(given)
    from meshwright.catalog import huggingface

    looks_like_path = os.sep in given or given.endswith(".json") or given in (".", "..")
    if os.path.isdir(given) or (looks_like_path and os.path.exists(given)):  # noqa: PTH110, PTH112
        return huggingface.model_from_path(given)
    if is_hub_name(given):
        if (known := model_of_repository(given)) is not None:  # without a network; a revision is asked of the hub
            return catalog.model(known)
        return huggingface.model_from_hub(given)
    if looks_like_path:
        raise InputError(
            "no such file", got=given,
            allowed="a config.json or its folder, OWNER/NAME[@REVISION] on the Hugging Face hub",
        )  # fmt: skip
    return catalog.model(given)


def named_model(given: str) -> Model:
    """The model of a catalogue name, a Hugging Face config.json or its folder, or OWNER/NAME on the hub.

    Raises InputError where there is none, or where it is larger than can be planned.
    """
    return _model(given)


def named_cluster(given: str | Mapping[str, Any], *, may_have_parts: bool = False) -> Cluster:
    """The cluster of a name such as h100-8x4, or of a mapping as in a run file.

    Raises InputError for an unknown or an impossible one, and for one of several parts unless `may_have_parts`.
    """
    found = _cluster(given, None) if isinstance(given, str) else _mapped_cluster(given)
    if found is None:
        raise InputError("is measured by `meshwright calibrate`, and not a cluster by name", got=given)
    if found.parts and not may_have_parts:
        raise InputError(
            "clusters of several parts are for training runs", got=found.name, hint="name each part by itself"
        )
    return found


def _mapped_cluster(given: Mapping[str, Any]) -> Cluster | None:
    """The cluster of a run file's mapping that stands by itself. Raises one RunFileError with all problems."""
    kind = schema.NamedCluster if "name" in given else schema.InlineCluster
    section = validated(kind, dict(given))
    problems = _Problems(section if isinstance(section, list) else ())
    found = None if isinstance(section, list) else problems.attempt("", _cluster, section, None)
    if problems:
        raise as_error(problems, file="cluster", places={})
    return found


def _lora(file: schema.RunFile, model: Model | None) -> Lora | None:
    if file.task is specs.Task.LORA:
        lora = file.lora or Lora()
        if model is not None:
            _require_places(lora, model)
            if model.num_labels and "head" not in lora.modules_to_save:  # as PEFT: the scores have no base
                lora = replace(lora, modules_to_save=(*lora.modules_to_save, "head"))
        return lora
    if file.lora is not None:
        raise InputError("is given, but the task is pretrain", hint="write `task: lora`")
    return None


def _require_places(lora: Lora, model: Model) -> None:
    """Raise BelowError where ranks, alphas or layers of `lora` name what it does not adapt."""
    if model.tied_embeddings and "head" in lora.modules_to_save:
        raise BelowError("modules_to_save", "the head of tied embeddings is the embedding: name embedding")
    layers = range(model.num_layers) if lora.layers is None else lora.layers
    if layers[-1] >= model.num_layers:
        raise BelowError("layers", f"{model.name} has no layer {layers[-1]}: 0 to {model.num_layers - 1}")
    for key, of in (("ranks", lora.ranks), ("alphas", lora.alphas)):
        for place in of:
            layer, _, target = place.rpartition(".")
            if target not in lora.targets or (layer and int(layer) not in layers):
                raise BelowError(
                    f"{key}.{place}", f"has no adapters: they are of {', '.join(lora.targets)} in {len(layers)} layers"
                )


GivenCluster = str | schema.NamedCluster | schema.InlineCluster


def _cluster_name(given: GivenCluster) -> str:
    if isinstance(given, str):
        return given
    if isinstance(given, schema.NamedCluster):
        return given.name
    device = given.accelerator
    device = accelerator_name(device) if is_accelerator_file(device) else device
    return f"{device}-{given.devices_per_node}x{given.num_nodes}"


def _device_name(given: GivenCluster) -> str:
    """The name of the cluster's accelerator, of the catalogue or of a user's file."""
    device = None if isinstance(given, str) else given.accelerator
    if device is None:
        return catalog.cluster(_cluster_name(given)).accelerator.name
    return accelerator_name(device) if is_accelerator_file(device) else catalog.accelerator(device).name


def _calibrated_here(file: schema.RunFile) -> Cluster | None:
    """This machine as the run's calibration has it, with as many devices as a pinned plan needs; None without one."""
    if file.calibration is None:
        return None
    found = device_calibration.load(file.calibration)
    if file.cluster != HERE:
        given = file.cluster
        of = _device_name(given)
        if of != found.accelerator.name:
            raise InputError("is of another device", got=found.accelerator.name, allowed=of)
        return None
    plan, count = file.parallel, None
    if isinstance(plan, schema.ParallelSection) and (plan.data_shard or found.shares_host):
        count = (plan.data_shard or 1) * plan.data_replicate * plan.context * plan.tensor * plan.pipeline
    return found.cluster(count)


def _cluster(given: GivenCluster, here: Cluster | None) -> Cluster | None:
    if given == HERE:
        return here
    cluster = catalog.joint_cluster(given) if isinstance(given, str) else _cluster_with_hardware(given)
    if cluster.num_devices > MAX_DEVICES:
        raise InputError("has more devices than can be planned", got=cluster.num_devices, allowed=f"<= {MAX_DEVICES:,}")
    return cluster


def _cluster_with_hardware(given: schema.NamedCluster | schema.InlineCluster) -> Cluster:
    name = _cluster_name(given)
    if name == HERE:
        message = "is this machine, whose memory and links are those that were measured"
        raise BelowError("name", message, got=name, hint="write `cluster: here` alone, or name a cluster: h100-8x1")
    own = _own_accelerator(given)
    if isinstance(given, schema.InlineCluster) and own is None:
        catalog.accelerator(given.accelerator)  # so that a wrong accelerator is called one
    if own is not None and not names_device(name, own):
        raise BelowError(
            "name", "has no devices of the file's accelerator", got=name, allowed=f"{own.name}-DEVICESxNODES",
            hint=f"an accelerator is called as its file: {own.name}",
        )  # fmt: skip
    cluster = catalog.joint_cluster(name, fabric_name=given.fabric, own=own)
    return with_hardware(cluster, **vars(same_fields(schema.StatedHardware, given)))


def _own_accelerator(given: schema.NamedCluster | schema.InlineCluster) -> CatalogEntry | None:
    """The accelerator that a user's file describes; None where the cluster names one of the catalogue."""
    if given.accelerator is None or (
        isinstance(given, schema.InlineCluster) and not is_accelerator_file(given.accelerator)
    ):
        return None
    if not is_accelerator_file(given.accelerator):
        raise BelowError(
            "accelerator", "is no file", got=given.accelerator, allowed="a path that ends in .toml",
            hint="the name of the cluster says its accelerator: leave this key out",
        )  # fmt: skip
    try:
        return read_accelerator(given.accelerator)
    except InputError as error:
        raise BelowError("accelerator", error.message, hint=error.hint) from None


def _precision(file: schema.RunFile, cluster: Cluster | None) -> Precision:
    """The recipe that the file names, with what its optimizer keeps and moves."""
    precision = specs.precision_with(value_named("precision", file.precision, PRECISIONS), file.optimizer)
    if cluster is None:
        return precision
    refuse_precision(precision, cluster, engine=file.engine)
    return multiplied_on(cluster.accelerator, precision)


def _global_batch(batch: schema.BatchSection, sequence_length: int) -> int:
    if (batch.global_tokens is None) == (batch.global_sequences is None):
        which = "is given twice" if batch.global_tokens else "is missing"
        hint = "give one of global_tokens and global_sequences"
        raise InputError(f"the global batch {which}", hint=hint)
    if batch.global_sequences is not None:
        return batch.global_sequences
    tokens = batch.global_tokens or 0
    if tokens % sequence_length:
        multiple = max(1, tokens // sequence_length) * sequence_length
        message = f"is not a multiple of the sequence length {sequence_length}"
        raise BelowError("global_tokens", message, got=tokens, hint=f"{multiple} is one")
    return tokens // sequence_length


def _micro(file: schema.RunFile) -> int | None:
    """Sequences per micro-batch. A pinned plan has one even where the file does not say: 1."""
    if isinstance(file.parallel, schema.ParallelSection):
        if file.batch.micro == "auto":
            hint = "give batch.micro as a number, or let the planner choose all of it: `parallel: auto`"
            raise BelowError("micro", "is auto, but the plan is pinned", hint=hint)
        return file.batch.micro or 1
    return None if file.batch.micro in (None, "auto") else int(file.batch.micro)


def _refuse_batch(global_batch: int, micro: int) -> None:
    raise BelowError("micro", f"does not divide the global batch of {global_batch} sequences", got=micro)


def _framework(file: schema.RunFile, cluster: Cluster | None) -> str:
    if file.stack is not None and file.stack.framework is not None:
        return stacks.stack_facts(file.stack.framework).name
    vendor = cluster.accelerator.vendor if cluster else ""
    return stacks.stack_for_engine(file.engine, vendor=vendor).framework


def _stack(file: schema.RunFile, cluster: Cluster | None, framework: str, model: Model) -> Stack:
    given = file.stack or schema.StackSection()
    if given.compiles is False and file.train.compile:
        raise BelowError("compiles", "is false, but train.compile is true", got=False, hint="leave one of both out")
    if given.capacity_factor is not None and given.drops_tokens is False:
        raise BelowError("capacity_factor", "is given, but drops_tokens is false", got=given.capacity_factor)
    for accelerator in [part.accelerator for part in cluster.parts or (cluster,)] if cluster else ():
        _refuse_kernels(given, accelerator)
    stack = Stack(
        framework=framework, vintage=given.vintage, features=same_fields(Features, given),
        preset=_preset(file, given, model, cluster),
        is_open=given.preset is None and given.framework is None and given.vintage is None,
    )  # fmt: skip
    accelerator = cluster.accelerator if cluster else None
    known = stacks.features_of(stack, accelerator, precision=file.precision)
    agreed = catalog.engine_facts(file.engine).agreed(stack.features, known)
    return replace(stack, preset=agreed.or_else(stack.preset)) if model.experts else stack


def _names_release(file: schema.RunFile, given: schema.StackSection) -> bool:
    """True for a file that names a framework or a date, and for `engine: any`: it has the release's software."""
    return file.engine == ANY or given.framework is not None or given.vintage is not None


def _preset(file: schema.RunFile, given: schema.StackSection, model: Model, cluster: Cluster | None) -> Features:
    """Switches that the engine sets where the file states none."""
    preset = given.preset or (Preset.RECIPE if _names_release(file, given) else Preset.ENGINE)
    facts = catalog.engine_facts(file.engine)
    found = facts.preset(model, preset, cluster.accelerator if cluster else None)
    if facts.compiles_on_request and (file.train.compile or preset is Preset.ENGINE):
        return replace(found, compiles=file.train.compile)
    return found


_AS_RELEASED = "without it the framework's release decides"


def _refuse_kernels(given: schema.StackSection, accelerator: Accelerator) -> None:
    """Refuse kernels that are written for other accelerators, and formats that this one does not multiply."""
    for key, kernels in (("attention", AttentionKernel), ("dispatcher", Dispatcher)):
        kernel = getattr(given, key)
        if kernel is not None and not runs_on(kernel, accelerator):
            able = (other for other in kernels if runs_on(other, accelerator))
            message, allowed = f"does not run on {accelerator.name}", ", ".join(able)
            raise BelowError(key, message, got=kernel.value, allowed=allowed, hint=_AS_RELEASED)
    if given.fp8_attention and "fp8" not in accelerator.peak_flops_per_s:
        raise BelowError(
            "fp8_attention", f"{accelerator.name} does not multiply fp8", got=True, allowed="false",
            hint=_AS_RELEASED,
        )  # fmt: skip


def _refuse_train(file: schema.RunFile, document: RunFileDocument) -> None:
    train, warmup = file.train, file.optimizer.warmup_steps
    lengths = [name for name in ("steps", "tokens", "epochs") if getattr(train, name) is not None]
    if len(lengths) > 1:
        raise InputError(f"both {' and '.join(lengths)} are given", hint="give one of them")
    if lengths and lengths != ["steps"] and file.batch.label_tokens is not None:
        raise BelowError(
            lengths[0], "is given, but with batch.label_tokens the tokens of a step depend on the data",
            hint="give train.steps",
        )  # fmt: skip
    if train.epochs is not None and not isinstance(source := file.data.source, str):
        raise BelowError("epochs", f"the {len(source)} sources have epochs of their own", hint="give train.steps")
    if train.steps is not None and warmup > train.steps:
        raise BelowError("steps", f"is less than optimizer.warmup_steps ({warmup})", got=train.steps)
    if train.evaluate is not None:
        names = [specs.MEAN, *file.data.validation_names]
        if train.evaluate.best_by not in names:
            raise BelowError(
                "evaluate.best_by", "is no validation source", got=train.evaluate.best_by, allowed=", ".join(names)
            )
    if train.checkpoint is not None and train.checkpoint.keep_best and train.evaluate is None:
        hint = "set train.evaluate, whose validation loss decides"
        raise BelowError("checkpoint.keep_best", "is set, but nothing is evaluated", hint=hint)
    if train.evaluate and train.evaluate.num_sequences and document.stated("train", "evaluate", "num_batches"):
        raise BelowError("evaluate.num_sequences", "and num_batches are both given", hint="give one of them")
    if train.evaluate is not None and train.evaluate.min_delta and train.evaluate.patience is None:
        raise BelowError("evaluate.min_delta", "has no effect without patience", hint="set train.evaluate.patience")
    for key in ("not_finite", "spike"):
        if getattr(train.faults, key) is specs.FaultAction.ROLL_BACK and train.checkpoint is None:
            raise BelowError(f"faults.{key}", "rolls back, but no checkpoints are saved", hint="set train.checkpoint")


def _data(section: schema.DataSection) -> specs.Data:
    for name, source in section.source.items() if isinstance(section.source, Mapping) else ():
        if source.path == specs.SYNTHETIC:
            raise BelowError(f"source.{name}", "random tokens are no part of a mixture", got=source.path)
    return same_fields(specs.Data, section)


def _plan(
    section: schema.ParallelSection, micro: int, model: Model, cluster: Cluster | None, global_batch: int
) -> Plan:
    recompute = section.recompute
    if isinstance(recompute, schema.RecomputeSection) and (recompute.modules is None) == (recompute.layers is None):
        raise BelowError("recompute", "must give either modules or layers")
    data_shard = section.data_shard or _rest_of_devices(section, cluster)
    plan = plan_from_section(section, data_shard=data_shard, micro_batch=micro)
    if cluster is not None and plan.num_devices != cluster.num_devices:
        message = f"the degrees multiply to {plan.num_devices} devices, {cluster.name} has {cluster.num_devices}"
        raise InputError(message, hint="leave data_shard out: it is then what remains of the devices")
    _refuse_impossible(plan, model, global_batch)
    return plan


def _rest_of_devices(section: schema.ParallelSection, cluster: Cluster | None) -> int:
    if cluster is None:  # this machine: the engine counts its devices
        return 1
    others = section.data_replicate * section.context * section.tensor * section.pipeline
    if cluster.num_devices % others:
        message = f"the degrees multiply to {others}, which does not divide the {cluster.num_devices} devices"
        raise InputError(f"{message} of {cluster.name}")
    return cluster.num_devices // others


def _refuse_impossible(plan: Plan, model: Model, global_batch: int) -> None:
    ranks, experts = plan.num_devices // plan.pipeline, plan.expert * plan.expert_tensor
    if ranks % experts:
        message = f"expert x expert_tensor ({experts}) does not divide the {ranks} devices of a pipeline stage"
        raise BelowError("expert", message)
    portion = plan.micro_batch * plan.data
    if global_batch % portion:
        message = f"the global batch of {global_batch} sequences does not divide into portions of {portion}"
        raise InputError(message, hint="portion = batch.micro x data_shard x data_replicate")
    stages = plan.pipeline * plan.virtual_pipeline
    if stages > model.num_layers + model.num_mtp_layers + 2:  # the embedding and the head may stand alone
        raise BelowError("pipeline", f"there are {stages} stages for {model.num_layers} layers")
    layers = plan.layers_per_stage
    if layers is not None and len(layers) != stages:
        raise BelowError("layers_per_stage", f"must have one value for each of {stages} stages", got=len(layers))
    if layers is not None and sum(layers) != model.num_layers:
        message = f"adds up to {sum(layers)}, {model.name} has {model.num_layers} layers"
        raise BelowError("layers_per_stage", message)
