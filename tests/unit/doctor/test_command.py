"""`meshwright doctor` on a node: table, document and exit code."""

from __future__ import annotations

import pytest


@pytest.fixture
def doctor(meshwright, make_host, monkeypatch):
    def run(fake, *options):
        made = make_host(fake.files, fake.commands)
        monkeypatch.setattr("meshwright.cli.commands.doctor.host_at", lambda root: made)
        monkeypatch.setattr("meshwright.doctor.checks.rates.find_spec", lambda name: object())
        return meshwright("doctor", *options)

    return run


def test_a_healthy_node_exits_with_0_and_says_what_was_measured(doctor, healthy):
    outcome = doctor(healthy)
    assert outcome.exit_code == 0, outcome.stdout
    assert "Verdict: pass" in outcome.stdout
    row = next(line for line in outcome.stdout.splitlines() if line.startswith("rates.gemm"))
    assert "8 alike" in row
    assert "1,400" in row


def test_a_failed_check_exits_with_1_and_has_a_hint(doctor, healthy):
    healthy.files["/sys/class/infiniband/mlx5_5/ports/1/state"] = "1: DOWN\n"
    outcome = doctor(healthy)
    assert outcome.exit_code == 1
    assert "hint: rdma.state: cable" in outcome.stdout


def test_the_document_can_be_compared(doctor, meshwright, healthy, tmp_path):
    outcome = doctor(healthy, "--json")
    assert (outcome.json["report"], outcome.json["host"], outcome.json["verdict"]) == (
        "meshwright doctor",
        "gpu-017",
        "pass",
    )
    assert outcome.json["facts"]["devices"] == "8 x AMD Instinct MI355X"
    assert len(outcome.json["devices"]) == 8
    keys = {"check", "status", "where", "measured", "expected", "unit", "message", "hint"}
    assert all(set(check) == keys for check in outcome.json["checks"])
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(outcome.stdout.replace("gpu-017", f"gpu-{name}"))
    both = meshwright("doctor", "--compare", tmp_path / "a.json", tmp_path / "b.json")
    assert (both.exit_code, "No node differs" in both.stdout) == (0, True)


def test_only_and_skip_choose_groups(doctor, healthy):
    checks = doctor(healthy, "--only", "host,log", "--skip", "log", "--json").json["checks"]
    assert {c["check"].split(".")[0] for c in checks} == {"host", "memory", "disk", "time"}


def test_nothing_to_show_is_no_empty_table(doctor, healthy):
    outcome = doctor(healthy, "--only", "rates", "--no-rates")
    assert (outcome.exit_code, "measured" in outcome.stdout) == (0, False)
    assert "Verdict: skipped" in outcome.stdout


def test_a_table_says_why_something_was_not_looked_at(doctor, healthy):
    assert "skipped: rates.device: switched off with --no-rates" in doctor(healthy, "--no-rates").stdout
