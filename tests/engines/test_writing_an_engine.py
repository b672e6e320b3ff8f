"""The engine of docs/guides/writing-an-engine.md, installed as a package of somebody else: nothing here names it."""

from __future__ import annotations

import doctest
import json
import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from tests.warm import WarmProcess

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "writing-an-engine.md"
BLOCK = re.compile(r'<!--- skip: next "(?P<name>[^"]+)" -->\n```(?P<kind>\w+)\n(?P<text>.*?)```', re.DOTALL)
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = [match.groupdict() for match in BLOCK.finditer(TEXT)]
FILES = {block["name"]: block["text"] for block in BLOCKS if block["kind"] != "console"}
(PROJECT,) = (tomllib.loads(text)["project"] for text in re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL))
(CONSOLE,) = (block["text"] for block in BLOCKS if block["kind"] == "console")

RUN = """
model: {name: toy, hidden: 32, num_layers: 2, vocab: 64, ffn_hidden: 64, attention: {num_heads: 4, num_kv_heads: 2}}
data: {source: synthetic, sequence_length: 16}
batch: {global_sequences: 4, micro: 2}
optimizer: {learning_rate: 1.0e-2, warmup_steps: 2, gradient_clip: 0.5}
precision: fp32
cluster: here
train: {steps: 6}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run file, and the package beside its metadata, as `pip install` lays them down."""
    folder = tmp_path_factory.mktemp("plain")
    site = folder / "site"
    for name, text in FILES.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    (site / "plainloop" / "__init__.py").touch()
    metadata = site / f"{PROJECT['name']}-{PROJECT['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {PROJECT['name']}\nVersion: {PROJECT['version']}\n"
    )
    points = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in PROJECT["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(points))
    (folder / "run.yaml").write_text(RUN)
    return folder


INSTALL = """
import sys

from meshwright.catalog import engines

sys.path.insert(0, {site!r})
engines._installed.cache_clear()
"""
"""The process of a command is forked from one that has not seen the package."""


def run(folder: Path, command: str) -> tuple[int, str]:
    """Exit code and all output of a command."""
    script = folder / "install.py"
    script.write_text(INSTALL.format(site=str(folder / "site")))
    path = [str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]  # for its worker
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "COLUMNS": "110", "NO_COLOR": "1"}
    program, *arguments = shlex.split(command)
    assert program == "meshwright"
    process = WarmProcess(arguments, folder=folder, environment=environment, script=script)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode is not None
    return process.returncode, stdout + stderr


@pytest.mark.parametrize("block", re.split(r"^\$ ", CONSOLE, flags=re.MULTILINE)[1:])
@pytest.mark.when_touched  # a page, like those below docs
def test_the_page_shows_what_is_printed(folder, block):
    command, _, expected = block.partition("\n")
    _, printed = run(folder, command)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(expected, printed, options), printed


@pytest.mark.slow
def test_its_losses_are_the_native_engines(folder):
    def losses(engine: str) -> list[float]:
        command = f"meshwright train run.yaml --only-steps --set engine={engine} --out {engine}"
        code, printed = run(folder, command)
        assert code == 0, printed
        lines = (folder / engine / "steps.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    assert losses("plain") == pytest.approx(losses("native"), rel=1e-6)
