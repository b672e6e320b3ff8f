"""`meshwright bench ingest` with a tiny encoder: documents, tables, pages, interruption, refusals."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("faiss")
pytest.importorskip("usearch")
pytest.importorskip("tokenizers")

from tests.tiny_encoder import write_encoder

import meshwright as mw
from meshwright.bench.ingest import passes
from meshwright.errors import Terminated
from meshwright.records.ingest import read_ingest

SMALL = (
    "--chunks", "all", "--chunk-tokens", "20", "--overlap", "4", "--batch", "4", "--queries", "12",
    "--query-tokens", "4", "--query-batch", "1,5", "--threads", "1", "--k", "5",
)  # fmt: skip
INDEXES = ("--index", "usearch:dtype=f32/i8,ef=8/64", "--index", "faiss-ivf:lists=2/9999", "--index", "flat")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return str(write_encoder(tmp_path_factory.mktemp("encoder")))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("meshwright.bench.ingest.comparison.LEAST_S", 0.005)
    monkeypatch.setattr("meshwright.bench.ingest.bench.BUDGET_S", 0.005)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    for number in range(12):
        (folder / f"{number}.py").write_text(
            f"def f{number}(a, b):\n" + f"    return a + b  # {number}\n" * (number + 1)
        )
    (folder / "copy.py").write_text((folder / "11.py").read_text())  # duplicate chunks
    (folder / "one.py").write_text("x")  # one token
    (folder / "image.png").write_bytes(b"\x89PNG\0")
    (folder / "empty.py").write_text("")
    return str(folder)


@pytest.fixture(scope="module")
def outcome(documents, encoder, tmp_path_factory):
    """One measurement with everything, from Python."""
    out = tmp_path_factory.mktemp("all") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.bench.ingest.comparison.LEAST_S", 0.005)
        patch.setattr("meshwright.bench.ingest.bench.BUDGET_S", 0.005)
        return mw.bench_ingest(
            documents, encoder=encoder, chunks="all", chunk_tokens=[20], overlap=[4], batch=[4],
            precision=["fp32", "bf16"], order=["length", "arrival"], num_queries=12, query_tokens=4,
            query_batch=[1, 5], threads=1, k=5, repeats=2, out=out,
            index=["usearch:dtype=f32/i8,ef=8/64", "faiss-ivf:lists=2/9999", "flat"],
        )  # fmt: skip


def test_every_combination_is_measured_and_kept(outcome):
    records = read_ingest(outcome.records.folder)
    assert [(p.encoding, p.mode, p.repeat) for p in records.passes] == [
        (p.encoding, p.mode, p.repeat) for p in outcome.records.passes
    ]
    assert len(records.passes) == 2 * 2 * 2 * 2  # precisions, orders, modes, repeats
    assert len({p.num_chunks for p in records.passes}) == 1
    assert {p.num_documents for p in records.passes} == {14}
    assert records.sidecar["documents"]["skipped"] == {"binary": 1, "empty": 1}
    assert records.sidecar["least_cosine"]["bf16"] > 0.99
    assert len(records.builds) == 2 * 5
    assert len(records.searches) == 2 * 2 * (2 * 2 + 1 + 1)
    assert records.sidecar["ended"]


def test_the_exact_index_finds_everything(outcome):
    flat = [s for s in outcome.records.searches if s.index == "flat"]
    assert {s.recall for s in flat} == {1.0}
    assert all(0 < s.p50_s <= s.p90_s <= s.p99_s for s in flat)
    assert all(s.queries_per_s > 0 and s.num_calls > 0 for s in flat)
    assert all(s.own_chunk_ratio is not None for s in flat)  # the weights are not random


def test_an_impossible_index_is_a_row_with_the_reason(outcome):
    (refused,) = {b.refusal for b in outcome.records.builds if b.refusal}
    assert "more lists than vectors" in refused
    document = outcome.to_dict()
    assert [b["refusal"] for b in document["builds"] if b["build"] == "lists=9999"] == [refused]
    assert any("not" not in s["index"] and s["recall"] for s in document["searches"])


def test_records_are_read_back_compared_and_reported(outcome, tmp_path):
    again = mw.read_record(outcome.folder)
    assert [s.recall for s in again.totals.searches[0].rows] == [s.recall for s in outcome.totals.searches[0].rows]
    assert [r.folder for r in mw.read_records(outcome.folder.parent).ingestions] == [outcome.folder]
    compared = mw.compare(str(outcome.folder), str(outcome.folder))
    means = {m.metric: m.value for m in compared.means}
    assert means == pytest.approx(dict.fromkeys(means, 1.0))
    assert {"ingestion rate", "recall", "search latency", "time to searchable"} <= means.keys()
    assert mw.report_records(str(outcome.folder)).summary() == "ingestion: 1"


def test_totals_are_those_of_the_rows(outcome):
    document = outcome.to_dict()
    rows = [p for p in outcome.records.passes if (p.precision, p.order, p.mode) == ("bf16", "arrival", "pipelined")]
    (found,) = [
        p for p in document["passes"]
        if (p["encoding"]["precision"], p["encoding"]["order"], p["mode"]) == ("bf16", "arrival", "pipelined")
    ]  # fmt: skip
    rates = sorted(row.num_chunks / row.wall_s for row in rows)
    assert found["chunks_per_s"]["low"] == pytest.approx(rates[0])
    assert found["chunks_per_s"]["high"] == pytest.approx(rates[1])
    assert len(document["pipelined_over_sequential"]) == 4
    assert len(document["bounds"]) == 2
    assert outcome.to_rows()[0]["index"] == "usearch"
    assert "searches" in str(outcome)
    assert "<svg" not in outcome._repr_html_()
    assert "recall@5" in outcome._repr_html_()


def test_tables_json_and_page(meshwright, documents, encoder, tmp_path):
    out, page = tmp_path / "out", tmp_path / "page.html"
    options = ("bench", "ingest", documents, "--encoder", encoder, *SMALL, "--index", "usearch", "--out")
    shown = meshwright(*options, str(out), "--html", str(page))
    assert shown.exit_code == 0, shown.stderr
    for heading in ("Ingestion", "Stages", "Index builds", "Searches", "recall@5"):
        assert heading in shown.stdout
    assert "skipped documents: 1 binary" in shown.stderr
    assert "skipped documents: 1 empty" in shown.stderr
    text = page.read_text()
    assert text.count('class="for-wide"') == 2
    assert not re.search(r"<script[^>]*src|<link|http://(?!www\.w3\.org)", text)
    again = meshwright(*options, str(out))
    assert again.exit_code == 2
    assert "already" in again.stderr
    found = json.loads(meshwright(*options, str(tmp_path / "json"), "--json").stdout)
    assert found["encoder"]["is_random"] is False
    assert {p["mode"] for p in found["passes"]} == {"sequential", "pipelined"}
    assert found["device"]["threads"] == 1


def test_fewer_vectors_than_neighbours(meshwright, encoder, tmp_path):
    (tmp_path / "one.txt").write_text("x")
    shown = meshwright(
        "bench", "ingest", str(tmp_path / "one.txt"), "--encoder", encoder, *SMALL[2:], "--json", "--out",
        str(tmp_path / "out"), "--index", "usearch", "--index", "faiss-hnsw", "--index", "faiss-ivf",
    )  # fmt: skip
    assert shown.exit_code == 0, shown.stderr
    document = json.loads(shown.stdout)
    assert document["queries"]["k"] == 1
    assert {s["recall"]["value"] for s in document["searches"]} == {1.0}
    assert "fewer than the 5 neighbours" in shown.stderr


@pytest.mark.parametrize(
    ("mode", "error", "exit_code"), [("sequential", KeyboardInterrupt, 130), ("pipelined", Terminated, 143)]
)
def test_a_signal_keeps_what_was_measured(
    meshwright, documents, encoder, tmp_path, monkeypatch, mode, error, exit_code
):
    original = passes._Progress.add

    def stopping(row, chunks, searchable):
        original(row, chunks, searchable)
        if row.asked.mode == mode and row.row.num_chunks > 8:
            raise error

    monkeypatch.setattr(passes._Progress, "add", stopping)
    shown = meshwright("bench", "ingest", documents, "--encoder", encoder, *SMALL, "--out", str(tmp_path / "out"))
    assert shown.exit_code == exit_code
    records = read_ingest(tmp_path / "out")
    assert [p.interrupted for p in records.passes] == [False] * (mode == "pipelined") + [True]
    assert 8 < records.passes[-1].num_chunks <= 12
    assert records.passes[-1].mode == mode
    assert records.sidecar["ended"]
    assert "of the measurements" in shown.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--precision", "fp8"], "'fp32', 'bf16', 'fp16'"), (["--order", ""], "length, arrival"),
        (["--mode", "both"], "'sequential', 'pipelined'"), (["--chunks", "0"], "--chunks"),
        (["--chunks", "-3"], "--chunks"), (["--chunks", "²"], "--chunks"), (["--overlap", "62"], "--overlap"),
        (["--chunk-tokens", "65"], "3 to 64"), (["--query-tokens", "63"], "--query-tokens"),
        (["--index", "usearch:ef=0"], "1 to 100000"), (["--index", "annoy"], "unknown index"),
        (["--encoder", "nowhere"], "no such encoder"), (["--tokenizer", "nowhere"], "tokenizer"),
        (["--batch", "0"], "--batch"), (["--k", "0"], "--k"),
    ],
    ids=lambda value: "".join(value[:2]) if isinstance(value, list) else None,
)  # fmt: skip
def test_wrong_options_are_refused_before_anything_is_written(meshwright, documents, encoder, tmp_path, options, said):
    shown = meshwright(
        "bench", "ingest", documents, "--encoder", encoder, *SMALL, "--out", str(tmp_path / "out"), *options
    )
    assert shown.exit_code == 2, shown.stderr
    assert said in shown.stderr
    assert not (tmp_path / "out").exists()


def test_an_empty_source_is_not_the_current_folder(meshwright, encoder, tmp_path):
    shown = meshwright("bench", "ingest", "", "--encoder", encoder, *SMALL, "--out", str(tmp_path / "out"))
    assert shown.exit_code == 2
    assert "source" in shown.stderr


def test_documents_that_cannot_be_ingested_are_refused(meshwright, encoder, tmp_path):
    folder = tmp_path / "documents"
    folder.mkdir()
    ask = ("bench", "ingest", str(folder), "--encoder", encoder, *SMALL, "--out", str(tmp_path / "out"))
    assert "there are no documents" in meshwright(*ask).stderr
    (folder / "binary").write_bytes(b"\0\1")
    (folder / "empty").write_bytes(b"")
    shown = meshwright(*ask)
    assert shown.exit_code == 2
    assert "1 binary" in shown.stderr
    assert "1 empty" in shown.stderr
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_another_encoder_is_refused(meshwright, documents, encoder, tmp_path):
    from meshwright.bench.ingest.chunks import train_chunk_tokenizer

    big = train_chunk_tokenizer(["a long list of many other tokens " * 3, "0 1 2 3 4 5 6 7 8 9 ! ? %"], vocabulary=400)
    big.tokenizer.add_tokens([f"token{n}" for n in range(300)])
    big.tokenizer.save(str(tmp_path / "tokenizer.json"))
    shown = meshwright("bench", "ingest", documents, "--encoder", encoder, *SMALL, "--tokenizer", str(tmp_path))
    assert shown.exit_code == 2
    assert "more tokens than the encoder" in shown.stderr


def test_weights_with_nan_are_refused(meshwright, documents, encoder, tmp_path):
    from safetensors.torch import load_file, save_file

    write_encoder(tmp_path / "nan")
    tensors = load_file(tmp_path / "nan" / "model.safetensors")
    tensors["embeddings.LayerNorm.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "nan" / "model.safetensors")
    shown = meshwright(
        "bench", "ingest", documents, "--encoder", str(tmp_path / "nan"), *SMALL, "--out", str(tmp_path / "out")
    )
    assert shown.exit_code == 1
    assert "not finite" in shown.stderr


def test_a_device_that_is_absent(meshwright, documents, encoder):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    shown = meshwright("bench", "ingest", documents, "--encoder", encoder, "--device", "cuda")
    assert shown.exit_code == 3
    assert "finds no GPU" in shown.stderr


def test_a_package_that_is_absent(meshwright, documents, encoder, monkeypatch):
    monkeypatch.setitem(sys.modules, "usearch", None)
    shown = meshwright("bench", "ingest", documents, "--encoder", encoder, "--index", "usearch")
    assert shown.exit_code == 3
    assert "pip install" in shown.stderr


@pytest.mark.slow  # two more processes; the fast lane interrupts and reads incomplete lines in one
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_process_leaves_readable_records(documents, encoder, tmp_path, kill):
    out = tmp_path / "out"
    command = [
        sys.executable, "-m", "meshwright", "bench", "ingest", documents, "--encoder", encoder, *SMALL, "--repeats",
        "1000", "--out", str(out),
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        for line in process.stderr:
            if "repeat 2" in line:
                process.send_signal(kill)
                break
        process.communicate()
    assert process.returncode == (-9 if kill is signal.SIGKILL else 128 + kill)
    assert len(read_ingest(out).passes) >= 3
