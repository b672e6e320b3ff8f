"""Draw the pictures of README and documents anew: docs/images, from runs that ship and from records of measurements.

    python scripts/renew_pictures.py [--train]

They are figures of the pages that commands write, on a white ground. A test draws them again and compares. `--train`
types the trainings of two tutorials first and keeps their losses in benchmarks/records/tutorials.json.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import altair as alt

import meshwright as mw
from meshwright.answers.training_run import MeasuredQuantity
from meshwright.mlperf.benchmarks import load_benchmark
from meshwright.mlperf.compare import compare_sets
from meshwright.mlperf.convergence import reference_points
from meshwright.report.charts import BLUE, GREEN, INK, ORANGE, RED, WIDTH, color_by
from meshwright.report.comparison.page import gap_chart, gap_legend
from meshwright.report.figures import FAMILY_COLORS, memory_legend, memory_over_time_svg, svg, waterfall_svg
from meshwright.report.ingest import recall_svg
from meshwright.report.mlperf import scores_svg
from meshwright.report.notebook import ranking_svg
from meshwright.report.scale import efficiency_svg
from meshwright.report.training_figures import loss_svg, ratio_legend, ratio_svg
from meshwright.specs.estimate import Estimate, Tier

ROOT = Path(__file__).resolve().parent.parent
IMAGES, RECORDS, TUTORIALS = ROOT / "docs" / "images", ROOT / "benchmarks" / "records", ROOT / "docs" / "tutorials"
TRAININGS = {"chat": ("a-model-that-chats.md", "tuned"), "adapters": ("train-and-fine-tune.md", "tuned")}
"""Picture, tutorial and folder of a training whose losses are kept."""
BLOCK = re.compile(r"^```(bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHORT = {"data_shard": "FSDP", "data_replicate": "DP", "tensor": "TP", "pipeline": "PP"}
LEGEND_HEIGHT, LETTER = 24, 6.6
"""Pixels of the row of a legend, and of a letter in it."""


def pictures() -> dict[str, str]:
    """Return the SVG text of each picture by the name of its file."""
    families = [(family.value, color) for family, color in FAMILY_COLORS.items()]
    ranking = mw.plan(
        model="llama3.1-70b", cluster="h100-8x32", global_sequences=512, sequence_length=8192, engine="megatron", top=1
    )
    over_time = mw.estimate("llama3-70b").memory_over_time
    assert over_time is not None
    scaled = mw.scale(
        model="llama3.1-70b", cluster="h100-8x16", global_sequences=1024, sequence_length=8192, engine="megatron",
        devices=[128, 512, 2048],
    )  # fmt: skip
    assert scaled.curve is not None
    five = mw.plan(model="llama3.1-8b", cluster="h100-8x4", global_sequences=512, sequence_length=8192, top=5)
    return {
        "plan.svg": _alone(waterfall_svg(ranking.estimates[0].step.components_s), families),
        "memory.svg": _alone(memory_over_time_svg(over_time), memory_legend()),
        "scaling.svg": _alone(efficiency_svg(scaled.curve)),
        "five-plans.svg": _alone(ranking_svg(five)),
        "two-accelerators.svg": _two_accelerators(),
        "calibration.svg": _calibration(),
        "predicted-steps.svg": _predicted_steps(),
        "reference-points.svg": _reference_points(),
        "retrieval.svg": _retrieval(),
        "mlperf-results.svg": _mlperf_results(),
        **{f"{name}.svg": _alone(loss_svg(steps)) for name, steps in _record("tutorials")["losses"].items()},
    }


def _record(name: str) -> dict[str, Any]:
    return json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))


def _two_accelerators() -> str:
    """Time per token by cause, of the two run files that the tutorial for buyers writes."""
    with tempfile.TemporaryDirectory() as folder:
        _type("compare-accelerators.md", Path(folder), most=1)
        found = mw.compare(*(f"{folder}/{name}.yaml" for name in ("b200", "mi355x")))
    (gap,) = found.gaps
    return _alone(svg(gap_chart(gap), title="Time per token by cause, MI355X beside B200"), gap_legend())


def _calibration() -> str:
    """Errors of kernels and steps, predicted by the formulas and by a calibration of the other measurements."""
    colors = {"formulas with the measured peaks": ORANGE, "calibration of the other measurements": BLUE}
    rows = [
        {"family": family, "by": by, "error": errors[key]}
        for family, errors in _record("loop_cpu")["errors"].items()
        for by, key in zip(colors, ("formula_median", "median"), strict=True)
    ]
    bars = alt.Chart(alt.Data(values=rows)).mark_bar().encode(
        x=alt.X("error:Q", title="median error", axis=alt.Axis(format="%", grid=True)),
        y=alt.Y("family:N", title=None), yOffset=alt.YOffset("by:N", sort=list(colors)), color=color_by("by", colors),
    )  # fmt: skip
    chart = bars.properties(width=WIDTH, height={"step": 34, "for": "position"})
    return _alone(svg(chart, title="Error of predictions with and without a calibration"), colors.items())


def _predicted_steps() -> str:
    """Steps of small models over their predictions: formats, and plans of one, two and four processes."""
    rows = []
    for number, row in enumerate(_record("loop_cpu")["rows"], start=1):
        low, value, high = row["predicted_s"]
        run = row["configuration"]
        degrees = re.findall(r"(\w+): (\d+)", run["plan"])
        plan = " ".join(f"{SHORT[name]}{degree}" for name, degree in degrees if degree != "1") or "one process"
        rows.append(
            MeasuredQuantity(
                name=f"{number}: {run['layers']} layers of {run['hidden']}, {run['precision']}, {plan}",
                measured=row["measured_s"], unit="s",
                predicted=Estimate(value=value, low=low, high=high, unit="s", tier=Tier.MEASURED),
            )
        )  # fmt: skip
    return _alone(ratio_svg(rows), ratio_legend(rows))


def _reference_points() -> str:
    """Samples to the target of each reference run of a proxy, and the least mean that a set may have."""
    points = reference_points(load_benchmark("proxy_pretrain_xs"))
    runs = [
        {"batch": p.global_batch_size, "samples": n, "runs": p.counts.count(n)} for p in points for n in {*p.counts}
    ]
    least = [{"batch": p.global_batch_size, "samples": p.min_ok} for p in points]
    y = alt.Y("batch:O", title="global batch, sequences")
    x = alt.X("samples:Q", title="samples to the target", scale=alt.Scale(zero=False), axis=alt.Axis(grid=True))
    size = alt.Size("runs:Q", legend=None, scale=alt.Scale(range=[40, 700]))
    drawn = alt.Chart(alt.Data(values=sorted(runs, key=lambda run: (run["batch"], run["samples"]))))
    dots = drawn.mark_point(filled=True, color=BLUE, opacity=0.7).encode(x=x, y=y, size=size)
    names = drawn.mark_text(dy=-20, color=INK).encode(x=x, y=y, text="runs:Q")
    ticks = alt.Chart(alt.Data(values=least)).mark_tick(color=RED, thickness=3, size=34).encode(x=x, y=y)
    chart = (dots + names + ticks).properties(width=WIDTH, height={"step": 62})
    legend = [("reference runs, their number above", BLUE), ("least olympic mean of a set that passes", RED)]
    return _alone(svg(chart, title="Samples to the target of the reference runs"), legend)


def _retrieval() -> str:
    """Recall against latency of the searches of one query among 20,000 vectors."""
    record = _record("ingest_cpu")["indexes"]
    front = [SimpleNamespace(name=name) for name in record["pareto_front"]]
    searches = []
    for row in record["searches"]:
        name = f"{row['index']} {','.join(filter(None, (row['build'], row['search'])))}".strip()
        values = {key: SimpleNamespace(value=row[key]["value"]) for key in ("recall", "p50_s")}
        searches.append(SimpleNamespace(name=name, batch=row["batch"], threads=row["threads"], value=values.get))
    found: Any = SimpleNamespace(front=front, searches=searches, least=(1, 1))
    return _alone(recall_svg(found), [("search", BLUE), ("on the Pareto front", GREEN)])


def _mlperf_results() -> str:
    """Scores of published results, as the page of `mlperf compare` draws them."""
    found = compare_sets(rounds=["5.1"], names=["llama31_8b"], devices=8)
    return _alone(*scores_svg(found))


def _alone(figure: str, legend: Iterable[tuple[str, str]] = ()) -> str:
    """The figure for wide windows as a file of its own, its legend above it."""
    wide = figure[: figure.index("</svg>") + len("</svg>")]
    if "xmlns=" not in wide:
        wide = wide.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    wide = wide.replace("currentColor", INK)
    shown = [(name, color) for name, color in legend if color[:7] in wide]
    top = 0
    entries = []
    if shown:
        left, top = 12.0, LEGEND_HEIGHT
        for name, color in shown:
            end = left + 18 + LETTER * len(name)
            if end > WIDTH + 168 and entries:
                left, top = 12.0, top + LEGEND_HEIGHT
            entries.append((name, color, left, top))
            left += 34 + LETTER * len(name)
    head = f'<rect y="{-top}" width="100%" height="100%" fill="white"/>'
    for name, color, left, row in entries:
        y = row - top - 8
        head += f'<rect x="{left:.0f}" y="{y - 10}" width="11" height="11" rx="2" fill="{color}"/>'
        head += (
            f'<text x="{left + 17:.0f}" y="{y}" font-family="sans-serif" font-size="12px" fill="{INK}">{name}</text>'
        )
    box = re.search(r' viewBox="0 0 [\d.]+ ([\d.]+)"', wide)
    assert box is not None
    height = float(box[1])
    wide = re.sub(r' height="[\d.]+"', f' height="{height + top:g}"', wide, count=1)
    wide = re.sub(r' viewBox="0 0 ([\d.]+) [\d.]+"', rf' viewBox="0 {-top} \1 {height + top:g}"', wide, count=1)
    return re.sub(r"(<svg [^>]*>)", lambda found: found[1] + head, wide, count=1) + "\n"


def _type(page: str, folder: Path, *, most: int | None = None) -> None:
    """Type the first `most` blocks of a tutorial in a folder, or all of them."""
    blocks = BLOCK.findall((TUTORIALS / page).read_text(encoding="utf-8"))[:most]
    for kind, block in blocks:
        commands = [line[2:] for line in block.splitlines() if line.startswith("$ ")] if kind == "console" else [block]
        for command in commands:
            subprocess.run(["bash", "-eu", "-c", command], cwd=folder, check=True)


def train() -> None:
    """Type the tutorials that train, and keep the losses."""
    losses, device = {}, ""
    for name, (page, out) in TRAININGS.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "examples").symlink_to(ROOT / "examples")
            _type(page, Path(folder))
            lines = (Path(folder) / out / "steps.jsonl").read_text(encoding="utf-8").splitlines()
            losses[name] = [{"step": s["step"], "loss": round(s["loss"], 5)} for s in map(json.loads, lines)]
            device = json.loads((Path(folder) / out / "record.json").read_text(encoding="utf-8"))["device"]["name"]
    document = {"command": "python scripts/renew_pictures.py --train", "device": device, "losses": losses}
    (RECORDS / "tutorials.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Write all pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--train", action="store_true", help="train the models of the tutorials first")
    if parser.parse_args().train:
        train()
    for name, text in pictures().items():
        (IMAGES / name).write_text(text, encoding="utf-8")
        print(f"{name}: {len(text) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
