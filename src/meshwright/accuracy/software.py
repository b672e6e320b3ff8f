"""Software of a published row: the stack's key, its vintage as a decimal year, and its defaults."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from meshwright.accuracy.adapters import trains_adapters
from meshwright.accuracy.csvfile import CsvRow
from meshwright.accuracy.features import read_features
from meshwright.accuracy.shipped import frameworks, published_recipes
from meshwright.accuracy.statements import read_statements
from meshwright.catalog.stacks import features_from
from meshwright.specs.features import RELEASE_DEFAULTS, CudaGraphs, Dispatcher, Features
from meshwright.specs.hardware import Accelerator, Stack
from meshwright.specs.model import Lora
from meshwright.specs.plan import Sharding

_RELEASE = re.compile(r"(?<![\d.])(2\d)\.(0[1-9]|1[0-2]|[1-9])(?!\d)")  # NeMo 24.07, NGC 25.05, Primus 25.9
_RELEASED_PAGE = re.compile(rf"@(?:tag )?v?{_RELEASE.pattern}")  # of a page: "README.md @v25.02"
_OF_MANY = ("other", "transformers", "deepspeed", "fsdp2")
"""Stacks of several trainers, whose defaults are the trainer's own."""
_VERSION = re.compile(r"(?<![\d.])\d+\.\d+(?:\.\d+)?(?![\d.])")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_YEAR, _MONTH = r"(?P<year>20[12]\d)", r"(?P<month>0[1-9]|1[0-2]|[1-9])"
_DATES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"(?<!\d){_YEAR}(?P<sign>[-/.]){_MONTH}(?!\d)(?:(?P=sign)(?P<day>[0-3]?\d)(?!\d))?",
        rf"(?<!\d){_YEAR}(?P<month>0[1-9]|1[0-2])(?P<day>[0-3]\d)(?!\d)",
        rf"(?<!\d){_MONTH}/{_YEAR}(?!\d)",
        rf"\b(?P<name>{'|'.join(_MONTHS)})[a-z]*\.?,? (?:\d\d?,? )?{_YEAR}(?!\d)",
        rf"(?<!\d){_YEAR}(?![-\d])",
    )
)
"""Dates as tables write them; the first pattern that a text has decides."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """The stack of a row and its defaults for values that the row does not state."""

    stack: Stack
    title: str  # whose defaults these are: the stack's key, or the row's own name of a trainer without rows
    release: str  # the same with the version, or the year, of the row
    sharding: Sharding
    hybrid: bool  # sharded parameters are those of a node unless a row says so
    data_parallel: bool  # it has neither tensor nor pipeline parallelism unless a row says so
    sequence_parallel: bool
    precision: str
    mtp: bool
    memory: str  # definition of a printed memory figure: allocated, reserved, unknown
    batch_per_device: bool
    lora: Lora
    micro_batch_per_stage: bool  # of a row that states none: a pipeline has as many micro-batches as ranks
    fused_norm: bool  # the notes name a fused norm kernel
    recipe_recompute: str  # of the row's recipe, else of its trainer, in the words of rows; empty: none, or not known
    indexers: bool  # latent attention selects keys where the model does
    recipe: Recipe  # that the row was measured with; one that states nothing where none is known
    delayed_scaling: bool  # 8 bits mean scales of earlier steps


def is_mlperf(row: CsvRow) -> bool:
    """True if the row is a result of MLPerf Training (steady state and time to target from one log)."""
    named = f"{row.text('source_key')} {row.text('framework')}".lower()
    return "mlperf" in named or "time_to_target" in row.text("metric_kind")


def read_software(row: CsvRow, accelerator: Accelerator, model: str = "") -> Software:
    """The software of `row`; an unknown framework gets the key "other" and the defaults of Megatron.

    model: its name, by which a published recipe of that framework is known.
    """
    mlperf = frameworks()["mlperf"]
    vintage = _vintage(row)
    if is_mlperf(row):
        vintage = mlperf["rounds"].get(_round(row), vintage)
    vendor = accelerator.vendor.lower()
    entry = _entry(row, vintage, vendor)
    if is_mlperf(row) and not entry.get("mlperf_too"):
        entry = mlperf["vendor"].get(vendor, mlperf["vendor"]["other"])
    sequence_parallel_since = entry.get("sequence_parallel_since")
    lora = mlperf["lora"] if is_mlperf(row) else entry.get("lora", {})
    framework = entry.get("key", "other")
    recipe = recipe_for(
        source=row.text("source"),
        stack=framework,
        vintage=vintage,
        model=model,
        accelerator=accelerator.name,
        precision=row.text("precision").lower(),
        num_devices=row.count("num_gpus") or 0,
        context=row.count("cp") or 1,
    )
    mtp = read_statements(row.text("notes")).value("mtp")
    own = own_defaults(framework, vintage, model, is_whole=not {row.count("pp"), row.count("ep")} - {None, 1})
    own_format = own.get("precision") if own.get("precision") in accelerator.peak_flops_per_s else None
    stack = Stack(
        framework=framework,
        vintage=vintage,
        features=read_features(row, recipe.features if recipe else None),
        preset=_switches(own).or_else(_switches(entry)),
    )
    return Software(
        title=_title(row, entry),
        release=_release(_title(row, entry), vintage, _versions(row)),
        stack=stack,
        sharding=_sharding(entry, trains_adapters(row)),
        hybrid=entry.get("hybrid", False),
        data_parallel=entry.get("data_parallel", False),
        sequence_parallel=sequence_parallel_since is not None and (vintage or 9999) >= sequence_parallel_since,
        precision=(recipe.precision if recipe else "") or own_format or entry.get("precision", "bf16"),
        mtp=entry.get("mtp", False) or model in entry.get("mtp_models", ()) if mtp is None else mtp,
        memory=_memory_definition(row, entry.get("memory", "unknown")),
        batch_per_device=entry.get("batch_per_device", False),
        lora=_lora(lora),
        micro_batch_per_stage=(vintage or 9999) < entry.get("micro_batch_per_stage_until", 0),
        fused_norm="rms kernel" in row.text("notes").lower(),
        recipe_recompute=(recipe.recompute if recipe else "") or entry.get("recompute", ""),
        indexers=entry.get("indexers", True),
        recipe=recipe or NO_RECIPE,
        delayed_scaling=_scales_late(framework, vintage, accelerator),
    )


def own_defaults(
    framework: str, vintage: float | None, model: str, *, is_split: bool = False, is_whole: bool = False
) -> dict[str, Any]:
    """Values of the framework's own configuration of `model`, by key; empty where none is known.

    is_split: tensor or pipeline ranks share the model. is_whole: there are neither pipeline nor expert ranks.
    """
    found: dict[str, Any] = {}
    for entry in frameworks()["defaults"]:
        is_dated = entry.get("since", 0) <= (vintage or 9999) < entry.get("until", 10_000)
        is_named = framework == entry["framework"] and model.lower() in entry.get("models", [model.lower()])
        is_placed = is_split >= entry.get("split", False) and is_whole >= entry.get("whole", False)
        if is_named and is_dated and is_placed:
            found = entry | found
    return found


def _switches(entry: dict[str, Any]) -> Features:
    return features_from({key: entry[key] for key in Features.__dataclass_fields__ if key in entry})


def _sharding(entry: dict[str, Any], adapters: bool) -> Sharding:
    """Sharding by default: trainers on one library shard whole models and replicate frozen ones."""
    of_adapters = entry.get("lora_sharding") if adapters else None
    return Sharding[(of_adapters or entry.get("sharding", "none")).upper()]


def _scales_late(framework: str, vintage: float | None, accelerator: Accelerator) -> bool:
    """True if 8 bits mean scales of earlier steps in this release of `framework`."""
    return any(
        framework in entry["frameworks"]
        and (vintage or 9999) < entry.get("until", 10_000)
        and accelerator.architecture not in entry.get("except", ())
        for entry in frameworks()["delayed_scaling"]
    )


def _lora(entry: dict[str, Any]) -> Lora:
    values = {key: value for key, value in entry.items() if key != "source"}
    if "targets" in values:
        values["targets"] = tuple(values["targets"])
    return Lora(**values)


def _entry(row: CsvRow, vintage: float | None, vendor: str) -> dict[str, Any]:
    """The framework entry of a row; an unknown framework has the entry of a generic one like Megatron."""
    name = row.text("framework") or row.text("framework_version")  # a container names what is in it
    for entry in frameworks()["framework"]:
        if not re.search(entry["match"], name, re.IGNORECASE) or vendor not in entry.get("vendors", [vendor]):
            continue
        if (vintage or 9999) < entry.get("until", 10_000):
            if row.text("task").lower() in ("", "pretrain"):
                return entry
            whole = {} if trains_adapters(row) else entry.get("whole_tuning", {})
            return entry | entry.get("tuning", {}) | whole
    return frameworks()["unknown"]


def _title(row: CsvRow, entry: dict[str, Any]) -> str:
    if entry.get("key", "other") not in _OF_MANY:
        return entry["key"]
    name = row.text("framework")
    return name if "match" in entry else f"{name or 'a framework that the row does not name'} (not known: as Megatron)"


def _release(title: str, vintage: float | None, versions: dict[str, float]) -> str:
    if vintage is None:
        return title
    known = [(dated, name) for name, dated in versions.items() if dated <= vintage]
    return f"{title} {max(known)[1]}" if known else f"{title} of {int(vintage)}"


def _round(row: CsvRow) -> str:
    named = re.search(r"v\d\.\d", f"{row.text('source_key')} {row.text('framework')} {row.text('framework_version')}")
    return named[0] if named else ""


def _vintage(row: CsvRow) -> float | None:
    """Date of the version, else of the release of the page, else of the row's publication, as a decimal year.

    A version is a date by itself, or a number whose date `versions` of its framework has: 0.2 is 0.2.0.
    """
    version = row.text("framework_version")
    named = next(filter(None, map(_RELEASE.search, (version, row.text("framework")))), None)
    if release := named or _RELEASED_PAGE.search(row.text("source")):
        return 2000 + int(release[1]) + _part_of_year(int(release[2]))
    for text in (version, row.text("framework")):
        if date := _date_in(text):
            return date
        for number in _VERSION.findall(text):
            if dates := [dated for name, dated in _versions(row).items() if f"{name}.".startswith(f"{number}.")]:
                return min(dates)
    return _date_in(row.text("date"))


def _date_in(text: str) -> float | None:
    found = next(filter(None, (pattern.search(text) for pattern in _DATES)), None)
    return _year_of(found.groupdict()) if found else None


def _versions(row: CsvRow) -> dict[str, float]:
    """Dates of the versions of the row's framework, as decimal years."""
    name = row.text("framework") or row.text("framework_version")
    named = [e for e in frameworks()["framework"] if re.search(e["match"], name, re.IGNORECASE)]
    dates = named[0].get("versions", {}) if named else {}
    return {name: day.year + _part_of_year(day.month, day.day) for name, day in dates.items()}


def _year_of(date: dict[str, str | None]) -> float:
    """Decimal year of the named parts of a date; the middle of a year without a month."""
    named = date.get("name")
    month = _MONTHS.index(named.lower()) + 1 if named else int(date.get("month") or 7)
    return int(date["year"] or 0) + _part_of_year(month, int(date.get("day") or 1))


def _part_of_year(month: int, day: int = 1) -> float:
    return round((month - 1) / 12 + (day - 1) / 365, 3)


def _memory_definition(row: CsvRow, default: str) -> str:
    notes = row.text("notes").lower()
    if re.search(r"max[ _]allocated", notes):
        return "allocated"
    return "reserved" if re.search(r"reserved|nvidia-smi|rocm-smi", notes) else default


# --- recipes ---


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Switches of one recipe of one release."""

    stack: str
    since: float
    models: tuple[str, ...]  # empty: all
    accelerators: tuple[str, ...]
    precisions: tuple[str, ...] = ()  # empty: all
    devices: tuple[int, ...] = ()  # of the run; empty: any number
    contexts: tuple[int, ...] = ()  # degrees of context parallelism; empty: any
    features: Features = RELEASE_DEFAULTS
    recompute: str = ""  # as rows state it; empty: none, or not known
    precision: str = ""  # of rows that state none; empty: not known
    tensor: int = 0  # degree of rows that print none; 0: not known
    splits_experts: bool = False  # single experts over the tensor ranks, where a row prints no width
    shards_slices: bool = False  # parameters are sharded over slices, too
    stored: tuple[str, ...] = ()  # modules that keep their activations in 8 bits
    loss_chunks: int = 0  # in which a rank computes a micro-batch's loss; 0: at once
    in_16_bits: bool = False  # no fp32 master weights and states

    @property
    def conditions(self) -> tuple[tuple[Any, ...], ...]:
        """Kinds of runs that alone have this recipe, beside model and accelerator."""
        return self.precisions, self.devices, self.contexts


NO_RECIPE = Recipe(stack="", since=0.0, models=(), accelerators=())
"""States nothing."""

_OF_RECIPES = frozenset(Recipe.__dataclass_fields__)

_WITHOUT_DEPTH = re.compile(r"-\d+-layers$")
"""A model with another number of layers than its own trains with the same recipe."""

_OFF = Features(
    cuda_graphs=CudaGraphs.NONE,
    dispatcher=Dispatcher.ALL_TO_ALL,
    overlaps_experts=False,
    drops_tokens=False,
    fuses_experts=False,
    fp8_attention=False,
)
"""Switches of a recipe that states none."""


def recipe_for(
    *,
    source: str,
    stack: str,
    vintage: float | None,
    model: str,
    accelerator: str,
    precision: str,
    num_devices: int = 0,
    context: int = 1,
) -> Recipe | None:
    """The last recipe up to `vintage` (decimal year) for these names; None where none is known.

    source: the row's. Only the pages of a recipe's own project were measured with it.
    """
    if not any(page in source for page in published_recipes()["pages"].get(stack, ())):
        return None
    found = [
        recipe
        for recipe in _recipes()
        if recipe.stack == stack
        and recipe.since <= (vintage or 0.0)
        and (not recipe.models or _WITHOUT_DEPTH.sub("", model) in recipe.models)
        and accelerator in recipe.accelerators
        and (not recipe.precisions or precision in recipe.precisions)
        and (not recipe.devices or num_devices in recipe.devices)
        and (not recipe.contexts or context in recipe.contexts)
    ]
    return max(found, key=lambda r: (r.since, sum(map(bool, r.conditions)), -len(r.models)), default=None)


@cache
def _recipes() -> tuple[Recipe, ...]:
    return tuple(_recipe(entry) for entry in published_recipes()["recipe"])


def _recipe(entry: dict[str, Any]) -> Recipe:
    switches = {k: v for k, v in entry.items() if k in Features.__dataclass_fields__}
    own: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items() if k in _OF_RECIPES}
    return Recipe(**own, features=features_from(switches).or_else(_OFF))
