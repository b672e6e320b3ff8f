"""Wrong values are errors of ours, with what, got, allowed and hint; never a traceback from the inside."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from tests.every_member import check_every

import meshwright as mw
from meshwright.api import arguments

GIVEN = {"model": "llama3.1-8b", "cluster": "h100-8x4", "global_sequences": 512, "sequence_length": 8192}
SHIPPED = "llama3-8b"
LOOP: dict[str, object] = {}
LOOP["data"] = LOOP

PLAN = [
    ({}, "missing model, cluster, global_sequences, sequence_length"),
    ({"model": "llama3.1-8b"}, "missing cluster, global_sequences, sequence_length"),
    ({"run": 3}, "run: got 'int'"),
    ({"run": SHIPPED, "model": "llama3.1-8b"}, "a run and model are both given"),
    ({"run": SHIPPED, "global_sequences": 8, "precision": "fp8"}, "a run and global_sequences, precision are both"),
    (GIVEN | {"model": "lama3.1-8b"}, "unknown model: got 'lama3.1-8b'"),
    (GIVEN | {"model": 7}, "model: must be text: got 7"),
    (GIVEN | {"model": b"x"}, "model: got 'bytes'"),
    (GIVEN | {"model": object()}, "model: got 'object'"),
    (GIVEN | {"model": {"hidden": {1, 2}}}, "hidden: got 'set'"),
    (GIVEN | {"cluster": "h1000-8x4"}, "unknown accelerator: got 'h1000'"),
    (GIVEN | {"cluster": []}, "cluster: must be text"),
    (GIVEN | {"global_sequences": -512}, "global_sequences: got -512, allowed: a whole number"),
    (GIVEN | {"global_sequences": 5.5}, "global_sequences: got 5.5"),
    (GIVEN | {"global_sequences": math.nan}, "global_sequences: got nan"),
    (GIVEN | {"global_sequences": True}, "global_sequences: got True"),
    (GIVEN | {"global_sequences": 10**30}, "global_sequences: got 1000000"),
    (GIVEN | {"sequence_length": "8192"}, "sequence_length: got '8192'"),
    (GIVEN | {"precision": "fp7"}, "unknown precision: got 'fp7'"),
    (GIVEN | {"precision": 8}, "precision: must be text: got 8"),
    (GIVEN | {"engine": "nativ"}, "engine: unknown value: got 'nativ'"),
    (GIVEN | {"objective": "fast"}, "objective: got 'fast', allowed: throughput, time, cost, energy"),
    ({"run": SHIPPED, "top": 0}, "top: got 0, allowed: a whole number, 1 to 100"),
    ({"run": SHIPPED, "top": "many"}, "top: got 'many'"),
    ({"run": SHIPPED, "front": 1}, "front: got 1, allowed: True or False"),
    ({"run": SHIPPED, "fixed": {"tensr": 8}}, "unknown plan field: got 'tensr'"),
    ({"run": SHIPPED, "fixed": [8]}, "fixed: got 'list', allowed: a mapping"),
    ({"run": SHIPPED, "fixed": {"tensor": math.nan}}, "tensor: got 'nan', allowed: a whole number"),
    ({"run": SHIPPED, "fixed": {"tensor": None}}, "tensor: got 'None'"),
    ({"run": SHIPPED, "fixed": {3: 3}}, "unknown plan field: got '3'"),
    ({"run": SHIPPED, "fixed": "tensor"}, "not an assignment: got 'tensor'"),
    ({"run": SHIPPED, "why_not": 3}, "why_not: got 3, allowed: a list"),
    ({"run": SHIPPED, "why_not": [3]}, "why_not: got 'int', allowed: a mapping"),
    ({"run": SHIPPED, "overrides": 3}, "overrides: got 3, allowed: a list"),
    ({"run": SHIPPED, "overrides": "a=b"}, "overrides: got 'a=b', allowed: a list"),
    ({"run": SHIPPED, "overrides": [3]}, "overrides: got 3, allowed: text"),
    ({"run": SHIPPED, "overrides": ["="]}, "must read key=value: got '='"),
    ({"run": SHIPPED, "overrides": {"train.steps": math.nan}}, "train.steps: got nan, allowed: a finite number"),
    ({"run": SHIPPED, "overrides": {1: 2}}, "overrides: a key is no text: got 1"),
    ({"run": SHIPPED, "overrides": {"x": object()}}, "overrides: x: got 'object'"),
    ({"run": SHIPPED, "overrides": {"train.stps": 3}}, "train.stps: unknown key"),
]


def refused(message: str, verb: Callable[..., object], *args: object, **given: object) -> None:
    with pytest.raises(mw.InputError) as caught:
        verb(*args, **given)
    assert message in caught.value.message


def every_refused(cases: list[tuple[dict[str, object], str]], verb: Callable[..., object], *args: object) -> None:
    """Each call with other keyword arguments has its message."""
    check_every(cases, lambda case: refused(case[1], verb, *args, **case[0]))


def test_of_plan():
    every_refused(PLAN, mw.plan)


RUNS = [
    ("nope", "nope: no such file"),
    ("", "run: got '', allowed: a path"),
    (b"x", "run: got 'bytes', allowed: a Run, the path"),
    (None, "run: got 'NoneType'"),
    ([], "run: got 'list'"),
    ("a\0b", "allowed: a path as text"),
    ("/", "is a folder, not a run file"),
    ({}, "run: model: is missing"),
    ({1: 2}, "a key is no text: got 1"),
    ({"model": math.nan}, "number must be finite"),
    ({"model": SHIPPED, "data": {"sequence_length": -1}}, "data.sequence_length: is out of range: got -1"),
    ({"modl": SHIPPED}, "modl: unknown key"),
    (LOOP, "is nested too deeply"),
]


@pytest.mark.parametrize("verb", [mw.load_run, mw.estimate, mw.explain, mw.scale, mw.train])
def test_of_the_run_of_every_verb(verb):
    def check(case: tuple[object, str]) -> None:
        source, message = case
        refused("missing model" if verb is mw.scale and source is None else message, verb, source)

    check_every(RUNS, check)


SCALE = [
    ({"devices": [-1]}, "devices: got -1"),
    ({"devices": 8}, "devices: got 8, allowed: a list, as in [64, 128]"),
    ({"devices": "64"}, "devices: got '64'"),
    ({"devices": [math.nan]}, "devices: got nan"),
    ({"devices": [3]}, "whole nodes: got 3, allowed: multiples of 8"),
    ({"mode": "week"}, "mode: got 'week', allowed: strong, weak"),
    ({"mode": None}, "mode: allowed: strong, weak"),
    ({"tokens": -1}, "tokens: got -1.0, allowed: above 0"),
    ({"tokens": math.nan}, "tokens: got nan"),
    ({"tokens": math.inf}, "tokens: got inf"),
    ({"tokens": 1e9, "days": 3}, "tokens and days both give the length"),
    ({"days": "x"}, "days: got 'x'"),
    ({"days": []}, "days: got 'list'"),
    ({"emulate": 0}, "emulate: got 0"),
    ({"replicas": [0]}, "replicas: got 0"),
    ({"sensitivity": "yes"}, "sensitivity: got 'yes'"),
    ({"keep_plan": 1}, "keep_plan: got 1"),
    ({"failures": None}, "failures: allowed: True or False"),
    ({"model": "llama3-8b"}, "a run and model are both given"),
]


def test_of_scale():
    every_refused(SCALE, mw.scale, SHIPPED)


ACCURACY = [
    ({"runs": "nope.csv"}, "cannot read nope.csv"),
    ({"runs": 3}, "runs: got 'int', allowed: a path"),
    ({"leave_one_source_out": 1}, "leave_one_source_out: got 1"),
]


def test_of_accuracy():
    every_refused(ACCURACY, mw.accuracy)


def test_of_failed_configurations(write_csv):
    """The runs are read first; those that ship take seconds."""
    refused("cannot read nope.csv", mw.accuracy, runs=write_csv(), failed="nope.csv")


TRAIN = [
    ({"resume": 2}, "resume: got 2"),
    ({"out": 3}, "out: got 'int', allowed: a path"),
    ({"timeout_s": -1}, "timeout_s: got -1.0"),
    ({"timeout_s": math.nan}, "timeout_s: got nan"),
    ({"max_restarts": -1}, "max_restarts: got -1, allowed: a whole number, 0 to 1000"),
    ({"quiet": "no"}, "quiet: got 'no'"),
]


def test_of_train(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    every_refused(TRAIN, mw.train, SHIPPED)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", [mw.read_record, mw.read_records])
def test_of_records(verb):
    check_every((3, None, "", b"x", "no-such-folder", "a\0b"), lambda folder: refused("", verb, folder), name=repr)


@pytest.mark.parametrize("listing", ["models", "accelerators", "clusters", "claims", "runs"])
def test_of_the_catalogue(listing):
    found = getattr(mw.catalog, listing)()
    check_every(("nope", "", 3, None), lambda name: refused("", found.__getitem__, name), name=repr)


def test_an_unknown_name_of_the_catalogue_has_the_nearest():
    with pytest.raises(mw.UnknownNameError) as caught:
        _ = mw.catalog.models()["lama3-8b"]
    assert caught.value.hint == "did you mean 'llama3-8b'?"


def test_counts_are_whole_whatever_their_type():
    assert arguments.count("top", np.int32(3)) == 3


def test_fields_of_a_plan_in_every_form():
    from meshwright.specs.plan import Recompute, Sharding

    given = {"tp": 8, "sharding": Sharding.PARAMETERS, "recompute": Recompute.FULL, "sequence_parallel": True,
             "recompute_modules": ["norm", "mlp"]}  # fmt: skip
    found = arguments.plan_fields("fixed", given)
    assert (found["tensor"], found["sharding"], found["recompute"]) == (8, Sharding.PARAMETERS, Recompute.FULL)
    assert (found["sequence_parallel"], found["recompute_modules"]) == (True, ("norm", "mlp"))
    for texts in ("tensor=8,pipeline=4", ["tensor=8", "pp=4"], ("TP8 PP4",)):
        assert arguments.plan_fields("fixed", texts) == {"tensor": 8, "pipeline": 4}


def test_the_fields_of_a_plan_are_read_as_they_are():
    from meshwright.specs.plan import Plan, Recompute

    for plan in (Plan(), Plan(recompute=Recompute.SELECTIVE, recompute_modules=("norm",), weight_cache="off")):
        assert arguments.plan_fields("fixed", vars(plan)) == vars(plan)


class NotReallyAPath:
    def __fspath__(self):
        return 5


class NotReallyAnIndex:
    def __index__(self):
        raise ValueError("no number")


def test_of_paths():
    def check(value: object) -> None:
        refused("folder", mw.read_records, value)
        refused("folder", mw.read_record, value)
        refused("", mw.load_run, SHIPPED, overrides={"calibration": value})

    check_every(
        [np.array([1, 2]), NotReallyAPath(), "x" * 5000, "\ud800", "\0", "", b"x", ["x"]],
        check,
        name=lambda value: f"{type(value).__name__}-{str(value)[:8]!r}",
    )


def test_of_objects_that_break_when_they_are_converted():
    with pytest.raises(mw.InputError, match="top"):
        arguments.count("top", NotReallyAnIndex())
    with pytest.raises(mw.InputError, match="top"):
        arguments.count("top", 10**5000)


def test_a_key_is_given_once():
    asked = {"model": "llama3.1-8b", "cluster": "h100-8x1", "global_sequences": 64, "sequence_length": 4096}
    with pytest.raises(
        mw.InputError, match=r"global_sequences and the override of batch.global_sequences are both given"
    ):
        mw.plan(**asked, overrides={"batch.global_sequences": 32})
