"""Where every tensor of a Hugging Face file stands in MaxText's parameters. Pure: neither JAX nor PyTorch.

MaxText stacks the layers of a scan, the stages of a pipeline and the experts of a layer into one array. A `Leaf` says
how it is made of the file's matrices, in words that a script without Meshwright can follow:

    transpose each matrix, give it `shape`, and lay the matrices along `axes` as a grid of the size `grid`

    layers of a scan        axis 1:        embed, L, heads, d
    stages of a pipeline    first axes:    (repeats,) stages, embed, heads, d
    experts                 first axis, but after stages
    adapters                axis 1:        A embed, L, rank; B rank, L, outputs
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.engines.maxtext.models import is_interleaved
from meshwright.specs.model import Lora, Model
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run

STD = 0.02
"""Of first weights; of those that write to the residual stream STD / sqrt(2 L). As in the native engine."""


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


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One matrix of a layer: its place in MaxText, its name in a file."""

    place: str
    name: str
    shape: tuple[int, ...]
    transpose: bool = True
    num_inputs: int = 1
    interleave: bool = False
    std: float | None = STD
    per_expert: bool = False


@dataclass(frozen=True, kw_only=True)
class _Stack:
    """Where some of the layers stand: a folder of parameters, and the grid in which their numbers lie."""

    folder: str
    grid: tuple[int, ...]
    layers: tuple[int, ...]  # row by row
    axes: tuple[int, ...]


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
        for part in (*_attention(model), *_feed_forward(model)):
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
        for part in (*_attention(model), *_feed_forward(model)):
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


def as_json(found: Iterable[Leaf]) -> list[dict[str, Any]]:
    """Leaves as JSON objects."""
    return [asdict(leaf) for leaf in found]


def _stacks(model: Model, plan: Plan) -> Iterator[_Stack]:
    if plan.pipeline == 1:
        yield _Stack(
            folder="decoder/layers",
            grid=(model.num_layers,),
            layers=tuple(range(model.num_layers)),
            axes=(1,),
        )
        return
    repeats, stages = plan.virtual_pipeline, plan.pipeline
    per_stage = model.num_layers // (repeats * stages)
    grid = (stages,) if repeats == 1 else (repeats, stages)
    for i in range(per_stage):
        folder = "decoder/pipeline_module/layers" + (f"/layers_{i}" if per_stage > 1 else "")
        layers = tuple((r * stages + s) * per_stage + i for r in range(repeats) for s in range(stages))
        yield _Stack(folder=folder, grid=grid, layers=layers, axes=tuple(range(len(grid))))


def _attention(model: Model) -> Iterator[_Part]:
    a, h = model.attention, model.hidden
    turned = is_interleaved(model)
    yield _Part(
        place="pre_self_attention_layer_norm/scale",
        name="input_layernorm",
        shape=(h,),
        transpose=False,
        std=None,
    )
    for place, name, heads in (
        ("query", "q_proj", a.num_heads),
        ("key", "k_proj", a.num_kv_heads),
        ("value", "v_proj", a.num_kv_heads),
    ):
        yield _Part(
            place=f"self_attention/{place}/kernel", name=f"self_attn.{name}", shape=(h, heads, a.head_dim),
            interleave=turned and place != "value",
        )  # fmt: skip
    if a.qk_norm:
        for place, name in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            yield _Part(
                place=f"self_attention/{place}/scale", name=f"self_attn.{name}", shape=(a.head_dim,),
                transpose=False, interleave=turned, std=None,
            )  # fmt: skip
    yield _Part(
        place="self_attention/out/kernel", name="self_attn.o_proj", shape=(a.num_heads, a.head_dim, h),
        num_inputs=2, std=_residual_std(model),
    )  # fmt: skip
    yield _Part(
        place="post_self_attention_layer_norm/scale", name="post_attention_layernorm", shape=(h,), transpose=False,
        std=None,
    )  # fmt: skip


def _feed_forward(model: Model) -> Iterator[_Part]:
    h, x = model.hidden, model.experts
    if x is None:
        for place, name in (("wi_0", "gate_proj"), ("wi_1", "up_proj")):
            yield _Part(place=f"mlp/{place}/kernel", name=f"mlp.{name}", shape=(h, model.ffn_hidden))
        yield _Part(
            place="mlp/wo/kernel", name="mlp.down_proj", shape=(model.ffn_hidden, h), std=_residual_std(model)
        )
        return
    is_mixtral = model.family == "MixtralForCausalLM" or not (model.family or model.attention.qk_norm)
    block = "block_sparse_moe" if is_mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    yield _Part(place="moe_block/gate/kernel", name=f"{block}.gate", shape=(h, x.num_experts))
    for place, name in (("wi_0", gate), ("wi_1", up)):
        yield _Part(
            place=f"moe_block/{place}", name=f"{block}.experts.{{expert}}.{name}", shape=(h, x.ffn_hidden),
            per_expert=True,
        )  # fmt: skip
    yield _Part(
        place="moe_block/wo", name=f"{block}.experts.{{expert}}.{down}", shape=(x.ffn_hidden, h),
        std=_residual_std(model), per_expert=True,
    )  # fmt: skip


def _residual_std(model: Model) -> float:
    return STD / math.sqrt(2 * model.num_layers)


def _stacked(part: _Part, stack: _Stack, model: Model) -> Leaf:
    """The array of `part` of all layers of `stack`: experts before layers of a scan, after stages of a pipeline."""
    grid, axes = stack.grid, stack.axes
    num_experts = model.experts.num_experts if part.per_expert and model.experts else 0
    is_scan = axes == (1,)
    if num_experts:
        grid = (num_experts, *grid) if is_scan else (*grid, num_experts)
        axes = tuple(range(len(grid)))
    return Leaf(
        path=f"{stack.folder}/{part.place}",
        name=f"model.layers.{{layer}}.{part.name}.weight",
        layers=stack.layers,
        num_experts=num_experts,
        experts_first=bool(num_experts) and is_scan,
        grid=grid,
        axes=axes,
        shape=part.shape,
        transpose=part.transpose,
        num_inputs=part.num_inputs,
        interleave=part.interleave,
        std=part.std,
    )
