"""Shell scripts that run MaxText: the call that they make, and values that only their caller knows."""

from __future__ import annotations

import shlex

import pytest

from meshwright.answers.run_import import import_configuration
from meshwright.engines.maxtext_scripts import maxtext_call
from meshwright.errors import InputError

SCRIPT = """
set -e
export EXECUTABLE="train" # or train_compile
export OUTPUT_PATH="gs://some-bucket"
export RUN_NAME="llama-$(date +%%Y-%%m-%%d %%H)"
for ARGUMENT in "$@"; do
    IFS='=' read -r KEY VALUE <<< "$ARGUMENT"
    export "$KEY"="$VALUE"
done
python3 -m maxtext.trainers.pre_train.$EXECUTABLE "${CONFIGS:-$PWD/src/configs}"/base.yml run_name=$RUN_NAME\\
    steps=${STEPS:-15} ici_fsdp_parallelism=-1 base_output_directory=$OUTPUT_PATH tokenizer_path=$ASSETS/x\\
    dataset_type=synthetic attention='flash' quantization=""%s
"""


@pytest.fixture
def script(tmp_path):
    folder = tmp_path / "src" / "configs" / "tpu"
    folder.mkdir(parents=True)

    def write(more: str = "", text: str = SCRIPT) -> str:
        (folder / "recipe.sh").write_text(text % more if "%s" in text else text)
        return str(folder / "recipe.sh")

    return write


def settings(source: str) -> dict[str, str]:
    return dict(one.partition("=")[::2] for one in shlex.split(maxtext_call(source).source)[1:])


def test_the_call_of_a_script_is_read(script):
    call = maxtext_call(script())
    assert shlex.split(call.source)[0] == "base.yml"  # MaxText's own, as there is none
    found = settings(script())
    assert (found["steps"], found["attention"], found["ici_fsdp_parallelism"]) == ("15", "flash", "-1")
    assert found["base_output_directory"] == "gs://some-bucket"
    assert "the caller of the script sets run_name, tokenizer_path" in call.notes


def test_the_base_beside_a_script_is_read(script, tmp_path):
    (tmp_path / "src" / "configs" / "base.yml").write_text("remat_policy: minimal\n")
    assert shlex.split(maxtext_call(script()).source)[0] == str(tmp_path / "src" / "configs" / "base.yml")


@pytest.mark.parametrize(
    "call",
    ["python3 -m MaxText.train", "python3 MaxText/train.py", "python -m maxtext.trainers.pre_train.train_compile"],
)
def test_each_way_to_start_is_known(script, call):
    source = script(text=f"{call} MaxText/configs/base.yml steps=3 \\\n  remat_policy=full\n")
    assert settings(source) == {"steps": "3", "remat_policy": "full"}


def test_variables_and_settings_stand_behind_a_script(script):
    assert settings(f"{script()} STEPS=20")["steps"] == "20"
    assert settings(f"{script()} steps=30")["steps"] == "30"


def test_a_value_of_the_caller_that_matters_is_refused(script):
    with pytest.raises(InputError, match=r"recipe\.sh:\d+: the caller of the script sets these values: got '\w+=\$A'"):
        maxtext_call(script(" remat_policy=$A"))
    assert settings(f"{script(' remat_policy=$A')} A=full")["remat_policy"] == "full"


def test_a_file_that_is_no_such_script_is_left_alone(tmp_path):
    (tmp_path / "a.yml").write_text("steps: 3\n")
    for source in (f"{tmp_path}/a.yml steps=4", f"{tmp_path}/none.sh", "'open"):
        assert maxtext_call(source).source == source


def test_a_script_becomes_a_run(script):
    found = import_configuration(script(" global_parameter_scale=8"), engine=None, cluster="h100-8x2")
    model = found.run.model  # eight times base.yml's parameters: twice the width, heads, feed-forward and layers
    assert (model.hidden, model.num_layers, model.attention.num_heads, model.ffn_hidden) == (4096, 32, 32, 14336)
    assert (found.run.engine, found.run.num_steps, found.run.plan.data_shard) == ("maxtext", 15, 16)


def test_settings_alone_are_those_over_its_own_base(script):
    call = maxtext_call(script(text="python3 -m maxtext.trainers.pre_train.train model_name=llama3.1-8b steps=3\n"))
    assert shlex.split(call.source) == ["base.yml", "model_name=llama3.1-8b", "steps=3"]


@pytest.mark.parametrize(
    "call",
    ["python3 -m maxtext.trainers.post_train.rl.train_rl", "python3 src/maxtext/trainers/post_train/rl/train_rl.py"],
)
def test_other_trainers_are_refused(script, call):
    with pytest.raises(InputError, match="runs no pre-training of MaxText"):
        maxtext_call(script(text=f"{call} base.yml steps=3\n"))
