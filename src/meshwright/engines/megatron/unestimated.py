"""Options that no reader takes, by what they change; fields of Megatron-Bridge stand among them, with dashes.

HARMLESS      concerns neither speed nor memory nor the loss: logs, files, limits of time, counts of other options
UNESTIMATED   changes the speed, the memory or the arithmetic, and no key of a run file expresses it
KERNELS       the same of kernels that the estimate has and that an option asks for; EXPERTS: those of mixtures

The last paragraphs are options that releases after core_v0.16.1 have added.
Options that stand in no table are read, refused, or named in a note as not carried over. Defaults and meanings:
megatron/training/arguments.py at core_v0.16.1, and the configuration classes of Megatron-Bridge 0.6.2.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.engines.megatron.megatron_lm.options import MegatronOptions

_HARMLESS = """
    attention-softmax-in-fp32 auto-detect-ckpt-format calculate-per-token-loss data-cache-path dataloader-type
    disable-gloo-process-groups disable-straggler-on-startup disable-symmetric-registration enable-experimental
    full-validation legacy-tokenizer local-rank make-vocab-size-divisible-by manual-gc manual-gc-interval merge-file
    mid-level-dataset-surplus min-offloaded-tensor-size moe-per-layer-logging no-barrier-with-level-1-timing
    no-ckpt-fully-parallel-save no-create-attention-mask-in-dataloader no-data-sharding no-mmap-bin-files no-one-logger
    no-use-tokenizer-model-from-checkpoint-args num-dataset-builder-threads num-layers-at-end-in-bf16
    num-layers-at-start-in-bf16 num-workers profile profile-ranks profile-step-end profile-step-start
    sharp-enabled-group split te-rng-tracker timing-log-option tp-comm-bootstrap-backend trust-remote-code
    use-cpu-initialization use-mcore-models use-persistent-ckpt-worker use-pytorch-profiler wgrad-deferral-limit

    chat-template disable-ckpt-load-validate-sharding-integrity disable-flight-recorder-dump-on-timeout
    disable-flight-recorder-extra-dump-on-exec disable-flight-recorder-include-only-active disable-save-tokenizer-assets
    enable-msc eval-global-batch-size eval-micro-batch-size no-ckpt-load-validate-sharding-integrity nvtx-ranges
    override-ckpt-iteration record-shapes save-activations-interval save-params-interval start-eval-at-iter
    save-tokens-per-expert-interval use-gigatoken use-same-sampling-seed-across-dp-ranks validation-set-names
    verify-integrity

    async-strategy async-tensor-model-parallel-allreduce autocast-dtype barrier-with-L1-time batch-p2p-comm
    check-optimizer-step-success embedding-init-method enable-autocast finalize-model-grads-func fully-parallel-load
    fully-parallel-save generation-config grad-scale-func grad-sync-func hf-model-id hf-model-revision init-method
    lazy-init manual-gc-eval moe-mlp-glu-interleave-size most-recent-k mtp-enabled no-sync-func
    output-layer-init-method override-opt-param-scheduler param-sync-func params-dtype perform-initialization
    pipeline-dtype preserve-fp32-weights replication-factor should-pad-vocab timers use-checkpoint-opt-param-scheduler
    use-gloo-process-groups use-mamba-mem-eff-path use-te-rng-tracker
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Options, then fields without an option. The softmax concerns layers without Transformer Engine, the loss per token
data with masked labels; `make-vocab-size-divisible-by` is read with the vocabulary."""

HARMLESS_PREFIXES = (
    "async-ckpt-", "ckpt-", "cuda-graph-warmup", "dist-ckpt-", "distributed-timeout-", "exit-duration-", "exit-on-",
    "exit-signal", "fault-injector-", "flight-recorder-", "ft-", "inference-", "inprocess-", "log-", "logging-level",
    "memory-snapshot-", "nccl-all-reduce-for-prefill", "no-flight-recorder-", "no-inference-", "no-load-", "no-save-",
    "non-persistent-", "null-tokenizer-", "object-storage-", "one-logger-", "otel-", "pytorch-profiler-", "straggler-",
    "tensorboard-", "tiktoken-", "tokenizer-", "use-checkpoint-opt", "use-dist-ckpt", "wandb-",
)  # fmt: skip

_FLAGS = """
    batch-invariant-mode check-for-large-grads create-all-gather-group
    ddp-average-in-collective ddp-pad-buckets-for-high-nccl-busbw ddp-reduce-scatter-with-fp32-accumulation
    defer-embedding-wgrad-compute deterministic-mode disable-async-tensor-model-parallel-allreduce
    disable-bf16-reduced-precision-matmul disable-clone-scatter-output-in-embedding disable-fp8-wgrad disable-jit-fuser
    disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs
    disable-tp-comm-split-ag disable-tp-comm-split-rs distribute-saved-activations enable-full-sharding-in-hsdp
    ep-overlap-early-attn-memory-release fake-process-group fine-grained-activation-offloading first-last-layers-bf16
    fp16-lm-cross-entropy fp32-residual-connection fp4-param-gather fsdp-double-buffer fsdp-manual-registration
    hybrid-context-parallel keep-fp8-transpose-cache log-max-attention-logit log-num-zeros-in-grad
    moe-router-padding-for-fp8 moe-router-padding-for-quantization moe-shared-expert-overlap
    moe-use-legacy-grouped-gemm mtp-standalone no-align-grad-reduce no-align-param-gather
    no-async-tensor-model-parallel-allreduce no-bias-dropout-fusion no-bias-gelu-fusion no-bias-swiglu-fusion
    no-check-for-nan-in-loss-and-grad no-clone-scatter-output-in-embedding no-fp8-wgrad no-gradient-accumulation-fusion
    no-gradient-reduce-div-fusion no-masked-softmax-fusion no-persist-layer-norm no-pin-cpu-grads no-pin-cpu-params
    no-rope-fusion no-scatter-gather-tensors-in-pipeline no-tp-comm-bulk-dgrad no-tp-comm-bulk-wgrad
    no-tp-comm-overlap-ag no-tp-comm-overlap-rs no-tp-comm-split-ag no-tp-comm-split-rs overlap-cpu-optimizer-d2h-h2d
    overlap-p2p-communication-warmup-flush overlap-param-gather-with-optimizer-step reuse-grad-buf-for-mxfp8-param-ag
    tp-comm-overlap-rs-dgrad use-kitchen-attention use-legacy-models use-nccl-ub use-ring-exchange-p2p use-sharp
    use-te-activation-func use-torch-optimizer-for-cpu-offload

    activation-func-fp8-input-store align-param-gather average-in-collective check-for-nan-in-grad
    cpu-offloading-double-buffering cpu-offloading-weights dense-grouped-gemm fp8-multi-head-attention fp8-output-proj
    fused-residual-rmsnorm fused-single-qkv-rope high-priority-a2a-comm-stream
    megatron-fsdp-enable-fine-grained-param-gather memory-efficient-layer-norm moe-paged-stash
    moe-permute-fusion-into-hybridep nccl-ub no-apply-rope-fusion no-batch-p2p-sync no-bias-activation-fusion
    no-cuda-graph-use-single-mempool no-deallocate-pipeline-outputs
    no-fsdp-all-gather-in-start-param-sync no-scatter-embedding-sequence-parallel no-store-param-remainders
    optimizer-cuda-graph overlap-dispatch-backward-with-experts-wgrad overlap-p2p-comm-warmup-flush
    pad-buckets-for-high-nccl-busbw reduce-scatter-with-fp32-accumulation skip-sync-grad-norm-across-mp
    tp-comm-atomic-ag tp-comm-atomic-rs tp-comm-overlap-disable-fc1 tp-comm-overlap-disable-qkv tp-only-amax-red
    use-grouped-gemm-for-dense-mlp use-grouped-gemm-for-shared-expert use-transformer-engine-full-layer-spec
    variable-seq-lengths

    cpu-offloading-retain-pinned-cpu-buffers delay-offload-until-cuda-graph disable-align-grad-reduce
    fsdp-db-use-persist-buf-on-alloc-fail megatron-fsdp-max-pool-double-buffer mla-down-proj-fusion
    moe-hybridep-pad-uneven-dispatch-inputs moe-ncclep-zero-copy moe-single-grouped-bias moe-single-grouped-weight
    moe-use-grouped-tensor no-use-layer-wise-param-layout
"""
_AMOUNTS = """
    ddp-bucket-size ddp-num-buckets hierarchical-context-parallel-sizes high-priority-stream-groups
    max-seqlen-per-dp-cp-rank microbatch-group-size-per-virtual-pipeline-stage nccl-communicator-config-path
    offload-modules suggested-communication-unit-size symmetric-ar-type te-precision-config-file tp-comm-overlap-cfg
    train-sync-interval

    activation-offload-fraction bucket-size microbatch-group-size-per-vp-stage mlp-chunks-for-training
    moe-expert-rank-capacity-factor moe-flex-dispatcher-num-sms num-buckets
    num-microbatches-with-partial-activation-checkpoints

    ddp-param-name-patterns-for-fp32-local-accumulation delta-offload-bytes-across-pp-ranks
    fine-grained-offloading-max-inflight-offloads moe-hybridep-num-blocks-permute
    moe-hybridep-num-blocks-unpermute moe-hybridep-num-sms-preprocessing output-logit-dtype
"""
UNESTIMATED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*_FLAGS.split(), *_AMOUNTS.split()), ()),
    "cp-comm-type": ("p2p",),
    "cross-entropy-fusion-impl": ("native",),
    "distributed-backend": ("nccl",),
    "empty-unused-memory-level": ("0",),
    "fp8-amax-compute-algo": ("most_recent",),
    "fp8-amax-history-len": ("1",),
    "fp8-interval": ("1",),
    "fp8-margin": ("0",),
    "kitchen-attention-backend": ("sdpa",),
    **dict.fromkeys(("megatron-fsdp-grad-comm-dtype", "megatron-fsdp-main-grads-dtype"), ("auto",)),
    "megatron-fsdp-main-params-dtype": ("fp32",),
    "megatron-fsdp-version": ("1",),
    **dict.fromkeys(("moe-combine-bwd-dtype", "moe-dispatch-fwd-dtype"), ("bf16",)),
    "moe-deepep-num-sms": ("20",),
    "moe-hybridep-num-sms": ("16",),
    "optimizer-offload-fraction": ("1", "1.0"),
    "outer-dp-sharding-strategy": ("no_shard",),
    "pipeline-model-parallel-comm-backend": ("nccl",),
    "rerun-mode": ("validate_results", "disabled"),  # a step is repeated only after an error
    "timing-log-level": ("0",),  # others wait for the device and for each other
}
"""Options, then fields without an option, with the values that the estimate and our exports have besides none."""

KERNELS = {"cross-entropy-loss-fusion": ""}
"""Options that the estimate and our exports have in 16 bits; in fp32, it would round the gradients of logits."""
EXPERTS = {"moe-grouped-gemm": "", "moe-permute-fusion": "", "moe-router-fusion": "", "moe-router-dtype": "fp32"}
"""Options that the estimate and our exports of mixtures have, with their values."""

ONLY_WITH = {
    "cp-comm-type": "context-parallel-size",
    "hierarchical-context-parallel-sizes": "context-parallel-size",
    "suggested-communication-unit-size": "use-megatron-fsdp",
    **dict.fromkeys(("fp8-amax-compute-algo", "fp8-amax-history-len", "fp8-interval", "fp8-margin"), "fp8-format"),
}
"""Options that have no effect where another one is absent or 1."""

FILES = ("path", "file", "model", "dir", "save", "load", "checkpoint")
"""Endings of options that name files, which are noted where they are not known."""
OF_STAGES = ("microbatch-group-size-per-virtual-pipeline-stage", "microbatch-group-size-per-vp-stage")
"""Options whose value is by default the number of pipeline stages."""

NAN_CHECK = "no-check-for-nan-in-loss-and-grad"
"""Option without which Megatron refuses graphs of the whole iteration."""

ROPE_FUSION = ("no-rope-fusion", "no-apply-rope-fusion")
"""Options that latent attention has without YARN, where Megatron refuses fused rotations."""


@cache
def names_of_forks(*kinds: str) -> dict[str, str]:
    """Return the options of forks, of these kinds in `forks.toml` or of all, with the number of their values."""
    forks = tomllib.loads(Path(__file__).with_name("forks.toml").read_text(encoding="utf-8"))["forks"]
    found = [names for fork in forks for kind, names in fork.items() if kind != "source" and kind in (kinds or fork)]
    return {name: takes for names in found for name, takes in names.items()}


def is_harmless(name: str) -> bool:
    """Return True for an option that concerns neither speed nor memory nor the loss."""
    return name in HARMLESS or name.startswith(HARMLESS_PREFIXES) or name in names_of_forks("without_effect")


def has_a_class(name: str) -> bool:
    """Return True if option `name` stands in a table: no other note is needed if nothing reads it."""
    return is_harmless(name) or name in UNESTIMATED or name in KERNELS | EXPERTS


def may_be_unknown(name: str) -> bool:
    """Return True for an option whose value a run file does not need."""
    return has_a_class(name) or name.endswith(FILES)


def unestimated(options: MegatronOptions) -> list[str]:
    """Return the unread `options` in which the run differs from its estimate, as they are given, and absent ones."""
    found, kernels = [], KERNELS | EXPERTS
    for name, option in list(options.unread.items()):
        if name not in UNESTIMATED and name not in kernels:
            continue
        values = " ".join(option.values)
        expected = kernels.get(name)
        if name in ROPE_FUSION and "multi-latent-attention" in options:
            expected = "" if options.text("rope-type", "yarn") == "rope" else None
        if name == NAN_CHECK and options.text("cuda-graph-impl", "none") == "local":
            expected = ""
        if name in OF_STAGES:
            expected = options.text("pipeline-model-parallel-size", "1")
        needed = ONLY_WITH.get(name)
        has_effect = needed is None or (needed in options and options.text(needed) != "1")
        if has_effect and values != expected and values not in UNESTIMATED.get(name, ()):
            found.append(f"--{name} {values}".strip())
    asked = KERNELS if "bf16" in options or "fp16" in options else {}
    asked = asked | (EXPERTS if "num-experts" in options else {})
    absent = [f"the absence of --{name} {value}".strip() for name, value in asked.items() if name not in options]
    return [*found, *absent]
