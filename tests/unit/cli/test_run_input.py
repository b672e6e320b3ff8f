import pytest
from tests.example_runs import OPEN_RUN

from meshwright.cli.run_input import run_from
from meshwright.errors import InputError
from meshwright.specs.run import Objective


def test_a_run_from_options_alone():
    run = run_from(
        None, model="llama3-8b", cluster="h100-8x2", global_sequences=64, sequence_length=4096, objective="cost",
        overrides=["costs.usd_per_device_hour=2.5"],
    )  # fmt: skip
    assert (run.model.name, run.cluster_name, run.global_batch) == ("llama3-8b", "h100-8x2", 64)
    assert run.objective is Objective.COST
    assert run.costs.usd_per_device_hour == 2.5


def test_options_replace_keys_of_the_file():
    run = run_from(OPEN_RUN, cluster="h100-8x2", global_sequences=64, sequence_length=4096, engine="megatron")
    assert run.cluster_name == "h100-8x2"
    assert (run.global_batch, run.sequence_length) == (64, 4096)
    assert run.engine == "megatron"
    assert run.model.name == "llama3.1-8b"


@pytest.mark.parametrize("path", [OPEN_RUN, None])
@pytest.mark.parametrize(
    ("flag", "key", "option", "value"),
    [
        ("--cluster", "cluster", "cluster", "h100-8x2"),
        ("--engine", "engine", "engine", "megatron"),
        ("--gbs", "batch.global_sequences", "global_sequences", 64),
        ("--seq", "data.sequence_length", "sequence_length", 4096),
        ("--objective", "objective", "objective", "cost"),
    ],
)
def test_an_option_and_set_do_not_give_one_key_both(path, flag, key, option, value):
    with pytest.raises(InputError, match=f"{flag} and --set {key}= are both given"):
        run_from(path, **{option: value}, overrides=[f"{key}={value}"])


def test_set_does_not_replace_the_section_of_an_option():
    with pytest.raises(InputError, match="--gbs and --set batch= are both given"):
        run_from(OPEN_RUN, global_sequences=64, overrides=["batch={global_sequences: 512}"])


def test_a_model_may_have_the_name_of_its_repository(monkeypatch):
    monkeypatch.setattr("meshwright.hub.fetch", None)  # no network
    options = {"cluster": "h100-8x2", "global_sequences": 64, "sequence_length": 4096}
    for name, known in (
        ("meta-llama/Llama-3.1-8B", "llama3.1-8b"),
        ("qwen/qwen3-8b", "qwen3-8b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
    ):
        assert run_from(None, model=name, **options).model.name == known


def test_without_a_file_the_missing_options_are_named():
    with pytest.raises(InputError, match="missing --cluster, --seq") as caught:
        run_from(None, model="llama3-8b", global_sequences=64)
    assert "run file" in caught.value.hint
