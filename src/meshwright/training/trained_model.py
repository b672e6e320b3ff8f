"""A trained model, ready to compute: from a run folder, a checkpoint, a Hugging Face folder or an adapter."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from meshwright import runfile
from meshwright.catalog.huggingface import model_from_path
from meshwright.errors import InputError
from meshwright.files import default_cache
from meshwright.hub import is_hub_name
from meshwright.specs.model import BaseFormat, Model
from meshwright.specs.run import NATIVE, Data
from meshwright.training import checkpoints
from meshwright.training.checkpoints import Content, SavedCheckpoint, StepChoice
from meshwright.training.conversion import load_merged, load_saved, notes_on_base
from meshwright.training.data import open_tokenizer
from meshwright.training.data.tokenizer import Tokenizer, notes_on_end, tokenizer_from_path
from meshwright.training.device import find_device
from meshwright.training.exported_folder import (
    CONFIG,
    GENERATION,
    end_tokens,
    find_base,
    find_tokenizer,
    is_tokenizer_of,
    read_json,
    trained_positions,
)
from meshwright.training.models import Transformer, build_model
from meshwright.training.named_adapters import NamedAdapters
from meshwright.training.run_identity import IDENTITY, RunIdentity, read_identity
from meshwright.training.telemetry import RESOLVED, TOKENIZER
from meshwright.training.weights import Origin, differences, find_weights, load_weights
from meshwright.training.weights.adapters import CONFIG as ADAPTER_CONFIG
from meshwright.training.weights.origin import positions_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RUN_SUFFIXES = (".yaml", ".yml")
ADAPTER = "adapter"
KINDS = (
    "a run folder, RUN.yaml, a folder of checkpoints or one of them, a Hugging Face folder, a PEFT adapter, "
    "OWNER/NAME on the Hugging Face hub"
)


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A whole model on one device, with all that generation and evaluation need to know about it."""

    module: Transformer
    name: str  # as the user gave it
    weights: str  # the checkpoint or the folder
    step: int | None  # of a checkpoint
    dtype: str
    tokenizer: Tokenizer | None
    positions: int | None  # the most tokens of a sequence that it is trained for; None: unknown
    ends: tuple[int, ...]  # tokens that end a text
    generation: Mapping[str, Any] = field(default_factory=dict)  # generation_config.json
    data: Data | None = None  # of its training
    holds_out: bool | None = None  # documents of its data were held out for validation; None: unknown
    sequence_length: int | None = None  # of its training
    adapters: NamedAdapters | None = None
    notes: tuple[str, ...] = ()
    tokenizer_fault: str | None = None  # the note on a tokenizer that cannot be read

    @property
    def model(self) -> Model:
        """Its shapes."""
        return self.module.model

    @property
    def device(self) -> torch.device:
        """The device that holds it."""
        return next(self.module.parameters()).device

    def require_tokenizer(self) -> Tokenizer:
        """Its tokenizer. Raises InputError where there is none."""
        if self.tokenizer is None:
            raise InputError(
                f"no tokenizer is known for {self.name}" + "".join(f"; {note}" for note in self.notes),
                hint="name one with --tokenizer: a tokenizer.json, its folder, or OWNER/NAME on the hub",
            )
        return self.tokenizer


@dataclass(frozen=True, kw_only=True)
class _Found:
    """The meaning of a name: a checkpoint, or a folder of weights with an adapter or without."""

    saved: SavedCheckpoint | None = None
    folder: Path | None = None
    adapter: Path | None = None
    tokenizer: Path | None = None  # kept in the folder of the run


def load_trained(
    given: str,
    *,
    step: StepChoice = None,
    dtype: str | None = None,
    tokenizer: str | None = None,
    adapter: Sequence[str | Path] | None = None,
    may_score: bool = False,
) -> TrainedModel:
    """Load the model that `given` names, on this machine's accelerator or its CPU.

    `step` chooses a checkpoint (None: the newest), `dtype` the number format (None: the training's or the
    files'), `tokenizer` another tokenizer, `adapter` a PEFT folder whose adapter is added to the weights, or several
    as NAME=FOLDER, the first of which computes. `may_score`: a reward model is loaded too.
    Raises InputError for a name that cannot be loaded.
    """
    found = _find(given, step=step)
    if adapter and (found.adapter is not None or found.saved is not None):
        raise InputError("an adapter is added to a folder of weights", got=given)
    named = _by_name(adapter or ())
    if None in named:
        found = replace(found, adapter=named.pop(None))
    loaded = (
        _from_folder(given, found, dtype=dtype)
        if found.saved is None
        else _from_checkpoint(given, found.saved, found.tokenizer, dtype=dtype)
    )
    if tokenizer is not None:
        other = open_tokenizer(tokenizer, source=None, cache=default_cache())
        notes = tuple(note for note in loaded.notes if note != loaded.tokenizer_fault)
        loaded = replace(loaded, tokenizer=other, ends=(other.end,), notes=notes)
    if loaded.model.num_labels and not may_score:
        raise InputError(
            "a reward model scores texts, and writes none", got=given,
            hint="`evaluate` scores pairs of answers with it; `checkpoint to-hf` writes it for transformers",
        )  # fmt: skip
    known = loaded.tokenizer
    if known is not None and known.vocab > loaded.model.vocab:
        raise InputError(
            f"the tokenizer {known.name} has more tokens than the model's vocabulary",
            got=known.vocab, allowed=f"<= {loaded.model.vocab}",
        )  # fmt: skip
    loaded = replace(loaded, notes=loaded.notes + notes_on_end(known))
    loaded.module.requires_grad_(False)
    loaded.module.to(find_device())
    loaded.module.eval()
    return _with_named(loaded, found.folder, named) if named and found.folder else loaded


def adapter_folder(given: str) -> Path:
    """The folder of an adapter, or of the run that trained it. Raises InputError where there is none."""
    path = Path(given).expanduser()
    folder = path / ADAPTER if (path / ADAPTER / ADAPTER_CONFIG).is_file() else path
    if not (folder / ADAPTER_CONFIG).is_file():
        raise InputError("not a LoRA adapter", got=given, allowed=f"a folder with {ADAPTER_CONFIG}, or the run's")
    return folder


def _by_name(given: Sequence[str | Path]) -> dict[str | None, Path]:
    """Folders of NAME=FOLDER; of a single FOLDER the name is None. Raises InputError for others."""
    found: dict[str | None, Path] = {}
    for text in map(str, given):
        name, is_named, folder = text.partition("=")
        if not is_named or Path(text).expanduser().exists():
            name, folder = None, text
        if name in found or name == "" or (name is None and len(given) > 1):
            raise InputError("adapter", got=text, allowed="one folder, or NAME=FOLDER with a name of its own for each")
        found[name] = adapter_folder(folder)
    return found


def _with_named(loaded: TrainedModel, base: Path, named: Mapping[str | None, Path]) -> TrainedModel:
    adapters, notes = NamedAdapters(loaded.module, base=base), loaded.notes
    for name, folder in named.items():
        adapters.add(str(name), folder)
        notes += tuple(f"{name}: {note}" for note in _notes_of(folder))
    adapters.use(adapters.names[0])
    return replace(loaded, adapters=adapters, notes=notes)


def _notes_of(adapter: Path) -> tuple[str, ...]:
    """Notes on an adapter in the folder of its run, whose file says what the base was."""
    trained = read_json(adapter.resolve().parent / RESOLVED).get("lora") or {}
    return notes_on_base(trained.get("base_format", BaseFormat.FULL))


def _find(given: str, *, step: StepChoice) -> _Found:
    path = Path(given).expanduser()
    if path.suffix in RUN_SUFFIXES and path.is_file():
        run = runfile.load(path)
        if run.train.checkpoint is None:
            raise InputError(
                f"{given} names no folder of checkpoints", hint="give the folder of the results: runs/NAME"
            )
        return _Found(saved=_saved(Path(run.train.checkpoint.folder).expanduser(), step))
    if not path.exists():
        if not is_hub_name(given):
            raise InputError("there is no such model", got=given, allowed=KINDS)
        return _without_step(_Found(folder=find_weights(given).folder), given, step)
    if (path / RESOLVED).is_file():
        return _of_run(path, step=step)
    if checkpoints.NAME.fullmatch(path.name) or checkpoints.checkpoints(path):
        return _Found(saved=_saved(path, step))
    if (path / ADAPTER_CONFIG).is_file() and not (path / CONFIG).is_file():
        return _without_step(_with_named_base(path), given, step)
    if (path / CONFIG).is_file():
        return _without_step(_Found(folder=path), given, step)
    raise InputError("there is no model in this place", got=given, allowed=KINDS)


def _without_step(found: _Found, given: str, step: StepChoice) -> _Found:
    if step is not None:
        raise InputError("only checkpoints have steps", got=f"step {step} of {given}")
    return found


def _of_run(folder: Path, *, step: StepChoice) -> _Found:
    """The checkpoint of a run's folder; its adapter where no checkpoints were saved."""
    resolved = read_json(folder / RESOLVED)
    kept = folder / TOKENIZER if (folder / TOKENIZER).is_dir() else None
    settings = (resolved.get("train") or {}).get("checkpoint")
    if settings is not None and resolved.get("engine", NATIVE) != NATIVE:
        raise _foreign(resolved["engine"], str(folder))
    if settings is not None:
        identity = read_identity(folder / IDENTITY)
        where = _checkpoints_of(folder, Path(settings["folder"]).expanduser(), identity)
        saved = _saved(where, step)
        manifest = checkpoints.read_manifest(saved.path)
        written_by, run_id = manifest.get("run"), (manifest.get("identity") or {}).get("run_id")
        if written_by not in (None, resolved.get("name")):
            raise _of_another(where, got=written_by, allowed=resolved.get("name"))
        if identity is not None and identity.run_id and run_id not in (None, "", identity.run_id):
            raise _of_another(where, got=f"run_id {run_id}", allowed=f"run_id {identity.run_id}")
        return _Found(saved=saved, tokenizer=kept)
    if (folder / ADAPTER / ADAPTER_CONFIG).is_file():
        return _without_step(replace(_with_named_base(folder / ADAPTER), tokenizer=kept), str(folder), step)
    raise InputError(
        "this run saved no weights", got=str(folder),
        hint="train it with train.checkpoint: {folder: ...}; the last step is then saved",
    )  # fmt: skip


def _of_another(where: Path, *, got: object, allowed: object) -> InputError:
    return InputError(
        f"the newest checkpoint in {where} is of another run", got=got, allowed=allowed,
        hint="give the checkpoint itself",
    )  # fmt: skip


def _checkpoints_of(folder: Path, where: Path, identity: RunIdentity | None) -> Path:
    """The folder of checkpoints `where`; if it is gone, the folder at the same place relative to the run's folder."""
    if where.is_dir() or identity is None or not identity.results:
        return where
    moved = Path(os.path.normpath(folder.resolve() / os.path.relpath(where, identity.results)))
    return moved if moved.is_dir() else where


def _foreign(engine: str, given: str) -> InputError:
    return InputError(
        f"the checkpoints of {engine} are in a format of its own", got=given,
        hint="write the weights with `meshwright checkpoint to-hf RUN.yaml DIR`, and give DIR",
    )  # fmt: skip


def _saved(folder: Path, step: StepChoice) -> SavedCheckpoint:
    name = checkpoints.NAME.fullmatch(folder.name)
    chosen = SavedCheckpoint(path=folder, step=int(name[1])) if name else checkpoints.choose(folder, step)
    if name and step not in (None, chosen.step):
        raise InputError("no checkpoint of this step", got=step, allowed=chosen.step)
    if fault := checkpoints.verify(chosen.path):
        raise InputError(
            f"checkpoint {chosen.path} is damaged: {fault}",
            hint="`meshwright checkpoint verify` names the last good one; choose it with --step",
        )
    return chosen


def _with_named_base(adapter: Path) -> _Found:
    config = read_json(adapter / ADAPTER_CONFIG)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(base, str) or not base:
        raise InputError(
            "the adapter does not name its base model", got=str(adapter),
            hint="give the base, and the adapter with --adapter",
        )  # fmt: skip
    if revision and is_hub_name(base) and not Path(base).exists():
        base = f"{base.partition('@')[0]}@{revision}"
    return _Found(folder=find_weights(base).folder, adapter=adapter)


def _from_folder(given: str, found: _Found, *, dtype: str | None) -> TrainedModel:
    """Hugging Face weights, with an adapter where there is one."""
    folder = found.folder
    assert folder is not None
    model, config, generation = (model_from_path(folder), read_json(folder / CONFIG), read_json(folder / GENERATION))
    differences(folder, model)  # refuses quantized and other weights
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    name, notes = dtype or names.get(str(config.get("dtype") or config.get("torch_dtype")), "bf16"), ()
    if found.adapter is not None:
        origin = Origin(name=str(folder), folder=folder, fingerprint="")
        module = load_merged(model, origin, {found.adapter: 1.0}, dtype=DTYPES[name])
        notes = _notes_of(found.adapter)
    else:
        module = build_model(model, dtype=DTYPES[name], device="cpu")
        load_weights(module, folder)
    tokenizer, fault = None, None
    try:
        tokenizer = tokenizer_from_path(found.tokenizer or folder)
    except InputError as error:
        fault = error.message
    ends = end_tokens(generation) or end_tokens(config)
    return TrainedModel(
        module=module,
        name=given,
        weights=str(found.adapter or folder),
        step=None,
        dtype=name,
        tokenizer=tokenizer,
        positions=positions_of(config),
        ends=ends or (() if tokenizer is None else (tokenizer.end,)),
        generation=generation,
        notes=notes + (() if fault is None else (fault,)),
        tokenizer_fault=fault,
    )


def _from_checkpoint(given: str, saved: SavedCheckpoint, kept: Path | None, *, dtype: str | None) -> TrainedModel:
    manifest = checkpoints.read_manifest(saved.path)
    if manifest.get("engine") not in (None, NATIVE):
        raise _foreign(str(manifest["engine"]), given)
    content = checkpoints.content_of(manifest)
    if content is None:
        raise InputError(
            "this checkpoint does not contain its model's shapes", got=str(saved.path),
            hint="write its weights with `meshwright checkpoint to-hf RUN.yaml DIR`, and give DIR",
        )  # fmt: skip
    name = dtype or ("fp32" if content.precision == "fp32" else "bf16")
    module = load_saved(saved, content, dtype=DTYPES[name])
    base, notes = find_base(content)
    tokenizer, tokenizer_notes = _tokenizer_of(content, kept, base)
    config, generation = ({}, {}) if base is None else (read_json(base / CONFIG), read_json(base / GENERATION))
    ends = () if tokenizer is None else (tokenizer.end,)
    if base is not None and tokenizer is not None and is_tokenizer_of(base, tokenizer):
        ends += end_tokens(generation) or end_tokens(config)
    return TrainedModel(
        module=module,
        name=given,
        weights=str(saved.path),
        step=saved.step,
        dtype=name,
        tokenizer=tokenizer,
        positions=trained_positions(config, content) or None,
        ends=tuple(dict.fromkeys(ends)),
        generation=generation,
        data=content.data,
        holds_out=content.holds_out,
        sequence_length=content.sequence_length,
        notes=notes + tokenizer_notes + (() if content.lora is None else notes_on_base(content.lora.base_format)),
    )


def _tokenizer_of(content: Content, kept: Path | None, base: Path | None) -> tuple[Tokenizer | None, tuple[str, ...]]:
    """Return the tokenizer of a training: from its folder, by the name it has, or from the starting weights."""
    if kept is not None:
        return tokenizer_from_path(kept), ()
    tokenizer, notes = find_tokenizer(content)
    if tokenizer is None and base is not None and (base / "tokenizer.json").is_file():
        return tokenizer_from_path(base), ()
    return tokenizer, notes


def model_document(trained: TrainedModel) -> dict[str, Any]:
    """The model in the JSON documents of generation and evaluation."""
    return {
        "name": trained.name,
        "weights": trained.weights,
        "step": trained.step,
        "model": trained.model.name,
        "family": trained.model.family or None,
        "dtype": trained.dtype,
        "tokenizer": None if trained.tokenizer is None else trained.tokenizer.name,
        "positions": trained.positions,
        "end_tokens": list(trained.ends),
    }
