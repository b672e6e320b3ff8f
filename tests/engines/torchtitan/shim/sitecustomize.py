"""Lets torchtitan 0.3.0 run on a CPU with a released PyTorch: for tests, through PYTHONPATH, and nowhere else.

What upstream lacks there is supplied when it is imported, each where it is absent:

    torch._utils, torch.cpu    the device is the CPU, and answers what is asked of an accelerator
    torch.distributed          set_timeout; steps of pipeline schedules that take micro-batches
    FlexAttention              the same masks through PyTorch's attention, which has a backward pass on a CPU
    FSDP                       sums instead of scaled sums, which gloo lacks
"""

from __future__ import annotations

import importlib.abc
import sys

BEFORE, AFTER = "torchtitan", "torchtitan.trainer"


class Supplier(importlib.abc.MetaPathFinder):
    """Supplies as `torchtitan` and its trainer are imported; finds nothing itself."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == BEFORE:
            supply_devices()
            supply_distributed()
        elif fullname == AFTER:
            sys.meta_path.remove(self)
            supply_attention()
            supply_sums()
        return None


def supply_devices():
    import os
    import types

    import torch
    import torch._utils

    class Cpu(types.ModuleType):
        def __getattr__(self, name):
            return getattr(torch.cpu, name)

    cpu, memory = Cpu("cpu"), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu.get_device_name = lambda device=None: "cpu"
    cpu.current_device = lambda: 0
    cpu.memory_stats = lambda device=None: {}
    cpu.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=memory, name="cpu")
    for name in ("empty_cache", "reset_peak_memory_stats", "set_device", "synchronize"):
        setattr(cpu, name, lambda *_: None)
    others = torch._utils._get_device_module
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda kind: cpu if kind == "cpu" else others(kind)


def supply_distributed():
    import inspect

    import torch.distributed as dist
    import torch.distributed.pipelining.schedules as schedules

    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda timeout, group=None: dist.distributed_c10d._set_pg_timeout(timeout, group)
    for schedule in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        if "arg_mbs" not in inspect.signature(schedule.step).parameters:
            supply_step(schedule)


def supply_step(schedule):
    whole = schedule.step

    def step(
        self, *args, arg_mbs=None, kwarg_mbs=None, target_mbs=None, losses=None, loss_kwargs=None,
        return_outputs=True, **kwargs,
    ):  # fmt: skip
        if arg_mbs is None and kwarg_mbs is None:
            return whole(self, *args, losses=losses, loss_kwargs=loss_kwargs, return_outputs=return_outputs, **kwargs)
        for stage in getattr(self, "_stages", None) or [self._stage]:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        self._step_microbatches(
            arg_mbs or [()] * self._n_microbatches, kwarg_mbs, target_mbs, losses, return_outputs,
            loss_kwargs=loss_kwargs,
        )  # fmt: skip
        return None

    schedule.step = step


def supply_attention():
    from collections import namedtuple

    import spmd_types
    import torch
    import torchtitan.models.common.attention as attention
    from torch.nn.attention.flex_attention import create_mask
    from torch.nn.functional import scaled_dot_product_attention

    Aux = namedtuple("Aux", "lse")

    def dense_mask(block_mask, q, k):
        if block_mask is None:
            return None
        if not hasattr(block_mask, "_dense"):
            batch, heads = block_mask.shape[:2] if len(block_mask.shape) == 4 else (1, 1)
            block_mask._dense = create_mask(
                block_mask.mask_mod, batch, heads, q.shape[-2], k.shape[-2], device=q.device
            )
        return block_mask._dense

    def attend(q, k, v, *, score_mod, block_mask, scale, enable_gqa, return_aux, kernel_options):
        assert score_mod is None
        with spmd_types.no_typecheck():
            mask = dense_mask(block_mask, q, k)
            if not return_aux.lse:
                out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
                return out, Aux(None)
            repeats = q.shape[1] // k.shape[1]
            scores = (q @ k.repeat_interleave(repeats, 1).mT) * (scale or q.shape[-1] ** -0.5)
            scores = scores.masked_fill(~mask, float("-inf"))
            out = torch.softmax(scores, -1) @ v.repeat_interleave(repeats, 1)
            return out, Aux(torch.logsumexp(scores, -1))

    attention.FlexAttention.compiled_flex_attn = staticmethod(attend)
    attention._compiled_create_block_mask = attention.create_block_mask


def supply_sums():
    import torchtitan.distributed.fsdp as fsdp
    from torch.distributed.fsdp import FSDPModule

    def plain_sums(model):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    fsdp.disable_fsdp_gradient_division = plain_sums


sys.meta_path.insert(0, Supplier())
