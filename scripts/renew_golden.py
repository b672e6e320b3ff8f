"""Renew the golden files of the shipped run files: tests/unit/engines/golden, one file per run and engine.

    python scripts/renew_golden.py [RUN ...]

The planner chooses each plan, which is stored in the file: a new calibration has no effect until the next renewal.
Review the difference before you commit it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from meshwright import runfile
from meshwright.catalog import lookup as catalog
from meshwright.catalog.lookup import engine_names
from meshwright.engines.base import Launch, find_engine
from meshwright.engines.choice import planned
from meshwright.runfile.pinned import section_from_plan

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "unit" / "engines" / "golden"
FOLDER = Path("results")


def main() -> None:
    """Renew the files of the runs on the command line; of all runs without an argument."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="RUN", nargs="*", default=catalog.run_file_names())
    GOLDEN.mkdir(exist_ok=True)
    for name in parser.parse_args().names:
        for engine in engine_names():
            renew(name, engine)


def renew(name: str, engine: str) -> None:
    """Write the file of one run and engine; delete it if the engine refuses the run."""
    path = GOLDEN / f"{name}.{engine}.txt"
    run = runfile.load(name, overrides=[f"engine={engine}"])
    if find_engine(engine).check(run):
        path.unlink(missing_ok=True)
        return
    run = planned(run)
    assert run.plan is not None
    overrides = [
        f"batch.micro={run.plan.micro_batch}",
        f"parallel={json.dumps(section_from_plan(run.plan), default=str)}",
        f"engine={engine}",
    ]
    path.write_text(golden_text(name, overrides), encoding="utf-8")


def golden_text(name: str, overrides: list[str]) -> str:
    """Return `overrides` and the launch of the run file `name` with them."""
    run = runfile.load(name, overrides=overrides)
    launch = find_engine(run.engine).lower(run, folder=FOLDER)
    return "\n".join([*(f"--set {one}" for one in overrides), *_lines(launch)]) + "\n"


def _lines(launch: Launch) -> list[str]:
    """Return all fields of a launch as lines."""
    lines = [f"=== {launch.num_processes} processes", *launch.argv]
    lines += [f"{variable}={value}" for variable, value in sorted(launch.env.items())]
    for path, text in sorted(launch.files.items()):
        lines += [f"=== {path}", text.rstrip("\n")]
    return lines


if __name__ == "__main__":
    main()
