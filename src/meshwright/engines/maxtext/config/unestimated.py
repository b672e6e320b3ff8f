"""Keys of MaxText that no reader takes, by what they change.

HARMLESS      concerns neither speed nor memory nor the loss: logs, files, profiles, tiles of kernels that are not used
UNESTIMATED   changes the speed, the memory or the arithmetic of kernels, and no key of a run file expresses it

Keys that stand in no table are read, refused, or each named in a note as not carried over. The estimate and our exports
have the default of an `UNESTIMATED` key. Defaults and meanings: base.yml and types.py of MaxText 0.2.5.
"""

from __future__ import annotations

_HARMLESS = """
    ar_key_axis_order ar_value_axis_order collect_stack_trace data_shuffle_seed debug debug_sharding dpo_beta
    dpo_label_smoothing dump_hlo_local_dir dump_jaxpr_local_dir enable_checkpoint_standard_logger enable_data_shuffling
    enable_goodput_recording enable_nnx enable_profiler enable_tensorboard eod_mask_loss eval_data_column gcs_metrics
    grain_file_type grain_worker_count hardware image_placeholder
    inference_microbenchmark_prefix_cache_common_prefix_proportion inference_microbenchmark_prefix_cache_entries_num
    log_config log_period max_segments_per_seq megablox metrics_file mmap_eod_id model_name monitor_goodput
    mrope_section num_slices override_model_config pagedattn_head_dim_alignment pagedattn_max_pages_per_group
    pagedattn_num_pages pagedattn_pages_per_compute_block pagedattn_tokens_per_page prefill_key_axis_order
    prefill_value_axis_order profiler profiler_steps pure_nnx pure_nnx_decoder reuse_example_batch run_name sa_block_kv
    sa_block_kv_compute sa_block_kv_dkv sa_block_kv_dkv_compute sa_block_kv_dq sa_block_q sa_block_q_dkv sa_block_q_dq
    save_checkpoint_on_completion save_checkpoint_on_start save_config_to_gcs skip_first_n_steps_for_profiler
    skip_jax_distributed_system source_checkpoint_layout stack_trace_interval_seconds stack_trace_to_cloud
    tokenize_train_data tokenizer_type train_data_column train_data_columns use_chat_template vertex_tensorboard_project
    vision_encoder_block vision_output_length
"""
HARMLESS = frozenset(_HARMLESS.split())
"""`megablox` is read with experts, tiles with splash attention, `num_slices` with the degree of data across slices."""

_UNESTIMATED = """
    activations_in_float32 allow_split_physical_axes batch_split_factor cast_logits_to_fp32 compile_xla_flags
    compute_axis_order context_parallel_load_balance context_parallel_reorder_strategy context_parallel_strategy
    context_sharding cost_estimate_flops_bwd cost_estimate_flops_fwd custom_mesh custom_mesh_and_rule data_sharding
    defer_small_all_reduces dense_fsdp_use_two_stage_all_gather dq_reduction_steps experimental_sa_quant_k_fp8
    experimental_sa_quant_q_fp8 expert_shard_attention_option float32_gate_logits float32_logits float32_qk_product
    float32_weight_sum force_q_layout force_unroll fused_mlp fused_qkv input_data_sharding_logical_axes
    logits_dot_in_fp32 matmul_precision max_inflight_computations merge_gating_gmm mesh_axes mla_qk_head_chunk_size
    moe_chunk_barrier moe_dispatch_no_expert_sharding moe_dropless_fallback moe_ep_all_gather_sparse_core_id
    moe_fsdp_all_gather_sparse_core_id moe_fsdp_use_two_stage_all_gather moe_matmul moe_mlp_tp_size
    moe_pin_sparse_core_all_gathers moe_pin_sparse_core_ep_all_gathers moe_pin_sparse_core_fsdp_all_gathers
    moe_pin_sparse_core_fsdp_all_gathers_fwd_only moe_quantize_combine_bwd_method moe_quantize_token_all_gather
    moe_topk_before_ep_all_gather moe_use_direct_token_gather mu_dtype num_moe_emb_chunks num_moe_token_chunks
    num_vocab_tiling optimize_mesh_for_tpu_v6e optimizer_memory_host_offload override_logical_axis_rules packing
    padded_base_moe_mlp_dim param_scan_axis parameter_memory_host_offload pipeline_delay_activation_forwarding
    pipeline_fsdp_ag_once pipeline_fsdp_ag_per_repeat prefuse_moe_weights quantization_calibration_method
    quantization_local_shard_count quantize_logits_proj quantize_mtp quantize_router_proj ragged_block_size
    ragged_buffer_factor ragged_gather_fallback ragged_gather_reduce_fallback record_internal_nn_metrics
    replicate_quant_scale reshape_q ring_scan_unroll router_topk_matmul_vjp sa_bwd_dkv_megacore sa_fuse_reciprocal
    sa_k_layout sa_q_layout sa_use_base2_exp sa_v_layout scan_layers scan_layers_per_stage scan_pipeline_iterations
    scan_pipeline_repeats set_remat_policy_on_layers_per_stage set_remat_policy_on_pipeline_iterations
    shard_embed_moe_on_fsdp shard_exp_on_fsdp shard_mode shardy te_comm_gemm_overlap te_gmm_quantization te_moe_block
    tensors_on_device tensors_to_offload tile_activation_dim tile_batch_seq tile_embed_dim tile_mlp_dim tile_weight_dim
    unquantized_modules use_2d_fsdp_sharding use_batch_split_schedule use_custom_sort_vjp use_gather_mosaic_kernel
    use_gmm_v2 use_gmm_v2_heuristic_tiling use_iota_embed use_jax_splash use_manual_quantization use_max_logit_estimate
    use_mla_absorbed_mqa use_qwix_quantization use_ragged_attention use_ragged_sort use_ring_of_experts
    use_sequential_layers use_sliced_mla_proj use_splash_scheduler use_tokamax_gmm use_tokamax_splash
    vocab_tiling_ag_once wi_combine_scopes wi_tile_dlhs_batch_seq wi_tile_dlhs_buffer_count wi_tile_dlhs_embed_dim
    wi_tile_dlhs_mlp_dim wi_tile_drhs_batch_seq wi_tile_drhs_buffer_count wi_tile_drhs_embed_dim wi_tile_drhs_mlp_dim
    wi_tile_fwd_batch_seq wi_tile_fwd_buffer_count wi_tile_fwd_embed_dim wi_tile_fwd_mlp_dim wo_combine_scopes
    wo_tile_dlhs_batch_seq wo_tile_dlhs_buffer_count wo_tile_dlhs_embed_dim wo_tile_dlhs_mlp_dim wo_tile_drhs_batch_seq
    wo_tile_drhs_buffer_count wo_tile_drhs_embed_dim wo_tile_drhs_mlp_dim wo_tile_fwd_batch_seq wo_tile_fwd_buffer_count
    wo_tile_fwd_embed_dim wo_tile_fwd_mlp_dim
"""
UNESTIMATED = frozenset(_UNESTIMATED.split())
