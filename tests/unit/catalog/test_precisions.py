"""Precisions that a device's units do not multiply, and the commands that refuse them."""

from __future__ import annotations

import pytest
from tests.plan_requests import plan_request

from meshwright.catalog import lookup as catalog
from meshwright.catalog.precisions import device_needs, multiplies, refuse_precision
from meshwright.cost.rates import system_facts
from meshwright.errors import InputError
from meshwright.specs.precision import PRECISIONS

EIGHT_BITS = {"fp8", "fp8_delayed", "fp8_rowwise"}
BLOCKS = {"fp8_blockwise"}
RUNS = {
    "v100": set(),
    "a100": set(),
    "l40s": EIGHT_BITS | BLOCKS,
    "h100": EIGHT_BITS | BLOCKS,
    "gh200": EIGHT_BITS | BLOCKS,
    "b200": EIGHT_BITS | BLOCKS | {"mxfp8", "mxfp4", "nvfp4"},
    "gb300": EIGHT_BITS | BLOCKS | {"mxfp8", "mxfp4", "nvfp4"},
    "vr200": EIGHT_BITS | BLOCKS | {"mxfp8", "mxfp4", "nvfp4"},
    "mi250x": set(),
    "mi300x": EIGHT_BITS | BLOCKS,
    "mi355x": EIGHT_BITS | BLOCKS | {"mxfp8", "mxfp4"},
    "gaudi2": EIGHT_BITS,
    "gaudi3": EIGHT_BITS,
    "tpu7x": EIGHT_BITS,
    "tpu-v5e": set(),
    "cpu": set(),
}  # fmt: skip
NARROW = {name for name, recipe in PRECISIONS.items() if recipe.linear_input_bytes < 2}
COMMANDS = (
    ("plan",),
    ("estimate",),
    ("scale", "--devices", "8,16"),
    ("export", "--engine", "megatron", "--out", "never"),
)
RUN = """
model: llama3.1-8b
data: {sequence_length: 4096}
batch: {global_sequences: 64, micro: 1}
cluster: h100-8x1
engine: megatron
parallel: {data_shard: 8, sharding: optimizer}
train: {steps: 10}
"""


@pytest.mark.parametrize("name", RUNS)
def test_what_a_device_multiplies(name):
    device = catalog.accelerator(name)
    assert {precision for precision in NARROW if multiplies(device, PRECISIONS[precision])} == RUNS[name]


def test_every_architecture_of_the_data_is_one_of_a_device_and_every_need_has_its_source():
    known = {catalog.accelerator(name).architecture for name in catalog.accelerator_names()}
    for name, need in device_needs().items():
        assert name in PRECISIONS
        assert need.source
        assert set(need.engine_sources) == set(need.engines) <= set(catalog.engine_names())
        for architectures in (need.architectures, *need.engines.values()):
            assert set(architectures) <= known
            assert set(architectures) <= set(need.architectures)


@pytest.mark.parametrize(
    ("device", "precision", "says", "hint"),
    [
        ("h100", "mxfp8", "does not multiply mxfp8", "fp8_blockwise"),
        ("h100", "nvfp4", "does not multiply fp4", "fp8_blockwise"),
        ("mi300x", "mxfp8", "does not multiply mxfp8", "fp8_blockwise"),
        ("mi355x", "nvfp4", "does not multiply nvfp4", "mxfp4"),
        ("gaudi2", "mxfp8", "does not multiply mxfp8", "fp8_rowwise"),
        ("a100", "fp8", "does not multiply fp8", "bf16"),
        ("v100", "bf16", "does not multiply bf16", "fp16"),
    ],
)
def test_a_refusal_names_what_runs_and_the_nearest_of_it(device, precision, says, hint):
    with pytest.raises(InputError, match=f"{device} {says}: got '{precision}', allowed: ") as raised:
        refuse_precision(PRECISIONS[precision], catalog.cluster(f"{device}-8x1"))
    assert raised.value.hint == f"precision: {hint} is the nearest that it multiplies"
    allowed = str(raised.value).splitlines()[0].partition("allowed: ")[2].split(", ")
    assert allowed == sorted(
        name for name, recipe in PRECISIONS.items() if multiplies(catalog.accelerator(device), recipe)
    )


def test_every_part_of_a_cluster_multiplies_it():
    with pytest.raises(InputError, match="h200 does not multiply mxfp8"):
        refuse_precision(PRECISIONS["mxfp8"], catalog.joint_cluster("b200-8x1+h200-8x1"))


def test_blocks_of_transformer_engine_need_hopper():
    ada = catalog.cluster("l40s-4x1")
    refuse_precision(PRECISIONS["fp8_blockwise"], ada, engine="native")
    with pytest.raises(InputError, match="l40s does not multiply fp8_blockwise"):
        refuse_precision(PRECISIONS["fp8_blockwise"], ada, engine="megatron")


def test_a_request_without_a_run_file_is_refused_too():
    request = plan_request(precision="mxfp8")
    with pytest.raises(InputError, match="h100 does not multiply mxfp8"):
        system_facts(request.cluster, request.precision, request.stack)


def test_a_device_older_than_bf16_has_a_rate_for_fp16():
    facts = system_facts(catalog.cluster("v100-8x1"), PRECISIONS["fp16"], plan_request().stack)
    assert facts.matmul_format == "fp16"


@pytest.mark.parametrize("device", ["h100", "mi300x", "gaudi2"])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_every_command_refuses_it(device, command, meshwright, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    more = ("--set", f"cluster={device}-8x1", "--set", "precision=mxfp8")
    outcome = meshwright(command[0], path, *command[1:], *more)
    assert outcome.exit_code == 2
    assert f"{device} does not multiply mxfp8: got 'mxfp8', allowed: bf16, fp16, " in outcome.stderr
    assert "hint: precision: " in outcome.stderr
