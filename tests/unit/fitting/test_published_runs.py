"""The fit on runs whose truth is known: made by the cost model with offsets of our own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.shipped_rows import shipped_runs

from meshwright.accuracy.predict import predict
from meshwright.accuracy.rows import PublishedRun
from meshwright.calibration.parameters import ALL, Calibration, Offset, prior
from meshwright.fitting import published_runs as module
from meshwright.fitting.published_runs import EFFECTIVE_ROWS, Fitted, fit, make_problem, without

TRUTH = {
    ("gemm_ratio", "architecture", "Hopper"): -0.25,
    ("sustained_ratio", "architecture", "Hopper"): -0.2,
    ("attention_forward_ratio", "lineage", "megatron-core"): 0.3,
    ("tensor_exposed_ratio", "lineage", "megatron-core"): -0.4,
    ("general_factor", "framework", "nemo"): 0.06,
    ("general_factor", "framework", "megatron-bridge"): -0.05,
    ("host_layer_s", ALL, ALL): 0.2,
}
SOURCES = ("nemo_24_07", "nemo_user_guide", "megatron_lm_llama_ex", "megatron_seqpar_paper")


def truth() -> Calibration:
    return replace(prior(), offsets={k: Offset(value=v, sd=0.1, num_rows=1) for k, v in TRUTH.items()})


def measured(runs: list[PublishedRun], rates: np.ndarray) -> list[PublishedRun]:
    return [replace(r, tokens_per_s_per_device=float(x)) for r, x in zip(runs, rates, strict=True)]


def error(calibration: Calibration, runs: list[PublishedRun], rates: np.ndarray) -> np.ndarray:
    return np.abs(np.log(predict(runs, calibration=calibration).tokens_per_s_per_device / rates))


@pytest.fixture(scope="module")
def runs() -> list[PublishedRun]:
    """Some thirty published shapes; what they measured is replaced."""
    every = [r for r in shipped_runs() if r.reason is None and r.source_key in SOURCES]
    return [r for i, r in enumerate(every) if i % 3 < 2]


@pytest.fixture(scope="module")
def rates(runs) -> np.ndarray:
    return predict(runs, calibration=truth()).tokens_per_s_per_device


@pytest.fixture(scope="module")
def fitted(runs, rates) -> Fitted:
    return fit(measured(runs, rates), made="of made-up rows")


def test_it_finds_the_rates_again(runs, rates, fitted):
    """Not the offsets: many of them move the same rows."""
    before, after = error(prior(), runs, rates), error(fitted.calibration, runs, rates)
    assert np.median(before) > 0.05
    assert np.median(after) < 0.01
    assert after.max() < 0.04


def test_what_holds_by_definition_is_not_fitted(runs):
    """Published steps do not tell the head from the layers, so a factor on it would only take up their errors."""
    assert prior().parameters["head_factor"].sd == 0
    assert "head_factor" not in {parameter for parameter, _, _ in make_problem(runs, prior()).keys}


def test_a_fifth_of_nonsense_does_not_sway_it(runs, rates):
    wrong = rates.copy()
    wrong[::5] *= np.where(np.arange(len(wrong[::5])) % 2, 10.0, 0.1)
    robust = fit(measured(runs, wrong), made="with nonsense").calibration
    right = np.arange(len(runs)) % 5 != 0
    assert np.median(error(robust, runs, rates)[right]) < 0.02


def test_the_same_rows_give_the_same_offsets(runs, rates, fitted):
    again = fit(measured(runs, rates), made="of made-up rows").calibration
    assert again == fitted.calibration


def test_where_it_stops_decides_nothing(monkeypatch, runs, rates, fitted):
    ours = predict(runs, calibration=fitted.calibration).tokens_per_s_per_device
    monkeypatch.setattr(module, "TOLERANCE", module.TOLERANCE / 100)
    farther = predict(runs, calibration=fit(measured(runs, rates), made="farther").calibration)
    assert farther.tokens_per_s_per_device == pytest.approx(ours, rel=2e-3)


def test_what_was_measured_is_surer_than_the_prior(fitted):
    for (name, level, _), offset in fitted.calibration.offsets.items():
        parameter = prior().parameters[name]
        assert offset.sd <= (parameter.sd if level == ALL else parameter.levels[level]) * (1 + 1e-9)
        assert 0 < offset.num_rows <= len(fitted.sources)


def test_offsets_that_no_row_moves_are_left_to_the_prior(fitted):
    """No row of these sends tokens to experts on another rank or keeps states on the host."""
    moved = {key for _, level, key in fitted.calibration.offsets if level == "framework"}
    assert moved <= {"nemo", "megatron-bridge", "megatron-lm", "megatron-lm-2021"}


class TestLeavingOut:
    def test_a_source_tells_nothing_about_itself(self, runs, rates, fitted):
        """Ten times its rates: what the others say of it stays."""
        source = "megatron_seqpar_paper"
        own = np.array([r.source_key == source for r in runs])
        lied = fit(measured(runs, np.where(own, 10 * rates, rates)), made="of made-up rows")
        honest = predict(runs, calibration=without(fitted, source)).tokens_per_s_per_device
        after = predict(runs, calibration=without(lied, source)).tokens_per_s_per_device
        assert after == pytest.approx(honest, rel=1e-9)

    @pytest.mark.when_touched  # test_a_source_tells_nothing_about_itself leaves one out
    def test_nor_do_its_intervals(self, runs, rates, fitted):
        source = "megatron_seqpar_paper"
        own = np.array([r.source_key == source for r in runs])
        lied = fit(measured(runs, np.where(own, 10 * rates, rates)), made="of made-up rows")
        assert without(lied, source).residual_sd == pytest.approx(without(fitted, source).residual_sd)

    def test_offsets_of_its_own_are_gone(self, fitted):
        left = without(fitted, "megatron_seqpar_paper")
        assert left.num_rows("framework", "megatron-lm-2021") == 0
        assert fitted.calibration.num_rows("framework", "megatron-lm-2021") > 0

    def test_it_keeps_what_the_others_explain(self, runs, rates, fitted):
        left = without(fitted, "nemo_24_07")
        others = np.array([r.source_key != "nemo_24_07" for r in runs])
        assert np.median(error(left, runs, rates)[others]) < 0.015

    def test_an_unknown_source_changes_nothing(self, fitted):
        assert without(fitted, "nobody") is fitted.calibration


class TestProblem:
    def test_rates_become_seconds_per_step(self, runs, rates):
        problem = make_problem(measured(runs, rates), prior())
        c = runs[0].conditions
        assert c is not None
        tokens = c.global_batch * c.seq_len / c.num_devices
        assert problem.log_measured[0] == pytest.approx(np.log(tokens / rates[0]))

    def test_a_large_source_counts_as_a_small_one(self, runs, rates):
        many = measured(runs, rates) * 4
        problem = make_problem(many, prior())
        names = np.array([r.source_key for r in many])
        for source in set(names.tolist()):
            assert problem.share[names == source].sum() == pytest.approx(min((names == source).sum(), EFFECTIVE_ROWS))

    def test_poorer_rows_are_noisier(self, runs, rates):
        one = measured(runs, rates)[0]
        problem = make_problem([replace(one, quality=q) for q in ("A-table", "B-figure")], prior())
        assert np.all(np.diff(problem.noise) > 0)
