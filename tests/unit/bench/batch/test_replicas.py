"""Replicas of a batch interface: pinned, measured together, and failures with their reason."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest

pytest.importorskip("aiohttp")

from tests.unit.bench.batch.fake_vllm import SECONDS, write_fake_vllm

from meshwright.bench.batch.engines import EngineRequest, check_engine
from meshwright.bench.batch.pinning import core_environment, device_environment, environments, parse_numbers, shares
from meshwright.bench.batch.replicas import BatchBenchRequest, measure_batches, started_replicas
from meshwright.bench.serving.offline import LengthPair
from meshwright.bench.serving.servers.running import ServerStartError
from meshwright.errors import InputError, MissingDependencyError


@pytest.fixture
def request_of(tmp_path, monkeypatch):
    fake = write_fake_vllm(tmp_path / "fake")
    monkeypatch.setenv("PYTHONPATH", f"{fake}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    def made(*pairs: str, model: str = "org/name", replicas: int = 2, **changes) -> BatchBenchRequest:
        chosen = tuple(LengthPair(input_tokens=int(i), output_tokens=int(o)) for i, o in (p.split("/") for p in pairs))
        request = BatchBenchRequest(
            engine="vllm",
            load=EngineRequest(
                model=model, scratch=tmp_path / "scratch", options={"tensor-parallel-size": "2"}, longest=64, most=8
            ),
            pairs=chosen, num_requests=8, num_warmup=1,
            environments=tuple(environments(devices="0-3", cores=None, replicas=replicas)),
            folder=tmp_path / "out", start_timeout_s=60, timeout_s=30,
        )  # fmt: skip
        return replace(request, **changes)

    return made


def measured(request: BatchBenchRequest):
    with started_replicas(request) as replicas:
        return replicas, measure_batches(request, replicas, done=lambda point: None)


def test_replicas_are_pinned_and_share_a_batch(request_of):
    request = request_of("8/16", "14/16", "15/16", "8/4", extrapolate_to=8)
    replicas, (first, refused, broken, last) = measured(request)
    point = first.point
    assert (point.num_ok, point.input_tokens, point.output_tokens) == (8, 64, 128)
    assert SECONDS <= point.wall_s < 10 * SECONDS  # both at the same time, each with half of the batch
    assert point.output_tokens_per_s == pytest.approx(128 / point.wall_s)
    assert sum(first.by_replica) == pytest.approx(point.output_tokens_per_s)
    assert first.extrapolated.label == "extrapolated x 4 from 2 measured replicas"
    assert "longer than the maximum model length" in refused.point.refusal
    assert "RuntimeError: CUDA error" in broken.point.refusal
    assert not refused.point.is_usable
    assert last.point.output_tokens == 32  # a failed batch does not end the measurement
    logs = [(request.folder / f"replica-{n}" / "engine.log").read_text() for n in (1, 2)]
    assert "devices 0,1 tensor 2" in logs[0]
    assert "devices 2,3 tensor 2" in logs[1]
    assert all(replica.process.returncode is not None for replica in replicas)


@pytest.mark.slow
def test_a_replica_that_ends_says_why(request_of):
    _, (lost, after) = measured(request_of("13/4", "8/4"))
    assert "exit code 7: " in lost.point.refusal
    assert "the driver is gone" in lost.point.refusal
    assert "exit code 7: " in after.point.refusal


@pytest.mark.slow
def test_a_late_answer_is_not_one_to_the_next_batch(request_of):
    late, right = measured(request_of("8/4", "9/5", timeout_s=SECONDS / 2))[1]
    assert "no answer in time" in late.point.refusal
    assert right.point.refusal or right.point.output_tokens == 40


def test_a_model_that_cannot_be_loaded(request_of):
    begin_s = time.monotonic()
    with pytest.raises(ServerStartError, match="no such model"):
        measured(request_of("8/4", model="missing", replicas=1))
    assert time.monotonic() - begin_s < 30


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "0,0", "1,,2", "-1", "0-999999"])
def test_numbers_that_are_none(text):
    with pytest.raises(InputError):
        parse_numbers(text, option="--devices")


def test_devices_and_cores_of_each_replica(monkeypatch, tmp_path):
    with pytest.raises(InputError, match="equal parts"):
        shares([0, 1, 2], 2, option="--devices")
    assert device_environment([2, 3]) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    monkeypatch.setattr("meshwright.bench.batch.pinning.AMD_DRIVER", tmp_path)
    assert device_environment([2])["HIP_VISIBLE_DEVICES"] == "2"
    core = min(os.sched_getaffinity(0))
    assert core_environment([core])["OMP_NUM_THREADS"] == "1"
    with pytest.raises(InputError, match="may not use"):
        core_environment([100_000])
    assert environments(devices=None, cores=None, replicas=3) == [{}, {}, {}]


def test_engines_that_are_not_here_and_options_that_they_lack(monkeypatch):
    monkeypatch.setattr("meshwright.bench.batch.engines.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install vllm"):
        check_engine("vllm", {})
    monkeypatch.undo()
    with pytest.raises(InputError, match="no such option"):
        check_engine("transformers", {"tensor-parallel-size": "2"})
