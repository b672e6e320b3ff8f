"""Files of a trainer: read, merged with those of accelerate and DeepSpeed, and sorted into settings.

"train.yaml accelerate.yaml ds.json"    files of one run, or a folder with them
"train.yaml max_steps=100 model=phi-2"  settings behind them: keys of the trainer, then keys of the run file
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.engines import refusals
from meshwright.engines.base import ASSUMED, DEPRECATED, is_setting, not_estimated
from meshwright.engines.trainers.settings import Given, Settings
from meshwright.engines.trainers.tables import TrainerTable, matching, table, table_of
from meshwright.errors import InputError
from meshwright.files import is_there
from meshwright.json_values import load_text, parse_json
from meshwright.runfile import document as documents
from meshwright.runfile.schema import RunFile

ENDINGS = (".yaml", ".yml", ".json")
OF_RUN_FILES = {
    "model": "model", "data.sequence_length": "sequence_length", "batch.micro": "micro",
    "train.preference": "preference",
}  # fmt: skip
"""Keys of a run file in place of a setting that the configuration lacks."""
MOST_FILES = 8
StatedContents = Sequence[tuple[str, Mapping[str, Any]]]  # name of a table, and values of its keys


def content_of(path: Path) -> dict[str, Any]:
    """Return a file of YAML or JSON. Raises InputError for one that cannot be read, is too large, or no mapping."""
    text = documents.read_text(path, kind="configuration")
    if text.lstrip().startswith("{"):
        try:
            found = parse_json(text)
        except ValueError:
            found = None  # flow style of YAML, or neither: the reader of YAML says what is wrong
        if isinstance(found, dict):
            return found
    read = documents.parse(text, file=str(path))
    if read.problems:
        raise read.error(list(read.problems))
    return read.value


def _repeated(path: Path) -> list[str]:
    """Return the note on keys that an object of a JSON file has twice: Python's json, and a trainer, takes the last."""
    found: dict[str, None] = {}

    def taken(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        names = [name for name, _ in pairs]
        found.update(dict.fromkeys(name for name in value if names.count(name) > 1))
        return value

    with contextlib.suppress(ValueError, OSError, RecursionError):
        json.loads(load_text(path), object_pairs_hook=taken)
    return [f"{path.name} has keys twice, of which the last counts: {', '.join(found)}"] if found else []


def trainer_of(path: Path) -> TrainerTable | None:
    """Return the table of the trainer whose configuration `path`, a file or a folder with one, is; None: of none."""
    if path.is_dir():
        found = [one for child in sorted(path.iterdir()) if child.is_file() and (one := trainer_of(child))]
        return next((one for one in found if not one.shares_work), next(iter(found), None))
    if path.suffix not in ENDINGS:
        return None
    try:
        return table_of(content_of(path))
    except InputError:
        return None


def read_settings(parts: list[str], *, ignore: Collection[str], contents: StatedContents = ()) -> Settings:
    """Return the settings of files and of what stands behind them; `contents` are in place of the first file.

    Raises InputError with all keys that are not known, and for files that cannot be read or that contradict each other.
    """
    paths = [one for part in parts if not is_setting(part) for one in _files(Path(part))]
    found = [(table(name), paths[0], dict(content)) for name, content in contents]
    for path in paths[1 if contents else 0 :]:
        content = content_of(path)
        if (kind := table_of(content)) is None:
            raise InputError("not a configuration of a trainer that is read", got=str(path))
        found.append((kind, path, content))
    trainers = [one for one in found if not one[0].shares_work]
    if len(trainers) > 1:
        names = ", ".join(f"{path} ({kind.title})" for kind, path, _ in trainers)
        raise InputError("several trainers' configurations are given for one run", got=names, hint="name one of them")
    if not found:
        raise InputError("no configuration is given", got=" ".join(parts))
    kind, path, content = (trainers or found)[0]
    content, overlay = _behind(parts, content, kind)
    settings = Settings(table=kind, file=path, overlay=overlay)
    unknown: dict[str, None] = {}
    queue = [(kind, path, content), *(one for one in found if one[0] is not kind or one[1] != path)]
    for number, (of, file, values) in enumerate(queue):
        if number >= MOST_FILES:
            raise InputError("configurations name more files than one run has", got=str(file), allowed=MOST_FILES)
        present = {given.resolve() for _, given, _ in queue}
        settings.notes += _repeated(file)
        queue += [one for one in _sort(of, file, values, settings, unknown) if one[1].resolve() not in present]
    known = {key: None for one in {id(t): t for t, _, _ in queue}.values() for key in one.keys}
    refusals.unknown_keys(unknown, known, program=kind.title, ignore=ignore)
    settings.notes += refusals.ignored_note(ignore)
    settings.notes += not_estimated(settings.unestimated)
    settings.notes += [f"{DEPRECATED} {'; '.join(settings.deprecated)}"] if settings.deprecated else []
    if settings.refused:
        reasons = "; ".join(f"{reason}: {', '.join(keys)}" for reason, keys in settings.refused.items())
        raise InputError(f"{path}: settings that run files cannot express: {reasons}")
    return settings


def _files(path: Path) -> list[Path]:
    """Return the files of a folder that are of trainers, or the one file."""
    if not path.is_dir():
        return [path]
    return [child for child in sorted(path.iterdir()) if child.is_file() and trainer_of(child) is not None]


def _behind(parts: list[str], content: dict[str, Any], kind: TrainerTable) -> tuple[dict[str, Any], dict[str, str]]:
    """Return `content` with `key=value` laid over it, and those that are keys of a run file."""
    overlay: dict[str, str] = {}
    for part in parts:
        key = part.partition("=")[0]
        if not is_setting(part):
            continue
        head, dot, _ = key.partition(".")
        is_own = kind.knows(key) or (key in content and not isinstance(content[key], Mapping))
        if not is_own and head in RunFile.__dataclass_fields__ and (dot or key in OF_RUN_FILES):
            overlay[key] = part
            continue
        content = documents.override(documents.RunFileDocument(file="", value=content), part).value
    return content, overlay


def _flat(kind: TrainerTable, content: Mapping[Any, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and kind.has_below(key):
            found |= _flat(kind, value, f"{key}.")
        else:
            found[key] = value
    return found


def _sort(
    kind: TrainerTable, file: Path, content: dict[str, Any], settings: Settings, unknown: dict[str, None]
) -> list[tuple[TrainerTable, Path, dict[str, Any]]]:
    """Sort the keys of one file into `settings`; return DeepSpeed's configuration where it names or holds one."""
    named = []
    if not kind.shares_work and isinstance(inline := content.get("deepspeed"), Mapping):
        content = {key: value for key, value in content.items() if key != "deepspeed"}
        named.append((table("deepspeed"), file / "deepspeed", dict(inline)))
    name, is_known = content.get("fsdp_config"), kind.has_below("fsdp_config")
    if is_known and isinstance(name, str) and not kind.is_off("fsdp_config", name):
        path = _named(name, file=file)
        if path is None:
            raise _absent(name, file=file, key="fsdp_config")
        content = content | {"fsdp_config": content_of(path)}
    flat = _flat(kind, content)
    for condition, defaults in kind.own_defaults.items():
        key, _, value = condition.partition("=")
        for name, default in defaults.items() if str(flat.get(key)).lower() == value.lower() else ():
            if flat.get(name) is None:
                settings.give(kind.keys[name], Given(value=default, key=f"{name} by default", file=file), of=kind)
    for key, value in flat.items():
        is_unset = key in kind.keys and any(type(value) is type(one) and value == one for one in kind.off.get(key, ()))
        if value is None or is_unset or (value == "auto" and kind.title == "DeepSpeed"):
            continue
        if key in kind.deprecated and not kind.is_off(key, value):
            settings.deprecated.append(f"{key}, now {kind.deprecated[key]}")
        setting = kind.keys.get(key)
        if setting == "deepspeed":
            if not kind.is_off(key, value):
                named.append(_deepspeed(value, file=file, key=key, settings=settings))
        elif setting is not None:
            settings.give(setting, Given(value=value, key=key, file=file), of=kind)
        elif not kind.knows(key):
            unknown[key] = None
        elif not kind.is_off(key, value):
            text = f"{key}: {_short(value)}"
            if matching(key, kind.not_carried):
                settings.notes.append(f"{text} is not carried over")
            elif entry := matching(key, kind.refused):
                settings.refused.setdefault(kind.refused[entry], []).append(text)
            elif matching(key, kind.not_estimated):
                settings.unestimated.append(text)
    for setting, default in kind.defaults.items():
        settings.defaults.setdefault(setting, default)
    return named


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _named(value: str, *, file: Path) -> Path | None:
    """Return the file that `file` names: in its folder, or as projects name it in one above; None: it is not here."""
    places = [folder / value for folder in file.absolute().parents]
    return next((place for place in places if is_there(str(place)) and place.is_file()), None)


def _absent(value: str, *, file: Path, key: str) -> InputError:
    hint = f'name a file that is there: "CONFIG {key}=PATH"'
    hint += ", or give it behind the configuration" if key == "deepspeed" else ""
    return InputError(f"{file} names a file that is not here", got=f"{key}: {value}", hint=hint)


def _deepspeed(value: Any, *, file: Path, key: str, settings: Settings) -> tuple[TrainerTable, Path, dict[str, Any]]:
    """Return the file that a configuration names, which can be one of the trainer's own repository."""
    if not isinstance(value, str):
        raise InputError(f"{key}: must be the path of a file, or its content", got=_short(value))
    path = _named(value, file=file)
    shipped = next((one for name, one in settings.table.shipped.items() if f"/{value}".endswith(f"/{name}")), None)
    if path is None and shipped is not None:
        settings.notes.append(f"{ASSUMED} {key}: {value} is the file of {settings.table.title}'s own repository")
        return table("deepspeed"), Path(value), dict(shipped)
    if path is None:
        raise _absent(value, file=file, key="deepspeed")
    content = content_of(path)
    if table_of(content) is not table("deepspeed"):
        raise InputError(f"{key} of {file} is no configuration of DeepSpeed that is read", got=str(path))
    return table("deepspeed"), path, content
