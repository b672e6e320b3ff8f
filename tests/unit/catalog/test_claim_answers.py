import tomllib

import pytest

from meshwright.catalog.claim_answers import AnswerKind, ClaimQuantity, claim_answer
from meshwright.catalog.entries import DATA
from meshwright.catalog.lookup import all_claims, claim
from meshwright.cli.main import VERBS

COMPUTED = {AnswerKind.PREDICTED, AnswerKind.REPRODUCED, AnswerKind.EXPLAINED}


def test_every_claim_has_one_answer_and_there_are_no_others():
    answers = tomllib.loads((DATA / "claims_answers.toml").read_text(encoding="utf-8"))["answers"]
    assert answers.keys() == {c.claim_id for c in all_claims()}


def test_what_is_computed_says_what_to_read_and_nothing_else_does():
    for c in all_claims():
        answer = claim_answer(c)
        assert (answer.reads is not None) == (answer.kind in COMPUTED), c.claim_id


def test_every_answer_names_a_command_and_only_not_yet_ones_may_be_missing():
    for c in all_claims():
        answer = claim_answer(c)
        assert answer.commands, c.claim_id
        for command in answer.commands:
            program, verb = command.split()[:2]
            assert program == "meshwright"
            assert verb in VERBS or answer.kind is AnswerKind.NOT_YET, c.claim_id


def test_no_run_is_left_unused():
    document = tomllib.loads((DATA / "claims_answers.toml").read_text(encoding="utf-8"))
    used = {row.get(key) for row in document["answers"].values() for key in ("run", "against")}
    assert document["runs"].keys() == used - {None}


def test_a_ratio_has_two_commands_and_a_rate_one():
    for c in all_claims():
        answer = claim_answer(c)
        if answer.reads in (ClaimQuantity.RATE, ClaimQuantity.RATIO):
            assert len(answer.commands) == (2 if answer.reads is ClaimQuantity.RATIO else 1)


@pytest.mark.parametrize("claim_id", ["s65_04", "scale_06"])
def test_a_command_holds_the_options_that_are_predicted_with(claim_id):
    answer = claim_answer(claim(claim_id))
    for option in (f"--model {answer.run.model}", f"--cluster {answer.run.cluster}", f"--seq {answer.run.seq}"):
        assert option in answer.commands[0]


def test_the_emulation_is_done_on_the_cluster_of_the_run():
    assert "--emulate 768 --devices 65536" in claim_answer(claim("scale_06")).commands[0]
