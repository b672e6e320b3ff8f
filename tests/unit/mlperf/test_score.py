"""Scores of sets of runs."""

from __future__ import annotations

import csv
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.mlperf.conftest import SyntheticLog

from meshwright.errors import InputError
from meshwright.mlperf.benchmarks import load_benchmark
from meshwright.mlperf.prospects import prospect
from meshwright.mlperf.score import olympic_minutes, result_folders, score_folder

SCORES = Path(__file__).parent / "published_logs" / "scores.csv"


def test_published_scores(published: Path) -> None:
    rows = list(csv.DictReader(SCORES.read_text().splitlines()))
    assert len(rows) == 8
    for row in rows:
        folder = published / f"v{row['round']}" / row["submitter"] / "results" / row["system"] / row["benchmark"]
        score = score_folder(folder)
        assert score.benchmark.round == row["round"]
        assert score.passes
        assert score.score_min == pytest.approx(float(row["score_min"]), rel=1e-3)
        assert score.test.scaling == pytest.approx(float(row["rcp_scaling"]), abs=1e-4)


def test_round_from_the_date(lora_set: Callable[..., Path]) -> None:
    score = score_folder(lora_set(5, 5, 5))
    assert score.benchmark.round == "5.1"
    assert score.round_from == "date of the run, 2025-10-09"


def test_complete_set(lora_set: Callable[..., Path]) -> None:
    score = score_folder(lora_set(*[5] * 5, *[6] * 5))
    assert score.passes
    assert len(score.kept) == 8
    assert score.test.submission_mean == 3264
    assert score.test.scaling == 1.0
    assert score.raw_min == score.score_min


def test_failed_runs(lora_set: Callable[..., Path]) -> None:
    folder = lora_set(*[5] * 10)
    log = SyntheticLog(seed=3)
    log.row("run_stop")["metadata"]["status"] = "aborted"
    log.write(folder / "result_3.txt")
    score = score_folder(folder)
    assert score.passes
    assert "result_3.txt" in score.dropped
    assert "aborted" in score.runs[3].problem
    log = SyntheticLog(seed=4)
    log.rows_of("eval_accuracy")[-1]["value"] = 0.93
    log.write(folder / "result_4.txt")
    score = score_folder(folder)
    assert (score.passes, score.raw_min, score.score_min) == (False, None, None)
    assert "misses the target" in score.runs[4].problem


def test_differing_batch_sizes(lora_set: Callable[..., Path]) -> None:
    folder = lora_set(*[5] * 10)
    SyntheticLog(batch=16, seed=2).write(folder / "result_2.txt")
    assert any("batch sizes differ: 8, 16" in p for p in score_folder(folder).problems)


def test_three_runs_keep_the_median() -> None:
    from meshwright.mlperf.score import ScoredRun

    def run(name: str, minutes: float | None) -> ScoredRun:
        return ScoredRun(name=name, started_ms=0, minutes=minutes, samples=1, global_batch_size=1)

    assert olympic_minutes([run("a", 3.0), run("b", None), run("c", 2.0)]) == (3.0, ("a",), ("c", "b"))
    assert olympic_minutes([run("a", 3.0), run("b", None), run("c", None)])[0] is None
    assert olympic_minutes([run("a", 3.0), run("b", 1.0)])[0] is None


def test_more_runs_take_the_median_window(lora_set: Callable[..., Path]) -> None:
    folder = lora_set(5, 5, 5, 6, 6, 6, 6, 5, 5, 6, 6, 6)
    whole = score_folder(folder)
    assert len(whole.runs) == 12
    assert len(whole.scored) == 10
    windows = []
    for start in range(3):
        part = folder.parent / f"window{start}" / "llama2_70b_lora"
        part.mkdir(parents=True)
        for i in range(start, start + 10):
            shutil.copy(folder / f"result_{i}.txt", part)
        windows.append(score_folder(part).score_min)
    assert whole.score_min == sorted(windows)[1]  # type: ignore[type-var]


def test_a_set_that_converges_too_fast(lora_set: Callable[..., Path]) -> None:
    score = score_folder(lora_set(*[3] * 10))
    assert not score.passes
    assert "faster than allowed" in score.test.message
    assert score.test.scaling == 1.0


def test_whole_trees_and_absent_folders(lora_set: Callable[..., Path], tmp_path: Path) -> None:
    folder = lora_set(5, 5, 5)
    assert result_folders(tmp_path) == [folder]
    for wrong in (tmp_path / "absent", folder / "result_0.txt"):
        with pytest.raises(InputError):
            result_folders(wrong)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no result_"):
        result_folders(tmp_path / "empty")


@pytest.mark.parametrize("num_seen", [0, 3, 6])
def test_prospect_follows_the_runs(num_seen: int) -> None:
    rules = load_benchmark("llama2_70b_lora", "5.1")
    fast, typical, slow = (
        prospect(rules, [samples] * num_seen, global_batch_size=8).probability for samples in (2304, 3072, 3840)
    )
    if num_seen == 0:
        assert fast == typical == slow
        assert 0.6 < typical < 0.95
    else:
        assert fast < 0.35
        assert fast < typical < slow
        assert slow > 0.97


def test_prospect_of_whole_sets_is_certain() -> None:
    rules = load_benchmark("llama2_70b_lora", "5.1")
    assert prospect(rules, [3072] * 10, global_batch_size=8).probability == 1.0
    assert prospect(rules, [2304] * 10, global_batch_size=8).probability == 0.0
    assert prospect(rules, [None, None], global_batch_size=8).problem.startswith("2 runs")
    assert "no reference" in prospect(rules, [], global_batch_size=512).problem


def test_prospect_is_calibrated() -> None:
    """Sets drawn from the reference's raw counts, shifted: predicted and observed frequencies agree."""
    import numpy as np

    from meshwright.mlperf.convergence import convergence_test, reference_points

    rules, rng = load_benchmark("llama2_70b_lora", "5.1"), np.random.default_rng(5)
    point = reference_points(rules)[0]
    predicted, observed = [], []
    for num_seen, _ in itertools.product((2, 4, 7), range(40)):
        latent = rng.choice(point.counts, size=10) - rng.random(10) * 384 + rng.normal(0, point.std)
        counts = list(np.maximum(np.ceil(latent / 384) * 384, 1536))
        predicted.append(prospect(rules, counts[:num_seen], global_batch_size=8).probability)
        observed.append(convergence_test(rules, counts, global_batch_size=8).passes)
    p, o = np.array(predicted), np.array(observed, dtype=float)
    assert abs(p.mean() - o.mean()) < 0.08
    assert np.mean((p - o) ** 2) < 0.6 * o.mean() * (1 - o.mean())
    sure = p > 0.9
    assert o[sure].mean() > 0.9
