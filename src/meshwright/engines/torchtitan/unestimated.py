"""Settings of torchtitan that no reader takes, by what they change, for evaluated configurations and TOML files.

HARMLESS      concerns neither speed nor memory nor the loss: logs, files, limits of time
UNESTIMATED   changes the speed, the memory or the arithmetic of kernels, and no key of a run file expresses it

Settings that stand in no table are read, refused, or each named in a note as not carried over.
Source: torchtitan 0.3.0, config/configs.py and components/*; fields of JobConfig up to 0.2.2.
"""

from __future__ import annotations

HARMLESS = (
    "activation_checkpoint.memory_budget", "activation_checkpoint.visualize_", "checkpoint.export_dtype",
    "checkpoint.initial_load_", "checkpoint.last_save_", "comm.", "dataloader.", "debug.", "dump_folder",
    "fault_tolerance.", "hf_assets_path", "job.", "loss.", "memory_estimation.", "metrics.", "model.", "profiler.",
    "profiling.", "tokenizer.", "training.dataloader.", "training.gc_", "validator.dataloader.",
)  # fmt: skip
"""Prefixes. Budgets of memory belong to a recomputation that is refused, the loss is read, `fault_tolerance` has an
effect where it is on."""

UNESTIMATED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys((
        "activation_checkpoint.debug", "activation_checkpoint.determinism_check", "activation_checkpoint.early_stop",
        "activation_checkpoint.force_recompute_mm_shapes_by_fqns",
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
        "activation_checkpoint.preserve_rng_state", "comm.mode", "compile.backend", "compile.components",
        "debug.batch_invariant", "debug.detect_anomaly", "debug.deterministic", "debug.spmd_typechecking",
        "fault_tolerance.enable", "float8.force_recompute_fp8_weight_in_bwd",
        "float8.precompute_float8_dynamic_scale_for_fsdp", "mx.use_fp8_dim1_cast_triton_kernel",
        "optimizer.early_step_in_backward", "override.imports", "parallelism.context_parallel_load_balancer",
        "parallelism.context_parallel_rotate_method", "parallelism.disable_loss_parallel",
        "parallelism.enable_compiled_autograd", "parallelism.enable_fsdp_symm_mem",
        "parallelism.pipeline_parallel_expert_parallel_overlap",
        "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
        "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice", "training.deterministic", "training.gc_debug",
    ), ()),
    "optimizer.implementation": ("fused_opt_states_bf16",),  # read as optimizer.states
    "parallelism.spmd_backend": ("partial_dtensor",),  # of our exports
}  # fmt: skip
"""Settings with the values that the estimate and our exports have besides torchtitan's default."""
