"""Keys of the run file by the names that other tools give them: PyTorch, Megatron, DeepSpeed, Hugging Face.

Used in hints alone: a run file is written with our keys.
"""

from __future__ import annotations

_NAMES = {
    "model": "model_name model_name_or_path architecture",
    "weights": "pretrained pretrained_model checkpoint_path init_from load",
    "task": "mode stage finetuning_type",
    "lora.rank": "lora_r lora_rank r",
    "lora.alpha": "lora_alpha",
    "data.source": "dataset dataset_name dataset_path data_path train_data",
    "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_model",
    "data.validation": "validation_data eval_dataset valid_data_path",
    "data.workers": "num_workers dataloader_num_workers dataloader_workers",
    "data.sequence_length": "seq seq_len seq_length max_seq_len max_seq_length max_length context_length "
    "block_size max_target_length",
    "batch.global_sequences": "gbs batch_size global_batch global_batch_size train_batch_size",
    "batch.global_tokens": "tokens_per_step tokens_per_batch global_batch_tokens",
    "batch.micro": "mbs microbatch micro_batch microbatch_size micro_batch_size local_batch_size "
    "per_device_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu",
    "optimizer.name": "optim optimizer_type optimizer_name",
    "optimizer.learning_rate": "lr max_lr learning_rate peak_lr",
    "optimizer.weight_decay": "wd",
    "optimizer.gradient_clip": "clip_grad grad_clip max_grad_norm gradient_clipping max_norm",
    "optimizer.warmup_steps": "warmup lr_warmup_iters num_warmup_steps lr_warmup_steps warmup_iters",
    "optimizer.schedule": "lr_scheduler lr_schedule lr_scheduler_type lr_decay_style scheduler",
    "optimizer.final_ratio": "min_lr min_lr_ratio lr_min",
    "optimizer.states": "optimizer_dtype optim_bits state_dtype",
    "optimizer.epsilon": "adam_eps adam_epsilon eps",
    "optimizer.betas": "adam_betas beta1 beta2 adam_beta1 adam_beta2",
    "optimizer.momentum": "mu muon_momentum",
    "optimizer.newton_schulz_steps": "ns_steps muon_num_ns_steps",
    "optimizer.adjust_learning_rate": "adjust_lr_fn muon_scale_mode",
    "optimizer.adamw_learning_rate": "adam_lr scalar_lr",
    "precision": "dtype mixed_precision torch_dtype bf16 fp16 fp8 param_dtype quantization",
    "cluster": "hardware gpus num_gpus num_devices devices gpu world_size topology",
    "cluster.accelerator": "gpu_type accelerator device_type gpu_name",
    "cluster.num_nodes": "nodes nnodes",
    "cluster.network": "nic bandwidth network_bandwidth interconnect internode_bandwidth",
    "cluster.device_memory": "gpu_memory vram memory",
    "cluster.host_memory": "cpu_memory ram system_memory",
    "cluster.devices_per_node": "gpus_per_node nproc_per_node num_gpus_per_node devices_per_host",
    "parallel": "strategy parallelism parallelism_config distributed plan layout deepspeed deepspeed_config "
    "fsdp_config",
    "parallel.data_shard": "dp fsdp dp_shard data_parallel data_parallel_shard_degree data_parallel_size "
    "data_parallel_degree fsdp_degree ici_fsdp_parallelism dp_size",
    "parallel.data_replicate": "ddp hsdp dp_replicate data_parallel_replicate_degree replicas",
    "parallel.tensor": "tp tp_size tensor_parallel tensor_parallel_degree tensor_parallel_size "
    "tensor_model_parallel_size ici_tensor_parallelism",
    "parallel.sequence_parallel": "sp",
    "parallel.pipeline": "pp pp_size pipeline_parallel pipeline_parallel_degree pipeline_parallel_size "
    "pipeline_model_parallel_size pipeline_stages num_stages",
    "parallel.virtual_pipeline": "vpp virtual_stages num_virtual_stages "
    "virtual_pipeline_model_parallel_size interleaved_stages",
    "parallel.schedule": "pipeline_schedule pipeline_parallel_schedule pp_schedule",
    "parallel.context": "cp cp_size context_parallel context_parallel_degree context_parallel_size ring_attention "
    "ulysses",
    "parallel.expert": "ep ep_size expert_parallel expert_parallel_degree expert_model_parallel_size",
    "parallel.expert_tensor": "etp expert_tensor_parallel_size expert_tensor_parallel_degree",
    "parallel.sharding": "zero zero_stage zero_optimization sharding_strategy use_distributed_optimizer "
    "reshard_after_forward",
    "parallel.recompute": "gradient_checkpointing activation_checkpointing activation_checkpoint checkpointing ac "
    "recomputation recompute_activations recompute_granularity remat remat_policy",
    "parallel.offload": "cpu_offload offload_optimizer optimizer_cpu_offload",
    "stack.framework": "framework",
    "engine": "backend trainer",
    "costs.usd_per_device_hour": "price gpu_price price_per_hour usd_per_gpu_hour",
    "train.steps": "max_steps num_steps train_iters iterations total_steps training_steps num_train_steps",
    "train.tokens": "train_tokens max_tokens num_tokens total_tokens",
    "train.epochs": "num_train_epochs num_epochs",
    "train.seed": "random_seed",
    "train.checkpoint": "save checkpoint_dir save_interval checkpoint_interval save_steps",
    "train.checkpoint.folder": "save_dir output_dir checkpoint_folder",
    "train.evaluate": "eval evaluation validation eval_interval eval_steps",
    "train.evaluate.target_loss": "target_loss",
    "train.compile": "torch_compile",
    "train.trackers": "wandb tensorboard report_to logger loggers",
    "train.z_loss": "router_z_loss",
    "train.preference": "loss_type rl rlhf_type pref_loss",
    "train.preference.beta": "pref_beta dpo_beta",
    "train.preference.margin": "simpo_gamma gamma",
    "train.balance_loss": "aux_loss moe_aux_loss_coeff load_balancing_loss",
    "train.router_z_loss": "moe_z_loss_coeff moe_z_loss moe_zloss_weight router_z_loss_coef",
}

SYNONYMS = {name: key for key, names in _NAMES.items() for name in names.split()}
"""Name elsewhere -> key of the run file."""


_TARGETS = {
    "query": "q_proj q wq query_proj", "key": "k_proj k wk key_proj", "value": "v_proj v wv value_proj",
    "qkv": "qkv_proj linear_qkv query_key_value c_attn", "output": "o_proj o wo out_proj output_proj linear_proj",
    "gate": "gate_proj w1", "up": "up_proj w3 fc1", "down": "down_proj w2 linear_fc2 fc2",
    "gate, up": "gate_up_proj linear_fc1",
}  # fmt: skip
LORA_TARGETS = {name: ours for ours, names in _TARGETS.items() for name in names.split()}
"""Matrix in PEFT, Llama's code or Megatron -> word of `lora.targets`."""

_REASON = (
    "no engine trains on without a lost replica: after a fault all processes restart from the newest checkpoint "
    "(`meshwright train --max-restarts N`, and `train.checkpoint`)"
)
_NAMES_OF_IT = ["torchft", "fault_tolerance", "ft", "elastic", "min_replicas", "min_replica_size"]
UNSUPPORTED = dict.fromkeys(_NAMES_OF_IT, _REASON)
"""Keys of other tools that have no counterpart, with the reason."""


def key_for(name: str) -> str | None:
    """The key of the run file that other tools call `name`, in any case and with - or _; None if there is none.

    >>> key_for("micro-batch-size")
    'batch.micro'
    """
    return SYNONYMS.get(name.lower().replace("-", "_"))
