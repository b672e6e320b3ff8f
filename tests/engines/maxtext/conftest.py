"""MaxText's environment for the tests: the one that is there, else one that the documented command makes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from meshwright.engines.maxtext import environment


@pytest.fixture(scope="session")
def maxtext() -> dict[str, str]:
    """Environment variables under which trainings find MaxText. Made once, whatever the number of test processes."""
    if environment.find() is None:
        looked = environment.look_for_python()
        if looked[-1].python is None:
            words = "; ".join(f"{one.place}: {one.found}" for one in looked)
            pytest.skip(f"MaxText needs Python 3.12, and none was found: {words}")
        command = environment.COMMAND.split()
        subprocess.run([sys.executable, *command[1:]], check=True)
    return os.environ | {environment.VARIABLE: str(environment.default_folder()), "OMP_NUM_THREADS": "1"}
