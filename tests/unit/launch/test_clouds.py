"""SkyPilot and Ray: the task is what SkyPilot's schema allows, and the script runs one torchrun on each node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from ruamel.yaml import YAML

from meshwright.errors import InputError
from meshwright.launch import ray, skypilot
from meshwright.launch.site import SkyPilotSite

SCHEMA = json.loads((Path(__file__).parent / "skypilot_schema.json").read_text())
USUAL = SkyPilotSite(image="registry.example/train:1", buckets={"/results": "s3://runs"})
FULL = USUAL.model_copy(
    update={"infra": "nebius", "spot": True, "volumes": {"/data": "tokens"}, "setup": ("nvidia-smi", "df")}
)


@pytest.fixture
def sky(make_request):
    """`sky(site, accelerator="h100")`: the dispatch of the usual request with results in the bucket."""

    def make(site: SkyPilotSite = USUAL, **fields):
        usual = {"folder": Path("/results/first"), "exclude": (), "accelerator": "h100"} | fields
        return skypilot.dispatch(make_request(**usual), site, python="python", here=Path("runs/first"))

    return make


def task_of(found):
    return YAML(typ="safe").load(found.files["runs/first/task.yaml"])


@pytest.mark.parametrize("site", [USUAL, FULL], ids=["usual", "full"])
@pytest.mark.parametrize("change", [{}, {"num_nodes": 1, "numa": True}, {"accelerator": None}])
def test_a_task_is_what_skypilot_allows(sky, site, change):
    found = sky(site, **change)
    jsonschema.validate(task_of(found), SCHEMA)
    assert found.commands == (("sky", "jobs", "launch", "--yes", "--detach-run", "runs/first/task.yaml"),)


def test_the_task_is_the_golden_one(sky, is_golden):
    is_golden(sky(FULL).files["runs/first/task.yaml"], "skypilot.yaml")


def test_each_machine_copies_the_files_and_becomes_torchrun_with_its_rank(sky, tmp_path):
    script = task_of(sky())["run"]
    home, bin_folder, results = tmp_path / "home", tmp_path / "bin", tmp_path / "results"
    for folder in (home / "run-files", bin_folder):
        folder.mkdir(parents=True)
    (home / "run-files" / "run.yaml").write_text("model: x\n")
    (bin_folder / "python").write_text('#!/bin/sh\necho "$PET_NODE_RANK $PET_MASTER_ADDR $PET_MASTER_PORT $*"\n')
    (bin_folder / "python").chmod(0o755)
    environment = {"HOME": str(home), "PATH": f"{bin_folder}:{os.environ['PATH']}", "SKYPILOT_NODE_RANK": "1",
                   "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}  # fmt: skip
    done = subprocess.run(
        ["sh", "-c", script.replace("/results", str(results))], env=environment, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout.startswith(
        "1 10.0.0.1 29500 -m meshwright.engines.torchrun --nnodes 2 --nproc-per-node 8 -m mesh"
    )
    assert (results / "first" / "run.yaml").read_text() == "model: x\n"


@pytest.mark.parametrize(
    ("site", "fields", "said"),
    [
        (USUAL, {"accelerator": "mi355x"}, "SkyPilot's name of this accelerator is not known: got 'mi355x'"),
        (SkyPilotSite(), {}, "the results would be lost"),
        (USUAL, {"checkpoints": "/scratch/saved"}, "checkpoints would be lost: nothing is mounted there"),
    ],
)
def test_what_skypilot_cannot_do_is_refused(sky, site, fields, said):
    with pytest.raises(InputError, match=said):
        sky(site, **fields)


def test_the_site_file_names_an_accelerator(sky):
    found = sky(USUAL.model_copy(update={"accelerator": "MI355X"}), accelerator="mi355x")
    assert task_of(found)["resources"]["accelerators"] == {"MI355X": 8}


def test_ray_gets_a_script(make_request):
    found = ray.dispatch(make_request(exclude=()), address="http://head:8265", python="python", workdir=Path("/shared"))
    (command,) = found.commands
    assert command[:5] == ("ray", "job", "submit", "--address", "http://head:8265")
    assert command[-1] == "/shared/runs/first/submit.py"
    assert constants(found.files["runs/first/submit.py"])["DEVICES"] == {"GPU": 8}


def constants(text: str) -> dict:
    """The values at the top of the script."""
    lines = [line for line in text.splitlines() if line[:1].isupper() and " = " in line]
    values: dict = {}
    exec("\n".join(lines), values)
    return values


RAY = """
import types

class Error(Exception):
    pass

class Method:
    def __init__(self, call): self.call = call
    def remote(self, *given): return lambda: self.call(*given)

class Actor:
    def __init__(self, kind): self.made = kind()
    def __getattr__(self, name): return Method(getattr(self.made, name))

class Remote:
    def __init__(self, kind): self.kind = kind
    def options(self, **given): return self
    def remote(self): return Actor(self.kind)

def remote(**given): return Remote
def get(asked): return asked() if callable(asked) else asked
def wait(asked, **given): return asked[:1], asked[1:]
def kill(actor): pass
def init(**given): pass
exceptions = types.SimpleNamespace(RayError=Error)
"""
PLACING = """
class placement_group:
    def __init__(self, bundles, strategy): print(bundles, strategy, flush=True)
    def ready(self): return lambda: None
"""
FILES = {"__init__.py": RAY, "util/__init__.py": "def get_node_ip_address(): return 'head'",
         "util/placement_group.py": PLACING,
         "util/scheduling_strategies.py": "def PlacementGroupSchedulingStrategy(*a, **k): return None"}  # fmt: skip


@pytest.mark.parametrize(
    ("codes", "ending", "starts"), [("0 0", 0, 2), ("9 0 0", 0, 3), ("2", 2, 1), ("9 9 9 9", 9, 4)]
)
def test_the_script_starts_again_what_another_start_may_help(make_request, tmp_path, codes, ending, starts):
    """With a package of Ray's names that runs actors in turn; Ray 2.60 has run the script, by hand."""
    for name, text in FILES.items():
        path = tmp_path / "packages" / "ray" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    torchrun = tmp_path / "python"
    (tmp_path / "codes").write_text(codes)
    torchrun.write_text(f"""#!{sys.executable}
import os, pathlib
codes = pathlib.Path("codes").read_text().split()
pathlib.Path("codes").write_text(" ".join(codes[1:]))
with open("starts", "a") as file:
    print(*(os.environ[n] for n in ("PET_NODE_RANK", "PET_MASTER_ADDR", "MESHWRIGHT_RESTARTS")), file=file)
os._exit(int(codes[0]))
""")
    torchrun.chmod(0o755)
    request = make_request(exclude=(), vendor=None)
    found = ray.dispatch(request, address=None, python=str(torchrun), workdir=tmp_path)
    (tmp_path / "submit.py").write_text(found.files["runs/first/submit.py"])
    done = subprocess.run(
        [sys.executable, "submit.py"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path / "packages")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == ending, done.stderr
    assert done.stdout == "[{'CPU': 1}, {'CPU': 1}] STRICT_SPREAD\n"
    lines = (tmp_path / "starts").read_text().splitlines()
    assert len(lines) == starts
    assert lines[0] == "0 head 0"
    if ending == 0:
        assert lines[-1] == f"1 head {starts - 2}"
