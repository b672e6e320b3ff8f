"""--network and --device-memory of the commands that plan, and what they say of them."""

import pytest
from tests.every_member import check_every
from tests.example_runs import PINNED_RUN

import meshwright as mw
from meshwright.errors import InputError

ASKED = ("--model", "llama3-8b", "--cluster", "h100-8x2", "--gbs", 16, "--seq", 4096)
FEW = ("--model", "qwen3-0.6b", "--cluster", "h100-1x2", "--gbs", 2, "--seq", 1024)
"""A question with few plans: a page simulates each of them."""
STATED = ("--network", "25Gb/s Ethernet", "--device-memory", "60GiB")
SAID = "a network of 25Gb/s Ethernet a node", "60.0 GiB of memory a device"


def test_every_command_names_the_hardware(meshwright):
    def check(command: tuple[object, ...]) -> None:
        outcome = meshwright(*command, *STATED)
        assert outcome.exit_code == 0, outcome.stderr
        assert f"hardware: {', '.join(SAID)}\n" in outcome.stdout
        if PINNED_RUN in command:  # nothing is searched for; one function makes the line of all commands
            assert "hardware:" not in meshwright(*command).stdout
        hardware = meshwright(*command, *STATED, "--json").json["request"]["hardware"]
        assert hardware["stated"] == list(SAID)
        assert hardware["scale_out_bytes_per_s"] == 25e9 / 8 / 8
        assert hardware["memory_bytes"] == 60 * 2**30

    commands = [("plan", *ASKED), ("scale", *ASKED, "--devices", "16,32"), ("explain", PINNED_RUN)]
    check_every([*commands, ("estimate", PINNED_RUN, "--set", "parallel.recompute=full")], check)


@pytest.mark.parametrize("cluster", ["h100-8x2", "h100-8x1+h200-8x1"])
def test_a_fabric_that_the_run_names_is_named(meshwright, cluster):
    asked = ("--model", "llama3-8b", "--cluster", cluster, "--gbs", 16, "--seq", 4096, "--top", 1)
    outcome = meshwright("plan", *asked, "--set", "cluster.fabric=gcp-roce-400", *STATED)
    assert f"hardware: fabric gcp-roce-400, {', '.join(SAID)}\n" in outcome.stdout


@pytest.mark.when_touched  # test_every_command_names_the_hardware prints the same line
def test_pages_name_the_hardware(meshwright, tmp_path):
    def check(command: tuple[object, ...]) -> None:
        page = tmp_path / f"{command[0]}.html"
        assert meshwright(*command, *STATED, "--html", page).exit_code == 0
        assert "Hardware: a network of 25Gb/s Ethernet a node" in page.read_text(encoding="utf-8")

    pinned = ("estimate", PINNED_RUN, "--set", "parallel.recompute=full")
    check_every([("plan", *FEW), ("scale", *FEW, "--devices", "2,4"), pinned], check)


def test_the_other_run_of_explain_has_the_same_hardware(meshwright):
    usual = meshwright("explain", PINNED_RUN, "--against", PINNED_RUN, "--json").json
    slow = meshwright("explain", PINNED_RUN, "--against", PINNED_RUN, "--network", "8x100Gb/s", "--json").json
    assert slow["difference"]["step_ms"]["delta"] == 0.0
    assert slow["difference"]["step_ms"]["this"] > usual["difference"]["step_ms"]["this"]


def test_an_option_and_set_do_not_give_one_key_both(meshwright):
    outcome = meshwright("plan", *ASKED, "--network", "25Gb/s", "--set", "cluster.network=1Gb/s")
    assert outcome.exit_code == 2
    assert "--network and --set cluster.network= are both given" in outcome.stderr


@pytest.mark.when_touched  # test_every_command_names_the_hardware asks the same questions
def test_the_function_plans_as_the_command_does(meshwright):
    given = {"model": "llama3-8b", "global_sequences": 16, "sequence_length": 4096, "top": 1}
    stated = {"network": "25Gb/s Ethernet", "device_memory": "60GiB"}
    cluster = {"name": "h100-8x2"}
    by_option = meshwright("plan", *ASKED, *STATED, "--json").json["plans"][0]
    for of in ("h100-8x2", cluster, {"accelerator": "h100", "devices_per_node": 8, "num_nodes": 2}):
        assert mw.plan(cluster=of, **stated, **given).best.plan.describe() == by_option["plan"]
    assert cluster == {"name": "h100-8x2"}  # is not changed


@pytest.mark.when_touched  # test_every_command_names_the_hardware states a network
@pytest.mark.parametrize(
    ("cluster", "is_idle"),
    [("h100-8x1", True), ("h100-8x2", False), ("gb200-4x4", True), ("tpu-v5p-4x4", True), ("h100-8x1+h200-8x1", False)],
)
def test_a_network_that_no_plan_uses_is_said_to_change_nothing(cluster, is_idle, meshwright):
    asked = ("--model", "llama3-8b", "--cluster", cluster, "--gbs", 64, "--seq", 4096, "--top", 1)
    for network in (("--network", "25Gb/s"), ("--set", "cluster.oversubscription=8")):
        outcome = meshwright("plan", *asked, *network)
        assert ("the network that the run states changes nothing" in outcome.stderr) == is_idle
        usual, stated = (meshwright("plan", *asked, *some, "--json").json["plans"][0] for some in ((), network))
        assert not is_idle or usual == stated
    assert "network" not in meshwright("plan", *asked, "--device-memory", "60GiB").stderr


def test_errors_name_the_option_that_was_typed(meshwright):
    def check(wrong: tuple[str, str]) -> None:
        for asked in (ASKED, (PINNED_RUN,)):
            outcome = meshwright("plan", *asked, *wrong)
            assert outcome.exit_code == 2
            assert outcome.stderr.startswith(f"error: {wrong[0]}: "), outcome.stderr

    wrong = [
        ("--network", "fast"),
        ("--device-memory", "900GiB"),
        ("--cluster", "h10-8x4"),
        ("--calibration", "no.json"),
    ]
    check_every(wrong, check)
    outcome = meshwright("plan", *ASKED, "--set", "cluster.network=fast")
    assert outcome.stderr.startswith("error: --set cluster.network: is no rate")


def test_errors_of_the_function_name_the_argument(meshwright):
    given = {"model": "llama3-8b", "cluster": "h100-8x2", "global_sequences": 64, "sequence_length": 4096}
    for wrong in ({"network": "fast"}, {"device_memory": "900GiB"}, {"model": "lama3-8b"}, {"precision": "fp7"}):
        (name,) = wrong
        with pytest.raises(InputError, match=f"^{name}: "):
            mw.plan(**(given | wrong))
