"""Names of other tools lead to our commands and options."""

from __future__ import annotations

import pytest

from meshwright.cli import hints, main


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (["simulate"], "the command is `meshwright estimate`"),
        (["sweep", "run.yaml"], "the command is `meshwright bench train`"),
        (["bench", "gpu"], "known: device, ingest, kernels, offline, serve, train"),
    ],
)
def test_an_unknown_command_by_another_name_leads_to_ours(meshwright, typed, hint):
    outcome = meshwright(*typed)
    assert outcome.exit_code == 2
    assert outcome.stderr.splitlines()[1] == f"hint: {hint}"


def test_every_synonym_is_of_a_command_that_exists():
    for synonym, meant in hints.COMMANDS.items():
        assert synonym not in main.VERBS
        assert meant.split()[0] in main.VERBS


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (
            ["train", "run.yaml", "--lr", "1e-4"],
            "set the key of the run file: --set optimizer.learning_rate=VALUE",
        ),
        (
            ["train", "run.yaml", "--micro-batch-size=2"],
            "set the key of the run file: --set batch.micro=VALUE",
        ),
        (
            ["train", "run.yaml", "--gradient-checkpointing"],
            "set the key of the run file: --set parallel.recompute=VALUE",
        ),
        (["plan", "--tp", "8"], "fix a field of the plan: --fix tensor=VALUE"),
        (["plan", "--global-batch-size", "8"], "the option is `--gbs`"),
        (["scale", "--num-gpus", "8"], "the option is `--cluster`"),
        (["catalog", "models", "--seq-length", "8"], "see `meshwright catalog --help`"),
        (["plan", "--objectiv", "time"], "did you mean '--objective'?"),
    ],
)
def test_an_option_of_another_tool_leads_to_ours(meshwright, typed, hint):
    outcome = meshwright(*typed)
    assert outcome.exit_code == 2
    assert outcome.stderr.splitlines()[1] == f"hint: {hint}"
