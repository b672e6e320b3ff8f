"""Write catalog/data/mlperf_results.csv from checkouts of the MLPerf Training results.

git clone https://github.com/mlcommons/training_results_v5.1
python scripts/published_mlperf.py 5.0=training_results_v5.0 5.1=training_results_v5.1
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from meshwright.mlperf.benchmarks import benchmark_names
from meshwright.mlperf.check_system import submitted_system
from meshwright.mlperf.results import scaling_file
from meshwright.mlperf.score import result_folders, score_folder

TABLE = Path(__file__).parents[1] / "src" / "meshwright" / "catalog" / "data" / "mlperf_results.csv"
COLUMNS = (
    "round", "submitter", "system", "benchmark", "accelerator", "num_accelerators", "num_nodes", "global_batch_size",
    "scaling", "minutes", "samples",
)  # fmt: skip


def rows(round_name: str, folder: Path) -> list[tuple[object, ...]]:
    """One row for each set of runs of a known benchmark; empty minutes stand for a run that did not converge."""
    found = []
    for where in result_folders(folder):
        if where.name not in benchmark_names():
            continue
        score = score_folder(where, round=round_name)
        system = submitted_system(where)
        values = system.values if system else {}
        minutes = " ".join("-" if r.minutes is None else f"{r.minutes:.4f}" for r in score.runs)
        samples = " ".join("-" if r.samples is None else f"{r.samples:.0f}" for r in score.runs)
        found.append(
            (
                round_name, where.parts[-4], where.parts[-2], where.name, values.get("accelerator_model_name", ""),
                system and system.num_devices, system and system.num_nodes, score.global_batch_size,
                f"{scaling_file(score) or 1.0:.6f}", minutes, samples,
            )
        )  # fmt: skip
    return found


def main() -> None:
    """Write the table."""
    with TABLE.open("w", encoding="utf-8", newline="") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(COLUMNS)
        for argument in sys.argv[1:]:
            round_name, _, folder = argument.partition("=")
            table.writerows(rows(round_name, Path(folder)))


if __name__ == "__main__":
    main()
