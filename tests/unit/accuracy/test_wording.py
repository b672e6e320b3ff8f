import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.accuracy.wording import number_format, shape_name, stated, yes_or_no
from meshwright.specs.precision import PRECISIONS


@pytest.mark.parametrize("name", [*PRECISIONS])
def test_names_of_number_formats_mean_themselves(name: str) -> None:
    assert number_format(name) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("bfloat16", "bf16"),
        ("BF16-mixed", "bf16"),
        ("fp16/bf16", "bf16"),
        ("FP8 current scaling", "fp8"),
        ("float8 rowwise", "fp8_rowwise"),
        ("fp8 (subchannel)", "fp8_blockwise"),
        ("FP8 delayed scaling", "fp8_delayed"),
        ("fp8_mx", "mxfp8"),
        ("MXFP4", "mxfp4"),
        ("int8", "int8"),
        ("", ""),
    ],
)
def test_other_names_of_number_formats(text: str, name: str) -> None:
    assert number_format(text) == name


def test_words_that_answer_nothing() -> None:
    for text in ("selective", "n/a", "unknown", "", "notes"):
        assert yes_or_no(text) is None
    assert [stated(text) for text in ("N/A", "not stated", "?", "selective")] == ["", "", "", "selective"]


@given(st.text(max_size=30))
def test_any_cell_can_be_read(text: str) -> None:
    assert yes_or_no(text) in (True, False, None)
    assert isinstance(number_format(text), str)
    assert shape_name(f"owner/{text}x")
