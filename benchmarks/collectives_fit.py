"""Errors of the constants of collectives against measured bus bandwidths, and a new fit of them.

    python benchmarks/collectives_fit.py [collectives_measured.csv] [--fit]

Bus bandwidth as nccl-tests defines it: all-reduce S/t * 2(n-1)/n, all-gather and reduce-scatter
S/t * (n-1)/n with S the full buffer, so that it can be compared with a link's rate whatever n. Rows of one
GPU family and size range make a group; errors are predicted/measured - 1. It takes about a second.
"""

from __future__ import annotations

import argparse
import csv
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np

from meshwright.calibration.collectives import CollectiveConstants, constants_from
from meshwright.catalog.clusters import fabric
from meshwright.cost.collectives import Network, all_gather_s, all_reduce_s, group, network_row

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "MB": 10**6}
SMALL_BYTES = 2**20
# GPU family -> fabric of the catalogue, scale-up and scale-out technology of the constants
FAMILIES = {
    "A100-SXM-80GB": ("nvswitch-3-hdr", "nvlink3", "infiniband"),
    "H100-SXM-80GB": ("aws-efa-p5", "nvlink4", "efa-p5"),
    "H200": ("nvswitch-4-ndr", "nvlink4", "infiniband"),
    "B200": ("nvswitch-5-ndr", "nvlink5", "efa-p6"),
    "MI300X": ("xgmi-mi300x", "xgmi-mi300x", "roce"),
}
# What the benchmark programs add to every small call (host launch and synchronisation between iterations),
# fitted beside the constants and no part of them: in a training step launches are queued ahead.
HARNESS_S = {"A100-SXM-80GB": 23e-6, "H200": 22e-6, "B200": 21e-6, "H100-SXM-80GB": 22e-6, "MI300X": 22e-6}
FITTED = {
    "A100-SXM-80GB": {"up": ("efficiency", "fill_s", "fill_bytes")},
    "H200": {"up": ("efficiency", "in_switch_efficiency", "fill_s", "fill_bytes")},
    "B200": {"up": ("efficiency", "in_switch_efficiency", "fill_s", "fill_bytes"), "out": ("efficiency", "step_s")},
    "H100-SXM-80GB": {"out": ("step_s", "congestion_exponent")},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    packaged = resources.files("meshwright.catalog") / "data" / "collectives_measured.csv"
    parser.add_argument("path", nargs="?", type=Path, default=Path(str(packaged)))
    parser.add_argument("--fit", action="store_true", help="fit the constants again and print them")
    parser.add_argument("--rows", action="store_true", help="print every row")
    args = parser.parse_args()
    rows = [row for row in map(parse, csv.DictReader(args.path.open(encoding="utf-8"))) if row]
    harness = dict(HARNESS_S)
    constants = {gpu: constants_from(scale_up=up, scale_out=out) for gpu, (_, up, out) in FAMILIES.items()}
    if args.fit:
        for gpu, names in FITTED.items():
            own = [r for r in rows if r["gpu"] == gpu]
            constants[gpu], harness[gpu] = fit(own, constants[gpu], harness[gpu], names)
    report(rows, constants, harness, every_row=args.rows)


def parse(row: dict[str, str]) -> dict | None:
    """One usable row as numbers; None for point-to-point rows and rows without a size."""
    size = re.fullmatch(r"(\d+)(\w+)", row["payload"])
    kind = row["collective"].split()[0]
    if size is None or kind not in ("AllReduce", "AllGather", "ReduceScatter"):
        return None
    ring_only = "ring" in row["collective"] or "NVLS off" in row["notes"]
    return {
        "gpu": row["gpu"],
        "nodes": int(row["nodes"]),
        "gpus": int(row["gpus"]),
        "kind": kind,
        "bytes": int(size[1]) * UNITS[size[2]],
        "busbw": float(row["busbw_gb_s"]) * 1e9,
        "ring_only": ring_only,
    }


def network(gpu: str, constants: CollectiveConstants, *, ring_only: bool) -> Network:
    if ring_only:
        constants = replace(constants, up=replace(constants.up, in_switch_efficiency=0.0))
    return network_row(fabric(FAMILIES[gpu][0]), constants)


def predicted_busbw(row: dict, constants: CollectiveConstants, harness_s: float) -> float:
    lay = group(size=row["gpus"], stride=1, net=network(row["gpu"], constants, ring_only=row["ring_only"]))
    passes = 2 if row["kind"] == "AllReduce" else 1
    seconds = (all_reduce_s if passes == 2 else all_gather_s)(row["bytes"], lay)
    return row["bytes"] / (seconds + harness_s) * passes * (row["gpus"] - 1) / row["gpus"]


def fit(
    rows: list[dict], start: CollectiveConstants, harness_s: float, names: dict[str, tuple[str, ...]]
) -> tuple[CollectiveConstants, float]:
    """Fit log(predicted / measured) by least squares with a robust loss; every parameter stays positive."""
    from scipy.optimize import least_squares

    keys = [(tier, name) for tier, fields in names.items() for name in fields]
    scale = np.array([getattr(getattr(start, tier), name) for tier, name in keys] + [harness_s])
    small = any(r["bytes"] < SMALL_BYTES for r in rows)  # without small messages the harness cannot be seen
    free = np.ones(len(scale)) if small else np.append(np.ones(len(keys)), 0.0)

    def unpack(x: np.ndarray) -> tuple[CollectiveConstants, float]:
        result, values = start, np.exp(x * free) * scale
        for (tier, name), value in zip(keys, values[:-1], strict=True):
            result = replace(result, **{tier: replace(getattr(result, tier), **{name: float(value)})})
        return result, float(values[-1])

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.array([np.log(predicted_busbw(r, *unpack(x)) / r["busbw"]) for r in rows])

    found = least_squares(residuals, np.zeros(len(scale)), bounds=(-2, 2), loss="soft_l1", f_scale=0.05)
    constants, harness_s = unpack(found.x)
    for tier, name in keys:
        print(f"{rows[0]['gpu']:15} {tier:4} {name:22} {getattr(getattr(constants, tier), name):.4g}")
    print(f"{rows[0]['gpu']:15} {'':4} {'harness_s':22} {harness_s:.4g}")
    return constants, harness_s


def report(
    rows: list[dict], constants: dict[str, CollectiveConstants], harness: dict[str, float], *, every_row: bool
) -> None:
    groups: dict[tuple, list[float]] = {}
    for row in rows:
        error = predicted_busbw(row, constants[row["gpu"]], harness[row["gpu"]]) / row["busbw"] - 1
        size = "< 1 MiB" if row["bytes"] < SMALL_BYTES else ">= 1 MiB"
        nodes = "1 node" if row["nodes"] == 1 else "several"
        groups.setdefault((row["gpu"], nodes, row["kind"], size), []).append(error)
        if every_row:
            print(
                f"{row['gpu']:15} {row['gpus']:4} {row['kind']:14} {row['bytes']:>12} "
                f"{row['busbw'] / 1e9:8.2f} {error:+.0%}"
            )
    print("| GPU | nodes | collective | message | rows | median error | median absolute | worst |")
    print("|---|---|---|---|--:|--:|--:|--:|")
    for key, errors in sorted(groups.items()):
        worst = max(errors, key=abs)
        cells = [
            *key,
            str(len(errors)),
            f"{np.median(errors):+.1%}",
            f"{np.median(np.abs(errors)):.1%}",
            f"{worst:+.1%}",
        ]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
