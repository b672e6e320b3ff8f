"""Identity of a run: settings that a run must share with the checkpoints it resumes, and settings that may change.

A run is identified by its model, its data and tokenizer, its seed, its task, its starting weights and its
optimizer: another value would train another model from the same states. Schedule, learning rate, batch, plan
and precision may change; every change is noted. The identity is a JSON document: a checkpoint's manifest has
it under the key `identity`, the folder of results in `identity.json`, and checkpoints in the formats of other
programs beside their folder. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError

from meshwright.errors import InputError
from meshwright.files import require_format, write_atomically
from meshwright.json_values import load_json, parse_json
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run, with_absolute_paths

IDENTITY = "identity.json"
BRANCH = "branched_from.json"  # in a folder of weights: the checkpoint they are from
_STEP, _MANIFEST = re.compile(r"step-(\d{8,})"), "manifest.json"
_FIXED = ("model.", "data.", "lora", "task", "weights", "train.seed", "optimizer.name", "engine")
_MAY_CHANGE = ("data.validation", "lora.dropout")
_IGNORED = (
    "name", "model.name", "is_data_shard_open", "is_engine_open", "model.unsupported", "cluster", "cluster_name",
    "calibration", "gemm_tuning", "stack", "objective", "costs", "source", "text", "overrides", "plan", "plan_in_words",
    "data.workers", "train.checkpoint", "train.evaluate", "train.trackers", "train.log_every", "micro_batch",
)  # fmt: skip
"""Settings that change no update of the weights."""
_RENAMED = {
    "global_batch": "batch.global_sequences",
    "label_tokens": "batch.label_tokens",
    "sequence_length": "data.sequence_length",
}
_BATCH = "batch.global_sequences"
_MISSING = object()

BatchHistory = tuple[tuple[int, int], ...]
"""(steps taken before, tokens of each step from then on), in order. 0: they vary, and manifests count them."""


@dataclass(frozen=True, kw_only=True)
class Branch:
    """The checkpoint of another run whose weights a run started from."""

    run: str
    run_id: str | None
    step: int
    checkpoint: str


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """One training, from its first step on, over all its resumptions."""

    run_id: str
    results: str  # absolute folder; empty: no step was taken yet
    settings: dict[str, Any]  # nested as in a run file; JSON values
    fingerprints: dict[str, str | None]  # content of `data.source`, `data.tokenizer`, `weights`; None: unknown
    batches: BatchHistory
    sequence_offset: int = 0  # batch i begins at sequence i x batch.global_sequences + this
    changes: tuple[str, ...] = ()  # of settings that may change, in order
    branched_from: Branch | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Differences between the run of a checkpoint and a run that resumes it, as lines `key: old -> new`."""

    refused: tuple[str, ...]
    changed: tuple[str, ...]
    unknown: tuple[str, ...]  # keys that the checkpoint does not know


def new_identity(
    run: Run, *, plan: Plan | None, results: Path | None, fingerprints: Mapping[str, str | None]
) -> RunIdentity:
    """Return the identity of a run that takes its first step."""
    return RunIdentity(
        run_id=uuid4().hex[:16],
        results="" if results is None else str(results.absolute()),
        settings=settings_of(run, plan=plan),
        fingerprints=dict(fingerprints),
        batches=((0, 0 if run.label_tokens is not None else run.tokens_per_step),),
        branched_from=None if run.weights is None else branch_of(Path(run.weights)),
    )


def branch_of(weights: Path) -> Branch | None:
    """The checkpoint that the weights in this folder were branched from; None for other weights."""
    try:
        document = load_json(weights / BRANCH)
        return TypeAdapter(Branch).validate_python(document)
    except (OSError, ValueError):
        return None


def settings_of(run: Run, *, plan: Plan | None) -> dict[str, Any]:
    """The settings of `run` that are compared, nested as in a run file."""
    values = json.loads(json.dumps(asdict(run), default=str))
    values["precision"] = run.precision.name
    for old, new in _RENAMED.items():
        section, _, key = new.partition(".")
        values[section] = {**(values.get(section) or {}), key: values.pop(old)}
    values["data"]["source"] = with_absolute_paths(run.data, _absolute).source_text
    values["data"]["tokenizer"] = run.data.tokenizer and _absolute(run.data.tokenizer)
    # Whether documents are held out decides what is trained on, and in which order.
    holds_out = run.train.evaluate is not None and not run.data.validation_sources
    values["data"]["holds_out_validation"] = holds_out and not run.data.is_synthetic
    values["weights"] = run.weights and _absolute(run.weights)
    if plan is not None:
        values["parallel"] = plan.describe()
    stored = run.kernels.stored_activations  # of all choices of kernels, the one that rounds what gradients see
    values["kernels"] = {"stored_activations": ", ".join(f"{k}: {v}" for k, v in sorted(stored.items())) or None}
    for key in _IGNORED:
        _drop(values, key)
    return values


def _drop(values: dict[str, Any], key: str) -> None:
    section, _, rest = key.partition(".")
    if not rest:
        values.pop(section, None)
    elif isinstance(values.get(section), dict):
        values[section].pop(rest, None)


def _absolute(name: str) -> str:
    """The absolute path of an existing file or folder; options after a question mark stay; any other name as is."""
    place, mark, options = name.partition("?")
    path = Path(place).expanduser()
    try:
        return f"{path.resolve()}{mark}{options}" if path.exists() else name
    except (OSError, ValueError):
        return name


def compare(held: RunIdentity, ours: RunIdentity) -> Comparison:
    """Compare the identity in a checkpoint with the identity of a run that would resume it."""
    refused, changed, unknown = [], [], []
    keys = dict.fromkeys([*_keys(ours.settings), *_keys(held.settings)])
    for key in keys:
        old, new = _at(held.settings, key), _at(ours.settings, key)
        is_fixed = key.startswith(_FIXED) and not key.startswith(_MAY_CHANGE)
        if old is _MISSING or new is _MISSING:
            is_counted = is_fixed or key == _BATCH  # which decides the tokens and the place in the data
            unknown += [key] if is_counted and old is _MISSING else []
            continue
        if isinstance(old, dict) or isinstance(new, dict):
            continue  # its keys are compared
        was, now = held.fingerprints.get(key), ours.fingerprints.get(key)
        if was is not None and now is not None:
            is_fixed = was != now
            if was != now and old == new:
                refused.append(f"{key}: the content of {old} has changed")
                continue
        if old != new:
            (refused if is_fixed else changed).append(f"{key}: {_text(old)} -> {_text(new)}")
    return Comparison(refused=tuple(refused), changed=tuple(changed), unknown=tuple(unknown))


def _keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _keys(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def _at(values: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key; None below a section that is None; `_MISSING` where there is none."""
    found: Any = values
    for part in key.split("."):
        if found is None:
            return None
        if not isinstance(found, Mapping) or part not in found:
            return _MISSING
        found = found[part]
    return found


def _text(value: Any) -> str:
    return "none" if value is None else str(value)


def continued(held: RunIdentity, ours: RunIdentity, *, step: int, batch: int, changes: tuple[str, ...]) -> RunIdentity:
    """The identity of `held` resumed after `step` steps as `ours`; `batch` is the number of the next batch."""
    before, now = (_at(i.settings, _BATCH) for i in (held, ours))
    has_both = isinstance(before, int) and isinstance(now, int)
    shift = batch * (before - now) if has_both else 0
    return replace(
        ours,
        run_id=held.run_id or ours.run_id,
        batches=with_batch(held.batches or ours.batches, step=step, tokens_per_step=ours.batches[-1][1]),
        sequence_offset=held.sequence_offset + shift,
        changes=(*held.changes, *(f"after step {step}: {line}" for line in changes)),
        branched_from=held.branched_from,
    )


def with_batch(history: BatchHistory, *, step: int, tokens_per_step: int) -> BatchHistory:
    """`history` up to `step` steps, then steps of `tokens_per_step`.

    >>> with_batch(((0, 64), (10, 128)), step=20, tokens_per_step=32)
    ((0, 64), (10, 128), (20, 32))
    >>> with_batch(((0, 64), (10, 128)), step=5, tokens_per_step=64)
    ((0, 64),)
    """
    kept = tuple(entry for entry in history if entry[0] < step)
    if kept and kept[-1][1] == tokens_per_step:
        return kept
    return (*kept, (step, tokens_per_step))


def tokens_seen(history: BatchHistory, *, steps: int) -> int:
    """Tokens of the first `steps` steps.

    >>> tokens_seen(((0, 64), (10, 128)), steps=12)
    896
    """
    ends = [first for first, _ in history[1:]] + [steps]
    return sum(max(0, min(end, steps) - first) * tokens for (first, tokens), end in zip(history, ends, strict=True))


# --- on disk ---


def as_document(identity: RunIdentity) -> dict[str, Any]:
    """The identity as JSON values."""
    return asdict(identity)


def identity_from(document: object) -> RunIdentity:
    """The identity of a JSON document. Raises InputError for another document."""
    try:
        return TypeAdapter(RunIdentity).validate_python(document)
    except ValidationError as error:
        raise InputError(f"this is no identity of a run: {first_fault(error)}") from error


def first_fault(error: ValidationError) -> str:
    """The first key that pydantic refuses, and why."""
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"


def identity_of_manifest(manifest: Mapping[str, Any]) -> RunIdentity | None:
    """Return a manifest's identity. An old manifest gives the settings it has; None: it describes no model."""
    if "identity" in manifest:
        return identity_from(manifest["identity"])
    if not isinstance(manifest.get("shapes"), dict):
        return None
    data = {k: v for k, v in (manifest.get("data") or {}).items() if k in ("source", "tokenizer")}
    length = manifest.get("sequence_length")
    settings: dict[str, Any] = {
        "model": {k: v for k, v in manifest["shapes"].items() if f"model.{k}" not in _IGNORED},
        "lora": manifest.get("lora"),
        "task": "pretrain" if manifest.get("lora") is None else "lora",
        "data": data | ({} if length is None else {"sequence_length": length}),
        "precision": manifest.get("precision"),
        "engine": manifest.get("engine") or "native",
    }
    if manifest.get("weights") is not None:
        settings["weights"] = manifest["weights"]
    prints = {"weights": manifest.get("weights_fingerprint"), "data.tokenizer": manifest.get("tokenizer_fingerprint")}
    return RunIdentity(run_id="", results="", settings=settings, fingerprints=prints, batches=())


def write_identity(path: Path, identity: RunIdentity) -> None:
    """Write `identity` to the file `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(as_document(identity), indent=2) + "\n")


def read_identity(path: Path) -> RunIdentity | None:
    """The identity in the file `path`; None if there is no such file. Raises InputError if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    try:
        return identity_from(parse_json(text))
    except (ValueError, InputError) as error:
        raise InputError(f"{path} does not identify a run: {error}") from error


def identity_file(folder: Path) -> Path:
    """The file with the identity of checkpoints in another program's format.

    It lies beside their folder, as the lock does: some programs start differently where the folder exists.
    """
    place = folder.expanduser().resolve()
    return place.with_name(f".{place.name}.{IDENTITY}")


def identity_in(folder: Path) -> RunIdentity | None:
    """The identity of the newest checkpoint in `folder`; None: no checkpoint, or a manifest without identity."""
    folder = folder.expanduser()
    if newest_manifest(folder) is None:
        return read_identity(identity_file(folder))
    manifest = _newest_manifest_in(folder)
    return None if manifest is None else identity_of_manifest(manifest)


def tokens_in(folder: Path, *, held: RunIdentity, step: int) -> int:
    """Tokens of the steps before the newest checkpoint in `folder`, after `step` steps of the run `held`."""
    counted = (_newest_manifest_in(folder) or {}).get("tokens")
    return counted if isinstance(counted, int) else tokens_seen(held.batches, steps=step)


def _newest_manifest_in(folder: Path) -> dict[str, Any] | None:
    saved = newest_manifest(folder)
    try:
        manifest = None if saved is None else load_json(saved / _MANIFEST)
    except (OSError, ValueError):
        return None  # damaged: refused when the checkpoint is verified
    require_format(manifest, where=f"checkpoint {saved}")
    return manifest if isinstance(manifest, dict) else None


def newest_manifest(folder: Path) -> Path | None:
    """The newest checkpoint with a manifest in `folder`."""
    if not folder.is_dir():
        return None
    found = [p for p in folder.iterdir() if _STEP.fullmatch(p.name) and (p / _MANIFEST).is_file()]
    return max(found, key=lambda p: int(p.name.partition("-")[2]), default=None)
