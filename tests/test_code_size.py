"""No file and no function of the package is longer than `scripts/code_size.py` allows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("code_size", ROOT / "scripts" / "code_size.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["code_size"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["code_size"]


def test_no_file_or_function_is_too_long(script):
    """Split it where a split reads better."""
    assert script.excesses(script.sizes(script.PACKAGE, base=script.PACKAGE)) == []


def test_a_longer_function_and_a_longer_file_are_found(script, tmp_path):
    most = script.MOST
    docstring = '        """Text\n\n        of four\n        lines."""\n'
    (tmp_path / "long.py").write_text(
        f"class A:\n    def f(self):\n{docstring}" + "        pass\n" * most["function"]
    )
    (tmp_path / "longer.py").write_text("pass\n" * (most["file"] + 1))
    assert script.excesses(script.sizes(tmp_path, base=tmp_path)) == [
        f"longer.py: {most['file'] + 1} lines, allowed {most['file']}",
        f"long.py: A.f: {most['function'] + 1} lines, allowed {most['function']}",
    ]


def test_the_page_has_every_room(script):
    text = script.PAGE.read_text(encoding="utf-8")
    rooms = {path.parent.name for path in script.PACKAGE.glob("*/__init__.py")}
    assert {room for room in rooms if f"| `{room}` |" not in text} == set()
