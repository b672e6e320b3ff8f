"""The position of every tensor of a Hugging Face file in MaxText's parameters. Pure: neither JAX nor PyTorch.

MaxText stacks the layers of a scan, the stages of a pipeline and the experts of a layer in one array. A `Leaf`
describes such an array for a script that runs without Meshwright:

    transpose each matrix, reshape it to `shape`, and stack the matrices along `axes` as a grid of the size `grid`

    layers of a scan        axis 1:        embed, L, heads, d
    stages of a pipeline    first axes:    (repeats,) stages, embed, heads, d
    experts                 first axis, but after stages
    routing biases          layers along axis 0, among the variables that are no weights: L, experts
    adapters                axis 1:        A embed, L, rank; B rank, L, outputs
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.engines.maxtext.config.models import is_gpt_oss, is_latent
from meshwright.engines.maxtext.in_maxtext_environment.meshwright_weights import names
from meshwright.engines.maxtext.parameters.matrices import STD, Leaf, layer_matrices
from meshwright.specs.model import Lora, Model
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run


@dataclass(frozen=True, kw_only=True)
class _Stack:
    """The position of some layers: a path of parameters, and the grid of their numbers."""

    folder: str
    grid: tuple[int, ...]
    layers: tuple[int, ...]  # row by row
    axes: tuple[int, ...]
    has_experts: bool


def leaves(model: Model, plan: Plan) -> Iterator[Leaf]:
    """Yield all parameters of `model` under `plan`."""
    h, vocab = model.hidden, model.vocab
    yield Leaf(
        path="token_embedder/embedding", name="model.embed_tokens.weight", shape=(vocab, h), transpose=False, std=STD
    )
    yield Leaf(path="decoder/decoder_norm/scale", name="model.norm.weight", shape=(h,), transpose=False, std=None)
    if not model.tied_embeddings:
        yield Leaf(path="decoder/logits_dense/kernel", name="lm_head.weight", shape=(h, vocab), transpose=True, std=STD)
    for stack in _stacks(model, plan):
        for matrix in layer_matrices(model, has_experts=stack.has_experts):
            yield _stacked(matrix, stack)


MODULES = {
    "query": "self_attention/query", "key": "self_attention/key", "value": "self_attention/value",
    "output": "self_attention/out", "gate": "mlp/wi_0", "up": "mlp/wi_1", "down": "mlp/wo",
}  # fmt: skip
"""Modules of MaxText by the targets of adapters."""


def adapter_leaves(model: Model, plan: Plan, lora: Lora) -> Iterator[Leaf]:
    """Yield the adapters of `model` under `plan`, which has one stage; names are those of a PEFT file."""
    paths = {f"{MODULES[target]}/kernel" for target in lora.targets}
    for stack in _stacks(model, plan):
        for matrix in layer_matrices(model, has_experts=stack.has_experts):
            if matrix.path not in paths:
                continue
            inputs, outputs = matrix.shape[: matrix.num_inputs], matrix.shape[matrix.num_inputs :]
            for letter, shape in (("a", (math.prod(inputs), lora.rank)), ("b", (lora.rank, *outputs))):
                leaf = _stacked(replace(matrix, shape=shape, num_inputs=1), stack)
                yield replace(
                    leaf,
                    path=f"{leaf.path}_lora_{letter}",
                    name=f"base_model.model.{leaf.name.removesuffix('weight')}lora_{letter.upper()}.weight",
                    interleave=matrix.interleave and letter == "b",
                    is_adapter=True,
                )


def all_leaves(run: Run, plan: Plan) -> list[Leaf]:
    """Return the parameters of `run`, followed by its adapters."""
    found = [*leaves(run.model, plan)]
    return [*found, *adapter_leaves(run.model, plan, run.lora)] if run.lora is not None else found


def file_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a file of `model`'s weights with their shapes."""
    return {name: _file_shape(leaf) for leaf in leaves(model, Plan()) for name in names(asdict(leaf))}


def _file_shape(leaf: Leaf) -> tuple[int, ...]:
    shape = leaf.shape
    if leaf.transpose:
        return math.prod(shape[leaf.num_inputs :]), math.prod(shape[: leaf.num_inputs])
    if leaf.is_flat:
        return (math.prod(shape),)
    return shape if leaf.column is None else (*shape[:-1], 2 * shape[-1])


def as_json(found: Iterable[Leaf]) -> list[dict[str, Any]]:
    """Return leaves as JSON objects."""
    return [asdict(leaf) for leaf in found]


def _stacks(model: Model, plan: Plan) -> Iterator[_Stack]:
    if plan.pipeline == 1:
        yield from _scans(model)
        return
    repeats, stages = plan.virtual_pipeline, plan.pipeline
    per_stage = model.num_layers // (repeats * stages)
    grid = (stages,) if repeats == 1 else (repeats, stages)
    for i in range(per_stage):
        folder = "decoder/pipeline_module/layers" + (f"/layers_{i}" if per_stage > 1 else "")
        layers = tuple((r * stages + s) * per_stage + i for r in range(repeats) for s in range(stages))
        yield _Stack(
            folder=folder, grid=grid, layers=layers, axes=tuple(range(len(grid))), has_experts=model.experts is not None
        )


def _scans(model: Model) -> Iterator[_Stack]:
    """Yield one scan of all layers, or one per kind of layers:

    latent attention    dense layers, and layers with experts
    gpt-oss             layers with a window, and layers without: both are in one scan, in blocks of two
    """
    every, num_dense = range(model.num_layers), model.num_dense_layers
    kinds = [("layers", every, model.experts is not None)]
    if is_latent(model):
        kinds = [("dense_layers", every[:num_dense], False), ("moe_layers", every[num_dense:], True)]
    elif is_gpt_oss(model):
        kinds = [(f"layers/layers_{i}", every[i::2], True) for i in range(2)]
    for name, layers, has_experts in kinds:
        if layers:
            yield _Stack(
                folder=f"decoder/{name}", grid=(len(layers),), layers=tuple(layers), axes=(1,), has_experts=has_experts
            )


def _stacked(matrix: Leaf, stack: _Stack) -> Leaf:
    """Return the array of `matrix` in all layers of `stack`: experts before layers of a scan, after pipeline stages."""
    grid, axes = stack.grid, stack.axes
    is_scan = axes == (1,)
    if matrix.num_experts:
        grid = (matrix.num_experts, *grid) if is_scan else (*grid, matrix.num_experts)
        axes = tuple(range(len(grid)))
    return replace(
        matrix,
        path=f"{stack.folder}/{matrix.path}",
        name=f"model.layers.{{layer}}.{matrix.name}",
        layers=stack.layers,
        experts_first=bool(matrix.num_experts) and is_scan,
        grid=grid,
        axes=(0,) if matrix.is_state else axes,
    )
