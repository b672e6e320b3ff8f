"""Modules, optimizer and passes of one process, assembled from a run and the process's mesh coordinates.

The order is fixed: build the model on the meta device, convert its linear layers to the number format, shard it over
the tensor and context axes, wrap it for recomputation, apply FSDP over the data axes, and only then allocate memory
and fill in weights. So no process ever holds more than its part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.catalog.stacks import switches_of
from meshwright.cost.flops import count_parameters
from meshwright.cost.tables import model_row
from meshwright.engines.native import fp8
from meshwright.engines.native.compiling import compile_layers
from meshwright.engines.native.offloaded_activations import offload_activations
from meshwright.engines.native.parallel.context import chunks_of, shard_sequences
from meshwright.engines.native.parallel.expert import ExpertMesh, expert_mesh, shard_experts
from meshwright.engines.native.parallel.fsdp import apply_fsdp, needs_fsdp
from meshwright.engines.native.parallel.mesh import TENSOR, MeshCoordinates
from meshwright.engines.native.parallel.pipeline import Pipeline, layers_of_stages, stages_of_rank
from meshwright.engines.native.parallel.tied_embeddings import EmbeddingCopy, embedding_copies
from meshwright.engines.native.recompute import recompute
from meshwright.engines.native.step import Accumulation, Stepper
from meshwright.kernels.fp8.layer import RECIPES, Fp8State
from meshwright.kernels.stored_activations import StoredFormat, store_activations
from meshwright.specs.plan import Offload, Sharding
from meshwright.specs.run import Run, has_dropout, has_removable_reference
from meshwright.training.masters import Master, masters_of
from meshwright.training.models import (
    Block,
    Transformer,
    TransformerOptions,
    add_adapters,
    build_model,
    collect_expert_load,
    collect_prediction_losses,
    collect_reward_sums,
    configure_router_losses,
    init_adapters,
    init_from_base,
    init_magnitudes,
    init_scores,
    init_weights,
    materialize,
    named_seed,
    update_routing_bias,
)
from meshwright.training.models.experts import MixtureOfExperts
from meshwright.training.optimizer import MasterOptimizer
from meshwright.training.weights import initial_adapters, load_weights

COMPUTE = dict.fromkeys(("bf16", *RECIPES), torch.bfloat16) | {"fp32": torch.float32}
"""The dtype in which modules compute, by precision recipe."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Assembly:
    """Modules, optimizer and passes of one process. `modules` are its pipeline stages, or the one whole model."""

    modules: list[Transformer]
    masters: list[Master]  # all of them; the optimizer skips empty ones
    optimizer: MasterOptimizer
    stepper: Stepper
    num_parameters: int  # of the whole model, without adapters
    num_trained: int  # of them, or of the adapters
    is_single_process: bool
    bias_rate: float  # step size of routing biases
    dropout_seed: int | None  # of this process; None: neither dropout nor noise
    sequence_group: dist.ProcessGroup | None  # ranks that hold parts of the same sequences
    delayed_scales: dict[str, Fp8State]  # by layer
    stage_group: dist.ProcessGroup | None  # ranks with the same layers, if scales are delayed

    def before_step(self, step: int) -> None:
        """Seed the random numbers of `step`, so that dropout is the same in a resumed run; forget a refused step."""
        for state in self.delayed_scales.values():
            state.begin_step()
        if self.dropout_seed is not None:
            torch.manual_seed(named_seed(self.dropout_seed, f"step {step}"))

    def scale_router_losses(self, scale: float) -> None:
        """Set the scale of the losses of routers, sums over tokens: one over the tokens of a step."""
        configure_router_losses(self.modules, scale=scale, group=self.sequence_group)

    def collect_expert_load(self) -> Tensor | None:
        """Rows of each expert of the whole model since the last call [L, E], of all processes; None without experts.

        The host does not wait: the sum over processes is queued behind the passes.
        """
        load_LE = collect_expert_load(self.modules)
        if load_LE is not None and not self.is_single_process:
            dist.all_reduce(load_LE)
        return load_LE

    def collect_prediction_losses(self) -> list[float]:
        """Summed loss and labels of each multi-token prediction module here since the last call, flat."""
        num_modules = self.modules[0].model.num_mtp_layers
        return collect_prediction_losses(self.modules, num_modules=num_modules).flatten().tolist()

    def collect_reward_sums(self) -> list[float]:
        """Sums of rewards of pairs of answers since the last call (`training.models.preference`); empty without."""
        return collect_reward_sums(self.modules)

    def after_step(self, load_LE: Tensor | None) -> None:
        """Update the routing biases by the load of the experts, and the history of delayed scales. Collective."""
        fp8.end_step(self.delayed_scales, group=self.stage_group)
        if load_LE is not None:
            update_routing_bias(self.modules, load_LE, speed=self.bias_rate)

    def state(self) -> dict[str, Tensor]:
        """Every tensor a checkpoint holds; the live ones, to be written or read in place."""
        state = self.optimizer.state() | fp8.histories(self.delayed_scales)
        for module in self.modules:
            kept = module.state_dict().keys()  # without buffers that count only within a step
            state |= {f"buffers.{name}": buffer for name, buffer in module.named_buffers() if name in kept}
        return state

    def trained(self) -> dict[str, Tensor]:
        """Trained tensors by name, in fp32; of a sharded tensor this process's part, perhaps empty."""
        return {m.name: m.like(m.values.to(m.local.device)) for m in self.masters}

    def adapters(self) -> dict[str, Tensor]:
        """Trained adapters and modules, and what the base has lost to adapters at their beginning."""
        return self.trained() | {name: t for module in self.modules for name, t in initial_adapters(module).items()}

    def train_mode(self) -> None:
        """Set the modules to train."""
        for module in self.modules:
            module.train()

    def eval_mode(self) -> None:
        """Set the modules to evaluate: loads of experts are not counted."""
        for module in self.modules:
            module.eval()


def assemble(run: Run, *, coordinates: MeshCoordinates, weights: Path | None = None) -> Assembly:
    """Build the part of `run`'s model at `coordinates`.

    Weights come from the Hugging Face folder `weights`, or are initialized with the run's seed.
    """
    plan, compute = coordinates.plan, COMPUTE[run.precision.name]
    stages = layers_of_stages(plan, num_layers=run.model.num_layers)
    experts = expert_mesh(coordinates) if run.model.experts is not None else None
    modules = [
        _stage(
            run, stages=stages, index=index, coordinates=coordinates, compute=compute, weights=weights, experts=experts
        )
        for index in stages_of_rank(plan, coordinates.pipeline_rank)
    ]
    offloads = plan.offload is Offload.OPTIMIZER
    # Shards that FSDP gathers from are masters, too: they stay on the device.
    masters = masters_of(modules, compute=compute, on_host=offloads and plan.sharding is not Sharding.PARAMETERS)
    copies = embedding_copies(modules, masters=masters, coordinates=coordinates)
    if run.lora is not None and not run.lora.modules_to_save:
        _copy_weights(copies)  # once: neither end is trained
        copies = []
    masters = [m for m in masters if all(m.parameter is not one.copy for one in copies)]
    optimizer = MasterOptimizer(
        masters,
        settings=run.optimizer,
        is_single_process=coordinates.num_ranks == 1,
        after_update=partial(_weights_have_changed, modules, copies),
        seed=run.train.seed,
        offloads=offloads,
    )
    optimizer.refresh()
    delayed_scales = fp8.delayed_states(modules, device=coordinates.device)
    num_parameters = int(count_parameters(model_row(run.model)).total)
    is_frozen = run.lora is not None
    has_history = run.precision.name in RECIPES and RECIPES[run.precision.name].history > 0
    return Assembly(
        modules=modules,
        masters=masters,
        optimizer=optimizer,
        stepper=_stepper(run, modules, coordinates=coordinates, copies=copies),
        num_parameters=num_parameters,
        num_trained=_num_adapted(run) if is_frozen else num_parameters,
        is_single_process=coordinates.num_ranks == 1,
        bias_rate=0.0 if is_frozen else run.train.balance_bias_rate,
        dropout_seed=_dropout_seed(run, coordinates),
        sequence_group=coordinates.sequence_group() if run.train.balance_loss else None,
        delayed_scales=delayed_scales,
        stage_group=coordinates.stage_group() if has_history else None,
    )


def _stepper(
    run: Run, modules: list[Transformer], *, coordinates: MeshCoordinates, copies: list[EmbeddingCopy]
) -> Stepper:
    """Passes through the stages of a pipeline, or through the one model."""
    plan = coordinates.plan
    if plan.pipeline == 1:
        is_reference = has_removable_reference(run.train, run.lora)
        return Accumulation(modules[0], plan=plan, is_reference=is_reference)
    return Pipeline(
        modules,
        coordinates=coordinates,
        num_micro_batches=plan.num_micro_batches(run.global_batch),
        sequence_length=run.sequence_length,
        compute=COMPUTE[run.precision.name],
        copies=copies,
    )


def _weights_have_changed(modules: Sequence[nn.Module], copies: Sequence[EmbeddingCopy]) -> None:
    _copy_weights(copies)
    fp8.expire_caches(modules)


def _copy_weights(copies: Sequence[EmbeddingCopy]) -> None:
    for copy in copies:
        copy.copy_weight()


def _num_adapted(run: Run) -> int:
    """Parameters of all adapters."""
    whole = build_model(run.model)
    assert run.lora is not None
    add_adapters(whole, run.lora)
    return sum(p.numel() for p in whole.parameters() if p.requires_grad)


def _dropout_seed(run: Run, coordinates: MeshCoordinates) -> int | None:
    """A seed for each part of the tokens and layers. Tensor ranks share theirs: they see the same activations."""
    if not (run.train.neftune_alpha or has_dropout(run)):
        return None
    where = f"{coordinates.pipeline_rank} {coordinates.data_rank} {coordinates.context_rank}"
    return named_seed(run.train.seed, f"dropout {where}")


def _options(run: Run) -> TransformerOptions:
    return TransformerOptions(
        balance_loss=run.train.balance_loss,
        router_z_loss=run.train.router_z_loss,
        z_loss=run.train.z_loss,
        label_smoothing=run.train.label_smoothing,
        embedding_noise=run.train.neftune_alpha / (run.sequence_length * run.model.hidden) ** 0.5,
        residual_dropout=run.train.residual_dropout,
        attention_dropout=run.train.attention_dropout,
        mtp_loss_weight=run.train.mtp_loss_weight,
        loss_chunk=run.kernels.loss_chunk,
        preference=run.train.preference,
        grpo=run.train.grpo,
    )


def _stage(
    run: Run,
    *,
    stages: list[range],
    index: int,
    coordinates: MeshCoordinates,
    compute: torch.dtype,
    weights: Path | None,
    experts: ExpertMesh | None,
) -> Transformer:
    options = _options(run)
    # Frozen weights are held in the compute dtype. Trained ones come in fp32, from which masters are made.
    dtype = torch.float32 if run.lora is None else compute
    module = build_model(
        run.model,
        dtype=dtype,
        layers=stages[index],
        options=options,
        is_first=index == 0,
        is_last=index == len(stages) - 1,
    )
    if run.lora is not None:
        add_adapters(module, run.lora)
    blocks: list[nn.Module] = list(module.blocks().values())
    if run.precision.name in RECIPES:
        num_micro_batches = coordinates.plan.num_micro_batches(run.global_batch)
        caches = fp8.caches_weights(
            coordinates.plan, num_micro_batches=num_micro_batches, cache=run.kernels.weight_cache
        )
        fp8.convert(blocks, precision=run.precision, caches_weights=caches)
    if options.preference is not None:
        module.data_group = coordinates.data_group()
    if coordinates.plan.tensor > 1:
        from meshwright.engines.native.parallel.tensor import shard_matrices  # imports distributed tensors

        shard_matrices(module, mesh=coordinates.axes(TENSOR), sequence_parallel=coordinates.plan.sequence_parallel)
    if coordinates.context_mesh is not None:
        shard_sequences(module, chunks=chunks_of(coordinates), mesh=coordinates.context_mesh)
    if experts is not None:
        shard_experts(module, experts=experts)
    store_modules(blocks, run.kernels.stored_activations)
    earlier = [stages[i] for i in stages_of_rank(coordinates.plan, coordinates.pipeline_rank) if i < index]
    if run.train.compile:
        compile_layers(blocks, plan=coordinates.plan)
    recompute(blocks, plan=coordinates.plan, num_before=sum(len(layers) for layers in earlier))
    share = switches_of(run).offloaded_activations or 0.0
    offload_activations(blocks[: len(module.layers)], share=share, device=coordinates.device)
    if needs_fsdp(coordinates.plan) or (experts is not None and coordinates.mesh is not None):
        apply_fsdp(module, layers=blocks, coordinates=coordinates, compute=compute, experts=experts)
    materialize(module, device=coordinates.device)
    if weights is None:
        init_weights(module, seed=run.train.seed)
    else:
        init_adapters(module, seed=run.train.seed)
        init_scores(module, seed=run.train.seed)
        load_weights(module, weights, new_rows=run.data.new_rows)
        init_magnitudes(module)
    init_from_base(module, seed=run.train.seed)
    return module


def store_modules(blocks: Iterable[nn.Module], formats: Mapping[str, str]) -> None:
    """Make the modules that `formats` names keep their activations so (`kernels.stored_activations`), in place."""
    for block in blocks:
        for name, kind in formats.items():
            for module in _modules(block, name):
                store_activations(module, format=StoredFormat(kind))


def _modules(block: nn.Module, name: str) -> Iterator[nn.Module]:
    assert isinstance(block, Block)
    if name == "norm":
        yield from (block.attention_norm, block.ffn_norm)
    elif isinstance(block.ffn, MixtureOfExperts):  # its router keeps fp32
        yield block.ffn.experts
        if block.ffn.shared is not None:
            yield block.ffn.shared
    else:
        yield block.ffn
