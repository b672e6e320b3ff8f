import io
import json
import math
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli import output
from meshwright.specs.estimate import Estimate, Shortfall, Tier
from meshwright.specs.plan import Schedule, Sharding


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, None),
        (-math.inf, None),
        (0.1 + 0.2, 0.3),
        (np.float64(2.5), 2.5),
        (np.int64(7), 7),
        (np.array([1.0, np.inf]), [1.0, None]),
        (True, True),
        (Schedule.INTERLEAVED, "interleaved"),
        (Sharding.PARAMETERS, "parameters"),
        ({3: 1, Schedule.GPIPE: 2}, {"3": 1, "gpipe": 2}),
        ({"b", "a"}, ["a", "b"]),
        (Path("runs") / "a.yaml", "runs/a.yaml"),
        ((x for x in (1, 2)), [1, 2]),
    ],
)
def test_jsonable(value, expected):
    assert output.jsonable(value) == expected


def test_a_dataclass_is_its_fields_unless_it_says_otherwise():
    shortfall = Shortfall(what="memory", needed=2.0, available=1.0, unit="GiB")
    assert output.jsonable(shortfall) == {"what": "memory", "needed": 2.0, "available": 1.0, "unit": "GiB"}
    estimate = Estimate(value=2.0, low=1.0, high=3.0, unit="s", tier=Tier.MEASURED)
    assert output.jsonable(estimate)["tier"] == "measured"


def test_what_has_no_json_form_is_refused():
    with pytest.raises(TypeError, match="object"):
        output.jsonable(object())


def test_the_document_does_not_depend_on_the_order_of_keys(capsys):
    output.emit_json({"b": 1, "a": {"d": 2, "c": 3}})
    first = capsys.readouterr().out
    output.emit_json({"a": {"c": 3, "d": 2}, "b": 1})
    assert capsys.readouterr().out == first
    assert json.loads(first) == {"a": {"c": 3, "d": 2}, "b": 1}


def test_a_table_prints_brackets_as_they_are_and_keeps_its_rows_on_one_line(capsys):
    long_plan = "TP8 PP16 VPP8 EP8 DP96 zero1 mbs1 interleaved recompute=selective [bold]"
    rows = [[long_plan, 1.5], [None, "x"]]
    output.print_table({"plan": "left", "step": "right"}, rows, title="Plans [1]")
    printed = capsys.readouterr().out
    assert f"{long_plan}    1.5" in printed
    assert "Plans [1]" in printed
    assert "None" not in printed


def test_a_narrow_table_keeps_the_name_of_each_row_in_one_piece(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    output.print_table(["name", "title"], [["deepseek-v2-lite", "word " * 20]])
    assert "deepseek-v2-lite" in capsys.readouterr().out


def test_colour_follows_the_terminal_and_no_color(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured, plain = Terminal(), Terminal()
    output.console(coloured).print("x", style="red")
    monkeypatch.setenv("NO_COLOR", "1")
    output.console(plain).print("x", style="red")
    assert "\x1b[31m" in coloured.getvalue()
    assert "\x1b[31m" not in plain.getvalue()


def test_notes_and_progress_leave_stdout_alone(capsys):
    output.note("calibration is guessed")
    with output.progress("searching", total=2) as advance:
        advance(1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "note: calibration is guessed\n"


def test_progress_draws_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stderr = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(output.sys, "stderr", stderr)
    with output.progress("searching", total=2) as advance:
        advance(2)
    assert "searching" in stderr.getvalue()
