"""The prepared measurements of GPUs are commands that this command line takes, of run files that can be read."""

from __future__ import annotations

import click
import pytest

from benchmarks import gpu
from meshwright import runfile
from meshwright.cli.main import group

H200_BYTES, A100_BYTES = 141 * 10**9, 40 * 2**30
STEPS = {step.name: step for step in gpu.steps(budget_s=60.0)}


@pytest.mark.parametrize("name", STEPS)
def test_every_command_parses_and_is_described(name, tmp_path, monkeypatch):
    gpu.write_run_files(tmp_path, memory_bytes=H200_BYTES)
    monkeypatch.chdir(tmp_path)
    context, command, words = click.Context(group), group, list(STEPS[name].arguments)
    while isinstance(command, click.Group):
        command = command.get_command(context, words.pop(0))
    command.make_context(name, words)  # raises where an option is unknown or lacks its value
    assert f" {name}" in gpu.__doc__


@pytest.mark.parametrize(("memory_bytes", "layers"), [(H200_BYTES, 24), (A100_BYTES, 1)])
def test_the_run_files_can_be_read(tmp_path, memory_bytes, layers):
    gpu.write_run_files(tmp_path, memory_bytes=memory_bytes)
    small, large = (runfile.load(tmp_path / name) for name in (gpu.RUN_SMALL, gpu.RUN_8B))
    assert small.model.hidden == 2048
    assert (large.model.hidden, large.model.num_layers) == (4096, layers)
