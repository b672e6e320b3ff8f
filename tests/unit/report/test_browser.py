"""Pages of estimates, studies, trainings and servers in a real headless Chromium: what is drawn can be read."""

from __future__ import annotations

import pytest
from tests.browser import DRAWING_FAULTS

import meshwright as mw
from meshwright.accuracy.shipped import measured_runs_path
from meshwright.cli import main

RUN = {"model": "llama3.1-70b", "cluster": "h100-8x8", "global_sequences": 256, "sequence_length": 8192}
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    where = tmp_path_factory.mktemp("pages")
    question = ["--model", "llama3.1-70b", "--cluster", "h100-8x8", "--gbs", "256", "--seq", "8192"]
    found = mw.plan(**RUN, engine="megatron", scored=300)
    found.write_html(where / "plan.html")
    sources = "data={source: {some: examples/data/opposites.jsonl, more: examples/data/opposites.jsonl}, "
    data = ["--set", sources + "tokenizer: bytes, sequence_length: 64}", "--set", "train.evaluate=null"]
    for name, options in (
        ("data", ["train", "examples/runs/tiny-llama-cpu.yaml", "--dry-run", "--no-measure", *data]),
        ("estimate", ["estimate", "examples/runs/deepseek-v3-pinned.yaml"]),
        ("scale", ["scale", *question, "--sensitivity"]),
        ("mlperf", ["mlperf", "compare", "--benchmark", "llama31_8b", "--round", "5.1", "--devices", "8"]),
        ("serve", ["bench", "serve", "--server", "mock", "--concurrency", "1,4", "--requests", "8",
                   "--input-tokens", "8", "--output-tokens", "4", "--out", str(where / "serve")]),
        ("offline", ["bench", "offline", "--server", "mock", "--pairs", "128/128,128/1024", "--requests", "2",
                     "--extrapolate-to", "8", "--out", str(where / "offline")]),
        ("accuracy", ["accuracy", "--runs", str(_few_runs(where / "few.csv"))]),
    ):  # fmt: skip
        assert main.run([*options, "--html", str(where / f"{name}.html")]) == 0
    return where


def _few_runs(path):
    """Write the header and every tenth row of the shipped runs."""
    header, *rows = measured_runs_path().read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text(header + "".join(rows[::10]), encoding="utf-8")
    return path


@pytest.mark.slow  # one page runs in tests/unit/report/overview/test_browser.py by default
@pytest.mark.parametrize("name", ["accuracy", "data", "estimate", "mlperf", "offline", "plan", "scale", "serve"])
@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False), (1920, True)], ids=["phone", "laptop", "wide"])
def test_texts_of_figures_are_large_enough_and_apart(browser, pages, name, width, dark):
    page = browser.open(pages / f"{name}.html", width=width, dark=dark)
    assert page.errors == []
    assert page.evaluate(OVERFLOW) <= 0
    assert page.evaluate(DRAWING_FAULTS) == []
    families = "new Set([...document.querySelectorAll('body *:not(pre):not(code)')].map(e => getComputedStyle(e)"
    assert page.evaluate(f"[...{families}.fontFamily))].filter(f => /serif/.test(f.replace('sans-serif', '')))") == []
