"""`meshwright bench ingest`: ingestions, index builds and searches, recorded and shown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from meshwright.api.bench_ingest import bench_ingest, ingest_request
from meshwright.api.question import question_of
from meshwright.cli.output import LiveLine, emitted_json, note, print_line, print_text_tables, say, write_html
from meshwright.errors import InputError
from meshwright.records.files import free_folder, now
from meshwright.records.ingest import SIDECAR_NAME, TABLES, IngestRecorder, IngestRow
from meshwright.targets import load
from meshwright.training.cpu_libraries import require_torch

BENCH = "meshwright.bench.ingest.bench"


def run(*, asked: dict[str, Any], html_path: Path | None) -> None:
    """Check the options, measure, record and report."""
    require_torch("encoding chunks")
    given = question_of(bench_ingest).checked(asked)
    folder = given.pop("out") or free_folder("bench-ingest", mark=SIDECAR_NAME)
    if (last := folder / [*TABLES.values()][-1].name).exists():  # without it the folder begins anew
        raise InputError("there are records already", got=str(last), hint="name another --out")
    request = ingest_request(**given)
    watch = IngestProgress()
    ready = load("meshwright.bench.ingest.prepare:prepare")(request, watch=watch)
    sidecar = load(f"{BENCH}:facts")(request, ready, command=["meshwright", *sys.argv[1:]])
    recorder = IngestRecorder(folder, sidecar=sidecar)
    try:
        load(f"{BENCH}:run_ingest")(request, ready, recorder=recorder, watch=watch)
    except BaseException as error:
        watch.clear()
        if recorder.rows:
            what = "interrupted" if isinstance(error, KeyboardInterrupt) else "ended early"
            note(f"{what}: {folder} has {len(recorder.rows)} of the measurements")
        raise
    finally:
        recorder.save(ended=now())
    result = load("meshwright.answers.ingest_result:IngestBenchmark")(records=recorder.records)
    write_html("meshwright.report.ingest:ingest_page", recorder.records, path=html_path)
    if not emitted_json({**result.to_dict(), "records": folder, "page": html_path}):
        print_text_tables(load("meshwright.report.ingest:tables")(recorder.records))
        print_line()
        print_line(f"Records: {folder}" + (f"; page: {html_path}" if html_path else ""))
    note(*result.notes)


class IngestProgress(LiveLine):
    """Show the current measurement and each result on stderr."""

    def begin(self, what: str, total: int | None) -> None:
        """A measurement begins; `total` is its number of steps, None if it has none."""
        self.what, self.total, self.done = what, total, 0
        self.advance(0)

    def advance(self, amount: int) -> None:
        """`amount` further steps are done."""
        self.done += amount
        self.draw(f"{self.what}:" + (f" {self.done:,} of {self.total:,}" if self.total else ""))

    def end(self, row: IngestRow | None) -> None:
        """A measurement ended; None: one without a row of its own."""
        self.clear()
        if row is not None:
            say(load("meshwright.report.ingest:row_line")(row))
