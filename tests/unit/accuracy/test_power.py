"""Limits of power that rows state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.shipped_rows import shipped_runs

from meshwright.accuracy.predict import predict
from meshwright.accuracy.rows import PublishedRun
from meshwright.catalog import lookup as catalog

ReadOne = Callable[..., PublishedRun]


@pytest.mark.parametrize(
    ("note", "listed"),
    [
        ("700 W", ()),  # the data sheet's
        ("700 W TDP", ()),
        ("power limited", ("a power limit: not modelled (power limited)",)),
        ("mean power 612 W", ("a power limit: not modelled (612 w)",)),
        ("no power cap", ()),
        ("power limit 900 W", ("a power limit of 900 W: not used, the usual one is 700 W",)),
        ("capped at 500 W; power cap 400 W", ("notes say 400 and 500 of power_w: none used",)),
    ],
)
def test_power_that_is_no_lower_limit_is_listed(read_one: ReadOne, note: str, listed: tuple[str, ...]) -> None:
    run = read_one(notes=note)
    assert run.conditions is not None
    assert run.conditions.power_w is None
    assert tuple(assumption for assumption in run.assumed if "power" in assumption) == listed


def test_a_power_limit_is_a_condition_however_it_is_stated(read_one: ReadOne) -> None:
    notes = (
        "500 W", "500 W GPUs", "500 W TDP", "power limited to 500 W", "power capped at 500 W", "power cap: 500W",
        "power_limit_w: 500", "GPU power limit (W): 500", "700 W TDP, capped at 500 W", "GPUs limited to 500 watts",
        "nvidia-smi -pl 500", "power limit per GPU 500 W",
    )  # fmt: skip
    cells = [*({"notes": note} for note in notes), {"gpu": "H100 SXM5 80GB 500W"}]
    runs = [read_one(tok_s_gpu_best="1000", **changed) for changed in cells]
    assert [run.conditions and run.conditions.power_w for run in runs] == [500.0] * len(cells)
    assert not any("power" in assumption for run in runs for assumption in run.assumed)
    usual = predict([read_one()])
    found = predict(runs)
    assert len(set(found.tokens_per_s_per_device)) == 1
    assert found.tokens_per_s_per_device[0] < usual.tokens_per_s_per_device[0]
    assert found.high[0] / found.low[0] > usual.high[0] / usual.low[0]
    measured = read_one(notes="power capped at 500 W", gemm_tflops="500").conditions
    assert measured is not None
    assert (measured.power_w, measured.gemm_flops_per_s) == (None, 500e12)


def test_the_law_of_power_explains_parts_of_500_w_that_it_has_not_seen() -> None:
    """They are of another entry, whose rates are fitted: here they are H100 of its memory under a limit."""
    own, usual = catalog.accelerator("h100-96gb"), catalog.accelerator("h100")
    stock = replace(usual, memory_bytes=own.memory_bytes, memory_bytes_per_s=own.memory_bytes_per_s)
    rows = [(run, run.conditions) for run in shipped_runs() if run.conditions and run.tokens_per_s_per_device]
    rows = [(run, c) for run, c in rows if c.accelerator == own and run.source_key == "torchtitan"]
    assert len(rows) == 25
    measured = np.array([run.tokens_per_s_per_device for run, _ in rows])

    def error(power_w: float | None) -> float:
        runs = [replace(run, conditions=replace(c, accelerator=stock, power_w=power_w)) for run, c in rows]
        return float(np.mean(predict(runs).tokens_per_s_per_device / measured - 1))

    assert error(None) > 0.1
    assert abs(error(500)) < 0.06
