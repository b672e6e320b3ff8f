import io
import json

import pytest

from meshwright.cli import output
from meshwright.errors import printable


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


def test_lines_of_a_table_end_with_their_text_in_a_pipe(capsys):
    output.print_table({"plan": "left", "bound by": "left"}, [["a", "compute"], ["b", None]], caption="End")
    output.print_line("One sentence.")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [line.rstrip() for line in lines]
    assert lines[-3:] == ["b", "End", "One sentence."]


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


def test_a_terminal_obeys_no_control_character_of_a_text():
    written = "".join(map(chr, range(0x100))) + "\u200d\u4e2d"
    shown = printable(written)
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in shown)
    assert shown.endswith(written[0xA0:])


HOSTILE = "name\x1b]0;title\x07\x9b31m\rover\u202egnp.exe\u2066"
SHOWN = r"name\x1b]0;title\x07\x9b31m\rover\u202egnp.exe\u2066"


def test_what_is_printed_holds_no_character_that_a_terminal_obeys(capsys):
    output.note(HOSTILE)
    output.say(HOSTILE)
    output.print_line(HOSTILE)
    output.print_table(
        {HOSTILE: "left", "b": "right"}, [(HOSTILE, 1), (output.styled(HOSTILE, "bold"), 2)], title=HOSTILE
    )
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert text.count(SHOWN) == 7
    assert not set(text) & set(HOSTILE) - set(SHOWN)


def test_an_error_holds_no_character_that_a_terminal_obeys(meshwright, tmp_path):
    path = tmp_path / f"{HOSTILE}.yaml"
    path.write_text("model: nothing\nnothing: 1\n")
    outcome = meshwright("plan", path)
    assert outcome.exit_code == 2
    assert SHOWN in outcome.stderr
    assert not set(outcome.stderr) & set(HOSTILE) - set(SHOWN)
    as_json = meshwright("plan", path, "--json")
    assert HOSTILE in as_json.json["error"]["message"]  # programs get what it is, escaped by JSON
    assert not set(as_json.stdout) & set(HOSTILE) - set(SHOWN)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_generated_text_keeps_its_lines_and_a_terminal_obeys_none_of_it(monkeypatch, is_terminal):
    class Stream(io.StringIO):
        def isatty(self):
            return is_terminal

    stream = Stream()
    monkeypatch.setattr(output.sys, "stdout", stream)
    output.emit_text(f"one\n\ttwo {HOSTILE}\n")
    assert stream.getvalue() == f"one\n\ttwo {SHOWN if is_terminal else HOSTILE}\n"
