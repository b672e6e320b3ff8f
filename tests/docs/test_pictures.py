"""Pictures of README and documents show what the figures show now."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("vl_convert")

from scripts import renew_pictures

NUMBER = re.compile(r"\d+\.\d+")


def test_the_pictures_are_up_to_date():
    for name, text in renew_pictures.pictures().items():
        stored = (renew_pictures.IMAGES / name).read_text(encoding="utf-8")
        assert NUMBER.sub("0", stored) == NUMBER.sub("0", text), "run scripts/renew_pictures.py"
        # pixels, written with three decimals: processors round the last one differently
        there, now = (list(map(float, NUMBER.findall(picture))) for picture in (stored, text))
        assert there == pytest.approx(now, abs=0.01), "run scripts/renew_pictures.py"
