"""The feed-forward block in 8 bits: the bits of three layers and an activation, and what it keeps."""

from functools import partial

import pytest

torch = pytest.importorskip("torch")
from tests.kernel_cases import aligned_rows, demanding, drawn, gathered, needs_interpreter, relative_error, spread

from meshwright.kernels.fp8.feed_forward import MATRICES, Fp8Block, fp8_feed_forward
from meshwright.kernels.fp8.layer import RECIPES, Fp8State, fp8_grouped_linear, fp8_linear
from meshwright.kernels.gated_activation import KINDS, gated_activation
from meshwright.kernels.stored_activations import StoredFormat, storing_activations

COUNTS = (3, 0, 70, 5)
ROWS, HIDDEN, WIDTH = 78, 96, 80


def states(recipe, **options):
    return {name: Fp8State(RECIPES[recipe], **options) for name in MATRICES}


def tensors_of(*, num_experts=0, biased=False, dtype=torch.bfloat16):
    """Rows, three matrices, two biases or none, and the gradient of the result."""
    stack = (num_experts,) if num_experts else ()
    made = [drawn(ROWS, HIDDEN, dtype=dtype, seed=1)]
    for seed, shape in enumerate([(WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)]):
        made.append(drawn(*stack, *shape, dtype=dtype, seed=seed + 2, scale=shape[1] ** -0.5))
    if biased:
        made += [drawn(*stack, WIDTH, dtype=dtype, seed=seed) for seed in (7, 8)]
    return made, drawn(ROWS, HIDDEN, dtype=dtype, seed=9)


def fused(x, gate, up, down, *biases, of, kind="silu", **options):
    aligned = aligned_rows(COUNTS) if gate.dim() == 3 else None
    block = Fp8Block(kind=kind, states=of, aligned=aligned, **options)
    named = dict(zip(("gate_bias", "up_bias"), biases, strict=False))
    if aligned is None:
        return fp8_feed_forward(x, gate, up, down, block=block)
    out = fp8_feed_forward(spread(x, aligned), gate, up, down, block=block, **named)
    return gathered(out, aligned)


def apart(x, gate, up, down, *biases, of, kind="silu"):
    """Three layers with the activation between them."""
    if gate.dim() == 2:
        times = [partial(fp8_linear, weight_NK=w, state=of[n]) for n, w in zip(MATRICES, (gate, up, down), strict=True)]
        return times[2](gated_activation(times[0](x), times[1](x), kind=kind))
    aligned = aligned_rows(COUNTS)
    gate, up, down = (
        partial(fp8_grouped_linear, weight_ENK=w, counts_E=aligned.counts_E, state=of[n])
        for n, w in zip(MATRICES, (gate, up, down), strict=True)
    )
    x = spread(x, aligned)
    hidden = [layer(x) for layer in (gate, up)]
    if biases:
        hidden = [out + aligned.of_rows(bias) for out, bias in zip(hidden, biases, strict=True)]
    return gathered(down(gated_activation(*hidden, kind=kind)), aligned)


def results(make, tensors, grad, **options):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = make(*leaves, **options)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("num_experts", [0, len(COUNTS)], ids=["dense", "experts"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bits_of_three_layers_and_the_activation(recipe, num_experts):
    tensors, grad = tensors_of(num_experts=num_experts)
    mine, theirs = states(recipe), states(recipe)
    for step in range(2):  # of delayed scaling the second step has a history
        want = results(apart, tensors, grad, of=theirs)
        found = results(fused, tensors, grad, of=mine, drops_hidden=step == 1)
        for a, b in zip(found, want, strict=True):
            assert torch.equal(a, b)
        for of in (mine, theirs):
            for state in of.values():
                state.end_step()
        tensors[0] = tensors[0] * 4
    if RECIPES[recipe].history:
        for name in MATRICES:
            assert torch.equal(mine[name].amax_history_3H, theirs[name].amax_history_3H)
            assert mine[name].amax_history_3H[:, :2].all()


@pytest.mark.parametrize("kind", KINDS)
def test_biases_of_experts(kind):
    tensors, grad = tensors_of(num_experts=len(COUNTS), biased=True)
    found = results(fused, tensors, grad, of=states("fp8_blockwise"), kind=kind)
    want = results(apart, tensors, grad, of=states("fp8_blockwise"), kind=kind)
    for mine, other in zip(found[:5], want[:5], strict=True):
        assert torch.equal(mine, other)
    for mine, other in zip(found[5:], want[5:], strict=True):
        assert not mine[1].any()  # the expert without a row
        assert relative_error(mine, other) < 0.02  # theirs is summed in bf16


def kernels_equal_the_reference(recipe, num_experts, *ops):
    tensors, grad = tensors_of(num_experts=num_experts, biased=num_experts > 0, dtype=torch.float32)
    want = results(fused, tensors, grad, of=states(recipe), kind="clamped")
    with demanding(**dict.fromkeys(ops, "triton")):
        found = results(fused, tensors, grad, of=states(recipe), kind="clamped")
    for mine, other in zip(found, want, strict=True):
        # sums of another order may round a value to its neighbour of 8 bits
        assert relative_error(mine, other) < 2e-3


@needs_interpreter
@pytest.mark.parametrize(
    "recipe", [pytest.param("fp8_delayed", marks=pytest.mark.when_touched), "fp8_blockwise"]
)  # dense matrices have delayed scales below
def test_kernels_between_the_matrices_of_experts(recipe):
    kernels_equal_the_reference(recipe, len(COUNTS), "fp8_gated_cast", "fp8_gated_gradients")


@needs_interpreter
@pytest.mark.parametrize(
    "num_experts", [pytest.param(0, id="dense"), pytest.param(len(COUNTS), id="experts", marks=pytest.mark.slow)]
)  # of experts the test above leaves the other operations to the reference
@pytest.mark.parametrize(
    "recipe",
    [
        "fp8_delayed",
        *(pytest.param(r, marks=pytest.mark.when_touched) for r in ("fp8_rowwise", "fp8_blockwise", "mxfp8")),
    ],
)  # test_layer.py has the kernels of these recipes
def test_kernels_equal_the_reference(recipe, num_experts):
    gemm = "fp8_grouped_gemm" if num_experts else "fp8_gemm"
    kernels_equal_the_reference(recipe, num_experts, "fp8_cast", "fp8_gated_cast", "fp8_gated_gradients", gemm)


def kept_bytes(make, **options):
    """Bytes that autograd keeps of the block, but not its inputs."""
    tensors, _ = tensors_of()
    leaves = [t.requires_grad_() for t in tensors]
    own = {t.data_ptr() for t in leaves}
    found = {}

    def pack(t):
        if t.data_ptr() not in own:
            found[t.data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = make(*leaves, of=states("fp8"), **options)
    assert out.requires_grad
    return sum(t.nbytes for t in found.values())


def test_what_is_kept_for_the_backward_pass():
    scale = 4
    x, hidden = ROWS * HIDDEN + scale, ROWS * WIDTH + scale
    assert kept_bytes(fused) == x + 2 * 2 * ROWS * WIDTH + hidden
    assert kept_bytes(fused, drops_hidden=True) == x + 2 * 2 * ROWS * WIDTH
    # three layers keep the cast input twice, and the reference of the activation f(gate)
    assert kept_bytes(apart) == 2 * x + 3 * 2 * ROWS * WIDTH + hidden


def test_stored_activations_keep_gate_and_up_in_8_bits():
    tensors, grad = tensors_of()
    want = results(fused, tensors, grad, of=states("fp8_blockwise"))
    with storing_activations(format=StoredFormat.E4M3):
        found = results(fused, tensors, grad, of=states("fp8_blockwise"))
    assert torch.equal(found[0], want[0])
    assert torch.equal(found[4], want[4])  # the hidden values were cast before
    assert 0.01 < relative_error(found[2], want[2]) < 0.1


@pytest.mark.parametrize("trained", ["x", *MATRICES])
def test_one_gradient_alone(trained):
    tensors, grad = tensors_of()
    want = dict(zip(("out", "x", *MATRICES), results(fused, tensors, grad, of=states("mxfp8")), strict=True))
    leaves = dict(zip(("x", *MATRICES), (t.detach().clone() for t in tensors), strict=True))
    leaves[trained].requires_grad_()
    fused(*leaves.values(), of=states("mxfp8")).backward(grad)
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, want[name]) if name == trained else leaf.grad is None


def test_no_rows_and_evaluation():
    tensors, _ = tensors_of()
    of = states("fp8_delayed")
    with torch.no_grad():
        assert fused(tensors[0][:0], *tensors[1:], of=of).shape == (0, HIDDEN)
        fused(*tensors, of=of)
    assert all(not state.amax_3.any() for state in of.values())  # it joins no history
