"""Peaks of trainings on this CPU beside what was predicted for them: `python benchmarks/cpu_memory.py --record FILE`.

Every configuration is trained for four steps on random tokens by `meshwright train`, in a process of its own. Its
record holds the peak (resident memory of the fullest process since it began) and what was predicted before the first
step: what the process held then, its libraries, and what the model adds. `--page FILE` writes the table of a record
into a page and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from meshwright import __version__, runfile
from meshwright.engines.native.engine import planned_here
from meshwright.files import write_atomically
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.request import request_for
from meshwright.training import device as devices
from meshwright.training.machine import processor_name

MIB = 2**20
RUN = Path(__file__).parents[1] / "examples" / "runs" / "tiny-llama-cpu.yaml"
BEGIN, END = "<!-- cpu_memory: begin -->", "<!-- cpu_memory: end -->"
COMMON = (
    "train={steps: 4}", "data={source: synthetic, sequence_length: 256}", "optimizer={learning_rate: 1.0e-3}",
)  # fmt: skip
LONG = ("data={source: synthetic, sequence_length: 1024}", "batch={global_sequences: 4, micro: 2}")
TWO = "batch={global_sequences: 16, micro: 4}"
CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "12 layers": ("model.num_layers=12",),
    "hidden 384, feed-forward 1,024": ("model.hidden=384", "model.ffn_hidden=1024"),
    "vocabulary of 32,768": ("model.vocab=32768",),
    "2 sequences of 1,024 tokens": LONG,
    "4 experts, 2 a token": ("model.experts={num_experts: 4, top_k: 2, ffn_hidden: 256}", "model.ffn_hidden=0"),
    "LoRA of rank 8": ("task=lora", "lora={rank: 8}"),
    "activations in 8 bits": ("kernels.stored_activations=[feed_forward, norm]",),
    "recomputation of layers": ("parallel={recompute: full}",),
    "two processes, FSDP": ("parallel={data_shard: 2, sharding: parameters}", TWO),
    "two processes, tensor parallel": ("parallel={tensor: 2}",),
    "fp32": ("precision=fp32",),
    "gradient accumulation over 8 micro-batches": ("batch={global_sequences: 32, micro: 4}",),
    "micro-batch of 16": ("batch={global_sequences: 16, micro: 16}",),
    "compiled layers": ("train={steps: 4, compile: true}",),
    "attention by PyTorch's kernel": ("kernels={routes: {attention: sdpa}}",),
}


def of_model_mib(changes: tuple[str, ...]) -> int:
    """Return the part of a prediction that the cost model makes, MiB: all but what the process held before."""
    device = torch.device("cpu")
    run = planned_here(runfile.load(RUN, overrides=[*COMMON, *changes]), device=device)
    assert run.plan is not None
    cluster = devices.cluster_here(device, num_devices=run.plan.num_devices, rates=None)
    estimate = estimate_plan(request_for(replace(run, cluster=cluster)), run.plan)
    return round(estimate.step.memory.reserved_bytes / MIB)


def measured(name: str, *, folder: Path) -> dict[str, Any]:
    """Peak and prediction of one configuration, MiB."""
    words = [word for change in (*COMMON, *CONFIGURATIONS[name]) for word in ("--set", change)]
    command = [sys.executable, "-m", "meshwright", "train", str(RUN), *words, "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr.strip()[-400:]}")
    record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    peak = record["statistics"]["peak_memory_bytes"] / MIB
    predicted = record["predicted"]["memory_bytes"] / MIB
    return {"configuration": name, "measured_mib": round(peak), "predicted_mib": round(predicted),
            "of_model_mib": of_model_mib(CONFIGURATIONS[name])}  # fmt: skip


def table(record: dict[str, Any]) -> str:
    """Rows of a record as Markdown, and the errors of all."""
    lines = [
        "| configuration | measured | predicted | of it the model | error |", "|---|--:|--:|--:|--:|",
    ]  # fmt: skip
    errors = [row["predicted_mib"] / row["measured_mib"] - 1 for row in record["rows"]]
    for row, error in zip(record["rows"], errors, strict=True):
        numbers = (row["measured_mib"], row["predicted_mib"], row["of_model_mib"])
        cells = " | ".join(f"{number:,}" for number in numbers)
        lines.append(f"| {row['configuration']} | {cells} | {100 * error:+.0f} % |")
    sizes = [abs(error) for error in errors]
    within = sum(size <= 0.1 for size in sizes)
    lines += [
        "",
        f"Errors are {100 * statistics.median(sizes):.0f} % in the median and {100 * max(sizes):.0f} % at most; "
        f"{within} of {len(sizes)} are at most 10 %. {record['device']}, MiB, one run each.",
    ]
    return "\n".join(lines)


def page_with(text: str, record: dict[str, Any]) -> str:
    """Return the text of a page with the table of `record` between its marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(record)}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Measure, and write a record; or write the table of one into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--page", type=Path, help="write the table of the record there, measure nothing")
    given = parser.parse_args()
    if given.page is not None:
        record = json.loads(given.record.read_text(encoding="utf-8"))
        write_atomically(given.page, page_with(given.page.read_text(encoding="utf-8"), record))
        return
    rows = []
    for name in CONFIGURATIONS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measured(name, folder=Path(folder) / "out"))
        print(rows[-1], file=sys.stderr)
    record = {
        "meshwright": __version__, "torch": torch.__version__, "device": processor_name(), "rows": rows,
    }  # fmt: skip
    write_atomically(given.record, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
