"""The line about a run's software in exported files: written where the run states some, and read by every import."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from meshwright.catalog.stacks import switches_of
from meshwright.engines.base import Imported, ImportingEngine, find_engine
from meshwright.engines.beginning import note_on_switches
from meshwright.engines.software_line import with_stated_software
from meshwright.errors import InputError
from meshwright.runfile import from_mapping, from_options
from meshwright.specs.run import Run

PLAN = ("train.steps=10", "batch.micro=1", "parallel={data_shard: 8, sharding: parameters, recompute: full}")
FILES = {"megatron": ("megatron_lm.args", "megatron_bridge.yaml"), "maxtext": ("maxtext.yml",)}
ALL = (*FILES["megatron"], *FILES["maxtext"], "meshwright_run.py")


def exported(*keys: str, engine: str, cluster: str = "h100-8x1") -> tuple[Run, dict[str, str]]:
    run = from_options(
        model="llama3.1-8b", cluster=cluster, global_batch=64, sequence_length=4096, engine=engine,
        overrides=(*PLAN, *(["parallel.sharding=optimizer"] if engine == "megatron" else []), *keys),
    )  # fmt: skip
    return run, dict(find_engine(engine).lower(run, folder=Path("out")).files)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("# meshwright stack")]


@pytest.mark.parametrize("engine", ["megatron", "torchtitan", "maxtext"])
def test_an_export_holds_the_software_that_the_run_states(engine):
    run, files = exported("stack.vintage=2025.3", "stack.preset=engine", engine=engine)
    holding = [text for name, text in files.items() if name in ALL]
    assert holding
    for text in holding:
        assert lines(text) == ["# meshwright stack: {preset: engine, vintage: 2025.3}"]
    assert not [note for note in note_on_switches(run, is_export=True) if "vintage" in note]
    assert not [line for text in exported(engine=engine)[1].values() for line in lines(text)]


@pytest.mark.parametrize(("engine", "name"), [(engine, name) for engine, names in FILES.items() for name in names])
def test_an_import_has_the_software_of_the_file(engine, name, tmp_path):
    own = {"megatron": "nemo"}.get(engine, engine)
    run, files = exported(f"stack.framework={own}", "stack.vintage=2025.3", engine=engine)
    (tmp_path / name).write_text(files[name])
    importing = find_engine(engine)
    assert isinstance(importing, ImportingEngine)
    found = importing.import_run(str(tmp_path / name), cluster="h100-8x1")
    again = from_mapping(json.loads(json.dumps(found.content)))
    assert (again.stack.framework, again.stack.vintage) == (own, 2025.3)
    assert again.stack.preset == run.stack.preset


@pytest.mark.parametrize(
    ("engine", "name", "key"),
    [
        ("megatron", "megatron_lm.args", "attention_tile: 512"),
        ("megatron", "megatron_bridge.yaml", "expert_imbalance: 1.4, compiles: true"),
        ("megatron", "megatron_lm.args", "parameter_format: bf16"),
        ("maxtext", "maxtext.yml", "attention: fa2"),
        ("maxtext", "maxtext.yml", "cuda_graphs: none, fuses_attention_backward: false, compiles: false"),
        ("trl", "sft.yaml", "compiles: true"),
        ("torchtitan", "meshwright_run.py", "parameter_format: bf16, overlaps_tensor: true"),
    ],
)
def test_an_import_has_switches_without_a_setting(engine, name, key, tmp_path):
    run, files = exported(*(f"stack.{one.replace(': ', '=')}" for one in key.split(", ")), engine=engine)
    for path, text in files.items():
        (tmp_path / path).write_text(text)
    importing = find_engine(engine)
    assert isinstance(importing, ImportingEngine)
    source = tmp_path / name
    found = importing.import_run(f"{source}:train" if source.suffix == ".py" else str(source), cluster="h100-8x1")
    again = from_mapping(json.loads(json.dumps(found.content)))
    assert switches_of(again) == switches_of(run)


@pytest.mark.parametrize("kernel", ["fa2", "ck"])
def test_one_name_of_two_kernels_is_read_as_the_stated_one(kernel, tmp_path):
    run, files = exported(f"stack.attention={kernel}", engine="trl", cluster="mi300x-8x1")
    (tmp_path / "sft.yaml").write_text(files["sft.yaml"])
    importing = find_engine("trl")
    assert isinstance(importing, ImportingEngine)
    found = importing.import_run(str(tmp_path / "sft.yaml"), cluster="mi300x-8x1")
    assert switches_of(from_mapping(found.content)).attention == switches_of(run).attention == kernel


def test_a_line_that_the_settings_contradict_is_refused(tmp_path):
    _, files = exported(engine="megatron")
    path = tmp_path / "megatron_lm.args"
    path.write_text(f"# meshwright stack: {{gradient_format: bf16}}\n{files[path.name]}")
    importing = find_engine("megatron")
    assert isinstance(importing, ImportingEngine)
    with pytest.raises(InputError, match=r"differ: got .gradient_format: bf16, and fp32 by the settings"):
        importing.import_run(str(path), cluster="h100-8x1")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("# meshwright stack: primus-megatron", r"my\.args: the line about the software.*got.*allowed: # meshwright"),
        ("# meshwright stack: {framework: nemo", "cannot be read"),
        ("# meshwright stack:", "cannot be read"),
        ("# meshwright stack: {dispatchers: deepep}", r"my\.args: stack\.dispatchers: unknown key"),
        ("# meshwright stack: {vintage: 2025-09}", r"my\.args: stack\.vintage: must be a number: got"),
        ("# meshwright stack: {vintage: 1999.0}", r"stack\.vintage: is out of range: got 1999.0, allowed: >= 2,015"),
        ("# meshwright stack: {preset: recipes}", "allowed: engine, recipe\nhint: did you mean 'recipe'"),
        ("#meshwright stack: {vintage: 1999.0}", "is out of range"),
        ("# meshwright stack: {vintage: 2025.0}\n# meshwright stack: {vintage: 2024.0}", "stands 2 times"),
        ("# meshwright stack: {framework: nemoo}", r"my\.args: unknown stack: got 'nemoo'\nhint: did you mean 'nemo'"),
    ],
)
def test_a_line_that_cannot_be_read_is_refused(line, message):
    with pytest.raises(InputError) as error:
        with_stated_software(Imported(content={"stack": {}}, notes=()), f"--bf16\n{line}\n", file="my.args")
    assert re.search(message, str(error.value), re.DOTALL)
