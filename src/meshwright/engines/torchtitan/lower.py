"""A run as a configuration module of torchtitan 0.3.0. Pure: torchtitan need not be installed.

The module has one function, `train`, which returns a `Trainer.Config`. torchtitan reads it like its own modules:

    torchrun --nproc-per-node 8 -m torchtitan.train --module meshwright_run --config train

with the folder of the module on PYTHONPATH. Options of torchtitan's command line are not used: torchtitan has frozen
them and announced their removal. The data loader, the learning rates and the step log are
`in_torchtitan_process.extensions`, configured at torchtitan's extension points.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.catalog.stacks import switches_of
from meshwright.cost.stages import layers_per_stage
from meshwright.engines.base import Launch, pinned_plan, refuse
from meshwright.engines.external_record import OutputLayout, step_folders
from meshwright.engines.software_line import software_line
from meshwright.engines.torchtitan import VERSION
from meshwright.engines.torchtitan.check import check, has_own_validator
from meshwright.engines.torchtitan.config_module.models import HOMES, STD, model_spec, residual_std
from meshwright.engines.torchtitan.config_module.python_source import Call, Name, call, imports, render, roots
from meshwright.specs.plan import Plan, Recompute, Schedule, Sharding
from meshwright.specs.run import LearningRateSchedule, Run, StateFormat, Tracker

MODULE, RUN_FILE, FUNCTION = "meshwright_run.py", "meshwright_run.yaml", "train"
OUTPUT = "torchtitan"  # folder of the measurements, in the folder of the results
LAYOUT = OutputLayout(output=OUTPUT, run_file=RUN_FILE, checkpoints=step_folders)
VECTORS = r"(norm\.weight|\.bias|\.sinks)$"  # names of parameters without weight decay
NEVER = 10**9  # checkpoint interval of a run that saves none

SCHEDULES = {
    Schedule.GPIPE: "GPipe",
    Schedule.ONE_F_ONE_B: "1F1B",
    Schedule.INTERLEAVED: "Interleaved1F1B",
    Schedule.ZBV: "ZBVZeroBubble",
}

FOLDER = Name("str(FOLDER)")


def lower(run: Run, *, folder: Path) -> Launch:
    """Return the configuration module, the run file and the command of every process."""
    from meshwright.runfile import pinned_text

    refuse("torchtitan", check(run))
    plan = pinned_plan(run)
    return Launch(
        argv=("python", "-m", "meshwright.engines.torchtitan.worker", str(folder / MODULE)),
        files={MODULE: module_text(run, plan), RUN_FILE: pinned_text(run, plan)},
        num_processes=plan.num_devices,
    )


def module_text(run: Run, plan: Plan) -> str:
    """Return the source of the configuration module."""
    functions, spec = model_spec(run)
    trainer = trainer_config(run, plan, spec=spec)
    names = {*roots(list(functions.values())), *roots(trainer), "nn", "partial", "Path", "Trainer"}
    blocks = [
        f'"""{run.name}: {run.model.name} on {plan.num_devices} devices ({plan.describe()}), for torchtitan '
        f'{VERSION}.\n\nWritten by Meshwright from the run file in the same folder.\n"""',
        # of some kernels the file does not say which
        f"{software_line(run, lacks=('attention',))}{imports(names, table=HOMES)}",
        "FOLDER = Path(__file__).parent",
        _initializations(run),
    ]
    if "convert" in names:
        blocks.append("\n\ndef convert(converter, model):\n    return converter.build().convert(model)")
    for name, tree in functions.items():
        blocks.append(f"\n\ndef {name}(index: int):\n    return {render(tree, indent=4)}")
    blocks.append(f"\n\ndef {FUNCTION}() -> Trainer.Config:\n    return {render(trainer, indent=4)}")
    return "\n\n".join(blocks).replace("\n\n\n\n\n", "\n\n\n").replace("\n\n\n\n", "\n\n\n") + "\n"


def _initializations(run: Run) -> str:
    """Weight initialization of matrices, of matrices that write to the residual stream, and of norms."""
    lines = []
    for name, std in (("MATRIX", STD), ("RESIDUAL", residual_std(run.model))):
        lines.append(f'{name} = {{"weight": partial(nn.init.normal_, std={std!r}), "bias": nn.init.zeros_}}')
    return "\n".join([*lines, 'NORM = {"weight": nn.init.ones_}'])


def trainer_config(run: Run, plan: Plan, *, spec: Call) -> Call:
    """Return the `Trainer.Config` of a run."""
    trackers = run.train.trackers
    return call(
        "Trainer.Config",
        model_spec=spec,
        dump_folder=Name(f'str(FOLDER / "{OUTPUT}")'),
        hf_assets_path=FOLDER,
        tokenizer=call("AbsentTokenizer.Config"),
        dataloader=call("RunFileDataLoader.Config", dataset_path=Name(f'str(FOLDER / "{RUN_FILE}")')),
        metrics=call(
            "StepLogMetrics.Config",
            log_freq=1,
            disable_color_printing=True,
            enable_tensorboard=Tracker.TENSORBOARD in trackers,
            enable_wandb=Tracker.WANDB in trackers,
        ),
        optimizer=_optimizer(run),
        lr_scheduler=_learning_rates(run),
        training=_training(run, plan),
        parallelism=_parallelism(run, plan),
        checkpoint=_checkpoint(run),
        activation_checkpoint=_recompute(plan),
        compile=call("CompileConfig", enable=bool(switches_of(run).compiles)),
        validator=_validator(run, plan),
        debug=call("DebugConfig", seed=run.train.seed),
        loss=_loss(run, plan),
    )


def _loss(run: Run, plan: Plan) -> Call:
    """The loss, in as many chunks as the run's `kernels.loss_chunk` makes of the tokens of a rank."""
    plain, chunk = call("CrossEntropyLoss.Config", global_vocab_size=run.model.vocab), run.kernels.loss_chunk
    if isinstance(chunk, str):
        return plain
    tokens = plan.micro_batch * run.sequence_length // plan.context
    return call("ChunkedLossWrapper.Config", num_chunks=tokens // chunk, loss_fn=plain)


def _optimizer(run: Run) -> Call:
    """Vectors have no weight decay, as in the native engine. All adapters are matrices."""
    o = run.optimizer

    def group(pattern: str, decay: float) -> Call:
        settings = {"lr": o.learning_rate, "betas": tuple(o.betas), "eps": o.epsilon, "weight_decay": decay}
        return call("ParamGroupConfig", pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=settings)

    groups = [group(r".*", o.weight_decay)]
    if run.lora is None:
        groups.insert(0, group(VECTORS, 0.0))
    bf16 = o.states is StateFormat.BF16
    return call(
        "OptimizersContainer.Config", param_groups=groups, implementation="fused_opt_states_bf16" if bf16 else "fused"
    )


def _learning_rates(run: Run) -> Call:
    o = run.optimizer
    shape = {"decay_type": o.decay_shape.value} if o.schedule is LearningRateSchedule.WSD else {}
    return call(
        "RunLearningRates.Config",
        schedule=o.schedule.value,
        warmup_steps=o.warmup_steps,
        min_lr_factor=o.final_ratio,
        decay_ratio=o.decay_ratio,
        **shape,
        **{name: value for name in ("cycles", "power") if (value := getattr(o, name)) != 1},
    )


def _training(run: Run, plan: Plan) -> Call:
    """With a pipeline, all micro-batches are one local batch; without one, they are gradient accumulation."""
    per_rank = run.global_batch // plan.data
    clip = run.optimizer.gradient_clip
    return call(
        "TrainingConfig",
        local_batch_size=per_rank if plan.pipeline > 1 else plan.micro_batch,
        global_batch_size=run.global_batch,
        seq_len=run.sequence_length,
        max_norm=float("inf") if clip is None else clip,
        steps=run.num_steps,
        dtype="float32" if run.optimizer.master_weights else "bfloat16",
        mixed_precision_param="float32" if run.precision.name == "fp32" else "bfloat16",
        disable_cuda_graphs=True,  # they work neither with pipelines nor with expert parallelism
    )


def _parallelism(run: Run, plan: Plan) -> Call:
    is_sharded = plan.sharding is not Sharding.NONE
    pipeline: dict[str, Any] = {}
    if plan.pipeline > 1:
        pipeline = {
            "pipeline_parallel_degree": plan.pipeline,
            "pipeline_parallel_schedule": SCHEDULES[plan.schedule],
            "pipeline_parallel_microbatch_size": plan.micro_batch,
            "module_fqns_per_model_part": stage_modules(run, plan),
        }
    return call(
        "ParallelismConfig",
        data_parallel_replicate_degree=plan.data_replicate if is_sharded else plan.data,
        data_parallel_shard_degree=plan.data_shard if is_sharded else 1,
        fsdp_reshard_after_forward="always" if plan.sharding is Sharding.PARAMETERS else "never",
        tensor_parallel_degree=plan.tensor,
        enable_sequence_parallel=plan.sequence_parallel,
        context_parallel_degree=plan.context,
        expert_parallel_degree=plan.expert,
        **pipeline,
        spmd_backend="partial_dtensor",  # the only one that works with released versions of PyTorch
    )


def stage_modules(run: Run, plan: Plan) -> list[list[str]]:
    """Names of the modules of every pipeline stage, in the order of the model."""
    num_stages = plan.pipeline * plan.virtual_pipeline
    counts = plan.layers_per_stage or layers_per_stage(run.model.num_layers, num_stages)
    stages, first = [], 0
    for count in counts:
        stages.append([f"layers.{i}" for i in range(first, first + count)])
        first += count
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "lm_head"]
    return stages


def _checkpoint(run: Run) -> Call:
    """Initial weights and saved checkpoints. A folder with checkpoints is resumed from."""
    saves = run.train.checkpoint
    settings: dict[str, Any] = {}
    if run.weights is not None:
        settings = {
            "initial_load_path": call("weights_folder", run.weights),
            "initial_load_model_only": True,
            "initial_load_in_hf": True,
        }
    if saves is None:
        kept = {"interval": NEVER, "load_only": True} if settings else {}
        return call("CheckpointManager.Config", enable=bool(settings), **kept, **settings)
    return call(
        "CheckpointManager.Config",
        enable=True,
        folder=Name(f"str(Path({saves.folder!r}).absolute())"),
        interval=saves.every_steps,
        keep_latest_k=saves.keep or 0,
        async_mode="async" if saves.asynchronous else "disabled",
        last_save_model_only=False,
        **settings,
    )


def _recompute(plan: Plan) -> Call | None:
    if plan.recompute is Recompute.FULL:
        return call("FullAC.Config")
    return call("SelectiveAC.Config") if plan.recompute is Recompute.SELECTIVE else None


def _validator(run: Run, plan: Plan) -> Call:
    """Torchtitan counts the local batches of an evaluation, the run file the global batches."""
    evaluate = run.train.evaluate
    if evaluate is None:
        return call("Validator.Config", enable=False)
    per_batch = 1 if plan.pipeline > 1 else plan.num_micro_batches(run.global_batch)
    run_file = Name(f'str(FOLDER / "{RUN_FILE}")')
    return call(
        "RunValidator.Config" if has_own_validator(evaluate) else "Validator.Config",
        enable=True,
        freq=evaluate.every_steps,
        steps=evaluate.batches_of(run.global_batch) * per_batch,
        dataloader=call("RunFileDataLoader.Config", dataset_path=run_file, is_validation=True),
    )
