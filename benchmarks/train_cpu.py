"""Comparison of training speed on a CPU: Meshwright, a plain loop, Hugging Face Trainer, litgpt.

    python benchmarks/train_cpu.py [--quick] [--threads 1] [--record FILE [--page FILE]] [--python litgpt=PATH]

All have the same weight initialization, tokens, micro-batches, optimizer and number of threads; bf16 means fp32 master
weights everywhere. Each contender is a process of its own, and rounds are interleaved (A B C D, A B C D, ...), so that
a busy moment of the machine affects all equally. `compiled` is under torch.compile, as a user of each switches it on;
its first step is the first of a process, with whatever the process finds in its caches. Threads wait as each library
does by default; with OMP_WAIT_POLICY=PASSIVE they sleep, so that processor time is only work. Two measures, both from
the second step to the last:

    tokens/s        from the times in the contender's steps.jsonl (median interval of a round)
    tokens/cpu-s    from the processor time of the operating system, which other load hardly changes

Start-up is from the start of the process to the end of its first step, peak memory is the process's largest resident
set. Meshwright measures a machine before its first training and keeps that for the later ones: its first round pays
for it, so medians are of a machine that has trained before and the highest start-up is that of a new one.

Losses must agree within a tolerance at every step; else the exit status is 1. All cases take about an hour on two
idle cores, --quick a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
PROGRAMS = {
    "meshwright": None,  # its own command
    "plain loop": "plain_loop.py",
    "Hugging Face Trainer": "huggingface_trainer.py",
    "litgpt": "litgpt_loop.py",
}
COMPILED = ", compiled"
RUN_FILES = {"run.yaml": False, "compiled.yaml": True}  # file of Meshwright: whether layers are compiled
CONTENDERS = [*PROGRAMS, *(f"{name}{COMPILED}" for name in PROGRAMS if name != "litgpt")]
ONLY_DENSE = ("plain loop", "litgpt")
PACKAGES = {
    "Hugging Face Trainer": ("transformers", "accelerate", "peft", "torch"),
    "litgpt": ("litgpt", "lightning", "torch"),
}
TOLERANCE = {"fp32": 2e-4, "bf16": 2e-2}  # of a loss, relative; bf16 rounds in other places in each of them
LEARNING_RATE, BETAS, EPSILON, CLIP = 1e-3, (0.9, 0.95), 1e-8, 1.0
POLL_S = 0.02
SAME_CONDITIONS = ("device", "software", "contenders", "git_commit", "waiting", "shapes")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
LIMIT_S = 600


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and its batch."""

    hidden: int
    num_layers: int
    vocab: int
    ffn_hidden: int
    num_heads: int
    num_kv_heads: int
    length: int
    sequences: int
    micro: int
    norm_epsilon: float = 1e-5
    rope_theta: float = 10_000.0
    num_experts: int = 0  # 0: a dense model; else `ffn_hidden` is the width of one
    top_k: int = 0
    rank: int = 0  # of adapters on the attention's matrices; 0: all weights are trained

    @property
    def is_plain(self) -> bool:
        """All weights of a dense model are trained."""
        return not self.num_experts and not self.rank

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.length


SHAPES = {
    "tiny": Shape(  # examples/runs/tiny-llama-cpu.yaml
        hidden=192, num_layers=6, vocab=4096, ffn_hidden=512, num_heads=6, num_kv_heads=2,
        length=256, sequences=16, micro=8,
    ),
    "small": Shape(  # 87 million parameters
        hidden=768, num_layers=10, vocab=16_384, ffn_hidden=2304, num_heads=12, num_kv_heads=4,
        length=512, sequences=4, micro=2,
    ),
}  # fmt: skip
SHAPES |= {
    "tiny-lora": replace(SHAPES["tiny"], rank=16),
    "tiny-mixture": replace(SHAPES["tiny"], ffn_hidden=256, num_experts=8, top_k=2),
}
STEPS = {"tiny": 9, "small": 4, "tiny-lora": 9, "tiny-mixture": 9}
ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """Training of all contenders in a round."""

    shape: str
    precision: str

    @property
    def name(self) -> str:
        return f"{self.shape} {self.precision}"


CASES = [Case(shape=shape, precision=precision) for shape in SHAPES for precision in ("bf16", "fp32")]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One contender in one round."""

    losses: list[float]
    tokens_per_s: float
    tokens_per_cpu_s: float
    start_up_s: float  # from the start of the process to the end of the first step
    peak_memory_bytes: int


def run_file(shape: Shape, *, precision: str, folder: Path, steps: int, compiled: bool) -> str:
    """The run file of a task."""
    model = {
        "name": "benchmark", "family": "LlamaForCausalLM", "hidden": shape.hidden, "num_layers": shape.num_layers,
        "vocab": shape.vocab, "ffn_hidden": shape.ffn_hidden, "tied_embeddings": True,
        "norm_epsilon": shape.norm_epsilon, "rope": {"theta": shape.rope_theta},
        "attention": {"num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads},
    }  # fmt: skip
    if shape.num_experts:
        experts = {"num_experts": shape.num_experts, "top_k": shape.top_k, "ffn_hidden": shape.ffn_hidden}
        model |= {"family": "MixtralForCausalLM", "experts": experts}
    optimizer = {
        "learning_rate": LEARNING_RATE, "betas": list(BETAS), "epsilon": EPSILON, "weight_decay": 0.0,
        "gradient_clip": CLIP, "schedule": "constant",
    }  # fmt: skip
    document = {
        "model": model,
        "weights": str(folder / "weights"),
        "data": {"source": str(folder / "tokens"), "sequence_length": shape.length},
        "batch": {"global_sequences": shape.sequences, "micro": shape.micro},
        "optimizer": optimizer,
        "precision": precision,
        "cluster": "here",
        "train": {"steps": steps, "compile": compiled},
    }
    if shape.rank:
        document |= {"task": "lora", "lora": {"rank": shape.rank, "alpha": 2 * shape.rank}}
    return json.dumps(document, indent=1)  # JSON is YAML


def prepare(shape: Shape, *, precision: str, folder: Path, steps: int, threads: int) -> None:
    """Write weights, adapters, tokens, and the batches in the order of Meshwright's data loader."""
    import torch

    from meshwright import runfile
    from meshwright.training.conversion import export_initial_adapters
    from meshwright.training.data import Batches, open_data
    from meshwright.training.data.megatron import token_type, write_indexed
    from meshwright.training.models import build_model, init_weights
    from meshwright.training.weights import save_weights

    folder.mkdir(parents=True)
    # Text that is on every machine, two bytes a token: something to learn, and no tokenizer to agree on.
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    pairs = np.frombuffer(text[: len(text) // 2 * 2], dtype=np.uint16)
    write_indexed(folder / "tokens", [pairs % shape.vocab], dtype=token_type(shape.vocab))
    for name, compiled in RUN_FILES.items():
        document = run_file(shape, precision=precision, folder=folder, steps=steps, compiled=compiled)
        (folder / name).write_text(document)
    run = runfile.load(folder / "run.yaml")
    model = build_model(run.model, device="cpu")
    init_weights(model, seed=0)
    save_weights(model, folder / "weights", dtype=torch.float32, max_positions=shape.length)
    if shape.rank:
        export_initial_adapters(run, folder / "adapter")
    reader = Batches(samples=open_data(run).train, global_batch=shape.sequences, seed=run.train.seed)
    batches = [reader.at(step) for step in range(steps)]
    np.savez(
        folder / "batches.npz",
        tokens=np.stack([b.tokens_BT.numpy() for b in batches]),
        labels=np.stack([b.labels_BT.numpy() for b in batches]),
    )
    sizes = asdict(shape)
    batch = {name: sizes.pop(name) for name in ("length", "sequences", "micro")}
    task = batch | {
        "model": sizes, "precision": precision, "steps": steps, "threads": threads,
        "learning_rate": LEARNING_RATE, "betas": BETAS, "epsilon": EPSILON, "clip": CLIP,
    }  # fmt: skip
    (folder / "task.json").write_text(json.dumps(task))


def command_of(contender: str, *, python: str, folder: Path, out: Path) -> list[str]:
    """Command of a contender."""
    name, _, is_compiled = contender.partition(COMPILED[:2])
    script = PROGRAMS[name]
    if script is None:
        run = next(file for file, compiled in RUN_FILES.items() if compiled == bool(is_compiled))
        return [python, "-m", "meshwright", "train", str(folder / run), "--out", str(out)]
    return [python, str(HERE / "contenders" / script), str(folder), str(out), *(["--compile"] if is_compiled else [])]


def can_train(contender: str, shape: Shape) -> bool:
    """False for contenders that have no adapters and no mixtures."""
    return shape.is_plain or not contender.startswith(ONLY_DENSE)


def missing(contender: str, *, python: str) -> str | None:
    """Text of the packages that a contender lacks."""
    wanted = PACKAGES.get(contender.removesuffix(COMPILED), ())
    code = "import sys\nfrom importlib.util import find_spec\nprint(*[n for n in sys.argv[1:] if find_spec(n) is None])"
    done = subprocess.run([python, "-c", code, *wanted], capture_output=True, text=True, check=True)
    return f"not installed: {', '.join(done.stdout.split())}" if done.stdout.strip() else None


def cpu_s(pid: int) -> float:
    """Processor time of a process and all its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(command: list[str], *, shape: Shape, out: Path, steps: int, threads: int, cache: Path) -> Measured:
    """Run one contender, and look at its steps and its processor time while it runs."""
    log, path = out.with_suffix(".log"), out / "steps.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    counts = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    environment = os.environ | counts | {"MESHWRIGHT_CACHE": str(cache)}
    used_s: list[float] = []  # processor time after each step
    first_s = 0.0
    start_s = time.perf_counter()
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
        while True:
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            if ended:
                process.returncode = os.waitstatus_to_exitcode(status)
                break
            if path.exists() and (num := path.read_bytes().count(b"\n")) > len(used_s):
                first_s = first_s or time.perf_counter() - start_s
                used_s += [cpu_s(process.pid)] * (num - len(used_s))
            if time.perf_counter() - start_s > LIMIT_S:
                process.kill()
            time.sleep(POLL_S)
    if process.returncode:
        raise RuntimeError(log.read_text()[-2000:])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    elapsed = [line["elapsed_s"] for line in lines]
    if len(lines) != steps or len(used_s) != steps:
        raise RuntimeError(f"{len(lines)} steps of {steps} were taken, {len(used_s)} were seen")
    return Measured(
        losses=[line["loss"] for line in lines],
        tokens_per_s=shape.tokens / statistics.median(np.diff(elapsed).tolist()),
        tokens_per_cpu_s=shape.tokens * (steps - 1) / (used_s[-1] - used_s[0]),
        start_up_s=first_s,
        peak_memory_bytes=usage.ru_maxrss * 1024,
    )


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"n": len(values), "median": statistics.median(values), "low": min(values), "high": max(values)}


def summary(rounds: dict[str, list[Measured]], *, case: Case) -> dict[str, Any]:
    """Summary of all rounds of a case, with the ratios round by round."""
    ours = rounds["meshwright"]
    rows: dict[str, Any] = {}
    for contender, measured in rounds.items():
        row: dict[str, Any] = {
            key: spread([getattr(m, key) for m in measured])
            for key in ("tokens_per_s", "tokens_per_cpu_s", "start_up_s", "peak_memory_bytes")
        }
        row["losses"] = measured[0].losses
        gaps = [abs(a - b) / b for a, b in zip(measured[0].losses, ours[0].losses, strict=True)]
        row["largest_loss_difference"] = max(gaps)
        row["losses_agree"] = max(gaps) <= TOLERANCE[case.precision]
        for key in ("tokens_per_s", "tokens_per_cpu_s"):
            pairs = zip(ours, measured, strict=True)
            row[f"meshwright_over_it_{key}"] = spread([getattr(a, key) / getattr(b, key) for a, b in pairs])
        rows[contender] = row
    return rows


def table(rows: dict[str, Any]) -> str:
    """A case as a table: medians; ratios are Meshwright over the row's, with the spread of the rounds."""
    lines = [
        "| | tokens/s | ratio | tokens/cpu-s | ratio | first step after | peak memory | loss |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
        *(f"| {contender} | {' | '.join(cells(row))} |" for contender, row in rows.items()),
    ]
    return "\n".join(lines)


def measured_part(record: dict[str, Any]) -> str:
    """The measured part of the page, from a record."""
    device, software = record["device"], record["software"]
    versions = f"torch {software['torch']}"
    others = "; ".join(
        f"{name} with {', '.join(f'{n} {v}' for n, v in packages.items())}"
        for name, packages in record["contenders"].items()
    )
    parts = [
        f"{record['date']}, {record['machine']}, {device['threads']} threads, {versions}; {others}. "
        f"Threads that wait: {record['waiting']}. {commands_of(record)}",
        *(f"Not run: {name} ({why})." for name, why in record["not_run"].items()),
    ]
    for name, rows in record["cases"].items():
        shape, precision = name.split()
        s = record["shapes"][shape]
        num = rows["meshwright"]["tokens_per_s"]["n"]
        parts += [
            f"**{shape}, {precision}**: {s['num_layers']} layers of {s['hidden']}, {s['vocab']:,} tokens of "
            f"vocabulary, {s['sequences']} sequences of {s['length']} in micro-batches of {s['micro']}; "
            f"{num} rounds of {s['steps']} steps",
            table(rows),
        ]
    return "\n\n".join(parts)


def commands_of(record: dict[str, Any]) -> str:
    """The commands that measured the cases of a record, as code."""
    return ", ".join(f"`{command}`" for command in dict.fromkeys(record["commands"].values()))


def write_page(page: Path, record: dict[str, Any]) -> None:
    """Replace the measured part of the page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{measured_part(record)}\n\n{END}{after}", encoding="utf-8")


def with_spread(values: dict[str, float], *, unit: str, scale: float = 1.0, digits: int = 0) -> str:
    """Median and unit, lowest and highest in parentheses."""
    median, low, high = (f"{values[key] / scale:,.{digits}f}" for key in ("median", "low", "high"))
    return f"{median} {unit} ({low}–{high})"


def cells(row: dict[str, Any]) -> list[str]:
    """The columns of a row of the table, as text."""

    def ratio(key: str) -> str:
        r = row[f"meshwright_over_it_{key}"]
        return f"{r['median']:.2f} ({r['low']:.2f}–{r['high']:.2f})"

    return [
        f"{row['tokens_per_s']['median']:,.0f}",
        ratio("tokens_per_s"),
        f"{row['tokens_per_cpu_s']['median']:,.0f}",
        ratio("tokens_per_cpu_s"),
        with_spread(row["start_up_s"], unit="s", digits=1),
        with_spread(row["peak_memory_bytes"], unit="MiB", scale=2**20),
        f"{row['losses'][0]:.4f} to {row['losses'][-1]:.4f}",
    ]


def versions_of(contender: str, *, python: str) -> dict[str, str]:
    """Versions of a contender's packages."""
    code = "import sys\nfrom importlib.metadata import version\nprint(*map(version, sys.argv[1:]))"
    names = PACKAGES.get(contender, ())
    done = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.split(), strict=True))


def record_of(chosen: argparse.Namespace, *, cases: dict[str, Any], pythons: dict[str, str], not_run: dict[str, str]):
    """The record: measurements, software and device."""
    import torch
    from conditions import conditions

    from meshwright.training import telemetry

    ran = {name.removesuffix(COMPILED) for rows in cases.values() for name in rows}
    words = ["python", "benchmarks/train_cpu.py", *sys.argv[1:]]
    command = " ".join(f"{word.partition('=')[0]}=..." if "=" in word else shlex.quote(word) for word in words)
    return {
        "device": telemetry.device_facts(torch.device("cpu"), accelerator=None) | {"threads": chosen.threads},
        "software": telemetry.software_facts(),
        "contenders": {n: versions_of(n, python=pythons[n]) for n in PACKAGES if n in ran},
        "commands": dict.fromkeys(cases, command),
        "waiting": os.environ.get("OMP_WAIT_POLICY", "as PyTorch has it"),
        "shapes": {name: asdict(shape) | {"steps": STEPS[name]} for name, shape in SHAPES.items()},
        "not_run": not_run,
        "cases": cases,
    } | conditions()


def keep(record: dict[str, Any], chosen: argparse.Namespace) -> None:
    """Write the record so far, so that an interruption costs one case.

    Cases that are not measured now stay in the record if device, software, contenders and commit are the same.
    """
    if chosen.record:
        chosen.record.parent.mkdir(parents=True, exist_ok=True)
        before = json.loads(chosen.record.read_text()) if chosen.record.exists() else {}
        if all(before.get(key) == record[key] for key in SAME_CONDITIONS):
            for key in ("cases", "commands"):
                record[key] = before[key] | record[key]
        chosen.record.write_text(json.dumps(record, indent=1) + "\n")
        if chosen.page:
            write_page(chosen.page, record)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tiny model in bf16, one round")
    parser.add_argument("--case", action="append", choices=[c.name for c in CASES], help="default: all")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contender", action="append", choices=CONTENDERS[1:], help="default: all")
    parser.add_argument("--record", type=Path, help="write what was measured as JSON")
    parser.add_argument("--page", type=Path, help="put the record's tables into this page")
    parser.add_argument("--python", action="append", default=[], metavar="CONTENDER=PATH",
                        help="another interpreter for a contender that needs other packages")  # fmt: skip
    return parser.parse_args()


def main() -> None:
    chosen = options()
    pythons = dict.fromkeys(CONTENDERS, sys.executable) | dict(p.split("=", 1) for p in chosen.python)
    contenders = [CONTENDERS[0], *(name for name in CONTENDERS[1:] if name in (chosen.contender or CONTENDERS))]
    names = ["tiny bf16"] if chosen.quick else chosen.case or [case.name for case in CASES]
    not_run = {name: why for name in contenders if (why := missing(name, python=pythons[name]))}
    for name, why in not_run.items():
        print(f"{name}: not run, {why}", file=sys.stderr)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        for case in (case for case in CASES if case.name in names):
            shape, steps, folder = (SHAPES[case.shape], STEPS[case.shape], Path(work) / case.name.replace(" ", "-"))
            prepare(shape, precision=case.precision, folder=folder, steps=steps, threads=chosen.threads)
            rounds: dict[str, list[Measured]] = {
                name: [] for name in contenders if name not in not_run and can_train(name, shape)
            }
            num_rounds = 1 if chosen.quick else chosen.rounds
            for i in range(num_rounds):
                for name in rounds:
                    out = folder / f"{contenders.index(name)}-{i}"
                    command = command_of(name, python=pythons[name], folder=folder, out=out)
                    measured = measure(
                        command, shape=shape, out=out, steps=steps, threads=chosen.threads, cache=folder / "cache"
                    )
                    rounds[name].append(measured)
                    print(f"{case.name}, round {i + 1}: {name} {measured.tokens_per_cpu_s:,.0f} tokens/cpu-s",
                          file=sys.stderr)  # fmt: skip
            results[case.name] = summary(rounds, case=case)
            print(f"\n{case.name}\n\n{table(results[case.name])}", flush=True)
            keep(record_of(chosen, cases=results, pythons=pythons, not_run=not_run), chosen)
    rows = [row for case in results.values() for row in case.values()]
    sys.exit(0 if all(row["losses_agree"] for row in rows) else "losses differ: it was not the same training")


if __name__ == "__main__":
    main()
