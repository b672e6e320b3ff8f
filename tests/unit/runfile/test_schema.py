"""The schema agrees with the specs it fills and with the page that explains it."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from meshwright.runfile import model_schema, schema
from meshwright.specs import model as models
from meshwright.specs import run as runs
from meshwright.specs.plan import Plan
from meshwright.specs.precision import PRECISIONS

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "run-file.md").read_text()
ROWS = {m[1]: m[2] for m in re.finditer(r"^\| `([\w.]+)` \|[^|]*\|([^|]*)\|", PAGE, re.MULTILINE)}


def test_the_page_names_every_key_and_no_other() -> None:
    of_rope = {key.replace(".rope.", ".windowed_rope.") for key in ROWS if ".rope." in key}
    assert ROWS.keys() | of_rope == set(schema.all_fields())


def test_the_page_says_which_keys_are_required() -> None:
    required = {key for key, field in schema.all_fields().items() if field.is_required()}
    assert {key for key, default in ROWS.items() if default.strip() == "required"} == required


def test_the_page_names_every_precision() -> None:
    assert [name for name in PRECISIONS if f"`{name}`" not in PAGE] == []


OF_KERNELS = {"stored_activations", "weight_cache", "loss_chunk"}
"""Fields of a plan about kernels, which stand in the section `kernels` of a run file."""


@pytest.mark.parametrize(
    ("section", "spec", "elsewhere"),
    [
        (model_schema.InlineAttention, models.Attention, set()),
        (model_schema.InlineExperts, models.Experts, set()),
        (model_schema.InlineModel, models.Model, {"unsupported"}),
        (schema.InlineLora, models.Lora, set()),
        (schema.ParallelSection, Plan, {"micro_batch", "recompute_modules", "recompute_layers", *OF_KERNELS}),
        (schema.OptimizerSection, runs.Optimizer, set()),
        (schema.CheckpointSection, runs.Checkpoint, set()),
        (schema.EvaluateSection, runs.Evaluate, set()),
        (schema.FaultsSection, runs.Faults, set()),
        (schema.TrainSection, runs.Train, set()),
        (schema.CostsSection, runs.Costs, set()),
    ],
)
def test_sections_have_the_fields_of_their_spec(section, spec, elsewhere: set[str]) -> None:
    assert set(section.model_fields) == {f.name for f in fields(spec)} - elsewhere


@pytest.mark.parametrize(
    ("section", "spec"),
    [
        (schema.InlineLora, models.Lora),
        (schema.OptimizerSection, runs.Optimizer),
        (schema.EvaluateSection, runs.Evaluate),
        (schema.FaultsSection, runs.Faults),
        (schema.TrainSection, runs.Train),
    ],
)
def test_defaults_are_those_of_the_spec(section, spec) -> None:
    usual = {f.name: f.default for f in fields(spec) if f.default is not MISSING}
    plain = {n: f.default for n, f in section.model_fields.items() if not isinstance(f.default, schema.RunFileSection)}
    assert plain == usual


def test_the_package_costs_nothing_until_it_is_used() -> None:
    code = "import sys, meshwright.runfile; print([m for m in ('pydantic', 'ruamel.yaml') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
