"""Comparison of loss curves between precisions, optimizer states and kinds of parallelism.

    python benchmarks/convergence.py                                  # all settings
    python benchmarks/convergence.py --only bf16 "bf16, int8 states"  # repeat these, keep the others

Each setting trains the same small model on the same data from the same seed with `meshwright train`, and differs in one
thing from its baseline. The record holds every loss; the page shows the distance of each curve from its baseline.

A curve is the mean of `WINDOW` steps. Its gap is the largest distance from the baseline's curve after the first
`WINDOW` steps, in nats per token. `fp32, other seed` differs from `fp32` only in the order of the data and the weight
initialization: it shows which differences in validation loss are not significant. All settings take about an hour on
two cores; one setting takes a few minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

from meshwright.files import write_atomically

ROOT = Path(__file__).parents[1]
RUN = ROOT / "examples" / "runs" / "tiny-llama-cpu.yaml"
RECORD = ROOT / "benchmarks" / "records" / "convergence.json"
FIGURE = ROOT / "docs" / "images" / "convergence.svg"
PAGE = ROOT / "docs" / "reference" / "convergence.md"
WINDOW = 10
NUM_STEPS = 120
OTHER_SEED = "fp32, other seed"

SMALLER = (
    "model.hidden=128", "model.num_layers=4", "model.ffn_hidden=352", "model.tied_embeddings=false",
    "model.attention={num_heads: 4, num_kv_heads: 2}", "data.sequence_length=128",
    "batch={global_sequences: 16, micro: 4}", "optimizer.warmup_steps=10",
)  # fmt: skip
"""A model whose every width two ranks can divide, and a batch that a CPU core takes in a second."""
EXPERTS = (
    "model.experts={num_experts: 4, top_k: 2, ffn_hidden: 176}", "model.ffn_hidden=0", "train.balance_loss=0.01",
)  # fmt: skip
BYTES = ("data.tokenizer=bytes", "model.vocab=257")  # the one tokenizer that does not come from the source
INITIALIZATIONS = range(7)
STORED = {f"{kind} activations": f"{{feed_forward: {kind}, norm: {kind}}}" for kind in ("int8", "e4m3")}
"""Values of `kernels.stored_activations`, compared with bf16 from the same initialization on the same batches."""
STORED_BOUND = 0.02  # of the final validation loss, in the mean


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run: its `--set` values, and the setting that it should be equal to."""

    group: str | None  # panel of the figure
    overrides: tuple[str, ...] = ()
    baseline: str | None = None
    starts_from: str | None = None  # the setting whose last weights it begins with


def _parallel(degrees: str) -> Setting:
    overrides = ("precision=fp32", f"parallel={{{degrees}}}")
    return Setting(group="parallelism", overrides=overrides, baseline="fp32")


def _stored() -> dict[str, Setting]:
    """Activations in 8 bits and their baseline, from several initializations; the figure has the first."""
    found = {}
    for number in INITIALIZATIONS:
        group, overrides = ("precision", ()) if number == 0 else (None, (f"train.seed={number}",))
        if number:
            found[_of_initialization("bf16", number)] = Setting(group=group, overrides=overrides)
            found[_of_initialization("fp32", number)] = Setting(group=group, overrides=("precision=fp32", *overrides))
        for name, formats in STORED.items():
            found[_of_initialization(name, number)] = Setting(
                group=group and "8-bit activations",
                overrides=(f"kernels.stored_activations={formats}", *overrides),
                baseline=_of_initialization("bf16", number),
            )
    return found


def _of_initialization(name: str, number: int) -> str:
    return f"{name}, initialization {number}" if number else name


SETTINGS = {
    "fp32": Setting(group="precision", overrides=("precision=fp32",)),
    OTHER_SEED: Setting(
        group="precision", overrides=("precision=fp32", "train.seed=1"), baseline="fp32"
    ),
    "bf16": Setting(group="precision", baseline="fp32"),
    "bf16, bf16 states": Setting(
        group="precision", overrides=("optimizer.states=bf16",), baseline="fp32"
    ),
    "bf16, int8 states": Setting(
        group="precision", overrides=("optimizer.states=int8",), baseline="fp32"
    ),
    **_stored(),
    "data parallel": _parallel("data_shard: 2, sharding: none"),
    "fully sharded": _parallel("data_shard: 2, sharding: parameters"),
    "tensor parallel": _parallel("data_shard: 1, tensor: 2"),
    "pipeline": _parallel("data_shard: 1, pipeline: 2"),
    "context parallel": _parallel("data_shard: 1, context: 2"),
    "experts": Setting(group="experts", overrides=("precision=fp32", *EXPERTS)),
    "expert parallel": Setting(
        group="experts",
        overrides=("precision=fp32", *EXPERTS, "parallel={data_shard: 2, expert: 2, sharding: parameters}"),
        baseline="experts",
    ),
    "base": Setting(group="fine-tuning", overrides=BYTES),
    "full fine-tuning": Setting(
        group="fine-tuning",
        overrides=(*BYTES, "data.source=src", "optimizer.learning_rate=5.0e-4"),
        starts_from="base",
    ),
    "LoRA": Setting(
        group="fine-tuning",
        overrides=(
            *BYTES, "data.source=src", "task=lora", "optimizer.learning_rate=4.0e-3",
            "lora={rank: 16, alpha: 32.0, targets: [query, key, value, output, gate, up, down]}",
        ),
        baseline="full fine-tuning",
        starts_from="base",
    ),
}  # fmt: skip


def meshwright(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshwright", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def train(name: str, *, folder: Path, num_steps: int) -> dict[str, Any]:
    """Train setting `name`: losses of all steps, or the reason of its refusal."""
    setting, out = SETTINGS[name], folder / re.sub(r"\W+", "-", name)
    is_base = any(s.starts_from == name for s in SETTINGS.values())
    overrides = [
        *SMALLER, f"train.steps={num_steps}", *setting.overrides,
        f"train.evaluate={{every_steps: {num_steps}, num_batches: 8}}",
    ]  # fmt: skip
    if is_base:
        overrides.append(f"train.checkpoint={{folder: {out}-saved, every_steps: {num_steps}}}")
    if setting.starts_from is not None:
        weights = folder / f"{setting.starts_from}-weights"
        if not weights.exists():
            raise SystemExit(f"{name} starts from {setting.starts_from}: give that to --only as well")
        overrides.append(f"weights={weights}")
    flags = [word for override in overrides for word in ("--set", override)]
    done = meshwright("train", str(RUN), "--out", str(out), "--json", *flags)
    if done.returncode == 2:
        return {"refused": done.stderr.strip().splitlines()[0].removeprefix("error: ")}
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    if is_base:
        write_weights(name, folder=folder, saved=Path(f"{out}-saved"))
    record = json.loads(done.stdout)
    lines = (out / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    return {
        "overrides": list(setting.overrides),
        "date": datetime.now(UTC).date().isoformat(),
        "device": record["device"],
        "software": record["software"],
        "git_commit": record["git_commit"],
        "plan": record["run"]["plan_in_words"],
        "processes": record["statistics"]["num_devices"],
        "parameters": record["statistics"]["parameters"],
        "validation_loss": record["statistics"]["validation_loss"],
        "losses": [round(json.loads(line)["loss"], 5) for line in lines],
    }


def write_weights(name: str, *, folder: Path, saved: Path) -> None:
    newest = max(saved.glob("step-*"))
    target = folder / f"{name}-weights"
    done = meshwright("checkpoint", "to-hf", str(newest), str(target))
    if done.returncode:
        raise SystemExit(done.stderr)


def smoothed(losses: list[float]) -> np.ndarray:
    """Means over `WINDOW` steps; the first is of the first `WINDOW`."""
    return np.convolve(losses, np.ones(WINDOW) / WINDOW, mode="valid")


def gap(found: dict[str, Any], baseline: dict[str, Any]) -> float:
    """The largest distance between two smoothed curves, signed as found - baseline."""
    difference = smoothed(found["losses"]) - smoothed(baseline["losses"])
    return float(difference[np.abs(difference).argmax()])


def table(results: dict[str, dict[str, Any]]) -> str:
    """Final losses and gaps, as Markdown."""
    lines = [
        "| setting | processes | validation loss | last training losses | largest gap of the curve | compared with |",
        "|---|---|---|---|---|---|",
    ]
    for name, setting in SETTINGS.items():
        found = results.get(name)
        if found is None or setting.group is None:
            continue
        if "refused" in found:
            lines.append(f"| {name} | | not trained: {found['refused']} | | | |")
            continue
        base = results.get(setting.baseline or "")
        compared = f"{gap(found, base):+.4f} | {setting.baseline}" if base and "losses" in base else "|"
        last = float(np.mean(found["losses"][-WINDOW:]))
        lines.append(f"| {name} | {found['processes']} | {found['validation_loss']:.4f} | {last:.4f} | {compared} |")
    return "\n".join(lines)


def stored_table(results: dict[str, dict[str, Any]]) -> str:
    """Validation losses minus those of bf16, by initialization, as Markdown."""
    found = {name: _differences(results, name) for name in (*STORED, "fp32")}
    if not all(len(differences) == len(INITIALIZATIONS) for differences in found.values()):
        return ""
    lines = [
        f"| activations | {' | '.join(map(str, INITIALIZATIONS))} | mean | standard error | within the bound |",
        "|---|" + "---|" * (len(INITIALIZATIONS) + 3),
    ]
    for name, differences in found.items():
        each = " | ".join(f"{value:+.4f}" for value in differences)
        error = np.std(differences, ddof=1) / len(differences) ** 0.5
        mean = float(np.mean(differences))
        verdict = "yes" if abs(mean) + 2 * error <= STORED_BOUND else "not shown"
        if abs(mean) > STORED_BOUND:
            verdict = "no"
        lines.append(f"| {name.split()[0]} | {each} | {mean:+.4f} | {error:.4f} | {verdict} |")
    return "\n".join(lines)


def _differences(results: dict[str, dict[str, Any]], name: str) -> list[float]:
    """Validation losses of `name` minus those of bf16, of the initializations that both have."""
    pairs = [(_of_initialization(name, n), _of_initialization("bf16", n)) for n in INITIALIZATIONS]
    return [
        results[one]["validation_loss"] - results[plain]["validation_loss"]
        for one, plain in pairs
        if one in results and plain in results
    ]


def rows(results: dict[str, dict[str, Any]]) -> list[dict[str, object]]:
    """Points of the figure."""
    points = []
    for name, found in results.items():
        if "losses" not in found or SETTINGS[name].group is None:
            continue
        base = results.get(SETTINGS[name].baseline or name)
        if base is None or "losses" not in base:
            continue
        curve, reference = smoothed(found["losses"]), smoothed(base["losses"])
        for i, (value, other) in enumerate(zip(curve, reference, strict=True)):
            points.append(
                {
                    "setting": name,
                    "group": SETTINGS[name].group,
                    "step": i + WINDOW,
                    "loss": float(value),
                    "gap": float(value - other),
                }
            )
    return points


def chart(points: list[dict[str, object]]) -> alt.ConcatChart:
    """Curves of each group, and below them the distance from their baseline, where the batches are the same."""
    panels = []
    for group in dict.fromkeys(str(p["group"]) for p in points):
        mine = [p for p in points if p["group"] == group]
        same = [p for p in mine if p["setting"] != OTHER_SEED]
        color = alt.Color("setting:N", title=group, sort=list(SETTINGS), scale=alt.Scale(scheme="tableau10"))
        x = alt.X("step:Q", title="step")
        above = _lines(mine).encode(x=x, y=alt.Y("loss:Q", title="loss", scale=alt.Scale(zero=False)), color=color)
        below = _lines(same).encode(x=x, y=alt.Y("gap:Q", title="from baseline"), color=color)
        panels.append(alt.vconcat(above.properties(width=320, height=170), below.properties(width=320, height=90)))
    return alt.concat(*panels, columns=2).resolve_scale(color="independent").configure_view(stroke=None)


def _lines(points: list[dict[str, object]]) -> alt.Chart:
    return alt.Chart(alt.Data(values=points)).mark_line(strokeWidth=1.5, opacity=0.85)


STORED_TEXT = """## Activations in 8 bits

`kernels.stored_activations` keeps what feed-forward blocks and norms save for the backward pass in 8 bits. A column is
an initialization with its order of the data. Each number is the validation loss minus that of the same run in bf16. The
last row has whole activations in fp32: it shows by how much rounding of any origin moves a loss. The bound of the mean
is {bound} nats; "yes" means that two standard errors around the mean stay within it.

{table}

"""

PAGE_TEXT = """# Convergence

The same small Llama on the same data, trained by `meshwright train` in several ways. Written by
`python benchmarks/convergence.py`; losses of all steps, devices and software versions are in
`benchmarks/records/convergence.json`.

![Smoothed losses of every setting, and their distance from the baseline](../images/convergence.svg)

Losses are in nats per token. A curve is the mean of {window} steps; its gap is the largest distance from the curve of
its baseline. Rounding differences grow to a few hundredths in a hundred steps, whatever their origin. Compare
differences of validation losses with that of `fp32, other seed`. That setting has other batches, so its gap has no
meaning. Experts amplify rounding: a token between two experts goes to the other one.

{table}

{stored}Each run: {num_steps} steps of {tokens:,} tokens, {parameters:,} parameters, on {device}.
"""


def write(results: dict[str, dict[str, Any]], *, num_steps: int) -> None:
    """Record, page and figure."""
    import vl_convert

    for path in (RECORD, FIGURE, PAGE):
        path.parent.mkdir(parents=True, exist_ok=True)
    ordered = {name: results[name] for name in SETTINGS if name in results}
    document = {
        "run": str(RUN.relative_to(ROOT)), "overrides": list(SMALLER), "num_steps": num_steps,
        "command": "python benchmarks/convergence.py", "smoothed_over": WINDOW, "settings": ordered,
    }  # fmt: skip
    write_atomically(RECORD, json.dumps(document, indent=1) + "\n")
    write_atomically(FIGURE, vl_convert.vegalite_to_svg(chart(rows(ordered)).to_json()))
    first = next(found for found in ordered.values() if "losses" in found)
    text = PAGE_TEXT.format(
        stored=_stored_text(ordered), window=WINDOW, table=table(ordered), num_steps=num_steps, tokens=16 * 128,
        parameters=first["parameters"], device=first["device"]["name"],
    )  # fmt: skip
    write_atomically(PAGE, text)


def _stored_text(results: dict[str, dict[str, Any]]) -> str:
    found = stored_table(results)
    return STORED_TEXT.format(bound=STORED_BOUND, table=found) if found else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), metavar="SETTING")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="of all settings, so not with --only")
    arguments = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    num_steps = arguments.steps
    if arguments.only and RECORD.is_file():
        before = json.loads(RECORD.read_text(encoding="utf-8"))
        results, num_steps = before["settings"], before["num_steps"]
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only or SETTINGS:
            results[name] = train(name, folder=Path(folder), num_steps=num_steps)
            print(name, results[name].get("validation_loss", results[name].get("refused")), flush=True)
            write(results, num_steps=num_steps)
    print(table(results))


if __name__ == "__main__":
    main()
