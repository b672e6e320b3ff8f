"""A wheel works without the checkout that it was built from."""

from __future__ import annotations

import subprocess
import sys

import pytest
from scripts import check_wheel

from meshwright.version import __version__


@pytest.mark.slow  # builds, and makes an environment; every other test imports the checkout
def test_a_wheel_works_without_the_checkout(tmp_path, pytestconfig):
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, pytestconfig.rootpath]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"meshwright-{__version__}-")
    assert check_wheel.check(wheel) == 0
