"""`meshwright generate` and `meshwright chat` on the command line."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

from tests.tiny_folders import TEMPLATE, tiny_folder

import meshwright as mw
from meshwright.cli.commands import chat


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny", template=TEMPLATE)


@pytest.fixture
def stdin(monkeypatch):
    def give(text: str | bytes) -> None:
        raw = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(raw), isatty=lambda: False))

    return give


def test_a_text_goes_to_stdout_and_its_rates_to_stderr(meshwright, folder):
    done = meshwright("generate", folder, "né", "--max-tokens", 12, "--temperature", 0)
    expected = mw.generate(folder, "né", max_tokens=12).text
    assert (done.exit_code, done.stdout) == (0, expected + ("" if expected.endswith("\n") else "\n"))
    assert "first token after" in done.stderr
    assert "tokens/s" in done.stderr


def test_a_prompt_from_stdin_loses_its_last_line_break(meshwright, folder, stdin):
    stdin("a\nb\n")
    done = meshwright("generate", folder, "--max-tokens", 5, "--json").json
    assert done["completions"][0]["prompt"] == "a\nb"
    assert done["command"][0] == "meshwright"


def test_prompts_of_a_file(meshwright, folder, tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    lines = [json.dumps("one"), "", json.dumps({"prompt": "two " * 9}), json.dumps({"messages": messages})]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    done = meshwright("generate", folder, "--prompts", tmp_path / "p.jsonl", "--batch", 2, "--max-tokens", 4)
    assert [line[:7] for line in done.stdout.splitlines() if line.startswith("[")] == ["[1] one", "[2] two", "[3] hi"]
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    found = meshwright("generate", folder, "--prompts", tmp_path / "p.txt", "--max-tokens", 2, "--json").json
    assert [c["prompt"] for c in found["completions"]] == ["one", "two"]


def test_only_line_ends_divide_prompts_and_unused_keys_are_noted(meshwright, folder, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a\u2028b", "id": 1}\n{"text": "c", "id": 2}\n')
    done = meshwright("generate", folder, "--prompts", tmp_path / "p.jsonl", "--max-tokens", 2, "--json")
    assert [c["prompt"] for c in done.json["completions"]] == ["a\u2028b", "c"]
    assert "that are not used: id (2)" in done.stderr


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b'{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', "p.jsonl:1: not supported"),
        ("p.jsonl", b'{"prompt": "a", "prompt": "b"}', "p.jsonl:1: not JSON: the key 'prompt' is there twice"),
        ("p.jsonl", b'"x"\n{"prompt": 3}\n', "p.jsonl:2: prompt: got 'int'"),
        ("p.jsonl", b"{", "p.jsonl:1: not JSON"),
        ("p.jsonl", b"[1]", "p.jsonl:1: not a prompt"),
        ("p.jsonl", b'{"prompt": "a", "text": "b"}', "p.jsonl:1: not a prompt"),
        ("p.jsonl", b'{"messages": [3]}', "p.jsonl:1: messages"),
        ("p.txt", b"\n \n", "has no prompt"),
        ("p.txt", b"\xff", "not UTF-8"),
        ("nowhere.txt", None, "cannot read the prompts"),
    ],
)
def test_a_wrong_file_is_bad_input(meshwright, folder, tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    done = meshwright("generate", folder, "--prompts", tmp_path / name)
    assert done.exit_code == 2
    assert message in done.stderr


def test_two_prompts_and_none_are_bad_input(meshwright, folder, tmp_path, monkeypatch, stdin):
    (tmp_path / "p.txt").write_text("x")
    assert meshwright("generate", folder, "x", "--prompts", tmp_path / "p.txt").exit_code == 2
    stdin(b"\xff\xfe")
    assert "stdin is not UTF-8" in meshwright("generate", folder).stderr
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert "there is no prompt" in meshwright("generate", folder).stderr


# --- chat ---


def test_lines_of_a_pipe_are_turns_of_one_conversation(meshwright, folder, stdin):
    stdin("Hi\n\nAnd you?\n")
    done = meshwright("chat", folder, "--system", "Be brief.", "--max-tokens", 6, "--json").json
    first, second = done["completions"]
    assert [m["role"] for m in second["prompt"]] == ["system", "user", "assistant", "user"]
    assert second["prompt"][2]["content"] == first["text"]
    alone = mw.generate(folder, second["prompt"], max_tokens=6)
    assert alone.completions[0].tokens == tuple(second["tokens"])


def test_messages_of_the_command_line_are_turns(meshwright, folder):
    done = meshwright("chat", folder, "Hi", "Again", "--max-tokens", 4)
    assert done.exit_code == 0
    answers = mw.generate(folder, [{"role": "user", "content": "Hi"}], max_tokens=4)
    assert done.stdout.startswith(answers.text)


def test_a_conversation_that_is_too_long_is_refused_not_cut(meshwright, folder):
    done = meshwright("chat", folder, "x" * 300)
    assert done.exit_code == 2
    assert "256, the positions that the model is trained for" in done.stderr


def test_without_a_template_it_says_chatml(meshwright, tmp_path):
    done = meshwright("chat", tiny_folder(tmp_path / "plain"), "Hi", "--max-tokens", 2)
    assert "written as ChatML" in done.stderr


@pytest.fixture
def talk(meshwright, folder, monkeypatch):
    def lines(*given):
        """Run a conversation on a terminal; an exception in the place of a line is raised there."""
        left = list(given)

        def read(prompt):
            line = left.pop(0) if left else EOFError()
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
        monkeypatch.setattr("builtins.input", read)
        return meshwright("chat", folder, "--max-tokens", 4)

    return lines


def test_a_terminal_talks_until_it_ends(talk, folder):
    done = talk("Hi", "/undo", "Hi", KeyboardInterrupt(), "/clear", "Hi", "/system Be brief.", "/quit", "never")
    answer = mw.generate(folder, [{"role": "user", "content": "Hi"}], max_tokens=4).text
    assert done.exit_code == 0
    assert done.stdout == (answer + "\n") * 3
    assert "(Ctrl-D or /quit ends)" in done.stderr


def test_commands_say_what_they_did(talk):
    done = talk("/undo", "/nope", "/help", "/system")
    assert done.stdout == ""
    for part in ("no turn to take back", "/nope is no command", "Ctrl-C", "without a system prompt"):
        assert part in done.stderr


def test_a_turn_that_is_too_long_does_not_end_the_conversation(talk):
    done = talk("x" * 300, "Hi")
    assert done.exit_code == 0
    assert "is too long" in done.stderr
    assert done.stdout.strip()


def test_ctrl_c_stops_an_answer_and_the_second_leaves():
    import os
    import signal

    with chat._stopped_by_ctrl_c() as is_cancelled:
        assert not is_cancelled()
        os.kill(os.getpid(), signal.SIGINT)
        assert is_cancelled()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_stopped_answer_keeps_what_was_written(folder):
    from meshwright.api.generate import open_generator

    generator, _ = open_generator(
        model=folder, max_tokens=50, seed=None, stop=(), step=None, dtype=None, tokenizer=None, adapter=None,
        beyond_positions=False,
    )  # fmt: skip
    asked = iter([False, False, True])
    prompts = generator.prompts(["x"])
    (answer,) = generator.answer(prompts, is_cancelled=lambda: next(asked))
    assert (len(answer.tokens), answer.ending) == (3, "interrupted")


def test_json_needs_messages(meshwright, folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert meshwright("chat", folder, "--json").exit_code == 2
