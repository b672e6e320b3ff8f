"""Environment of the libraries that PyTorch computes with on CPUs. Imports no torch: they read it when they are loaded.

At the end of a parallel region libgomp's threads spin before they sleep, by default for some milliseconds. If
another program wants the processor, a spinning thread uses up the time that the scheduler grants it, and the
thread that it waits for gets none. A short spin ends before that, and is long enough for the next region of
an idle machine: a small model has hundreds of regions in a layer, and waking a thread for each takes longer
than its work.

oneDNN keeps the code that it compiled for each shape of a GEMM, by default of the last 1,024 shapes, half a megabyte
each. A dense model has some twenty shapes. Experts have a few for each number of rows that they get, which is a
multiple of an eighth of the mean (`models.experts`); without that they had new ones in every step.

docs/log.md has the measured costs of both.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from meshwright.errors import MissingDependencyError
from meshwright.programs import install_command

WAIT_POLICY, SPIN_COUNT = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
SPINS = 3_000
"""Turns of the loop in which a thread waits; libgomp's own are 300,000."""
PRIMITIVES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
NUM_PRIMITIVES = 128
"""Shapes whose code oneDNN keeps."""


def require_torch(what: str) -> None:
    """Raise MissingDependencyError (exit code 3) if PyTorch is absent. `what` begins the message: "training".

    Sets the environment that PyTorch's libraries read when they are loaded.
    """
    configure_libraries()
    if find_spec("torch") is None:
        raise MissingDependencyError(f"{what} needs PyTorch, which is not installed", hint=install_command("torch"))


def configure_libraries() -> None:
    """Set unset variables for child processes, and for this process if it has not loaded PyTorch."""
    os.environ.setdefault(PRIMITIVES, str(NUM_PRIMITIVES))
    if WAIT_POLICY not in os.environ:
        os.environ.setdefault(SPIN_COUNT, str(SPINS))
