"""Build modules from the shapes of a model."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.specs.model import Model
from meshwright.training.distributed_tensors import is_distributed
from meshwright.training.models.families import check_model
from meshwright.training.models.initialize import reset_buffers
from meshwright.training.models.transformer import Transformer, TransformerOptions


def build_model(
    model: Model,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "meta",
    layers: range | None = None,
    is_first: bool | None = None,
    is_last: bool | None = None,
    options: TransformerOptions | None = None,
) -> Transformer:
    """The decoder of `model`, or its pipeline stage with `layers`.

    The first stage has the embedding, the last the head. By default the stage with the first layer is the
    first stage, and the stage with the last layer the last. If an end has no layers, set `is_first` and
    `is_last`.

    On the meta device, the default, the decoder has shapes and no memory: shard it, then `materialize`, then
    `init_weights` or `weights.load_weights`. On any other device the parameters are uninitialised memory.
    Routing biases stay fp32 in every dtype. Raises InputError for a model that this engine does not have.
    """
    check_model(model)
    layers = range(model.num_layers) if layers is None else layers
    if layers.step != 1 or not 0 <= layers.start <= layers.stop <= model.num_layers:
        raise InputError(f"{model.name}: a stage is a run of layers", got=layers, allowed=f"0 to {model.num_layers}")
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            built = Transformer(
                model,
                layers=layers,
                is_first=layers.start == 0 if is_first is None else is_first,
                is_last=layers.stop == model.num_layers if is_last is None else is_last,
                options=options or TransformerOptions(),
            )
    finally:
        torch.set_default_dtype(usual)
    if torch.device(device).type != "meta":
        materialize(built, device=device)
    return built


def materialize(built: Transformer, *, device: torch.device | str) -> None:
    """Allocate a meta model on `device`: parameters uninitialised, buffers zero, tied weights still tied."""

    def allocated(meta: Tensor) -> Tensor:
        if is_distributed(meta):
            return torch.empty_like(meta, device=device)
        # `empty_like` of a meta tensor traces PyTorch's reference, which imports SymPy
        return torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device=device)

    built._apply(allocated)
    built.tie()
    reset_buffers(built)
