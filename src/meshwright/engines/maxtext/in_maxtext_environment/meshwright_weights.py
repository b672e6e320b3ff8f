"""Conversion between Hugging Face files and MaxText's parameters. Runs in MaxText's environment, without Meshwright.

    convert(tensors)   configured as `checkpoint_conversion_fn: meshwright_weights.convert`: MaxText reads safetensors
                       (`source_checkpoint_layout: safetensors`) and calls it to create the initial state
    python meshwright_weights.py PARAMETERS.json CHECKPOINT OUT.safetensors DTYPE
                       writes the parameters of a checkpoint of MaxText as a Hugging Face file

$MESHWRIGHT_PARAMETERS names a JSON file with `seed`, `is_drawn` and `leaves`, which describe the arrays
(`meshwright.engines.maxtext.parameters.leaves`). $MESHWRIGHT_ADAPTERS names the file of the initial adapters.

The state begins at step 1 with a learning-rate schedule that has advanced by one: MaxText's rate of the first warm-up
step is 0, in Meshwright's other engines it is peak / warmup_steps. Optimizer states begin at zero, with step count 0.
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
STATES = "nnx_aux"  # MaxText's collection of variables without gradients


def convert(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return MaxText's initial state from a file's tensors or random numbers, with the sharding of the training."""
    import jax
    import jax.numpy as jnp

    table = json.loads(Path(os.environ["MESHWRIGHT_PARAMETERS"]).read_text(encoding="utf-8"))
    targets = _abstract_state(sys.argv)
    parameters: dict[str, Any] = {}
    states: dict[str, Any] = {}
    for number, leaf in enumerate(table["leaves"]):
        keys = leaf["path"].split("/")
        target = _at(targets["model"], keys)
        if leaf["is_adapter"]:
            array = leaf_array(leaf, _adapters(), numpy=jnp).reshape(target.shape)
        elif table["is_drawn"]:
            array = random_array(leaf, target, seed=table["seed"], number=number)
        else:
            array = leaf_array(leaf, tensors, numpy=jnp)
        assert array.shape == target.shape, leaf["path"]
        tree = states if leaf["is_state"] else parameters
        _put(tree, keys, jax.device_put(array.astype(target.dtype), target.sharding))
    target = targets["optimizer"]["step"]
    one = jax.device_put(jnp.asarray(FIRST_STEP, dtype=jnp.int32), target.sharding)
    state = {"params": {"params": parameters}, "step": one, "opt_state": [None, None, {"count": one}]}
    return state | ({STATES: {"model": states}} if states else {})


def _abstract_state(arguments: list[str]) -> dict[str, Any]:
    """Return shape and sharding of every array of the state that MaxText trains with `arguments`."""
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
    """Return the names of the file's tensors in `leaf`, row by row of its grid."""
    layers, experts = leaf["layers"] or [None], range(leaf["num_experts"]) or [None]
    both = [(layer, expert) for layer in layers for expert in experts]
    if leaf["experts_first"]:
        both = [(layer, expert) for expert in experts for layer in layers]
    return [leaf["name"].format(layer=layer, expert=expert) for layer, expert in both]


def leaf_array(leaf: dict[str, Any], tensors: dict[str, Any], *, numpy: Any) -> Any:
    """Return the array of `leaf` from a file's tensors, in fp32; `numpy` is NumPy or JAX's."""
    matrices = [_from_file(numpy.asarray(tensors[name], dtype="float32"), leaf) for name in names(leaf)]
    if not leaf["grid"]:
        return matrices[0]
    stacked = numpy.stack(matrices).reshape(*leaf["grid"], *leaf["shape"])
    return numpy.moveaxis(stacked, range(len(leaf["grid"])), leaf["axes"])


def _from_file(tensor: Any, leaf: dict[str, Any]) -> Any:
    if leaf["column"] is not None:
        tensor = tensor[..., leaf["column"] :: 2]
    matrix = (tensor.T if leaf["transpose"] else tensor).reshape(leaf["shape"])
    if leaf["interleave"]:  # the last axis is a head's: its two halves become adjacent pairs
        pairs = matrix.reshape(*matrix.shape[:-1], 2, matrix.shape[-1] // 2)
        matrix = pairs.swapaxes(-1, -2).reshape(matrix.shape)
    return matrix


def random_array(leaf: dict[str, Any], target: Any, *, seed: int, number: int) -> Any:
    """Return the random initialization of `leaf`: normal, or ones. Every device creates its shard."""
    import jax
    import jax.numpy as jnp

    def draw(key: Any) -> Any:
        if leaf["std"] is None:
            return jnp.ones(target.shape, dtype=jnp.float32)
        return leaf["std"] * jax.random.normal(key, target.shape, dtype=jnp.float32)

    key = jax.random.fold_in(jax.random.PRNGKey(seed), number)
    return jax.jit(draw, out_shardings=target.sharding)(key)


def leaf_tensors(leaf: dict[str, Any], array: Any) -> dict[str, Any]:
    """Return the file's tensors in the `array` of `leaf`: the inverse of `leaf_array`, in NumPy."""
    import numpy as np

    array = np.moveaxis(np.asarray(array), leaf["axes"], range(len(leaf["axes"])))
    tensors = {}
    for name, matrix in zip(names(leaf), array.reshape(-1, *leaf["shape"]), strict=True):
        if leaf["interleave"]:
            pairs = matrix.reshape(*matrix.shape[:-1], matrix.shape[-1] // 2, 2)
            matrix = pairs.swapaxes(-1, -2).reshape(matrix.shape)
        tensors[name] = _to_file(matrix, leaf)
    return tensors


def _to_file(matrix: Any, leaf: dict[str, Any]) -> Any:
    """Return a matrix with the axes of a file's tensor."""
    if not leaf["transpose"]:
        return matrix.reshape(-1) if leaf["is_flat"] else matrix
    return matrix.reshape(math.prod(matrix.shape[: leaf["num_inputs"]]), -1).T


def main(table: Path, checkpoint: Path, out: Path, dtype: str) -> None:
    """Write the parameters of `checkpoint`, the folder of a step, to `out`."""
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
        for name, tensor in leaf_tensors(leaf, np.asarray(_at(held, leaf["path"].split("/")))).items():
            if leaf["column"] is None:
                tensors[name] = np.ascontiguousarray(tensor.astype(kind))
                continue
            both = tensors.setdefault(name, np.empty((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=kind))
            both[..., leaf["column"] :: 2] = tensor
    save_file(tensors, out, metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
