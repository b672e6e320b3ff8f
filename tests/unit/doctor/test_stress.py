"""A stress: results, rates and counters of errors before and after; the processors here, devices as files."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from tests.unit.doctor.conftest import GPU, MEASURE

from meshwright.doctor.checks import Node
from meshwright.doctor.checks.stress import CHECKS
from meshwright.doctor.devices import Device, find_devices
from meshwright.doctor.verdict import DATA, CheckStatus
from meshwright.files import toml_table

TABLE = toml_table(DATA / "stress.toml")
STRESSED = {
    "windows": 20,
    "wrong": 0,
    "best_flops_per_s": 1400e12,
    "sustained_flops_per_s": 1380e12,
    "device": "MI355X",
}
CORRECTED = GPU.format("0000:05:00.0") + "/aer_dev_correctable"


@pytest.fixture
def stress(make_host, healthy, monkeypatch):
    """`stress(answer, files)`: verdicts of a stress while which these files change."""
    monkeypatch.setattr("meshwright.doctor.checks.rates.find_spec", lambda name: object())

    def run(answer=STRESSED, files=None, *, removed=""):
        def change(arguments, timeout_s):
            output = commands(arguments, timeout_s)
            if "stress" in arguments:
                assert timeout_s > 60
                make_host(files or {})
                if removed:
                    (root / removed.lstrip("/")).unlink(missing_ok=True)
            return output

        healthy.commands[f"{MEASURE} stress"] = json.dumps(STRESSED | answer)
        node = make_host(healthy.files, healthy.commands)
        commands, root = node.runner, node.root
        host = replace(node, runner=change)
        return list(CHECKS["stress.device"](Node(host=host, devices=find_devices(host), stress_s=60.0)))

    return run


def bad(verdicts):
    return {(v.check, v.status, v.message) for v in verdicts if v.status is not CheckStatus.PASS}


def test_a_node_that_stays_well(stress):
    verdicts = stress({})
    assert bad(verdicts) == set()
    assert [v.check for v in verdicts] == ["stress.result", "stress.rate"] * 8 + ["stress.errors"]


@pytest.mark.parametrize("name", TABLE)
def test_every_counter_that_grows_is_a_finding_of_its_status(name, stress, healthy):
    entry = TABLE[name]
    assert entry["status"] in ("warn", "fail")
    assert entry["hint"]
    assert entry["source"]
    if "device" in entry:
        assert entry["device"] in Device.__dataclass_fields__
        path = "/sys/class/drm/card3/device/ras/umc_err_count"
        files = {path: {"uncorrected_errors": "ue: 1\nce: 3\n", "corrected_errors": "ue: 0\nce: 9\n"}[entry["device"]]}
    else:
        path = re.sub(r"\*", "0", entry["files"].replace("/mc*/", "/mc0/"), count=0)
        path = path.replace("devices/0/", "devices/0000:05:00.0/").replace("infiniband/0", "infiniband/mlx5_0")
        path = path.replace("ports/0", "ports/1")
        line = "TOTAL_ERR_X {}\n" if "number" in entry else "{}\n"
        healthy.files[path], files = line.format(3), {path: line.format(5)}
    assert bad(stress({}, files)) == {("stress.errors", CheckStatus(entry["status"]), name)}


def test_wrong_results_slow_devices_and_lost_counters(stress, healthy):
    assert {m[:2] for m in bad(stress({"wrong": 1}))} == {("stress.result", CheckStatus.FAIL)}
    assert {m[:2] for m in bad(stress({"sustained_flops_per_s": 900e12}))} == {("stress.rate", CheckStatus.FAIL)}
    (lost,) = bad(stress({}, removed=CORRECTED))
    assert lost[:2] == ("stress.errors", CheckStatus.FAIL)
    assert "not after it" in lost[2]


def test_processors_are_stressed_where_there_is_no_device(meshwright, tmp_path):
    pytest.importorskip("torch")
    done = meshwright("doctor", "--only", "stress", "--stress", "1", "--json")
    checks = {c["check"]: c for c in done.json["checks"]}
    assert checks["stress.result"]["where"] == "processors"
    assert (checks["stress.result"]["status"], checks["stress.result"]["measured"]) == ("pass", 0)
    assert checks["stress.rate"]["measured"] > 0


@pytest.mark.parametrize("options", [("--only", "stress"), ("--stress", "5", "--skip", "stress"), ("--stress", "0")])
def test_a_stress_without_its_length_is_bad_input(options, meshwright):
    assert meshwright("doctor", *options).exit_code == 2
