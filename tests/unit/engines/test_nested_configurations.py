"""Configurations that are nested without end, or contain themselves, are bad input."""

from __future__ import annotations

import pytest

from meshwright.api.configurations import import_run
from meshwright.engines.recognition import recognised
from meshwright.errors import InputError

DEEP = "[" * 2_000
FILES = {
    "primus.yaml": f"modules:\n  pre_trainer:\n    framework: megatron\n    overrides: {DEEP}\n",
    "itself.yaml": "work_group: x\nmodules: &a\n  pre_trainer: *a\n",
    "extends.yaml": "extends: [extends.yaml]\nmodules: {pre_trainer: {framework: megatron}}\n",
    "titan.toml": f'[model]\nname = "llama3"\n[training]\nx = {DEEP}\n',
}


@pytest.mark.parametrize("name", FILES)
def test_a_configuration_without_an_end_is_refused(tmp_path, name):
    path = tmp_path / name
    path.write_text(FILES[name])
    recognised(path)
    with pytest.raises(InputError):
        import_run(str(path), cluster="h100-8x1")
