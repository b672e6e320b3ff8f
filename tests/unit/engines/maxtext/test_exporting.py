"""Files written with weights that come out of MaxText."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.catalog import lookup as catalog
from meshwright.catalog.huggingface import model_from_config

pytest.importorskip("torch", reason="the configs of other families are the native engine's")


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_the_config_of_gpt_oss_says_the_model(name):
    from meshwright.engines.maxtext.exporting import gpt_oss_config

    model = catalog.model(name)
    config = gpt_oss_config(model, dtype="bfloat16", max_positions=4096)
    again = model_from_config(config, name=name)
    assert replace(again, ffn_hidden=model.ffn_hidden) == model
    assert config["max_position_embeddings"] == 131_072
    assert config["layer_types"][:3] == ["sliding_attention", "full_attention", "sliding_attention"]
