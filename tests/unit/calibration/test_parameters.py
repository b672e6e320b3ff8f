"""Parameters, offsets, and the calibration that ships."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
from tests.every_member import check_every

from meshwright.calibration import parameters as module
from meshwright.calibration.parameters import (
    ALL,
    STEP_CALIBRATION,
    Calibration,
    Offset,
    Parameter,
    fitted,
    from_document,
    prior,
    to_document,
)
from meshwright.catalog import lookup as catalog
from meshwright.catalog.accelerators import accelerator_names
from meshwright.catalog.stacks import stack_facts, stack_names
from meshwright.cost.rates import factors_of
from meshwright.specs.hardware import Stack
from meshwright.specs.precision import PRECISIONS

H100 = factors_of(catalog.cluster("h100-8x4"), PRECISIONS["bf16"], Stack(framework="nemo"))
MI355X = factors_of(catalog.cluster("mi355x-8x4"), PRECISIONS["bf16"], Stack(framework="primus-megatron"))

SHARE = Parameter(name="share", meaning="", transform="logit", prior=0.5, sd=0.3, levels={"framework": 0.4}, source="")
TIME = Parameter(name="time", meaning="", transform="log", prior=2.0, sd=0.3, levels={}, source="")
TOY = Calibration(
    parameters={"share": SHARE, "time": TIME},
    offsets={
        ("share", ALL, ALL): Offset(value=0.1, sd=0.05, num_rows=100),
        ("share", "framework", "nemo"): Offset(value=0.2, sd=0.1, num_rows=7),
    },
)


class TestValues:
    def test_transforms_are_inverses(self):
        def check(parameter):
            there = np.array(parameter.forward(parameter.prior))
            assert parameter.inverse(there) == pytest.approx(parameter.prior)

        check_every(prior().parameters.values(), check, name=attrgetter("name"))

    def test_offsets_of_all_and_of_the_own_key_add_up(self):
        etas = TOY.etas([H100, MI355X])
        assert etas["share"] == pytest.approx([0.3, 0.1])
        assert etas["time"] == pytest.approx([math.log(2)] * 2)

    def test_shares_stay_shares_and_times_positive(self):
        values = TOY.values({"share": np.array([-50.0, 0.0, 30.0]), "time": np.array([-9.0])})
        assert ((values["share"] >= 0) & (values["share"] <= 1)).all()
        assert values["share"][1] == 0.5
        assert values["time"][0] > 0

    def test_a_measured_prior_goes_before_the_general_one(self):
        gemm = prior().parameters["gemm_ratio"]
        assert gemm.prior_of(H100) == gemm.measured["values"]["h100/bf16"] != gemm.prior
        assert gemm.prior_of({**H100, "device_format": "unheard-of/bf16"}) == gemm.prior


class TestSpread:
    def test_what_has_no_rows_keeps_the_priors(self):
        assert TOY.sds(MI355X)["share"] == pytest.approx(math.hypot(0.05, 0.4))
        assert TOY.sds(MI355X)["time"] == 0.3

    def test_rows_narrow_it(self):
        assert TOY.sds(H100)["share"] == pytest.approx(math.hypot(0.05, 0.1))

    def test_rows_behind_a_key(self):
        assert TOY.num_rows("framework", "nemo") == 7
        assert TOY.num_rows("framework", "primus-megatron") == 0

    def test_an_unknown_accelerator_is_less_certain_than_a_known_one(self):
        unknown = {
            **H100, "architecture": "Hopper 2", "device": "h300", "device_format": "h300/bf16",
            "recipe": "Hopper 2/bf16", "architecture_lineage": "Hopper 2/megatron-core",
        }  # fmt: skip
        known, guessed = fitted().sds(H100), fitted().sds(unknown)
        assert all(guessed[name] >= known[name] for name in known)
        assert guessed["gemm_ratio"] > 1.2 * known["gemm_ratio"]


def test_a_document_keeps_everything_but_the_last_digits():
    full = replace(
        TOY, parameters=prior().parameters, residual_sd={"dense": 0.04}, stranger_sd={"dense": 0.1}, made="by hand"
    )
    again = from_document(json.loads(json.dumps(to_document(full))))
    assert again == full


def test_without_a_file_the_prior_is_all_there_is(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "STEP_CALIBRATION", tmp_path / "absent.json")
    fitted.cache_clear()
    try:
        assert fitted() is prior()
    finally:
        fitted.cache_clear()


class TestParametersFile:
    def test_every_parameter_says_what_it_is_and_where_it_comes_from(self):
        def check(parameter):
            assert parameter.transform in ("log", "logit")
            assert parameter.prior > 0
            assert parameter.transform == "log" or parameter.prior < 1
            assert parameter.sd >= 0  # none: published runs say nothing of it, and no fit moves it
            assert parameter.sd > 0 or not parameter.levels
            assert all(sd > 0 for sd in parameter.levels.values())
            assert len(parameter.meaning) > 10
            assert len(parameter.source) > 9

        check_every(prior().parameters.values(), check, name=attrgetter("name"))

    def test_measured_ceilings_are_of_catalogued_devices_and_formats(self):
        for key in prior().parameters["gemm_ratio"].measured["values"]:
            device, _, number_format = key.partition("/")
            assert number_format in catalog.accelerator(device).peak_flops_per_s, key

    def test_its_docstring_names_the_files_there_are(self):
        text = (STEP_CALIBRATION.parent / "parameters.toml").read_text(encoding="utf-8")
        named = set(re.findall(r"[\w./]*\b\w+\.(?:json|toml)\b", text))
        assert {n for n in named if not (STEP_CALIBRATION.parent / Path(n).name).exists()} == set()


class TestShipped:
    """Every offset that ships belongs to something that the catalogue knows."""

    DOCUMENT = json.loads(STEP_CALIBRATION.read_text(encoding="utf-8"))

    def keys(self, level: str) -> set[str]:
        return {key for _, lv, key in fitted().offsets if lv == level}

    def test_it_loads_and_says_from_what_it_was_made(self):
        assert fitted().made == self.DOCUMENT["made"]
        assert re.search(r"\d+ rows of ", fitted().made)
        assert sum(self.DOCUMENT["rows"].values()) == int(re.search(r"(\d+) rows", fitted().made)[1])  # pyright: ignore[reportOptionalSubscript]
        assert len(fitted().offsets) == len(self.DOCUMENT["offsets"]) > 300

    def test_parameters_and_levels_are_those_of_the_parameters(self):
        parameters = prior().parameters
        for parameter, level, key in fitted().offsets:
            assert parameter in parameters
            assert (level, key) == (ALL, ALL) or level in parameters[parameter].levels

    def test_frameworks_lineages_and_fabrics_are_catalogued(self):
        assert self.keys("framework") <= set(stack_names())
        assert self.keys("lineage") <= {stack_facts(name).lineage for name in stack_names()}
        assert self.keys("fabric") <= set(catalog.fabric_names())

    def test_accelerators_and_recipes_are_catalogued(self):
        architectures = {catalog.accelerator(name).architecture for name in accelerator_names()}
        assert self.keys("architecture") <= architectures
        for key in self.keys("device_format"):
            device, number_format = key.split("/")
            assert number_format in catalog.accelerator(device).peak_flops_per_s
        for key in self.keys("recipe"):
            architecture, recipe = key.split("/")
            assert architecture in architectures
            assert recipe in PRECISIONS

    def test_every_offset_has_rows_and_is_no_surer_than_its_prior_allows(self):
        for (name, level, key), offset in fitted().offsets.items():
            parameter = prior().parameters[name]
            limit = parameter.sd if level == ALL else parameter.levels[level]
            assert offset.num_rows > 0, (name, level, key)
            assert 0 < offset.sd <= limit * (1 + 1e-4), (name, level, key)

    def test_no_offset_is_further_from_its_prior_than_the_prior_can_explain(self):
        """Four standard deviations: a fit that goes further says that a formula is wrong."""
        far = {}
        for (name, level, key), offset in fitted().offsets.items():
            parameter = prior().parameters[name]
            limit = parameter.sd if level == ALL else parameter.levels[level]
            if abs(offset.value) > 4 * limit:
                far[name, level, key] = offset.value / limit
        assert far == {}

    def test_residuals_are_known_by_kind_of_model(self):
        assert 0 < fitted().residual_sd["dense"] < 0.2
        assert 0 < fitted().residual_sd["moe"] < 0.3
        assert 0 < fitted().stranger_sd["dense"] < fitted().stranger_sd["moe"] < 0.5
