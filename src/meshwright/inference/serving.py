"""Steady state of a server under a closed loop, or of offline inference with as many requests as fit.

A request has i prompt tokens and o answer tokens. B requests are in flight on each replica; each takes o - 1 decode
steps and shares the device with the prompts of the others:

    time of a request   (o - 1) t_step(B) + B t_prefill
    ITL  (TPOT)         (time of a request - t_prefill) / (o - 1)             mean gap between two tokens of a request
    TTFT                t_prefill + half a step + the prompts ahead of it
    output tokens/s     replicas x B x o / time of a request
    total tokens/s      output x (i + o) / o

With p pipeline stages, p parts of the batch are on their way at once: a step is that of B/p requests, and a stage is
busy with a prompt for a p-th of its time.

B is the concurrency per replica, at most the sequences that the engine runs at once and those that the KV cache holds:
tokens / (i + o) where an engine never evicts (TensorRT-LLM), tokens / (i + o/2) where it pages and preempts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from meshwright.arrays import Array, Table
from meshwright.errors import InfeasibleError, InputError
from meshwright.inference.capacity import CapacityQuestion, Reserve, device_memory
from meshwright.inference.memory import session_bytes_on_device
from meshwright.inference.rates import ServingRates, StepSeconds, prefill_seconds, step_seconds
from meshwright.inference.work import Served, StepWork, step_work

MAX_TOKENS = 10**9
MAX_CONCURRENCY = 10**9


@dataclass(frozen=True, kw_only=True)
class RequestLoad:
    """Requests of equal length. `concurrency` None: as many as fit (offline, or a saturated server)."""

    input_tokens: int
    output_tokens: int
    concurrency: float | None = None  # requests in flight on all replicas together
    accepted_per_step: float = 0.0  # speculative decoding: drafted tokens accepted per step, on average
    drafted_per_step: int = 0  # drafted tokens that are verified

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens"):
            value = getattr(self, name)
            if not 1 <= value <= MAX_TOKENS:
                raise InputError(f"{name} is no length", got=value, allowed=f"1 to {MAX_TOKENS:,}")
        if self.concurrency is not None and not 0 < self.concurrency <= MAX_CONCURRENCY:
            raise InputError("concurrency is out of range", got=self.concurrency, allowed="above 0")
        if not 0 <= self.accepted_per_step <= self.drafted_per_step:
            raise InputError(
                "accepted tokens per step are out of range", got=self.accepted_per_step,
                allowed=f"0 to the drafted {self.drafted_per_step}",
            )  # fmt: skip

    @property
    def context(self) -> float:
        """Mean length of a sequence while it is decoded."""
        return self.input_tokens + self.output_tokens / 2


@dataclass(frozen=True, kw_only=True)
class EngineTraits:
    """Traits of an inference engine that bound its batch (`data/engines.toml`)."""

    name: str
    max_sequences: int  # that run at once on an attention group, by default
    reserves_answers: bool  # admits a request only if its whole answer fits: nothing is evicted
    batch_tokens: int  # of one step


@dataclass(frozen=True, kw_only=True)
class BatchLimit:
    """Requests in flight on one replica, and what limits them."""

    sequences: float
    binds: str  # concurrency, kv_cache or engine


def batch_limit(of: Served, load: RequestLoad, engine: EngineTraits, reserve: Reserve) -> BatchLimit:
    """Requests in flight on one replica. Raises InfeasibleError where not one fits."""
    length = load.input_tokens + load.output_tokens
    question = CapacityQuestion(
        model=of.model,
        cluster=of.cluster,
        weights=of.weights,
        cache=of.cache,
        context=length,
        reserve=reserve,
    )
    device = device_memory(question, of.layout)
    held = length if engine.reserves_answers else load.context
    whole = session_bytes_on_device(of.model, of.cache, length, of.layout)
    if device.cache < whole:
        raise InfeasibleError(
            f"{of.model.name} in {of.weights.name}, {of.layout.describe()}: a session of {length:,} tokens needs "
            f"{whole / 1e9:.1f} GB of each {of.cluster.accelerator.name}, {device.cache / 1e9:.1f} GB are left"
        )
    fit = (
        device.cache / session_bytes_on_device(of.model, of.cache, held, of.layout) * of.layout.attention_data
    )
    asked = inf if load.concurrency is None else load.concurrency / of.layout.replicas
    bounds = {
        "concurrency": asked,
        "kv_cache": fit,
        "engine": float(engine.max_sequences * of.layout.attention_data),
    }
    binds = min(bounds, key=lambda name: bounds[name])
    return BatchLimit(sequences=max(bounds[binds], 1.0 if load.concurrency is None else 0.0), binds=binds)


@dataclass(frozen=True, kw_only=True)
class RequestWork(Table):
    """Work of one decode step with the whole batch, and of one prompt."""

    decode: StepWork
    prompt: StepWork
    prompt_steps: Array  # steps that one prompt fills
    sequences: Array  # in flight on one replica
    waiting: Array  # requests per one in flight, those that wait for a place included
    input_tokens: Array
    output_tokens: Array
    steps: Array  # decode steps of a request
    replicas: Array
    groups: Array  # attention groups of a replica: a prompt runs on one of them
    stages: Array  # pipeline stages: as many parts of the batch are on their way at once


def request_work(of: Served, load: RequestLoad, engine: EngineTraits, limit: BatchLimit) -> RequestWork:
    """Work of a request in the steady state."""
    batch = limit.sequences
    verified, part = 1 + load.drafted_per_step, max(batch / of.layout.pipeline, 1.0)
    asked = batch if load.concurrency is None else max(load.concurrency / of.layout.replicas, batch)
    return RequestWork(
        decode=step_work(
            of,
            sequences=part,
            tokens=verified,
            context=load.context,
            decoding=True,
        ),
        prompt=prompt_work(of, load.input_tokens, engine.batch_tokens),
        prompt_steps=load.input_tokens / engine.batch_tokens,
        sequences=batch,
        waiting=asked / batch,
        input_tokens=load.input_tokens,
        output_tokens=load.output_tokens,
        steps=(load.output_tokens - 1) / (1 + load.accepted_per_step),
        replicas=of.layout.replicas,
        groups=of.layout.attention_data,
        stages=of.layout.pipeline,
    )


def prompt_work(of: Served, input_tokens: int, batch_tokens: int) -> StepWork:
    """Work of one prompt, which shares its steps with as many others as these have room for.

    What grows with tokens is one prompt's; weights, collectives and layers are those of a whole step.
    """
    count = max(1.0, batch_tokens / input_tokens)
    step = step_work(of, sequences=count, tokens=input_tokens, context=input_tokens / 2, decoding=False)
    shared = (
        "gemm_flops",
        "grouped_flops",
        "attention_flops",
        "elementwise_bytes",
        "collective_s",
        "sequences",
    )
    return replace(step, **{name: getattr(step, name) / count for name in shared})


@dataclass(frozen=True, kw_only=True)
class Steady(Table):
    """Steady state of a server. Seconds; tokens/s of all replicas together."""

    step: StepSeconds
    prompt: StepSeconds
    request_s: Array
    itl_s: Array  # mean over the gaps of a request: (end-to-end - TTFT) / (output tokens - 1)
    ttft_s: Array
    batch_s: Array  # a batch of requests that start together, until the last token
    output_tokens_per_s: Array
    total_tokens_per_s: Array


def steady(work: RequestWork, rates: ServingRates) -> Steady:
    """Latencies and rates of the steady state."""
    step = step_seconds(work.decode, rates)
    prompt = prefill_seconds(work.prompt, rates, work.prompt_steps)
    batch, decode_s = work.sequences, work.steps * step.total
    shared = np.maximum(batch, 1.0)  # below one request in flight, a request has the server to itself
    request_s = decode_s + np.maximum(shared / work.stages, 1.0) * prompt.total
    rate = work.replicas * batch * work.output_tokens / request_s
    gaps = work.output_tokens - 1
    several = gaps > 0
    itl_s = np.maximum(request_s - prompt.total, 0.0) / (gaps + (1 - several)) * several
    one_s = isolated_prefill_s(work, rates)
    return Steady(
        step=step,
        prompt=prompt,
        request_s=request_s,
        itl_s=itl_s,
        ttft_s=one_s + 0.5 * step.total + (work.waiting - 1) * request_s,
        batch_s=request_s,
        output_tokens_per_s=rate,
        total_tokens_per_s=rate * (work.input_tokens + work.output_tokens) / work.output_tokens,
    )


def isolated_prefill_s(work: RequestWork, rates: ServingRates) -> Array:
    """Seconds of the steps of one prompt that shares them with no other prompt."""
    return work.groups * prefill_seconds(work.prompt, rates, np.ceil(work.prompt_steps)).total
