"""A GPU that multiplies fp8, as far as torchtitan asks before it builds a configuration. For tests, by PYTHONPATH."""

from __future__ import annotations

import importlib.abc
import sys


class Supplier(importlib.abc.MetaPathFinder):
    """Answers before the modules that ask are imported; finds nothing itself."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchtitan.components.quantization":
            sys.meta_path.remove(self)
            import torchtitan.tools.utils as machine

            machine.has_cuda_capability = lambda major, minor: True


sys.meta_path.insert(0, Supplier())
