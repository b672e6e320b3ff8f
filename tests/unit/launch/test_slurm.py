"""The sbatch script: its text, and that bash and shellcheck take it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from meshwright.errors import InfeasibleError, InputError
from meshwright.launch import follow
from meshwright.launch.follow import job_state
from meshwright.launch.site import Runtime, SlurmSite
from meshwright.launch.slurm import Settings, dispatch, script

USUAL = SlurmSite(partition="gpu", account="llm", time="1-00:00:00", directives=("--constraint=mi355x",))
PYXIS = USUAL.model_copy(
    update={"container": "registry.example#train:1", "mounts": ("/data:/data",), "cpus_per_task": 12}
)
APPTAINER = USUAL.model_copy(
    update={"container": "/images/train.sif", "runtime": Runtime.APPTAINER, "setup": ("module load rocm",)}
)
SITES = {"slurm-bare": USUAL, "slurm-pyxis": PYXIS, "slurm-apptainer": APPTAINER}


def settings(site):
    return Settings(site=site, python="python3", workdir=Path("/shared/ann"))


@pytest.mark.parametrize("name", SITES)
def test_the_script_is_the_golden_one(name, make_request, is_golden):
    is_golden(script(make_request(), settings(SITES[name])), f"{name}.sh")


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


def test_a_resumed_job_is_told_so(make_request):
    text = script(make_request(resume=True), settings(USUAL))
    assert "export MESHWRIGHT_RESTARTS=$((${SLURM_RESTART_COUNT:-0} + 1))" in text


def test_devices_are_asked_for_once(make_request):
    own = SlurmSite(directives=("--gres=gpu:mi355x:8",))
    assert "--gpus-per-node" not in script(make_request(), settings(own))
    assert "--gpus-per-node" not in script(make_request(vendor=None), settings(USUAL))
    assert "no devices are asked for" in " ".join(dispatch(make_request(vendor=None), settings(USUAL)).notes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"directives": ("partition=x",)}, "an option of sbatch"),
        ({"directives": ("--requeue\n#SBATCH --uid=0",)}, "an option of sbatch"),
        ({"directives": ("--nodes=3",)}, "follows from the run"),
        ({"partition": "a b"}, "no spaces"),
        ({"time": "tomorrow"}, "D-HH:MM:SS"),
    ],
)
def test_what_sbatch_would_misread_is_refused(change, words, make_request):
    with pytest.raises(InputError, match=words):
        script(make_request(), settings(USUAL.model_copy(update=change)))


def test_a_state_is_read_from_the_words_of_scontrol():
    words = "JobId=7 JobName=x JobState=PENDING Reason=BeginTime Requeue=1 Restarts=2 ExitCode=0:9 NodeList=(null)"
    found = job_state(words)
    assert str(found) == "pending (BeginTime), restart 2"
    assert found.exit_code == 137


def test_following_tells_of_states_and_steps_until_the_end(tmp_path, monkeypatch):
    answers = iter(
        ["JobState=PENDING Reason=Priority", None, "JobState=RUNNING", "JobState=FAILED ExitCode=1:0"]
    )
    (tmp_path / "steps.jsonl").write_text('{"step": 4, "loss": 3.25}\n{"step": 5, "lo')
    monkeypatch.setattr(follow, "_query", lambda job: (words := next(answers)) and job_state(words))
    said: list[str] = []
    ended = follow.follow("7", folder=tmp_path, say=said.append, poll_s=0)
    assert ended.exit_code == 1
    assert said == [
        "Slurm 7: pending (Priority)",
        "step 4, loss 3.2500",
        "Slurm 7: running",
        "Slurm 7: failed",
    ]


def test_a_job_that_slurm_does_not_know_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "_query", lambda job: None)
    with pytest.raises(InfeasibleError, match="does not answer"):
        follow.follow("7", folder=tmp_path, say=lambda words: None, poll_s=0)
