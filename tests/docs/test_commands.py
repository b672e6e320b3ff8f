"""The reference of all commands is what the declarations say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from meshwright.cli.main import VERBS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def renew():
    spec = importlib.util.spec_from_file_location("renew_commands", ROOT / "scripts" / "renew_commands.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(renew):
    assert renew.PAGE.read_text(encoding="utf-8") == renew.page(), "run scripts/renew_commands.py"


def test_the_page_has_every_command_under_its_task(renew):
    headings = re.findall(r"^#{2,4} (.+)$", renew.page(), re.MULTILINE)
    for name, verb in VERBS.items():
        assert headings.index(verb.section) < headings.index(name)
    assert {"bench device", "tune gemm"} <= set(headings)
