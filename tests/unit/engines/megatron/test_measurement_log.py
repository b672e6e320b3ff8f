"""The step log of Megatron's processes survives a power cut, before the checkpoint of its steps is saved."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("megatron.core")

from meshwright.engines.external_record import STEPS, VALIDATION, Ending


@pytest.mark.when_touched  # the package takes seconds to be imported
@pytest.mark.filterwarnings("ignore")  # of packages that it does without
def test_each_line_and_the_ending_are_on_the_disk(tmp_path, unsynced, monkeypatch):
    from meshwright.engines.megatron.in_megatron_process import train_loop

    monkeypatch.setattr(train_loop.dist, "get_rank", lambda: 0)
    log = train_loop.MeasurementLog(tmp_path / "output", device=train_loop.torch.device("cpu"))
    (log.folder / STEPS).write_text('{"step": 1, "step_s"')  # a power cut tore it
    for step in (1, 2):
        log.step({"step": step, "step_s": 0.5})
        log.validation({"step": step, "validation_loss": 1.0})
        assert not {STEPS, VALIDATION} & set(unsynced(tmp_path))
    log.ending(Ending.DONE)
    log.close()
    assert unsynced(tmp_path) == []
    assert [json.loads(line)["step"] for line in (log.folder / STEPS).read_text().splitlines()] == [1, 2]
