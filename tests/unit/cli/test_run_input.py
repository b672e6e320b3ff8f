import pytest
from tests.example_runs import OPEN_RUN

from meshwright.cli.run_input import run_from
from meshwright.errors import InputError
from meshwright.specs.run import Objective


def test_a_run_from_options_alone():
    run = run_from(
        None, model="llama3-8b", cluster="h100-8x2", global_batch=64, sequence_length=4096, objective="cost",
        overrides=["costs.usd_per_device_hour=2.5"],
    )  # fmt: skip
    assert (run.model.name, run.cluster_name, run.global_batch) == ("llama3-8b", "h100-8x2", 64)
    assert run.objective is Objective.COST
    assert run.costs.usd_per_device_hour == 2.5


def test_options_replace_keys_of_the_file():
    run = run_from(OPEN_RUN, cluster="h100-8x2", global_batch=64, sequence_length=4096, engine="megatron")
    assert run.cluster_name == "h100-8x2"
    assert (run.global_batch, run.sequence_length) == (64, 4096)
    assert run.engine == "megatron"
    assert run.model.name == "llama3.1-8b"


def test_set_has_the_last_word():
    assert run_from(OPEN_RUN, cluster="h100-8x2", overrides=["cluster=h100-8x4"]).cluster_name == "h100-8x4"


def test_without_a_file_the_missing_options_are_named():
    with pytest.raises(InputError, match="missing --cluster, --seq") as caught:
        run_from(None, model="llama3-8b", global_batch=64)
    assert "run file" in caught.value.hint
