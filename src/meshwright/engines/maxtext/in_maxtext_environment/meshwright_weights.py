"""Weights of Hugging Face files in and out of MaxText's parameters. Runs in MaxText's environment, without Meshwright.

    convert(tensors)   named in a configuration as `checkpoint_conversion_fn: meshwright_weights.convert`: MaxText reads
                       safetensors (`source_checkpoint_layout: safetensors`) and asks it for a state to start from
    python meshwright_weights.py PARAMETERS.json CHECKPOINT OUT.safetensors DTYPE
                       the parameters of a checkpoint of MaxText, as a Hugging Face file

What stands where is a table: $MESHWRIGHT_PARAMETERS names a JSON file with `seed`, `is_drawn` and `leaves`, which
`meshwright.engines.maxtext.parameters.leaves` explains. Adapters begin as the file $MESHWRIGHT_ADAPTERS has them.

The state begins at step 1 with a learning-rate schedule that has advanced by one: MaxText gives the first step of a
warm-up the rate 0, Meshwright's other engines peak / warmup_steps. Moments begin at zero, with no step counted.
"""

from __future__ import annotations

import json
import math
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

FIRST_STEP = 1
STATES = "nnx_aux"  # where MaxText keeps variables that no gradient moves


def convert(tensors: dict[str, Any]) -> dict[str, Any]:
    """MaxText's state on disk, made of a file's tensors, or drawn where the table says so; placed as it is trained."""
    import jax
    import jax.numpy as jnp

    table = json.loads(Path(os.environ["MESHWRIGHT_PARAMETERS"]).read_text(encoding="utf-8"))
    places = _places(sys.argv)
    parameters: dict[str, Any] = {}
    states: dict[str, Any] = {}
    for number, leaf in enumerate(table["leaves"]):
        keys = leaf["path"].split("/")
        place = _at(places["model"], keys)
        if leaf["is_adapter"]:
            array = made(leaf, _adapters(), numpy=jnp).reshape(place.shape)
        elif table["is_drawn"]:
            array = drawn(leaf, place, seed=table["seed"], number=number)
        else:
            array = made(leaf, tensors, numpy=jnp)
        assert array.shape == place.shape, leaf["path"]
        tree = states if leaf["is_state"] else parameters
        _put(tree, keys, jax.device_put(array.astype(place.dtype), place.sharding))
    place = places["optimizer"]["step"]
    one = jax.device_put(jnp.asarray(FIRST_STEP, dtype=jnp.int32), place.sharding)
    begun = {"params": {"params": parameters}, "step": one, "opt_state": [None, None, {"count": one}]}
    return begun | ({STATES: {"model": states}} if states else {})


def _places(arguments: list[str]) -> dict[str, Any]:
    """Shape and sharding of every array of the state that MaxText trains when it is started with `arguments`."""
    from maxtext.configs import pyconfig
    from maxtext.utils import maxtext_utils
    from meshwright_state import state_of

    config = pyconfig.initialize(arguments)
    mesh = maxtext_utils.get_mesh_from_config(config, None)
    make_state, _ = state_of(config, mesh)
    return maxtext_utils.get_abstract_state(config, mesh, make_state, True)[0].to_pure_dict()


@cache
def _adapters() -> dict[str, Any]:
    from safetensors.numpy import load_file

    return load_file(os.environ["MESHWRIGHT_ADAPTERS"])


def _at(tree: dict[str, Any], keys: list[str]) -> Any:
    for key in keys:
        tree = tree[key]
    return tree


def _put(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = value


def names(leaf: dict[str, Any]) -> list[str]:
    """The tensors of a file that `leaf` is made of, row by row of its grid."""
    layers, experts = leaf["layers"] or [None], range(leaf["num_experts"]) or [None]
    both = [(layer, expert) for layer in layers for expert in experts]
    if leaf["experts_first"]:
        both = [(layer, expert) for expert in experts for layer in layers]
    return [leaf["name"].format(layer=layer, expert=expert) for layer, expert in both]


def made(leaf: dict[str, Any], tensors: dict[str, Any], *, numpy: Any) -> Any:
    """The array of `leaf` from a file's tensors, in fp32, made by `numpy` or JAX's."""
    parts = [_part(numpy.asarray(tensors[name], dtype="float32"), leaf) for name in names(leaf)]
    if not leaf["grid"]:
        return parts[0]
    stacked = numpy.stack(parts).reshape(*leaf["grid"], *leaf["shape"])
    return numpy.moveaxis(stacked, range(len(leaf["grid"])), leaf["axes"])


def _part(tensor: Any, leaf: dict[str, Any]) -> Any:
    if leaf["column"] is not None:
        tensor = tensor[..., leaf["column"] :: 2]
    part = (tensor.T if leaf["transpose"] else tensor).reshape(leaf["shape"])
    if leaf["interleave"]:  # the last axis is a head's: halves become neighbouring pairs
        halves = part.reshape(*part.shape[:-1], 2, part.shape[-1] // 2)
        part = halves.swapaxes(-1, -2).reshape(part.shape)
    return part


def drawn(leaf: dict[str, Any], place: Any, *, seed: int, number: int) -> Any:
    """First weights of `leaf`: normal, or ones; every device draws its part."""
    import jax
    import jax.numpy as jnp

    def draw(key: Any) -> Any:
        if leaf["std"] is None:
            return jnp.ones(place.shape, dtype=jnp.float32)
        return leaf["std"] * jax.random.normal(key, place.shape, dtype=jnp.float32)

    key = jax.random.fold_in(jax.random.PRNGKey(seed), number)
    return jax.jit(draw, out_shardings=place.sharding)(key)


def parts(leaf: dict[str, Any], array: Any) -> dict[str, Any]:
    """The file's tensors in `array`, which is `leaf`: `made` the other way, in NumPy."""
    import numpy as np

    array = np.moveaxis(np.asarray(array), leaf["axes"], range(len(leaf["axes"])))
    tensors = {}
    for name, part in zip(names(leaf), array.reshape(-1, *leaf["shape"]), strict=True):
        if leaf["interleave"]:
            pairs = part.reshape(*part.shape[:-1], part.shape[-1] // 2, 2)
            part = pairs.swapaxes(-1, -2).reshape(part.shape)
        tensors[name] = _matrix(part, leaf)
    return tensors


def _matrix(part: Any, leaf: dict[str, Any]) -> Any:
    """Back to the axes of a file's tensor."""
    if not leaf["transpose"]:
        return part.reshape(-1) if leaf["is_flat"] else part
    return part.reshape(math.prod(part.shape[: leaf["num_inputs"]]), -1).T


def main(table: Path, checkpoint: Path, out: Path, dtype: str) -> None:
    """Write the parameters of `checkpoint`, a folder of one step, as `out`."""
    import jax.numpy as jnp
    import numpy as np
    from etils import epath
    from orbax.checkpoint import v1 as ocp
    from safetensors.numpy import save_file

    state = ocp.load(epath.Path(checkpoint), checkpointable_name="items")
    tensors: dict[str, Any] = {}
    for leaf in json.loads(table.read_text(encoding="utf-8"))["leaves"]:
        held = state[STATES]["model"] if leaf["is_state"] else state["params"]["params"]
        kind = jnp.dtype("float32" if leaf["is_state"] else dtype)
        for name, tensor in parts(leaf, np.asarray(_at(held, leaf["path"].split("/")))).items():
            if leaf["column"] is None:
                tensors[name] = np.ascontiguousarray(tensor.astype(kind))
                continue
            both = tensors.setdefault(name, np.empty((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=kind))
            both[..., leaf["column"] :: 2] = tensor
    save_file(tensors, out, metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
