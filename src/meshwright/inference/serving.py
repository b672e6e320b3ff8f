"""Steady state of a server under a closed loop, or of offline inference with as many requests as fit.

A request has i prompt tokens and o answer tokens. B requests are in flight on each replica; each takes o - 1 decode
steps and shares the device with the prompts of the others:

    time of a request   t_request + (o - 1/2) t_step(B) + B t_prefill = TTFT + (o - 1) ITL
    ITL  (TPOT)         t_step and the other prompts that TTFT does not hold: the mean gap between two tokens
    TTFT                t_request + t_prefill + what is left of the step that it finds + the prompts of its own step
    output tokens/s     replicas x B x o / time of a request
    total tokens/s      output x (i + o) / o

Where the scheduler looks for new requests after n decode steps only, a request waits (n - 1) / 2 steps more, and one
more for each step that is scheduled while another runs, unless the server is idle.

t_prefill is what a prompt adds to a step that decodes beside it, or a step of its own where the engine does not mix
them. A step with prompts takes at least the time in which the host starts its kernels, those of attention alone where
its tokens are few enough for a graph.

With p pipeline stages, p parts of the batch are on their way at once: a step is that of B/p requests, and a stage is
busy with a prompt for a p-th of its time.

Requests of equal lengths that begin together stay in step (`lockstep`): the m prompts that fit into one step, or all B,
are computed together, the B/m cohorts after each other. Then TTFT is the time of a cohort's prompts, and

    time of a request   t_request + (o - 1) t_step(B) + B/m t_cohort(m)

A benchmark that sends r requests for each of the B begins with B of them at once. Those of the first round wait for
each other's prompts, (B - 1) / 2 t_prefill in the mean, so a mean TTFT holds an r-th of that.

Where the cache binds an engine that does not reserve answers, it admits prompts until the cache is full, and preempts
requests as the others grow: all that are admitted begin with i tokens, and those that end have i + o, so o / (i + o)
of them are preempted, and their i + o/2 tokens are computed again.

Steps that decode and compute prompts bound B by their tokens: while a request decodes, o - 1 steps compute the prompts
of other requests. Further requests wait for their prompts. With answers of one token, TTFT is the time of a request.

B is the concurrency per replica, at most the sequences that the engine runs at once and those that the KV cache holds:
tokens / (i + o) where an engine never evicts (TensorRT-LLM), tokens / (i + o/2) where it pages and preempts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from meshwright.arrays import Array, Table
from meshwright.errors import InfeasibleError, InputError
from meshwright.inference.batching import ROUNDING
from meshwright.inference.capacity import CapacityQuestion, Reserve, device_memory
from meshwright.inference.memory import session_bytes_on_device, without_windows
from meshwright.inference.rates import (
    NOTHING,
    Decoded,
    ServingRates,
    StepSeconds,
    decoded_of,
    prefill_seconds,
    step_seconds,
)
from meshwright.inference.work import Served, StepWork, drafting_work, kernels, step_work

MAX_TOKENS = 10**9
MAX_CONCURRENCY = 10**9
MAX_SPREAD = 10.0


@dataclass(frozen=True, kw_only=True)
class RequestLoad:
    """Requests with lengths of these means. `concurrency` None: as many as fit (offline, or a saturated server)."""

    input_tokens: int
    output_tokens: int
    input_spread: float = 0.0  # coefficient of variation of the lengths of prompts
    output_spread: float = 0.0  # the same of answers, which do not depend on the prompts
    concurrency: float | None = None  # requests in flight on all replicas together
    prefix_hit_rate: float = 0.0  # share of the tokens of a prompt whose cache is held already
    accepted_per_step: float = 0.0  # speculative decoding: drafted tokens accepted per step, on average
    drafted_per_step: int = 0  # drafted tokens that are verified
    rounds: float = 0.0  # requests of a benchmark for each one in flight, which begins with all of them; 0: endless
    lockstep: bool = False  # requests begin together, as in a closed loop of a benchmark with fixed lengths

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens"):
            value = getattr(self, name)
            if not 1 <= value <= MAX_TOKENS:
                raise InputError(f"{name} is no length", got=value, allowed=f"1 to {MAX_TOKENS:,}")
        if self.concurrency is not None and not 0 < self.concurrency <= MAX_CONCURRENCY:
            raise InputError("concurrency is out of range", got=self.concurrency, allowed="above 0")
        if not 0 <= self.prefix_hit_rate < 1:
            raise InputError("prefix_hit_rate is no share", got=self.prefix_hit_rate, allowed="0 to below 1")
        for name in ("input_spread", "output_spread"):
            if not 0 <= getattr(self, name) <= MAX_SPREAD:
                raise InputError(f"{name} is out of range", got=getattr(self, name), allowed=f"0 to {MAX_SPREAD:g}")
        if self.lockstep and (self.input_spread or self.output_spread):
            raise InputError("requests of unequal lengths do not stay in step", hint="leave lockstep out")
        if not 0 <= self.accepted_per_step <= self.drafted_per_step:
            raise InputError(
                "accepted tokens per step are out of range", got=self.accepted_per_step,
                allowed=f"0 to the drafted {self.drafted_per_step}",
            )  # fmt: skip

    @property
    def context(self) -> float:
        """Mean length of a sequence while it is decoded. Long answers are decoded for longer."""
        return self.input_tokens + self.output_tokens * (1 + self.output_spread**2) / 2

    @property
    def computed_tokens(self) -> float:
        """Tokens of a prompt that a server computes: all that the prefix cache does not hold, at least the last."""
        return max(self.input_tokens * (1 - self.prefix_hit_rate), 1.0)

    @property
    def steps(self) -> float:
        """Decode steps of a request, a mean."""
        return (self.output_tokens - 1) / (1 + self.accepted_per_step)


@dataclass(frozen=True, kw_only=True)
class EngineTraits:
    """Traits of an inference engine that bound its batch (`data/engines.toml`)."""

    name: str
    max_sequences: int  # that run at once on an attention group, by default
    reserves_answers: bool  # admits a request only if its whole answer fits: nothing is evicted
    batch_tokens: int  # of one step
    cache: str | None = None  # format of the cache unless an option says otherwise; None: as the checkpoint's
    mixes_prompts: bool = True  # a step computes prompts and decodes; False: in steps of their own
    windowed_cache: bool = True  # layers with a sliding window keep its tokens only
    eager_prompts: bool = True  # the host starts the kernels of a step with prompts one by one, from Python
    graph_tokens: int = 0  # of a step with prompts that is a graph but for attention, at most
    polled_steps: int = 1  # decode steps after which the scheduler looks for new requests again
    steps_ahead: int = 0  # that are scheduled while one runs: the host works beside the device
    tile_tokens: int = 1  # a GEMM of fewer tokens is computed as dot products, without reuse of the weights
    balanced_steps: int = 0  # that decode, at most, while a prompt waits for those of the other attention groups
    server: str = ""  # level of the factor "server": one server with constants of its own (`inference.server_fit`)


@dataclass(frozen=True, kw_only=True)
class BatchLimit:
    """Requests in flight on one replica, and what limits them."""

    sequences: Array  # an array where several loads are looked at at once
    binds: str  # concurrency, kv_cache, engine or prompts; prefill where prompts of other replicas come no faster


def batch_limit(
    of: Served, load: RequestLoad, engine: EngineTraits, reserve: Reserve, *, prefills: bool = True
) -> BatchLimit:
    """Requests in flight on one replica, which computes their prompts where it `prefills`.

    Raises InfeasibleError where not one fits.
    """
    length = load.input_tokens + load.output_tokens
    question = CapacityQuestion(
        model=of.model, cluster=of.cluster, weights=of.weights, cache=of.cache, context=length, reserve=reserve
    )
    device = device_memory(question, of.layout)
    reserved = load.input_tokens + load.output_tokens * (1 + load.output_spread**2)  # long answers stay for longer
    held = reserved if engine.reserves_answers else load.context
    kept = of.model if engine.windowed_cache else without_windows(of.model)
    whole = session_bytes_on_device(kept, of.cache, length, of.layout)
    if device.cache < whole:
        each, left = of.cluster.accelerator.name, device.cache / 1e9
        why = (
            f"a session of {length:,} tokens needs {whole / 1e9:.1f} GB of each {each}, {left:.1f} GB are left"
            if left >= 0
            else f"the weights need {-left:.1f} GB more than each {each} has"
        )
        raise InfeasibleError(f"{of.model.name} in {of.weights.name}, {of.layout.describe()}: {why}")
    fit = device.cache / session_bytes_on_device(kept, of.cache, held, of.layout) * of.layout.attention_data
    asked = inf if load.concurrency is None else load.concurrency / of.layout.replicas
    bounds = {"concurrency": asked, "kv_cache": fit, "engine": float(engine.max_sequences * of.layout.attention_data)}
    if prefills and not load.lockstep:
        bounds["prompts"] = _prompt_bound(load, engine) * of.layout.attention_data * of.layout.pipeline
    binds = min(bounds, key=lambda name: bounds[name])
    return BatchLimit(sequences=max(bounds[binds], 1.0 if load.concurrency is None else 0.0), binds=binds)


def _prompt_bound(load: RequestLoad, engine: EngineTraits) -> float:
    """Most requests in flight, the others waiting: a step has room for so many tokens of prompts.

    A request decodes while `steps` steps full of prompts go by, so they compute steps / prompt steps of the others,
    and its own was in one with as many as fit.
    """
    prompt_steps = load.computed_tokens / engine.batch_tokens
    if load.steps and not engine.mixes_prompts:
        return inf  # prompts have steps of their own, for which those that decode wait
    return (load.steps + waited_steps(load, engine)) / prompt_steps + max(1 / prompt_steps, 1.0)


def waited_steps(load: RequestLoad, engine: EngineTraits) -> float:
    """Decode steps before that in which the scheduler of a busy server looks at a new request, a mean."""
    return (engine.polled_steps - 1) / 2 + engine.steps_ahead if load.steps else 0.0


@dataclass(frozen=True, kw_only=True)
class RequestWork(Table):
    """Work of one decode step with the whole batch, and of one prompt."""

    decode: StepWork
    prompt: StepWork
    prompt_steps: Array  # steps that carry one prompt, a fraction where others share them
    token_steps: Array  # of them where all are full: by the tokens of a step alone
    eager_kernels: Array  # that the host starts one by one in a step with prompts
    cut_kernels: Array  # the same where all but attention is a graph
    graph_share: Array  # most tokens of such a step, by those of a full one
    mixes: Array  # 1: these steps decode tokens too
    sequences: Array  # in flight on one replica
    waiting: Array  # requests per one in flight, those that wait for a place included
    input_tokens: Array
    output_tokens: Array
    steps: Array  # decode steps of a request
    replicas: Array
    groups: Array  # attention groups of a replica: a prompt runs on one of them
    begun: Array  # other prompts that begin by a step, in the mean
    balanced_steps: Array  # that decode while a prompt waits for those of other groups
    stages: Array  # pipeline stages: as many parts of the batch are on their way at once
    recomputed: Array  # prompts that are computed again for each request
    rounds: Array  # of a benchmark that begins with all requests at once; 0: endless
    waited_steps: Array  # whole decode steps before a request is looked at
    cohort: Array  # prompts that are computed together in lockstep; 0: requests are not in step


def request_work(of: Served, load: RequestLoad, engine: EngineTraits, limit: BatchLimit) -> RequestWork:
    """Work of a request in the steady state."""
    batch = limit.sequences
    verified, part = 1 + load.drafted_per_step, np.maximum(batch / of.layout.pipeline, 1.0)
    asked = batch if load.concurrency is None else np.maximum(load.concurrency / of.layout.replicas, batch)
    decode = step_work(
        of, sequences=part, tokens=verified, context=load.context, decoding=True, tile_tokens=engine.tile_tokens
    )
    steps = load.steps
    ended = np.maximum((part - 1) / max(steps, 1.0), LEAST)  # others by a step, in the mean: as many begin
    overlapped = float(engine.steps_ahead > 0)
    shared = ended / -np.expm1(-ended)  # prompts of a step that has any, where they begin by chance
    cohort = np.clip(engine.batch_tokens / load.computed_tokens, 1.0, np.maximum(batch, 1.0)) if load.lockstep else 0.0
    drafting = drafting_work(of, sequences=part, context=load.context, drafted=load.drafted_per_step)
    return RequestWork(
        decode=replace(decode if drafting is None else decode.plus(drafting), is_overlapped=overlapped),
        prompt=replace(prompt_work(of, load, engine.batch_tokens), is_overlapped=overlapped),
        prompt_steps=np.maximum(load.computed_tokens / engine.batch_tokens, 1 / shared),
        token_steps=load.computed_tokens / engine.batch_tokens,
        eager_kernels=float(engine.eager_prompts) * kernels(of.model)[0],
        cut_kernels=float(engine.eager_prompts) * kernels(of.model)[1],
        graph_share=engine.graph_tokens / engine.batch_tokens, mixes=float(engine.mixes_prompts),
        sequences=batch, waiting=asked / batch, input_tokens=load.input_tokens, output_tokens=load.output_tokens,
        steps=steps, replicas=of.layout.replicas, groups=of.layout.attention_data, begun=ended,
        balanced_steps=float(engine.balanced_steps), stages=of.layout.pipeline,
        recomputed=recomputed(load, limit, engine, of.layout.replicas), rounds=load.rounds,
        waited_steps=waited_steps(load, engine), cohort=cohort,
    )  # fmt: skip


def recomputed(load: RequestLoad, limit: BatchLimit, engine: EngineTraits, replicas: int) -> float:
    """Prompts that are computed again for each request, as some lose their place in the cache before they end."""
    if limit.binds != "kv_cache" or engine.reserves_answers:
        return 0.0
    waiting = 1.0 if load.concurrency is None else 1 - float(limit.sequences) * replicas / load.concurrency
    share = min(load.output_tokens / (load.input_tokens + load.output_tokens), waiting)
    return share * load.context / load.input_tokens


OF_ONE_PROMPT = (
    "cache_bytes", "gemm_flops", "attention_flops", "elementwise_bytes", "collective_s", "dispatch_s", "grouped_flops",
    "sequences",
)  # fmt: skip
"""Work of a prompt's own tokens. Weights, collectives and layers are those of a step, which prompts share."""


LEAST = 1e-9
"""Requests by a step of an empty server."""
ROUNDS = 20  # of a fixed point, each of which is nearer by half


def prompt_work(of: Served, load: RequestLoad, batch_tokens: int) -> StepWork:
    """Work of one prompt, which shares its steps with as many others as these have room for.

    Its tokens attend to each other and to the prefix that the cache holds, which is read once. What grows with tokens
    is one prompt's; weights, collectives and layers are those of a whole step.
    """
    tokens, held = load.computed_tokens, load.input_tokens - load.computed_tokens
    count = max(1.0, batch_tokens / tokens)
    context = held + tokens * (1 + load.input_spread**2) / 2
    step = step_work(of, sequences=count, tokens=tokens, context=context, decoding=False, prefix=held)
    return replace(step, **{name: getattr(step, name) / count for name in OF_ONE_PROMPT})


@dataclass(frozen=True, kw_only=True)
class Steady(Table):
    """Steady state of a server. Seconds; tokens/s of all replicas together."""

    step: StepSeconds
    prompt: StepSeconds
    in_flight: Array  # requests that have a place, on all replicas; x output tokens = rate x request_s
    request_s: Array
    itl_s: Array  # mean over the gaps of a request: (end-to-end - TTFT) / (output tokens - 1)
    ttft_s: Array
    batch_s: Array  # a batch of requests that start together, until the last token
    output_tokens_per_s: Array
    total_tokens_per_s: Array


def steady(work: RequestWork, rates: ServingRates) -> Steady:
    """Latencies and rates of the steady state."""
    step = step_seconds(work.decode, rates)
    batch, decode_s = work.sequences, work.steps * step.total
    shared = np.maximum(batch, 1.0)  # below one request in flight, a request has the server to itself
    busy = np.clip(batch - 1, 0.0, 1.0)  # those that are alone wait for no step
    ahead_s = started_ahead_s(work, step.total)
    at_once, mean_s, left_s = groups_at_work(work, rates, step)
    num_steps = np.maximum(work.token_steps / at_once, np.minimum(work.prompt_steps, 1 / at_once))
    decoded = decoded_of(step, work.prompt, rates, work.mixes * (work.steps > 0) * busy)
    prompt = prefill_seconds(
        work.prompt, rates, num_steps, uneven=uneven(work, at_once),
        eager_s=eager_s(work, rates, num_steps, ahead_s=ahead_s), decoded=decoded,
    )  # fmt: skip
    in_step = work.cohort > 0
    together = np.maximum(work.cohort, 1.0)
    # the experts of its step also compute the prompts of other attention groups
    own_s = prefill_steps_s(work, rates, np.where(in_step, together, at_once), ahead_s=np.where(in_step, 0.0, ahead_s))
    others_s = np.where(in_step, own_s, prompt.total)
    again_s = shared / work.stages * work.recomputed * prompt.total
    # of all prompts of a round, those on other attention groups are computed with the own one
    others = np.maximum(shared / together / work.stages - np.where(in_step, 1.0, at_once), 0.0)
    others_s = others * others_s
    found_at_work = np.where(in_step, 0.5 * (shared > together), 0.5 * busy) * (work.steps > 0)
    outside = outside_s(work, rates) + (work.waited_steps * busy + found_at_work) * step.total
    request_s = outside + decode_s + own_s + others_s + again_s
    rate = work.replicas * batch * work.output_tokens / request_s
    gaps = work.output_tokens - 1
    several = gaps > 0
    busy_s = others_s / request_s
    mean_s = np.where(work.groups > 1, mean_s, step.total / (1 - busy_s))
    left_s = np.where(work.groups > 1, left_s, left_of_step_s(mean_s, prompt.total / work.stages, busy_s))
    queue_s = left_s - step.total / 2 + work.waited_steps * (mean_s - step.total)
    first_token_s = outside + own_s + np.where(in_step, 0.0, np.minimum(queue_s * busy, others_s))
    itl_s = (request_s - first_token_s) / (gaps + (1 - several)) * several
    full = np.clip(1 / work.token_steps, 1.0, shared)  # prompts of the first round's steps, which end together
    first_s = (shared / full + 1) / 2 * prefill_steps_s(work, rates, full) / work.stages - own_s
    first_s = np.maximum(first_s + (shared - 1) / 2 * work.input_tokens * rates.token_s, 0.0)
    begun_s = np.where(in_step | (work.rounds == 0), 0.0, first_s / np.maximum(work.rounds, 1.0))
    return Steady(
        step=step, prompt=prompt, in_flight=work.replicas * batch, request_s=request_s, itl_s=itl_s,
        ttft_s=np.where(several, first_token_s + begun_s, request_s) + (work.waiting - 1) * request_s,
        batch_s=request_s, output_tokens_per_s=rate,
        total_tokens_per_s=rate * (work.input_tokens + work.output_tokens) / work.output_tokens,
    )  # fmt: skip


def groups_at_work(work: RequestWork, rates: ServingRates, step: StepSeconds) -> tuple[Array, Array, Array]:
    """Attention groups that compute prompts in a step with any, a mean; seconds of a step, and of what a request finds.

    Prompts begin by chance, more of them during a long step than during a short one: a step has some with 1 - e^-n of
    the n that come during the one before it, which had some itself in a share q of the steps. A step with one
    prompt takes as long as a step with a prompt on each group.
    """
    if np.all(work.groups == 1):
        return np.ones_like(work.groups), step.total, step.total / 2
    added_s = prefill_steps_s(work, rates, 1.0, decoded=decoded_of(step, work.prompt, rates, work.mixes))
    share = -np.expm1(-work.begun)
    for _ in range(ROUNDS):
        each_s = work.begun / (step.total + share * added_s)  # prompts per second
        after_long, after_short = -np.expm1(-each_s * (step.total + added_s)), -np.expm1(-each_s * step.total)
        share = (share + after_short / (1 - after_long + after_short)) / 2  # half the way: it swings
    mean_s = step.total + share * added_s
    left_s = (mean_s + share * (1 - share) * added_s**2 / mean_s) / 2
    return np.clip(work.begun / share + work.begun * work.balanced_steps, 1.0, work.groups), mean_s, left_s


def left_of_step_s(mean_s: Array, prompt_s: Array, busy: Array) -> Array:
    """Seconds of the step that a request finds and of the prompts that come meanwhile, which its own step computes.

    Prompts take the share `busy` of the time. A Poisson number of them, of prompt_s each, is in a step of the mean S,
    so its variance is prompt_s busy S / (1 - busy^2), and what is left of it (S + variance / S) / 2.
    """
    return (mean_s + prompt_s * busy / (1 - busy**2)) / 2 * (1 + 2 * busy)


def started_ahead_s(work: RequestWork, step_s: Array) -> Array:
    """Seconds in which the kernels of a step with prompts are started while one without them runs, a mean.

    Replicas that only prefill wait for no step, and have none to start kernels in.
    """
    often = np.clip((work.sequences - 1) / np.maximum(work.steps, 1.0) * work.prompt_steps, 0.0, 1.0)  # steps with them
    overlapped = work.prompt.is_overlapped * (work.waited_steps > 0)
    return overlapped * np.clip(work.sequences - 1, 0.0, 1.0) * (1 - often) * step_s


def prefill_steps_s(
    work: RequestWork, rates: ServingRates, count: Array, *, decoded: Decoded = NOTHING, ahead_s: Array = 0.0,
    together: Array | None = None,
) -> Array:  # fmt: skip
    """Seconds of the steps of `count` prompts on all attention groups, or what they add to steps that decode.

    together: `count` over the prompts of the fullest group, where these are not whole ones.
    """
    more = uneven(work, np.maximum(count, 1.0) if together is None else together)
    num_steps = np.ceil(count / (work.groups / more) * work.token_steps - ROUNDING)
    host_s = eager_s(work, rates, num_steps, ahead_s=ahead_s)
    return prefill_seconds(
        work.prompt, rates, num_steps, count=count, uneven=more, eager_s=host_s, decoded=decoded
    ).total


def uneven(work: RequestWork, at_once: Array) -> Array:
    """Prompts of the fullest attention group over the mean of all, where `at_once` of them have some."""
    return work.groups / np.minimum(np.maximum(at_once, 1.0), work.groups)


def eager_s(work: RequestWork, rates: ServingRates, num_steps: Array, *, ahead_s: Array = 0.0) -> Array:
    """Seconds in which the host starts the kernels of the steps of prompts, `ahead_s` of them before these."""
    is_graph = (
        work.token_steps <= work.graph_share
    )  # of a step with one prompt: by more, rates would fall with the load
    started = (is_graph * work.cut_kernels + (1.0 - is_graph) * work.eager_kernels) * rates.eager_kernel_s
    return np.maximum(num_steps * started - np.minimum(num_steps, 1.0) * ahead_s, 0.0)


def outside_s(work: RequestWork, rates: ServingRates) -> Array:
    """Seconds of a request outside of all steps."""
    return rates.request_s + work.input_tokens * rates.token_s
