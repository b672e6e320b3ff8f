"""Comparison of predicted and measured serving on this CPU, after `inference calibrate`.

    python benchmarks/loop_serving.py [--rounds 4] [--work DIR] [--arrivals] [--record FILE [--page FILE]]

    1. five models of random weights, as Hugging Face folders
    2. `meshwright bench serve --server llamacpp` of each configuration, one repeat in each round, so that a drift of
       the machine meets all configurations. Folders that DIR holds already are not measured again
    3. `meshwright inference calibrate` of three models with some lengths and loads
    4. `meshwright inference accuracy --calibration` of other loads, other lengths, and two other models
    5. with --arrivals, constant arrivals at shares of what the server finishes: percentiles of `bench serve` beside
       those that `inference estimate --rate` simulates

Off by: predicted over measured, minus one. It takes four to five minutes a round on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
SHAPES = {
    "small": (256, 1024, 4, 4, 2), "mid": (512, 1536, 8, 8, 2), "wide": (768, 2048, 4, 12, 4),
    "deep": (384, 1024, 16, 6, 2), "large": (1024, 2816, 12, 16, 4),
}  # fmt: skip
"""Hidden size, feed-forward size, layers, heads, key/value heads."""
VOCABULARY, POSITIONS = 4096, 2048
CONFIGURATIONS = (
    ("fit", "small", 64, 32, "1,4,12", 36),
    ("fit", "mid", 64, 32, "1,4,12", 12),
    ("fit", "wide", 64, 32, "1,4,12", 12),
    ("fit", "mid", 384, 32, "1,4", 4),
    ("fit", "mid", 32, 160, "1,4", 4),
    ("loads", "small", 64, 32, "2,6,16", 48),
    ("loads", "mid", 64, 32, "2,6,16", 16),
    ("lengths", "small", 192, 96, "1,4", 12),
    ("lengths", "wide", 192, 96, "1,4", 4),
    ("models", "deep", 64, 32, "1,4,12", 12),
    ("models", "large", 64, 32, "1,4", 4),
)
"""Part, model, input and output tokens, requests in flight, requests of each load."""
ARRIVALS = (("small", 64, 32), ("mid", 64, 32), ("wide", 192, 96))
"""Model, input and output tokens under constant arrivals."""
SHARES, ARRIVING = (0.3, 0.6, 0.8), 100
"""Of the requests/s that the server finishes, and requests of each of these loads."""
HELD_OUT = ("loads", "lengths", "models")
SHOWN = {"output_throughput": "output tokens/s", "ttft": "TTFT", "tpot": "time per output token"}


def make_models(folder: Path) -> None:
    """Write the models of `SHAPES` with one tokenizer of the standard library's text."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"],
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator((p.read_text(errors="replace") for p in library[:150]), trainer)
    torch.manual_seed(0)
    for name, (hidden, ffn, layers, heads, kv_heads) in SHAPES.items():
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, head_dim=64, vocab_size=VOCABULARY, max_position_embeddings=POSITIONS,
            bos_token_id=None, eos_token_id=0,
        )  # fmt: skip
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / name)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder / name)


def meshwright(*arguments: object) -> str:
    """Run a command of this package and return its stdout."""
    argv = [sys.executable, "-m", "meshwright", *map(str, arguments)]
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout


def measure(work: Path, rounds: int) -> dict[str, list[Path]]:
    """Measure every configuration once a round; return the folders of each part."""
    found: dict[str, list[Path]] = {}
    if not all((work / "models" / name / "config.json").exists() for name in SHAPES):
        make_models(work / "models")
    for number in range(1, rounds + 1):
        for part, model, inputs, outputs, loads, requests in CONFIGURATIONS:
            folder = work / f"{part}-{model}-{inputs}-{outputs}-{number}"
            if not (folder / "serving.csv").exists():
                meshwright(
                    "bench", "serve", "--server", "llamacpp", "--model", work / "models" / model, "--input-tokens",
                    inputs, "--output-tokens", outputs, "--concurrency", loads, "--requests", requests,
                    "--no-self-test", "--out", folder, "--json",
                )  # fmt: skip
            found.setdefault(part, []).append(folder)
    return found


def compare(work: Path, folders: dict[str, list[Path]]) -> dict[str, Any]:
    """Calibrate on one part and predict the others."""
    calibration = work / "llamacpp-cpu.json"
    fitted = json.loads(
        meshwright("inference", "calibrate", *folders["fit"], "--cluster", "cpu-1x1", "--out", calibration, "--json")
    )
    parts = {}
    for part in HELD_OUT:
        named = [text for folder in folders[part] for text in ("--records", folder)]
        parts[part] = json.loads(meshwright("inference", "accuracy", *named, "--calibration", calibration, "--json"))
    return {
        "fitted": {key: fitted[key] for key in ("made", "errors", "row_sd", "source_sd", "interval_scale", "rows")},
        "parts": parts,
    }  # fmt: skip


def under_arrivals(work: Path, calibration: Path) -> list[dict[str, Any]]:
    """Percentiles of latencies under constant arrivals: measured, less the time without a processor, and simulated."""
    rows = []
    for model, inputs, outputs in ARRIVALS:
        lengths = ("--input-tokens", inputs, "--output-tokens", outputs, "--arrivals", "constant")
        estimate = (
            "inference", "estimate", "--model", work / "models" / model, "--cluster", "cpu-1x1", "--calibration",
            calibration, *lengths, "--json", "--rate",
        )  # fmt: skip
        most = json.loads(meshwright(*estimate, 0.01))["arrivals"]["capacity_requests_per_s"]
        for rate in (round(share * most, 3) for share in SHARES):
            simulated = json.loads(meshwright(*estimate, rate))["arrivals"]
            measured = json.loads(
                meshwright(
                    "bench", "serve", "--server", "llamacpp", "--model", work / "models" / model, *lengths,
                    "--rate", rate, "--requests", ARRIVING, "--no-self-test",
                    "--out", work / f"arrivals-{model}-{rate}", "--json",
                )
            )["points"][0]  # fmt: skip
            had = 1 - (measured["server_wait_ratio"] or 0.0)
            for ours, theirs in (("ttft_s", "ttft_s"), ("itl_s", "tpot_s"), ("e2e_s", "e2e_s")):
                for ends in (("p50", "median"), ("p95", "p95"), ("p99", "p99")):
                    found = {"simulated": simulated[ours][ends[0]], "measured": had * measured[theirs][ends[1]]}
                    rows.append({"model": model, "rate": rate, "latency": f"{ours[:-2]} {ends[0]}"} | found)
    return rows


def waited(folders: dict[str, list[Path]]) -> list[float]:
    """Share of its time in which the server had no processor, of each load."""
    from meshwright.records.serving import read_serving

    points = [p for part in folders.values() for folder in part for p in read_serving(folder).points]
    return sorted(p.server_wait_ratio or 0.0 for p in points)


def page_text(record: dict[str, Any]) -> str:
    """Markdown of the tables."""
    waits = record["waited"]
    lines = [
        f"{record['rounds']} rounds, {record['date']}, one thread of an AMD EPYC for the server. Other programs "
        f"used the machine: the server waited for a processor in {100 * waits[0]:.0f} to {100 * waits[-1]:.0f} % of "
        f"its time (median {100 * statistics.median(waits):.0f} %), which is taken out. "
        f"`python benchmarks/loop_serving.py --rounds {record['rounds']}`",
        "",
        "| | values | off by, median | 90th percentile | intervals that hold |",
        "|---|--:|--:|--:|--:|",
    ]
    titles = {"loads": "other loads", "lengths": "other lengths", "models": "other models"}
    rows = [(part, _shown(row)) for part in HELD_OUT for row in record["parts"][part]["rows"]]
    for metric, text in SHOWN.items():
        chosen = [(part, row) for part, row in rows if row["metric"] == metric]
        lines += [_error_line(f"{text}, all held out", [row for _, row in chosen])]
        lines += [_error_line(f"{text}, {titles[part]}", [row for p, row in chosen if p == part]) for part in HELD_OUT]
    lines += ["", "| held out | load | value | predicted | measured | off by |", "|---|---|---|--:|--:|--:|"]
    for part, row in rows:
        scale, unit = (1, "tokens/s") if row["metric"] == "output_throughput" else (1e3, "ms")
        low, value, high, measured = (scale * row[k] for k in ("low", "predicted", "high", "measured"))
        lines.append(
            f"| {titles[part]} | {row['model']} {row['lengths']}, {row['in_flight']} in flight | "
            f"{SHOWN[row['metric']].removesuffix(' tokens/s')}, {unit} | "
            f"{value:.4g} ({low:.4g} to {high:.4g}) | {measured:.4g} | {100 * (value / measured - 1):+.0f} % |"
        )
    if record.get("arrivals"):
        lines += [
            "",
            "| constant arrivals | latency | simulated, ms | measured, ms | off by |",
            "|---|---|--:|--:|--:|",
        ]
        lines += [
            f"| {row['model']}, {row['rate']:g} requests/s | {row['latency']} | {1e3 * row['simulated']:.4g} | "
            f"{1e3 * row['measured']:.4g} | {100 * (row['simulated'] / row['measured'] - 1):+.0f} % |"
            for row in record["arrivals"]
        ]
    return "\n".join(lines)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row of `inference accuracy` with its asked lengths and load."""
    lengths = row["source"].removeprefix(f"{row['model']} ")
    return row | {"lengths": lengths, "in_flight": f"{row['concurrency']:g}"}


def _error_line(title: str, rows: list[dict[str, Any]]) -> str:
    errors = sorted(abs(row["predicted"] / row["measured"] - 1) for row in rows)
    inside = sum(row["low"] <= row["measured"] <= row["high"] for row in rows) / len(rows)
    tail = statistics.quantiles(errors, n=10, method="inclusive")[-1]
    return (
        f"| {title} | {len(rows)} | {100 * statistics.median(errors):.0f} % | {100 * tail:.0f} % | "
        f"{100 * inside:.0f} % |"
    )


def main() -> None:
    """Measure, calibrate, compare, and write the record and the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--work", type=Path, default=None, help="folder of models and records")
    parser.add_argument("--date", default=None, help="date of the measurement, of records that exist already")
    parser.add_argument("--arrivals", action="store_true", help="also measure constant arrivals")
    parser.add_argument("--record", type=Path, default=None)
    parser.add_argument("--page", type=Path, default=None)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = asked.work or Path(scratch)
        folders = measure(work, asked.rounds)
        from datetime import UTC, datetime

        record = compare(work, folders) | {
            "rounds": asked.rounds, "waited": waited(folders),
            "date": asked.date or datetime.now(UTC).date().isoformat(),
            "arrivals": under_arrivals(work, work / "llamacpp-cpu.json") if asked.arrivals else [],
        }  # fmt: skip
    text = page_text(record)
    Console(width=160).print(text, markup=False)
    if asked.record is not None:
        asked.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if asked.page is not None:
        page = asked.page.read_text(encoding="utf-8")
        before, after = page.partition(BEGIN)[0], page.partition(END)[2]
        asked.page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
