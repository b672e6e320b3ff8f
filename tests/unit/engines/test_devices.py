"""The devices and the precisions of an engine: every command refuses others, and names what runs."""

from __future__ import annotations

import pytest

from meshwright.catalog import lookup as catalog
from meshwright.catalog.engines import ANY, engines_on
from meshwright.catalog.precisions import multiplies
from meshwright.engines.base import check_export, find_engine
from meshwright.engines.choice import with_planned_engine
from meshwright.errors import InputError
from meshwright.planner.engines import engine_facts
from meshwright.runfile import from_options
from meshwright.specs.precision import PRECISIONS

ASKED = {"model": "llama3.1-8b", "global_batch": 64, "sequence_length": 4096}
RUN = """
model: llama3.1-8b
data: {sequence_length: 4096}
batch: {global_sequences: 64}
train: {steps: 10}
cluster: h100-8x1
"""
COMMANDS = (("plan",), ("estimate",), ("scale",), ("export", "--out", "configuration"), ("train", "--dry-run"))
FOREIGN = [
    *((engine, "gaudi3") for engine in catalog.engine_names()),
    *((engine, "tpu-v5p") for engine in ("megatron", "native", "torchtitan")),
]


@pytest.mark.parametrize(("engine", "device"), FOREIGN)
def test_an_engine_is_refused_on_devices_that_it_does_not_run_on(engine, device):
    with pytest.raises(InputError, match=f"does not run on {device}: got '{engine}'") as raised:
        from_options(**ASKED, cluster=f"{device}-4x2", engine=engine)
    assert ("maxtext runs there" in str(raised.value)) == (device == "tpu-v5p")
    assert f"engine: {ANY}" in str(raised.value)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_every_command_refuses_it(command, meshwright, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    more = ("--set", "cluster=tpu-v5p-4x2", "--set", "engine=megatron")
    outcome = meshwright(command[0], path, *command[1:], *more)
    assert outcome.exit_code == 2
    assert "megatron 0.16 does not run on tpu-v5p: got 'megatron', allowed: maxtext, any" in outcome.stderr
    assert "hint: engine: maxtext runs there" in outcome.stderr


def test_a_run_that_names_no_engine_is_planned_for_any_there():
    run = from_options(**ASKED, cluster="tpu-v5p-4x2", overrides=["train.steps=10"])
    assert "native does not run on tpu-v5p" in str(find_engine("native").check(run)[0])
    assert with_planned_engine(run).engine == ANY


def test_every_engine_says_where_it_runs_and_in_which_precisions():
    for engine in catalog.engine_names():
        facts = engine_facts(engine)
        assert facts.vendors_source
        of_all = {"bf16"} if engine == "trl" else {"bf16", "fp32"}  # FlashAttention 2 has 16 bits alone
        assert of_all <= set(facts.precisions) <= set(PRECISIONS)
    assert engines_on(catalog.accelerator("h100")) == catalog.engine_names()
    assert engines_on(catalog.accelerator("tpu-v5p")) == ("maxtext",)


@pytest.mark.parametrize(
    ("engine", "device", "precision", "hint"),
    [
        ("torchtitan", "h100", "mxfp8", "fp8_rowwise"),  # the device lacks it, and the nearest is not torchtitan's
        ("maxtext", "h100", "mxfp8", "bf16"),
        ("megatron", "mi355x", "nvfp4", "mxfp8"),
        ("native", "v100", "bf16", "fp32"),
        ("megatron", "h100", "fp8_rowwise", "fp8_delayed"),  # the engine lacks it
        ("megatron", "l40s", "mxfp8", "fp8_delayed"),  # blocks of Transformer Engine need Hopper
        ("torchtitan", "a100", "fp16", "bf16"),
        ("torchtitan", "mi355x", "mxfp4", "fp8_rowwise"),
    ],
)
def test_the_precision_of_a_hint_is_one_that_device_and_engine_run(engine, device, precision, hint):
    asked = {**ASKED, "cluster": f"{device}-4x1", "engine": engine}
    try:
        problems = check_export(from_options(**asked, precision=precision, overrides=["train.steps=10"]))
        (said,) = (problem.hint for problem in problems if problem.key == "precision")
    except InputError as refused:
        said = refused.hint
    assert said.startswith(f"precision: {hint} is the nearest")
    assert multiplies(catalog.accelerator(device), PRECISIONS[hint], engine=engine)
    again = from_options(**asked, precision=hint, overrides=["train.steps=10"])
    assert not [problem for problem in check_export(again) if problem.key == "precision"]
