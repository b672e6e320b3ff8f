"""The optimizer: learning rates of every schedule, and steps equal to PyTorch's AdamW."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from weakref import ref

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.rounding import difference, unit_roundoff
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.kernels.adamw import clip_scale
from meshwright.specs.run import DecayShape, LearningRateSchedule, Optimizer, StateFormat
from meshwright.training.masters import masters_of
from meshwright.training.optimizer import MasterOptimizer, learning_rate

FALLING = (LearningRateSchedule.COSINE, LearningRateSchedule.LINEAR, LearningRateSchedule.WSD)
MONOTONE = tuple(s for s in LearningRateSchedule if s is not LearningRateSchedule.COSINE_WITH_RESTARTS)
LARGEST_SLOPE = {  # of the fall, over the slope of a line through the same number of steps
    DecayShape.COSINE: lambda steps: math.pi / 2,
    DecayShape.LINEAR: lambda steps: 1.0,
    DecayShape.SQRT: math.sqrt,
    DecayShape.EXPONENTIAL: lambda steps: 2 * math.log(2),
}
ROUNDING = unit_roundoff(torch.float64)
"""Largest relative error of one operation with Python's numbers."""


@st.composite
def runs(draw, schedules=MONOTONE):
    """Settings and the number of steps."""
    num_steps = draw(st.integers(2, 400))
    settings_ = Optimizer(
        learning_rate=draw(st.floats(1e-6, 1e2)),
        schedule=draw(st.sampled_from(schedules)),
        warmup_steps=draw(st.integers(0, num_steps - 1)),
        final_ratio=draw(st.floats(0, 1)),
        decay_ratio=draw(st.floats(0.01, 1)),
        decay_shape=draw(st.sampled_from(tuple(DecayShape))),
    )
    return settings_, num_steps


def rates_of(settings_, num_steps):
    return [learning_rate(settings_, step=i, num_steps=num_steps) for i in range(num_steps)]


@given(runs())
def test_the_rate_rises_linearly_to_the_peak_and_never_again(case):
    s, num_steps = case
    rates = rates_of(s, num_steps)
    warm_up = [s.learning_rate * (i + 1) / s.warmup_steps for i in range(s.warmup_steps)]
    assert rates[: s.warmup_steps] == warm_up
    # the warm-up ends with a product and a quotient, each rounded: on either side of the peak
    peak = s.learning_rate * (1 + 2 * ROUNDING)
    assert max(rates) <= peak
    after = rates[s.warmup_steps :]
    assert all(rate <= s.learning_rate for rate in after)
    assert all(b <= a for a, b in pairwise(after))


@given(runs(FALLING))
def test_the_last_step_has_the_final_rate(case):
    s, num_steps = case
    # two differences of numbers up to one, their product with the peak, and the product here
    limit = 4 * ROUNDING * s.learning_rate
    assert abs(rates_of(s, num_steps)[-1] - s.learning_rate * s.final_ratio) <= limit


@pytest.mark.parametrize(
    ("theirs", "arguments", "ours"),
    [
        ("linear", {}, {}),
        ("cosine", {}, {}),
        ("cosine_with_restarts", {"num_cycles": 3}, {"cycles": 3}),
        ("polynomial", {"power": 2.5, "lr_end": 0.05}, {"power": 2.5, "final_ratio": 0.1}),
        ("inverse_sqrt", {}, {}),
    ],
)
@given(warmup=st.integers(1, 30), later_steps=st.integers(1, 40))
def test_rates_are_those_that_transformers_has_one_step_later(theirs, arguments, ours, warmup, later_steps):
    transformers, num_steps = pytest.importorskip("transformers"), warmup + later_steps
    settings_ = {"learning_rate": 0.5, "warmup_steps": warmup, "final_ratio": 0.0, **ours}
    rates = rates_of(Optimizer(schedule=LearningRateSchedule(theirs), **settings_), num_steps)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    scheduler = transformers.get_scheduler(
        theirs, optimizer, num_warmup_steps=warmup, num_training_steps=num_steps, scheduler_specific_kwargs=arguments
    )
    later = [scheduler.get_last_lr()[0]]
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step()
        later.append(scheduler.get_last_lr()[0])
    assert later[0] == 0.0
    assert rates == pytest.approx(later[1:], rel=1e-12, abs=1e-15)


@given(runs(FALLING))
def test_the_rate_makes_no_jump(case):
    """Not at the end of the warm-up either: no step falls by more than the schedule's steepest."""
    s, num_steps = case
    start = s.warmup_steps
    if s.schedule is LearningRateSchedule.WSD:
        start = max(start, num_steps - max(1, round(s.decay_ratio * num_steps)))
    rates = [s.learning_rate, *rates_of(s, num_steps)[s.warmup_steps :]]
    line = s.learning_rate * (1 - s.final_ratio) / max(1, num_steps - start)
    steepest = max(a - b for a, b in pairwise(rates))
    # Each rate is off by 7 roundings of the peak at most: the elapsed share and its product with π, times π / 2 as the
    # cosine falls; the cosine, 1 less it, 1 less the fall, the product. So is a fall by 14, and the line by 4.
    shape = s.decay_shape if s.schedule is LearningRateSchedule.WSD else DecayShape(s.schedule.value)
    largest = LARGEST_SLOPE[shape](max(1, num_steps - start))
    assert steepest <= line * largest + 18 * ROUNDING * s.learning_rate


@pytest.mark.parametrize("shape", [DecayShape.LINEAR, DecayShape.COSINE, DecayShape.SQRT])
def test_decays_are_those_of_transformers(shape):
    transformers = pytest.importorskip("transformers")
    wsd = Optimizer(
        learning_rate=0.5, warmup_steps=2, final_ratio=0.1, schedule=LearningRateSchedule.WSD, decay_ratio=0.5,
        decay_shape=shape,
    )  # fmt: skip
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    theirs = transformers.get_wsd_schedule(
        optimizer, num_warmup_steps=2, num_decay_steps=5, num_training_steps=10, min_lr_ratio=0.1,
        decay_type="1-sqrt" if shape is DecayShape.SQRT else shape.value,
    )  # fmt: skip
    later = []
    for _ in range(11):
        later.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert rates_of(wsd, 10)[2:] == pytest.approx(later[3:], rel=1e-12)  # its warm-up begins at the last rate


def test_the_exponential_decay_is_that_of_megatron():
    """2 · 0.5^x - 1 of the fall is left (megatron/core/optimizer_param_scheduler.py)."""
    wsd = Optimizer(
        learning_rate=1.0, final_ratio=0.0, schedule=LearningRateSchedule.WSD, decay_ratio=0.4,
        decay_shape=DecayShape.EXPONENTIAL,
    )  # fmt: skip
    left = [2 * 0.5 ** (i / 4) - 1 for i in range(1, 5)]
    assert rates_of(wsd, 10)[6:] == pytest.approx(left, rel=1e-12)


@given(runs((LearningRateSchedule.WSD, LearningRateSchedule.CONSTANT)))
def test_the_plateau_is_the_peak(case):
    s, num_steps = case
    is_constant = s.schedule is LearningRateSchedule.CONSTANT
    end = num_steps if is_constant else num_steps - max(1, round(s.decay_ratio * num_steps))
    assert all(rate == s.learning_rate for rate in rates_of(s, num_steps)[s.warmup_steps : end])


@pytest.mark.parametrize("schedule", LearningRateSchedule)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_equal_those_of_adamw(schedule, weight_decay):
    """Bit for bit, on the same gradients. Decay is decoupled: it follows the rate of the schedule and not the gradient.
    Vectors have none."""
    torch.manual_seed(0)
    settings_ = Optimizer(
        learning_rate=1e-2, schedule=schedule, warmup_steps=3, weight_decay=weight_decay, gradient_clip=None
    )
    mine = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    theirs = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    theirs.load_state_dict(mine.state_dict())
    optimizer = MasterOptimizer(masters_of([mine], compute=torch.float32), settings=settings_, is_single_process=True)
    matrices = [p for p in theirs.parameters() if p.ndim > 1]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.0, betas=settings_.betas, eps=settings_.epsilon, fused=True,
    )  # fmt: skip
    for step in range(12):
        mine(torch.randn(5, 8)).square().sum().backward()
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            b.grad = a.grad.clone()
        rate = learning_rate(settings_, step=step, num_steps=12)
        for group in reference.param_groups:
            group["lr"] = rate
        optimizer.step(learning_rate=rate)
        reference.step()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("factors", [{"embedding": 0.1, "head": 3.0}, {"lora_b": 16.0}, {"head": 2.0, "vectors": 0.5}])
def test_groups_have_rates_of_their_own(factors):
    """As groups of PyTorch's AdamW; decay follows the rate of its group. The head's bias has the head's rate."""

    def build():
        torch.manual_seed(0)
        layer = torch.nn.ModuleDict({"lora_b": torch.nn.Linear(8, 8, bias=False), "norm": torch.nn.LayerNorm(8)})
        parts = {"embedding": torch.nn.Linear(8, 8, bias=False), "layer": layer, "head": torch.nn.Linear(8, 4)}
        return torch.nn.ModuleDict(parts)

    def outputs(model):
        hidden = model["layer"]["norm"](model["layer"]["lora_b"](model["embedding"](torch.ones(2, 8))))
        return model["head"](hidden).square().sum()

    groups = {"embedding.weight": "embedding", "layer.lora_b.weight": "lora_b", "layer.norm.weight": "vectors",
              "layer.norm.bias": "vectors", "head.weight": "head", "head.bias": "head"}  # fmt: skip
    settings_ = Optimizer(rate_factors=factors, gradient_clip=None, weight_decay=0.1)
    mine, theirs = build(), build()
    optimizer = MasterOptimizer(masters_of([mine], compute=torch.float32), settings=settings_, is_single_process=True)
    reference = torch.optim.AdamW(
        [
            {"params": [p], "weight_decay": 0.1 * (p.ndim > 1), "lr": 1e-2 * factors.get(groups[name], 1.0)}
            for name, p in theirs.named_parameters()
        ],
        betas=settings_.betas, eps=settings_.epsilon, fused=True,
    )  # fmt: skip
    for _ in range(4):
        outputs(mine).backward()
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            b.grad = a.grad.clone()
        optimizer.step(learning_rate=1e-2)
        reference.step()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


SIZES_OF_GRADIENTS = (0.2, 40.0, 0.5, 40.0)
"""Factors of gradients whose norm is about one: the two of 40 are clipped, alike."""
NUM_VALUES = 914
CLIPPED = 1 / 64
"""The scale of clipping: a power of two, so that no product with it is rounded."""


def masters_after(settings_, *, scales):
    """Norms that `step` returned, the same in float64, and the masters: after a step with each of `scales`, times a
    gradient of about one. Steps of one size have one gradient."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 70), torch.nn.Linear(70, 4))
    masters = masters_of([model], compute=torch.float32)
    optimizer = MasterOptimizer(masters, settings=settings_, is_single_process=True, seed=3)
    norms, exact = [], []
    for size, scale in zip(SIZES_OF_GRADIENTS, scales, strict=True):
        generator = torch.Generator().manual_seed(SIZES_OF_GRADIENTS.index(size))
        for master in masters:
            drawn = torch.randn(master.parameter.shape, generator=generator)
            master.parameter.grad = drawn * (scale / NUM_VALUES**0.5)
        exact.append(float(torch.cat([m.parameter.grad.flatten() for m in masters]).double().norm()))
        norms.append(optimizer.step(learning_rate=1e-2))
    return norms, exact, [m.local.clone() for m in masters]


@pytest.mark.parametrize(
    "settings_",
    [
        Optimizer(),
        Optimizer(states=StateFormat.BF16),
        Optimizer(states=StateFormat.INT8),
        Optimizer(name="lion"),
        Optimizer(name="muon"),
        pytest.param(Optimizer(name="adamw8bit"), marks=pytest.mark.slow),
    ],
    ids=["adamw", "bf16 states", "int8 states", "lion", "muon", "adamw8bit"],
)
def test_a_clipped_step_is_one_of_a_smaller_gradient(settings_):
    """Bit for bit. AdamW divides by a root of mean squares: where some steps are clipped, both states show the scale.

    The limit makes the scale `CLIPPED`, so a clipped gradient has no rounding error, which a state in a byte would turn
    into another byte.
    """
    unlimited = replace(settings_, gradient_clip=None)
    norms, exact, whole = masters_after(unlimited, scales=SIZES_OF_GRADIENTS)
    assert norms == pytest.approx(exact, rel=difference(NUM_VALUES), abs=0.0)
    assert norms[1] == norms[3] == max(norms)
    limit = CLIPPED * norms[1]
    assert max(norms[0], norms[2]) < limit
    limit *= CLIPPED / clip_scale(norms[1], limit)  # the scale has a little more than the norm below it
    assert clip_scale(norms[1], limit) == CLIPPED
    before, _, clipped = masters_after(replace(settings_, gradient_clip=limit), scales=SIZES_OF_GRADIENTS)
    assert before == norms
    scales = [scale * (clip_scale(norm, limit) or 1.0) for scale, norm in zip(SIZES_OF_GRADIENTS, norms, strict=True)]
    _, _, smaller = masters_after(unlimited, scales=scales)
    assert all(map(torch.equal, clipped, smaller))
    assert not all(map(torch.equal, clipped, whole))


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_changes_nothing(norm):
    model = torch.nn.Linear(3, 2)
    masters = masters_of([model], compute=torch.float32)
    optimizer = MasterOptimizer(masters, settings=Optimizer(gradient_clip=1.0), is_single_process=True)
    before = [m.local.clone() for m in masters]
    for master in masters:
        master.parameter.grad = torch.full(master.parameter.shape, norm)
    assert not math.isfinite(optimizer.step(learning_rate=1e-2))
    assert all(torch.equal(m.local, b) for m, b in zip(masters, before, strict=True))
    assert all(m.parameter.grad is None for m in masters)


def test_gradients_are_read_once_where_they_are_clipped():
    """One pass for the norm; the update scales what it reads."""
    model = torch.nn.Linear(8, 4)
    masters = masters_of([model], compute=torch.float32)
    optimizer = MasterOptimizer(masters, settings=Optimizer(gradient_clip=0.1), is_single_process=True)
    model(torch.ones(5, 8)).sum().backward()
    addresses = {m.parameter.grad.data_ptr() for m in masters}
    readers = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if any(x.data_ptr() in addresses for x in tensors):
                readers.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    with Reads():
        optimizer.step(learning_rate=1e-2)
    assert [name for name in readers if name != "detach"] == ["_foreach_norm", "_fused_adamw_", "_fused_adamw_"]


@pytest.fixture
def mesh():
    """One process as a mesh: layouts are those of several."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("layout", "expected"), [(Shard(0), Shard(0)), (Replicate(), Partial())], ids=["divided", "whole"]
)
def test_a_gradient_in_parts_is_sharded_as_its_parameter_is(mesh, compute, layout, expected):
    """A gradient that all ranks have stays in parts until the step; an addition to it here reaches the step."""
    module = torch.nn.Linear(4, 8, bias=False)
    weight = distribute_tensor(module.weight.detach(), mesh, [layout])
    module.weight = torch.nn.Parameter(weight)
    (master,) = masters_of([module], compute=compute)
    module.weight.grad = DTensor.from_local(torch.ones(8, 4, dtype=compute), mesh, [Partial()])
    assert master.gradient.placements == (expected,)
    master.gradient.to_local().add_(1.0)
    assert master.gradient.to_local().eq(2.0).all()


def test_biases_of_experts_are_vectors():
    """They are stacked to two dimensions, and have neither weight decay nor an orthogonal update."""
    from tests.tiny_models import MIXTURE

    from meshwright.training.models import build_model
    from meshwright.training.muon import is_hidden_matrix

    biased = replace(MIXTURE, experts=replace(MIXTURE.experts, bias=True))
    masters = masters_of([build_model(biased, device="cpu")], compute=torch.float32)
    stacks = {m.name.rsplit(".", 1)[-1]: m for m in masters if ".experts." in m.name}
    assert {name: m.is_matrix for name, m in stacks.items()} == {
        "gate": True, "up": True, "down": True, "gate_bias": False, "up_bias": False, "down_bias": False,
    }  # fmt: skip
    assert {name: is_hidden_matrix(m.name, m.parameter) for name, m in stacks.items()} == {
        name: m.is_matrix for name, m in stacks.items()
    }


@pytest.mark.when_touched  # it costs nothing but time where it fails
def test_a_training_in_one_process_imports_no_compiler(tmp_path, tiny_text):
    """`torch._dynamo` costs a process 0.6 s and 95 MiB; classes of `torch.optim` and an initialised embedding on the
    meta device import it."""
    (tmp_path / "run.yaml").write_text(tiny_text)
    code = """
import sys
from meshwright.cli import main
code = main.run(["train", "run.yaml", "--out", "out", "--no-measure", "--only-steps"])
sys.exit("it imports the compiler" if "torch._dynamo" in sys.modules else code)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_masters_of_a_model_that_is_gone_are_freed():
    """Autograd holds hooks of parameters where the collector does not look: a circle there stays for good."""
    module = torch.nn.Linear(4, 4)
    masters = masters_of([module], compute=torch.bfloat16)
    module(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert all(m.local.grad is not None for m in masters)  # the hook still adds
    gone = [ref(tensor) for m in masters for tensor in (m.local, m.parameter)]
    del module, masters
    gc.collect()
    assert [tensor() for tensor in gone] == [None] * 4
