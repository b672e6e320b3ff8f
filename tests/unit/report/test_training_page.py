"""The page of a training, from a folder as the engine leaves it; no tensor framework is needed."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys

import pytest
from tests import record_folders
from tests.record_folders import changed_record

from meshwright.answers.training_run import read_training
from meshwright.errors import InputError
from meshwright.report.training_figures import loss_svg, portions, ratio_legend, step_time_svg
from meshwright.report.training_page import training_page

RECORD = changed_record(
    record_folders.RECORD,
    {
        "statistics__steps": 40, "statistics__tokens": 40 * 64 * 8192,
        "statistics__step_s": {"n": 33, "median": 7.0, "low": 6.5, "high": 21.0},
        "statistics__throughput": {"n": 33, "median": 9362.0, "low": 3120.0, "high": 10082.0},
        "ranks": {"step_s": [7.0] * 7 + [7.7], "peak_memory_bytes": [60 * 2**30] * 8, "straggler_ratio": 1.1},
        "predicted__mfu": {"value": 0.45, "low": 0.39, "high": 0.51, "unit": "ratio", "tier": "interpolated"},
        "command": ["meshwright", "train", "my run.yaml"], "sample": "<once> upon", "profile": None,
        "notes": ["a note & more"],
    },
)  # fmt: skip


def line(step: int) -> dict[str, object]:
    entry: dict[str, object] = {
        "step": step, "loss": 11.5 - step / 8, "gradient_norm": 1.0, "learning_rate": 1e-4 * step,
        "step_s": 21.0 if step == 30 else 7.0, "tokens_per_s_per_device": 9362.0, "mfu": 0.44,
        "memory_bytes": 60 * 2**30,
    }  # fmt: skip
    return entry | ({"validation_loss": 7.0} if step % 10 == 0 else {})


def written(folder, *, lines=None, **changes):
    """A training in a folder, whose record has other values where they are given."""
    (folder / "record.json").write_text(json.dumps(changed_record(RECORD, changes)))
    lines = [line(step) for step in range(1, 41)] if lines is None else lines
    (folder / "steps.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    (folder / "run.yaml").write_text("model: llama3.1-8b  # <mine>\n")
    return read_training(folder)


@pytest.fixture
def page(tmp_path):
    """The page of such a training."""
    return lambda **changes: training_page(written(tmp_path, **changes)).replace("\N{NO-BREAK SPACE}", " ")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The page of the training as it is."""
    return training_page(written(tmp_path_factory.mktemp("plain"))).replace("\N{NO-BREAK SPACE}", " ")


def test_it_says_what_was_trained_and_stands_alone(plain):
    for words in (
        "night: llama3.1-8b on 8 × NVIDIA H100 80GB HBM3", "8.03B parameters, bf16, DP8 fsdp mbs1", "6 min 40 s in all",
        "from 11.500, validation 6.500", "The step time lies inside the interval.", "7.000 s", "9,362", "44.0 %",
        "60.0 GiB", "a note &amp; more", "&lt;once&gt; upon", "# &lt;mine&gt;",
        "meshwright train &#x27;my run.yaml&#x27;",
        "1.100 times the median step", "All steps were taken.",
    ):  # fmt: skip
        assert words in plain, words
    without_links = re.sub(r'<a href="https://[^"]*">', "", plain).replace("http://www.w3.org", "")
    for loading in ("<script", "src=", "<link", "url(", "@import"):
        assert loading not in without_links


@pytest.mark.when_touched  # test_it_says_what_was_trained_and_stands_alone has the page
def test_a_target_that_was_reached_is_a_figure_of_its_own(page):
    text = page(ending="target", statistics__target={"loss": 3.5, "steps": 40, "tokens": 9, "seconds": 65.0})
    assert "The target loss was reached." in text
    assert "<b>1 min 5 s</b>" in text


@pytest.mark.parametrize(
    ("median_s", "words"),
    [
        (9.0, "slower than"),
        pytest.param(5.0, "faster than", marks=pytest.mark.when_touched),  # slower is outside as well
    ],
)
def test_outside_the_interval_it_says_so(page, median_s, words):
    text = page(statistics__step_s={"n": 33, "median": median_s, "low": median_s, "high": median_s})
    assert f"The step was {words} the interval allows." in text
    assert "measured, outside" in text


@pytest.mark.when_touched  # test_it_says_what_was_trained_and_stands_alone has the page
def test_without_a_prediction_nothing_stands_beside(page):
    text = page(predicted=None)
    assert "Predicted and measured" not in text
    assert "not predicted" in text
    assert "Where the planner expected it to go" not in text


def test_published_runs_of_the_same_accelerator_come_first_with_their_source(plain):
    section = plain.split("Compared with published results")[-1].split("</section>")[0]
    accelerators = re.findall(r"<tr><td>([\w.-]+)</td>", section)
    assert accelerators[0] == "h100"
    assert 'href="#note-' in section
    assert '<a href="https://github.com/' in plain.split("and sources")[-1]


@pytest.mark.parametrize(
    "changes",
    [
        {"device__accelerator": None},
        pytest.param(
            {"run__model": {"name": "nobody-published"}},
            marks=pytest.mark.when_touched,  # a device that nobody published leaves the same out
        ),
    ],
)
def test_without_published_runs_there_is_no_comparison(page, changes):
    assert "Compared with published results" not in page(**changes)


def test_a_training_that_diverged_at_once_has_a_page(page):
    nothing = {"n": 0}
    text = page(
        ending="diverged", sample=None, lines=[{**line(1), "loss": math.nan, "gradient_norm": math.nan}],
        statistics__step_s=nothing, statistics__throughput=nothing, statistics__mfu=None,
        statistics__tokens_per_s_per_device=None, statistics__first_loss=None, statistics__last_loss=None,
        ranks__step_s=[None] * 8, ranks__straggler_ratio=None,
        events=[{"step": 1, "words": "the loss is no number", "action": "stop", "time": "now"}],
    )  # fmt: skip
    assert "could not be right" in text
    assert "the loss is no number" in text
    assert re.search(r"\bnan\b", re.sub("<[^>]*>", " ", text), re.IGNORECASE) is None


def test_a_profile_is_shown_as_shares(page):
    profile = {
        "steps": [6, 7], "device": "gpu", "window_s": 14.0,
        "shares": {"GEMM": 0.6, "attention": 0.2, "communication": 0.1, "other": 0.0, "idle": 0.1},
        "communication": {"busy_s": 4.0, "exposed_s": 1.4},
        "kernels": [{"name": "nvjet_x", "category": "GEMM", "calls": 20, "seconds": 8.0}],
        "unknown": [{"name": "acme<1>", "category": "other", "calls": 1, "seconds": 0.0}],
    }  # fmt: skip
    text = page(profile=profile)
    assert "steps 6 to 7, 7.000 s each" in text
    assert "65.0 % of the communication is hidden" in text
    assert "4.200 s, 60.0 %" in text
    assert "counted as other: acme&lt;1&gt;" in text


def test_routes_of_kernels_are_shown_with_the_ranks_that_took_them(page):
    refused = [{"route": "triton", "reason": "Triton is <old>"}]
    rows = [
        {"op": "rms_norm", "route": "reference", "why": "default", "architecture": "sm90", "calls": 3,
         "refused": refused, "ranks": "0-7"},
        {"op": "adamw", "route": "fused", "why": "run file", "architecture": "sm90", "calls": 1, "refused": []},
    ]  # fmt: skip
    text = page(kernels=rows)
    section = text.split("Routes of training kernels")[-1].split("</section>")[0]
    assert "triton: Triton is &lt;old&gt;" in section
    assert "0-7" in section
    assert "Routes of training kernels" not in page(kernels=())


def test_outliers_survive_however_many_steps_there_are():
    steps = [{"step": i, "step_s": 50.0 if i == 77_777 else 1.0} for i in range(1, 100_001)]
    found = portions(steps, "step_s", most=300)
    assert len(found) == 300
    assert max(p["high"] for p in found) == 50.0
    assert {p["median"] for p in found} == {1.0}
    drawn = step_time_svg(steps, predicted=None)
    assert len(drawn) < 200_000


def test_values_that_are_no_number_are_left_out():
    steps = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": math.nan}, {"step": 3, "loss": None}]
    assert [p["median"] for p in portions(steps, "loss")] == [2.0]
    assert "NaN" not in loss_svg(steps)


def test_the_legend_names_what_is_drawn(tmp_path):
    names = [name for name, _ in ratio_legend(written(tmp_path).measured_quantities())]
    assert names == ["80 % interval of the prediction", "measured, inside", "measured, no interval"]


def test_a_folder_without_a_training_is_refused(tmp_path):
    with pytest.raises(InputError, match="no whole training"):
        read_training(tmp_path)
    (tmp_path / "steps.jsonl").write_text("")
    (tmp_path / "run.yaml").write_text("")
    (tmp_path / "record.json").write_text("{")
    with pytest.raises(InputError, match=r"record\.json cannot be read"):
        read_training(tmp_path)
    (tmp_path / "record.json").write_text("{}")
    with pytest.raises(InputError, match="run is missing; device is missing"):
        read_training(tmp_path)


@pytest.mark.when_touched  # test_reading_loads_no_tensor_framework (unit/api/test_records.py) reads a training
def test_reading_needs_no_tensor_framework():
    code = "import sys, meshwright.report.training_page; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
