"""Parts of a run that TRL's trainer does not support, with reasons. TRL need not be installed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import parse_qsl

from meshwright.catalog.families import family_that_fits
from meshwright.catalog.huggingface import model_from_path
from meshwright.catalog.models import model, model_of_repository, own_repository
from meshwright.engines import refusals
from meshwright.engines.base import Unsupported
from meshwright.engines.refusals import applying
from meshwright.errors import MeshwrightError
from meshwright.specs.model import QKV, Lora, Model
from meshwright.specs.run import DecayShape, LearningRateSchedule, Run, StateFormat

FILES = {
    ".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text",
    ".arrow": "arrow",
}  # fmt: skip
"""Readers of `datasets` by the ending of a file."""
_OTHER_FILES = r"text|md|rst|py|tsv|feather|gz|bz2|xz|zst|bin|idx"
_HUB_NAME = re.compile(rf"(?!python-stdlib$|.*\.({_OTHER_FILES})$)\w[\w.-]*(/\w[\w.-]*)?")
WITHOUT_END = (LearningRateSchedule.COSINE_WITH_RESTARTS, LearningRateSchedule.INVERSE_SQRT)
"""Schedules that fall, and whose last rate is no argument in transformers."""
HAS = ("train.label_smoothing", "train.neftune_alpha")


def check(run: Run) -> tuple[Unsupported, ...]:
    """Parts of `run` that the trainer does not support; empty if it supports all."""
    problems = [*_shapes(run), *_training(run), *_schedule(run), *_data(run)]
    if run.lora is not None:
        problems += _lora(run.lora, run.model)
    if run.plan is not None:
        problems += refusals.by_planner_rules(run.plan, run=run, engine="trl")
    return tuple(problems)


def weights_of(run: Run) -> str | None:
    """Return the weights of the run, else the model's own on the hub, whose family tells how its modules are called."""
    if run.weights is not None:
        return without_tilde(run.weights)
    try:
        is_own = model(run.model.name) == run.model and run.model.family
    except MeshwrightError:
        return None
    return own_repository(run.model.name) if is_own else None


def without_tilde(place: str) -> str:
    """Return a path without `~`, which TRL takes for a name; others as they are."""
    return str(Path(place).expanduser()) if place.startswith("~") else place


def _weights(run: Run) -> Iterator[Unsupported]:
    """TRL builds the model that the config of the weights has, whatever the run says."""
    name = weights_of(run)
    if run.train.preference is not None:  # refused by itself; a reward model has another head than its weights
        return
    if name is None:
        reason = "TRL trains published weights of a family of transformers, and none of these shapes are known for "
        hint = "--set weights=OWNER/NAME, or a folder"
        yield Unsupported(key="model", reason=f"{reason}{run.model.name}", hint=hint)
        return
    known, config = model_of_repository(name), Path(name) / "config.json"
    built = model_from_path(config) if config.is_file() else model(known) if known else run.model
    sizes = ("hidden", "num_layers", "vocab", "ffn_hidden", "tied_embeddings", "attention")
    if differ := [size for size in sizes if getattr(built, size) != getattr(run.model, size)]:
        reason = f"TRL builds the model of {name}, whose {', '.join(differ)} differ from {run.model.name}"
        yield Unsupported(key="weights", reason=reason, hint=f"--set model={known or name}")


def _shapes(run: Run) -> Iterator[Unsupported]:
    yield from refusals.unsupported_config(run)
    yield from refusals.foreign_devices(run)
    yield from refusals.other_precisions(run)
    yield from refusals.predictions(run.model)
    if run.model.experts is not None:
        reason = "experts of transformers are not planned: their layers gather and loop in a way of their own"
        yield Unsupported(key="model.experts", reason=reason)
    elif family_that_fits(run.model) is None:
        yield Unsupported(key="model", reason=f"no family of transformers has the layers of {run.model.name}")
    yield from _weights(run)


def _training(run: Run) -> Iterator[Unsupported]:
    if run.train.epochs is None:
        yield from refusals.endless(run)
    yield from refusals.keys_of_the_native_engine(run)
    yield from refusals.decisive_switches(run)
    yield from refusals.absent_parts(run)
    yield from refusals.absent_experts(run)
    yield from (problem for problem in refusals.regularisers(run) if problem.key not in HAS)
    evaluates, is_narrow = run.train.evaluate is not None, run.optimizer.states is not StateFormat.FP32
    yield from applying(
        (evaluates, "train.evaluate", "TRL evaluates on a split of the data set, which run files do not name",
         "leave it out, and add eval_strategy to the file"),
        (is_narrow, "optimizer.states", "its AdamW in 8 bits has blocks of its own: must be fp32"),
    )  # fmt: skip


def _schedule(run: Run) -> Iterator[Unsupported]:
    optimizer, schedule, final = run.optimizer, run.optimizer.schedule, run.optimizer.final_ratio
    warm_up, is_wsd = optimizer.warmup_steps or optimizer.warmup_ratio, schedule is LearningRateSchedule.WSD
    is_root = schedule is LearningRateSchedule.INVERSE_SQRT
    return applying(
        (schedule in WITHOUT_END and final, "optimizer.final_ratio",
         f"{schedule} of transformers has no last rate: must be 0"),
        (is_root and not warm_up, "optimizer.schedule",
         "inverse_sqrt of transformers without a warm-up falls as after 10,000 steps: give warmup_steps"),
        (is_wsd and warm_up and final, "optimizer.final_ratio",
         "the warm-up of warmup_stable_decay begins at the last rate: must be 0"),
        (is_wsd and optimizer.decay_shape is DecayShape.EXPONENTIAL, "optimizer.decay_shape",
         "warmup_stable_decay of transformers falls linearly, by a cosine or by a root"),
        (is_wsd and run.num_steps is None, "optimizer.schedule",
         "its decay is a number of steps, which epochs do not give",
         "--set train.epochs=null --set train.steps=100"),
    )  # fmt: skip


def _data(run: Run) -> Iterator[Unsupported]:
    source, given = run.data.source, "TRL takes it from the weights and the data set: leave it out"
    is_mixture = not isinstance(source, str)
    yield from applying((is_mixture, "data.source", "TRL mixes data sets without weights: name one"))
    if isinstance(source, str) and not run.data.is_synthetic:
        yield from _source(*source_of(source))
    keys = ("tokenizer", "validation")
    yield from applying(*((getattr(run.data, key) is not None, f"data.{key}", given) for key in keys))


def _source(place: str, options: Mapping[str, str]) -> Iterator[Unsupported]:
    key, reader = "data.source", reader_of(place)
    known = ("text", "format", "answers", *(() if reader else ("config", "split")))
    unknown = [option for option in options if option not in known]
    is_other = options.get("format", "text") not in ("text", "prompt", "messages")
    return applying(
        (reader is None and not _HUB_NAME.fullmatch(place), key,
         "no file that `datasets` reads, no data set of the hub",
         f"a file of {' '.join(end for end in FILES if end != '.txt')}, or OWNER/NAME"),
        (reader == "text", key, "each line of a text is a document there, and not each file",
         "lines of JSON with the key `text`"),
        (unknown, key, f"unknown option of a data source: {', '.join(unknown)}", f"allowed: {', '.join(known)}"),
        (is_other or options.get("answers", "all") != "all", key,
         "TRL reads text, prompts with completions and `messages`, of which all answers count"),
    )  # fmt: skip


def source_of(source: str) -> tuple[str, Mapping[str, str]]:
    """Return the place of a source and its options; a question mark of a glob begins none.

    >>> source_of("talks.jsonl?text=content"), source_of("talks-?.jsonl")
    (('talks.jsonl', {'text': 'content'}), ('talks-?.jsonl', {}))
    """
    place, _, query = source.rpartition("?")
    return (place, dict(parse_qsl(query, keep_blank_values=True))) if place and "=" in query else (source, {})


def reader_of(place: str) -> str | None:
    """Return the reader of `datasets` for a file, by its ending; None: it has none."""
    return FILES.get(Path(place.removesuffix(".gz")).suffix)


def _lora(lora: Lora, shapes: Model) -> Iterator[Unsupported]:
    missing = [target for target in lora.targets if module_of(target, shapes) is None]
    one_size = "adapters of TRL's arguments have one size: leave it out"
    return applying(
        *((getattr(lora, key), f"lora.{key}", one_size) for key in ("ranks", "alphas", "layers")),
        (lora.moves_base, "lora.init", "TRL's arguments have plain adapters alone: must be standard"),
        (lora.modules_to_save and shapes.tied_embeddings, "lora.modules_to_save",
         "without PEFT's `ensure_weight_tying`, which TRL does not set, the head keeps the frozen embedding"),
        (missing, "lora.targets", f"modules of {shapes.name} in transformers are not split so: {', '.join(missing)}",
         "allowed: query, key, value" if QKV in missing else None),
    )  # fmt: skip


def module_of(target: str, shapes: Model) -> str | None:
    """Return the name in transformers of the module with the matrices of `target` and no others; None: there is none.

    >>> [module_of(target, model("phi3-mini")) for target in ("query", "qkv", "gate", "down")]
    [None, 'qkv_proj', None, 'down_proj']
    """
    family = family_that_fits(shapes)
    tensors = {key.removesuffix(".weight"): of for key, of in family.tensors.items()} if family else {}
    holding = {key.rpartition(".")[2]: of.removesuffix(".weight").rpartition(".")[2] for key, of in tensors.items()}
    matrices = ("query", "key", "value") if target == QKV else (target,)
    found = {holding.get(matrix) for matrix in matrices}
    held = {matrix for matrix, module in holding.items() if module in found}
    return found.pop() if held == {*matrices} and len(found) == 1 else None
