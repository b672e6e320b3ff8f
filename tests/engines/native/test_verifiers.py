"""Verifiers of completions, and programs that score them."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("torch")

from meshwright.errors import InputError
from meshwright.specs.reinforcement import Reward, Verifier
from meshwright.training.verifiers import Judged, scores


def judged(*completions: str, reference: str = "12") -> list[Judged]:
    return [Judged(prompt="3*4=", completion=c, reference=reference, num_tokens=len(c)) for c in completions]


@pytest.mark.parametrize(
    ("reward", "completion", "reference", "is_right"),
    [
        (Reward(verifier=Verifier.EXACT), " The  Answer\n", "the answer", True),
        (Reward(verifier=Verifier.EXACT), "the answer.", "the answer", False),
        (Reward(verifier=Verifier.NUMBER), "3 times 4 is $1,200.50.", "so #### 1200.5", True),
        (Reward(verifier=Verifier.NUMBER), "12 or 13", "12", False),
        (Reward(verifier=Verifier.NUMBER), "-5", "5", False),
        (Reward(verifier=Verifier.NUMBER), "10-5", "5", True),
        (Reward(verifier=Verifier.NUMBER), "none", "none", False),
        (Reward(verifier=Verifier.REGEX, pattern="<a>(.*?)</a>"), "so <a> 12 </a>", "12", True),
        (Reward(verifier=Verifier.REGEX, pattern="<a>(.*?)</a>"), "so <a>13</a>", "12", False),
        (Reward(verifier=Verifier.REGEX, pattern="<a>"), "so <a>13</a>", "12", True),
        (Reward(verifier=Verifier.FORMAT, pattern="<t>.*</t>"), " <t>one\ntwo</t>\n", "", True),
        (Reward(verifier=Verifier.FORMAT, pattern="<t>.*</t>"), "so <t>one</t>", "", False),
        (Reward(verifier=Verifier.LENGTH, most_tokens=3), "123", "", True),
        (Reward(verifier=Verifier.LENGTH, most_tokens=3), "1234", "", False),
    ],
)
def test_a_rule_judges_a_completion(reward, completion, reference, is_right):
    assert scores(reward, judged(completion, reference=reference)) == [float(is_right)]


def program(code: str, **settings: float) -> Reward:
    return Reward(verifier=Verifier.COMMAND, command=(sys.executable, "-S", "-c", code), **settings)


def test_a_program_reads_completions_and_writes_scores():
    code = (
        "import json, sys\n"
        "for row in map(json.loads, sys.stdin):\n"
        "    print(len(row['completion']) / 4 - (row['reference'] != '12') - (row['prompt'] != '3*4='))\n"
    )
    assert scores(program(code), judged("1", "zwölf\n")) == [0.25, 1.5]
    assert scores(program("pass"), []) == []


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print(1)", "another number of scores: got 1, allowed: 2"),
        ("print('one\\n2')", "a score is not a number: got 'one'"),
        ("print('1\\nnan')", "a score is not finite: got nan"),
        ("raise SystemExit(3)", "has failed: got 'exit code 3', allowed: 0"),
        ("while True: print('x' * 1000)", "writes too much"),
        ("import time; time.sleep(60)", "has not ended: allowed: 0.5 s"),
        ("import os, time; os.close(1); time.sleep(60)", "has not ended: allowed: 0.5 s"),
    ],
)
def test_a_program_that_fails_is_named(code, says):
    with pytest.raises(InputError, match=says):
        scores(program(code, timeout_s=0.5 if "sleep" in code else 20.0), judged("1", "2"))


def test_an_absent_program_is_named():
    with pytest.raises(InputError, match="does not start: No such file"):
        scores(Reward(verifier=Verifier.COMMAND, command=("no-such-program",)), judged("1"))
