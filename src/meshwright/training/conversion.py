"""Checkpoints to Hugging Face's formats and back, in one process on the host.

a pretraining's checkpoint    model.safetensors, config.json
a checkpoint of adapters      PEFT's adapter; merged: the base's weights plus B A of the adapters
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.specs.model import BaseFormat, Lora, Model
from meshwright.specs.run import Run
from meshwright.training import checkpoints as checkpoint
from meshwright.training.adapter_sums import Combination, add_combined
from meshwright.training.checkpoints import Content, SavedCheckpoint
from meshwright.training.fingerprints import fingerprints
from meshwright.training.masters import masters_of
from meshwright.training.models import (
    Transformer,
    add_adapters,
    build_model,
    dequantise,
    init_adapters,
    init_scores,
    materialize,
    merge_adapters,
)
from meshwright.training.named_adapters import NamedAdapters, with_empty_adapters
from meshwright.training.optimizer import AVERAGE, MasterOptimizer
from meshwright.training.run_identity import as_document, new_identity
from meshwright.training.weights import (
    Origin,
    adapter_sizes,
    adapters_of,
    find_weights,
    initial_adapters,
    load_adapters,
    load_weights,
    plain_adapters,
    read_lora,
    save_adapters,
    save_weights,
)

FORMATS = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Number formats of written weights."""


def notes_on_base(base_format: str) -> tuple[str, ...]:
    """Note on the two bases of adapters that were trained on a quantised one."""
    if base_format == BaseFormat.FULL:
        return ()
    return (
        f"training, its validation losses and the choice of its best checkpoint are of the base in {base_format}; "
        "evaluate, generate, chat, the adapter's folder and merged weights are of the base as its files have it; "
        "`checkpoint to-hf --merge --dequantised` writes the model that was trained",
    )


def load_saved(
    saved: SavedCheckpoint, held: Content, *, dtype: torch.dtype, base: str | None = None, dequantised: bool = False
) -> Transformer:
    """The whole model of a checkpoint on the host: its weights, or its base's weights with its adapters added.

    `base` is the folder of the base; None: as in the checkpoint. `dequantised`: the base is rounded to the format of
    the training and back. Adapters are added in fp32, and the sum is rounded once. Raises InputError when the base is
    another one.
    """
    if held.lora is None:
        module = build_model(held.shapes, dtype=dtype, device="cpu")
        checkpoint.load(saved, into=_weights(module, _kind(held)) | _buffers(module))
        return module
    origin = _base(base or held.weights)
    require_base(origin, fingerprint=held.weights_fingerprint, name=held.weights)
    new_rows = None if held.data is None else held.data.new_rows
    lora = held.lora if dequantised else replace(held.lora, base_format=BaseFormat.FULL)
    module = _with_base(held.shapes, lora, origin, dtype=dtype, new_rows=new_rows)
    adapters = {f"{_kind(held)}.{n}": p.detach() for n, p in adapters_of(module).items()}
    checkpoint.load(saved, into=adapters | {f"buffers.{n}": t for n, t in initial_adapters(module).items()})
    merge_adapters(module)
    return module


def load_merged(
    model: Model,
    weights: Origin,
    adapters: Mapping[Path, float],
    *,
    dtype: torch.dtype,
    new_rows: str | None = None,
    combination: Combination = "cat",
    density: float | None = None,
    seed: int | None = None,
) -> Transformer:
    """The whole model on the host: `weights` with the adapters of PEFT folders added, each times a number, in fp32.

    Sums are those of `combination` (`training.adapter_sums`). Raises InputError for a DoRA adapter, and for one that
    trained embedding or head whole, in a sum or times another number than 1.
    """
    is_sum = [*adapters.values()] != [1.0]
    module = build_model(model, dtype=torch.float32 if is_sum else dtype, device="cpu")
    load_weights(module, weights.folder, new_rows=new_rows)
    named = NamedAdapters(module, base=weights.folder)
    if is_sum:
        add_combined(named, adapters, combination, density=density, seed=seed or 0)
    else:
        (folder,) = adapters
        named.add(str(folder), folder)
        named.use(str(folder))
        merge_adapters(module)
    return module.to(dtype)


def export_weights(
    saved: SavedCheckpoint, held: Content, folder: Path, *, dtype: str, base: str | None, dequantised: bool
) -> None:
    """Write the weights of a checkpoint, or of the base with its adapters added, as `load_saved` has them.

    Raises InputError where `folder` is not empty.
    """
    found = torch.float32 if held.lora is None else FORMATS[dtype]
    module = load_saved(saved, held, dtype=found, base=base, dequantised=dequantised)
    save_weights(module, folder, dtype=FORMATS[dtype])


def export_adapters(saved: SavedCheckpoint, held: Content, folder: Path, *, dtype: str) -> None:
    """Write the adapters of a checkpoint in PEFT's format. Needs no base."""
    assert held.lora is not None
    module = build_model(held.shapes)
    add_adapters(module, held.lora)
    adapters = {name: torch.empty(p.shape) for name, p in adapters_of(module).items()}
    initial = {name: torch.empty(t.shape) for name, t in initial_adapters(module).items()}
    held_in = {f"{_kind(held)}.{name}": tensor for name, tensor in adapters.items()}
    checkpoint.load(saved, into=held_in | {f"buffers.{name}": tensor for name, tensor in initial.items()})
    adapters = {name: tensor.to(FORMATS[dtype]) for name, tensor in (adapters | initial).items()}
    save_adapters(adapters, folder, model=held.shapes, lora=held.lora, base=held.weights)


def export_merged_folder(run: Run, adapters: Path, folder: Path, *, dtype: str) -> None:
    """Like `export_weights`, from a PEFT folder that holds adapters of `run`."""
    base, new_rows = _base(run.weights), run.data.new_rows
    module = load_merged(run.model, base, {adapters: 1.0}, dtype=FORMATS[dtype], new_rows=new_rows)
    save_weights(module, folder, dtype=FORMATS[dtype])


def require_base(origin: Origin | None, *, fingerprint: str | None, name: str | None) -> None:
    """Raise InputError where `origin` is not the weights of `fingerprint`, to which the adapters belong.

    None stands for random weights.
    """
    if (origin and origin.fingerprint) != fingerprint:
        if origin is not None and origin.name == name:
            raise InputError(
                f"the adapters belong to other weights: files in {name} were changed since",
                hint="restore them, or give a run file whose `weights` names an unchanged copy",
            )
        raise InputError(
            "the adapters belong to other weights", got=origin.name if origin else "random ones", allowed=name,
            hint="give the run file whose `weights` names the right ones",
        )  # fmt: skip


def _base(name: str | None) -> Origin:
    if name is None:
        raise InputError(
            "adapters of random weights cannot be merged: there are no weights to add them to",
            hint="leave --merge out to export the adapters",
        )
    return find_weights(name)


def _with_base(model: Model, lora: Lora, origin: Origin, *, dtype: torch.dtype, new_rows: str | None) -> Transformer:
    """A model on the host with the weights of `origin`, and uninitialized adapters."""
    module = build_model(model, dtype=dtype)
    add_adapters(module, lora)
    materialize(module, device="cpu")
    load_weights(module, origin.folder, new_rows=new_rows)
    dequantise(module, dtype=dtype)
    return module


def import_weights(run: Run, weights: Path, *, folder: Path) -> Path:
    """Write step 0 of `run`: the weights of a folder (for `task: lora` the adapters of a PEFT folder), and
    fresh optimizer states. Raises InputError when the folder holds something else.
    """
    if run.lora is None:
        module = build_model(run.model, device="cpu")
        init_scores(module, seed=run.train.seed)
        load_weights(module, weights, new_rows=run.data.new_rows)
        origin = find_weights(str(weights))
    else:
        module = _adapters(run, weights, lora=run.lora)
        origin = None if run.weights is None else find_weights(run.weights)
    _require_reference(run, module, weights, origin=origin)
    optimizer = MasterOptimizer(
        masters_of([module], compute=torch.float32), settings=run.optimizer, is_single_process=True
    )
    state = optimizer.state() | (_buffers(module) if run.lora is None else {})
    about = {"run": run.name, "model": run.model.name, "plan": None, "tokens": 0, "from": str(weights)}
    about |= checkpoint.as_manifest(checkpoint.content(run, weights=origin))
    about["identity"] = as_document(new_identity(run, plan=None, results=None, fingerprints=fingerprints(run)))
    return checkpoint.save(state, folder=folder, step=0, about=about, keep=None)


def _require_reference(run: Run, module: Transformer, weights: Path, *, origin: Origin | None) -> None:
    """Raise InputError where the loss compares with another model than the one that training begins with."""
    if not run.train.has_reference:
        return
    hint = "`weights` names what training begins with"
    if run.lora is None:
        named = None if run.weights is None else find_weights(run.weights)
        is_other = named is None or origin is None or named.fingerprint != origin.fingerprint
    else:
        unused = (".lora_a", ".lora_magnitude")  # of an adapter that has not trained: its B is zero
        is_other = any(t.any() for name, t in adapters_of(module).items() if not any(end in name for end in unused))
        hint += ": `meshwright checkpoint to-hf WEIGHTS OUT --merge --adapter FOLDER` makes it"
    if is_other:
        raise InputError("the loss compares with `weights`, and these are others", got=str(weights), hint=hint)


def _adapters(run: Run, folder: Path, *, lora: Lora) -> Transformer:
    """The model of `run` on the meta device, its adapters real and filled from `folder`."""
    if lora.moves_base:
        raise InputError(
            "a folder of adapters does not hold what their base has lost", got=f"lora.init: {lora.init}",
            hint="lora.init: standard, and twice the rank and alpha, goes on from such adapters",
        )  # fmt: skip
    base = None if run.weights is None else find_weights(run.weights).folder
    with plain_adapters(folder, base=base, scores=run.model.num_labels > 0) as plain:
        found = read_lora(plain, model=run.model)
        if _function(found, run.model) != _function(lora, run.model):
            raise InputError("the adapters differ from the run file's", got=str(found), allowed=str(lora))
        module = with_empty_adapters(run.model, lora)
        load_adapters(module, plain)
    return module


def _function(lora: Lora, model: Model) -> object:
    """All that the adapters compute by, alphas to nine digits: files of fused matrices multiply and divide them."""
    sizes = {name: (size.rank, f"{size.alpha:.9g}") for name, size in adapter_sizes(model, lora).items()}
    return sizes, lora.modules_to_save, lora.use_dora


def export_initial_adapters(run: Run, folder: Path) -> None:
    """Write the initial adapters of a training of `run`, in PEFT's format and in fp32."""
    assert run.lora is not None
    module = with_empty_adapters(run.model, run.lora)
    init_adapters(module, seed=run.train.seed)
    save_adapters(adapters_of(module), folder, model=run.model, lora=run.lora, base=run.weights)


def _kind(held: Content) -> str:
    """The states that are the model's weights: where training kept their averages, these."""
    return AVERAGE if held.is_averaged else "weights"


def _weights(module: Transformer, kind: str = "weights") -> dict[str, Tensor]:
    return {f"{kind}.{name}": p.detach() for name, p in module.named_parameters()}


def _buffers(module: Transformer) -> dict[str, Tensor]:
    kept = module.state_dict().keys()
    return {f"buffers.{name}": buffer for name, buffer in module.named_buffers() if name in kept}
