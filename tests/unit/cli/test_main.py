import errno
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace as Module

import click
import pytest

from meshwright import __version__
from meshwright.cli import main, verbs
from meshwright.cli.options import run_argument
from meshwright.cli.output import emit_json
from meshwright.cli.question import key_options
from meshwright.cli.verbs import Verb, verb
from meshwright.errors import InfeasibleError, InputError, MissingDependencyError


@pytest.fixture
def install(monkeypatch):
    """Make `meshwright probe ...` run a function of the test."""

    def add(function, *decorators):
        command = verb("probe", body="probe_module:run")(lambda: None)
        monkeypatch.setitem(main.VERBS, "probe", Verb(target="probe_module:command", section="Plan", help=""))
        monkeypatch.setitem(sys.modules, "probe_module", Module(command=command, run=function))

    return add


def raising(error):
    def run():
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (InfeasibleError("does not fit", hint="use more nodes"), 1),
        (InputError("bad batch", got=0, allowed=">= 1", hint="use more nodes"), 2),
        (MissingDependencyError("no torch", hint="use more nodes"), 3),
    ],
)
def test_an_error_is_one_message_and_an_exit_code(install, meshwright, error, exit_code):
    install(raising(error))
    outcome = meshwright("probe")
    assert outcome.exit_code == exit_code
    assert outcome.stderr == f"error: {error.message}\nhint: use more nodes\n"
    assert outcome.stdout == ""


def test_with_json_the_error_is_the_document(install, meshwright):
    install(raising(InfeasibleError("does not fit")))
    outcome = meshwright("probe", "--json")
    assert outcome.json == {"error": {"message": "does not fit", "hint": None, "exit_code": 1}}


def test_an_error_after_the_document_is_no_second_one(install, meshwright):
    def run():
        emit_json({"rows": []})
        raise InfeasibleError("no row was measured")

    install(run)
    outcome = meshwright("probe", "--json")
    assert (outcome.exit_code, outcome.json) == (1, {"rows": []})
    assert outcome.stderr == "error: no row was measured\n"


def test_a_bug_is_reported_in_one_line_and_raised_under_debug(install, meshwright, monkeypatch):
    install(raising(ZeroDivisionError("division\nby zero")))
    outcome = meshwright("probe", "--json")
    assert outcome.exit_code == 70
    assert outcome.stderr.splitlines()[0] == "error: internal error: ZeroDivisionError: division by zero"
    assert outcome.json["error"]["exit_code"] == 70
    monkeypatch.setenv("MESHWRIGHT_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        meshwright("probe")


@pytest.mark.parametrize(("error", "exit_code"), [(KeyboardInterrupt(), 130), (click.Abort(), 130)])
def test_an_interrupt_is_not_a_traceback(install, meshwright, error, exit_code):
    install(raising(error))
    outcome = meshwright("probe")
    assert (outcome.exit_code, outcome.stderr) == (exit_code, "error: interrupted\n")


def test_sigterm_ends_a_command_as_ctrl_c_does_with_an_exit_code_of_its_own(install, meshwright):
    ended = []

    def run():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            ended.append("cleaned up")

    install(run)
    before = signal.getsignal(signal.SIGTERM)
    outcome = meshwright("probe")
    assert (outcome.exit_code, outcome.stderr, ended) == (143, "error: terminated\n", ["cleaned up"])
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_command_may_answer_no_after_its_document(install, meshwright):
    def run():
        click.echo("{}")
        click.get_current_context().exit(1)

    install(run)
    outcome = meshwright("probe", "--json")
    assert (outcome.exit_code, outcome.json) == (1, {})


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (["plna"], "unknown command: got 'plna'", "did you mean 'plan'?"),
        (["--versio"], "unknown option: got '--versio'", "did you mean '--version'?"),
        (["probe", "--jsno"], "unknown option: got '--jsno'", "did you mean '--json'?"),
        (["probe", "surplus"], "got unexpected extra argument (surplus)", "see `meshwright probe --help`"),
    ],
)
def test_usage_errors_name_the_nearest(install, meshwright, args, message, hint):
    install(lambda: None)
    outcome = meshwright(*args)
    assert outcome.exit_code == 2
    assert outcome.stderr == f"error: {message}\nhint: {hint}\n"


def test_a_command_line_that_cannot_be_parsed_still_answers_in_json(meshwright):
    document = meshwright("plna", "--json").json
    assert document["error"]["hint"] == "did you mean 'plan'?"


def test_an_impossible_number_is_a_usage_error(monkeypatch, meshwright):
    command = verb("probe", body="absent:run")(key_options("global_sequences")(lambda: None))
    monkeypatch.setattr(verbs, "_open", lambda name, verb: command)
    outcome = meshwright("plan", "--gbs", "0")
    assert outcome.exit_code == 2
    assert "--gbs" in outcome.stderr
    assert "x>=1" in outcome.stderr


def test_a_run_path_is_passed_on_even_if_no_file_is_there(monkeypatch, meshwright):
    seen = []
    command = verb("probe", body="probe_module:run")(run_argument()(lambda: None))
    monkeypatch.setattr(verbs, "_open", lambda name, verb: command)
    monkeypatch.setitem(sys.modules, "probe_module", Module(run=lambda run_path: seen.append(run_path)))
    assert meshwright("plan", "absent.yaml").exit_code == 0
    assert seen[0].name == "absent.yaml"


def test_a_missing_module_breaks_only_its_own_command(monkeypatch, meshwright):
    gone = Verb(target="meshwright.cli.gone:command", section="Plan", help="not here")
    monkeypatch.setitem(main.VERBS, "gone", gone)
    assert "not here" in meshwright("--help").stdout
    outcome = meshwright("gone")
    assert (outcome.exit_code, outcome.stderr) == (3, "error: this installation has no command 'gone'\n")


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, meshwright, tmp_path):
    (tmp_path / "needs_absent.py").write_text("import absent_package.part\n")
    monkeypatch.syspath_prepend(tmp_path)
    needy = Verb(target="needs_absent:command", section="Plan", help="")
    monkeypatch.setitem(main.VERBS, "needy", needy)
    outcome = meshwright("needy")
    assert outcome.exit_code == 3
    assert outcome.stderr.splitlines()[1] == "hint: pip install absent_package"


def test_a_package_missed_while_a_command_runs_is_not_a_bug(install, meshwright):
    def run():
        import absent_package  # noqa: F401

    install(run)
    outcome = meshwright("probe", "--json")
    assert outcome.json["error"]["exit_code"] == 3
    assert outcome.json["error"]["hint"] == "pip install absent_package"


def test_a_missing_module_of_our_own_is_a_bug(install, meshwright):
    def run():
        import meshwright.absent_module  # noqa: F401

    install(run)
    assert meshwright("probe").exit_code == 70


def test_help_lists_every_verb_under_its_section(meshwright):
    printed = meshwright("--help").stdout
    assert meshwright().stdout == printed
    for name, v in main.VERBS.items():
        assert f"\n{v.section}:\n" in printed
        assert f"\n  {name} " in printed


def test_version(meshwright):
    assert __version__ in meshwright("--version").stdout
    assert meshwright("-V").stdout == meshwright("version").stdout == meshwright("--version").stdout


def test_help_is_a_command_too(meshwright):
    assert meshwright("help").stdout == meshwright("--help").stdout
    assert meshwright("help", "catalog", "models").stdout == meshwright("catalog", "models", "--help").stdout


def test_a_closed_pipe_is_quiet():
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {shlex.quote(sys.executable)} -m meshwright --help | true"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.returncode in (0, main.EXIT_BROKEN_PIPE)  # 0 if the pipe took all of it before `true` left


@pytest.mark.parametrize("args", [("--help",), ("catalog", "models")], ids=["text", "table"])
def test_a_pipe_that_was_closed_before_has_its_exit_code(args):
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *args], stdout=write_end, stderr=subprocess.PIPE, timeout=60
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (main.EXIT_BROKEN_PIPE, b"")


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_no_file_takes_the_number_of_a_stream_that_the_caller_closed(handle, tmp_path):
    (tmp_path / "run.yaml").write_text(RUN)
    line = f"{shlex.quote(sys.executable)} -m meshwright estimate run.yaml --html page.html {handle}>&-"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "error" in done.stderr) == (0, False), done.stderr
    assert (tmp_path / "page.html").read_text().rstrip().endswith("</html>")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("args", [("catalog", "models", "--json"), ("--help",)])
def test_a_full_disk_is_no_bug(args):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "meshwright", *args], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr == "error: cannot write the output: No space left on device\n"


@pytest.fixture
def full_disk(tmp_path, monkeypatch):
    """Files end after 64 bytes, as on a full disk."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python 3.11 keeps a module's file that was cut
    (tmp_path / "run.yaml").write_text(RUN)
    resource = pytest.importorskip("resource")
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


ASKED = ("--model", "llama3.1-8b", "--cluster", "h100-8x1", "--gbs", "8", "--seq", "4096")
RUN = """
model: llama3.1-8b
data: {sequence_length: 4096}
batch: {global_sequences: 8}
cluster: h100-8x1
"""


@pytest.mark.parametrize(
    ("args", "written"),
    [
        (("plan", *ASKED, "--write", "out.yaml"), "out.yaml"),
        (("estimate", "run.yaml", "--html", "page.html"), "page.html"),
        (("estimate", "run.yaml", "--trace", "trace.json"), "trace.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-2],
)
def test_a_file_that_does_not_fit_is_named(meshwright, tmp_path, monkeypatch, full_disk, args, written):
    monkeypatch.chdir(tmp_path)
    found = meshwright(*args)
    assert found.exit_code == 2, found.stderr
    assert written in found.stderr
    assert "File too large" in found.stderr
    assert not (tmp_path / written).exists()


def test_an_error_about_a_file_names_it(install, meshwright):
    def fails(**_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/some/where")

    install(fails)
    found = meshwright("probe", "--json")
    assert found.exit_code == 2
    assert "error: /some/where: Permission denied" in found.stderr
    assert found.json["error"]["exit_code"] == 2


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("plan --model llama3.1-", "llama3.1-405b"),
        ("scale --cluster mi35", "mi355x-8x1"),
        ("estimate --precision bf16,fp8_", "bf16,fp8_rowwise"),
    ],
)
def test_a_shell_completes_values(monkeypatch, capsys, typed, completed):
    monkeypatch.setenv("_MESHWRIGHT_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"meshwright {typed}")
    monkeypatch.setenv("COMP_CWORD", "3")
    main.run([])
    found = capsys.readouterr().out.split()
    assert f"plain,{completed}" in found
    assert all(line.startswith(f"plain,{typed.rpartition(' ')[2]}") for line in found)
