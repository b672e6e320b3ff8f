"""The sbatch script: its text, and that bash and shellcheck take it."""

from __future__ import annotations

import shutil
import subprocess
from difflib import unified_diff
from pathlib import Path

import pytest

from meshwright.errors import InfeasibleError, InputError
from meshwright.launch import start
from meshwright.launch.site import ContainerRuntime, SlurmSite
from meshwright.launch.slurm import SlurmSettings, dispatch, script
from meshwright.launch.start import job_state

USUAL = SlurmSite(partition="gpu", account="llm", time="1-00:00:00", directives=("--constraint=mi355x",))
PYXIS = USUAL.model_copy(
    update={"container": "registry.example#train:1", "mounts": ("/data:/data",), "cpus_per_task": 12}
)
APPTAINER = USUAL.model_copy(
    update={"container": "/images/train.sif", "runtime": ContainerRuntime.APPTAINER, "setup": ("module load rocm",)}
)
SITES = {"slurm-bare": USUAL, "slurm-pyxis": PYXIS, "slurm-apptainer": APPTAINER}


def settings(site):
    return SlurmSettings(site=site, python="python3", workdir=Path("/shared/ann"))


def test_the_script_is_the_golden_one(make_request, is_golden):
    is_golden(script(make_request(), settings(USUAL)), "slurm-bare.sh")


@pytest.mark.parametrize("name", ["slurm-pyxis", "slurm-apptainer"])
def test_a_container_changes_these_lines(name, make_request, is_golden):
    bare, changed = (script(make_request(), settings(site)).splitlines() for site in (USUAL, SITES[name]))
    is_golden("\n".join(unified_diff(bare, changed, "slurm-bare", name, n=0, lineterm="")) + "\n", f"{name}.diff")


@pytest.mark.parametrize("name", SITES)
def test_bash_and_shellcheck_take_the_script(name, make_request, tmp_path):
    path = tmp_path / "job.sh"
    path.write_text(script(make_request(), settings(SITES[name])))
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not on this machine")
    done = subprocess.run(["shellcheck", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_nothing_of_the_run_can_leave_its_quotes(make_request, tmp_path):
    """A file name full of the shell's own characters reaches the process as it is."""
    nasty = "a b$(touch pwned)'\"`;&"
    request = make_request(
        argv=("python", "-c", "import sys; print(sys.argv[1])", nasty), folder=Path("out"), environment=()
    )
    text = script(request, settings(SlurmSite()))
    step = text[text.index("  bash -c") : text.index(" &\nstep=")]
    done = subprocess.run(["bash", "-c", step.strip()], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == nasty + "\n", done.stderr
    assert not (tmp_path / "pwned").exists()


def test_files_and_commands_of_a_dispatch(make_request):
    found = dispatch(make_request(), settings(USUAL))
    assert set(found.files) == {"runs/first/run.yaml", "runs/first/submit.sh"}
    assert found.commands == (("sbatch", "--parsable", "runs/first/submit.sh"),)
    assert found.notes == ()


def test_a_resumed_job_counts_a_restart(make_request):
    text = script(make_request(resume=True), settings(USUAL))
    assert "export MESHWRIGHT_RESTARTS=$((${SLURM_RESTART_COUNT:-0} + 1))" in text


def test_devices_are_requested_once(make_request):
    own = SlurmSite(directives=("--gres=gpu:mi355x:8",))
    assert "--gpus-per-node" not in script(make_request(), settings(own))
    assert "--gpus-per-node" not in script(make_request(vendor=None), settings(USUAL))
    assert "no devices are requested" in " ".join(dispatch(make_request(vendor=None), settings(USUAL)).notes)


def test_processes_are_bound_before_the_engine_starts(make_request):
    text = script(make_request(numa=True), settings(USUAL))
    assert "\n  python3 -m meshwright.engines.bound python3 -m meshwright train " in text
    assert "meshwright.engines.bound" not in script(make_request(), settings(USUAL))


@pytest.mark.parametrize("time", ["3", "2:01", "1:00:00", "1-00", "1-00:30", "0", "00:00:00", "UNLIMITED", "infinite"])
def test_a_time_limit_with_room_to_save_is_taken(time, make_request):
    assert f"#SBATCH --time={time}\n" in script(make_request(), settings(USUAL.model_copy(update={"time": time})))


def test_names_and_paths_of_any_kind_are_quoted(make_request):
    nasty = "it's 100%j of $x"
    text = script(make_request(name=nasty, folder=Path(nasty)), settings(SlurmSite()))
    quoted = "'it'\"'\"'s 100%%j of $x/slurm-%j.log'"
    assert f"#SBATCH --output={quoted}\n" in text
    assert "100%%j of $x/logs/rank-%5t.log" in text
    assert "mkdir -p 'it'\"'\"'s 100%j of $x/logs'" in text


def test_lines_of_the_site_run_before_unset_variables_are_errors_and_do_not_win_over_what_is_said(
    make_request, tmp_path
):
    """As `module` and `conda activate` do: read unset variables, and set what the run sets too."""
    setup = ('seen="[$NOT_SET_ANYWHERE]"', "export NCCL_DEBUG=TRACE")
    text = script(make_request(), settings(SlurmSite(setup=setup)))
    text = text[: text.index("mkdir -p")] + '\necho "$seen $NCCL_DEBUG"\n'
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, capture_output=True, text=True, env={"SLURM_JOB_ID": "1"})
    assert done.stdout == "[] WARN\n", done.stderr


@pytest.mark.parametrize("site", [PYXIS, APPTAINER], ids=["pyxis", "apptainer"])
def test_the_variables_are_set_inside_a_container_whose_own_would_win(site, make_request):
    text = script(make_request(), settings(site))
    inside = text[text.index("bash -c") :].partition("python3 -m meshwright")[0]
    if site is APPTAINER:
        inside = inside.partition("/images/train.sif")[2]
    assert "env " in inside
    assert " NCCL_DEBUG=WARN " in inside


def test_results_elsewhere_are_mounted_and_checkpoints_must_be(make_request):
    text = script(make_request(folder=Path("/scratch/first")), settings(PYXIS))
    assert "--container-mounts=/shared/ann:/shared/ann,/scratch/first:/scratch/first,/data:/data" in text
    assert "/scratch" not in script(make_request(folder=Path("/shared/ann/first")), settings(PYXIS))
    with pytest.raises(InputError, match="checkpoints would be lost with the container"):
        dispatch(make_request(checkpoints="/scratch/saved"), settings(PYXIS))
    assert dispatch(make_request(checkpoints="/data/saved"), settings(PYXIS)).files
    assert dispatch(make_request(checkpoints="/scratch/saved"), settings(USUAL)).files


def test_a_whole_node_is_asked_for_with_its_memory(make_request):
    assert "#SBATCH --mem=0\n" in script(make_request(), settings(USUAL))
    shared = USUAL.model_copy(update={"exclusive": False})
    assert "--mem" not in script(make_request(), settings(shared))
    own = USUAL.model_copy(update={"directives": ("--mem-per-cpu=8G",)})
    assert "--mem=0" not in script(make_request(), settings(own))


STUBS = """
scontrol() { [[ $1 == requeue ]] && echo requeued; echo JobState=RUNNING; }
srun() { %s; return %d; }
"""
ASK = "trap '' USR1; kill -USR1 $$; sleep 0.2"


@pytest.mark.parametrize(
    ("code", "checkpoints", "is_requeued", "said"),
    [
        (0, "saved", False, "done"),
        (138, "asked", True, "asked to stop"),  # an engine that the request kills
        (1, "asked", True, "failure 1 of 3"),  # that could not save
        (143, "saved", True, "asked to stop"),  # asked to: the time limit, or preempted
        (143, None, False, "saves no checkpoints"),
        (137, "saved", True, "failure 1 of 3"),
        (2, "saved", False, "would not help"),
    ],
)
def test_what_follows_from_the_exit_code(code, checkpoints, is_requeued, said, make_request, tmp_path, monkeypatch):
    request = make_request(checkpoints=checkpoints, folder=tmp_path, argv=("true",))
    text = STUBS % (ASK if checkpoints == "asked" else "true", code) + script(request, settings(SlurmSite()))
    environment = {"SLURM_JOB_ID": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stderr
    assert ("requeued" in done.stdout) == is_requeued
    assert said in done.stdout
    assert (tmp_path / "failures").exists() == ("failure" in said)  # being asked to stop is none


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"directives": ("partition=x",)}, "an option of sbatch"),
        ({"directives": ("--requeue\n#SBATCH --uid=0",)}, "an option of sbatch"),
        ({"directives": ("--nodes=3",)}, "follows from the run"),
        ({"directives": ("--comment=two words",)}, "several options, or none"),
        ({"directives": ("--comment='open",)}, "several options, or none"),
        ({"partition": "a\nb"}, "printable"),
        ({"time": "tomorrow"}, "D-HH:MM:SS"),
        ({"time": "2"}, "over before the request to save"),
        ({"time": "1:59"}, "over before the request to save"),
    ],
)
def test_what_sbatch_would_misread_is_refused(change, text, make_request):
    with pytest.raises(InputError, match=text):
        script(make_request(), settings(USUAL.model_copy(update=change)))


def test_a_state_is_parsed_from_the_output_of_scontrol():
    text = "JobId=7 JobName=x JobState=PENDING Reason=BeginTime Requeue=1 Restarts=2 ExitCode=0:9 NodeList=(null)"
    found = job_state(text)
    assert str(found) == "pending (BeginTime), restart 2"
    assert found.exit_code == 137


def test_following_tells_of_states_and_steps_until_the_end(tmp_path, monkeypatch):
    answers = iter(["JobState=PENDING Reason=Priority", None, "JobState=RUNNING", "JobState=FAILED ExitCode=1:0"])
    (tmp_path / "steps.jsonl").write_text('{"step": 4, "loss": 3.25}\n{"step": 5, "lo')
    monkeypatch.setattr(start, "_query", lambda job: (text := next(answers)) and job_state(text))
    said: list[str] = []
    ended = start.follow("7", folder=tmp_path, say=said.append, poll_s=0)
    assert ended.exit_code == 1
    assert said == ["Slurm 7: pending (Priority)", "step 4, loss 3.2500", "Slurm 7: running", "Slurm 7: failed"]


def test_a_job_that_slurm_does_not_know_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "_query", lambda job: None)
    with pytest.raises(InfeasibleError, match="does not answer"):
        start.follow("7", folder=tmp_path, say=lambda text: None, poll_s=0)
