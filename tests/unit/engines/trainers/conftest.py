"""Configurations of trainers as files, read and loaded."""

from __future__ import annotations

import json

import pytest
from ruamel.yaml import YAML

from meshwright import runfile
from meshwright.engines.trainers.run_content import import_trainer


@pytest.fixture
def read(tmp_path):
    """Write configurations, import them with what stands behind them, and load the run file."""

    def run(*contents, behind: str = "", cluster: str = "h100-8x1", ignore=()):
        paths = []
        for number, content in enumerate(contents):
            paths.append(tmp_path / f"part{number}.{'json' if number else 'yaml'}")
            if isinstance(content, str):
                paths[-1].write_text(content)
            elif number:
                paths[-1].write_text(json.dumps(content))
            else:
                YAML(typ="safe").dump(content, paths[-1])
        found = import_trainer(f"{' '.join(map(str, paths))} {behind}", cluster=cluster, ignore=ignore)
        run.notes = found.notes
        return runfile.from_mapping(found.content)

    return run
