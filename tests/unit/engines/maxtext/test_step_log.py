"""The step log that is copied from MaxText's metrics: a power cut keeps what the worker has copied."""

from __future__ import annotations

import json

from meshwright.engines.external_record import STEPS, VALIDATION
from meshwright.engines.maxtext import results
from meshwright.engines.maxtext.worker import _StepLogWriter


def line(step: int) -> str:
    return json.dumps({
        "step": step, results.LOSS: 2.0, "learning/raw_grad_norm": 1.0, "learning/current_learning_rate": 1e-3,
        "perf/step_time_seconds": 0.5, "ended_s": 10.0 + step,
    }) + "\n"  # fmt: skip


def test_copied_lines_survive_a_power_cut_and_half_a_line_does_not_stay(tmp_path, unsynced):
    metrics = tmp_path / results.METRICS
    (tmp_path / STEPS).write_text('{"step": 1}\n{"step": 2')  # a power cut tore the second
    metrics.write_text("")
    log = _StepLogWriter(tmp_path, rank=0, is_exact=True, profile=None)
    metrics.write_text(line(2) + line(3) + json.dumps({"step": 3, results.VALIDATION_LOSS: 1.5}) + "\n" + line(4)[:9])
    log.update()
    assert not {STEPS, VALIDATION} & set(unsynced(tmp_path))
    assert [json.loads(text)["step"] for text in (tmp_path / STEPS).read_text().splitlines()] == [1, 2, 3]
    assert log.close(exit_code=0) == 0
    assert [json.loads(text)["step"] for text in (tmp_path / STEPS).read_text().splitlines()] == [1, 2, 3]
    assert set(unsynced(tmp_path)) == {results.METRICS}  # MaxText's own
