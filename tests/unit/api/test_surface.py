"""The public interface is what the golden file says. A change of it is a change of the version.

To renew the file: `python tests/unit/api/test_surface.py > tests/unit/api/golden/surface.txt`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import meshwright as mw

GOLDEN = Path(__file__).parent / "golden" / "surface.txt"
LISTINGS = ("models", "accelerators", "clusters", "claims", "runs")


def surface() -> Iterator[str]:
    """One line for each public name, and for each public member of a class."""
    for name in sorted(mw.__all__):
        found = getattr(mw, name)
        if inspect.isclass(found):
            yield f"class {name}({', '.join(base.__name__ for base in found.__bases__)})"
            yield from (f"    {line}" for line in members(found))
        elif inspect.isfunction(found):
            yield f"{name}{inspect.signature(found)}"
        else:
            yield name
    yield from (f"catalog.{name}{inspect.signature(getattr(mw.catalog, name))}" for name in LISTINGS)


def members(found: type) -> Iterator[str]:
    """Fields, properties and methods that the class itself defines or inherits from this project."""
    annotations = {
        name: kind
        for base in reversed(found.__mro__)
        if base.__module__.startswith("meshwright")
        for name, kind in inspect.get_annotations(base).items()
    }
    yield from (f"{name}: {kind}" for name, kind in annotations.items() if not name.startswith("_"))
    for name in sorted(dir(found)):
        value = inspect.getattr_static(found, name)
        is_ours = getattr(inspect.unwrap(getattr(value, "fget", None) or value), "__module__", "") or ""
        if name.startswith("_") or name in annotations:
            continue
        if isinstance(value, property) or type(value).__name__ == "cached_property":
            yield f"{name} (property)"
        elif inspect.isfunction(value) and is_ours.startswith("meshwright"):
            yield f"{name}{inspect.signature(value)}"


def test_the_surface_is_the_golden_one():
    assert "\n".join(surface()) + "\n" == GOLDEN.read_text(encoding="utf-8")


def test_every_public_function_says_what_it_takes_and_gives_and_shows_it():
    functions = [getattr(mw, name) for name in mw.__all__ if inspect.isfunction(getattr(mw, name))]
    from meshwright.api import catalog

    for function in [*functions, *(getattr(catalog, name) for name in LISTINGS)]:
        text = inspect.getdoc(function) or ""
        assert "Returns:" in text, function
        assert "Example:" in text, function
        assert ">>>" in text, function
        parameters = inspect.signature(function).parameters
        assert not parameters or "Args:" in text, function
        assert [name for name in parameters if name not in text] == [], function


if __name__ == "__main__":
    print("\n".join(surface()))
