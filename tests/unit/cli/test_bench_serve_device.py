"""The devices behind a server, as a user names them."""

from __future__ import annotations

import pytest

from meshwright.cli.bench_serve import FOUND, GIVEN, served_device
from meshwright.errors import InputError, UnknownNameError


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("h200", "h200", 1), ("h200-8", "h200", 8), ("h200-8x2", "h200", 16), ("tpu-v5e-4", "tpu-v5e", 4),
        ("a100-40gb", "a100-40gb", 1), ("MI300X-8", "mi300x", 8),
    ],
)  # fmt: skip
def test_names(text, name, count):
    assert served_device(text, is_here=False) == {
        "name": name, "accelerator": name, "count": count, "source": GIVEN,
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", " ", "h900-8", "-8", "h200-8x", "h200-0"])
def test_what_names_no_device(text):
    with pytest.raises((InputError, UnknownNameError), match="device"):
        served_device(text, is_here=False)


def test_a_server_elsewhere_has_no_known_device():
    assert served_device(None, is_here=False) is None


def test_a_server_that_is_started_here_has_the_devices_of_this_node():
    found = served_device(None, is_here=True)
    assert found is None or (found["name"] and found["source"] == FOUND)
