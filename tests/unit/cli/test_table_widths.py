"""The tables of every command on narrow and wide terminals: every number and every word is there."""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.example_runs import PINNED_RUN
from tests.printed_tables import check_whole, printed_at
from tests.record_folders import write_every_kind, write_system, write_training
from tests.unit.bench.serving.test_importers import INFERENCEX
from tests.unit.mlperf.conftest import SyntheticLog

from meshwright import cli
from meshwright.accuracy.shipped import measured_runs_path
from meshwright.answers import serving_calibration
from meshwright.bench.training_summary import summaries
from meshwright.cli import drawing
from meshwright.cli.commands import bench, tune
from meshwright.cli.drawing import TableOrBlocks
from meshwright.cli.output import print_table, print_text_tables
from meshwright.records import trainings
from meshwright.records.ingest import read_ingest
from meshwright.records.training import read_record
from meshwright.report import ingest, serving_offline, training_sweep

WIDTHS = (60, 80, 100, 120)

MOST_ROWS = 50
"""Rows of a table that are looked at; later ones look the same."""

SERVED = "--model llama3.1-8b --cluster h100-1x1 --input-tokens 512 --output-tokens 128"

COMMANDS = {
    "accuracy": ["accuracy --runs few.csv --rows"],
    "bench_serve": ["bench serve --from served.json"],
    "calibrate": ["calibrate {recorded} --out calibration.json"],
    "catalog": [
        "catalog accelerators",
        "catalog clusters",
        "catalog models",
        "catalog models moe-2t",
        "catalog runs",
        "catalog claims",
        "catalog claims scale_06",
    ],
    "compare": ["compare training faster"],
    "doctor": ["doctor --only host", "doctor --compare a.json b.json c.json"],
    "estimate": [
        f"estimate {PINNED_RUN}",
        "estimate --memory --model llama3.1-8b --devices 8 --seq 1024,2048 --offload-optimizer",
    ],
    "explain": [f"explain {PINNED_RUN} --against other.yaml"],
    "import_": ["import --survey others"],
    "inference": [
        "inference accuracy --points points.csv --rows",
        "inference capacity --model llama3.1-8b --cluster h100-1x1",
        f"inference estimate {SERVED} --concurrency 1,8",
        f"inference plan {SERVED} --itl 20 --pareto",
    ],
    "launch": [f"launch {PINNED_RUN} --on slurm --dry-run --set engine=native"],
    "mlperf": [
        "mlperf check llama2_70b_lora --round 5.1 --no-official",
        "mlperf compare --benchmark llama31_8b --devices 8",
        "mlperf package llama2_70b_lora --org Org --system sys8.json --code code --out submission",
        "mlperf rcp llama2_70b_lora --creator Org --platform 8xH100",
        "mlperf score llama2_70b_lora --round 5.1",
    ],
    "plan": ["plan --model llama3.1-8b --cluster h100-8x1 --gbs 64 --seq 8192 --top 2 --pareto"],
    "report": ["report training"],
    "scale": ["scale --model llama3.1-8b --cluster h100-8x1 --gbs 64 --seq 8192"],
    "tune": ["tune system"],
}
"""Command lines by the module that prints their tables."""


# --- commands that train or measure: their tables of records, or of values made by hand ---


def print_ingest() -> None:
    print_text_tables(ingest.tables(read_ingest(Path("ingest"))))


def print_sweep() -> None:
    rows = trainings.read(Path("sweep")).rows
    print_text_tables(training_sweep.tables(summaries(rows, names=["a"])))


def print_training() -> None:
    show = import_module("meshwright.cli.train").show_record
    show(read_record(Path("faster")), folder=Path("faster"), page=None)


def print_checkpoints() -> None:
    command = import_module("meshwright.cli.commands.checkpoint")
    saved = {
        "step": 12_000, "tokens": 5e9, "bytes": 16e9, "is_best": True, "model": "llama3.1-8b", "damage": None,
        "plan": "TP8 PP2 DP8 zero1 mbs1 interleaved", "date": "2026-01-02 03:04",
    }  # fmt: skip
    document = {"folder": "/data/runs/night/saved", "checkpoints": [saved], "damaged": []}
    command._print_show(document)
    command._print_verify(document)


def print_kernels() -> None:
    row = SimpleNamespace(
        kernel="fp8_gemm_blocks_by_squares", tile="TM=128, TN=128, TK=128, 8 warps, 3 stages", architecture="gfx950",
        registers=128, spilled_bytes=0, shared_bytes=65_536, occupancy=0.25, matrix_instructions=64,
        moved_bytes=11, least_bytes=10,
    )  # fmt: skip
    import_module("meshwright.cli.commands.kernels")._print([row])


def print_benchmark_runs() -> None:
    run = {"index": 1, "seed": 17, "status": "converged", "samples": 1_234_567, "loss": 3.25, "minutes": 12.345}
    document = {
        "notes": [], "runs": [run], "raw_min": None, "num_converged": 1, "num_runs": 1, "target": 3.3, "label": "x",
        "missing_system_fields": [], "folder": "results/proxy_pretrain_xs",
    }  # fmt: skip
    import_module("meshwright.cli.commands.mlperf")._show(document)


def print_evaluation() -> None:
    row = {"on": "wikitext/test.txt", "metric": "bits_per_byte", "value": 0.75, "standard_error": 0.01, "number": 10**6}
    model = {"name": "llama3.1-8b", "step": 12_000}
    done = SimpleNamespace(to_rows=lambda: [row], model=model, texts=(), adapters={})
    import_module("meshwright.cli.commands.evaluate")._show(done)


def print_by_hand(module: str) -> Callable[[], None]:
    return lambda: print_table(*BY_HAND[module])


BY_HAND = {
    "bench": (
        {"family": "left", "known to 3 %": "right", "less well": "right", "failed": "right"},
        [("collectives", 1_234, 56, 7)],
    ),
    "bench_kernels": (
        {"call": "left", "route": "left", "forward ms": "right", "backward ms": "right", "of roofline": "right",
         "peak memory": "right", "error": "right", "remark": "left"},
        [("swiglu 8192 x 14336, bf16", "triton", "1.000 (0.9 to 1.1)", "2.000", "50 %", "1.0 GiB", "1e-3", "fastest")],
    ),
    "bench_offline": (
        {"input/output": "left", "replicas": "right", "input tokens": "right", "output tokens/s": "right",
         "total tokens/s": "right"},
        [("1024/128", 8, "1,024", "12,345", "123,456")],
    ),
    "inference": (
        {"error of": "left", "rows": "right", "fitted, median": "right", "held out, median": "right",
         "held out, p90": "right"},
        [("output tokens/s", 12, "8.3 %", "9.1 %", "15.0 %")],
    ),
    "rehearse_torch": (
        {"against one process": "left", "largest difference": "right", "of": "left"},
        [("gradient of the first", "1.5e-07", "model.layers.0.attention.query.weight")],
    ),
    "tune_dataloader_torch": (
        {"workers": "right", "first batch": "right", "peak tokens/s": "right", "a step waits": "right",
         "held": "right", "": "left"},
        [(4, "12.3 ms", "1,234,567", "0.1 to 2.3 ms", "1.5 GiB", "chosen")],
    ),
    "tune_gemm_torch": (
        {"GEMM": "left", "m x n x k": "right", "format": "right", "per step": "right", "before": "right",
         "after": "right", "speed-up": "right", "route": "right"},
        [("feed forward up", "8192 x 14336 x 4096", "bf16", "1,024", "12.3 ms", "10.1 ms", "1.22 (1.20 to 1.24)",
          "transposed")],
    ),
    "tune": (
        {"learning rate": "right", "loss": "right", "smoothed": "right"}, [("1.00e-03", "3.2500", "3.2612")]
    ),
}  # fmt: skip
"""Tables of commands that measure a device or import PyTorch, with their headings."""

REPORTS = {
    "bench_offline": serving_offline,
    "inference": serving_calibration,
    "tune": tune,
    "bench": bench,
    "bench_kernels": bench,
}
"""Modules that name the headings of a command."""

PRINTERS = {
    "bench_ingest": print_ingest,
    "bench_train": print_sweep,
    "checkpoint": print_checkpoints,
    "evaluate": print_evaluation,
    "kernels": print_kernels,
    "mlperf": print_benchmark_runs,
    "train": print_training,
    **{module: print_by_hand(module) for module in BY_HAND},
}


# --- inputs ---


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of all command lines."""
    folder = tmp_path_factory.mktemp("inputs")
    write_every_kind(folder)
    write_training(folder / "faster", speed=1.2, statistics__target=None)
    write_rows(folder)
    write_submission(folder)
    pinned = PINNED_RUN.read_text(encoding="utf-8")
    (folder / "other.yaml").write_text(pinned.replace("tensor: 4", "tensor: 8").replace("context: 2", "context: 1"))
    (folder / "others").mkdir()
    (folder / "others" / "pretrain.sh").write_text("torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64\n")
    for host, driver in (("a", "6.14.14"), ("b", "6.14.14"), ("c", "6.12.12")):
        document = {
            "report": "meshwright doctor",
            "version": 1,
            "host": host,
            "facts": {"driver": driver},
            "checks": [],
        }
        (folder / f"{host}.json").write_text(json.dumps(document))
    (folder / "served.json").write_text(json.dumps(INFERENCEX))
    return folder


def write_rows(folder: Path) -> None:
    """Published runs, and published points of inference."""
    with measured_runs_path().open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        few = [next(rows), *islice(rows, 0, None, 300)]
    with (folder / "few.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(few)
    (folder / "points.csv").write_text(
        "model,precision,hw,gpus,parallelism,framework,isl,osl,concurrency,metric,value,unit\n"
        "llama3.1-8b,bf16,H100,1,TP1,vllm,512,128,8,tpot,8.0,ms\n"
    )


def write_submission(folder: Path) -> None:
    """Results of MLPerf with a run that failed, a system and code."""
    logs = [SyntheticLog(seed=seed, evaluations=5 + seed % 2) for seed in range(20)]
    for seed, log in enumerate(logs):
        log.write(folder / "llama2_70b_lora" / f"result_{seed}.txt")
    write_system(folder)
    (folder / "code" / "train.py").write_text("print(1)\n")


# --- tests ---


def modules_with_tables() -> set[str]:
    """Modules of the command line that print tables."""
    sources = [(path.stem, path.read_text(encoding="utf-8")) for path in Path(cli.__file__).parent.rglob("*.py")]
    return {name for name, text in sources if "print_table(" in text or "print_text_tables(" in text} - {"output"}


def test_every_module_that_prints_tables_is_here():
    """Add a new command to `COMMANDS`, or to `PRINTERS` if it trains or measures."""
    assert {*COMMANDS, *PRINTERS} == modules_with_tables() | {"bench_kernels"}  # a second table of `bench`


@pytest.mark.parametrize("module", BY_HAND)
def test_tables_made_by_hand_have_the_headings_of_the_command(module):
    report = REPORTS.get(module)
    path = Path(report.__file__) if report else Path(cli.__file__).with_name(f"{module}.py")
    source = path.read_text(encoding="utf-8")
    columns, _ = BY_HAND[module]
    assert [heading for heading in columns if f'"{heading}"' not in source] == []


@pytest.mark.parametrize("module", sorted({*COMMANDS, *PRINTERS}))
def test_tables_are_whole_at_every_width(module, inputs, meshwright, recorded, monkeypatch):
    monkeypatch.chdir(inputs)
    monkeypatch.setattr("meshwright.mlperf.package.ask", lambda request: {"passes": True, "messages": []})
    found: list[TableOrBlocks] = []
    make = drawing.table

    def remember(*arguments, **named):
        found.append(make(*arguments, **named))
        return found[-1]

    monkeypatch.setattr(drawing, "table", remember)
    if module in PRINTERS:
        PRINTERS[module]()
    for line in COMMANDS.get(module, ()):
        number = len(found)
        outcome = meshwright(*shlex.split(line.format(recorded=recorded() if "{recorded}" in line else "")))
        assert len(found) > number, outcome
    for each in found:
        shown = replace(each, rows=each.rows[:MOST_ROWS])
        for width in WIDTHS:
            check_whole(shown, printed_at(width, shown, monkeypatch), width=width)
