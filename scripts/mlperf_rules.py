"""Print docs/reference/mlperf-rules.md: benchmarks by round, and the rules of `meshwright mlperf check`.

python scripts/mlperf_rules.py > docs/reference/mlperf-rules.md
"""

from __future__ import annotations

from meshwright.errors import InputError
from meshwright.mlperf.benchmarks import BENCHMARKS, Benchmark, load_benchmark, round_names
from meshwright.mlperf.convergence import least_accepted, pruned, reference_points
from meshwright.mlperf.findings import check_rules

INTRODUCTION = """# MLPerf rules

Rules that `meshwright mlperf` checks and scores by. They stand as data in `src/meshwright/mlperf/data`, with their
sources; this page is made from them by `python scripts/mlperf_rules.py`.

## Benchmarks

Counts are sequences; B is the global batch size. A target is met by an evaluation that is not above it.
"""
POINTS = """

## Reference convergence points

Counts of the newest round, in samples to convergence. Least: the smallest olympic mean of N runs that passes. A pruned
point is not compared with. Source: `mlperf-logging` 4.1.68, which ships these files under the Apache License 2.0.

| benchmark | batch size | runs | mean | standard deviation | least | |
|---|---|---|---|---|---|---|
"""
CHECKS = """
## Findings

An error breaks a rule or makes the score wrong; a warning asks for a look. "Official": the official compliance or
package checker finds it too.

| rule | severity | official | demands | why |
|---|---|---|---|---|
"""


def main() -> None:
    """Print the page."""
    lines = [INTRODUCTION, "| benchmark | rounds | N | target | evaluation every | first ones skipped | evaluation |"]
    lines.append("|---|---|---|---|---|---|---|")
    names = sorted(path.stem for path in BENCHMARKS.glob("*.toml"))
    for name in names:
        lines += _benchmark_rows(name)
    print("\n".join(lines) + POINTS, end="")
    for name in names:
        print("\n".join(_point_rows(load_benchmark(name))))
    print(CHECKS, end="")
    for rule in check_rules().values():
        official = "yes" if rule.official else ""
        print(f"| `{rule.rule}` | {rule.severity} | {official} | {rule.demands} | {rule.why} |")


def _benchmark_rows(name: str) -> list[str]:
    found: dict[tuple[str, str], list[Benchmark]] = {}
    for round_name in round_names():
        try:
            rules = load_benchmark(name, round_name)
        except InputError:
            continue
        found.setdefault((rules.evaluation.interval, rules.evaluation.skip), []).append(rules)
    return [
        f"| `{name}` | {', '.join(r.round for r in same)} | {same[0].runs} | {same[0].target:g} | "
        f"`{_short(interval)}` | "
        f"`{_short(skip)}` | {same[0].evaluation.samples:,} |"
        for (interval, skip), same in found.items()
    ]


def _point_rows(rules: Benchmark) -> list[str]:
    points = reference_points(rules)
    kept = pruned(points, runs=rules.runs)
    return [
        f"| `{rules.name}` | {p.global_batch_size:,} | {len(p.counts)} | {p.mean:,.1f} | {p.std:,.1f} | "
        f"{least_accepted(rules, p):,.1f} | {'' if p in kept else 'pruned'} |"
        for p in points
    ]


def _short(formula: str) -> str:
    return formula.replace("global_batch_size", "B")


if __name__ == "__main__":
    main()
