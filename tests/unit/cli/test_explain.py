import pytest
from tests.example_runs import OPEN_RUN, PINNED_RUN


def test_a_pinned_plan_against_the_planners_best(meshwright):
    outcome = meshwright("explain", PINNED_RUN, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    document = outcome.json
    assert document["obstacle"] is None
    assert document["this"]["plan"].startswith("TP4 CP2 PP4 VPP5")
    best = meshwright("plan", PINNED_RUN, "--top", 1, "--json")
    assert document["other"]["plan"] == best.json["plans"][0]["plan"]
    difference = document["difference"]
    step = difference["step_ms"]
    assert step["delta"] <= 0
    assert sum(c["delta"] for c in difference["components_ms"].values()) == pytest.approx(step["delta"])
    assert difference["decided_by"] in difference["components_ms"]
    assert "decides" in difference["text"]


def test_an_open_plan_shows_the_best_two(meshwright):
    document = meshwright("explain", OPEN_RUN, "--json").json
    assert document["difference"]["step_ms"]["delta"] > 0


def test_one_run_against_another(meshwright, tmp_path):
    other = tmp_path / "other.yaml"
    text = PINNED_RUN.read_text(encoding="utf-8").replace("tensor: 4", "tensor: 8").replace("context: 2", "context: 1")
    other.write_text(text, encoding="utf-8")
    outcome = meshwright("explain", PINNED_RUN, "--against", other)
    assert outcome.exit_code == 0, outcome.stderr
    for words in ("tensor 4 → 8", "context 2 → 1", "ms of a step", "GiB per device", "│", "decides"):
        assert words in outcome.stdout
    forth = meshwright("explain", PINNED_RUN, "--against", other, "--json").json["difference"]["step_ms"]
    back = meshwright("explain", other, "--against", PINNED_RUN, "--json").json["difference"]["step_ms"]
    assert forth["delta"] == pytest.approx(-back["delta"])


def test_a_run_against_itself(meshwright):
    outcome = meshwright("explain", PINNED_RUN, "--against", PINNED_RUN)
    assert "They are the same plan." in outcome.stdout
    assert "Both take the same time." in outcome.stdout


def test_a_plan_that_cannot_run_is_told_what_is_in_its_way(meshwright):
    outcome = meshwright("explain", PINNED_RUN, "--set", "parallel={tensor: 1, pipeline: 1, context: 1}", "--json")
    assert outcome.exit_code == 1, outcome.stderr
    assert "needs" in outcome.json["obstacle"]
    assert outcome.json["difference"] is None
    assert outcome.json["other"]["memory"]["fits"]


def test_a_plan_that_does_not_fit_has_the_exit_code_of_its_estimate(meshwright):
    changed = (PINNED_RUN, "--set", "parallel={tensor: 1, pipeline: 1, context: 1}")
    explained = meshwright("explain", *changed)
    assert explained.exit_code == meshwright("estimate", *changed).exit_code == 1
    assert "this run's plan is out: device memory" in explained.stdout


def test_why_not(meshwright):
    outcome = meshwright("explain", OPEN_RUN, "--why-not", "tensor=8", "--why-not", "tensor=3")
    assert outcome.exit_code == 0, outcome.stderr
    assert "Why not tensor=8: slower." in outcome.stdout
    assert "Why not tensor=3: illegal." in outcome.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.yaml",), "missing.yaml"),
        ((OPEN_RUN, "--against", "missing.yaml"), "missing.yaml"),
        ((OPEN_RUN, "--why-not", "tensor"), "not an assignment"),
        ((OPEN_RUN, "--set", "cluster=here"), "known cluster"),
    ],
)
def test_bad_input_is_one_message(meshwright, arguments, message):
    outcome = meshwright("explain", *arguments, "--json")
    assert outcome.exit_code == 2
    assert message in outcome.json["error"]["message"]
    assert "Traceback" not in outcome.stderr
