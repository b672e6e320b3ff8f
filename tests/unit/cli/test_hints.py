"""Names of other tools lead to our commands and options."""

from __future__ import annotations

import pytest

from meshwright.cli import main


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
    for synonym, meant in main.COMMANDS.items():
        assert synonym not in main.VERBS
        assert meant.split()[0] in main.VERBS


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (["train", "run.yaml", "--lr", "1e-4"], "set the key of the run file: --set optimizer.learning_rate=VALUE"),
        (["train", "run.yaml", "--micro-batch-size=2"], "set the key of the run file: --set batch.micro=VALUE"),
        (
            ["train", "run.yaml", "--gradient-checkpointing"],
            "set the key of the run file: --set parallel.recompute=VALUE",
        ),
        (["plan", "--tp", "8"], "fix a field of the plan: --fix tensor=VALUE"),
        (["plan", "--global-batch-size", "8"], "the option is `--gbs`"),
        (["scale", "--num-gpus", "8"], "the option is `--cluster`"),
        (["catalog", "models", "--seq-length", "8"], "see `meshwright catalog --help`"),
        (["plan", "--task", "lora"], "set the key of the run file: --set task=VALUE"),
        (
            ["plan", "--budget", "5000"],
            "cost and days of several sizes: meshwright scale --devices 64,128,256 --tokens N",
        ),
        (["plan", "--objectiv", "time"], "did you mean '--objective'?"),
    ],
)
def test_an_option_of_another_tool_leads_to_ours(meshwright, typed, hint):
    outcome = meshwright(*typed)
    assert outcome.exit_code == 2
    assert outcome.stderr.splitlines()[1] == f"hint: {hint}"


@pytest.mark.parametrize(
    ("typed", "digits"),
    [
        (["plan", "--seq", "128k"], "128000 or 131072"),
        (["plan", "--gbs", "8,192"], "8192"),
        (["scale", "--tokens", "15M"], "15000000 or 15728640"),
        (["scale", "--tokens", "many"], None),
    ],
)
def test_numbers_with_a_suffix_are_refused_with_their_digits(meshwright, typed, digits):
    outcome = meshwright(*typed)
    assert outcome.exit_code == 2
    assert (f"write the digits: {digits}" in outcome.stderr) is (digits is not None)


def test_an_engine_that_none_here_runs_leads_to_any(meshwright):
    outcome = meshwright("plan", "--engine", "deepspeed")
    assert outcome.exit_code == 2
    assert "'any'; --engine any plans for other programs, with every choice of a plan" in outcome.stderr


def test_every_answer_with_a_price_says_which(meshwright):
    described = ["--model", "qwen3-0.6b", "--cluster", "h100-8x1", "--gbs", "64", "--seq", "4096"]
    asked = {"plan": ["--objective", "cost", "--top", "1"], "scale": ["--devices", "8,16", "--tokens", "1e9"]}
    for command, options in asked.items():
        said = " ".join(meshwright(command, *described, *options).stdout.split())
        assert "5.0725 USD per device-hour, median of 6 offers" in said
        assert "2026-11-09; the market: " in said
        own = meshwright(command, *described, *options, "--set", "costs.usd_per_device_hour=2")
        assert "2 USD per device-hour, as the run states; the market: " in " ".join(own.stdout.split())
