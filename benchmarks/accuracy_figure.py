"""The figure of the README: predictions of published runs against their measurements, leave-one-source-out.

Every run outside sweeps is predicted by a calibration fitted to all other sources.

    python benchmarks/accuracy_figure.py [--out docs/images/predicted-and-measured.svg]
    python benchmarks/accuracy_figure.py --redraw    from benchmarks/records/accuracy_figure.json, in a second

It takes some minutes: one fit per source.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

from meshwright.accuracy.rows import PublishedRun, read_runs
from meshwright.accuracy.shipped import measured_runs_path
from meshwright.calibration.parameters import fitted
from meshwright.files import write_atomically

FAMILIES = {
    "Ampere": "NVIDIA A100",
    "Hopper": "NVIDIA H100, H200, H800",
    "Blackwell": "NVIDIA B200, GB200, GB300",
    "Blackwell Ultra": "NVIDIA B200, GB200, GB300",
    "CDNA 3": "AMD MI300X, MI325X",
    "CDNA 4": "AMD MI355X",
    "TPU": "TPU",
}
RECORD = Path("benchmarks/records/accuracy_figure.json")
MARGIN = 1.25
"""Factor of both axes beyond the outermost point: every point lies inside the frame."""
LABELLED = 6
"""Runs with the largest errors that carry their names, one of each model and device."""
LABEL_DECADES = (0.8, 0.12)
"""Width and height that a name needs, on the logarithmic axes."""


def family(run: PublishedRun) -> str:
    assert run.conditions is not None
    return FAMILIES.get(run.conditions.accelerator.architecture, "other")


def limits(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Ends of both axes.

    >>> low, high = limits([{"measured": 40.0, "predicted": 100.0}])
    >>> low < 40 and high > 100
    True
    """
    ends = [row[key] for row in rows for key in ("measured", "predicted")]
    return min(ends) / MARGIN, max(ends) * MARGIN


def labelled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the text of their label; most have none."""
    worst = sorted(rows, key=lambda row: -abs(np.log(row["predicted"] / row["measured"])))
    named: dict[str, dict[str, Any]] = {}
    for row in worst:
        if len(named) < LABELLED and not any(_overlap(row, other) for other in named.values()):
            named.setdefault(row["name"], row)
    chosen = {id(row) for row in named.values()}
    return [{**row, "label": row["name"] if id(row) in chosen else ""} for row in rows]


def _overlap(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """True if the names of both would lie on each other.

    >>> _overlap({"measured": 100.0, "predicted": 300.0}, {"measured": 105.0, "predicted": 310.0})
    True
    >>> _overlap({"measured": 100.0, "predicted": 300.0}, {"measured": 100.0, "predicted": 600.0})
    False
    """
    apart = (abs(np.log10(a[key] / b[key])) for key in ("measured", "predicted"))
    return all(bool(distance < need) for distance, need in zip(apart, LABEL_DECADES, strict=True))


def decades(ends: tuple[float, float]) -> list[float]:
    """Round rates between the ends: 1, 2 and 5 of each power of ten."""
    powers = range(int(np.floor(np.log10(ends[0]))), int(np.ceil(np.log10(ends[1]))) + 1)
    return [m * 10.0**k for k in powers for m in (1, 2, 5) if ends[0] <= m * 10.0**k <= ends[1]]


def chart(rows: list[dict[str, Any]], title: str, subtitle: str) -> alt.LayerChart:
    ends = limits(rows)
    scale = alt.Scale(type="log", domain=ends, nice=False)
    axis = alt.Axis(values=decades(ends), format="~s", labelOverlap="greedy", labelSeparation=6)
    line = [{"measured": v, "low": v / 1.2, "high": v * 1.2} for v in ends]
    x = alt.X("measured:Q", scale=scale, axis=axis, title="measured tokens/s per device")
    y = alt.Y("predicted:Q", scale=scale, axis=axis, title="predicted tokens/s per device")
    base = alt.Chart(alt.Data(values=line))
    band = base.mark_area(opacity=0.18, color="#888", clip=True).encode(
        x=x, y=alt.Y("low:Q", scale=scale, axis=axis), y2="high:Q"
    )
    equal = base.mark_line(color="#888", strokeWidth=1).encode(x=x, y=alt.Y("measured:Q", scale=scale, axis=axis))
    points = alt.Chart(alt.Data(values=labelled(rows)))
    dots = points.mark_circle(size=26, opacity=0.65).encode(
        x=x, y=y,
        color=alt.Color(
            "family:N", title=None, scale=alt.Scale(scheme="tableau10"), legend=alt.Legend(labelLimit=220)
        ),
    )  # fmt: skip
    # Names stand on the side where no other points are: left of the diagonal, or right of it.
    above = points.transform_filter("datum.predicted > datum.measured").mark_text(
        align="right", dx=-6, dy=1, fontSize=9, color="#444"
    )
    below = points.transform_filter("datum.predicted <= datum.measured").mark_text(
        align="left", dx=6, dy=1, fontSize=9, color="#444"
    )
    texts = [layer.encode(x=x, y=y, text="label:N") for layer in (above, below)]
    heading = alt.TitleParams(title, subtitle=subtitle, anchor="start", subtitleColor="#666")
    whole = alt.layer(band, equal, dots, *texts).properties(width=640, height=460, title=heading)
    return whole.configure_view(stroke="#ddd").configure(background="white")


def predictions() -> dict[str, Any]:
    """Rows of the figure with their sentence, predicted leave-one-source-out."""
    from meshwright.fitting.leave_one_source_out import predict_leave_one_source_out
    from meshwright.fitting.published_runs import fit

    everything = [r for r in read_runs(measured_runs_path()) if r.reason is None]
    runs = [r for r in everything if not r.is_sweep]
    found = predict_leave_one_source_out(runs, fit(everything, made="figure"), intervals=fitted())
    measured = np.array([r.tokens_per_s_per_device for r in runs], dtype=float)
    predicted = found.tokens_per_s_per_device
    error = np.abs(predicted / measured - 1)
    inside = (found.low <= measured) & (measured <= found.high)
    rows = []
    for run, m, p in zip(runs, measured, predicted, strict=True):
        assert run.conditions is not None
        name = f"{run.conditions.model.name}, {run.conditions.accelerator.name}"
        rows.append({"measured": float(m), "predicted": float(p), "family": family(run), "name": name})
    sources = len({r.source_key for r in runs})
    return {
        "command": "python benchmarks/accuracy_figure.py",
        "calibration": fitted().made,
        "title": f"{len(runs)} published training runs from {sources} sources, each predicted without its own source",
        "subtitle": f"median error {np.median(error):.1%}, 90th percentile {np.quantile(error, 0.9):.0%}, "
        f"{inside.mean():.0%} inside the 80 % interval; grey: within 20 %",
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images/predicted-and-measured.svg"))
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--redraw", action="store_true", help="Draw the predictions of the record again.")
    options = parser.parse_args()
    if options.redraw:
        found = json.loads(options.record.read_text(encoding="utf-8"))
    else:
        found = predictions()
        write_atomically(options.record, json.dumps(found) + "\n")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    import vl_convert

    drawn = chart(found["rows"], found["title"], found["subtitle"])
    write_atomically(options.out, vl_convert.vegalite_to_svg(drawn.to_json()))
    print(found["subtitle"])


if __name__ == "__main__":
    main()
