"""Categories of kernels and operators by their names. Imports no tensor framework.

One table, read from the top: the first pattern found in a name decides. Every GPU library has its own naming
convention, so each line says whose it is. A name that matches no line is `other` and is listed by name, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

WAIT = "meshwright pipeline wait"
"""Name of the annotation in which a pass of a pipeline waits for another rank."""


class Category(StrEnum):
    """Kinds of work, in the order in which an instant that two of them share is counted."""

    GEMM = "GEMM"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"  # norms, softmax, activations, reductions, indexing, copies
    OPTIMIZER = "optimizer"
    PIPELINE_WAIT = "pipeline wait"  # for a receive from another stage, its transfer included
    COMMUNICATION = "communication"  # what no computation hides
    OTHER = "other"
    IDLE = "idle"  # nothing runs: the host prepares, or waits


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """A regular expression, its meaning, and the programs whose names it reads."""

    category: Category
    expression: str
    why: str


def _lines(category: Category, *lines: tuple[str, str]) -> list[Pattern]:
    return [Pattern(category=category, expression=e, why=why) for e, why in lines]


PATTERNS = (
    *_lines(Category.PIPELINE_WAIT, (rf"^{WAIT}$", "passes of the native engine's pipeline")),
    *_lines(
        Category.COMMUNICATION,
        (r"nccl(Dev)?Kernel|^nccl|rccl|msccl", "NCCL, RCCL and MSCCL++ kernels: ncclDevKernel_AllGather_RING_LL"),
        (r"nvshmem|deep_ep::|(one|two)_shot_all_?reduce|multimem_", "kernels that write to other devices' memory"),
        (r"^(gloo|nccl|mpi):|^c10d::|c10d_functional::|record_param_comms", "PyTorch's process groups, as operators"),
    ),
    *_lines(
        Category.OPTIMIZER,
        (r"FusedAdam|_fused_adamw?_|^Optimizer\.", "the fused update of PyTorch, Apex and Transformer Engine"),
        (r"multi_tensor_apply|aten::_foreach_|LpNormFunctor", "one launch over a list of tensors: norm, clip, update"),
    ),
    *_lines(
        Category.ATTENTION,
        (r"flash_?(fwd|bwd|attn|attention)|pytorch_flash::|FlashAttn", "FlashAttention 2 and 3"),
        (r"fmha|Fmha", "CUTLASS (fmha_cutlassF), Composable Kernel, cuDNN and AITER: fused multi-head attention"),
        (r"sdpa|scaled_dot_product|[Ee]fficient_?attention|mem_eff", "cuDNN's and PyTorch's names for the same"),
        (r"\battn_(fwd|bwd)|bwd_kernel_d(k_dv|q)|bwd_preprocess", "AOTriton, the attention of PyTorch on ROCm"),
        (r"\b_\w*Attention(Backward)?$", "functions of autograd that are written in Python"),
        (r"flex_attention|paged_attention|ring_attention|mla_", "Triton templates and variants of attention"),
    ),
    *_lines(
        Category.GEMM,
        (r"nvjet_", "cuBLAS since CUDA 12.8: nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTT"),
        (r"Cijk_", "Tensile, the GEMMs of rocBLAS and hipBLASLt: Cijk_Ailk_Bljk_BBS_BH_MT256x256x64"),
        (r"gemm|Gemm|GEMM|gemv", "cuBLAS, CUTLASS, CK, Triton and oneDNN say so: sm90_xmma_gemm_bf16bf16"),
        (r"cutlass", "CUTLASS kernels other than attention: Kernel2<cutlass_80_wmma_tensorop_...>"),
        (r"splitK_?[rR]educe|cublasLt::", "reductions of split-K GEMMs"),
        (r"triton_tem_\w*mm|grouped_mm|_matmul_", "Triton: Inductor's templates, GEMMs of experts"),
        (r"^aten::(linear|matmul|(add|ba|b|add_?b)?mm|addmv|mv|dot|_scaled_(grouped_)?mm|mkldnn_linear)", "ATen"),
        (r"^(mkldnn|onednn)::.*(linear|matmul)|^mkl::", "oneDNN and MKL, as operators"),
    ),
    *_lines(
        Category.ELEMENTWISE,
        (r"elementwise_kernel", "PyTorch's pointwise kernels: vectorized, unrolled and plain"),
        (r"triton_(poi|red|per|mix|for)_", "Inductor: pointwise, reduction, persistent reduction, combined"),
        (r"cpp_fused_", "Inductor on a CPU"),
        (r"[Rr]educe_kernel|reduce_1Block|[Ss]oftmax|[Ll]ayer_?[Nn]orm|rms_?norm|RMSNorm|_norm_", "reductions, norms"),
        (r"[Cc]ross_?[Ee]ntropy|nll_loss|[Ss]wi[Gg][Ll][Uu]|silu|gelu|rope|rotary|dropout", "element-wise functions"),
        (r"^Mem(cpy|set)|[Cc]opy|[Cc]atArray|chunk_cat|split_with_sizes|[Tt]ranspose|[Pp]ermute|fill", "copies"),
        (r"[Ii]ndex|[Gg]ather|[Ss]catter|[Ee]mbedding|[Ss]ort|[Tt]opk|[Rr]adix|[Hh]istogram", "indexing and routing"),
        (r"cub::|hipcub|rocprim|thrust::", "device-wide primitives: scans, sorts, reductions"),
        (r"[Qq]uant|[Cc]ast|amax|distribution_|philox", "change of format, random numbers"),
        (r"^(void )?at::native::|^aten::|^detach_?$", "the rest of ATen moves or maps tensors"),
    ),
)  # fmt: skip
"""Read in order. Communication is first, as its names contain `reduce` and `gather`; general patterns are last."""

FRAMES = (
    *_lines(
        Category.IDLE,
        (r"^autograd::|^torch::autograd::|Backward\d*$", "autograd's bookkeeping around operators"),
        (r"^_?[A-Z]\w+$", "functions of autograd that are written in Python"),
        (r"^(aten::)?(item|_local_scalar_dense|is_nonzero)$", "the host waits for a number"),
        (r"^Torch-Compiled Region|^## Call|^ProfilerStep", "frames around compiled code"),
    ),
)  # fmt: skip
"""Operators of the host that only call others: their own time is no work on data."""

DECISIVE = frozenset(
    {Category.GEMM, Category.ATTENTION, Category.OPTIMIZER, Category.PIPELINE_WAIT, Category.COMMUNICATION}
)
"""Categories whose operators pass them to the operators they call: a multiplication in AdamW is the optimizer's."""


@cache
def category(name: str) -> Category:
    """The category of a kernel.

    >>> [category(n).value for n in ("nvjet_tst_128x256_64x4_v_bz_NTT", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL")]
    ['GEMM', 'communication']
    >>> category("somebody_elses_kernel").value
    'other'
    """
    return _first(PATTERNS, name)


@cache
def operator_category(name: str) -> Category:
    """The category of an operator of the host; frames around operators are idle.

    >>> operator_category("aten::addmm").value, operator_category("MulBackward0").value
    ('GEMM', 'idle')
    """
    own = category(name)
    is_frame = own not in DECISIVE and _first(FRAMES, name) is Category.IDLE
    return Category.IDLE if is_frame else own


def _first(patterns: Iterable[Pattern], name: str) -> Category:
    found = (p.category for p in patterns if re.search(p.expression, name))
    return next(found, Category.OTHER)
