"""Times of a step by category on every engine that is installed, and the gap to the native engine.

    python benchmarks/engines_gap.py [--engines native,torchtitan,...] [--cases 1,2] [--steps 24] [--out DIR]
                                     [--record FILE] [--page FILE]

One model with the same tokens, batch and recomputation in one process (case 1), and on two with their states sharded
(case 2). Every engine trains it once with --profile. With --out finished trainings are kept and not repeated.

Some engines need a shim to run on a CPU (tests/engines/ENGINE/shim), which is put in front of their PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conditions import conditions
from engines_parity import NATIVE, SHIMS, parser_of, place_of, publish, versions

from meshwright import runfile
from meshwright.answers.comparison.study import PARTS, compare_items
from meshwright.engines.base import find_engine

ENGINES = (NATIVE, "torchtitan", "megatron", "maxtext")
CASES = {  # label -> plan; SHARDED is the strongest sharding that an engine has
    "1 process": "data_shard: 1, sharding: none",
    "2 processes, sharded": "data_shard: 2, sharding: SHARDED",
}
SHARDINGS = ("parameters", "optimizer")
TEXT = """
model: {{name: small, family: LlamaForCausalLM, hidden: 128, num_layers: 2, vocab: 260, ffn_hidden: 384,
  attention: {{num_heads: 8, num_kv_heads: 4}}}}
data: {{source: text.txt, tokenizer: bytes, sequence_length: 128}}
batch: {{global_sequences: 8, micro: 4}}
precision: fp32
cluster: here
parallel: {{{plan}, recompute: full}}
engine: {engine}
train: {{steps: {steps}}}
"""
CATEGORIES = ("GEMM", "attention", "elementwise", "optimizer", "other", "communication", "idle")


def text_of(plan: str, *, engine: str, steps: int) -> str:
    """The run file of a case, with the first sharding that the engine supports."""
    made = [TEXT.format(plan=plan.replace("SHARDED", s), engine=engine, steps=steps) for s in SHARDINGS]
    return min(made, key=lambda text: len(find_engine(engine).check(runfile.loads(text))))


def train(text: str, *, out: Path, engine: str) -> None:
    """Train with --profile unless `out` holds the record. Exits with the engine's reason if it refuses."""
    if (out / "record.json").exists():
        return
    run = out.with_suffix(".yaml")
    run.write_text(text)
    shim = SHIMS / engine / "shim"
    path = [*([str(shim)] if shim.is_dir() else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = ["train", run.name, "--json", "--only-steps", "--no-measure", "--profile", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *command], cwd=out.parent, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{engine}: {done.stderr[-2000:]}")


def measured(outs: Mapping[str, Path]) -> list[dict[str, Any]]:
    """A row for each engine: throughput, shares, and microseconds of a device per token."""
    sides = [f"{engine}={path}" for engine, path in outs.items()]
    found = compare_items(sides, is_like_for_like=True)
    splits = {gap.other: gap.after for gap in found.gaps} | {NATIVE: found.gaps[0].before}
    rows = []
    for engine, path in outs.items():
        record = json.loads((path / "record.json").read_text())
        rows.append({
            "engine": engine, "throughput": record["statistics"]["throughput"], "shares": record["profile"]["shares"],
            "us_per_token": {part: getattr(splits[engine], part) * 1e6 for part in PARTS},
        })  # fmt: skip
    return rows


def markdown(result: Mapping[str, Any]) -> str:
    """The tables of the page."""
    lines = [
        f"Measured on {result['machine']}, one training of {result['steps']} steps each; throughput is the median of "
        f"the steps that were not profiled, with the lowest and the highest. `{result['command']}`"
    ]
    for label, rows in result["cases"].items():
        base = sum(rows[0]["us_per_token"].values())
        lines += ["", f"**{label}**, microseconds of a device per token:", ""]
        lines += [f"| | tokens/s/device (low to high) | {' | '.join(PARTS.values())} | sum | gap to {NATIVE} |"]
        lines += ["|---" * (len(PARTS) + 4) + "|"]
        for row in rows:
            rate, parts = row["throughput"], row["us_per_token"].values()
            rate = f"{rate['median']:,.0f} ({rate['low']:,.0f} to {rate['high']:,.0f})"
            cells = [f"{part:,.1f}" for part in (*parts, sum(parts))]
            lines.append(f"| {_name(row, result)} | {rate} | {' | '.join(cells)} | {sum(parts) - base:+,.1f} |")
        lines += ["", f"**{label}**, share of the profiled steps:", ""]
        lines += [f"| | {' | '.join(CATEGORIES)} |", "|---" * (len(CATEGORIES) + 1) + "|"]
        for row in rows:
            shares = " | ".join(f"{row['shares'][name]:.1%}" for name in CATEGORIES)
            lines.append(f"| {_name(row, result)} | {shares} |")
    return "\n".join(lines)


def _name(row: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    return f"{row['engine']} {result['engines'][row['engine']]}"


def main() -> None:
    parser = parser_of(__doc__, engines=ENGINES, steps=24)
    parser.add_argument("--cases", default="1,2")
    given = parser.parse_args()
    folder, engines = place_of(given)
    (folder / "text.txt").write_text("".join(f"{i} times {j} is {i * j}.\n\n" for i in range(400) for j in range(13)))
    cases: dict[str, list[dict[str, Any]]] = {}
    chosen = [list(CASES.items())[int(number) - 1] for number in given.cases.split(",")]
    for label, plan in chosen:
        outs = {engine: folder / f"{label[0]}-{engine}" for engine in engines}
        for engine, out in outs.items():
            train(text_of(plan, engine=engine, steps=given.steps), out=out, engine=engine)
            print(f"{label}, {engine}: done", file=sys.stderr, flush=True)
        cases[label] = measured(outs)
    result = {
        "command": f"python benchmarks/engines_gap.py --engines {','.join(engines)} --cases {given.cases}",
        **conditions(),
        "steps": given.steps,
        "engines": versions(engines),
        "cases": cases,
    }
    publish(result, markdown(result), record=given.record, page=given.page)


if __name__ == "__main__":
    main()
