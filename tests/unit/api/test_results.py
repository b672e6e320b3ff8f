"""Every result is a table, a page fragment and a line of text."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser

import pytest
from tests.every_member import check_every

import meshwright as mw
from meshwright.programs import install_command
from meshwright.result import Result

VOID = {"br", "hr", "img", "meta", "link", "input", "wbr"}
NAMES = (
    "plan", "estimate", "estimate memory", "explain", "explain against", "scale", "scale emulated", "scale replicas",
    "inference capacity", "inference estimate", "inference plan", "inference accuracy", "mlperf check", "mlperf score",
    "mlperf compare", "models", "model",
    "accelerators", "clusters", "cluster", "claims", "claim", "runs", "run",
)  # fmt: skip
WITH_FIGURE = ("plan", "estimate", "explain", "explain against", "scale")


class Balanced(HTMLParser):
    """Fails on a tag that is not closed, or closed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open, tag
        assert self.open.pop() == tag


def parsed(html: str) -> set[str]:
    """The tags of an HTML text that is well formed."""
    parser = Balanced()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return parser.seen


def test_the_html_parses_and_loads_nothing(results):
    def check(name: str) -> None:
        html = results[name]._repr_html_()
        tags = parsed(html)
        assert tags & {"table", "pre"}
        assert ("svg" in tags) is (name in WITH_FIGURE)
        without_namespaces = html.replace("http://www.w3.org", "")
        for loading in ("<script", "src=", "<link", "url(", "@import", "<iframe"):
            assert loading not in without_namespaces

    check_every(NAMES, check)


def test_the_style_touches_nothing_outside_of_it(results):
    def check(name: str) -> None:
        html = results[name]._repr_html_()
        style = html[html.index("<style>") + len("<style>") : html.index("</style>")]
        selectors = [s for rule in style.split("}") if "{" in rule for s in rule.split("{")[0].split(",")]
        assert selectors
        assert [s for s in selectors if not s.strip().startswith(".meshwright")] == []

    check_every(NAMES, check)


def test_the_frame_has_a_row_for_each_row(results):
    def check(name: str) -> None:
        result = results[name]
        frame, rows = result.to_frame(), result.to_rows()
        assert len(frame) == len(rows) > 0
        assert list(frame.columns) == list(dict.fromkeys(key for row in rows for key in row))

    check_every(NAMES, check)


def test_the_text_is_one_line(results):
    def check(name: str) -> None:
        result = results[name]
        assert str(result)
        assert "\n" not in str(result)
        assert repr(result) == f"<{type(result).__name__}: {result}>"

    check_every(NAMES, check)


def test_the_document_is_plain_json(results):
    def check(name: str) -> None:
        document = results[name].to_dict()
        assert json.loads(json.dumps(document, allow_nan=False)) == document

    check_every(NAMES, check)


def test_all_results_are_public():
    assert {c.__name__ for c in Result.__subclasses__()} <= set(mw.__all__)


def test_without_pandas_the_frame_names_what_to_install(plans, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(mw.MissingDependencyError, match="needs pandas") as caught:
        plans.to_frame()
    assert install_command("notebook") in caught.value.hint


def test_units_are_in_the_names_of_the_columns(plans):
    frame = plans.to_frame()
    assert list(frame["step_s_low"] <= frame["step_s"]) == [True] * 3
    numbers = frame.select_dtypes("number").columns.difference(["rank", "objective_value"])
    unit = re.compile(r"_(s|bytes|ratio|per_device)(_low|_high)?$")
    assert [name for name in numbers if not unit.search(name)] == []


# --- ranked plans ---


def test_plans_are_ranked_best_first_and_iterate(plans):
    assert len(plans) == len(list(plans)) == 3
    assert next(iter(plans)) is plans.best
    speeds = [done.step.tokens_per_s_per_device.value for done in plans]
    assert speeds == sorted(speeds, reverse=True)
    assert plans.front


def test_a_pinned_plan_is_estimated_as_it_was_ranked(plans):
    second = mw.estimate(plans.pinned(rank=2))
    assert second.plan == list(plans)[1].plan
    assert second.step == list(plans)[1].step.step
    assert second.chosen is None


def test_a_written_plan_is_read_back(plans, tmp_path):
    plans.write(tmp_path / "pinned.yaml")
    assert mw.load_run(tmp_path / "pinned.yaml").plan == plans.best.plan


@pytest.mark.parametrize("rank", [0, 4, -1, "1", 1.0, True, None])
def test_a_rank_that_is_not_there(plans, rank):
    with pytest.raises(mw.InputError, match="no plan of this rank"):
        plans.pinned(rank=rank)


def test_an_open_run_is_estimated_with_the_best_plan(plans):
    assert mw.estimate(plans.run).plan == plans.best.plan


def test_the_components_of_an_estimate_sum_to_the_step(results):
    done = results["estimate"]
    assert sum(done.components_s.values()) == pytest.approx(done.step.value)
    assert done.to_frame()["share_ratio"].sum() == pytest.approx(1)


def test_a_plan_that_cannot_run_is_explained_without_a_difference():
    run = mw.load_run("llama3-70b", overrides={"cluster": "h100-8x8", "parallel": {"tensor": 1}, "batch.micro": 1})
    answer = mw.explain(run)
    assert answer.difference is None
    assert "cannot run" in str(answer)
    assert answer.to_rows() == []
    parsed(answer._repr_html_())


@pytest.mark.when_touched  # test_nothing_fits (unit/cli/test_plan.py) searches for the same model
def test_infeasible_is_an_error_that_says_what_is_missing():
    with pytest.raises(mw.InfeasibleError, match="GiB"):
        mw.plan(model="llama3.1-405b", cluster="h100-8x1", global_sequences=8, sequence_length=8192)
