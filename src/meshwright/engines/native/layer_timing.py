"""A quick measurement of this machine with the run's own code: a model one and two layers deep at full width.

    layer    two layers less one, forward and backward of one micro-batch
    rest     one layer less `layer`: embedding, head and loss
    update   the optimizer's step of the deeper model

The layer's GEMMs and its attention are also timed separately, so that the cost model knows the rest. Every process of
a run measures at the same time, as they will train. Measuring ends with the caller's deadline, between two timed
functions: on a machine that is busy with other programs, one of them may take a hundred times as long.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import log
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.engines.native.assembly import Assembly, assemble
from meshwright.engines.native.parallel.mesh import MeshCoordinates
from meshwright.fitting.kernel_times import CollectiveTime, KernelTimes, shallow_model
from meshwright.kernels.linear import linear
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run
from meshwright.training.device import synchronize
from meshwright.training.models import Transformer
from meshwright.training.models.transformer import Block
from meshwright.training.processes import reduced

DEPTHS = (1, 2)
REPETITIONS = 5
QUARTILES_SD = 1.349
"""Distance of the quartiles of a normal distribution, in standard deviations."""
Times = TypeVar("Times", KernelTimes, CollectiveTime)
COLLECTIVE_BYTES = 2**24
LEAST_SD = 0.02
"""Variation that repetitions in one process miss: memory placement, clock frequency, other processes."""
DISTURBED_SD = 0.25
"""Above this, other programs decide the time of a repetition (its quartiles differ by a factor of two). A step lasts
as long as many repetitions, and so takes their mean."""
FEW_SD = 0.2
"""Of less than three repetitions: the speed of an idle machine from one minute to the next (docs/log.md)."""


@dataclass(frozen=True)
class TimedTask:
    """A timed function, and one that runs before it untimed."""

    run: Callable[[], object]
    before: Callable[[], object] = field(kw_only=True)


def again(run: Callable[[], object]) -> TimedTask:
    """A task that follows itself, as in training: the caches hold its data."""
    return TimedTask(run, before=run)


@dataclass(frozen=True, kw_only=True)
class _Samples:
    """Seconds of every repetition, by what was timed."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def means(self) -> _Samples:
        """The mean repetition of each."""
        return _Samples(seconds={name: [statistics.fmean(values)] for name, values in self.seconds.items()})

    def error_of_mean(self, *names: str) -> float:
        """Of the logarithm of a mean, the worst of `names`: the standard error over the mean."""
        if any(len(self.seconds[name]) < 3 for name in names):
            return FEW_SD
        return max(
            statistics.stdev(self.seconds[n]) / statistics.fmean(self.seconds[n]) / len(self.seconds[n]) ** 0.5
            for n in names
        )

    def sd(self, *names: str) -> float:
        """Of the logarithm of a median, the worst of `names`: the quartiles' distance in normal sds, over root n."""
        spreads = []
        for name in names:
            if len(self.seconds[name]) < 3:
                return FEW_SD
            low, _, high = statistics.quantiles(self.seconds[name], n=4)
            spreads.append(log(high / low) / QUARTILES_SD / len(self.seconds[name]) ** 0.5)
        return max(LEAST_SD, *spreads)


def measure_kernels(run: Run, *, micro_batch: int, device: torch.device, deadline_s: float) -> KernelTimes | None:
    """Time one layer of `run`'s model and what surrounds the layers, on this process's device.

    None if not every function ran once before `deadline_s`, a time of `time.perf_counter`.
    """
    with torch.random.fork_rng():  # random numbers of the run do not depend on this measurement
        return _measure(run, micro_batch=micro_batch, device=device, deadline_s=deadline_s)


def _measure(run: Run, *, micro_batch: int, device: torch.device, deadline_s: float) -> KernelTimes | None:
    parts: dict[int, Assembly] = {}
    for depth in DEPTHS:
        if _is_late(deadline_s):
            return None
        parts[depth] = shallow(run, depth=depth, micro_batch=micro_batch, device=device)
    batch = random_batch(run, micro_batch=micro_batch, device=device)
    module = parts[1].modules[0]
    passes = {depth: passes_of(assembly, batch) for depth, assembly in parts.items()}
    attention = _Attention(module, batch["positions_BT"])
    tasks = {
        "pass 1": again(passes[1]),
        "pass 2": again(passes[2]),
        "update": TimedTask(update_of(parts[2]), before=passes[2]),
        "linear": again(_linears(_plain_linears(module), num_tokens=batch["tokens_BT"].numel())),
        "attention forward": again(attention.forward),
        "attention backward": TimedTask(attention.backward, before=attention.forward),
    }
    if run.model.experts is not None:
        tasks["experts"] = again(_experts(module, run, batch["tokens_BT"].numel()))
    samples = timed(tasks, device, deadline_s=deadline_s)
    if samples is None:
        return None
    sd, fastest_s = samples.sd("pass 1", "pass 2"), min(samples.seconds["pass 2"])
    if sd > DISTURBED_SD:
        sd, samples = max(LEAST_SD, samples.error_of_mean("pass 1", "pass 2")), samples.means()
    layer_s = max(samples.median("pass 2") - samples.median("pass 1"), 0.1 * samples.median("pass 1"))
    return KernelTimes(
        micro_batch=micro_batch,
        linear_s=samples.median("linear"),
        attention_forward_s=samples.median("attention forward"),
        attention_backward_s=samples.median("attention backward"),
        experts_s=samples.median("experts") if "experts" in tasks else None,
        layer_s=layer_s,
        rest_s=max(samples.median("pass 1") - layer_s, 0.0),
        update_s=samples.median("update"),
        update_layers=DEPTHS[1],
        sd=sd,
        on_host=device.type == "cpu",
        slowdown=samples.median("pass 2") / fastest_s,
    )


def measure_collective(device: torch.device, *, deadline_s: float) -> CollectiveTime | None:
    """Time an all-reduce between all processes; every one of them takes part. None as in `measure_kernels`."""
    tensor = torch.ones(COLLECTIVE_BYTES // 4, device=device)
    samples = timed({"all-reduce": again(lambda: dist.all_reduce(tensor))}, device, deadline_s=deadline_s)
    if samples is None:
        return None
    return CollectiveTime(
        size_bytes=COLLECTIVE_BYTES,
        num_devices=dist.get_world_size(),
        seconds=samples.median("all-reduce"),
        sd=samples.sd("all-reduce"),
    )


def max_over_ranks(times: Times) -> Times:
    """The largest time of each kind, and the largest spread, over all processes: a step waits for the last."""
    names = [name for name, value in vars(times).items() if isinstance(value, float)]
    return replace(times, **dict(zip(names, reduced(*(getattr(times, name) for name in names)), strict=True)))


def shallow(run: Run, *, depth: int, micro_batch: int, device: torch.device) -> Assembly:
    """The run's model with `depth` layers, whole on this process's device."""
    train = replace(run.train, preference=None, grpo=None)  # the cost model adds their passes
    small = replace(run, model=shallow_model(run.model, num_layers=depth), global_batch=micro_batch, train=train)
    return assemble(small, coordinates=MeshCoordinates(plan=Plan(micro_batch=micro_batch), device=device))


def random_batch(run: Run, *, micro_batch: int, device: torch.device) -> dict[str, Tensor]:
    """A micro-batch of random tokens, of one document each."""
    shape = (micro_batch, run.sequence_length)
    tokens_BT = torch.randint(run.model.vocab, shape, device=device)
    positions_BT = torch.arange(run.sequence_length, device=device).expand(shape)
    return {"tokens_BT": tokens_BT, "labels_BT": tokens_BT.roll(-1, 1), "positions_BT": positions_BT}


def passes_of(assembly: Assembly, batch: dict[str, Tensor]) -> Callable[[], Tensor]:
    """A forward and a backward pass of `batch`, which returns the loss."""
    scale = 1.0 / batch["tokens_BT"].numel()
    return lambda: assembly.stepper.forward_backward(batch, scale=scale)


def update_of(assembly: Assembly) -> Callable[[], float]:
    """The optimizer's step on the gradients of the passes before it; it frees them and returns their norm."""
    return lambda: assembly.optimizer.step(learning_rate=0.0)


def _plain_linears(module: Transformer) -> list[nn.Linear]:
    """Linear layers of the first layer, without those inside a mixture of experts."""
    layer = next(iter(module.layers.values()))
    within = "attention" if module.model.experts is not None else ""
    return [m for m in layer.get_submodule(within).modules() if isinstance(m, nn.Linear)]


def _linears(linears: Iterable[nn.Linear], *, num_tokens: int) -> Callable[[], object]:
    cases = []
    for layer in linears:
        weight = layer.weight.detach().clone().requires_grad_(layer.weight.requires_grad)
        like = {"dtype": weight.dtype, "device": weight.device}
        x = torch.randn(num_tokens, weight.shape[1], **like).requires_grad_()
        cases.append((x, weight, torch.randn(num_tokens, weight.shape[0], **like)))

    def run() -> None:
        for x, weight, grad in cases:
            x.grad = weight.grad = None
            linear(x, weight).backward(grad)

    return run


class _Attention:
    """Scores and values of the first layer."""

    def __init__(self, module: Transformer, positions_BT: Tensor) -> None:
        layer = next(iter(module.layers.values()))
        assert isinstance(layer, Block)
        self.core = layer.get_submodule("attention.core")
        layout = module.layout(positions_BT, None)
        self.layout = layout.windowed if layer.is_windowed else layout.full
        a, dtype = module.model.attention, next(module.parameters()).dtype

        def random(heads: int, width: int) -> Tensor:
            x = torch.randn(*positions_BT.shape, heads, width, dtype=dtype, device=positions_BT.device)
            return x.requires_grad_()

        heads = a.num_heads if a.kv_lora_rank else a.num_kv_heads
        self.inputs = random(a.num_heads, a.head_dim), random(heads, a.head_dim), random(heads, a.v_dim)

    def forward(self) -> None:
        self.out = self.core(*self.inputs, self.layout)

    def backward(self) -> None:
        self.out.sum().backward()


def _experts(module: Transformer, run: Run, num_tokens: int) -> Callable[[], object]:
    ffn = next(iter(module.layers.values())).get_submodule("ffn")
    weight = next(ffn.parameters())
    x = torch.randn(1, num_tokens, run.model.hidden, dtype=weight.dtype, device=weight.device).requires_grad_()
    return lambda: ffn(x).sum().backward()


def timed(tasks: dict[str, TimedTask], device: torch.device, *, deadline_s: float) -> _Samples | None:
    """Time every task in turn, round after round, so that a disturbance affects all of them.

    The first round counts only for tasks that have no other; it is its own warm-up. None if the
    deadline came within the first round.
    """
    first: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for round_ in range(1 + REPETITIONS):
        for name, task in tasks.items():
            if _is_late(deadline_s):
                return _Samples(seconds={n: seconds[n] or first[n] for n in tasks}) if round_ else None
            if round_ or task.before is not task.run:
                task.before()
            synchronize(device)
            before_s = time.perf_counter()
            task.run()
            synchronize(device)
            elapsed_s = time.perf_counter() - before_s
            if round_:
                seconds[name].append(elapsed_s)
            else:
                first[name] = [elapsed_s]
    return _Samples(seconds=seconds)


def _is_late(deadline_s: float) -> bool:
    """True if the deadline of any process has passed, so that all stop at the same place."""
    return reduced(time.perf_counter() > deadline_s)[0] > 0
