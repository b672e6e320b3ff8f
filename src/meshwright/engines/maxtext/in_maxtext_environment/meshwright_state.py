"""The state that MaxText trains: its model, with adapters where the configuration names them, and its optimizer.

Runs in MaxText's environment. MaxText 0.2.5 adapts a model in one function (`lora_utils.apply_lora_to_model`), which
its loop of pre-training does not call; here it is called. Adapters are fp32, whatever the weights are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from maxtext.common.train_state_nnx import TrainStateNNX
from maxtext.utils import lora_utils, model_creation_utils, train_utils


def trained(config: Any) -> type[nnx.Variable]:
    """The kind of variable that has gradients."""
    return nnx.LoRAParam if config.lora.enable_lora else nnx.Param


def state_of(config: Any, mesh: Any) -> tuple[Callable[[], TrainStateNNX], Callable[[int], Any]]:
    """A function that makes a first state, and the schedule of learning rates."""
    make, model = model_creation_utils.create_nnx_abstract_model(config, mesh, None)
    schedule, optimizer = train_utils.create_training_optimizer(config, model, mesh=mesh)

    def state() -> TrainStateNNX:
        made = make()
        if config.lora.enable_lora:
            made = lora_utils.apply_lora_to_model(made, None, config)
            nnx.pop(made, nnx.Intermediate)
            nnx.update(made, cast(nnx.state(made, nnx.LoRAParam), jnp.float32))
        return TrainStateNNX(made, nnx.Optimizer(made, optimizer, wrt=trained(config)))

    return state, schedule


def cast(tree: Any, dtype: Any) -> Any:
    """All arrays of `tree` in `dtype`."""
    return jax.tree.map(lambda array: array.astype(dtype), tree)


def narrow(state: Any, config: Any) -> Any:
    """`state` with adapters in the format in which they multiply."""
    adapters, others = nnx.split_state(state, nnx.LoRAParam, ...)
    return nnx.merge_state(cast(adapters, config.dtype), others)
