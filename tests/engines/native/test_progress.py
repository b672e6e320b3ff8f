"""Progress: what a log file gets, and what a terminal does."""

from __future__ import annotations

import sys
import threading

import pytest

pytest.importorskip("torch")

from meshwright.engines.native import progress as module
from meshwright.engines.native.progress import ProgressDisplay, reading
from meshwright.training.data.tokenization import TokenizationProgress as Tokenised


def entry(step: int) -> dict[str, float]:
    return {"step": step, "loss": 2.0, "tokens_per_s_per_device": 100.0, "mfu": 0.5, "memory_bytes": 2**30}


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    return lambda **options: ProgressDisplay(quiet=False, **options)


def test_a_log_file_gets_the_first_the_last_and_now_and_then_a_step(plain, capsys):
    shown = plain(num_steps=50)
    for step in range(1, 51):
        shown.step(entry(step), left_s=1.0)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["1/50", "50/50"]
    assert "left" in lines[0]
    assert "left" not in lines[1]


def test_a_long_phase_is_named_and_a_short_one_is_not(plain, capsys, monkeypatch):
    monkeypatch.setattr(module, "SILENT_S", 0.05)
    shown, named = plain(), threading.Event()
    monkeypatch.setattr(shown, "_print", lambda words: (print(words, file=sys.stderr), named.set()))
    with shown.phase("saving a checkpoint"):
        assert named.wait(timeout=10)
    with shown.phase("blinking"):
        pass
    assert capsys.readouterr().err == "saving a checkpoint ...\n"


def test_tokenising_says_how_far_it_is(plain, capsys):
    report = reading(plain())
    report(Tokenised(num_documents=1200, num_tokens=3_400_000, done_bytes=1, total_bytes=4))
    report(Tokenised(num_documents=1300, num_tokens=3_500_000, done_bytes=2, total_bytes=4))  # too soon after
    assert capsys.readouterr().err == "tokenising: 1.2K documents, 3.4M tokens (25 %)\n"


def test_quiet_is_quiet(capsys):
    shown = ProgressDisplay(quiet=True, num_steps=1)
    shown.step(entry(1), left_s=0.0)
    shown.say("words")
    with shown.phase("a phase"):
        shown.doing("something")
    shown.close()
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_live_line_that_goes_away(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "130")
    shown = ProgressDisplay(quiet=False, num_steps=2)
    shown.step(entry(1), left_s=65.0)
    shown.say("step 1  validation loss 2.5")
    shown.close()
    assert "step 1  validation loss 2.5" in capsys.readouterr().err
