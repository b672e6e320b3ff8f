"""Load weights into a model: each rank reads only its own part of each tensor, directly into the parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from meshwright.catalog.family_tensors import OUTSIDE_LAYERS, SCORES
from meshwright.errors import InputError
from meshwright.specs.model import Model
from meshwright.training.distributed_tensors import is_distributed
from meshwright.training.models import Transformer, build_model
from meshwright.training.models.initialize import fill_whole, local_slices
from meshwright.training.models.lora import quantized_weights
from meshwright.training.weights.fusing import file_part, our_shapes
from meshwright.training.weights.names import family_of, file_names, without_ignored
from meshwright.training.weights.safetensors_format import Folder

_SHOWN = 5
_COMPARED_WEIGHTS = 1 << 24  # that are in memory at a time
_OF_VOCABULARY = (OUTSIDE_LAYERS["embedding.weight"], OUTSIDE_LAYERS["head.weight"])


@torch.no_grad()
def load_weights(built: Transformer, folder: str | Path, *, new_rows: str | None = None) -> None:
    """Fill the parameters and routing biases of `built` from a Hugging Face folder, casting to their dtype.

    Adapters stay as they are, and so does the head of a reward model that the files lack; quantised matrices are
    rounded one by one. `built` may be a stage, and its parameters may be DTensors; it must not be on the meta device.
    `new_rows` as in `GrownFolder`. Raises InputError, before reading, that names missing and unexpected tensors and
    tensors of another shape.
    """
    assert not any(p.is_meta for p in built.parameters()), "materialize comes first"
    files = check_weights(folder, built.model, new_rows=new_rows)
    family = family_of(built.model)
    shapes = our_shapes(built.model)
    for name, tensor in tensors_of(built).items():
        names = file_names(built.model, name, family=family)
        if names == (SCORES,) and SCORES not in files.files:
            continue
        if (part := file_part(name, shapes=shapes, family=family)) is not None:
            fill(tensor, partial(part.read, files))
        elif not _is_stack(name):
            fill(tensor, partial(files.read, names[0]))
        else:
            _fill_stack(tensor, files, names)
    for name, weight in quantized_weights(built):
        (file_name,) = file_names(built.model, name, family=family)
        part = file_part(name, shapes=shapes, family=family)
        weight.take(files.read(file_name) if part is None else part.read(files))


def tensors_of(built: Transformer) -> dict[str, Tensor]:
    """Parameters and routing biases, in the order of the model, without adapters and quantised matrices.

    Tied weights are there once, under the embedding's name.
    """
    parameters = {name: p for name, p in built.named_parameters() if ".lora_" not in name}
    if built.model.tied_embeddings:
        parameters.pop("head.weight", None)  # of a last stage: it follows the embedding on the first
    parameters.pop("prediction_embedding.weight", None)  # of a last stage, likewise
    biases = {name: b for name, b in built.named_buffers() if name.endswith("router.bias_E")}
    return parameters | biases


def _is_stack(name: str) -> bool:
    return ".experts." in name


Shapes = Mapping[str, tuple[int, ...]]
"""The tensors of a file."""


class GrownFolder(Folder):
    """Weights whose embedding and head have `rows` rows. Those that the files lack are the mean of theirs, or zeros.

    So does transformers' `resize_token_embeddings`, which adds noise to the mean of a billionth of their covariance.
    """

    def __init__(self, folder: Path, *, rows: int, new_rows: str) -> None:
        super().__init__(folder)
        self.rows, self.new_rows = rows, new_rows
        self._row: dict[str, Tensor] = {}  # a new one

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor `name` with the new rows."""
        held = super().shape(name)
        return (max(held[0], self.rows), *held[1:]) if name in _OF_VOCABULARY else held

    def read(self, name: str, *, where: tuple[slice, ...] = ()) -> Tensor:
        """The tensor, or the part of it at `where`, with the new rows that belong to it."""
        num_held, *_ = held = super().shape(name)
        if held == self.shape(name):
            return super().read(name, where=where)
        start, stop, _ = (where or (slice(None),))[0].indices(self.rows)
        old = super().read(name, where=(slice(min(start, num_held), min(stop, num_held)), *where[1:]))
        if name not in self._row:
            mean = super().read(name).mean(0, dtype=torch.float32)
            self._row[name] = mean if self.new_rows == "mean" else torch.zeros_like(mean)
        row = self._row[name][where[1:]].to(old.dtype)
        return torch.cat([old, row.expand(max(0, stop - max(start, num_held)), -1)])


def check_weights(
    folder: str | Path, model: Model, *, shapes: Shapes | None = None, new_rows: str | None = None
) -> Folder:
    """Open the files of `folder`, which must hold every tensor of the whole `model`, in its shape, and no other.

    `shapes` are the tensors of a model that another engine describes, so that the native engine need not build it.
    `new_rows` as in `GrownFolder`. Raises InputError for other files, and where embeddings are tied but the files have
    another head.
    """
    architecture = model.family
    files = Folder(Path(folder)) if new_rows is None else GrownFolder(Path(folder), rows=model.vocab, new_rows=new_rows)
    if shapes is None:
        architecture, shapes = family_of(model).architecture, shapes_of(model)
    held = without_ignored(set(files.files), model=model)
    scales = sorted(n for n in held if n.endswith(("_scale", "_scale_inv", ".qweight", ".absmax", "_scales")))
    if scales:
        raise InputError(
            "the weights are quantised; this engine reads bf16, fp16 and fp32",
            got=scales[0],
            hint="use the repository that holds the model in bf16",
        )
    shapes = {name: shape for name, shape in shapes.items() if name in held or name != SCORES}
    missing = [n for n in shapes if n not in held]
    unexpected = sorted(held - shapes.keys())
    if missing or unexpected:
        parts = [f"missing {_list(missing)}"] if missing else []
        parts += [f"unexpected {_list(unexpected)}"] if unexpected else []
        raise InputError(
            f"the weights do not fit {model.name} ({architecture}): {'; '.join(parts)}",
            got=str(files.folder),
            hint=_without_predictions(missing, model),
        )
    for name, shape in shapes.items():
        if files.shape(name) != shape:
            raise InputError(f"{name} has another shape", got=files.shape(name), allowed=shape)
    if model.tied_embeddings:
        _require_tied(files)
    return files


def _require_tied(files: Folder) -> None:
    """Raise InputError where the files have a head that is not the embedding: transformers reads it as untied."""
    embedding, head = OUTSIDE_LAYERS["embedding.weight"], OUTSIDE_LAYERS["head.weight"]
    if not {embedding, head} <= files.files.keys():
        return
    rows, width = files.shape(embedding)
    step = max(1, _COMPARED_WEIGHTS // width)
    parts = [(slice(first, first + step),) for first in range(0, rows, step)]
    if files.shape(head) != (rows, width) or not all(
        torch.equal(files.read(embedding, where=part).float(), files.read(head, where=part).float()) for part in parts
    ):
        raise InputError(
            f"the embeddings are tied, but the weights hold a head of their own: {head} is not {embedding}",
            got=str(files.folder),
            hint="model.tied_embeddings: false trains both; tie_word_embeddings: false in config.json describes them",
        )


def shapes_of(model: Model) -> Shapes:
    """Every tensor of a file of `model`'s weights, and its shape. Raises InputError as `names.family_of`."""
    family, ours, found = family_of(model), our_shapes(model), {}
    for name in tensors_of(build_model(model)):
        part = file_part(name, shapes=ours, family=family)
        shape = ours[name][1:] if _is_stack(name) else ours[name]
        if part is not None:
            shape = part.file_shape
        found |= dict.fromkeys(file_names(model, name, family=family), shape)
    return found


def _without_predictions(missing: list[str], model: Model) -> str | None:
    """A hint where all that is missing is multi-token prediction, which transformers does not save."""
    ends = tuple(f"model.layers.{model.num_layers + k}." for k in range(model.num_mtp_layers))
    if missing and ends and all(name.startswith(ends) for name in missing):
        return "--set model.num_mtp_layers=0 trains the model without multi-token prediction"
    return None


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def fill(tensor: Tensor, read: Callable[..., Tensor]) -> None:
    """Copy what `read` returns, or of a sharded `tensor` this rank's part of it, which it reads by its slices."""
    if not is_distributed(tensor):
        tensor.copy_(read())
        return
    where = local_slices(tensor)
    if where is None:
        fill_whole(tensor, read().contiguous())
    elif tensor.to_local().numel():
        tensor.to_local().copy_(read(where=where))


def _fill_stack(tensor: Tensor, files: Folder, names: tuple[str, ...]) -> None:
    """Expert by expert: no second stack is ever held."""
    if not is_distributed(tensor):
        for target, name in zip(tensor, names, strict=True):
            target.copy_(files.read(name))
        return
    where = local_slices(tensor)
    if where is None:
        fill_whole(tensor, torch.stack([files.read(name) for name in names]))
    elif tensor.to_local().numel():
        for target, name in zip(tensor.to_local(), names[where[0]], strict=True):
            target.copy_(files.read(name, where=where[1:]))
