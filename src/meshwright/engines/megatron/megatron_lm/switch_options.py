"""Switches of software among Megatron-LM's options, as a run file's `stack`.

An absent option has Megatron-LM's default, which is written where an estimate would otherwise take that of the stack's
release. Switches that no key of a run file expresses become notes that say what the estimate assumes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.engines.megatron import switches
from meshwright.engines.megatron.megatron_lm.options import MegatronOptions
from meshwright.specs.hardware import Accelerator
from meshwright.specs.precision import PRECISIONS

LAYERWISE = ["full"]  # an older name of graphs of whole layers
OLDER_GRAPHS = {"enable-cuda-graph": "local", "external-cuda-graph": "transformer_engine"}


UNTOLD_ATTENTION = "--attention-backend flash does not say which FlashAttention"


def stack_section(
    options: MegatronOptions, plan: dict[str, Any], *, precision: str, accelerator: Accelerator
) -> dict[str, Any]:
    """Return the switches of a run with the sections `plan` and `precision`; add notes on others."""
    scope = switches.SwitchScope(has_experts="num-experts" in options, expert=plan["expert"], tensor=plan["tensor"])
    given = _settings(options, precision=precision)
    found: dict[str, Any] = {}
    for name, switch in switches.SWITCHES.items():
        values = switches.values_of_switch(name, given, scope=scope, accelerator=accelerator)
        if values:
            value = values[0]
            found[name] = value if isinstance(value, bool | float) else str(value)
        elif switch.applies(scope):
            found |= _nearest(name, given, options, scope)
        if len(values) > 1:
            options.note(f"{UNTOLD_ATTENTION}: stack.attention is {values[0]}")
    for what, assumed in _others(options, plan):
        options.note(_assumption(what, assumed))
    return found | _amounts(options, scope)


def _settings(options: MegatronOptions, *, precision: str) -> switches.Settings:
    """Return the settings of `SWITCHES` that the options give, and Megatron's defaults of the others."""
    wanted = {
        key: value
        for switch in switches.SWITCHES.values()
        for settings in switch.settings.values()
        for key, value in settings.items()
    }
    given: switches.Settings = {}
    for key, example in wanted.items():
        name = key.replace("_", "-")
        if isinstance(example, bool):
            given[key] = options.flag(name)
        elif isinstance(example, int):
            given[key] = options.integer(name, 0) or None
        else:
            values = [part for value in options.values(name) for part in value.split(",")]
            given[key] = (values if isinstance(example, list) else "".join(values)) or switches.ABSENT[key]
    given["grad_reduce_in_fp32"] = _reduces_in_fp32(options, precision=precision)
    if given["fp8_param_gather"] and not switches.keeps_fp8_on_the_wire(PRECISIONS[precision]):
        given["fp8_param_gather"] = False
        options.note(
            f"the run file does not contain --fp8-param-gather under {precision}; the estimate assumes that "
            "parameters are kept and gathered in 16 bits"
        )
    return given | _graphs(options, given) | _kernels(options)


def _reduces_in_fp32(options: MegatronOptions, *, precision: str) -> bool:
    """Return True for gradients that data-parallel ranks reduce in fp32; by default those of bf16 weights are."""
    is_fp32, is_bf16 = (options.flag("accumulate-allreduce-grads-in-fp32"), options.flag("grad-reduce-in-bf16"))
    if precision == "fp16" and not is_fp32:
        options.note("gradients are reduced in fp16: stack.gradient_format is bf16, which has as many bytes")
        return False
    kept_in_fp32 = options.text("main-grads-dtype", "fp32") in ("fp32", "float32", "torch.float32")
    return precision in ("fp16", "fp32") or (not is_bf16 and (is_fp32 or kept_in_fp32))


def _graphs(options: MegatronOptions, given: switches.Settings) -> switches.Settings:
    """Return the captured graphs in the names of core_v0.16.1."""
    kind, parts = given["cuda_graph_impl"], given["cuda_graph_scope"]
    for name, older in OLDER_GRAPHS.items():
        kind = older if options.flag(name) else kind
    if kind == "full_iteration":  # Megatron-Core 0.19
        kind, parts = "local", ["full_iteration"]
    return {"cuda_graph_impl": kind, "cuda_graph_scope": [] if parts == LAYERWISE else parts}


def _kernels(options: MegatronOptions) -> switches.Settings:
    """Return the dispatcher's kernels by their older option, and the attention of layers without Transformer Engine."""
    found: switches.Settings = {"moe_flex_dispatcher_backend": "deepep"} if options.flag("moe-enable-deepep") else {}
    kind = options.text("transformer-impl", "transformer_engine")
    if kind == "local":
        found["attention_backend"] = "unfused"
    if kind != "transformer_engine":
        options.note(_assumption(f"--transformer-impl {kind}", "the kernels are Transformer Engine's"))
    if options.flag("use-flash-attn"):
        options.note("--use-flash-attn has no effect on Megatron-Core's layers, unlike --attention-backend")
    return found


def _assumption(what: str, assumed: str) -> str:
    return f"the run file does not contain {what}; the estimate assumes that {assumed}"


def _nearest(
    name: str, given: switches.Settings, options: MegatronOptions, scope: switches.SwitchScope
) -> dict[str, Any]:
    """Return the value of a switch that is nearest to settings without a value of their own, and note it."""
    dispatcher, backend = given["moe_token_dispatcher_type"], given["attention_backend"]
    if name == "cuda_graphs":
        parts = ", ".join(given["cuda_graph_scope"]) or "whole layers"
        what = f"--cuda-graph-impl {given['cuda_graph_impl']} with graphs of {parts}"
        options.note(_assumption(what, "the graphs of stack.cuda_graphs: partial"))
        return {name: "partial"}
    if name == "dispatcher":
        what = f"--moe-token-dispatcher-type {dispatcher}"
        if dispatcher == "flex":
            kernels = given["moe_flex_dispatcher_backend"]
            what += f" --moe-flex-dispatcher-backend {kernels} on these accelerators"
        if scope.expert > 1:
            options.note(_assumption(what, "it is alltoall"))
        return {name: "all-to-all"}
    if name == "attention" and backend == "local":
        return {name: "unfused"}
    if name == "attention" and backend != "auto":
        what = f"--attention-backend {backend} on these accelerators"
        options.note(_assumption(what, "the kernel is the one that the stack's release has there"))
    return {}


def _amounts(options: MegatronOptions, scope: switches.SwitchScope) -> dict[str, Any]:
    """Return the capacity of experts and the share of offloaded activations."""
    found: dict[str, Any] = {}
    capacity = options.number("moe-expert-capacity-factor", 0.0) if scope.has_experts else 0.0
    is_padded = options.flag("moe-pad-expert-input-to-capacity")
    if capacity > 0:
        found["capacity_factor"] = capacity
        if not is_padded:
            options.note("experts without --moe-pad-expert-input-to-capacity are estimated and trained as padded")
    elif scope.has_experts:
        found["drops_tokens"] = False
    options.flag("cpu-offloading")
    if (num_offloaded := options.integer("cpu-offloading-num-layers", 0)) > 0:
        found["offloaded_activations"] = round(num_offloaded / options.integer("num-layers", 0), 6)
    return found


def _others(options: MegatronOptions, plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if options.flag("delay-wgrad-compute"):
        yield "--delay-wgrad-compute", "gradients of weights and of inputs are computed together"
    if options.flag("no-overlap-p2p-communication") and plan.get("virtual_pipeline", 1) > 1:
        yield "--no-overlap-p2p-communication", "stages compute while they send"
    overlaps = {name: options.flag(name) for name in ("overlap-grad-reduce", "overlap-param-gather")}
    if plan["data_shard"] * plan["data_replicate"] == 1 or options.flag("use-torch-fsdp2"):
        return
    if not overlaps["overlap-grad-reduce"]:
        yield "that --overlap-grad-reduce is off", "gradients are reduced during the backward pass"
    if plan["sharding"] != "none" and not overlaps["overlap-param-gather"]:
        yield "that --overlap-param-gather is off", "parameters are gathered during the forward pass"
