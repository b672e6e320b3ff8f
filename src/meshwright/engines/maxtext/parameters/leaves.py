"""Where every tensor of a Hugging Face file stands in MaxText's parameters. Pure: neither JAX nor PyTorch.

MaxText stacks the layers of a scan, the stages of a pipeline and the experts of a layer into one array. A `Leaf` says
how it is made of the file's matrices, in words that a script without Meshwright can follow:

    transpose each matrix, give it `shape`, and lay the matrices along `axes` as a grid of the size `grid`

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
from meshwright.engines.maxtext.parameters.layer_matrices import STD, Part, parts_of
from meshwright.specs.model import Lora, Model
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of MaxText's parameters."""

    path: str  # keys, joined by slashes
    name: str  # in the file; {layer} and {expert} stand for numbers
    layers: tuple[int, ...] = ()  # in the order of the grid; (): outside the layers
    num_experts: int = 0  # 0: the matrix is not an expert's
    experts_first: bool = False  # the grid's rows are experts, not layers
    grid: tuple[int, ...] = ()  # how many tensors along each of `axes`; (): one tensor
    axes: tuple[int, ...] = ()
    shape: tuple[int, ...]  # of one tensor, transposed
    transpose: bool
    num_inputs: int = 1  # axes of `shape` that a matrix has as one, its inputs
    interleave: bool = False  # rows of each head: halves become neighbouring pairs
    std: float | None  # of first weights that are drawn; None: ones
    is_adapter: bool = False  # its tensors are in a file of adapters
    is_state: bool = False  # no gradient moves it: kept apart from the weights, and in fp32 everywhere
    is_flat: bool = False  # the file has all axes of `shape` as one
    column: int | None = None  # 0, 1: every second column of the file's tensor, which another leaf shares


@dataclass(frozen=True, kw_only=True)
class _Stack:
    """Where some of the layers stand: a folder of parameters, and the grid in which their numbers lie."""

    folder: str
    grid: tuple[int, ...]
    layers: tuple[int, ...]  # row by row
    axes: tuple[int, ...]
    has_experts: bool


def leaves(model: Model, plan: Plan) -> Iterator[Leaf]:
    """All parameters of `model` under `plan`."""
    h, vocab = model.hidden, model.vocab
    yield Leaf(
        path="token_embedder/embedding",
        name="model.embed_tokens.weight",
        shape=(vocab, h),
        transpose=False,
        std=STD,
    )
    yield Leaf(
        path="decoder/decoder_norm/scale", name="model.norm.weight", shape=(h,), transpose=False, std=None
    )
    if not model.tied_embeddings:
        yield Leaf(
            path="decoder/logits_dense/kernel",
            name="lm_head.weight",
            shape=(h, vocab),
            transpose=True,
            std=STD,
        )
    for stack in _stacks(model, plan):
        for part in parts_of(model, has_experts=stack.has_experts):
            yield _stacked(part, stack, model)


MODULES = {
    "query": "self_attention/query",
    "key": "self_attention/key",
    "value": "self_attention/value",
    "output": "self_attention/out",
    "gate": "mlp/wi_0",
    "up": "mlp/wi_1",
    "down": "mlp/wo",
}
"""What a target of adapters is in a layer of MaxText."""


def adapter_leaves(model: Model, plan: Plan, lora: Lora) -> Iterator[Leaf]:
    """The adapters of `model` under `plan`, which has no stages; names are those of a file of PEFT."""
    places = {f"{MODULES[target]}/kernel" for target in lora.targets}
    for stack in _stacks(model, plan):
        for part in parts_of(model, has_experts=stack.has_experts):
            if part.place not in places:
                continue
            inputs, outputs = part.shape[: part.num_inputs], part.shape[part.num_inputs :]
            for letter, shape in (("a", (math.prod(inputs), lora.rank)), ("b", (lora.rank, *outputs))):
                leaf = _stacked(replace(part, shape=shape, num_inputs=1), stack, model)
                yield replace(
                    leaf,
                    path=f"{leaf.path}_lora_{letter}",
                    name=f"base_model.model.{leaf.name.removesuffix('weight')}lora_{letter.upper()}.weight",
                    interleave=part.interleave and letter == "b",
                    is_adapter=True,
                )


def all_leaves(run: Run, plan: Plan) -> list[Leaf]:
    """The parameters of `run`, and after them its adapters."""
    found = [*leaves(run.model, plan)]
    return [*found, *adapter_leaves(run.model, plan, run.lora)] if run.lora is not None else found


def file_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Every tensor of a file of `model`'s weights, and its shape."""
    return {name: _file_shape(leaf) for leaf in leaves(model, Plan()) for name in names(asdict(leaf))}


def _file_shape(leaf: Leaf) -> tuple[int, ...]:
    shape = leaf.shape
    if leaf.transpose:
        return math.prod(shape[leaf.num_inputs :]), math.prod(shape[: leaf.num_inputs])
    if leaf.is_flat:
        return (math.prod(shape),)
    return shape if leaf.column is None else (*shape[:-1], 2 * shape[-1])


def as_json(found: Iterable[Leaf]) -> list[dict[str, Any]]:
    """Leaves as JSON objects."""
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
            folder=folder,
            grid=grid,
            layers=layers,
            axes=tuple(range(len(grid))),
            has_experts=model.experts is not None,
        )


def _scans(model: Model) -> Iterator[_Stack]:
    """One scan of all layers. Where they are not alike, one of each kind:

    latent attention    the dense layers, and those with experts
    gpt-oss             those with a window, and those without: both are in one scan, in blocks of two
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
                folder=f"decoder/{name}",
                grid=(len(layers),),
                layers=tuple(layers),
                axes=(1,),
                has_experts=has_experts,
            )


def _stacked(part: Part, stack: _Stack, model: Model) -> Leaf:
    """The array of `part` of all layers of `stack`: experts before layers of a scan, after stages of a pipeline."""
    grid, axes = stack.grid, stack.axes
    num_experts = model.experts.num_experts if part.per_expert and model.experts else 0
    is_scan = axes == (1,)
    if num_experts:
        grid = (num_experts, *grid) if is_scan else (*grid, num_experts)
        axes = tuple(range(len(grid)))
    return Leaf(
        path=f"{stack.folder}/{part.place}",
        name=f"model.layers.{{layer}}.{part.name}",
        layers=stack.layers,
        num_experts=num_experts,
        experts_first=bool(num_experts) and is_scan,
        grid=grid,
        axes=(0,) if part.is_state else axes,
        shape=part.shape,
        transpose=part.transpose,
        num_inputs=part.num_inputs,
        interleave=part.interleave,
        std=part.std,
        is_state=part.is_state,
        is_flat=part.is_flat,
        column=part.column,
    )
