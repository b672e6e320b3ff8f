"""Folders of records as the commands leave them, made without running anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.mlperf.check_system import SYSTEM_FIELDS
from meshwright.records import device, kernel_routes, offline, trainings
from meshwright.records.device import DeviceRecorder, row_of
from meshwright.records.files import csv_line
from meshwright.records.ingest import BatchOrder, IndexSearch, IngestMode, IngestPass, IngestRecorder
from meshwright.records.measurement import Measurement
from meshwright.records.points import Point, PointFamily
from meshwright.records.serving import Latency, Load, ServingPoint, ServingRecorder

RECORD: dict[str, Any] = {
    "run": {
        "name": "night", "model": {"name": "llama3.1-8b"}, "task": "pretrain", "precision": {"name": "bf16"},
        "plan": {"pipeline": 1, "virtual_pipeline": 1, "data_shard": 8, "data_replicate": 1}, "engine": "native",
        "plan_in_words": "DP8 fsdp mbs1", "global_batch": 64, "micro_batch": 1, "sequence_length": 8192,
        "optimizer": {"gradient_clip": 1.0},
    },
    "device": {
        "accelerator": "h100", "type": "cuda", "name": "NVIDIA H100 80GB HBM3", "count_on_this_machine": 8,
        "memory_bytes": 80 * 2**30, "threads": 8, "system": "Linux",
    },
    "software": {"meshwright": "0.1.0", "torch": "2.13.0"},
    "ending": "done",
    "statistics": {
        "steps": 20, "tokens": 20 * 64 * 8192, "first_loss": 11.5, "last_loss": 6.25, "validation_loss": 6.5,
        "step_s": {"n": 17, "median": 7.0, "low": 6.5, "high": 7.5},
        "throughput": {"n": 17, "median": 9362.0, "low": 8738.0, "high": 10082.0},
        "tokens_per_s_per_device": 9362.0, "mfu": 0.44,
        "mfu_convention": "model FLOPs, causal attention; of h100's dense peak",
        "peak_memory_bytes": 60 * 2**30, "num_devices": 8, "parameters": 8_030_000_000, "checkpoint": None,
    },
    "time_s": {"start_up": 60.0, "training": 300.0, "validation": 40.0, "checkpoint": 0.0, "total": 400.0},
    "ranks": {"step_s": [7.0] * 8, "peak_memory_bytes": [60 * 2**30] * 8, "straggler_ratio": 1.0},
    "started": "2026-01-02T03:04:05+00:00",
    "ended": "2026-01-02T03:10:45+00:00",
    "predicted": {
        "step": {"value": 6.8, "low": 6.0, "high": 7.8, "unit": "s", "tier": "interpolated"},
        "tokens_per_s_per_device": {
            "value": 9638.0, "low": 8402.0, "high": 10923.0, "unit": "tokens/s", "tier": "interpolated",
        },
        "memory_bytes": 66 * 2**30, "components_s": {"ffn": 5.0, "attention_core": 1.8},
    },
    "profile": {
        "steps": [6, 7, 8], "device": "gpu", "window_s": 21.0,
        "shares": {"GEMM": 0.6, "attention": 0.15, "elementwise": 0.05, "optimizer": 0.05, "communication": 0.1,
                   "other": 0.0, "idle": 0.05},
        "communication": {"busy_s": 4.0, "exposed_s": 2.1}, "kernels": [], "unknown": [],
    },
    "git_commit": "abc", "command": ["meshwright", "train", "run.yaml"], "sample": None, "events": [], "notes": [],
}  # fmt: skip


def changed_record(record: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a record with other values; keys of `changes` are dotted, with __ for the dot."""
    found = json.loads(json.dumps(record))
    for path, value in changes.items():
        *above, key = path.split("__")
        place = found
        for name in above:
            place = place[name]
        place[key] = value
    return found


def write_training(folder: Path, *, speed: float = 1.0, num_steps: int = 20, **changes: Any) -> Path:
    """A training `speed` times as fast as `RECORD`'s; `changes` are dotted keys with __ for the dot."""
    before = RECORD["statistics"]
    scaled = {f"statistics__{name}": before[name] * speed for name in ("tokens_per_s_per_device", "mfu")}
    record = changed_record(RECORD, scaled | {"statistics__steps": num_steps} | changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.json").write_text(json.dumps(record))
    rate = record["statistics"]["tokens_per_s_per_device"]
    with (folder / "steps.jsonl").open("w") as stream:
        for step in range(1, num_steps + 1):
            wobble = 1 + 0.02 * ((step * 7) % 5 - 2)
            line = {
                "step": step, "loss": 11.5 - step / 8, "gradient_norm": 1.0, "learning_rate": 1e-4,
                "step_s": 7.0 / speed / wobble, "tokens_per_s_per_device": rate * wobble, "mfu": 0.44,
                "memory_bytes": 60 * 2**30,
            }  # fmt: skip
            stream.write(json.dumps(line) + "\n")
    (folder / "run.yaml").write_text("model: llama3.1-8b\n")
    return folder


def write_serving(
    folder: Path, *, speed: float = 1.0, repeats: int = 3, device: dict[str, Any] | None = None, ok: int = 10
) -> Path:
    """Records of a server under two loads."""
    sidecar = {
        "endpoint": {"url": "http://localhost/v1", "model": "llama3.1-8b"}, "server": {"name": "vllm", "version": "1"},
        "client": {"name": "meshwright", "version": "0.1.0"}, "software": {"python": "3.11.7"},
        "input_tokens": "1024", "output_tokens": "128", "command": ["meshwright", "bench", "serve"],
        "started": "2026-02-03T04:05:06+00:00", "device": device,
    }  # fmt: skip
    recorder = ServingRecorder(folder, sidecar=sidecar)
    for concurrency in (1, 8):
        for repeat in range(1, repeats + 1):
            rate = concurrency * 50.0 * speed * (1 + repeat / 100)
            delay = 1 / rate
            latency = Latency(
                n=10, mean=delay, median=delay, median_low=None, median_high=None, p90=None, p95=None, p99=None,
                low=None, high=None,
            )  # fmt: skip
            recorder.append(
                ServingPoint(
                    load=Load(concurrency=concurrency), repeat=repeat, started=sidecar["started"], wall_s=10.0,
                    num_requests=10, num_ok=ok, input_tokens=10_240, errors={"http_error": 10 - ok} if ok < 10 else {},
                    output_tokens=1280, output_tokens_per_s=rate, total_tokens_per_s=9 * rate, ttft_s=latency,
                    tpot_s=latency,
                )
            )  # fmt: skip
    recorder.save(ended=sidecar["started"])
    return folder


ORIGIN: dict[str, Any] = {
    "device": {"name": "NVIDIA H100", "accelerator": "h100"}, "driver": None, "software": {"torch": "2.13.0"},
    "command": ["meshwright", "bench"], "started": "2026-02-03T04:05:06+00:00", "ended": "2026-02-03T05:05:06+00:00",
    "git_commit": None,
}  # fmt: skip


def write_every_kind(where: Path) -> None:
    """One record of every kind, in folders of their names."""
    write_training(where / "training")
    write_serving(where / "serving")
    write_device(where / "device")
    write_sweep(where / "sweep")
    write_ingest(where / "ingest")
    write_offline(where / "offline")
    write_routes(where / "kernels")


def write_device(folder: Path) -> None:
    """Records of `bench device`: two GEMMs and a copy."""
    sidecar = {**dict.fromkeys(device.SIDECAR_KEYS), **ORIGIN, "schema": device.SCHEMA}
    recorder = DeviceRecorder(folder, sidecar=sidecar, resume=False)
    points = [
        *(Point(family=PointFamily.GEMM, kernel="forward", format="bf16", m=m, n=64, k=64) for m in (64, 128)),
        Point(family=PointFamily.MEMORY, kernel="copy", size_bytes=1 << 20),
    ]
    for point in points:
        recorder.append(row_of(point, Measurement(seconds=(1e-4, 1.1e-4, 1.2e-4), calls=1, target_ratio=0.03)))


def write_sweep(folder: Path) -> None:
    """Records of `bench train`: two runs of one configuration."""
    folder.mkdir(parents=True)
    software = {"native": ORIGIN["software"]}  # of each engine
    steps = {"steps": 20, "warmup": 3, "configurations": {"a": {}}}
    sidecar = {"schema": trainings.SCHEMA, **ORIGIN, "software": software, **steps}
    (folder / trainings.SIDECAR_NAME).write_text(json.dumps(sidecar))
    row = {
        "configuration": "a", "engine": "native", "status": "ok", "started": ORIGIN["started"], "wall_s": "60",
        "model": "llama3.1-8b", "precision": "bf16", "plan": "DP8", "num_devices": "8", "sequence_length": "8192",
        "global_batch": "64", "steps": "20", "step_s_median": "7", "tokens_per_s_per_device": "9362", "mfu": "0.44",
        "peak_memory_bytes": "6e10", "first_loss": "11", "last_loss": "6",
    }  # fmt: skip
    lines = [[(row | {"run": str(run)}).get(name, "") for name in trainings.TABLE.header] for run in (1, 2)]
    (folder / trainings.CSV_NAME).write_text("".join(map(csv_line, [trainings.TABLE.header, *lines])))


def write_ingest(folder: Path) -> None:
    """Records of `bench ingest`: one pass and one search."""
    sidecar = {**ORIGIN, "documents": {"source": "text"}, "encoder": {"origin": "tiny"}}
    recorder = IngestRecorder(folder, sidecar=sidecar)
    recorder.append(
        IngestPass(
            chunk_tokens=256, overlap=32, batch=8, precision="bf16", order=BatchOrder.ARRIVAL,
            mode=IngestMode.PIPELINED, index="flat", repeat=1, started=ORIGIN["started"], wall_s=1.5, num_chunks=7,
            last_searchable_s=1.25,
        )
    )  # fmt: skip
    recorder.append(
        IndexSearch(
            index="flat", build="", search="", repeat=1, k=3, batch=1, threads=1, num_vectors=5, num_queries=2,
            recall=1.0, p50_s=1e-5,
        )
    )  # fmt: skip


def write_offline(folder: Path) -> None:
    """A record of `bench offline`: one measured pair and one that is extrapolated."""
    point = {
        "wall_s": 1.0, "num_ok": 8, "input_tokens": 80, "output_tokens": 40, "output_tokens_per_s": 40.0,
        "total_tokens_per_s": 120.0, "refusal": "",
    }  # fmt: skip
    pair = {"name": "10/5", "num_replicas": 1, "point": point, "extrapolated": None}
    more = {"output_tokens_per_s": 320.0, "label": "extrapolated from 1 to 8"}
    document = {
        "schema": offline.SCHEMA, **ORIGIN, "model": "llama3.1-8b", "num_replicas": 1, "num_requests": 8,
        "server": "vllm", "pairs": [pair, {**pair, "name": "20/5", "extrapolated": more}],
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / offline.NAME).write_text(json.dumps(document))


def write_routes(folder: Path) -> None:
    """A record of `bench kernels`: one call on two routes."""
    time = {"median": 1e-3, "low": 0.9e-3, "high": 1.1e-3}
    row = {
        "op": "swiglu", "model": "llama3.1-8b", "shape": "8192 x 14336", "format": "bf16", "route": "triton",
        "reason": "", "forward_s": time, "backward_s": time, "flops": 0.0, "least_bytes": 1e9, "roofline_ratio": 0.5,
        "peak_bytes": 2**30, "error": 1e-3, "is_default": True, "is_fastest": True,
    }  # fmt: skip
    refused = {
        **row,
        "route": "liger",
        "reason": "not installed",
        "forward_s": None,
        "backward_s": None,
        "is_fastest": False,
    }
    folder.mkdir(parents=True)
    document = {"schema": kernel_routes.SCHEMA, **ORIGIN, "rows": [row, refused]}
    (folder / kernel_routes.NAME).write_text(json.dumps(document))


def write_system(folder: Path) -> None:
    """The description of a system, `sys8.json`, and a folder `code`, as a submission to MLPerf needs them."""
    system = dict.fromkeys(SYSTEM_FIELDS, "") | {
        "submitter": "Org", "division": "closed", "status": "Preview", "number_of_nodes": "1",
        "accelerators_per_node": "8",
    }  # fmt: skip
    (folder / "sys8.json").write_text(json.dumps(system))
    (folder / "code").mkdir()
    (folder / "code" / "README.md").write_text("How to run\n")
