"""Facts of a run under the keys of the MLPerf logging specification, taken from the run as it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.specs.plan import Plan
from meshwright.specs.precision import Precision
from meshwright.specs.run import LearningRateSchedule, Run

LOGGED_PRECISIONS = {"bf16": "bfloat16"}
"""Names of number formats where the log has another one than run files."""
SCHEDULES = {
    LearningRateSchedule.COSINE: "cosine with linear warmup",
    LearningRateSchedule.LINEAR: "linear with linear warmup",
    LearningRateSchedule.CONSTANT: "constant with linear warmup",
    LearningRateSchedule.WSD: "warmup, stable, decay",
}


def logged_facts(run: Run, plan: Plan, *, benchmark: str, train_samples: int) -> Iterator[tuple[str, Any]]:
    """Keys and values in an order in which a checker that reads once can compare them."""
    optimizer, evaluate = run.optimizer, run.train.evaluate
    assert evaluate is not None
    assert run.num_steps is not None
    yield "seed", run.train.seed
    yield "global_batch_size", run.global_batch
    yield "micro_batch_size", plan.micro_batch
    yield "gradient_accumulation_steps", plan.num_micro_batches(run.global_batch)
    yield "max_sequence_length", run.sequence_length
    yield "train_samples", train_samples
    yield "eval_samples", evaluate.num_sequences
    yield "target_accuracy", evaluate.target_loss
    yield "max_steps", run.num_steps
    yield "opt_name", optimizer.name
    yield "opt_base_learning_rate", optimizer.learning_rate
    yield "opt_end_learning_rate", optimizer.learning_rate * optimizer.final_ratio
    yield "opt_learning_rate_warmup_steps", optimizer.warmup_steps
    yield "opt_learning_rate_decay_steps", run.num_steps - optimizer.warmup_steps
    yield "opt_learning_rate_decay_schedule", SCHEDULES[optimizer.schedule]
    yield "opt_learning_rate_training_steps", run.num_steps
    yield "opt_learning_rate_warmup_factor", optimizer.warmup_steps / run.num_steps
    yield "opt_adamw_beta_1", optimizer.betas[0]
    yield "opt_adamw_beta_2", optimizer.betas[1]
    yield "opt_adamw_epsilon", optimizer.epsilon
    yield "opt_adamw_weight_decay", optimizer.weight_decay
    yield "opt_gradient_clip_norm", optimizer.gradient_clip
    if run.lora is not None:
        yield "lora_rank", run.lora.rank
        yield "lora_alpha", run.lora.alpha
        yield "lora_dropout", run.lora.dropout
    yield from _disclosure(run.precision, plan)
    yield "config_filename", "run.yaml"
    yield "number_of_ranks", plan.num_devices


def _disclosure(precision: Precision, plan: Plan) -> Iterator[tuple[str, Any]]:
    """Keys of round 6.1. Attention is computed in 16 bits where linear layers multiply in fp8."""
    named = precision.name in ("fp16", "nvfp4", "mxfp4")
    linear = precision.name if named else LOGGED_PRECISIONS.get(precision.matmul, precision.matmul)
    others = "bfloat16" if precision.matmul in ("fp8", "fp4") else linear
    yield "lowest_numerical_precision_in_linear", linear
    yield "lowest_numerical_precision_in_attn", others
    yield "lowest_numerical_precision_in_comm", others
    yield "tensor_parallelism", plan.tensor
    yield "pipeline_parallelism", plan.pipeline
    yield "context_parallelism", plan.context
    yield "expert_parallelism", plan.expert
