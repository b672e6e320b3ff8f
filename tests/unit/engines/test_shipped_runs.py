"""The run files that ship: they fit, and every engine that is installed lowers those that it does not refuse.

`python scripts/renew_golden.py` writes the golden texts anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import renew_golden

from meshwright import runfile
from meshwright.answers.documents.catalog import DEVICES, on_device
from meshwright.catalog import lookup as catalog
from meshwright.catalog.lookup import engine_names
from meshwright.engines.base import find_engine
from meshwright.engines.choice import planned
from meshwright.errors import InfeasibleError
from meshwright.planner.estimate import estimate_plan
from meshwright.planner.request import request_for

NAMES = catalog.run_file_names()
GOLDEN = Path(__file__).parent / "golden"
OTHER_PRECISION = {"llama3-8b": "fp8", "llama3-70b": "fp8", "llama3.1-405b": "bf16", "llama2-70b-lora": "fp8"}
SINGLE_NODE = ("mi355x", "b200")
"""Devices on which the documents train Llama 3 70B on one node."""


def lowered(name: str, engine: str, *overrides: str, may_fit_none: bool = False):
    """The run with a plan, and its launch; None where the engine refuses the run.

    `may_fit_none`: or where none of the plans that it runs fits, on as many devices as the best of all plans needs.
    """
    run = runfile.load(name, overrides=[*overrides, f"engine={engine}"])
    if find_engine(engine).check(run):
        return None
    try:
        run = planned(run)
    except InfeasibleError:
        if may_fit_none:
            return None
        raise
    if may_fit_none and find_engine(engine).check(run):
        return None
    return run, find_engine(engine).lower(run, folder=Path("results"))


def require_whole(run, launch) -> None:
    """The plan fits, and the launch starts one process for each of its devices."""
    assert estimate_plan(request_for(run), run.plan).step.memory.fits
    assert launch.num_processes == run.cluster.num_devices == run.plan.num_devices
    assert launch.argv[0] == "python"


PLANNED = ("llama3-8b", "mixtral-8x7b", "llama2-70b-lora")
"""A dense model, experts and adapters: runs that are planned for every engine whatever was changed."""
FURTHER = pytest.mark.when_touched  # their golden texts are lowered below, from a pinned plan


@pytest.mark.parametrize("engine", engine_names())
@pytest.mark.parametrize("name", [n if n in PLANNED else pytest.param(n, marks=FURTHER) for n in NAMES])
def test_an_engine_lowers_a_plan_that_fits_or_refuses_the_run(name, engine):
    found = lowered(name, engine)
    if found is not None:
        require_whole(*found)
    else:
        assert engine != "native", "the native engine takes all of them"


@pytest.mark.slow
@pytest.mark.parametrize("engine", engine_names())
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_so_it_does_on_every_device_and_in_the_other_precision(name, device, engine):
    cluster = f"cluster={on_device(name, device).run.cluster_name}"
    for more in ([], [f"precision={OTHER_PRECISION[name]}"] if name in OTHER_PRECISION else []):
        found = lowered(name, engine, cluster, *more, may_fit_none=True)
        if found is not None:
            require_whole(*found)
        elif engine == "native":
            assert (name, more) == ("llama2-70b-lora", ["precision=fp8"]), "adapters alone are trained in 16 bits"


@pytest.mark.when_touched  # mixtral-8x7b is planned for maxtext above
def test_a_plan_that_the_engine_runs_is_found_behind_many_that_it_does_not():
    cluster = f"cluster={on_device('mixtral-8x22b', 'mi300x').run.cluster_name}"
    require_whole(*lowered("mixtral-8x22b", "maxtext", cluster))


@pytest.mark.when_touched  # test_an_engine_lowers_a_plan_that_fits_or_refuses_the_run plans the same files
@pytest.mark.parametrize("device", SINGLE_NODE)
def test_what_the_documents_train_on_one_node_fits_one(device):
    for name in ("llama2-70b-lora", "llama3-8b", "llama3-70b", "mixtral-8x7b"):
        assert on_device(name, device).run.cluster.num_nodes == 1


def test_a_model_that_is_too_large_gets_more_nodes():
    assert on_device("llama3-70b", "h100").run.cluster_name == "h100-8x2"


def test_every_model_and_device_that_the_documents_train_is_there():
    trained = [c for c in catalog.all_claims() if c.method in ("pretrain", "lora") and c.model]
    assert {c.accelerator.lower() for c in trained} - {*DEVICES, "b300", "gb200", ""} == set()
    known = {runfile.load(name).model.name for name in NAMES}
    same = {"llama3.1-8b": "llama3-8b", "llama3.1-70b": "llama3-70b"}  # `--model` says the other
    assert {same.get(c.model, c.model) for c in trained} - known == set()


def test_llama3_70b_has_the_batch_that_was_measured_on_its_device():
    (measured,) = (
        c
        for c in catalog.all_claims()
        if (c.model, c.accelerator, c.precision, c.metric) == ("llama3-70b", "MI355X", "bf16", "tokens_per_s_per_gpu")
    )
    run = runfile.load("llama3-70b")
    assert measured.conditions.startswith("TorchTitan; per-GPU batch 8 seq 8192")
    assert (run.global_batch, run.sequence_length) == (8 * run.cluster.num_devices, 8192)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_it_is_lowered_to_what_it_was_lowered_to(path):
    name, _, engine = path.stem.rpartition(".")
    if engine not in engine_names():
        pytest.skip(f"this installation does not name the engine {engine}")
    text = path.read_text(encoding="utf-8")
    overrides = [line.removeprefix("--set ") for line in text.splitlines() if line.startswith("--set ")]
    assert renew_golden.golden_text(name, overrides) == text


@pytest.mark.parametrize("name", NAMES)
def test_every_run_has_a_golden_text_of_each_engine_that_has_any(name):
    engines = {path.stem.rpartition(".")[2] for path in GOLDEN.glob("*.txt")} & {*engine_names()}
    assert {"native", "torchtitan"} <= engines
    for engine in engines:
        refused = find_engine(engine).check(runfile.load(name, overrides=[f"engine={engine}"]))
        assert (GOLDEN / f"{name}.{engine}.txt").is_file() is not bool(refused)
