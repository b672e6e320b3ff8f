"""Parameters of questions: one declaration is the check of an argument, the option and the documentation."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import meshwright as mw
from meshwright.api.question import AnyPath, Folders, Hook, NamedCounts, Parsed, Question, Unchecked, question_of
from meshwright.api.runs import KEYS, OVERRIDES
from meshwright.cli.question import asked_of, options_of
from meshwright.errors import InputError
from meshwright.targets import load


def questions() -> Iterator[Question]:
    """The questions among the public functions."""
    for name in mw.__all__:
        found = getattr(mw, name)
        if inspect.isfunction(found) and "__question__" in found.__dict__:
            yield question_of(found)


def command_of(question: Question) -> click.Command:
    function: Any = lambda **options: options  # noqa: E731 - a command of nothing
    for option in reversed([*options_of(question)]):
        function = option(function)
    return click.command(question.name)(function)


def test_the_body_takes_every_parameter():
    pytest.importorskip("torch")  # some bodies import it
    for question in questions():
        of_run = {*KEYS, "overrides"} if question.is_about_run else set()  # they are in the body's run
        given = {name: question.defaults.get(name) for name in question.parameters if name not in of_run}
        if "cluster" in given:
            given["cluster"] = "h100-8x1"
        inspect.signature(load(question.body)).bind(**question.prepare(**given))


def test_an_option_that_is_not_given_has_the_default_of_the_function():
    for question in questions():
        for parameter in command_of(question).params:
            default = question.defaults.get(parameter.name or "")
            if isinstance(parameter, click.Option) and not parameter.multiple and not parameter.required:
                assert parameter.get_default(click.Context(click.Command("x"))) == default, parameter.name


def test_every_parameter_is_an_option_or_only_of_the_function():
    for question in questions():
        given: dict[str, Any] = {str(parameter.name): None for parameter in command_of(question).params}
        options = {*asked_of(question, given)}
        assert given == {}
        hooks = {name for name, parameter in question.parameters.items() if isinstance(parameter, Hook)}
        assert options | hooks == set(question.parameters)
        assert not options & hooks


def test_a_key_of_the_run_file_is_one_parameter_of_every_question():
    """But for questions about serving, whose models and clusters are arguments of their own."""
    found = [(q, name) for q in questions() for name, parameter in q.parameters.items() if parameter.key]
    assert all(q.parameters[name] is KEYS[name] for q, name in found)
    assert {q.name for q, name in found if name == "model"} == {"plan", "scale"}


def test_a_synonym_is_the_first_value():
    plan = question_of(mw.plan)
    assert plan.checked({"objective": "tokens"}) == {"objective": "throughput"}
    assert command_of(plan).make_context("plan", ["--objective", "tokens"]).params["objective"] == "throughput"


def test_the_docstring_lists_every_parameter_with_its_default():
    for question in questions():
        lines = (inspect.getdoc(getattr(mw, question.name)) or "").splitlines()
        assert lines.index("Args:") < lines.index("Returns:")
        for name, parameter in question.parameters.items():
            assert f"    {parameter.documented(name)}" in lines


def test_a_wrong_value_of_every_kind_is_refused_with_the_name_of_the_argument():
    wrong = object()
    for question in questions():
        for name, parameter in question.parameters.items():
            if isinstance(parameter, Hook | Unchecked):
                continue
            with pytest.raises(InputError, match=rf"^{name}\b"):
                question.checked({name: wrong})
            if name in question.repeated and (parameter is OVERRIDES or not isinstance(parameter, Folders | Parsed)):
                with pytest.raises(InputError, match=rf"^{name}\b"):
                    question.checked({name: "text is no list"})


def test_a_list_that_is_too_short_is_refused():
    with pytest.raises(InputError, match="paths are missing"):
        mw.mlperf_score()


def test_text_that_may_be_a_path_arrives_as_it_is_written():
    asked = question_of(mw.report_records)
    texts = ("points:source=https://a.b//c", "claim:" + "s65_01," * 100, "./runs//first/")
    assert asked.checked({"items": [*texts, Path("runs")]})["items"] == (*texts, "runs")
    for call in (lambda: mw.compare("", "claim:s65_01"), lambda: mw.compare("claim:s65_01", "")):
        with pytest.raises(InputError, match=r"^(baseline|sides)\b"):
            call()


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), 1.5, True, "1"])
def test_an_amount_is_above_0_up_to_its_bound(meshwright, wrong):
    with pytest.raises(InputError, match=r"^utilization: got"):
        mw.report_records("claim:s65_01", utilization=wrong)
    if not isinstance(wrong, bool | str):
        outcome = meshwright("report", "claim:s65_01", "--utilization", wrong)
        assert outcome.exit_code == 2
        assert "--utilization" in outcome.stderr


def test_a_device_is_rented_or_bought_at_a_price():
    with pytest.raises(InputError, match=r"^life_years: .* missing\n.*--capital"):
        mw.report_records("claim:s65_01", life_years=5)
    for rented in ({"usd_per_device_hour": 3}, {"region": "East US 2"}):
        with pytest.raises(InputError, match="rented or bought"):
            mw.report_records("claim:s65_01", capital_usd=40_000, **rented)


def test_numbers_by_name_are_an_option_each():
    asked = question_of(mw.inference_capacity)
    layout = asked.parameters["layout"]
    assert isinstance(layout, NamedCounts)
    options = {p.name: p.opts for p in command_of(asked).params}
    assert options["attention_data"] == ["--attention-data"]
    given = dict.fromkeys(layout.options) | {"tensor": 8, "context": 1, "other": 2}
    assert asked_of(asked, given) == {"context": 1, "layout": {"tensor": 8}}
    assert given == {"other": 2}
    for wrong in ({"tensors": 8}, {"tensor": 0}, {"tensor": True}, {"tensor": None}, {1: 8}, "tensor=8"):
        with pytest.raises(InputError, match=r"^layout\b"):
            asked.checked({"layout": wrong})


def test_folders_are_one_or_several_and_none_is_empty():
    asked = question_of(mw.inference_calibrate)
    assert asked.checked({"records": "a"}) == asked.checked({"records": [Path("a")]}) == {"records": (Path("a"),)}
    for wrong in ("", [""], [], [3]):
        with pytest.raises(InputError, match=r"^records\b"):
            mw.inference_calibrate(wrong, cluster="cpu-1x1")  # pyright: ignore[reportArgumentType]


def test_a_cluster_is_a_name_or_a_mapping():
    asked = question_of(mw.inference_capacity)
    for right in ("h100-8x1", {"name": "h100-8x1", "network": "25Gb/s"}):
        assert asked.checked({"cluster": right}) == {"cluster": right}
    for wrong in ("", 3, {3: "x"}):
        with pytest.raises(InputError, match=r"^cluster\b"):
            asked.checked({"cluster": wrong})


def test_paths_arrive_as_paths():
    question = question_of(mw.mlperf_score)
    assert isinstance(question.parameters["paths"], AnyPath)
    assert [str(path) for path in question.checked({"paths": ["a", "b"]})["paths"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("given", "meant"), [("gbs", "global_sequences"), ("max_seq_len", "sequence_length"), ("modle", "model")]
)
def test_an_argument_of_another_name_leads_to_ours(given, meant):
    with pytest.raises(TypeError, match=rf"^plan\(\) got an unexpected .*'{given}'; did you mean {meant}\?$"):
        mw.plan(**{given: 1})
    with pytest.raises(TypeError, match=r"argument 'zzz'$"):
        mw.plan(zzz=1)
