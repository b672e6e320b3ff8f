"""Tables of the trainers' keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.engines.trainers.tables import ORDER, table, table_of

NEWEST = json.loads(Path(__file__).with_name("fields.json").read_text(encoding="utf-8"))
"""Keys of the newest releases, as `scripts/renew_trainer_names.py` reads them."""


@pytest.mark.parametrize("name", ORDER)
def test_a_key_is_of_one_class(name):
    found = table(name)
    classes = [{*found.keys}, {*found.refused}, found.not_estimated, found.not_carried, found.without_effect]
    twice = {key for i, one in enumerate(classes) for other in classes[i + 1 :] for key in one & other}
    assert not twice


@pytest.mark.parametrize("name", ORDER)
def test_every_default_that_is_a_word_is_known(name):
    found = table(name)
    unknown = [
        f"{setting}: {found.defaults[setting]}"
        for setting, values in found.values.items()
        if isinstance(found.defaults.get(setting), str) and found.defaults[setting] not in values
    ]
    assert not unknown


@pytest.mark.parametrize("name", NEWEST)
def test_every_key_of_the_newest_release_is_of_a_class(name):
    found = table(name)
    keys = NEWEST[name]["keys"]
    assert len(keys) > 20
    assert not [key for key in keys if not found.knows(key) and not found.has_below(key)]


def test_keys_of_deepspeed_in_a_configuration_of_another_program_do_not_make_it_deepspeeds():
    alone = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 4}
    assert table_of(alone) is table("deepspeed")
    assert table_of(alone | {"num_layers": 12, "hidden_size": 768, "pos_emb": "rotary"}) is None
