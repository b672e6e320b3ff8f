"""--accelerator, and --network and --device-memory of `inference` and `import`; `catalog template` and `check`."""

from __future__ import annotations

import pytest
from ruamel.yaml import YAML
from tests.every_member import check_every
from tests.unit.cli.test_import import LLAMA

import meshwright as mw

ASKED = ("--model", "llama3-8b", "--cluster", "my-8x2", "--gbs", 64, "--seq", 4096)
SERVED = ("--model", "llama3-8b", "--cluster", "my-8x2")
LOAD = ("--input-tokens", 512, "--output-tokens", 128)
SAID = "hardware: accelerator my as its file describes it"


@pytest.fixture
def folder(meshwright, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text(meshwright("catalog", "template", "accelerator").stdout, encoding="utf-8")
    for cluster in ("h100-8x2", "my-8x2"):
        (tmp_path / f"{cluster}.yaml").write_text(
            f"model: llama3-8b\ndata: {{sequence_length: 4096}}\nbatch: {{global_sequences: 64}}\ncluster: {cluster}\n",
            encoding="utf-8",
        )
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_every_command_that_plans_takes_the_file(meshwright):
    def check(command: tuple[object, ...]) -> None:
        outcome = meshwright(*command, "--accelerator", "my.toml")
        assert outcome.exit_code == 0, outcome.stderr
        assert SAID in outcome.stdout

    check_every(
        [
            ("plan", *ASKED), ("scale", *ASKED, "--devices", "16,32"), ("estimate", "my-8x2.yaml"),
            ("explain", "my-8x2.yaml"), ("plan", "h100-8x2.yaml", "--cluster", "my-8x2"),
            ("inference", "capacity", *SERVED), ("inference", "estimate", *SERVED, *LOAD),
            ("inference", "plan", *SERVED, *LOAD),
        ],
        check,
    )  # fmt: skip


@pytest.mark.when_touched  # test_every_command_that_plans_takes_the_file asks the same questions
@pytest.mark.usefixtures("folder")
def test_the_functions_plan_as_the_commands_do(meshwright):
    given = {"model": "llama3-8b", "global_sequences": 64, "sequence_length": 4096}
    by_option = meshwright("plan", *ASKED, "--accelerator", "my.toml", "--json").json
    plans = mw.plan(cluster="my-8x2", accelerator="my.toml", top=1, **given)
    assert plans.best.plan.describe() == by_option["plans"][0]["plan"]
    assert mw.scale(cluster="my-8x2", accelerator="my.toml", devices=[16], **given).curve.points
    assert mw.estimate({"cluster": {"name": "my-8x2", "accelerator": "my.toml"}, "model": "llama3-8b",
                        "data": {"sequence_length": 4096}, "batch": {"global_sequences": 64}})  # fmt: skip
    held = mw.inference_capacity(model="llama3-8b", cluster="my-8x2", accelerator="my.toml", device_memory="40GiB")
    assert held.question.cluster.accelerator.memory_bytes == 40 * 2**30


def test_inference_takes_the_memory_and_the_network(meshwright):
    usual = ("inference", "capacity", "--model", "llama3-8b", "--cluster", "h100-8x2")
    small = meshwright(*usual, "--device-memory", "40GiB")
    assert "40.0 GiB of memory a device" in small.stdout
    assert "hardware:" not in meshwright(*usual).stdout
    estimate = ("inference", "estimate", *usual[2:], *LOAD, "--tensor", 16, "--concurrency", 64, "--json")
    itl = [meshwright(*estimate, *more).json["loads"][0]["itl_s"] for more in ((), ("--network", "1Gb/s"))]
    assert itl[1]["value"] > itl[0]["value"]
    assert meshwright(*usual, "--network", "fast").exit_code == 2


@pytest.mark.usefixtures("folder")
def test_import_writes_the_hardware(meshwright, folder):
    (folder / "titan.toml").write_text(LLAMA, encoding="utf-8")
    (folder / "out").mkdir()
    command = ("import", "titan.toml", "--cluster", "my-8x1", "--accelerator", "my.toml", "--network", "25Gb/s")
    outcome = meshwright(*command, "--out", "out/run.yaml")
    assert outcome.exit_code == 0, outcome.stderr
    written = YAML(typ="safe").load((folder / "out" / "run.yaml").read_text(encoding="utf-8"))
    assert written["cluster"] == {
        "name": "my-8x1", "accelerator": str(folder / "my.toml"), "network": "25Gb/s",
    }  # fmt: skip
    assert SAID in meshwright("estimate", "out/run.yaml").stdout


@pytest.mark.parametrize(
    "command",
    [
        ("export", "--out", "files"), ("export", "--out", "files", "--engine", "megatron"),
        ("launch", "--on", "slurm", "--dry-run", "--out", "files", "--time", "1:00:00"),
    ],
)  # fmt: skip
def test_files_for_other_hosts_have_the_accelerator_beside_them(meshwright, folder, command, tmp_path_factory):
    verb, *options = command
    (folder / "run.yaml").write_text(
        f"{(folder / 'my-8x2.yaml').read_text()}train: {{steps: 2}}\nengine: native\n", encoding="utf-8"
    )
    stated = ("--set", "cluster.accelerator=my.toml", "--set", "data.source=synthetic")
    outcome = meshwright(verb, "run.yaml", *options, *stated)
    assert outcome.exit_code == 0, outcome.stderr
    (pinned,) = (folder / "files").glob("*run.yaml")
    asked = meshwright("estimate", pinned, "--json").json
    there = tmp_path_factory.mktemp("host") / "files"
    (folder / "files").rename(there)
    (folder / "my.toml").unlink()
    (found,) = (path for path in there.glob("*run.yaml"))
    assert "accelerator: my.toml" in found.read_text(encoding="utf-8")
    assert meshwright("estimate", found, "--json").json["estimate"]["step"] == asked["estimate"]["step"]
    assert str(folder) not in "".join(path.read_text() for path in there.iterdir() if path.name != "submit.sh")


@pytest.mark.usefixtures("folder")
def test_a_training_for_an_accelerator_that_is_not_here_is_refused_by_its_name(meshwright):
    outcome = meshwright("train", "my-8x2.yaml", "--set", "cluster.accelerator=my.toml", "--set", "train.steps=2")
    assert outcome.exit_code == 3
    assert "the run is for my, and this machine has no accelerator" in outcome.stderr


@pytest.mark.usefixtures("folder")
def test_check_prints_what_is_taken_and_what_is_assumed(meshwright):
    text = meshwright("catalog", "check", "my.toml").stdout
    for words in ("989 TFLOP/s", "3,350 GB/s", "79.647 GiB", "450 GB/s", "Assumed", "energy is not estimated"):
        assert words in text
    document = meshwright("catalog", "check", "my.toml", "--json").json
    assert document["values"]["scale_out_bytes_per_s"] == 50e9
    assert document["source_of"]["scale_out_bytes_per_s"] == "assumed"
    assert "as on Hopper" in document["assumed"]["efficiency"]


def test_check_refuses_with_all_errors(meshwright, folder):
    (folder / "bad.toml").write_text("vendor = 3\nmemory_bytes = 80\n", encoding="utf-8")
    outcome = meshwright("catalog", "check", "bad.toml")
    assert outcome.exit_code == 2
    assert "7 errors" in outcome.stderr
    assert "got 80, allowed: >= 100,000,000; hint: in bytes" in outcome.stderr
    for command in (("catalog", "check"), ("catalog", "check", "none.toml"), ("catalog", "template", "model")):
        assert meshwright(*command).exit_code == 2


@pytest.mark.usefixtures("folder")
def test_a_price_is_asked_for_where_the_goal_needs_one(meshwright):
    outcome = meshwright("plan", *ASKED, "--accelerator", "my.toml", "--objective", "cost")
    assert outcome.exit_code == 2
    assert "no price is known" in outcome.stderr
    priced = meshwright(
        "plan", *ASKED, "--accelerator", "my.toml", "--objective", "cost", "--set", "costs.usd_per_device_hour=2"
    )
    assert priced.exit_code == 0


@pytest.mark.usefixtures("folder")
def test_an_estimate_of_serving_is_of_the_file_as_it_is_now(folder):
    def itl_s() -> float:
        done = mw.inference_estimate(
            model="llama3-8b", cluster="my-8x2", accelerator="my.toml", input_tokens=512, output_tokens=128,
            layout={"tensor": 16}, concurrency=[64],
        )  # fmt: skip
        return done.loads[0].itl.value

    text = (folder / "my.toml").read_text(encoding="utf-8")
    usual = itl_s()
    (folder / "my.toml").write_text(f"scale_out_bytes_per_s = 1e9\n{text}", encoding="utf-8")
    slow_network = itl_s()
    (folder / "my.toml").write_text(text.replace('"Hopper"', '"Ampere"'), encoding="utf-8")
    assert len({usual, slow_network, itl_s()}) == 3
    assert slow_network > usual
