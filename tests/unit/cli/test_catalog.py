import json
import shlex

import pytest
from click.testing import CliRunner

from meshwright.cli.commands.catalog import command
from meshwright.cli.main import run


def printed(*args):
    result = CliRunner().invoke(command, args, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def document(*args):
    return json.loads(printed(*args, "--json"))


@pytest.mark.parametrize(
    ("kind", "key", "name"),
    [("models", "models", "moe-2t"), ("accelerators", "accelerators", "mi355x"), ("clusters", "fabrics", "nvl72")],
)
def test_tables_list_every_entry(kind, key, name):
    rows = document(kind)[key]
    assert name in {row["name"] for row in rows}
    text = printed(kind)
    assert all(row["name"] in text for row in rows)


def test_claims_are_listed_with_their_document():
    rows = document("claims")["claims"]
    assert len(rows) == 69
    assert all(row["document"] for row in rows)
    assert "scale_06" in printed("claims")


def test_one_model_has_parameters_sources_and_assumptions():
    found = document("models", "moe-2t")
    assert found["computed"]["total_parameters"] == pytest.approx(2.05e12, rel=0.01)
    assert found["values"]["experts"]["num_experts"] == 448
    assert "replica" in found["assumptions"]
    assert "training_tokens" in found["unknown"]
    text = printed("models", "moe-2t")
    for words in ("[1]", "moe_2T.yaml", "Assumed", "Not known", "Where sources disagree"):
        assert words in text


def test_one_accelerator_prints_units_and_conflicts():
    text = printed("accelerators", "B200")
    assert "2,250 TFLOP/s" in text
    assert "8,000 GB/s" in text
    assert "5 TB/s" in text  # the conflict stays visible
    assert document("accelerators", "b200")["values"]["memory_bytes_per_s"] == 8e12


def test_every_value_of_an_entry_has_a_source_in_json():
    found = document("accelerators", "h100")
    assert set(found["source_of"]) >= {"memory_bytes", "peak_flops_per_s.bf16"}
    assert all(found["source_of"].values())


def test_a_cluster_name_shows_the_part_of_the_fabric_that_it_takes():
    found = document("clusters", "gb200-4x64")
    assert found["computed"]["num_devices"] == 256
    assert found["values"]["scale_up_domain"] == 64
    assert document("clusters", "nvl72")["values"]["scale_up_domain"] == 72


def test_clusters_print_the_naming_rule():
    assert "ACCELERATOR-GPUS_PER_NODExNODES" in printed("clusters")


@pytest.mark.parametrize(
    "args",
    [
        ["models", "lama3-8b"],
        ["accelerators", "h1000"],
        ["clusters", "h100"],
        ["clusters", "h1000-8x2"],
        ["claims", "scale_99"],
        ["nonsense"],
    ],
)
def test_unknown_names_exit_2_with_one_message(args, capsys):
    assert run(["catalog", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err


def test_error_is_json_when_asked(capsys):
    assert run(["catalog", "models", "lama3-8b", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["exit_code"] == 2
    assert "llama3-8b" in error["hint"]


def test_a_claim_says_what_is_done_with_it():
    found = document("claims", "dive_01")
    assert found["answer"]["kind"] == "not-yet"
    assert "prediction" not in found
    assert "not-yet" in printed("claims", "dive_01")
    assert all(row["answer"]["commands"] for row in document("claims")["claims"])


def test_the_command_of_a_claim_prints_what_is_predicted(meshwright):
    found = document("claims", "s65_01", "--predict")
    command = shlex.split(found["answer"]["commands"][0])
    plan = meshwright(*command[1:], "--json").json["plans"][0]
    assert plan["estimate"]["tokens_per_s_per_device"] == found["prediction"]["value"]
    assert plan["plan"] == found["prediction"]["plans"][0]


def test_predictions_stand_beside_what_was_printed():
    text = printed("claims", "hw_05", "--predict")
    assert "computed" in text
    assert "448, +0.0 %" in text


def test_only_claims_are_predicted(meshwright):
    outcome = meshwright("catalog", "models", "--predict")
    assert outcome.exit_code == 2
    assert "--predict is for claims and runs" in outcome.stderr


def test_run_files_are_listed_and_printed():
    rows = document("runs")["runs"]
    assert {"llama3-8b", "llama2-70b-lora", "moe-2t"} <= {row["name"] for row in rows}
    text = printed("runs")
    assert all(row["name"] in text and row["cluster"] in text for row in rows)
    assert printed("runs", "mixtral-8x7b") == document("runs", "mixtral-8x7b")["text"]


@pytest.mark.when_touched  # engines/test_shipped_runs.py plans the shipped runs
def test_one_run_file_is_predicted_on_each_device_of_its_documents():
    found = document("runs", "llama3-8b", "--predict")["predictions"]
    assert [one["cluster"] for one in found] == [
        "mi300x-8x1", "mi325x-8x1", "mi355x-8x1", "h100-8x1", "h200-8x1", "b200-8x1",
    ]  # fmt: skip
    for one in found:
        assert one["reserved_bytes"] < one["memory_bytes"]
        assert one["tokens_per_s_per_device"]["low"] < one["tokens_per_s_per_device"]["value"]
    text = printed("runs", "llama3-8b", "--predict")
    assert "mi300x-8x1" in text
    assert "tokens/s/device" in text
