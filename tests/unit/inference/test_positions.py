"""Positions that a model was trained for, and drafts of speculative decoding."""

from __future__ import annotations

import json

import pytest

from meshwright.answers.serving_capacity import serving_capacity
from meshwright.answers.serving_estimate import serving_estimate
from meshwright.catalog import lookup as catalog
from meshwright.errors import InputError
from meshwright.files import toml_table
from meshwright.inference.formats import DATA
from meshwright.inference.positions import positions_note, trained_positions


def test_every_row_of_the_table_is_a_model_of_the_catalogue():
    for name, positions in toml_table(DATA / "positions.toml").items():
        assert trained_positions(name, catalog.model(name)) == positions
        assert positions_note(name, catalog.model(name), positions) is None
        assert f"{positions:,} positions" in positions_note(name, catalog.model(name), positions + 1)


@pytest.mark.parametrize(("value", "found"), [(512, 512), (None, None), ("512", None), (True, None), (-1, None)])
def test_a_config_says_its_own_positions(tmp_path, value, found):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": value}))
    assert trained_positions(str(tmp_path), catalog.model("llama3-8b")) == found
    assert trained_positions(str(tmp_path / "config.json"), catalog.model("llama3-8b")) == found


def test_longer_requests_have_a_note():
    asked = {"model": "llama3-8b", "cluster": "h100-1x1", "output_tokens": 1000}
    assert not any("positions" in note for note in serving_estimate(**asked, input_tokens=7192).notes)
    assert any("8,192 positions" in note for note in serving_estimate(**asked, input_tokens=7193).notes)
    held = serving_capacity(model="llama3-8b", cluster="h100-1x1", precision="bf16", context=9000)
    assert any("8,192 positions" in note for note in held.notes)


# --- drafts ---

ASKED = {"cluster": "h200-8x1", "precision": "fp8", "input_tokens": 1024, "output_tokens": 512, "concurrency": [8]}
SPECULATIVE = {"drafted": 3, "accepted": 1.9}


def itl(**more) -> float:
    return serving_estimate(**ASKED, **more).loads[0].itl.value


def test_drafting_takes_time_that_grows_with_the_draft():
    model = {"model": "llama3.1-70b", "degrees": {"tensor": 8}}
    uncounted = serving_estimate(**ASKED, **model, **SPECULATIVE)
    small, large = (itl(**model, **SPECULATIVE, draft=name) for name in ("llama3.2-1b", "llama3.1-8b"))
    assert uncounted.loads[0].itl.value < small < large
    assert small < itl(**model)  # accepted tokens are worth a small draft
    assert any("--draft MODEL" in note for note in uncounted.notes)


def test_a_prediction_module_drafts_without_being_named():
    found = serving_estimate(**ASKED, model="deepseek-v3", degrees={"tensor": 8}, **SPECULATIVE)
    assert any("its own prediction module" in note for note in found.notes)
    plain = serving_estimate(**ASKED, model="deepseek-v3", degrees={"tensor": 8})
    assert found.server.of.draft.num_layers == 1
    assert found.loads[0].itl.value < plain.loads[0].itl.value


def test_a_draft_needs_drafted_tokens_and_a_layout():
    with pytest.raises(InputError, match="drafts nothing"):
        serving_estimate(**ASKED, model="llama3.1-70b", draft="llama3.2-1b")
    with pytest.raises(InputError, match="query heads"):
        serving_estimate(**ASKED, model="llama3.1-70b", degrees={"tensor": 8}, **SPECULATIVE, draft="qwen2.5-0.5b")
