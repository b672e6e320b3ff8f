from dataclasses import replace
from math import log

import pytest

from meshwright.catalog.claim_answers import AnswerKind, ClaimQuantity, claim_answer
from meshwright.catalog.lookup import all_claims, claim
from meshwright.planner.claims import predict_claim


def test_a_rate_is_that_of_the_best_plan_with_what_is_fixed():
    found = predict_claim(claim("s65_01"))
    assert found.plans == ("DP8 zero1 mbs4",)
    assert found.value.low < found.value.value < found.value.high
    assert found.ratio == pytest.approx(found.value.value / 31_190)


def test_the_interval_of_a_ratio_is_wider_than_either_of_its_rates():
    ratio = predict_claim(claim("perf25_03")).value
    rate = predict_claim(claim("s65_02")).value  # its baseline
    assert log(ratio.high / ratio.value) > log(rate.value / rate.low)


def test_what_needs_one_device_to_fit():
    found = predict_claim(claim("s65_16"))
    assert (found.value.value, len(found.plans)) == (1.0, 1)
    assert found.is_inside


def test_an_efficiency_is_against_the_whole_batch_on_the_same_devices():
    found = predict_claim(claim("scale_04"))
    assert 0.9 < found.value.value < 1
    assert found.is_inside  # printed with one decimal


def test_catalogue_values_round_to_the_printed_ones():
    for c in all_claims():
        answer = claim_answer(c)
        if answer.reads is ClaimQuantity.CATALOGUE:
            assert predict_claim(c).is_inside == (answer.kind is AnswerKind.REPRODUCED), c.claim_id


def test_a_claim_outside_the_interval_says_so():
    found = predict_claim(claim("s65_01"))
    assert found.is_inside
    assert not replace(found, claim=replace(found.claim, value=2 * found.value.high)).is_inside


def test_what_no_command_answers_yet_is_not_computed():
    assert predict_claim(claim("dive_01")) is None
    assert predict_claim(claim("scale_08")) is None


@pytest.mark.parametrize("claim_id", [f"mlperf51_{n:02d}" for n in range(1, 10)] + ["s65_07", "s65_08", "s65_09"])
def test_published_results_of_mlperf_reproduce_the_claims(claim_id):
    prediction = predict_claim(claim(claim_id))
    assert prediction.is_inside
    assert prediction.plans


def test_the_spread_of_the_partners_is_larger_than_claimed():
    prediction = predict_claim(claim("mlperf51_10"))
    assert prediction.value.value == pytest.approx(0.0227, abs=1e-4)
    assert not prediction.is_inside
