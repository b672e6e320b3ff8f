"""Bound of the distance between two evaluations of one computation that add the same numbers in another order.

Libraries choose the order of a sum by the processor, so what a comparison allows must follow from the format and the
length of the sums, and not from what one machine printed.

**One sum.** A sum of n products, computed in any order, is the exact sum of products that are changed by factors 1 + δ,
where δ adds up at most n rounding errors of at most u, half the distance from 1 to the next number of the format. Taken
as independent and with mean zero, they add up in mean squares: |δ| ≤ λ √n u but for a probability of 2 exp(-λ²/2)
(Higham and Mary 2019, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5)),
where the deterministic bound has n for λ √n. The mean square of δ is at most n u²/3, as a rounding error is
spread evenly over ±u.

**Many sums, one after the other.** So each GEMM is an exact one with other factors, and a result computed in fp32 is
the exact result of weights that are changed by factors 1 + δ. How far that moves the result is a property of the
computation. `assert_equals` measures it: it changes all weights at once by factors 1 ± `STEP` with random signs, and
scales the norm of the change by √(n/3) u / `STEP`. `STEP` is small, so that results move in proportion, and large
against u. The smallest of `NUM_DRAWS` draws counts, as a router may choose another expert in one. The result may be a
sum that has no weights, as a loss is, so its own norm is added. Two evaluations with independent errors are √2 as far
apart. `CONFIDENCE` is three standard deviations, and a norm over many sums stays below.

**Results in a narrower format.** Where GEMMs sum in fp32 and their results are rounded to bf16, a rounding is a factor
1 + δ of what a product gives to the next one. It is as large as bf16's error, and there are as many as roundings follow
one another from product to product. A change of weights by `STEP` is lost in bf16, so `assert_rounded` changes those of
the same computation in fp32. The largest of the draws counts: bf16 chooses other experts anyway.

**Results that jump.** Where a computation takes signs, or rounds to few bits on the way, a small change of weights
moves a few values by a whole step, and not all values in proportion. A larger change moves more of them. So with
`jumps` the whole movement by `STEP` counts, which is larger than the errors of the sums: `CONFIDENCE` times the largest
draw.

**Numbers that fall, rounded at random.** A number x of a format with steps of at most g is multiplied by b < 1 and
rounded up with the probability of the distance, T times. The mean is exact: b^T x. The first product lies (1 - b) x
below a number of the format. If that is a share f of the step, the result varies by g² f (1 - f) ≤ g (1 - b) x, and by
g (1 - b) b^t x after t steps. The T - 1 - t products that follow multiply this by b² each, and roundings are
independent, so the variances add up to

    g (1 - b) x Σ b^t b^(2 (T - 1 - t)) = g x b^(T - 1) (1 - b^T),  t from 0 to T - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

CONFIDENCE = 3.0
STEP = 2.0**-17
NUM_DRAWS = 2


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding a number to `dtype`.

    >>> unit_roundoff(torch.float32) == 2**-24, unit_roundoff(torch.bfloat16) == 2**-8
    (True, True)
    """
    return torch.finfo(dtype).eps / 2


def from_exact(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Return how far a sum of `terms` may lie from the exact one, relative to the norm of its terms.

    >>> round(from_exact(300) / 2**-24)
    30
    """
    return CONFIDENCE * (terms / 3) ** 0.5 * unit_roundoff(dtype)


def difference(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """Return how far two orders of a sum of `terms` may lie apart, relative to the norm of its terms.

    >>> round(difference(150) / 2**-24)
    30
    """
    return 2**0.5 * from_exact(terms, dtype)


def of_falling(numbers: Tensor, *, factor: float, times: int, step: Tensor) -> float:
    """Return how far the sum of `numbers` may lie from its mean after `times` products with `factor`.

    Each product is rounded at random. `step` is the largest step of the format at each number.
    """
    variances = step * numbers * factor ** (times - 1) * (1 - factor**times)
    return CONFIDENCE * float(variances.double().sum()) ** 0.5


Results = Mapping[str, Tensor]


def assert_equals(
    compute: Callable[[], Results],
    expected: Results,
    *,
    weights: Iterable[Tensor],
    terms: int,
    dtype: torch.dtype = torch.float32,
    jumps: bool = False,
) -> None:
    """Compare what `compute` returns with another evaluation of the same.

    `compute` reads `weights`, which are changed meanwhile; `terms` is the length of its longest sum. `jumps`: it takes
    signs, or rounds to few bits on the way.
    """
    got = {name: tensor.detach().clone() for name, tensor in compute().items()}
    by_draw = _moved(compute, got, list(weights))
    of_sums = difference(terms, dtype)
    assert of_sums < STEP or not jumps
    moved = {name: max(norms) if jumps else min(norms) for name, norms in by_draw.items()}
    _compare(got, expected, moved, of_weights=CONFIDENCE * STEP if jumps else of_sums, of_result=of_sums)


def assert_rounded(
    got: Results,
    expected: Results,
    *,
    wide: Callable[[], Results],
    weights: Iterable[Tensor],
    terms: int,
    roundings: int,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Compare two evaluations that sum in fp32 and round to `dtype` what one product gives to the next.

    `wide` evaluates the same in fp32 with `weights`. At most `roundings` follow one another from product to product.
    The results themselves are in fp32.
    """
    at_rest = {name: tensor.detach().clone() for name, tensor in wide().items()}
    moved = {name: max(norms) for name, norms in _moved(wide, at_rest, list(weights)).items()}
    of_weights = difference(terms) + difference(roundings, dtype)
    _compare(got, expected, moved, of_weights=of_weights, of_result=difference(terms))


@torch.no_grad()
def _moved(compute: Callable[[], Results], at_rest: Results, weights: Sequence[Tensor]) -> dict[str, list[float]]:
    """Return by how much changed weights move each result: the norm in each draw."""
    before = [weight.detach().clone() for weight in weights]
    generator = torch.Generator().manual_seed(0)
    moved: dict[str, list[float]] = {name: [] for name in at_rest}
    for _ in range(NUM_DRAWS):
        for weight in weights:
            signs = torch.randint(2, weight.shape, generator=generator) * 2 - 1
            weight.mul_(1 + STEP * signs)
        with torch.enable_grad():
            found = compute()
        for name, tensor in found.items():
            moved[name].append(float((tensor.detach().double() - at_rest[name].double()).norm()))
        for weight, kept in zip(weights, before, strict=True):
            weight.copy_(kept)
    return moved


def _compare(
    got: Results, expected: Results, moved: Mapping[str, float], *, of_weights: float, of_result: float
) -> None:
    """Compare by norms: weights that are changed by `of_weights` move a result, and its own sum has `of_result`."""
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        wanted = expected[name].detach().double()
        assert tensor.shape == wanted.shape, name
        distance = float((tensor.detach().double() - wanted).norm())
        _within(name, distance, of_weights * moved[name] / STEP + of_result * float(wanted.norm()))


def _within(name: str, distance: float, limit: float) -> None:
    assert distance <= limit, f"{name}: apart by {distance:.2e}, rounding moves it by {limit:.2e} at most"
