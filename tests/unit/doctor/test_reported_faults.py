"""Faults and healthy states that public reports show, in the words of the kernel, of drivers and of their tools.

`recorded/faults.tsv` has a fault in each row: its source, the node on which it is put, where and what it says there,
the check that must find it, the status of the finding, and words of what that finding tells a person to do. A fault
that no fact shows has "-" for its check, and the reason. `recorded/healthy.tsv` has states that raise no alarm.

    dmesg, dmesg*9    a line of the kernel's log, once or nine times
    xml:PATH          an element of the first device in the report of nvidia-smi
    /FILE, -/FILE     a file of the node (a pattern: each that matches), and one that is absent with all below it
    $ COMMAND         what a command prints; `$!` and fails, `$?` the reason that it does not end, `$+` behind its
                      answer, `$~` in its answer in place of something, `$s` after how many seconds it answers
    env:NAME          a variable of the environment
    measure           what a device reaches: `gemm=350`, or !ERROR
    &&                between places, and between their texts, where one fault shows in several
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import fnmatch
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.every_member import check_every

from meshwright.doctor.checks import GROUP_NAMES, Node, groups
from meshwright.doctor.devices import Devices, find_devices
from meshwright.doctor.examine import examine
from meshwright.doctor.host import CommandOutput, Unseen
from meshwright.doctor.settings import notes, settings, survey

RECORDED, ROOT = Path(__file__).parent / "recorded", Path(__file__).parents[3]
BAD = ("warn", "fail")
MEASURE = f"{sys.executable} -m meshwright.doctor.measure"
REPORT = "nvidia-smi -q -x"


def rows(name):
    with (RECORDED / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


FAULTS, HEALTHY = rows("faults.tsv"), rows("healthy.tsv")
SEEN = [row for row in FAULTS if row["check"] != "-"]


def put(node, place, text, environment):
    """Put one state on a node."""
    kind, _, name = place.partition(" ")
    if place.startswith("dmesg"):
        times = int(place.partition("*")[2] or 1)
        node.commands["dmesg"] = "".join(f"[{90_000 + i}.000001] {text}\n" for i in range(times))
    elif place.startswith("xml:"):
        put_in_report(node, place.removeprefix("xml:"), text)
    elif place.startswith("env:"):
        environment[place.removeprefix("env:")] = text
    elif place == "measure":
        node.commands[f"{MEASURE} device"] = reached(
            json.loads(node.commands[f"{MEASURE} device"].splitlines()[-1]), text
        )
    elif place.startswith("$"):
        put_in_command(node, kind, name.replace("MEASURE", MEASURE), text)
    elif place.startswith("-"):
        node.remove(place.removeprefix("-"))
    else:
        node.files.update(dict.fromkeys(fnmatch.filter(node.files, place) if "*" in place else [place], f"{text}\n"))


def put_in_report(node, path, text):
    *parents, tag = path.split("/")
    log = ElementTree.fromstring(node.commands[REPORT].stdout)
    place = log.find("gpu")
    for name in (*parents, tag):
        own = place.find(name)
        place = ElementTree.SubElement(place, name) if own is None else own
    place.text = text
    node.commands[REPORT] = dataclasses.replace(node.commands[REPORT], stdout=ElementTree.tostring(log, "unicode"))


def put_in_command(node, kind, name, text):
    now = node.commands.get(name, "")
    if kind == "$~":
        old, _, new = text.partition(" => ")
        assert old in now
        node.commands[name] = now.replace(old, new, 1)
    elif kind == "$+":
        node.commands[name] = dataclasses.replace(now, stdout=f"{now.stdout}{text}\n")
    elif kind == "$s":
        node.commands[name] = dataclasses.replace(now, seconds=float(text))
    else:
        node.commands[name] = {
            "$": f"{text}\n", "$!": CommandOutput(code=9, stdout=f"{text}\n"), "$?": Unseen(text),
        }[kind]  # fmt: skip


def reached(answer, text):
    name, _, value = text.partition("=")
    if name.startswith("!"):
        return CommandOutput(code=1, stdout="", stderr=f"{text[1:]}\n")
    change = {
        "gemm": ("gemm_flops_per_s", 1e12), "copy": ("copy_bytes_per_s", 1e9),
        "to_device": ("to_device_bytes_per_s", 1e9),
    }  # fmt: skip
    if name in change:
        return json.dumps(answer | {change[name][0]: float(value) * change[name][1]})
    return json.dumps(answer | {f"is_{name.removeprefix('is_')}": value == "true"})


@pytest.fixture
def place_on(make_host, healthy, nvidia, monkeypatch, tmp_path):
    """`place_on(row)`: the node of the row with its state, and no other. Its files are written once."""
    monkeypatch.setattr("meshwright.doctor.checks.rates.find_spec", lambda name: object())
    bases = {"amd": healthy, "any": healthy, "nvidia": nvidia}
    written = {}

    def place(row):
        base = bases[row["node"]]
        node, environment = copy.deepcopy(base), {}
        texts = row["text"].replace("\\n", "\n").replace("\\t", "\t").split(" && ")
        places = row["place"].replace("NODE", str(tmp_path / "node")).split(" && ")
        assert len(texts) in (1, len(places))
        for place, text in zip(places, texts * (len(places) // len(texts)), strict=True):
            put(node, place, text, environment)
        root = tmp_path / "node"
        for name in written.keys() - node.files.keys():
            (root / name.lstrip("/")).unlink()
        host = make_host({n: t for n, t in node.files.items() if written.get(n) != t}, node.commands, environment)
        written.clear()
        written.update(node.files)
        return host

    return place


def verdicts_of(host, chosen):
    devices = Devices() if chosen == ("log",) else find_devices(host)
    return examine(Node(host=host, devices=devices), chosen=chosen).verdicts


def test_a_reported_fault_is_found_with_what_to_do(place_on):
    group_of = {name: group for group, names in groups().items() for name in names}

    def check(row):
        host = place_on(row)
        kind, _, name = row["check"].partition(" ")
        if kind == "tune":
            (setting,) = (s for s in settings() if s.name == name)
            assert row["action"] in {v.target for v in survey(host, (setting,)) if v.current != v.target}
            return
        if kind == "note":
            (noted,) = (n for n in notes(host) if n.name == name)
            assert (noted.is_well, row["action"] in noted.how) == (False, True)
            return
        chosen = (group_of[kind],) if kind in group_of else ("devices", "limits", "rates", "network", "host")
        found = [v for v in verdicts_of(host, chosen) if v.check == kind and name in ("", v.where)]
        hints = [(v.status.value, v.hint or "") for v in found if v.status in BAD]
        assert all(hint for _, hint in hints)
        assert any(status == row["status"] and row["action"] in hint for status, hint in hints), hints

    assert len(SEEN) >= 187
    check_every(SEEN, check, name=lambda row: (row["source"], row["place"][:60], row["text"][:60]))


def test_a_healthy_state_is_no_alarm(place_on):
    def check(row):
        found = verdicts_of(place_on(row), GROUP_NAMES)
        assert not [(v.check, v.where, v.message) for v in found if v.status in BAD]

    check_every(HEALTHY, check, name=lambda row: (row["source"], row["place"][:60]))


def test_every_fault_is_another_one_and_has_a_source():
    states = [(row["place"], row["text"], row["node"]) for row in FAULTS + HEALTHY]
    assert len(set(states)) == len(states)
    assert all(row["source"] and row["action"] for row in FAULTS)


def test_the_guide_says_how_many_are_found():
    text = (ROOT / "docs/guides/doctor.md").read_text(encoding="utf-8")
    assert f"{len(SEEN)} of {len(FAULTS)} faults of public reports" in text
    assert f"none of {len(HEALTHY)} states that are well" in text
