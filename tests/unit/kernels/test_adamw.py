"""AdamW and the norm of gradients: kernels in Triton's interpreter against float64, and against the states' formats."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernel_cases import assert_close, counted_traffic, demanding, drawn, needs_interpreter

from meshwright.errors import InputError
from meshwright.kernels.adamw import AdamStates, AdamWStep, adamw, gradient_squares
from meshwright.kernels.dispatch import KernelRouting, using
from meshwright.specs.run import Optimizer, StateFormat
from meshwright.training.optimizer_states import ChunkedAdamW
from meshwright.training.optimizer_updates import FusedAdamW

pytestmark = needs_interpreter
STEP = {"learning_rate": 1e-2, "betas": (0.9, 0.95), "epsilon": 1e-8, "weight_decay": 0.1}
SIZES = st.sampled_from([1, 5, 255, 256, 257, 1500])


def exact_step(p, g, m, v, *, number, scale=1.0):
    """One step in float64, written without this project's functions."""
    rate, (beta1, beta2) = STEP["learning_rate"], STEP["betas"]
    g = g.double() * scale
    m = m + (1 - beta1) * (g - m)
    v = v + (1 - beta2) * (g * g - v)
    update = (m / (1 - beta1**number)) / ((v / (1 - beta2**number)) ** 0.5 + STEP["epsilon"])
    return p - rate * STEP["weight_decay"] * p - rate * update, m, v


@pytest.mark.parametrize("route", ["reference", "fused", "triton"])
@settings(max_examples=8, deadline=None)
@given(size=SIZES, number=st.sampled_from([1, 7]), scale=st.sampled_from([None, 0.25]), seed=st.integers(0, 9))
def test_a_step_with_states_in_fp32(route, size, number, scale, seed):
    p, g, m = (drawn(size, dtype=torch.float32, seed=seed + i) for i in range(3))
    v = drawn(size, dtype=torch.float32, seed=seed + 3).square()
    expected = exact_step(p.double(), g, m.double(), v.double(), number=number, scale=scale or 1.0)
    states = AdamStates(first=m, second=v)
    with demanding(adamw=route):
        adamw(p, g, states, AdamWStep(**STEP, number=number), scale=None if scale is None else torch.tensor(scale))
    for got, wanted in zip((p, m, v), expected, strict=True):
        assert_close(got, wanted, terms=torch.ones(1), factor=2.0)


def test_a_run_that_names_a_route_has_it_for_states_in_fp32_too():
    results = []
    for route in ("fused", "triton", "reference"):
        tensor = drawn(5, 60, dtype=torch.float32)
        update = FusedAdamW([tensor], settings=Optimizer(), weight_decay=0.1)
        with using(KernelRouting(demanded={"adamw": route})) as routing:
            for number in range(3):
                tensor.grad = drawn(5, 60, dtype=torch.float32, seed=number)
                update.step(learning_rate=1e-2)
        assert {choice.route for choice in routing.choices.values()} == {route}
        results.append(tensor)
    assert_close(results[1], results[0], factor=2.0)
    assert_close(results[2], results[0], factor=2.0)


@pytest.mark.parametrize("states", [StateFormat.BF16, StateFormat.INT8], ids=["bf16", "int8"])
def test_narrow_states_follow_the_exact_ones(states):
    """Ten steps of tensors that share a space: masters near fp32's, states as near as their format is."""
    found = {}
    for route in ("reference", "triton"):
        tensors = [drawn(300, dtype=torch.float32), drawn(7, 40, dtype=torch.float32, seed=1)]
        optimizer = ChunkedAdamW(tensors, settings=Optimizer(states=states), weight_decay=0.1, seed=5)
        with demanding(adamw=route):
            for number in range(1, 11):
                for i, tensor in enumerate(tensors):
                    tensor.grad = drawn(*tensor.shape, dtype=torch.float32, seed=100 * i + number)
                optimizer.step(learning_rate=1e-2)
        found[route] = [t.clone() for t in tensors], [s for _, s in optimizer.stored()]
    (by_chunks, its_states), (in_one_pass, own_states) = found["reference"], found["triton"]
    for a, b in zip(by_chunks, in_one_pass, strict=True):
        assert float((a - b).abs().max()) < 2e-2  # two roundings of ten updates of 1e-2
        assert float((a - b).abs().mean()) < 2e-3
    for a, b in zip(its_states, own_states, strict=True):
        for name in a:
            distance = (a[name].float() - b[name].float()).norm() / a[name].float().norm()
            assert distance < (0.02 if states is StateFormat.BF16 else 0.12), name


def test_the_reference_of_states_in_8_bits_is_as_near_as_a_byte_is():
    optimizer = ChunkedAdamW([torch.zeros(300)], settings=Optimizer(states=StateFormat.INT8), weight_decay=0.0, seed=0)
    p, g = torch.zeros(300), drawn(300, dtype=torch.float32)
    zero = torch.zeros(300).double()
    expected = exact_step(p.double(), g, zero, zero, number=1)
    with demanding(adamw="reference"):
        chunk = next(optimizer._chunks())
        adamw(p, g, chunk.states_of(chunk.pieces[0]), AdamWStep(**STEP, number=1))
    ((_, kept),) = optimizer.stored()
    assert_close(p, expected[0])
    assert float((kept["exp_avg"] - expected[1]).norm() / expected[1].norm()) < 0.02
    assert float((kept["exp_avg_sq"] - expected[2]).norm() / expected[2].norm()) < 0.02


def test_stochastic_rounding_keeps_the_mean():
    """Means of many seeds of one value of the second state, between two values of bf16."""
    size = 4096
    gradient = torch.full((size,), 1.0)
    p, m, v = (torch.zeros(size), torch.zeros(size, dtype=torch.bfloat16), torch.ones(size, dtype=torch.bfloat16))
    with demanding(adamw="triton"):
        step = AdamWStep(**STEP | {"betas": (0.9, 0.999)}, number=1, noise=12345)
        adamw(p, gradient * 1.5, AdamStates(first=m, second=v), step)
    expected = 0.999 + 0.001 * 2.25
    assert set(v.float().unique().tolist()) == {1.0, 1.0078125}
    assert float(v.float().mean()) == pytest.approx(expected, abs=4 * 0.0078125 / 2 / size**0.5)


def test_the_same_noise_rounds_alike_and_another_does_not():
    def states(noise):
        p, g = torch.zeros(600), drawn(600, dtype=torch.float32)
        m, v = (torch.zeros(600, dtype=torch.bfloat16) for _ in range(2))
        with demanding(adamw="triton"):
            adamw(p, g, AdamStates(first=m, second=v), AdamWStep(**STEP, number=1, noise=noise))
        return v

    assert torch.equal(states(1), states(1))
    assert not torch.equal(states(1), states(2))


@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 300, 9000]), min_size=1, max_size=3),
    copies=st.lists(st.sampled_from([1, 2]), min_size=3, max_size=3),
)
def test_squares_of_gradients(sizes, copies):
    gradients = [drawn(size, dtype=torch.float32, seed=size) for size in sizes]
    copies = copies[: len(sizes)]
    got = gradient_squares(gradients, copies=copies)
    exact = sum(g.double().square().sum() / count for g, count in zip(gradients, copies, strict=True))
    assert_close(got, exact)


def test_bytes_moved_are_those_of_the_model():
    size = 512
    p, g, m, v = (torch.ones(size) for _ in range(4))
    with demanding(adamw="triton"), counted_traffic() as counted:
        adamw(p, g, AdamStates(first=m, second=v), AdamWStep(**STEP, number=1))
    assert counted.moved_bytes == size * (8 + 4 + 16)


def test_formats_without_a_route_are_refused():
    narrow = AdamStates(first=torch.zeros(4, dtype=torch.bfloat16), second=torch.zeros(4, dtype=torch.bfloat16))
    with demanding(adamw="fused"), pytest.raises(InputError, match="fp32 alone"):
        adamw(torch.ones(4), torch.ones(4), narrow, AdamWStep(**STEP, number=1))
