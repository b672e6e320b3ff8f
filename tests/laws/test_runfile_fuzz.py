"""Whatever a run file holds, the answer is a Run or one message: never a traceback."""

from __future__ import annotations

import copy
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from meshwright import runfile
from meshwright.errors import MeshwrightError
from meshwright.runfile.schema import all_fields
from meshwright.specs.run import Run

EXAMPLES = [p.read_text() for p in sorted((Path(__file__).parents[2] / "examples" / "runs").glob("*.yaml"))]
DOCUMENTS = [YAML(typ="safe", pure=True).load(text) for text in EXAMPLES]
KEYS = sorted({part for key in all_fields() for part in key.split(".")})
WORDS = ["auto", "here", "full", "selective", "mla", "lora", "fp8", "llama3.1-8b", "h100-8x8", "h100-8x0", ".", "/"]

light = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 64)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(WORDS)
)
keys = st.sampled_from(KEYS) | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
)


def outcome(load: Callable[[], Run]) -> Run | MeshwrightError:
    """Return the run, or the error that a user gets. Any other exception than ours fails the test by itself."""
    try:
        return load()
    except MeshwrightError as error:
        return error


def check(text: str, overrides: tuple[str, ...] = ()) -> None:
    """A Run, or an error that is one readable message."""
    got = outcome(lambda: runfile.loads(text, file="run.yaml", overrides=overrides))
    if isinstance(got, Run):
        assert got.global_batch > 0
        if got.plan is not None and got.cluster is not None:
            assert got.plan.num_devices == got.cluster.num_devices
        return
    assert got.exit_code == 2
    assert 0 < len(str(got)) < 5000
    assert len(str(got).splitlines()) <= 13


def as_yaml(value: Any) -> str:
    out = StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.allow_unicode = True
    yaml.dump(value, out)
    return out.getvalue()


@light
@given(st.binary(max_size=200))
@example(b"\xef\xbb\xbf")
@example(b"a: \xc2\x85b")
def test_any_bytes(tmp_path_factory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "run.yaml"
    path.write_bytes(data)
    got = outcome(lambda: runfile.load(path))
    assert str(got).startswith(str(path))  # the file is named


@pytest.mark.when_touched  # test_a_valid_file_with_one_change draws files that are wrong in one place
@light
@given(st.text(max_size=200))
@example("%YAML 1.1\n---\na: 017\n")
@example("%YAML 9.9\n---\na: 1\n")
@example("? [a, b]\n: {<<: *x}\n")
@example("a: !!int x\n")
@example("!!map {a: !!str 3}")
@example("<<: [1]\n")
@example("a: !!timestamp x\n= : 1\n")
def test_any_text(text: str) -> None:
    check(text)


@pytest.mark.when_touched  # test_a_valid_file_with_one_change draws the same values
@light
@given(st.dictionaries(keys, values, max_size=6))
@example({"(": None, "(word)": 1, "model": {"(mapping)": {}}})
def test_any_value(value: dict[str, Any]) -> None:
    check(as_yaml(value))


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A valid file with one value, anywhere, replaced, taken away or added."""
    document = copy.deepcopy(draw(st.sampled_from(DOCUMENTS)))
    inside = document
    for _ in range(draw(st.integers(0, 2))):
        below = [v for v in inside.values() if isinstance(v, dict) and v]
        inside = draw(st.sampled_from(below)) if below else inside
    key = draw(st.sampled_from(sorted(inside)) | keys)
    if draw(st.booleans()) or key not in inside:
        inside[key] = draw(values)
    else:
        del inside[key]
    return as_yaml(document)


@light
@given(mutated())
def test_a_valid_file_with_one_change(text: str) -> None:
    check(text)


@pytest.mark.when_touched  # test_any_text reads what is no YAML
@light
@given(st.sampled_from(EXAMPLES), st.integers(0, 2000), st.integers(0, 30), st.text(max_size=5))
def test_a_valid_file_with_a_piece_cut_out(text: str, start: int, length: int, patch: str) -> None:
    start %= len(text)
    check(text[:start] + patch + text[start + length :])


@pytest.mark.when_touched  # test_a_valid_file_with_one_change draws the same values
@light
@given(
    st.sampled_from(EXAMPLES),
    st.lists(st.sampled_from(sorted(all_fields())) | st.text(max_size=8), min_size=1, max_size=3),
    values,
)
def test_any_override(text: str, paths: list[str], value: Any) -> None:
    check(text, tuple(f"{path}={as_yaml(value)}" for path in paths))


@light
@given(
    model=st.text(max_size=12) | st.sampled_from(WORDS),
    cluster=st.text(max_size=12) | st.sampled_from(WORDS),
    global_batch=st.integers() | st.just(512),
    sequence_length=st.integers() | st.just(4096),
    precision=st.text(max_size=6) | st.just("bf16"),
    engine=st.text(max_size=6) | st.just("native"),
)
def test_any_options(**options: Any) -> None:
    got = outcome(lambda: runfile.from_options(**options))
    if isinstance(got, Run):
        assert got.global_batch == options["global_batch"]
    else:
        assert str(got).startswith(("--", "command line"))
