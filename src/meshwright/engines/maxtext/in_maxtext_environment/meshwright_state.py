"""The state that MaxText trains: its model, with adapters if they are configured, and its optimizer.

Runs in MaxText's environment. MaxText's pre-training loop does not call its function that adds adapters,
`lora_utils.apply_lora_to_model`; it is called here. Adapters are always fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from maxtext.common.train_state_nnx import TrainStateNNX
from maxtext.utils import lora_utils, model_creation_utils, train_utils


def state_of(config: Any, mesh: Any) -> tuple[Callable[[], TrainStateNNX], Callable[[int], Any]]:
    """Return a function that creates the initial state, and the learning-rate schedule."""
    create, model = model_creation_utils.create_nnx_abstract_model(config, mesh, None)
    schedule, optimizer = train_utils.create_training_optimizer(config, model, mesh=mesh)

    def state() -> TrainStateNNX:
        model = create()
        if config.lora.enable_lora:
            model = lora_utils.apply_lora_to_model(model, None, config)
            nnx.pop(model, nnx.Intermediate)
            nnx.update(model, cast(nnx.state(model, nnx.LoRAParam), jnp.float32))
        trained = nnx.LoRAParam if config.lora.enable_lora else nnx.Param
        return TrainStateNNX(model, nnx.Optimizer(model, optimizer, wrt=trained))

    return state, schedule


def cast(tree: Any, dtype: Any) -> Any:
    """Convert all arrays of `tree` to `dtype`."""
    return jax.tree.map(lambda array: array.astype(dtype), tree)


def cast_adapters(state: Any, config: Any) -> Any:
    """Return `state` with adapters in the number format of GEMMs."""
    adapters, others = nnx.split_state(state, nnx.LoRAParam, ...)
    return nnx.merge_state(cast(adapters, config.dtype), others)
