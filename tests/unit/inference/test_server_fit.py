"""Constants of one server from records of `bench serve`: recovered from records made with known ones."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import meshwright as mw
from meshwright.answers.serving_accuracy import serving_accuracy
from meshwright.answers.serving_estimate import serving_estimate
from meshwright.answers.serving_plan import serving_plan
from meshwright.catalog import lookup as catalog
from meshwright.catalog.huggingface import model_from_config
from meshwright.errors import InputError
from meshwright.inference.capacity import shipped_reserve
from meshwright.inference.constants import UNPUBLISHED_SD, shipped_constants
from meshwright.inference.formats import cache_format, weight_format
from meshwright.inference.layout import ServingLayout
from meshwright.inference.measured import ServedGiven, measured_server
from meshwright.inference.points import engines
from meshwright.inference.predict import rates_for
from meshwright.inference.server_fit import fit_server, read_server_calibration, to_document
from meshwright.inference.serving import RequestLoad, batch_limit, request_work, steady
from meshwright.inference.work import Served
from meshwright.records.serving import Arrivals, Latency, Load, ServingPoint, ServingRecorder
from meshwright.runfile.accelerator_file import TEMPLATE

CLUSTER = catalog.cluster("cpu-1x1")
TRUE = {"gemm_ratio": 0.004, "memory_ratio": 0.05, "kernel_s": 1.4, "host_s": 0.3, "request_s": 5.0, "sequence_s": 20.0}
"""Factors between the constants of the server that the records are of and the shipped ones."""
SHAPES = {"small": (256, 1024, 4), "wide": (768, 2048, 4), "deep": (384, 1024, 16), "large": (1024, 2816, 12)}


def config(name: str) -> dict:
    hidden, ffn, layers = SHAPES[name]
    return {
        "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 64, "num_key_value_heads": 2,
        "vocab_size": 4096, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    }  # fmt: skip


def served(name: str, precision: str = "bf16") -> Served:
    return Served(
        model=model_from_config(config(name), name=name), cluster=CLUSTER, layout=ServingLayout(),
        weights=weight_format(precision, CLUSTER.accelerator), cache=cache_format("fp16", CLUSTER.accelerator),
    )  # fmt: skip


def truth(name: str, load: RequestLoad, precision: str = "bf16"):
    """Rates and latencies of the server that the records are of."""
    of, engine = served(name, precision), engines()["llamacpp"]
    rates = rates_for(of, engine, shipped_constants())
    rates = replace(rates, **{key: getattr(rates, key) * factor for key, factor in TRUE.items()})
    found = steady(request_work(of, load, engine, batch_limit(of, load, engine, shipped_reserve())), rates)
    return SimpleNamespace(
        **{f.name: getattr(found, f.name) for f in fields(found)}
        | {name: np.squeeze(getattr(found, name)) for name in ("output_tokens_per_s", "ttft_s", "itl_s")}
    )


def spread(value: float) -> Latency:
    same = dict.fromkeys(("mean", "median", "median_low", "median_high", "p90", "p95", "p99", "low", "high"), value)
    return Latency(n=8, **same)


def point(name: str, concurrency: int, lengths: tuple[int, int], *, wait: float = 0.0, **changes) -> ServingPoint:
    """Point that a client measures while other programs have the processors for `wait` of the time."""
    inputs, outputs = lengths
    load = RequestLoad(input_tokens=inputs, output_tokens=outputs, concurrency=concurrency, lockstep=True)
    found = truth(name, load)
    values = {
        "load": Load(concurrency=concurrency), "repeat": 1, "started": "2026-11-23T00:00:00+00:00", "wall_s": 10.0,
        "num_requests": 8, "num_ok": 8, "input_tokens": 8 * inputs, "output_tokens": 8 * outputs,
        "output_tokens_per_s": float(found.output_tokens_per_s) * (1 - wait),
        "ttft_s": spread(float(found.ttft_s) / (1 - wait)), "tpot_s": spread(float(found.itl_s) / (1 - wait)),
        "server_wait_ratio": wait or None,
    }  # fmt: skip
    return ServingPoint(**(values | changes))


def records(
    folder: Path, name: str, *, concurrencies=(1, 4, 16), lengths=(64, 32), points=None, server=True, **sidecar
) -> Path:
    about = {
        "name": "llamacpp", "model": f"models/{name}",
        "served": {"config": config(name), "precision": "bf16", "kv_precision": "fp16", "slots": 64, "tensor": 1},
    }  # fmt: skip
    recorder = ServingRecorder(
        folder,
        sidecar={
            "command": [], "started": "now", "endpoint": {}, "server": about if server else None,
            "input_tokens": str(lengths[0]), "output_tokens": str(lengths[1]), "num_prompts_in_file": 0,
        }
        | sidecar,
    )  # fmt: skip
    for one in points or [point(name, n, lengths) for n in concurrencies]:
        recorder.append(one)
    recorder.save(ended="now")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("records")
    asked = [("small", (64, 32)), ("small", (512, 32)), ("wide", (64, 32)), ("deep", (64, 32)), ("deep", (64, 256))]
    return [records(root / f"{name}-{i}-{o}", name, lengths=(i, o)) for name, (i, o) in asked]


@pytest.fixture(scope="module")
def fitted(folders):
    return fit_server(measured_server(folders, cluster=CLUSTER), made="llamacpp on cpu")


@pytest.fixture(scope="module")
def calibration(fitted, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "server.json"
    path.write_text(json.dumps(to_document(fitted)))
    return path


@pytest.mark.parametrize(
    ("name", "lengths", "concurrency"),
    [("small", (64, 32), 8), ("wide", (300, 100), 2), ("large", (64, 32), 4), ("large", (256, 64), 32)],
)
def test_other_loads_and_models_are_predicted(calibration, tmp_path, name, lengths, concurrency):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config(name)))
    asked = {"model": str(tmp_path / "model"), "cluster": "cpu-1x1", "kv_precision": "fp16"}
    load = {"input_tokens": lengths[0], "output_tokens": lengths[1], "concurrency": [concurrency]}
    found = serving_estimate(**asked, **load, lockstep=True, calibration=calibration).loads[0]
    want = truth(
        name, RequestLoad(input_tokens=lengths[0], output_tokens=lengths[1], concurrency=concurrency, lockstep=True)
    )
    assert found.output_tokens_per_s.value == pytest.approx(float(want.output_tokens_per_s), rel=0.05)
    assert found.ttft.value == pytest.approx(float(want.ttft_s), rel=0.1)
    rate = found.output_tokens_per_s
    assert rate.low < float(want.output_tokens_per_s) < rate.high
    without = serving_estimate(**asked, **load, engine="llamacpp", lockstep=True).loads[0]
    assert without.output_tokens_per_s.value > 3 * rate.value  # a whole socket, against one thread of it


def test_the_file_has_the_rows_and_gives_the_same_predictions(fitted, calibration, folders):
    read = read_server_calibration(calibration)
    assert read.engine == fitted.engine
    assert read.rows == fitted.rows
    assert len(read.rows) == 3 * 3 * 5
    assert {o["folder"] for o in read.origins} == {str(f) for f in folders}
    for key, value in zip(fitted.constants.keys, fitted.constants.values, strict=True):
        assert read.constants.values[read.constants.keys.index(key)] == pytest.approx(value, rel=1e-3, abs=1e-4)


def test_held_out_configurations_give_the_spread(calibration):
    read = read_server_calibration(calibration)
    assert all(row.held_out is not None for row in read.rows)
    errors = read.errors["output_throughput"]
    assert errors["fitted_median"] < 0.02 < 0.2
    assert errors["held_out_median"] < 0.05


def test_what_no_record_tests_stays_unknown(calibration):
    read = read_server_calibration(calibration)
    sd = dict(zip(read.constants.keys, np.sqrt(np.diag(read.constants.covariance)), strict=True))
    server = read.engine.server
    assert sd[f"gemm_ratio/server={server}"] < 0.1
    assert sd[f"collective_s/server={server}"] == pytest.approx(UNPUBLISHED_SD, rel=0.01)


def test_time_without_a_processor_is_taken_out(folders, tmp_path):
    busy = records(tmp_path / "busy", "small", points=[point("small", n, (64, 32), wait=0.6) for n in (1, 4, 16)])
    quiet, loaded = (measured_server([folder], cluster=CLUSTER).points for folder in (folders[0], busy))
    assert [p.point.value for p in loaded] == pytest.approx([p.point.value for p in quiet])


def test_equal_loads_of_several_folders_are_repeats(folders, tmp_path):
    faster = records(
        tmp_path / "again", "small",
        points=[replace(point("small", n, (64, 32)), output_tokens_per_s=1e6) for n in (1, 4, 16)],
    )  # fmt: skip
    once, twice = (measured_server(f, cluster=CLUSTER).points for f in ([folders[0]], [folders[0], faster]))
    assert len(once) == len(twice)
    assert [p.num_repeats for p in twice] == [2] * 9
    assert twice[0].point.value == pytest.approx((once[0].point.value + 1e6) / 2)
    assert twice[0].log_sd > 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"load": Load(arrivals=Arrivals.POISSON, offered_per_s=2.0)}, "of an open loop"),
        ({"interrupted": True}, "interrupted"),
        ({"refusal": "the client"}, "refused or without a successful request"),
        ({"num_ok": 0}, "refused or without a successful request"),
        ({"errors": {"dropped": 1}}, "with failed requests"),
        ({"num_short": 2}, "with answers shorter than asked for"),
        ({"output_tokens": 0}, "without counts of tokens"),
        ({"input_tokens": 0}, "without counts of tokens"),
    ],
    ids=["open", "interrupted", "refused", "none", "failed", "short", "no output", "no input"],
)
def test_loads_that_cannot_be_used_are_counted(tmp_path, changes, reason):
    points = [point("small", 1, (64, 32)), replace(point("small", 4, (64, 32)), **changes)]
    found = measured_server([records(tmp_path / "r", "small", points=points)], cluster=CLUSTER)
    assert found.unused == {reason: 1}
    assert {p.point.conditions.load.concurrency for p in found.points} == {1}


def test_answers_of_one_token_have_no_time_per_output_token(tmp_path):
    short = replace(point("small", 1, (64, 32)), output_tokens=8)
    found = measured_server([records(tmp_path / "r", "small", points=[short])], cluster=CLUSTER)
    assert len(found.points) == 2  # rate and time to the first token
    assert np.isfinite(fit_server(found, made="2026-02-03").constants.values).all()


def test_records_of_a_server_that_was_only_addressed_need_a_model(tmp_path):
    folder = records(tmp_path / "r", "small", server=False)
    with pytest.raises(InputError, match="which model was served"):
        measured_server([folder], cluster=CLUSTER)
    model = model_from_config(config("small"), name="small")
    with pytest.raises(InputError, match="format of the weights"):
        measured_server([folder], cluster=CLUSTER, given=ServedGiven(model=model))
    found = measured_server([folder], cluster=CLUSTER, given=ServedGiven(model=model, precision="bf16", engine="vllm"))
    assert found.engine.name == "vllm"


def test_a_calibration_is_of_one_device_and_engine(calibration, folders):
    asked = {"model": "llama3.1-8b", "input_tokens": 64, "output_tokens": 32, "calibration": calibration}
    with pytest.raises(InputError, match="another device"):
        serving_estimate(**asked, cluster="h100-1x1")
    with pytest.raises(InputError, match="another engine"):
        serving_estimate(**asked, cluster="cpu-1x1", engine="vllm")
    with pytest.raises(InputError, match="another device"):
        serving_plan(**asked, cluster="h100-1x1")
    assert serving_plan(**asked, cluster="cpu-2x1").question.engine.name == "llamacpp"
    with pytest.raises(InputError, match="on their own"):
        serving_accuracy(records=folders, calibration=calibration, leave_one_source_out=True)


def test_records_are_compared_with_predictions(calibration, folders, tmp_path):
    other = records(tmp_path / "r", "large", concurrencies=(2, 8))
    found = serving_accuracy(records=[other], calibration=calibration)
    assert found.overall.num_predicted == found.overall.num_rows == 6
    assert found.overall.median_abs_error < 0.05
    assert found.num_fitted == 0
    assert serving_accuracy(records=folders[:1], calibration=calibration).num_fitted == 9
    published = serving_accuracy(records=[other], cluster="cpu-1x1")
    assert published.overall.median_abs_error > 0.5
    with pytest.raises(InputError, match="on which devices"):
        serving_accuracy(records=[other])


def test_the_server_may_have_an_accelerator_of_a_file_with_less_memory_and_another_network(folders, tmp_path):
    text = TEMPLATE.read_text(encoding="utf-8")
    (tmp_path / "my.toml").write_text(text, encoding="utf-8")
    hardware = {"accelerator": tmp_path / "my.toml", "network": "25Gb/s", "device_memory": "40GiB"}
    made = mw.inference_calibrate(folders, cluster="my-1x1", **hardware).calibration
    assert made.accelerator == "my"
    path = tmp_path / "server.json"
    path.write_text(json.dumps(to_document(made)))
    found = mw.inference_accuracy(records=folders[:1], calibration=path, **hardware)
    assert found.overall.num_predicted == 9
    load = {"model": "llama3.1-8b", "cluster": "my-1x1", "input_tokens": 64, "output_tokens": 32}
    assert mw.inference_estimate(**load, **hardware, calibration=path).loads
    with pytest.raises(InputError, match="unknown accelerator"):
        mw.inference_calibrate(folders, cluster="my-1x1")
    with pytest.raises(InputError, match="its hardware belong to records"):
        mw.inference_accuracy(device_memory="40GiB")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "other"}', "\x00", '{"schema": 1}'])
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError, match="not a serving calibration"):
        read_server_calibration(path)


@pytest.mark.parametrize("key", ["engine", "unknowns", "correlation", "rows", "published"])
def test_a_damaged_file_is_refused(calibration, tmp_path, key):
    document = json.loads(calibration.read_text())
    for value in (None, "x", [1]):
        path = tmp_path / "x.json"
        path.write_text(json.dumps(document | {key: value}))
        with pytest.raises(InputError, match="not a serving calibration"):
            read_server_calibration(path)
