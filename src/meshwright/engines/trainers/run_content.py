"""Settings of trainers as run files.

The run is of the engine `native`, and estimates are of the trainer's own software (`stack.framework`). A step has
micro-batch x accumulation x data-parallel ranks sequences.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from meshwright.catalog.entries import CatalogKind, entry
from meshwright.catalog.models import MIRRORS, model_like, model_of_repository, stored_as
from meshwright.engines import refusals
from meshwright.engines.base import ASSUMED, Imported, StatedCluster, not_estimated
from meshwright.engines.software_line import with_stated_software
from meshwright.engines.trainers.adapters import lora_task, missing_sizes
from meshwright.engines.trainers.files import OF_RUN_FILES, StatedContents, read_settings
from meshwright.engines.trainers.settings import Given, Settings
from meshwright.errors import InputError, MeshwrightError
from meshwright.files import is_there
from meshwright.hub import is_hub_name
from meshwright.runfile import document as documents
from meshwright.specs.features import AttentionKernel, runs_on
from meshwright.specs.hardware import Cluster
from meshwright.specs.model import Model

STAGES = ("none", "optimizer", "gradients", "parameters")
"""Sharding by the stage of ZeRO."""
FSDP = {
    "full_shard": "parameters", "1": "parameters", "shard_grad_op": "gradients", "2": "gradients",
    "no_shard": "none", "3": "none", "hybrid_shard": "parameters", "4": "parameters",
    "hybrid_shard_zero2": "gradients", "5": "gradients",
}  # fmt: skip
"""Sharding by the strategies of PyTorch's first FSDP, by name and by number."""
NEEDED = {"model": "NAME", "sequence_length": "TOKENS", "micro": "SEQUENCES", "learning_rate": "RATE"}
"""Settings without which there is no run, with what messages write for a value."""
ATTENTION_KEYS = {"xformers": "xformers", "fa2": "flash_attention_2", "flex": "flex_attention", "eager": "eager"}
"""Value of the setting `attention` for each older switch `attention_...`."""


def import_trainer(
    source: str, *, cluster: StatedCluster, ignore: Collection[str] = (), contents: StatedContents = ()
) -> Imported:
    """Return the run on `cluster` that configurations of a trainer describe, without the keys of `ignore`.

    `contents`: what the first file of `source`, a script, states, by the name of its table.

    Raises InputError with all settings that run files lack, or with all that the configuration lacks.
    """
    from meshwright.runfile import named_cluster, named_model

    try:
        parts = shlex.split(source)
    except ValueError as error:
        raise InputError(f"not a configuration and settings: {error}", got=source) from None
    settings, target = (
        read_settings(parts, ignore=ignore, contents=contents),
        named_cluster(cluster, may_have_parts=True),
    )
    over = documents.RunFileDocument(file="", value={})
    for part in settings.overlay.values():
        over = documents.override(over, part)
    for setting, section in (("sequence_length", "data"), ("micro", "batch"), ("preference", "train")):
        if setting in (found := over.value.get(section, {})):
            settings.given[setting] = Given(value=found[setting], key=setting, file=settings.file)
    _replace(settings)
    component, kind = _builder(settings)
    _assume_length(settings, component or settings.get("model"))
    known = settings.get("model") is not None or "model" in over.value
    model = _model(settings, component=component, instead=over.value.get("model"), kind=kind) if known else {}
    _ask(settings, kind=kind)
    task = lora_task(settings, kind=kind, model=(shapes := named_model(model["model"])))
    pairs = _preference(settings, task)
    parallel = _parallel(settings, target, shapes)
    precision, wide = _precision(settings, is_full=not task)
    batch = _batch(settings, ranks=parallel["data_shard"] * parallel["data_replicate"])
    if parallel.get("pipeline", 1) > 1:
        batch |= _micro_of_pipeline(settings, batch, ranks=parallel["data_shard"] * parallel["data_replicate"])
    once = _reduces_once(settings, parallel, batch, is_full=not task) | _offloaded(settings, parallel["recompute"])
    content: dict[str, Any] = {
        **model,
        "data": {"sequence_length": (settings.count("sequence_length") or 0) * (2 if pairs else 1)},
        "batch": batch,
        "optimizer": _optimizer(settings),
        "precision": precision,
        "cluster": cluster,
        "parallel": parallel,
        "engine": "native",
        "stack": _stack(settings, target, shapes, precision=precision, wide=wide) | once,
        "train": _train(settings) | pairs,
        **task,
    }
    settings.notes.append("data are not carried over: the run has random tokens, which fill every sequence")
    if pairs or not settings.truth("packing"):
        settings.notes.append(
            f"samples are not packed: shorter ones are padded to the longest of their batch, at most "
            f"{settings.count('sequence_length')} tokens; the estimate has batches of full sequences"
        )
    whole = documents.RunFileDocument(file="", value=content)
    for key, part in settings.overlay.items():
        whole = whole if key in OF_RUN_FILES else documents.override(whole, part)
    found = Imported(content=whole.value, notes=tuple(dict.fromkeys(settings.notes)), program=settings.table.title)
    return with_stated_software(
        found, documents.read_text(settings.file, kind="configuration"), file=str(settings.file)
    )


def _replace(settings: Settings) -> None:
    """Take a key in place of another one that it makes idle."""
    if "packed_length" in settings.given:  # of a sequence of several samples, whose own length is another key
        settings.given["sequence_length"] = settings.given.pop("packed_length")
        settings.defaults["packing"] = True
    if "attention_of_transformers" in settings.given:  # for models that the trainer has not written itself
        settings.given.setdefault("attention", settings.given.pop("attention_of_transformers"))


def _builder(settings: Settings) -> tuple[str | None, str | None]:
    """Return the model and the adapters that a component of Python, `torchtune.models.FAMILY.qlora_NAME`, builds."""
    name = settings.get("model")
    if settings.key("model") != "model._component_" or not isinstance(name, str):
        return None, None
    component = name.rpartition(".")[2]
    kind = next((kind for kind in ("qlora", "lora") if component.startswith(f"{kind}_")), "none")
    return component.removeprefix(f"{kind}_"), kind


def _assume_length(settings: Settings, model: Any) -> None:
    """Assume the longest sequence of the model where the trainer shortens no sample; it packs none then."""
    longest, key = settings.table.longest.get(str(model).lower()), settings.key("sequence_length")
    if longest is not None and settings.get("sequence_length") is None and not settings.truth("packing"):
        settings.given["sequence_length"] = Given(value=longest, key=key, file=settings.file)
        note = f"{ASSUMED} sequences of {longest} tokens, the most that the model takes, as without {key} none is "
        note += "shortened: time and memory of a step are upper bounds"
        settings.notes.insert(0, f'{note}; "{settings.file.name} {key}=TOKENS" gives another length')


def _objective(settings: Settings) -> str:
    """Return the loss of pairs, empty for none: as a key states it, else by the names of a file of pairs.

    Files of TRL do not state which trainer reads them, and its trainers of pairs have the same keys.
    """
    if "preference" in settings.given or not settings.truth("named_objective"):
        found = settings.text("preference") or ""
        return (settings.text("preference_loss") or found) if found == "dpo" else found
    if settings.get("margin_ratio") is not None:
        return "simpo"
    names = [*settings.file.absolute().parts[-3:], *map(settings.get, ("output_dir", "run_name", "hub_model_id"))]
    losses = settings.values("preference")
    found = losses.keys() & re.split(r"[^a-z0-9]+", " ".join(map(str, names)).lower())
    if len(found) != 1:
        hint = f'"{settings.file.name} train.preference=dpo" gives it'
        raise InputError(f"{settings.file} does not name the loss of its pairs", allowed=", ".join(losses), hint=hint)
    settings.notes.insert(0, f"{ASSUMED} {min(found)} is the loss of pairs, by the names of the file and of its run")
    return min(found)


def _preference(settings: Settings, task: dict[str, Any]) -> dict[str, Any]:
    """Return the key of `train` for pairs of answers, each as long as the sequences of the trainer; else nothing.

    Trainers switch the dropout of adapters off, here in `task`, so that the reference is the same function.
    """
    if not (loss := _objective(settings)):
        return {}
    beta, ratio = settings.number("preference_beta"), settings.number("margin_ratio")
    found = {"beta": beta}
    if loss == "dpo":
        found["label_smoothing"] = settings.number("preference_smoothing")
    elif loss == "simpo":
        found["margin"] = settings.number("preference_margin") if ratio is None else (beta or 0.0) * ratio
    elif loss == "kto":
        found |= {name: settings.number(name) for name in ("desirable_weight", "undesirable_weight")}
    if task and task["lora"]["dropout"]:
        if not settings.truth("pairs_without_dropout"):
            raise settings.error("dropout", "run files have no dropout beside pairs of answers", allowed="0")
        task["lora"]["dropout"] = 0.0
        name = settings.table.title
        settings.notes.append(f"{settings.key('dropout')} is read as 0: {name} switches it off for pairs")
    if loss in ("dpo", "kto") and bool(task) == settings.truth("precomputed_reference"):
        copy = "a copy of the model as the reference, and its forward pass in each step"
        before = "log-probabilities of the reference that are computed before the first step"
        settings.notes += not_estimated([before if task else copy])
    pair = "an answer and a mismatched one" if loss == "kto" else "both answers of a pair"
    settings.notes.append(f"data.sequence_length holds {pair}: twice the trainer's sequence")
    return {"preference": {"loss": loss} | {key: value for key, value in found.items() if value is not None}}


def _ask(settings: Settings, *, kind: str | None, unknown: MeshwrightError | None = None) -> None:
    """Raise one InputError with all that is missing, and the words that would give it.

    `kind`: adapters that the model's name states; `unknown`: why the model that is named is not known.
    """
    has_batch = settings.get("global_sequences") is not None
    of_run = {setting: key for key, setting in OF_RUN_FILES.items()} | {"learning_rate": "optimizer.learning_rate"}
    missing = [
        name
        for name in NEEDED
        if settings.get(name) is None and of_run[name] not in settings.overlay and not (name == "micro" and has_batch)
    ]
    asked = [f"{settings.table.key_of(name) or of_run[name]}={NEEDED[name]}" for name in missing]
    asked += [f"{settings.key(name)}=NUMBER" for name in missing_sizes(settings, kind=kind)]
    asked = asked if unknown is None else ["model=NAME", *asked]
    if not asked:
        return
    hint = f'give it behind the file: "{settings.file.name} {" ".join(asked)}"'
    if unknown is not None:
        hint = f"{hint}; NAME is a model of the catalogue that has its shapes, or the path of a config.json"
        what = f"is no model that is known, {settings.file} needs {', '.join(asked)}: {unknown.message}"
        raise settings.error("model", f"{settings.get('model')} {what}", got=None, hint=hint)
    if settings.table.shares_work:
        hint = f"{hint}; a configuration of {settings.table.title} stands beside one of a trainer: name that too"
    raise InputError(f"{settings.file} needs {', '.join(asked)}", hint=hint)


def _model(settings: Settings, *, component: str | None, instead: Any, kind: str | None) -> dict[str, Any]:
    """Return the model and its weights. Raises InputError where it is not known, with all that is missing."""
    from meshwright.runfile import named_model

    given = component or settings.get("model")
    name = instead or given
    if not isinstance(name, str):
        raise settings.error("model", "must be a model's name")
    known = settings.values("model").get(name.lower(), name)
    path = Path(known)
    if not is_hub_name(known) and not is_there(known) and is_hub_name("/".join(path.parts[-2:])):
        known = "/".join(path.parts[-2:])  # `checkpoints/OWNER/NAME` of litgpt
    exact = model_of_repository(known)
    like = None if exact or is_there(known) else model_like(known)
    if named := exact or like:
        _note_reading(settings, name, known=known, named=named, is_copy=like is not None)
    try:
        found = named_model(named or known)
    except MeshwrightError as error:
        _ask(settings, kind=kind, unknown=error)
        raise
    is_quantised = settings.truth("in_4_bits") or settings.truth("in_8_bits") or settings.get("quantised_bits")
    key = settings.table.key_of("quantised_experts")
    if key and found.experts is not None and is_quantised and not settings.truth("quantised_experts"):
        settings.notes += not_estimated([f"experts in 16 bits, as {key} is not set: base_format is of all matrices"])
    stored = " ".join(mark for mark in stored_as(known) if mark not in ("bf16", "f16", "fp16"))
    if stored and not is_quantised:
        settings.notes += not_estimated(
            [f"{settings.key('model')}: weights as they are stored ({stored}), not in bf16"]
        )
    weights = settings.get("weights") or (None if component or settings.truth("from_scratch") else given)
    is_place = isinstance(weights, str) and ("/" in weights)
    return {"model": named or known} | ({"weights": weights} if is_place else {})


def _note_reading(settings: Settings, name: str, *, known: str, named: str, is_copy: bool) -> None:
    """Note a model of the catalogue that stands for a copy, for a model of its shapes, or for a part of one."""
    key, (ours, theirs) = settings.key("model"), (re.sub(r"[^a-z0-9]", "", text.lower()) for text in (named, known))
    is_copy |= known.lower().partition("/")[0] in MIRRORS
    if known != named and (is_copy or ours not in theirs):
        why = "by its name" if is_copy else "which has its shapes"
        settings.notes.append(f"{key}: {name} is read as {named} of the catalogue, {why}")
    if part := entry(CatalogKind.MODEL, named).assumptions.get("part"):
        settings.notes.append(f"{key}: {name} is {part}")


def _parallel(settings: Settings, cluster: Cluster, model: Model) -> dict[str, Any]:
    """Return the plan. Raises InputError for degrees and numbers of processes that are not those of the cluster."""
    devices = cluster.num_devices
    _match_devices(settings, cluster)
    inner = {name: settings.count(name) or 1 for name in ("tensor", "context")}
    if (pipeline := settings.count("pipeline") or 1) > 1:
        inner |= {"pipeline": pipeline}
    ranks, rest = divmod(devices, math.prod(inner.values()))
    if rest:
        raise InputError(f"degrees of {inner} do not divide the {devices} devices of the cluster")
    sharding, is_hybrid = _sharding(settings)
    stated = {name: settings.count(name, least=-1) or 0 for name in ("data_shard", "data_replicate")}
    shard, replicate = (max(0, degree) for degree in stated.values())
    if shard > 1 and sharding == "none":
        sharding = "parameters"
    if is_hybrid and not shard and cluster.devices_per_node < devices:
        shard = max(1, cluster.devices_per_node // math.prod(inner.values()))
    is_shard_stated = stated["data_shard"] > 0
    shard = shard or ranks // max(1, replicate)
    replicate = replicate or (1 if is_shard_stated else ranks // shard)
    if shard * replicate != ranks or settings.count("data_ranks") not in (None, ranks):
        got = f"{shard} sharded x {replicate} replicated"
        raise InputError(f"data-parallel ranks are not the {ranks} of the cluster", got=got)
    is_offloaded = any(_device(settings, name) for name in ("offload_optimizer", "offload_parameters"))
    if _device(settings, "offload_parameters"):
        settings.notes += not_estimated([f"{settings.key('offload_parameters')}: parameters in host memory"])
    return {
        "data_shard": shard, "data_replicate": replicate, **inner, **_schedule_of(settings, pipeline, model),
        "expert": settings.count("expert") or 1,
        "sequence_parallel": settings.truth("sequence_parallel"), "sharding": sharding,
        "recompute": _recompute(settings, devices=devices),
        "offload": "optimizer" if is_offloaded else "none",
    }  # fmt: skip


def _schedule_of(settings: Settings, pipeline: int, model: Model) -> dict[str, Any]:
    """Return schedule and stages of a rank of a pipeline, which come from the layers of a stage; nothing without one.

    Schedules with several stages of a rank have two where the file does not give their layers.
    """
    if pipeline == 1:
        return {}
    schedule = settings.text("pipeline_schedule") or "1f1b"
    if schedule != "interleaved":
        return {"schedule": schedule}
    stages = 2 * pipeline
    if layers := settings.count("stage_layers"):
        stages = math.ceil(model.num_layers / layers)
        rounding = settings.text("stage_rounding")
        if rounding == "up":
            stages = math.ceil(stages / pipeline) * pipeline
        elif rounding == "down":
            stages = stages // pipeline * pipeline
    if stages % pipeline or stages < 2 * pipeline:
        raise settings.error("stage_layers", f"{stages} stages are not two or more on each of {pipeline} ranks")
    return {"schedule": schedule, "virtual_pipeline": stages // pipeline}


def _micro_of_pipeline(settings: Settings, batch: Mapping[str, Any], *, ranks: int) -> dict[str, int]:
    """Return the micro-batch of a pipeline, of which a rank's batch has several."""
    micro, rest = settings.count("pipeline_micro") or 1, batch["micro"]
    if rest % micro:
        raise settings.error("pipeline_micro", "does not divide the batch of a rank", allowed=f"a divisor of {rest}")
    if batch["global_sequences"] > rest * ranks:
        key = settings.key("micro")
        settings.notes += not_estimated([f"{key}: the pipeline empties after each {rest} sequences of a rank"])
    return {"micro": micro}


def _match_devices(settings: Settings, cluster: Cluster) -> None:
    """Raise InputError if the configuration states another number of processes than the cluster has devices."""
    name = "devices" if "devices" in settings.given else "devices_per_node"
    of_node = 0 if settings.get(name) in ("auto", "-1", -1) else settings.count(name, least=0) or 0
    nodes = settings.count("nodes")
    found = of_node if name == "devices" else of_node * (nodes or 1)
    if not found and nodes not in (None, cluster.num_nodes):
        hint = f"--cluster {cluster.accelerator.name}-{cluster.devices_per_node}x{nodes}"
        raise InputError(
            f"the cluster has {cluster.num_nodes} nodes", got=f"{settings.key('nodes')} {nodes}", hint=hint
        )
    if found and found != cluster.num_devices:
        hint = f"--cluster {cluster.accelerator.name}-{min(found, 8)}x{max(1, found // 8)}"
        got = f"{found} devices, by {settings.key(name)}"
        raise InputError(f"the cluster has {cluster.num_devices} devices", got=got, hint=hint)


def _sharding(settings: Settings) -> tuple[str, bool]:
    """Return what data-parallel ranks shard, and True for groups of one node each that hold copies."""
    stage, distributed = settings.count("zero_stage", least=0), settings.text("distributed")
    if stage is not None:
        if stage >= len(STAGES):
            raise settings.error("zero_stage", "no stage of ZeRO", allowed="0 to 3")
        return STAGES[stage], False
    if distributed == "deepspeed":
        raise settings.error("distributed", "no file says the stage", hint="give deepspeed_config.zero_stage")
    if distributed == "none":
        return "none", False
    given = settings.get("fsdp")
    given = str(given) if type(given) is int else given
    named = " ".join(given) if isinstance(given, list) and all(isinstance(x, str) for x in given) else given
    kinds = {*re.split(r"[\s,]+", named.lower())} if isinstance(named, str) else set()
    reshard, stated = settings.get("fsdp_reshard"), settings.get("fsdp_sharding")
    if reshard is None and (settings.count("pipeline") or 1) > 1:
        reshard = False  # as torchtitan and NeMo AutoModel have it: each micro-batch would gather again
    kinds |= {str(one).lower() for one in (reshard, stated) if one is not None and not isinstance(one, bool)}
    kinds -= {"", "auto_wrap", "true"}
    if not isinstance(given, str | list | bool | None):
        raise settings.error("fsdp", "must name a strategy of FSDP", allowed=", ".join(FSDP))
    if "offload" in kinds:
        settings.give("offload_parameters", Given(value=True, key="fsdp", file=settings.file), of=settings.table)
    if unknown := kinds - {*FSDP, "offload"}:
        raise settings.error("fsdp", "no strategy of FSDP", got=", ".join(sorted(unknown)), allowed=", ".join(FSDP))
    switches = ("fsdp", "fsdp_version", "fsdp_reshard", "fsdp_sharding")[: 4 if settings.truth("fsdp_by_config") else 1]
    if distributed != "fsdp" and not any(settings.get(name) for name in switches):
        return "none", False
    found = {FSDP[kind] for kind in kinds - {"offload"}} or {"gradients" if reshard is False else "parameters"}
    if len(found) > 1:
        raise InputError("two strategies of FSDP contradict each other", got=", ".join(sorted(kinds)))
    return found.pop(), any(kind.startswith("hybrid") or kind in ("4", "5") for kind in kinds)


def _device(settings: Settings, name: str) -> bool:
    """Return True where states or parameters lie in host memory, or behind it."""
    value = settings.get(name)
    return str(value).lower() in ("cpu", "nvme") or (value is not None and value != "none" and settings.truth(name))


def _recompute(settings: Settings, *, devices: int) -> str:
    if settings.get("recompute") in tuple(settings.values("recompute")):
        return settings.text("recompute") or "none"
    is_full = settings.truth("recompute") or settings.truth("fsdp_recompute")
    is_full |= devices > 1 and settings.truth("recompute_sharded")
    return "full" if is_full and not settings.truth("no_recompute") else "none"


def _batch(settings: Settings, *, ranks: int) -> dict[str, Any]:
    """Return the batch of `ranks` data-parallel ranks. Raises InputError where it cannot be split over them."""
    micro, total = settings.count("micro"), settings.count("global_sequences")
    accumulated = settings.count("accumulation") if total is None or "accumulation" in settings.given else None
    if (least := settings.count("accumulated_least")) and "accumulation" not in settings.given:
        accumulated = math.ceil(least / (micro or 1) / ranks)
    if total is not None:
        micro = micro or total // (ranks * (accumulated or 1))
        accumulated = accumulated or total // ranks // max(1, micro)
    found = (micro or 0) * (1 if accumulated is None else accumulated) * ranks
    if not found:
        raise settings.error("global_sequences", f"cannot be split over {ranks} data-parallel ranks")
    if total is not None and found != total:
        shape = f"{micro} x {accumulated} x {ranks} ranks"
        if settings.tables.get("global_sequences", settings.table).shares_work:
            raise settings.error(
                "global_sequences", "is not micro-batch x accumulation x ranks", got=f"{total}, {shape}"
            )
        settings.notes.append(f"{settings.key('global_sequences')}: {total} are read as {found} sequences, {shape}")
    return {"global_sequences": found, "micro": micro}


def _reduces_once(
    settings: Settings, parallel: Mapping[str, Any], batch: Mapping[str, Any], *, is_full: bool
) -> dict[str, bool]:
    """Return the switch of FSDP that reduces after the last of several micro-batches of a step.

    transformers 5.24.0, trainer.py: micro-batches before the last run under `no_sync` unless `sync_each_batch` is set.
    NeMo AutoModel 36044ad3, FSDP2Config: `defer_fsdp_grad_sync` is true by default.
    """
    ranks = parallel["data_shard"] * parallel["data_replicate"]
    is_sharded = parallel["sharding"] in ("gradients", "parameters") and parallel["data_shard"] > 1
    is_reduced = settings.truth("reduces_each_pass") or "zero_stage" in settings.given or not is_full
    is_single = batch["global_sequences"] == batch["micro"] * ranks
    key = "accelerator_config.gradient_accumulation_kwargs.sync_each_batch is not set"
    if settings.truth("defers_reduction") and parallel.get("pipeline", 1) == 1:
        key = f"{settings.key('defers_reduction')} has it"
    elif settings.table.framework != "transformers":
        return {}
    if not is_sharded or is_reduced or is_single:
        return {}
    settings.notes.append(f"gradients are whole until the last micro-batch of a step, as {key}")
    return {"reduces_once": True}


def _offloaded(settings: Settings, recompute: str) -> dict[str, float]:
    """Return the share of activations in host memory, which is estimated of recomputed layers: of all their inputs."""
    found = {"offloaded_activations": 1.0} if settings.truth("offloaded_activations") else {}
    settings.notes += not_estimated([settings.key(name) for name in found]) if recompute != "full" else []
    return found if recompute == "full" else {}


def _optimizer(settings: Settings) -> dict[str, Any]:
    name, _, states = (settings.text("optimizer") or "adamw").partition(" ")
    if settings.truth("muon"):
        name, states = "muon", ""
    pair = settings.get("betas") or [settings.number(f"beta{number}") for number in (1, 2)]
    if not (isinstance(pair, list) and len(pair) == 2):
        raise settings.error("betas", "must be two numbers")
    if settings.get("decoupled") is False and settings.number("weight_decay"):
        raise settings.error("decoupled", "run files have no weight decay within the gradient", allowed="true")
    clip = settings.number("gradient_clip")
    found: dict[str, Any] = {
        "name": name,
        "betas": None if None in pair else pair,
        "learning_rate": settings.number("learning_rate"),
        "epsilon": settings.number("epsilon") if name != "lion" else None,
        "weight_decay": settings.number("weight_decay"),
        "states": states,
    }
    if factor := settings.number("lora_b_factor"):
        found["rate_factors"] = {"lora_b": factor}
    found = {key: value for key, value in found.items() if value not in (None, "")}
    return found | {"gradient_clip": clip or None} | _schedule(settings)


def _schedule(settings: Settings) -> dict[str, Any]:
    steps = _steps(settings)
    kind, _, warm_up = (settings.text("schedule") or "constant").partition(" ")
    warm = {} if kind == "constant" and not warm_up else _warm_up(settings, steps)
    rate, final = settings.number("learning_rate"), settings.number("final_ratio")
    if "final_ratio" not in settings.given and rate and (last := settings.number("final_rate")) is not None:
        final = last / rate
    found: dict[str, Any] = {"schedule": kind, **warm}
    cycles = settings.number("cycles")
    if kind == "cosine_with_restarts":
        found["cycles"] = settings.count("cycles") or 1
    elif cycles not in (None, 0.5):  # half a cosine is the usual one
        raise settings.error("cycles", f"a schedule that run files do not have: {kind} of so many cycles")
    if kind == "polynomial":
        found["power"] = settings.number("power") or 1.0
        end = settings.number("polynomial_end")
        final = final or (1e-7 if end is None else end) / (rate or 1.0)
    if kind == "inverse_sqrt" and not any(warm.values()):
        raise settings.error("schedule", "inverse_sqrt without a warm-up has a time scale of its own in transformers")
    if kind == "wsd":
        decay = settings.count("decay_steps")
        if decay is None or steps is None:
            raise settings.error(
                "schedule", "its decay needs numbers of steps", hint="max_steps=STEPS and num_decay_steps"
            )
        settings.notes += refusals.early_fall_note(decay=decay, steps=steps, warmup=warm["warmup_steps"])
        found |= {"decay_ratio": decay / steps, "decay_shape": settings.text("decay_shape") or "linear"}
    return found if kind == "constant" else found | {"final_ratio": final or 0.0}


def _warm_up(settings: Settings, steps: int | None) -> dict[str, Any]:
    """Return the steps of warm-up, or their share of an unknown number of steps."""
    given, ratio = settings.number("warmup_steps"), settings.number("warmup_ratio")
    name = "warmup_steps" if given else "warmup_ratio"
    share = given if given and 0 < given < 1 else None if given else ratio
    if share and not 0 <= share < 1:
        raise settings.error(name, "must be a share of the steps", allowed="0 to 1")
    if settings.get("warmup_epochs"):
        key = settings.key("warmup_epochs")
        settings.notes.append(f"{key} is not carried over: it is a share of steps, whose number is not known")
        return {"warmup_steps": 0}
    if not share:
        return {"warmup_steps": settings.count("warmup_steps", least=0) or 0}
    if steps is None:
        if name not in settings.given and (most := settings.count("warmup_most")):
            settings.notes.append(f"the warm-up is {share:g} of the steps, and not at most {most}, as in the trainer")
        return {"warmup_ratio": share}
    found = math.floor(share * steps) if settings.truth("warmup_rounds_down") else math.ceil(share * steps)
    if name not in settings.given:
        found = min(found, settings.count("warmup_most") or found)
    return {"warmup_steps": (settings.count("warmup_of_one") or 1) if found == 1 else found}


def _steps(settings: Settings) -> int | None:
    steps = settings.count("steps", least=-1)
    epochs, per_epoch = settings.number("epochs"), settings.count("steps_per_epoch")
    if per_epoch and epochs:
        return per_epoch * (settings.count("epochs") or 1)
    return steps if steps and steps > 0 else None


def _train(settings: Settings) -> dict[str, Any]:
    """Return length, seed and compilation of the run."""
    steps, tokens = _steps(settings), settings.count("tokens")
    found: dict[str, Any] = {"seed": settings.count("seed", least=0) or 0}
    found |= {"compile": True} if settings.truth("compile") else {}
    found |= {name: value for name in ("label_smoothing", "neftune_alpha") if (value := settings.number(name))}
    if steps:
        return found | {"steps": steps}
    if tokens:
        return found | {"tokens": tokens}
    epochs, key = settings.number("epochs"), settings.table.key_of("steps") or "train.steps"
    settings.notes.append(
        f"{settings.key('epochs')}: `train` counts the steps of {epochs:g}, once data.source names the data"
        if epochs
        else f'the run has no number of steps; "{settings.file.name} {key}=STEPS" gives one'
    )
    return found | ({"epochs": epochs} if epochs else {})


def _precision(settings: Settings, *, is_full: bool) -> tuple[str, str]:
    """Return the precision, and which weights are in 32 bits beside a narrower one: "trained", "all" or none."""
    named, _, wide = (settings.text("precision") or "").partition(" ")
    switches = ("fp8", "bf16", "bf16_weights", "fp16", "fp16_weights", "pure_bf16")
    stated = [name for name in switches if name in settings.given and settings.truth(name)]
    if {"bf16", "fp16"} <= {*stated} and settings.get("bf16") != "auto":
        raise settings.error("fp16", f"contradicts {settings.key('bf16')}: {settings.get('bf16')}")
    if not stated and not named and "bf16" not in settings.given and settings.truth("bf16"):
        stated = ["bf16"]  # a default
    found = stated[0].removeprefix("pure_").partition("_")[0] if stated else named or "fp32"
    found = settings.text("fp8_recipe") or found
    loads_wide = settings.text("weights_format") == "fp32"
    is_wide = bool(wide) or loads_wide or settings.text("trained_format") == "fp32" or "zero_stage" in settings.given
    is_wide |= not is_full  # PEFT casts adapters to fp32 (autocast_adapter_dtype)
    is_wide &= found != "fp32" and not settings.truth("pure_bf16")
    if is_wide and is_full and settings.table.framework != "transformers":
        settings.notes += not_estimated([f"weights and optimizer states in 32 bits beside {found}"])
    stays_wide = loads_wide and "zero_stage" not in settings.given  # DeepSpeed casts the whole model
    return found, "" if not is_wide else "all" if stays_wide and not is_full else "trained"


def _stack(settings: Settings, cluster: Cluster, model: Model, *, precision: str, wide: str) -> dict[str, Any]:
    """Return the trainer's software, and switches that it states."""
    name = settings.table.framework
    by_weights = {"trained": "transformers-fp32", "all": "transformers-fp32-base"}
    found: dict[str, Any] = {"framework": by_weights.get(wide, name) if name == "transformers" else name}
    found |= {"compiles": True} if settings.truth("compile") else {}
    if "zero_stage" in settings.given and precision == "bf16":
        found["gradient_format"] = "bf16"  # DeepSpeed reduces gradients in the format of training
    for name, value in ATTENTION_KEYS.items():
        if settings.truth(f"attention_{name}") and "attention" not in settings.given:
            key = settings.key(f"attention_{name}")
            settings.give("attention", Given(value=value, key=key, file=settings.file), of=settings.table)
    if model.experts is not None and settings.get("dispatcher"):
        found["dispatcher"] = settings.text("dispatcher")
    names = (settings.text("attention") or "").split()
    kernels = [name for name in names if runs_on(AttentionKernel(name), cluster.accelerator)]
    if names and not kernels:
        settings.notes += not_estimated([f"{settings.key('attention')}: {settings.get('attention')}"])
    return found | ({"attention": kernels[0]} if kernels else {})
