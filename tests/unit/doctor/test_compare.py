"""Many nodes: who differs from the majority, and whom to leave out."""

from __future__ import annotations

import json

import pytest

from meshwright.doctor.compare import compare, read_report
from meshwright.doctor.verdict import CheckStatus
from meshwright.errors import InputError


def report(host, *, facts=None, gemm=1300.0, status="pass"):
    checks = [
        {"check": "rates.gemm", "status": status, "where": f"device {i}", "measured": gemm + i, "unit": "TFLOP/s"}
        for i in range(8)
    ]
    same = {
        "driver": "6.14.14", "kernel": "6.8.0-60", "devices": "8 x AMD Instinct MI355X",
        "device links": "8 x PCIe 5 x16", "card MTU": "8 x 9000",
    }  # fmt: skip
    return {
        "report": "meshwright doctor", "version": 1, "host": host, "facts": same | (facts or {}), "checks": checks
    }  # fmt: skip


def cluster(*others):
    return [*(report(f"n{i}") for i in range(6)), *others]


def test_equal_nodes_have_no_outlier():
    found = compare(cluster())
    assert (found.outliers, found.exclude, found.failed) == ((), (), {})
    assert found.majority["driver"] == "6.14.14"
    assert found.majority["rates.gemm"] == 1300.0


@pytest.mark.parametrize(
    ("other", "what", "follows"),
    [
        (report("odd", facts={"driver": "6.12.12"}), "driver", "exclude"),
        (report("odd", facts={"devices": "7 x AMD Instinct MI355X"}), "devices", "exclude"),
        (report("odd", facts={"kernel": "6.8.0-58"}), "kernel", "report"),
        (report("odd", facts={"device links": "7 x PCIe 5 x16, 1 x PCIe 5 x8"}), "device links", "exclude"),
        (report("odd", facts={"card MTU": "8 x 1500"}), "card MTU", "exclude"),
        (report("odd", gemm=1200.0), "rates.gemm", "report"),
        (report("odd", gemm=1000.0), "rates.gemm", "exclude"),
    ],
)
def test_one_node_that_differs(other, what, follows):
    found = compare(cluster(other))
    assert [(o.host, o.what, o.follows) for o in found.outliers] == [("odd", what, follows)]
    assert found.exclude == (("odd",) if follows == "exclude" else ())


def test_an_offset_of_the_clock_has_a_sign(look, healthy):
    for word, sign in (("slow", -1), ("fast", 1)):
        healthy.commands["chronyc"] = f"System time     : 0.410000000 seconds {word} of NTP time\n"
        (found,) = look(healthy, chosen=("host",))["time.offset"]
        assert (found.measured, found.expected, found.status) == (sign * 0.41, 0.1, CheckStatus.WARN)


@pytest.mark.parametrize(
    ("usual_s", "odd_s", "follows"),
    [
        (0.0, 0.05, None), (0.0, 0.4, "report"), (0.0, -0.4, "report"), (0.06, -0.06, "report"), (2.0, 2.05, None),
        (20.0, -20.0, "exclude"), (-20.0, 20.0, "exclude"), (0.0, 41.0, "exclude"),
    ],
)  # fmt: skip
def test_a_clock_is_held_against_those_of_the_others(usual_s, odd_s, follows):
    nodes = cluster(report("odd"))
    for node in nodes:
        offset_s = odd_s if node["host"] == "odd" else usual_s
        node["checks"].append({"check": "time.offset", "status": "warn", "measured": offset_s, "unit": "s"})
    found = compare(nodes)
    assert [(o.host, o.what, o.value, o.majority) for o in found.outliers] == (
        [("odd", "time.offset", odd_s, usual_s)] if follows else []
    )
    assert found.exclude == (("odd",) if follows == "exclude" else ())


def test_the_clock_of_one_node_and_the_words_of_systemd_are_compared_with_nothing():
    nodes = cluster()
    nodes[0]["checks"].append({"check": "time.offset", "status": "fail", "measured": 41.0})
    nodes[1]["checks"].append({"check": "time.offset", "status": "pass", "measured": "synchronised: yes"})
    assert compare(nodes).outliers == ()


def test_the_worst_device_of_a_node_counts():
    slow = report("odd")
    slow["checks"][5]["measured"] = 900.0
    assert compare(cluster(slow)).exclude == ("odd",)


def test_a_node_that_failed_a_check_is_excluded():
    found = compare(cluster(report("odd", status="fail")))
    assert (found.failed, found.exclude) == ({"odd": ("rates.gemm",)}, ("odd",))


def test_without_a_majority_there_is_no_outlier():
    found = compare([report("a"), report("b", facts={"driver": "6.12.12"})])
    assert (found.outliers, found.undecided) == ((), {"driver": {"6.14.14": 1, "6.12.12": 1}})


@pytest.mark.parametrize(("fact", "excluded"), [("devices", ("odd",)), ("driver", ("odd",)), ("kernel", ())])
def test_a_node_that_lacks_what_most_nodes_report_differs(fact, excluded):
    blind = report("odd")
    del blind["facts"][fact]
    found = compare(cluster(blind))
    assert [(o.host, o.what, o.value) for o in found.outliers] == [("odd", fact, "not reported")]
    assert found.exclude == excluded


def test_a_node_without_any_device_is_excluded():
    bare = report("odd")
    bare["facts"] = {"kernel": "6.8.0-60"}
    bare["checks"] = []
    assert compare(cluster(bare)).exclude == ("odd",)


def test_a_fact_that_few_nodes_could_see_is_no_difference():
    seen = report("odd", facts={"container": "docker"})
    assert compare(cluster(seen)).outliers == ()


def test_two_nodes_or_more_each_once():
    with pytest.raises(InputError, match="two nodes or more"):
        compare([report("a")])
    with pytest.raises(InputError, match="two reports"):
        compare([report("a"), report("a")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a JSON document"),
        ("[]", "not a report"),
        ('{"report": "meshwright doctor", "version": 9}', "another version"),
        ('{"report": "meshwright doctor", "version": 1, "host": "x"}', "incomplete"),
    ],
)
def test_files_that_are_no_reports(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_report(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_report(tmp_path / "absent.json")


# --- the command ---


@pytest.fixture
def files(tmp_path):
    def write(reports):
        paths = [tmp_path / f"{r['host']}.json" for r in reports]
        for path, document in zip(paths, reports, strict=True):
            path.write_text(json.dumps(document))
        return paths

    return write


def test_hosts_to_leave_out_one_a_line_and_as_a_file(meshwright, files, tmp_path):
    paths = files(cluster(report("slow", gemm=900.0), report("drift", facts={"driver": "6.12.12"})))
    out = tmp_path / "exclude.txt"
    outcome = meshwright("doctor", "--compare", *paths, "--exclude-file", out)
    assert outcome.exit_code == 1
    assert outcome.stdout.splitlines()[-2:] == ["slow", "drift"]
    assert out.read_text() == "slow\ndrift\n"


def test_the_document_and_a_clean_answer(meshwright, files, tmp_path):
    out = tmp_path / "exclude.txt"
    outcome = meshwright("doctor", "--compare", *files(cluster()), "--exclude-file", out, "--json")
    assert (outcome.exit_code, outcome.json["exclude"], out.read_text()) == (0, [], "")
    assert outcome.json["hosts"] == [f"n{i}" for i in range(6)]


def test_what_the_command_refuses(meshwright, files):
    path = files([report("a")])[0]
    assert meshwright("doctor", path).exit_code == 2
    assert meshwright("doctor", "--compare", path).exit_code == 2
    assert meshwright("doctor", "--exclude-file", "x").exit_code == 2
    unknown = meshwright("doctor", "--only", "device")
    assert (unknown.exit_code, "did you mean 'devices'?" in unknown.stderr) == (2, True)
    assert meshwright("doctor", "--root", "nowhere").exit_code == 2
