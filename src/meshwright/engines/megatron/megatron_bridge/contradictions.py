"""Fields of a Megatron-Bridge configuration that contradict each other, or that it refuses to start with."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.engines.megatron.megatron_bridge.files import BridgeFields

REFUSED = (
    ("train.train_iters", "train.train_samples"),
    ("scheduler.lr_decay_iters", "scheduler.lr_decay_samples"),
    ("scheduler.lr_warmup_iters", "scheduler.lr_warmup_samples"),
    ("train.train_samples", "train.rampup_batch_size"),
    ("train.train_samples", "scheduler.lr_warmup_iters"),
    ("train.train_samples", "scheduler.lr_decay_iters"),
    ("dist.use_megatron_fsdp", "dist.use_torch_fsdp2"),
)
"""Fields that ConfigContainer.validate refuses together."""


def contradictions(fields: BridgeFields) -> Iterator[str]:
    """Yield notes on `fields`, except for parallelism, which `megatron_lm` checks."""
    given = set(fields.given.fields)
    lengths = [fields[name] for name in ("model.seq_length", "dataset.seq_length") if name in given]
    if len(lengths) == 2 and lengths[0] != lengths[1]:
        yield f"model.seq_length {lengths[0]} is not dataset.seq_length {lengths[1]}: Megatron-Bridge refuses it"
    for one, other in REFUSED:
        if fields[one] and fields[other]:
            yield f"{one} and {other} are both given: Megatron-Bridge refuses them together"
    decay, scheduled = fields["optimizer.weight_decay"], fields["scheduler.end_weight_decay"]
    if "optimizer.weight_decay" in given and scheduled not in (None, decay):
        yield f"optimizer.weight_decay {decay} has no effect: scheduler.end_weight_decay is {scheduled}"
    first = fields["scheduler.start_weight_decay"]
    if first not in (None, scheduled):
        yield f"weight decay that begins with {first} is not carried over"
    yield from _ignored(fields, given)


def _ignored(fields: BridgeFields, given: set[str]) -> Iterator[str]:
    named = fields["mixed_precision"]
    for key in ("bf16", "fp16"):
        wanted = (named is not None and key in str(named)) or fields[f"mixed_precision.{key}"]
        if (named or fields.has_section("mixed_precision")) and fields[f"model.{key}"] and not wanted:
            yield f"model.{key} has no effect: mixed_precision differs"
    sharded = fields["ddp.use_megatron_fsdp"] or fields["dist.use_megatron_fsdp"]
    if sharded and fields["checkpoint.save"] and fields["checkpoint.ckpt_format"] != "fsdp_dtensor":
        yield "use_megatron_fsdp needs checkpoint.ckpt_format fsdp_dtensor: Megatron-Bridge refuses others"
    context, length = fields.integer("model.context_parallel_size"), fields.integer("model.seq_length")
    if context > 1 and "model.seq_length" in given and length % (2 * context):
        yield f"model.seq_length {length} is no multiple of 2 x context {context}: Megatron-Bridge refuses it"
    if fields.has_section("peft") and not fields["checkpoint.pretrained_checkpoint"]:
        yield "peft without checkpoint.pretrained_checkpoint is refused by Megatron-Bridge"
