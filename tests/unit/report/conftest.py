"""Figures that are drawn once, and a browser for pages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import pytest
import vl_convert
from tests.browser import Browser, open_browser


@pytest.fixture(autouse=True, scope="session")
def _equal_figures_are_drawn_once() -> Iterator[None]:
    """Pages of one training with other words have the same figures."""
    draw, drawn = vl_convert.vegalite_to_svg, {}

    def once(spec: Mapping[str, object]) -> str:
        key = json.dumps(spec, sort_keys=True, default=str)
        if key not in drawn:
            drawn[key] = draw(spec)
        return drawn[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vl_convert, "vegalite_to_svg", once)
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as found:
        yield found
