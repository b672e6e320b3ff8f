"""A tiny run on two processes that writes checkpoints, and its losses when nobody disturbs it."""

from __future__ import annotations

import pytest

SECTIONS = {
    "precision": "fp32",
    "parallel": "{data_shard: 2, sharding: parameters}",
    "optimizer": "{learning_rate: 1.0e-3, schedule: constant}",
}


@pytest.fixture(scope="module")
def undisturbed(request, tmp_path_factory, tiny_run):
    """The losses of the run, with the steps of the test module's TRAIN, on this machine."""
    training = tiny_run(tmp_path_factory.mktemp("alone"), **SECTIONS, train=request.module.TRAIN)
    training.train()
    return training.losses()


@pytest.fixture
def training(request, tmp_path, tiny_run):
    """The same run in a folder of its own, its run file written."""
    made = tiny_run(tmp_path, **SECTIONS, train=request.module.TRAIN)
    made.folder.mkdir(parents=True, exist_ok=True)
    (made.folder / "run.yaml").write_text(made.text)
    return made
