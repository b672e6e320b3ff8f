"""The figure of the README: predictions of published runs against their measurements, leave-one-source-out.

Every run outside sweeps is predicted by a calibration fitted to all other sources.

    python benchmarks/accuracy_figure.py [--out docs/images/predicted-and-measured.svg]

It takes some minutes: one fit per source.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import altair as alt
import numpy as np

from meshwright.accuracy.rows import PublishedRun, read_runs
from meshwright.accuracy.shipped import measured_runs_path
from meshwright.calibration.parameters import fitted
from meshwright.files import write_atomically
from meshwright.fitting.leave_one_source_out import predict_leave_one_source_out
from meshwright.fitting.published_runs import fit

FAMILIES = {
    "Ampere": "NVIDIA A100",
    "Hopper": "NVIDIA H100, H200, H800",
    "Blackwell": "NVIDIA B200, GB200",
    "Blackwell Ultra": "NVIDIA B200, GB200",
    "CDNA 3": "AMD MI300X, MI325X",
    "CDNA 4": "AMD MI355X",
    "TPU": "TPU",
}
LIMITS = (50.0, 250_000.0)


def family(run: PublishedRun) -> str:
    assert run.conditions is not None
    return FAMILIES.get(run.conditions.accelerator.architecture, "other")


def chart(rows: list[dict[str, object]], title: str, subtitle: str) -> alt.LayerChart:
    scale = alt.Scale(type="log", domain=LIMITS)
    line = [{"measured": value, "low": value / 1.2, "high": value * 1.2} for value in LIMITS]
    base = alt.Chart(alt.Data(values=line))
    band = base.mark_area(opacity=0.18, color="#888", clip=True).encode(
        x=alt.X("measured:Q", scale=scale), y=alt.Y("low:Q", scale=scale), y2="high:Q"
    )
    equal = base.mark_line(color="#888", strokeWidth=1).encode(
        x=alt.X("measured:Q", scale=scale), y=alt.Y("measured:Q", scale=scale)
    )
    points = (
        alt.Chart(alt.Data(values=rows))
        .mark_circle(size=26, opacity=0.65)
        .encode(
            x=alt.X("measured:Q", scale=scale, title="measured tokens/s per device"),
            y=alt.Y("predicted:Q", scale=scale, title="predicted tokens/s per device"),
            color=alt.Color(
                "family:N",
                title=None,
                scale=alt.Scale(scheme="tableau10"),
                legend=alt.Legend(labelLimit=220),
            ),
        )
    )
    heading = alt.TitleParams(title, subtitle=subtitle, anchor="start", subtitleColor="#666")
    return (
        (band + equal + points).properties(width=470, height=340, title=heading).configure_view(stroke=None)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/images/predicted-and-measured.svg"))
    out = parser.parse_args().out
    everything = [r for r in read_runs(measured_runs_path()) if r.reason is None]
    runs = [r for r in everything if not r.is_sweep]
    predictions = predict_leave_one_source_out(
        runs, fit(everything, made="figure"), interval_scale=fitted().interval_scale
    )
    measured = np.array([r.tokens_per_s_per_device for r in runs], dtype=float)
    predicted = predictions.tokens_per_s_per_device
    error = np.abs(predicted / measured - 1)
    inside = (predictions.low <= measured) & (measured <= predictions.high)
    sources = len({r.source_key for r in runs})
    rows = [
        {"measured": float(m), "predicted": float(p), "family": family(r)}
        for r, m, p in zip(runs, measured, predicted, strict=True)
    ]
    title = (
        f"{len(runs)} published training runs from {sources} sources, each predicted without its own source"
    )
    subtitle = (
        f"median error {np.median(error):.1%}, 90th percentile {np.quantile(error, 0.9):.0%}, "
        f"{inside.mean():.0%} inside the 80 % interval; grey: within 20 %"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    import vl_convert

    write_atomically(out, vl_convert.vegalite_to_svg(chart(rows, title, subtitle).to_json()))
    print(subtitle)


if __name__ == "__main__":
    main()
