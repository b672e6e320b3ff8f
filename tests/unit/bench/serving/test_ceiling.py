"""The client's own ceiling."""

import asyncio
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("aiohttp")
from meshwright.bench.serving import ceiling


def test_a_slow_first_round_does_not_lower_the_ceiling(monkeypatch):
    """A clock that only rounds of load advance stands for the processor's: the first takes 0.4 s, others 0.1 s."""
    measure, rounds, now_s = ceiling.run_load, [], 0.0

    async def first_is_slow(*arguments, **settings):
        nonlocal now_s
        rounds.append(settings["num_requests"])
        outcome = await measure(*arguments, **settings)
        now_s += 0.4 if len(rounds) == 1 else 0.1
        return outcome

    monkeypatch.setattr(ceiling, "run_load", first_is_slow)
    monkeypatch.setattr(ceiling, "time", SimpleNamespace(thread_time=lambda: now_s, perf_counter=time.perf_counter))
    found = asyncio.run(ceiling.client_ceiling(2))
    assert rounds == [2] * ceiling.LEAST_ROUNDS
    assert found == pytest.approx(2 * ceiling.TOKENS / 0.1)


@pytest.mark.parametrize(("rate", "is_refused"), [(50.0, False), (50.1, True)])
def test_a_result_above_half_of_the_ceiling_is_refused(rate, is_refused):
    assert bool(ceiling.refusal(rate, 100.0)) == is_refused
