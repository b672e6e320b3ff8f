"""Comparison of predicted and measured trainings on this CPU, after `bench device` and `calibrate`.

    python benchmarks/loop_cpu.py [--budget 170s] [--seed 1] [--configurations 24] [--rounds 3] [--out DIR]
                                  [--record FILE [--page FILE]]

    1. `meshwright bench device` within the budget
    2. `meshwright calibrate`
    3. models, batches, sequences, formats and plans drawn at random (by --seed, before anything is measured): widths,
       depths and lengths between and beyond those of step 1, with 1, 2 and 4 processes and every kind of parallelism
    4. `meshwright train --calibration` of each, so that the prediction is made before its first step; rounds are
       interleaved. The measured value is the median step of the median round, the predicted one the median over rounds

Off by: predicted over measured, minus one. Held: the 80 % interval holds the measured value. It takes the budget and
about half a minute for each configuration and round.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
PLANS = (
    (1, "parallel: {}"),
    (1, "parallel: {}"),
    (1, "parallel: {}"),
    (2, "parallel: {data_shard: 2, sharding: parameters}"),
    (2, "parallel: {data_replicate: 2, data_shard: 1, sharding: none}"),
    (2, "parallel: {data_shard: 2}"),
    (2, "parallel: {tensor: 2}"),
    (2, "parallel: {pipeline: 2}"),
    (4, "parallel: {data_shard: 4, sharding: parameters}"),
    (4, "parallel: {tensor: 4}"),
    (4, "parallel: {pipeline: 4}"),
    (4, "parallel: {tensor: 2, data_shard: 2, sharding: parameters}"),
)
"""Processes and plan, drawn in turn, so that each kind occurs."""
STEP_FLOPS = (2e10, 6e11)
"""Range of a step: at most a second or two."""
LEAST_STEPS, SECONDS_A_RUN = 12, 8.0


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One training that is not among the points of step 1."""

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    length: int
    micro: int
    num_micro: int
    precision: str
    tied: bool
    plan: str
    processes: int

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        width = 2 if "tensor: 2, data_shard: 2" in self.plan else self.processes if "data_" in self.plan else 1
        return self.micro * self.num_micro * width

    @property
    def flops(self) -> float:
        """FLOPs of a step, approximately."""
        layer = self.hidden * (2 * self.hidden * (1 + self.kv_heads / self.heads) + 3 * self.ffn)
        return 6.0 * (self.layers * layer + self.vocab * self.hidden) * self.global_batch * self.length

    @property
    def description(self) -> str:
        """Cell of the table."""
        return (
            f"{self.layers} x {self.hidden}, ffn {self.ffn}, {self.heads}/{self.kv_heads} heads, vocab {self.vocab}"
            f"{' tied' if self.tied else ''}, {self.length} x {self.global_batch} (micro {self.micro})"
        )

    def text(self, steps: int) -> str:
        """The run file."""
        return f"""
model:
  name: drawn
  family: LlamaForCausalLM
  hidden: {self.hidden}
  num_layers: {self.layers}
  vocab: {self.vocab}
  ffn_hidden: {self.ffn}
  attention: {{num_heads: {self.heads}, num_kv_heads: {self.kv_heads}}}
  tied_embeddings: {str(self.tied).lower()}
data: {{source: synthetic, sequence_length: {self.length}}}
batch: {{global_sequences: {self.global_batch}, micro: {self.micro}}}
precision: {self.precision}
cluster: here
{self.plan}
train: {{steps: {steps}}}
"""


def draw(random: random.Random, index: int) -> Configuration:
    """One configuration whose step is neither too short nor too long."""
    processes, plan = PLANS[index % len(PLANS)]
    while True:
        head_dim = random.choice([32, 64])
        heads = random.choice([4, 8]) if "tensor" in plan else random.choice([2, 3, 4, 6, 8])
        kv_heads = random.choice(
            [
                k
                for k in (1, 2, 4, 8)
                if heads % k == 0 and k >= (4 if "tensor: 4" in plan else 2 if "tensor" in plan else 1)
            ]
        )
        hidden = heads * head_dim
        depth = random.randint(2, 10)
        found = Configuration(
            hidden=hidden,
            layers=-(-depth // processes) * processes if "pipeline" in plan else depth,
            ffn=round(hidden * random.uniform(2, 4) / 32) * 32,
            heads=heads,
            kv_heads=kv_heads,
            vocab=random.randrange(512, 6000, 64),
            length=random.randrange(64, 640, 32),
            micro=random.choice([1, 2, 3, 4]),
            num_micro=random.choice([1, 2, 3, 4]) * (processes if "pipeline" in plan else 1),
            precision=random.choice(["fp32", "bf16"]),
            tied=random.random() < 0.3,
            plan=plan,
            processes=processes,
        )
        if STEP_FLOPS[0] <= found.flops <= STEP_FLOPS[1]:
            return found


def meshwright(*arguments: str) -> dict[str, Any]:
    """Run a command and return its JSON document."""
    done = subprocess.run([sys.executable, "-m", "meshwright", *arguments, "--json"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"meshwright {' '.join(arguments)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def train(configuration: Configuration, *, calibration: Path, folder: Path) -> dict[str, Any]:
    """One training: predicted and measured seconds of a step."""
    folder.mkdir(parents=True)
    run = folder / "run.yaml"
    steps = max(LEAST_STEPS, min(60, round(SECONDS_A_RUN / (configuration.flops / 1.5e11))))
    run.write_text(configuration.text(steps))
    meshwright("train", str(run), "--calibration", str(calibration), "--out", str(folder / "out"))
    record = json.loads((folder / "out" / "record.json").read_text())
    if record["predicted"] is None:
        raise SystemExit(f"{configuration.description}: nothing was predicted: {record['notes']}")
    return {
        "predicted": record["predicted"]["step"],
        "slower": record["predicted"]["slower_than_calibrated"],
        "measured_s": record["statistics"]["step_s"]["median"],
    }


def judged(configuration: Configuration, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """A row of the table."""
    predicted = {key: statistics.median(r["predicted"][key] for r in rounds) for key in ("low", "value", "high")}
    each = [r["measured_s"] for r in rounds]
    measured = statistics.median(each)
    return {
        "configuration": asdict(configuration),
        "predicted_s": [predicted[key] for key in ("low", "value", "high")],
        "measured_s": measured,
        "rounds_s": each,
        "slower": [r["slower"] for r in rounds],
        "error": predicted["value"] / measured - 1,
        "held": predicted["low"] <= measured <= predicted["high"],
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all rows, and by number of processes."""

    def of(some: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "configurations": len(some),
            "median_error": statistics.median(abs(r["error"]) for r in some),
            "largest_error": max(abs(r["error"]) for r in some),
            "held": sum(r["held"] for r in some) / len(some),
            "between_rounds": statistics.median(max(r["rounds_s"]) / min(r["rounds_s"]) - 1 for r in some),
        }

    counts = sorted({r["configuration"]["processes"] for r in rows})
    return {
        "all": of(rows),
        **{
            "one process" if n == 1 else f"{n} processes": of([r for r in rows if r["configuration"]["processes"] == n])
            for n in counts
        },
    }


def markdown(result: dict[str, Any]) -> str:
    """The tables of the page."""
    rounds = len(result["rows"][0]["rounds_s"])
    headings = ["", "configurations", "off by, median", "largest", "intervals that hold"]
    headings += ["between rounds, median"] if rounds > 1 else []
    lines = [
        f"{result['made']}; `bench device` took {result['bench_s']:.0f} s. `{result['command']}`",
        "",
        "| " + " | ".join(headings) + " |",
        "|---" * len(headings) + "|",
    ]
    for name, s in result["summary"].items():
        cells = [name, f"{s['configurations']}", f"{s['median_error']:.1%}", f"{s['largest_error']:.1%}"]
        cells += [f"{s['held']:.0%}"] + ([f"{s['between_rounds']:.1%}"] if rounds > 1 else [])
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "| model and batch | format | plan | predicted, ms | measured, ms | off by | held |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        c = Configuration(**row["configuration"])
        low, value, high = (1e3 * s for s in row["predicted_s"])
        lines.append(
            f"| {c.description} | {c.precision} | {c.plan.removeprefix('parallel: ').strip('{}') or 'one process'} "
            f"| {value:.0f} ({low:.0f} to {high:.0f}) | {1e3 * row['measured_s']:.0f} | {row['error']:+.1%} "
            f"| {'yes' if row['held'] else 'no'} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--budget", default="170s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--configurations", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    folder = given.out or Path(tempfile.mkdtemp())
    source = random.Random(given.seed)
    drawn = [draw(source, i) for i in range(given.configurations)]
    start_s = time.perf_counter()
    if not (folder / "records" / "records.csv").exists():
        meshwright("bench", "device", "--budget", given.budget, "--out", str(folder / "records"))
    bench_s = time.perf_counter() - start_s
    calibration = folder / "device.json"
    calibrated = meshwright("calibrate", str(folder / "records"), "--out", str(calibration))
    print(f"bench device took {bench_s:.0f} s, {len(drawn)} configurations follow", file=sys.stderr)
    rounds: list[list[dict[str, Any]]] = [[] for _ in drawn]
    for number in range(given.rounds):
        for i, configuration in enumerate(drawn):
            found = train(configuration, calibration=calibration, folder=folder / f"round{number}" / str(i))
            rounds[i].append(found)
            error = found["predicted"]["value"] / found["measured_s"] - 1
            print(
                f"round {number + 1}: {configuration.description}, {configuration.precision}, {configuration.plan}: "
                f"{1e3 * found['measured_s']:.0f} ms, off by {error:+.1%}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    rows = [judged(c, r) for c, r in zip(drawn, rounds, strict=True)]
    result = {
        "command": " ".join(["python", "benchmarks/loop_cpu.py", *sys.argv[1:]]),
        "made": calibrated["made"],
        "device": calibrated["device"],
        "bench_s": bench_s,
        "errors": calibrated["errors"],
        "summary": summary(rows),
        "rows": rows,
    }
    if given.record is not None:
        given.record.write_text(json.dumps(result, indent=1) + "\n")
    if given.page is not None:
        text = given.page.read_text()
        before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
        given.page.write_text(f"{before}\n\n{markdown(result)}\n\n{after}")
    table = Table(title="predicted by `bench device` and `calibrate`")
    for column in ("", "configurations", "off by, median", "largest", "held"):
        table.add_column(column)
    for name, s in result["summary"].items():
        table.add_row(
            name, str(s["configurations"]), f"{s['median_error']:.1%}", f"{s['largest_error']:.1%}", f"{s['held']:.0%}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
