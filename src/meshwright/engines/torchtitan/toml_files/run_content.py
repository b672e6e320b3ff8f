"""Torchtitan's TOML files (up to 0.2) as run files. Imports no torch.

Every key is carried over, ignored because it does not concern training, or named in a note. Absent keys have
torchtitan's defaults, not Meshwright's. Most keys exist in later versions, which `config_trees` reads.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.catalog import lookup as catalog
from meshwright.engines import refusals
from meshwright.engines.base import Imported, StatedCluster
from meshwright.engines.software_line import with_stated_software
from meshwright.engines.torchtitan.config_trees import run_content
from meshwright.engines.torchtitan.config_trees.contradictions import contradictions
from meshwright.engines.torchtitan.config_trees.models import ImportedModel
from meshwright.errors import InputError
from meshwright.specs.model import Model, Router
from meshwright.specs.run import BIAS_RATE

_FILE = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
PRESETS: Mapping[str, str | Mapping[str, Any]] = _FILE["models"] | _FILE["changed"]
"""Models of the catalogue by torchtitan's presets, or such a `base` with what a preset changes."""
EARLIER: Mapping[str, list[Any] | None] = dict.fromkeys(_FILE["without_effect"]["keys"]) | _FILE["same"]
"""Keys before 0.1.0 with the values that change no step; None: no value does."""
OF_FORKS: dict[str, Any] = _FILE["forks"]
"""Keys that forks have added, with their defaults."""
OLDER: dict[str, str] = _FILE["older"]
"""Keys by their names before 0.1.0."""

OF_EXPERTS = (
    "float8.moe_fqns", "float8.moe_fqns_prototype", "quantize.moe.float8.fqns", "quantize.moe.mx.fqns",
)  # fmt: skip
"""Earlier keys with the experts that a converter quantises; without a converter they have no effect."""

OF_FLOAT8 = ("float8.enable_float8_linear", "training.enable_float8_linear", "training.enable_fp8_linear")
"""Keys of `EARLIER` that later became a converter, `float8`."""


def preset_model(name: str, flavor: str) -> Model:
    """Return the model of a preset. Raises InputError for one that is not known."""
    found = PRESETS.get(f"{name} {flavor}")
    if found is None:
        raise InputError("no model of the catalogue is this preset", got=f"{name} {flavor}", allowed=", ".join(PRESETS))
    changes: dict[str, Any] = {"base": found} if isinstance(found, str) else dict(found)
    # Torchtitan's models have no multi-token prediction modules.
    model = replace(catalog.model(changes.pop("base")), num_mtp_layers=0)
    if not changes:
        return model
    for key in ("attention", "experts"):
        if key in changes:
            own = {field: tuple(value) if isinstance(value, list) else value for field, value in changes[key].items()}
            changes[key] = replace(getattr(model, key), **own)
    return replace(model, name=f"{name}-{flavor}".lower(), **changes)


def without_earlier(given: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return settings without those keys before 0.1.0 that change no step. Raises InputError for their other values."""
    kept, converters = [], []
    converts = any(key == "model.converters" and value for key, value in given)
    for key, value in given:
        if key in OF_FLOAT8 and value is True:
            converters = ["float8"]
        elif key not in EARLIER and (key not in OF_EXPERTS or converts):
            kept.append((key, value))
        elif (same := EARLIER.get(key)) is not None and value not in same:
            raise InputError(
                f"{key}, of torchtitan before 0.1.0, is not carried over", got=value,
                allowed=", ".join(map(repr, same)),
            )  # fmt: skip
    return kept + [("model.converters", converters)] * bool(converters)


LATER = {
    "job.dump_folder": "dump_folder",
    "parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "validation.dataset": "validator.dataloader.dataset",
    "validation.enable": "validator.enable",
    "validation.freq": "validator.freq",
    "validation.steps": "validator.steps",
}
"""Keys of the TOML files by their names in `config_trees`."""

DENSE = "quantize.dense.", "quantize.linear."
"""An earlier name of a section, and the later one."""

FILTERED = {"output", "router.gate", "moe.router.gate", "auto_filter_small_kn"}
"""Modules that remain in 16 bits in run files too."""

RECIPES = {"rowwise": "fp8_rowwise", "rowwise_with_gw_hp": "fp8_rowwise", "mx": "mxfp8"}


class _TomlSettings(run_content.TrainerSettings):
    """The keys of a TOML file over torchtitan's defaults."""

    def __init__(self, values: dict[str, Any], *, ignore: Collection[str] = ()) -> None:
        known = known_keys()
        self.values = {LATER.get(key, key): value for key, value in known.items()}
        self.values |= {"parallelism.enable_sequence_parallel": True, "activation_checkpoint": None}
        self.given = set()
        self._unestimated = []
        given = without_earlier([(key.replace(*DENSE), value) for key, value in _flat(values)])
        names = (old for old, _ in given)
        self.ignored = refusals.unknown_keys(names, known | OLDER, program="torchtitan up to 0.2", ignore=ignore)
        for old, value in given:
            if old in self.ignored:
                continue
            key = OLDER.get(old, old)
            default, key = known[key], LATER.get(key, key)
            self.values[key] = _checked(value, default, key=old)
            if self.values[key] != default:
                self.given.add(key)


@cache
def known_keys() -> dict[str, Any]:
    """Return the keys of torchtitan's TOML files with their defaults."""
    path = Path(__file__).with_name("keys.json")
    return json.loads(path.read_text(encoding="utf-8"))["keys"] | OF_FORKS


def _flat(values: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _checked(value: Any, default: Any, *, key: str) -> Any:
    """Return `value` if it has the type of torchtitan's default; an int is accepted for a float, `"a,b"` for a list."""
    if isinstance(default, list) and isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    types = (float, int) if type(default) is float else (type(default),)
    if default is None or key == "activation_checkpoint.selective_ac_option" or type(value) in types:
        return value
    raise InputError(f"{key} has another type than its default, {default!r}", got=value)


def import_toml(path: Path, *, cluster: StatedCluster, ignore: Collection[str] = ()) -> Imported:
    """Return the run on `cluster` that a TOML file of torchtitan describes, without the keys of `ignore`.

    Raises InputError when the file cannot be read, names a model that the catalogue lacks, or contains settings that
    no run file can express.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the configuration: {error.strerror or error}", got=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not TOML: {error}") from None
    if not isinstance(values.get("model"), dict):
        raise InputError(f"{path} is not a configuration of torchtitan", hint="it has [model] and [training]")
    preset = str(values["model"].get("name")), str(values["model"].get("flavor"))
    model = preset_model(*preset)  # before keys that only another kind of model has
    settings = _TomlSettings(values, ignore=ignore)
    _refuse_local_steps(settings)
    notes = refusals.ignored_note(settings.ignored)
    recipe = _recipe(settings, notes)
    if settings.values["model.tokenizer_path"] and preset[1] == "debugmodel":
        notes.append(f"the vocabulary of {model.vocab} is torchtitan 0.2's; 0.1 took it from model.tokenizer_path")
    is_biased = model.experts is not None and model.experts.router is Router.SIGMOID
    backend = settings.take("parallelism.expert_parallel_comm_backend")
    imported = ImportedModel(
        model=model, lora=None, recipe=recipe, balance_rate=BIAS_RATE if is_biased else None,
        max_sequence=sys.maxsize, notes=(), comm_backend=backend if model.experts is not None else "",
    )  # fmt: skip
    notes += contradictions(settings.values, given=settings.given, model=imported)
    parallel = run_content.parallel_section(settings, num_layers=model.num_layers)
    degree = settings.take("parallelism.expert_tensor_parallel_degree")
    parallel |= {"expert_tensor": degree} if parallel["expert"] > 1 and degree > 1 else {}
    parallel["recompute"] = _recompute(settings, layers=model.num_layers // parallel["pipeline"])
    width = run_content.data_width(parallel, cluster=cluster)
    content: dict[str, Any] = {
        "model": imported.content,
        **run_content.weights_section(settings, None, notes),
        "data": _data(settings),
        "batch": run_content.batch_section(settings, parallel, notes, width=width),
        **run_content.number_formats(settings, imported, _optimizer(settings, notes)),
        "cluster": cluster,
        "parallel": parallel,
        "engine": "torchtitan",
        "stack": run_content.stack_section(settings, parallel, imported, notes, cluster=cluster)
        | _parameter_format(settings, recipe),
        "train": run_content.train_section(settings, imported, notes),
    }
    content["train"] |= run_content.evaluation(settings, content, None, notes, width=width)
    notes += settings.unread()
    for old, later in LATER.items():
        notes = [note.replace(later, old) for note in notes]
    found = Imported(content=content, notes=tuple(notes))
    return with_stated_software(found, path.read_text(encoding="utf-8"), file=str(path))


def _refuse_local_steps(settings: _TomlSettings) -> None:
    """Raise InputError for replicas that take steps of their own and average their weights."""
    method = settings.values["fault_tolerance.semi_sync_method"]
    if settings.values["fault_tolerance.enable"] and method is not None:
        raise InputError("a training that run files cannot express: fault_tolerance.semi_sync_method", got=method)


def _parameter_format(settings: _TomlSettings, recipe: str | None) -> dict[str, str]:
    """Return the format in which FSDP gathers parameters; only those with one scale are gathered in fp8."""
    names = ("float8", "quantize.linear.float8")
    given = [path for name in names if settings.values[path := f"{name}.enable_fsdp_float8_all_gather"]]
    if not given or recipe != "fp8":
        return {}
    settings.take(given[0])
    return {"parameter_format": "fp8"}


def _data(settings: _TomlSettings) -> dict[str, Any]:
    path, name = settings.take("training.dataset_path"), settings.take("training.dataset")
    return {"source": path or name, "sequence_length": settings.take("training.seq_len")}


def _recompute(settings: _TomlSettings, *, layers: int) -> Any:
    """Return the recomputation of a rank's `layers`. Torchtitan's default recomputes every second layer completely."""
    mode = settings.take("activation_checkpoint.mode")
    option = str(settings.take("activation_checkpoint.selective_ac_option"))
    if mode in ("none", "full"):
        return mode
    if mode == "selective" and option == "op":
        return {"modules": ["alternate_matmuls"]}
    if mode == "selective" and option.isdigit() and int(option):
        return {"layers": layers // int(option)} if int(option) > 1 else "full"
    raise InputError(
        "recomputation that run files do not support", got=f"{mode}, selective_ac_option = {option!r}",
        allowed="none, full, selective with 'op' or every n-th layer",
    )  # fmt: skip


def _optimizer(settings: _TomlSettings, notes: list[str]) -> dict[str, Any]:
    take = settings.take
    name = take("optimizer.name")
    if name != "AdamW":
        raise InputError("an optimizer that run files do not support", got=name, allowed="AdamW")
    return {
        "learning_rate": take("optimizer.lr"),
        "betas": [take("optimizer.beta1"), take("optimizer.beta2")],
        "epsilon": take("optimizer.eps"),
        "weight_decay": take("optimizer.weight_decay"),
        "gradient_clip": float(take("training.max_norm")),
        **run_content.learning_rates(settings, notes),
    }


def _recipe(settings: _TomlSettings, notes: list[str]) -> str | None:
    """Return the number format of the layers' GEMMs by the converters; None: not quantised."""
    take = settings.take
    for key in [key for key in settings.given if key.endswith(".filter_fqns")]:
        if {*settings.values[key]} <= FILTERED:
            take(key)
    names = [name.removeprefix("quantize.") for name in take("model.converters")]
    if unknown := {*names} - {"float8", "mx", "linear.float8", "linear.mx", "grouped_mm.float8", "grouped_mm.mx"}:
        raise InputError("a converter that run files do not support", got=", ".join(sorted(unknown)))
    wanted = {name.rpartition(".")[2] for name in names if not name.startswith("grouped_mm.")}
    if len(wanted) > 1:
        raise InputError("several number formats in one model", got=", ".join(sorted(wanted)))
    if not wanted:
        notes += [f"model.converters: {name} only for experts is not carried over" for name in names]
        return None
    asked = take("quantize.linear.float8.recipe_name") or take("float8.recipe_name")
    if asked == "rowwise_with_gw_hp":
        notes.append("gradients of weights are multiplied in 16 bits, which is not carried over")
    return RECIPES["mx"] if "mx" in wanted else RECIPES.get(asked, "fp8")
