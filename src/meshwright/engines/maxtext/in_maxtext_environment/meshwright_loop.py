"""Training loop from MaxText's own components for what its own loop does not support: adapters, prompts, evaluation.

Runs in MaxText's environment. Model, loss, optimizer, sharding and checkpoints are MaxText's, and so is the step that
trains all weights. Differences:

    batches      arrays that the worker has written, in the run's order (`BatchArray`)
    adapters     added as in MaxText's SFT trainer. MaxText's pre-training loop does not add them, its gradient
                 accumulation differentiates all weights, and its checkpoints of adapters lack optimizer states
    evaluation   the run's validation batches; MaxText's own evaluation clears its file of metrics

Lines of `metrics_file` have MaxText's names. The time of a step is from the arrival of the previous loss to the arrival
of its own.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.common import checkpointing, profiler, train_state_nnx
from maxtext.common.common_types import ReorderStrategy
from maxtext.trainers.pre_train import train as maxtext
from maxtext.utils import max_utils, maxtext_utils, sharding, train_utils
from meshwright_state import cast, cast_adapters, state_of

FIELDS = ("tokens", "labels", "positions", "documents")


class BatchArray:
    """Batches of an array that the worker has written: int32 [rows, 4, T], the fields of `FIELDS`.

    Labels below 0 are untrained; document -1 is padding. A batch with fewer rows than devices is padded with rows that
    MaxText ignores.
    """

    def __init__(self, path: Path, *, rows: int, loaded: int, config: Any, mesh: Any) -> None:
        self.rows_SFT = np.load(path, mmap_mode="r")
        self.rows, self.fill = rows, loaded - rows
        self.sharding = sharding.get_input_data_sharding(config, mesh)
        parts, swap = max_utils.reordered_cp_size(config, mesh), ReorderStrategy.DUAL_CHUNK_SWAP
        self.reorder = None
        if parts > 1:  # context parallelism: balances the causal mask over ranks
            self.reorder = maxtext_utils.get_reorder_callable(parts, config.shard_mode, swap, config.hardware)

    def batch(self, number: int) -> dict[str, jax.Array]:
        """Return batch `number`, counted from 0, with MaxText's names; a process reads only its devices' shards."""
        rows_BFT = self.rows_SFT[number * self.rows : (number + 1) * self.rows]
        rows_BFT = np.concatenate([rows_BFT, np.repeat(rows_BFT[:1], self.fill, axis=0)])
        tokens, labels, positions, documents = (rows_BFT[:, i] for i in range(len(FIELDS)))
        fields = {
            "inputs": tokens,
            "inputs_position": positions,
            "inputs_segmentation": documents + 1,
            "targets": np.maximum(labels, 0),
            "targets_position": positions,
            "targets_segmentation": (labels >= 0).astype(np.int32),
        }
        batch = {name: self._placed(field_BT) for name, field_BT in fields.items()}
        return jax.device_put(self.reorder(batch), self.sharding) if self.reorder else batch

    def _placed(self, field_BT: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(field_BT.shape, self.sharding, lambda part: field_BT[part])


def adapter_step(
    graph: Any, config: Any, _shardings: Any, _weights: Any, state: Any, data: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Training step of the adapters, with the arguments of MaxText's `train_step`."""
    held = nnx.merge(graph, state)
    model_graph, adapters, frozen = nnx.split(held.model, nnx.LoRAParam, ...)

    def entropy(adapters: Any, batch: dict[str, Any]) -> tuple[Any, Any]:
        model = nnx.merge(model_graph, cast(adapters, config.dtype), frozen, copy=True)
        _, sums = maxtext.loss_fn(model, config, batch, None, None, is_train=True)
        return sums["xent_sum"], sums["total_weights"]

    def add(sums: Any, batch: dict[str, Any]) -> tuple[Any, None]:
        (loss, count), gradients = jax.value_and_grad(entropy, has_aux=True)(adapters, batch)
        return jax.tree.map(jnp.add, sums, (loss, count, gradients)), None

    def micro_batches(field_BT: Any) -> Any:  # padding rows are the last ones of each
        return field_BT.reshape(-1, config.gradient_accumulation_steps, field_BT.shape[1]).swapaxes(0, 1)

    nothing = (0.0, 0, jax.tree.map(jnp.zeros_like, adapters))
    (loss, count, sums), _ = jax.lax.scan(add, nothing, jax.tree.map(micro_batches, data))
    gradients = jax.tree.map(lambda total: total / count, sums)
    numbers = {"learning/loss": loss / count, "learning/raw_grad_norm": max_utils.l2norm_pytree(gradients)}
    if config.gradient_clipping_threshold > 0:
        gradients = maxtext_utils.apply_gradient_clipping(gradients, None, config.gradient_clipping_threshold)
    held.apply_gradients(gradients)
    return nnx.state(held, nnx.Not(nnx.Intermediate)), {"scalar": numbers}


def evaluation_step(graph: Any, config: Any, state: Any, data: dict[str, Any]) -> dict[str, Any]:
    """MaxText's own step, with adapters in the number format of GEMMs."""
    return maxtext.eval_step(graph, config, cast_adapters(state, config), data)


class MaxTextTrainLoop:
    """The loop of one training, with its state, batches and metrics."""

    def __init__(self, config: Any, batches: Path) -> None:
        self.config, self.mesh = config, maxtext_utils.get_mesh_from_config(config, None)
        make_state, self.schedule = state_of(config, self.mesh)
        self.saver = train_utils.create_checkpoint_manager(config, self.mesh, make_state)
        self.state, shardings = self._begin(make_state)
        with logical_axis_rules(config.logical_axis_rules):
            graph = nnx.graphdef(nnx.eval_shape(make_state))
        weights, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
        self.state = jax.device_put(self.state, shardings)
        step = adapter_step if config.lora.enable_lora else maxtext.train_step
        self.train_step, self.evaluation_step = train_utils.jit_train_and_eval_step(
            config, graph, self.mesh, self.state, shardings, step, evaluation_step, True, weights
        )
        at = {"config": config, "mesh": self.mesh}
        loaded, rows = config.global_batch_size_to_load, config.global_batch_size_to_train_on
        self.training = BatchArray(batches / "training.npy", rows=rows, loaded=loaded, **at)
        if config.eval_interval > 0:
            loaded, rows = config.global_batch_size_to_load_eval, config.global_batch_size_to_eval_on
            self.validation = BatchArray(batches / "validation.npy", rows=rows, loaded=loaded, **at)

    def _begin(self, make_state: Any) -> tuple[Any, Any]:
        """Return the state of the newest checkpoint, else the initial state, and its shardings.

        Checkpoints of adapters are merged into the initial state, which has the frozen weights.
        """
        last = checkpointing.latest_step(self.saver)
        if last is not None:
            train_utils.validate_completed_steps(last + 1, self.config.steps)
        is_merged = self.config.lora.enable_lora
        state, _, shardings, _, _ = maxtext_utils.setup_training_state(
            None, self.config, self.mesh, None if is_merged else self.saver, make_state
        )
        if is_merged and last is not None:
            trained = train_state_nnx.to_checkpoint_dict(_trained(state))
            shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), trained)
            found = self.saver.load_checkpointables(last, {"items": shapes})["items"]
            nnx.replace_by_pure_dict(state, train_state_nnx.from_linen_checkpoint_dict(found))
        return state, shardings

    def run(self) -> str:
        """Train; return the ending: `done`, or `target` if the validation loss reached its target."""
        config, ending, pending = self.config, "done", None
        first = int(self.state.optimizer.step.get_value())
        profile = profiler.Profiler(config, offset_step=first)
        last_s = time.perf_counter()
        for step in range(first, config.steps):
            profile.maybe_activate_profiler(step, self.state)
            with jax.set_mesh(self.mesh), logical_axis_rules(config.logical_axis_rules):
                self.state, metrics = self.train_step(self.state, self.training.batch(step - 1))
            profile.maybe_deactivate_profiler(step, self.state)
            is_last = step == config.steps - 1
            evaluates = config.eval_interval > 0 and (is_last or step % config.eval_interval == 0)
            saves = (is_last and config.save_checkpoint_on_completion) or step % config.checkpoint_period == 0
            if pending:  # metrics of the previous step, which arrived while this one was dispatched
                last_s = self._write_step(*pending, last_s=last_s)
            pending = (step, metrics)
            if not (evaluates or saves or is_last):
                continue
            last_s, pending = self._write_step(*pending, last_s=last_s), None
            if saves:
                self._save(step)
            if evaluates and self._evaluate(step) <= config.target_eval_loss:
                ending = "target"
                break
            last_s = time.perf_counter()
        checkpointing.wait_until_finished(self.saver)
        return ending

    def _write_step(self, step: int, metrics: dict[str, Any], *, last_s: float) -> float:
        """Wait for the metrics of a step and write them; return the time of their arrival."""
        numbers = {name: float(metrics["scalar"][name]) for name in ("learning/loss", "learning/raw_grad_norm")}
        now_s = time.perf_counter()
        numbers["learning/current_learning_rate"] = float(self.schedule(step))
        self._write({"step": step, "perf/step_time_seconds": now_s - last_s, "ended_s": time.time(), **numbers})
        if not math.isfinite(numbers["learning/loss"]):
            sys.exit(1)
        return now_s

    def _evaluate(self, step: int) -> float:
        """Return the mean loss over all labels of the validation batches; rows after the last sample have none."""
        config = self.config
        with jax.set_mesh(self.mesh), logical_axis_rules(config.logical_axis_rules_for_eval):
            parts = map(self.validation.batch, range(config.eval_steps))
            sums = [self.evaluation_step(self.state, part)["scalar"] for part in parts]
        loss, count = (sum(float(s[f"evaluation/total_{name}"]) for s in sums) for name in ("loss", "weights"))
        loss /= count
        self._write({"step": step, "evaluation/loss": loss})
        return loss

    def _save(self, step: int) -> None:
        if not self.config.lora.enable_lora:
            checkpointing.save_checkpoint(self.saver, step, self.state, self.config, None, force=True)
            return
        save = self.saver.save_checkpointables
        if self.config.async_checkpointing:
            save = self.saver.save_checkpointables_async
        items = train_state_nnx.to_checkpoint_dict(_trained(self.state))
        save(step, {"items": items}, force=True, custom_metadata={"lora": self.config.lora.model_dump()})

    def _write(self, line: dict[str, Any]) -> None:
        if self.config.metrics_file:
            with Path(self.config.metrics_file).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")


def _trained(state: Any) -> Any:
    """Return the adapters and their optimizer states."""
    adapters = nnx.State({"model": nnx.state(state.model, nnx.LoRAParam)})
    return nnx.merge_state(adapters, nnx.State({"optimizer": state.optimizer}))


def main(arguments: list[str], *, batches: Path) -> str:
    """Train with MaxText's configuration in `arguments` on the arrays in `batches`; return the ending."""
    config, _ = maxtext.initialize(arguments)
    return MaxTextTrainLoop(config, batches).run()
