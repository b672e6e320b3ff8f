"""`meshwright inference` from the outside: documents, exit codes and messages."""

from __future__ import annotations

import pytest

CAPACITY = ("inference", "capacity", "--json")


def test_capacity_has_the_keys_that_scripts_read(meshwright):
    done = meshwright(
        *CAPACITY, "--model", "llama3.1-405b", "--cluster", "mi355x-1x1", "--precision", "mxfp4",
        "--kv-precision", "fp8", "--context", 8192,
    )  # fmt: skip
    document = done.json
    assert done.exit_code == 0
    assert document["weights_bytes"] == pytest.approx(221.8e9, rel=1e-3)
    assert document["kv_bytes_per_token"] == 258_048
    assert document["max_sessions"] == document["max_tokens"] // 8192 > 0
    assert document["binds"] == "kv_cache"
    assert set(document["reserve"]["sources"]) <= set(document["reserve"])


def test_what_does_not_fit_exits_with_one_and_says_what_is_missing(meshwright):
    options = ("--model", "deepseek-r1", "--cluster", "mi355x-1x1", "--precision", "fp4")
    done = meshwright(*CAPACITY, *options)
    document = done.json
    assert done.exit_code == 1
    assert (document["fits"], document["max_sessions"], document["binds"]) == (False, 0, "weights")
    assert "needs 36" in document["shortfall"]
    assert "does not fit" in meshwright("inference", "capacity", *options).stdout


@pytest.mark.parametrize(
    "wrong",
    [
        ("--model", "lama3.1-405b"),
        ("--model", "/nowhere/config.json"),
        ("--cluster", "mi355x"),
        ("--cluster", "here"),
        ("--precision", "fp3"),
        ("--kv-precision", "int9"),
        ("--context", "0"),
        ("--context", "1e30"),
        ("--tensor", "3"),
        ("--tensor", "0"),
        ("--memory-ratio", "1.5"),
        ("--memory-ratio", "nan"),
    ],
    ids="=".join,
)
def test_bad_input_is_one_message(meshwright, wrong):
    options = {"--model": "llama3.1-8b", "--cluster": "h100-8x1"} | dict([wrong])
    done = meshwright(*CAPACITY, *(part for option in options.items() for part in option))
    assert done.exit_code == 2
    assert done.json["error"]["message"]
    assert "Traceback" not in done.stderr
