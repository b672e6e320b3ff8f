"""`meshwright bench offline` against mock servers: replicas are measured, and extrapolations say so."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

pytest.importorskip("aiohttp")

from tests.faulty_server import Behavior, MockFault, mock_server
from tests.unit.bench.batch.fake_vllm import write_fake_vllm

from meshwright.bench.serving.endpoint import Endpoint
from meshwright.bench.serving.offline import OfflineRequest, compare, measure_offline, parse_pairs
from meshwright.bench.serving.prompts import PromptSource, parse_lengths
from meshwright.errors import InputError

ONE = parse_lengths("1", option="x")
SLOW = Behavior(ttft_s=0.05, num_slots=2)  # two requests in 50 ms


def measured(*behaviors: Behavior, pairs: str = "10/1", num_requests: int = 8, **more):
    async def measure():
        from contextlib import AsyncExitStack

        async with AsyncExitStack() as stack:
            urls = [(await stack.enter_async_context(mock_server(b)))[1] for b in behaviors]
            request = OfflineRequest(
                endpoints=tuple(Endpoint(base_url=url, model="mock") for url in urls), pairs=parse_pairs(pairs),
                num_requests=num_requests, num_warmup=0, source=PromptSource(inputs=ONE, outputs=ONE), **more,
            )  # fmt: skip
            return await measure_offline(request, done=lambda point: None)

    return asyncio.run(measure())


def test_replicas_share_a_batch_and_are_measured_together():
    (one,) = measured(SLOW)
    (two,) = measured(SLOW, SLOW, extrapolate_to=8)
    assert (one.point.num_ok, two.point.num_ok) == (8, 8)
    assert one.point.wall_s >= 0.2  # four rounds of two
    assert two.point.wall_s >= 0.1  # two rounds on each
    assert two.point.peak_in_flight == 8
    assert all(two.by_replica)
    assert two.point.input_tokens == 80
    assert sum(two.by_replica) == pytest.approx(two.point.output_tokens_per_s)
    assert one.extrapolated is None
    assert two.extrapolated.factor == 4
    assert "extrapolated x 4 from 2" in two.extrapolated.label
    assert two.extrapolated.output_tokens_per_s == pytest.approx(4 * two.point.output_tokens_per_s)


def test_a_failing_replica_is_not_hidden():
    (found,) = measured(SLOW, Behavior(fault_every=1, fault=MockFault.CLOSE))
    assert found.point.num_ok == 4
    assert found.point.errors == {"dropped": 4}
    assert found.by_replica[1] == 0


def test_a_comparison_is_a_geometric_mean_over_common_pairs():
    (found,) = measured(SLOW)
    base = found.point.output_tokens_per_s
    compared = compare([found], {"10/1": base / 2, "9/9": 5.0})
    assert compared.ratios == {"10/1": pytest.approx(2)}
    assert compared.geometric_mean == pytest.approx(2)
    assert compared.not_in_both == ("9/9",)
    assert compare([found], {}).geometric_mean is None


@pytest.mark.parametrize("text", ["", "128", "128/", "0/5", "a/b", "1/2,1/2", "1/-2"])
def test_wrong_pairs_are_refused(text):
    with pytest.raises(InputError, match="--pairs"):
        parse_pairs(text)


def test_the_command_measures_and_compares(meshwright, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = [
        "bench", "offline", "--server", "mock", "--server-option", "ttft=0.01", "--server-option", "itl=0",
        "--replicas", "2", "--pairs", "8/4", "--requests", "6", "--extrapolate-to", "4",
    ]  # fmt: skip
    outcome = meshwright(*asked, "--json", "--out", "first")
    assert outcome.exit_code == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    (pair,) = document["pairs"]
    assert (pair["name"], pair["point"]["output_tokens"], document["num_replicas"]) == ("8/4", 24, 2)
    assert json.loads((tmp_path / "first" / "offline.json").read_text())["pairs"] == document["pairs"]
    assert (tmp_path / "first" / "replica-2" / "server.log").exists()
    assert meshwright(*asked, "--out", "first").exit_code == 2
    outcome = meshwright(*asked, "--out", "second", "--against", "first/offline.json")
    assert outcome.exit_code == 0, outcome.stderr
    assert "Extrapolated x 2 from 2 measured replicas" in " ".join(outcome.stdout.split())
    assert "geometric mean" in " ".join(outcome.stdout.split())


@pytest.mark.parametrize(
    "arguments",
    [[], ["x:1", "--server", "mock"], ["x:1", "--pairs", "5"], ["x:1", "--against", "absent.json"], ["127.0.0.1:9"]],
    ids=str,
)
def test_wrong_requests_are_refused(meshwright, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    assert meshwright("bench", "offline", *arguments).exit_code == 2


def test_an_engine_is_measured_without_a_server(tmp_path, meshwright, monkeypatch):
    fake = write_fake_vllm(tmp_path / "fake")
    monkeypatch.setenv("PYTHONPATH", f"{fake}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(fake))
    monkeypatch.chdir(tmp_path)
    outcome = meshwright(
        "bench", "offline", "--engine", "vllm", "--model", "org/name", "--pairs", "8/16,14/4", "--requests", "4",
        "--devices", "4,5", "--replicas", "2", "--extrapolate-to", "8", "--html", "page.html", "--json",
    )  # fmt: skip
    document = json.loads(outcome.stdout)
    assert outcome.exit_code == 0
    assert document["engine"] == "vllm"
    assert document["software"]["vllm"] == "0.0.1"
    right, refused = document["pairs"]
    assert right["point"]["output_tokens"] == 64
    assert right["extrapolated"]["label"].startswith("extrapolated x 4")
    assert "maximum model length" in refused["point"]["refusal"]
    page = (tmp_path / "page.html").read_text()
    assert "extrapolated" in page
    assert "maximum model length" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "vllm", "--server", "mock"], "name servers, or what to start"),
        (["--engine", "transformers"], "needs a model"),
        (["http://localhost:1", "--devices", "0"], "--devices pins replicas that are started"),
        (["--engine", "transformers", "--model", "m", "--engine-option", "x=1"], "no such option"),
        (["--engine", "transformers", "--model", "m", "--server-option", "x=1"], "belong to servers"),
        (["--engine", "transformers", "--model", "m", "--replicas", "2", "--devices", "0"], "equal parts"),
        (["--engine", "transformers", "--model", "m", "--replicas", "9", "--requests", "8"], "fewer requests"),
    ],
    ids=["two", "model", "address", "option", "server-option", "parts", "requests"],
)
def test_contradictions_of_engines_are_refused(meshwright, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("transformers")
    outcome = meshwright("bench", "offline", *arguments, "--pairs", "8/4")
    assert outcome.exit_code == 2
    assert message in outcome.stderr
