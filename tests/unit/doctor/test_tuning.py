"""Settings are changed all or none, and come back whatever happens in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.doctor.host import Host
from meshwright.doctor.settings import (
    SettingAction,
    SettingComparison,
    choose,
    held,
    notes,
    settings,
    survey,
    target_of,
)
from meshwright.doctor.tuning import apply, restore
from meshwright.errors import InputError, UnknownNameError

GOVERNOR = "/sys/devices/system/cpu/cpu{}/cpufreq/scaling_governor"
IDLE = "/sys/devices/system/cpu/cpu{}/cpuidle/state{}/"
NODE = {
    "/proc/sys/kernel/random/boot_id": "boot-1\n",
    "/proc/sys/kernel/hostname": "node7\n",
    "/proc/sys/kernel/numa_balancing": "1\n",
    "/proc/sys/kernel/nmi_watchdog": "0\n",
    "/proc/sys/vm/drop_caches": "",
    "/proc/sys/vm/swappiness": "60\n",
    "/proc/sys/net/core/rmem_max": "212992\n",
    "/proc/sys/net/core/wmem_max": "536870912\n",
    "/proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t6291456\n",
    **{GOVERNOR.format(i): "powersave\n" for i in range(12)},
    **{IDLE.format(0, s) + "disable": "0\n" for s in range(3)},
    **{IDLE.format(0, s) + "latency": f"{latency}\n" for s, latency in enumerate((0, 1, 100))},
}


@pytest.fixture
def node(make_host):
    return make_host(NODE)


@pytest.fixture
def state(tmp_path):
    return tmp_path / "saved" / "state.json"


def contents(host):
    return {name: host.read(name) for name in NODE if name != "/proc/sys/vm/drop_caches"}


def of(values, name):
    return [v for v in values if v.setting.name == name]


@dataclass(frozen=True, kw_only=True)
class Stubborn(Host):
    """A node whose kernel refuses some writes."""

    refuses: dict[str, object] = field(default_factory=dict)  # path -> exception, or a value kept instead

    def write(self, name, value):
        what = self.refuses.get(name)
        if isinstance(what, BaseException):
            raise what
        super().write(name, value if what is None else str(what))


def stubborn(host, **refuses):
    return Stubborn(root=host.root, runner=host.runner, environment={}, **refuses)


# --- what would change ---


def test_every_setting_says_why_at_what_risk_and_who_says_so():
    names = [s.name for s in settings()]
    assert len(names) == len(set(names)) >= 20
    for s in settings():
        assert all((s.why, s.risk, s.source, s.wanted)), s.name
        assert s.path.startswith(("/proc/sys/", "/sys/")), s.name


def test_a_survey_finds_each_file_and_says_what_it_lacks(node):
    values = survey(node, settings())
    assert [v.path for v in of(values, "cpu-governor")] == [GOVERNOR.format(i) for i in range(12)]
    assert {v.action for v in of(values, "cpu-governor")} == {SettingAction.CHANGE}
    assert of(values, "nmi-watchdog")[0].action is SettingAction.NONE
    absent = of(values, "huge-pages")[0]
    assert (absent.action, absent.reason) == (SettingAction.SKIP, "not on this node")


def test_only_idle_states_that_wake_slowly_are_meant(node):
    assert [v.path for v in of(survey(node, settings()), "cpu-idle-states")] == [IDLE.format(0, 2) + "disable"]


def test_a_larger_buffer_stays(node):
    values = survey(node, settings())
    assert of(values, "socket-read-buffer")[0].target == "67108864"
    assert of(values, "socket-write-buffer")[0].action is SettingAction.NONE
    assert of(values, "tcp-read-buffer")[0].target == "4096 131072 33554432"


def test_what_may_not_be_written_is_skipped_before_anything_is(node, state):
    node.path("/proc/sys/vm/swappiness").chmod(0o444)
    values = survey(node, settings())
    swappiness = of(values, "swappiness")[0]
    assert (swappiness.action, swappiness.reason, swappiness.current) == (SettingAction.SKIP, "read-only", "60")
    assert apply(node, values, state=state).is_done
    assert node.read("/proc/sys/vm/swappiness") == "60"


def test_a_file_with_something_else_in_it_is_skipped(make_host):
    host = make_host({"/proc/sys/net/core/rmem_max": "many\n"})
    value = survey(host, choose(only=("socket-read-buffer",)))[0]
    assert value.action is SettingAction.SKIP
    assert "not numbers" in (value.reason or "")


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 2**40))
def test_at_least_never_lowers_and_is_reached_in_one_step(a, b, c):
    setting = choose(only=("tcp-read-buffer",))[0]
    target = target_of(setting, f"{a} {b} {c}")
    assert all(int(t) >= x for t, x in zip(target.split(), (a, b, c), strict=True))
    assert target_of(setting, target) == target


def test_a_choice_is_what_stands_in_brackets():
    assert held(SettingComparison.CHOICE, "always defer defer+madvise [madvise] never") == "madvise"


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'swappiness'"):
        choose(skip=("swapiness",))


# --- apply and restore ---


def test_apply_then_restore_leaves_every_file_as_it_was(node, state):
    before = contents(node)
    outcome = apply(node, survey(node, settings()), state=state)
    assert outcome.is_done
    assert node.read(GOVERNOR.format(11)) == "performance"
    assert node.read("/proc/sys/vm/drop_caches") == "3"
    assert node.read(IDLE.format(0, 1) + "disable") == "0"
    assert of(survey(node, settings()), "cpu-governor")[0].action is SettingAction.NONE
    assert restore(node, state=state).is_done
    # a kernel prints blanks as it likes
    assert contents(node) == {n: " ".join(v.split()) if "tcp_rmem" in n else v for n, v in before.items()}
    assert not state.exists()


def test_applying_twice_keeps_what_was_saved_first(node, state):
    apply(node, survey(node, choose(only=("swappiness",))), state=state)
    node.write("/proc/sys/vm/swappiness", "30")  # somebody else
    apply(node, survey(node, settings()), state=state)
    saved = {s["path"]: s["value"] for s in json.loads(state.read_text())["saved"]}
    assert saved["/proc/sys/vm/swappiness"] == "60"
    assert saved[GOVERNOR.format(0)] == "powersave"
    restore(node, state=state)
    assert node.read("/proc/sys/vm/swappiness") == "60"


def test_after_a_restart_the_kernels_own_values_are_saved_anew(node, state):
    apply(node, survey(node, choose(only=("swappiness",))), state=state)
    node.write("/proc/sys/kernel/random/boot_id", "boot-2")
    node.write("/proc/sys/vm/swappiness", "10")
    apply(node, survey(node, choose(only=("swappiness",))), state=state)
    assert [s["value"] for s in json.loads(state.read_text())["saved"]] == ["10"]


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [(OSError(16, "Device or resource busy"), "busy"), ("61", "holds '61' after '1' was written")],
    ids=["refused", "kept"],
)
def test_a_failure_midway_puts_everything_back(node, state, refusal, reason):
    before = contents(node)
    host = stubborn(node, refuses={"/proc/sys/vm/swappiness": refusal})
    if isinstance(refusal, str):  # a kernel that keeps a value of its own keeps it on the way back too
        outcome = apply(host, survey(host, settings()), state=state)
        assert [f.path for f in outcome.stuck] == ["/proc/sys/vm/swappiness"]
        assert state.exists(), "what could not be put back is still saved"
        before["/proc/sys/vm/swappiness"] = "61"
    else:
        outcome = apply(host, survey(host, settings()), state=state)
        assert outcome.stuck == ()
        assert not state.exists()
    assert outcome.failure is not None
    assert reason in outcome.failure.reason
    assert outcome.changed == ()
    assert len(outcome.put_back) >= 13
    assert contents(host) == before


def test_whichever_file_is_refused_all_or_none_are_changed(node, state):
    before = contents(node)
    changes = [v.path for v in survey(node, settings()) if v.action is SettingAction.CHANGE]
    for path in changes:
        host = stubborn(node, refuses={path: OSError(16, "Device or resource busy")})
        outcome = apply(host, survey(host, settings()), state=state)
        assert (outcome.failure.path, contents(node), state.exists()) == (path, before, False)
    assert len(changes) == 18


def test_a_failure_midway_leaves_an_earlier_state_file_as_it_was(node, state):
    apply(node, survey(node, choose(only=("numa-balancing",))), state=state)
    text = state.read_text()
    host = stubborn(node, refuses={"/proc/sys/vm/swappiness": OSError(1, "Operation not permitted")})
    assert not apply(host, survey(host, settings()), state=state).is_done
    assert state.read_text() == text
    assert node.read("/proc/sys/kernel/numa_balancing") == "0", "what was applied before stays"


def test_an_action_that_fails_comes_before_any_change(node, state):
    host = stubborn(node, refuses={"/proc/sys/vm/drop_caches": OSError(1, "Operation not permitted")})
    before = contents(host)
    outcome = apply(host, survey(host, settings()), state=state)
    assert outcome.failure is not None
    assert (outcome.put_back, contents(host)) == ((), before)


def test_ctrl_c_between_two_writes_puts_back_and_goes_on_up(node, state):
    before = contents(node)
    host = stubborn(node, refuses={"/proc/sys/vm/swappiness": KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        apply(host, survey(host, settings()), state=state)
    assert contents(node) == before
    assert not state.exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from meshwright.doctor.host import Host
from meshwright.doctor.settings import settings, survey
from meshwright.doctor.tuning import apply

class Killed(Host):
    def write(self, name, value):
        if name.endswith("swappiness"):
            os.kill(os.getpid(), signal.SIGKILL)
        super().write(name, value)

host = Killed(root=Path(sys.argv[1]), environment={})
apply(host, survey(host, settings()), state=Path(sys.argv[2]))
"""


def test_a_kill_midway_leaves_enough_to_restore(node, state):
    before = contents(node)
    command = [sys.executable, "-c", KILLED, str(node.root), str(state)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert node.read(GOVERNOR.format(0)) == "performance"
    assert restore(node, state=state).is_done
    assert {k: v.split() for k, v in contents(node).items()} == {k: v.split() for k, v in before.items()}


@dataclass(frozen=True, kw_only=True)
class ActivePstate(Host):
    """Under the governor performance this kernel refuses every other energy preference."""

    def write(self, name, value):
        is_preference = name.endswith("energy_performance_preference")
        governor = name.replace("energy_performance_preference", "scaling_governor")
        if is_preference and value != "performance" and self.read(governor) == "performance":
            raise OSError(16, "Device or resource busy")
        super().write(name, value)


def test_governor_and_energy_preference_come_back_where_one_rules_the_other(make_host, state):
    preference = GOVERNOR.format(0).replace("scaling_governor", "energy_performance_preference")
    made = make_host({GOVERNOR.format(0): "powersave\n", preference: "balance_performance\n"})
    host = ActivePstate(root=made.root, runner=made.runner, environment={})
    assert apply(host, survey(host, settings()), state=state).is_done
    assert host.read(preference) == "performance"
    assert restore(host, state=state).is_done
    assert (host.read(GOVERNOR.format(0)), host.read(preference)) == ("powersave", "balance_performance")


def test_what_cannot_be_restored_stays_saved(node, state):
    apply(node, survey(node, settings()), state=state)
    host = stubborn(node, refuses={"/proc/sys/vm/swappiness": OSError(5, "Input/output error")})
    outcome = restore(host, state=state)
    assert [f.path for f in outcome.stuck] == ["/proc/sys/vm/swappiness"]
    assert [s["path"] for s in json.loads(state.read_text())["saved"]] == ["/proc/sys/vm/swappiness"]
    assert restore(node, state=state).is_done
    assert node.read("/proc/sys/vm/swappiness") == "60"


def test_nothing_is_changed_when_the_values_cannot_be_saved(node, tmp_path):
    (tmp_path / "file").write_text("")
    before = contents(node)
    with pytest.raises(InputError, match="nothing is changed"):
        apply(node, survey(node, settings()), state=tmp_path / "file" / "state.json")
    assert contents(node) == before


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"version": 9, "boot_id": null, "saved": []}',
        '{"version": 1, "boot_id": null, "saved": [{"setting": "swappiness", "path": "/etc/passwd", "value": ""}]}',
        '{"version": 1, "boot_id": null, "saved": [{"setting": "cpu-governor", "value": "x", "path": '
        '"/sys/devices/system/cpu/cpu0/../../../../etc/cpufreq/scaling_governor"}]}',
    ],
)
def test_a_state_file_that_is_damaged_or_names_other_files_is_refused(node, state, text):
    state.parent.mkdir()
    state.write_text(text)
    with pytest.raises(InputError):
        restore(node, state=state)


# --- what is only noted ---

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max open files            1024                 1048576              files
Max locked memory         unlimited            unlimited            bytes
"""


def test_notes_say_what_a_person_has_to_do(make_host):
    host = make_host(
        {"/proc/self/limits": LIMITS, "/proc/cmdline": "quiet iommu=pt", "/sys/class/infiniband/x": ""},
        {"systemctl is-active irqbalance": "active\n", "lspci": "\t\tACSCtl:\tSrcValid- TransBlk-\n"},
    )
    seen = {n.name: n for n in notes(host)}
    assert (seen["open-files-of-a-process"].current, seen["open-files-of-a-process"].is_well) == ("1024", False)
    assert seen["memlock"].is_well
    assert seen["interrupt-balancing"].is_well is False
    assert seen["iommu"].is_well
    assert seen["access-control-services"].is_well
    assert seen["relaxed-ordering"].is_well is None


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("iommu=pt", "pt"),
        ("amd_iommu=on iommu=pt", "pt"),
        ("quiet iommu.passthrough=1", "1"),
        ("amd_iommu=off", "off"),
        ("intel_iommu=off quiet", "off"),
        ("iommu=off", "off"),
        ("iommu=on", "none"),
        ("intel_iommu=on", "none"),
        ("amd_iommu=pt", "none"),
        ("iommu.passthrough=0", "none"),
        ("my_iommu=pt", "none"),
        ("quiet", "none"),
    ],
)
def test_every_spelling_of_passthrough_counts(make_host, words, value):
    seen = {n.name: n for n in notes(make_host({"/proc/cmdline": words + "\n", "/sys/class/infiniband/x": ""}))}
    assert (seen["iommu"].current, seen["iommu"].is_well) == (value, value != "none")


def test_notes_about_network_cards_need_one(make_host):
    assert {n.name for n in notes(make_host({"/proc/self/limits": LIMITS}))} == {
        "memlock",
        "open-files-of-a-process",
        "interrupt-balancing",
    }


# --- the command ---


@pytest.fixture
def tune(meshwright, node, state):
    return lambda *options: meshwright("tune", "system", "--root", node.root, "--state", state, *options)


def test_a_dry_run_writes_nothing(tune, node, state):
    before = contents(node)
    outcome = tune()
    assert outcome.exit_code == 0
    assert "--apply would write 18 files" in outcome.stdout
    assert (contents(node), state.exists()) == (before, False)


def test_the_document_says_all_of_every_setting(tune):
    document = tune("--json", "--only", "swappiness").json
    assert (document["mode"], [s["name"] for s in document["settings"]]) == ("dry run", ["swappiness"])
    setting = document["settings"][0]
    assert {"why", "risk", "source", "wanted"} <= set(setting)
    assert setting["values"] == [
        {"path": "/proc/sys/vm/swappiness", "current": "60", "target": "1", "action": "change", "reason": None}
    ]


def test_apply_and_restore_by_command(tune, node):
    assert tune("--apply", "--skip", "address-randomization, watchdog").exit_code == 0
    assert node.read("/proc/sys/vm/swappiness") == "1"
    document = tune("--restore", "--json").json
    assert (document["mode"], document["done"], len(document["changed"])) == ("restore", True, 17)
    assert node.read("/proc/sys/vm/swappiness") == "60"
    again = tune("--restore")
    assert again.exit_code == 2
    assert "nothing is saved" in again.stderr


def test_apply_where_nothing_may_be_written_answers_no(tune, node):
    for name in NODE:
        node.path(name).chmod(0o444)
    document = tune("--apply", "--json")
    assert (document.exit_code, document.json["changed"]) == (1, [])


def test_a_failure_answers_no_and_says_what_was_put_back(tune, monkeypatch):
    write = Host.write

    def refuse(self, name, value):
        if name.endswith("swappiness"):
            raise OSError(16, "Device or resource busy")
        write(self, name, value)

    monkeypatch.setattr(Host, "write", refuse)
    outcome = tune("--apply")
    assert outcome.exit_code == 1
    assert "swappiness could not be changed" in outcome.stdout
    assert "Nothing is changed." in outcome.stdout


def test_opposites_and_names_that_are_not_there(tune):
    assert tune("--apply", "--restore").exit_code == 2
    assert tune("--only", "swapiness").exit_code == 2
    assert tune("--restore", "--only", "swappiness").exit_code == 2


def test_a_root_that_is_not_there(meshwright):
    outcome = meshwright("tune", "system", "--root", "nowhere")
    assert (outcome.exit_code, "nowhere" in outcome.stderr) == (2, True)


def test_why_tells_risk_and_source(tune):
    assert "Risk: security" in tune("--why").stdout


def test_the_group_shows_what_it_has(meshwright):
    assert "system" in meshwright("tune").stdout
    assert meshwright("tune", "systm").exit_code == 2
