import math
from pathlib import Path

import numpy as np
import pytest

from meshwright import json_values
from meshwright.json_values import jsonable, load_json, parse_json
from meshwright.specs.estimate import Estimate, Shortfall, Tier
from meshwright.specs.plan import Schedule, Sharding


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, None),
        (-math.inf, None),
        (0.1 + 0.2, 0.3),
        (np.float64(2.5), 2.5),
        (np.int64(7), 7),
        (np.array([1.0, np.inf]), [1.0, None]),
        (True, True),
        (Schedule.INTERLEAVED, "interleaved"),
        (Sharding.PARAMETERS, "parameters"),
        ({3: 1, Schedule.GPIPE: 2}, {"3": 1, "gpipe": 2}),
        ({"b", "a"}, ["a", "b"]),
        (Path("runs") / "a.yaml", "runs/a.yaml"),
        ((x for x in (1, 2)), [1, 2]),
    ],
)
def test_jsonable(value, expected):
    assert jsonable(value) == expected


def test_a_dataclass_is_its_fields_unless_it_says_otherwise():
    shortfall = Shortfall(what="memory", needed=2.0, available=1.0, unit="GiB")
    assert jsonable(shortfall) == {"what": "memory", "needed": 2.0, "available": 1.0, "unit": "GiB"}
    estimate = Estimate(value=2.0, low=1.0, high=3.0, unit="s", tier=Tier.MEASURED)
    assert jsonable(estimate)["tier"] == "measured"


def test_what_has_no_json_form_is_refused():
    with pytest.raises(TypeError, match="object"):
        jsonable(object())


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"a":' * 5000, "[1" + "0" * 300 + "]", "1" * 5000, b"\xff{}", "", "{"]
)
def test_foreign_json_is_a_value_or_a_value_error(text):
    with pytest.raises(ValueError, match=r"nested|digits|utf-8|Expecting"):
        parse_json(text)
    assert parse_json(b'[-12, 1e999, "\xc3\xa9"]') == [-12, math.inf, "\u00e9"]


def test_an_endless_file_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(json_values, "MOST_BYTES", 2**20)
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "long").write_bytes(b" " * (2**20 + 1))
    with pytest.raises(ValueError, match="more than 1 MiB"):
        load_json(tmp_path / "long")
    with pytest.raises(ValueError, match="it is a device"):
        load_json(tmp_path / "endless")
    (tmp_path / "whole").write_text("[1]")
    assert load_json(tmp_path / "whole") == [1]
