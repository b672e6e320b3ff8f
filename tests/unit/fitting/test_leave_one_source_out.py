"""Each source is predicted by the others."""

from __future__ import annotations

import numpy as np
import pytest
from tests.shipped_rows import shipped_runs

from meshwright.accuracy.metrics import Predictions
from meshwright.accuracy.predict import predict
from meshwright.accuracy.rows import PublishedRun
from meshwright.calibration.parameters import prior
from meshwright.cost.uncertainty import Z80
from meshwright.fitting.leave_one_source_out import UnseenErrors, held_out, predict_leave_one_source_out
from meshwright.fitting.published_runs import Fitted, fit, without

pytestmark = pytest.mark.when_touched  # test_published_runs.py fits the same model
SOURCES = ("megatron_lm_llama_ex", "megatron_seqpar_paper")


@pytest.fixture(scope="module")
def runs() -> list[PublishedRun]:
    return [r for r in shipped_runs() if r.reason is None and r.source_key in SOURCES][::2]


@pytest.fixture(scope="module")
def fitted(runs) -> Fitted:
    return fit(runs, made="of two sources")


@pytest.fixture(scope="module")
def done() -> list[int]:
    """Calls of `progress`."""
    return []


@pytest.fixture(scope="module")
def predictions(runs, fitted, done) -> Predictions:
    return predict_leave_one_source_out(runs, fitted, intervals=prior(), progress=done.append)


@pytest.fixture(scope="module")
def errors(runs, fitted) -> UnseenErrors:
    return held_out(runs, fitted)


@pytest.mark.parametrize("source", SOURCES)
def test_every_row_by_the_calibration_without_its_source(runs, fitted, predictions, source):
    rows = [i for i, run in enumerate(runs) if run.source_key == source]
    alone = predict([runs[i] for i in rows], calibration=without(fitted, source))
    assert predictions.tokens_per_s_per_device[rows] == pytest.approx(alone.tokens_per_s_per_device)
    assert predictions.fits[rows].tolist() == alone.fits.tolist()


def test_errors_are_those_of_the_predictions(runs, predictions, errors):
    error, sd = errors.error, errors.sd
    measured = np.array([r.tokens_per_s_per_device for r in runs])
    assert error == pytest.approx(np.log(predictions.tokens_per_s_per_device / measured))
    assert predictions.high / predictions.tokens_per_s_per_device == pytest.approx(np.exp(Z80 * sd))


def test_not_having_seen_a_source_costs_accuracy(runs, fitted, errors):
    seen = np.log(predict(runs, calibration=fitted.calibration).tokens_per_s_per_device)
    measured = np.log([r.tokens_per_s_per_device for r in runs])
    assert np.median(np.abs(errors.error)) > np.median(np.abs(seen - measured))


@pytest.mark.usefixtures("predictions")
def test_progress_counts_the_rows(runs, done):
    assert sum(done) == len(runs)
    assert len(done) == len(SOURCES)


def test_a_source_of_somebody_else_is_predicted_by_all(runs, fitted, read_many):
    stranger = read_many({"source_key": "somebody"})
    predictions = predict_leave_one_source_out(stranger, fitted, intervals=prior())
    everything = predict(stranger, calibration=fitted.calibration)
    assert predictions.tokens_per_s_per_device == pytest.approx(everything.tokens_per_s_per_device)
