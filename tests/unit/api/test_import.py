"""`import meshwright` is free, and its names stay what they are whatever is imported later."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
from tests.every_member import check_every

import meshwright as mw

MEASURE = """
import sys, time
before = time.process_time()
import meshwright
print(time.process_time() - before, *sys.modules)
"""
HEAVY = {"numpy", "scipy", "torch", "jax", "pandas", "altair", "pydantic", "ruamel", "rich", "click"}


def measured() -> tuple[float, set[str]]:
    """Processor seconds of the import, and the packages that it loaded."""
    done = subprocess.run([sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True)
    seconds, *modules = done.stdout.split()
    return float(seconds), {name.partition(".")[0] for name in modules}


def test_the_import_takes_less_than_a_tenth_of_a_second():
    assert min(measured()[0] for _ in range(5)) < 0.1


def test_the_import_loads_nothing_heavy():
    assert measured()[1] & HEAVY == set()


def test_planning_loads_no_tensor_framework():
    code = "import sys, meshwright as mw; mw.estimate('llama3-8b').to_dict(); mw.catalog.models(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert {name.partition(".")[0] for name in done.stdout.split()} & {"torch", "jax", "transformers"} == set()


def test_every_public_name_is_the_object_of_its_home():
    def check(name: str) -> None:
        found = getattr(mw, name)
        assert found is getattr(import_module(found.__module__), name)

    check_every((n for n in mw.__all__ if n not in ("catalog", "__version__")), check)


def test_a_package_of_the_same_name_does_not_replace_a_function():
    code = (
        "import meshwright as mw, meshwright.accuracy.report; from meshwright import accuracy;"
        "assert callable(mw.accuracy) and accuracy is mw.accuracy, mw.accuracy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'meshwright' has no attribute 'plam'"):
        _ = mw.plam


def test_dir_lists_the_public_names():
    assert set(mw.__all__) <= set(dir(mw))
