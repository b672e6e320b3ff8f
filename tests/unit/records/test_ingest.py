"""Records of ingestion: written line by line, read back as they were, damage refused."""

from __future__ import annotations

import pytest

from meshwright.errors import InputError
from meshwright.records.ingest import (
    BatchOrder,
    IndexBuild,
    IndexSearch,
    IngestMode,
    IngestPass,
    IngestRecorder,
    read_ingest,
)

PASS = IngestPass(
    chunk_tokens=256, overlap=32, batch=8, precision="bf16", order=BatchOrder.ARRIVAL, mode=IngestMode.PIPELINED,
    index="usearch m=16", repeat=2, started="2026-01-02T03:04:05+00:00", interrupted=True, wall_s=1.5, num_chunks=7,
    first_searchable_s=0.25,
)  # fmt: skip
BUILD = IndexBuild(
    index="flat", build="", repeat=1, started="2026-01-02T03:04:05+00:00", num_vectors=5, dim=3, threads=1,
    refusal='a "quoted", reason\nof two lines',
)  # fmt: skip
SEARCH = IndexSearch(
    index="flat", build="", search="", repeat=1, k=3, batch=1, threads=1, num_vectors=5, num_queries=2, recall=1.0,
    p50_s=1e-5,
)  # fmt: skip
SIDECAR = {"command": ["x"], "started": "now", "documents": {}, "encoder": {}}


@pytest.fixture
def recorder(tmp_path):
    made = IngestRecorder(tmp_path / "out", sidecar=SIDECAR)
    for row in (PASS, BUILD, SEARCH):
        made.append(row)
    return made


def test_rows_are_read_back_as_they_were(recorder):
    for ended in (None, "then"):  # of an interrupted process too
        recorder.save(ended=ended, queries={"k": 3})
        found = read_ingest(recorder.folder)
        assert (found.passes, found.builds, found.searches) == ((PASS,), (BUILD,), (SEARCH,))
        assert found.sidecar["queries"] == {"k": 3}
    assert recorder.records.passes == (PASS,)
    assert PASS.encoding.precision == "bf16"


def test_an_incomplete_last_line_of_a_killed_process_is_ignored(recorder):
    path = recorder.folder / "passes.csv"
    path.write_text(path.read_text() + "256,32,8,bf")
    assert read_ingest(recorder.folder).passes == (PASS,)
    recorder.save(ended="then")
    with pytest.raises(InputError, match=r"passes\.csv:3"):
        read_ingest(recorder.folder)


@pytest.mark.parametrize(
    ("old", "new"), [(",yes,", ",maybe,"), ("pipelined", "both"), (",1.5,", ",nan,"), (",7,", ",7.5,")]
)
def test_wrong_cells_are_refused_with_their_line(recorder, old, new):
    path = recorder.folder / "passes.csv"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(InputError, match=r"passes\.csv:2"):
        read_ingest(recorder.folder)


def test_records_are_not_overwritten(recorder):
    with pytest.raises(InputError, match="already"):
        IngestRecorder(recorder.folder, sidecar=SIDECAR)
    (recorder.folder.parent / "file").write_text("x")
    with pytest.raises(InputError, match="cannot be written"):
        IngestRecorder(recorder.folder.parent / "file", sidecar=SIDECAR)
