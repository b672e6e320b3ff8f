"""AIPerf (github:ai-dynamo/aiperf, Apache-2.0) as the client of `bench serve`, with the same records.

    python -m meshwright.bench.serving.aiperf [DIR]     create its environment (140 packages, 1.2 GB)

AIPerf needs package versions of its own, so it has an environment of its own: the folder of the argument, else
$MESHWRIGHT_AIPERF, else `aiperf-VERSION` in Meshwright's cache. It is complete when its marker file has been written.
AIPerf starts several processes and needs cores of its own; on a machine that it shares with the server it measures
both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.bench.serving.bench import ServingBenchOutcome, ServingBenchRequest
from meshwright.bench.serving.endpoint import Interface
from meshwright.bench.serving.importers import read_results_of
from meshwright.bench.serving.prompts import LengthKind, Lengths
from meshwright.errors import InputError, MeshwrightError, MissingDependencyError, printable
from meshwright.files import default_cache, held, write_atomically
from meshwright.json_values import load_json
from meshwright.records.files import now
from meshwright.records.serving import Arrivals, Load, ServingPoint, ServingRecorder, TokenSource

VERSION = "0.13.0"
VARIABLE = "MESHWRIGHT_AIPERF"
MARK = "meshwright.json"
COMMAND = "python -m meshwright.bench.serving.aiperf"
RESULT = "profile_export_aiperf.json"
REFUSED_VARIABLES = ("HF_HUB_OFFLINE",)
"""Variables that make AIPerf take a local tokenizer's path for a repository's name."""
LENGTH_KINDS = (LengthKind.FIXED, LengthKind.NORMAL)
LONGEST_S = 24 * 3600.0


class AiperfError(MeshwrightError):
    """AIPerf ended without a result."""

    exit_code = 1


# --- the environment ---


def default_folder() -> Path:
    """Folder of the environment if none is given."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser() if named else default_cache() / f"aiperf-{VERSION}"


def find(folder: Path | None = None) -> Path | None:
    """The program `aiperf` of the environment; None: it does not exist or is incomplete."""
    folder = folder or default_folder()
    try:
        made = load_json(folder / MARK)
    except (OSError, ValueError):
        return None
    program = folder / "bin" / "aiperf"
    return program if made.get("aiperf") == VERSION and program.exists() else None


def require() -> Path:
    """The program `aiperf`. Raises MissingDependencyError with the command that creates its environment."""
    program = find()
    if program is None:
        raise MissingDependencyError(
            f"AIPerf {VERSION} needs an environment of its own, and there is none in {default_folder()}", hint=COMMAND
        )
    return program


def create(folder: Path) -> Path:
    """Create the environment, or continue an interrupted installation. Raises MeshwrightError when that fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with held(folder.with_name(f".{folder.name}.lock"), by="an installation of AIPerf") as holder:
        if holder is not None:
            raise MeshwrightError(f"{holder} is under way in {folder}", hint="wait until it ends")
        existing = find(folder)
        if existing is not None:
            return existing
        venv.create(folder, with_pip=True)
        install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", f"aiperf=={VERSION}"]
        if subprocess.run(install, stdout=sys.stderr).returncode:
            raise MeshwrightError("the installation of AIPerf failed", hint=f"run `{COMMAND}` again: it continues")
        write_atomically(folder / MARK, json.dumps({"aiperf": VERSION}) + "\n")
        return folder / "bin" / "aiperf"


# --- the driver ---


@dataclass(frozen=True, kw_only=True)
class AiperfClient:
    """AIPerf with the tokenizer that it counts and generates prompts with."""

    program: Path
    tokenizer: Path


def check(request: ServingBenchRequest, *, tokenizer: Path | None, key_variable: str | None) -> AiperfClient:
    """Return the client for a request. Raises InputError for options that are not passed on to AIPerf."""
    refused = {
        "--search": request.search is not None,
        "--prompts": bool(request.source.rows),
        "--duration": request.duration_s is not None,
        "--ramp": request.ramp_s > 0,
        "--key-variable": key_variable is not None,
        "--request-field": bool(request.endpoint.renamed),
        "--omit-field": bool(request.endpoint.omitted),
        "--retries": request.endpoint.num_retries > 0,
        "--input-tokens": request.source.inputs.kind not in LENGTH_KINDS,
        "--output-tokens": request.source.outputs.kind not in LENGTH_KINDS,
    }
    for option, is_given in refused.items():
        if is_given:
            raise InputError(f"{option} in this form is not passed on to AIPerf", hint="leave --client out")
    if tokenizer is None:
        raise InputError("AIPerf needs the model's tokenizer", hint="--tokenizer FOLDER")
    folder = tokenizer.parent if tokenizer.is_file() else tokenizer
    return AiperfClient(program=require(), tokenizer=folder.absolute())


def arguments(client: AiperfClient, request: ServingBenchRequest, load: Load, *, seed: int, out: Path) -> list[str]:
    """Command line of one load."""
    endpoint, source = request.endpoint, request.source
    kind = "chat" if endpoint.interface is Interface.CHAT else "completions"
    warmup = request.num_warmup if request.num_warmup is not None else (load.concurrency or 1)
    found = [
        str(client.program), "profile", "--model", endpoint.model, "--url", endpoint.base_url, "--endpoint-type", kind,
        "--streaming", "--tokenizer", str(client.tokenizer), "--request-count", str(request.num_requests),
        *_length("isl", source.inputs), *_length("osl", source.outputs), "--use-server-token-count",
        "--random-seed", str(seed), "--request-timeout-seconds", f"{endpoint.timeout_s:g}",
        "--artifact-dir", str(out), "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics",
    ]  # fmt: skip
    if endpoint.ignore_eos:
        found += ["--extra-inputs", "ignore_eos:true"]
    for key, value in endpoint.extra.items():
        found += ["--extra-inputs", json.dumps({key: value})]
    if warmup:
        found += ["--warmup-request-count", str(warmup)]
    if load.arrivals is not Arrivals.CLOSED:
        found += ["--request-rate", f"{load.offered_per_s:g}", "--arrival-pattern", load.arrivals.value]
        found += ["--arrival-smoothness", f"{load.shape:g}"] if load.shape else []
    if load.concurrency:
        found += ["--concurrency", str(load.concurrency)]
    return found + _goodput(request)


def _length(name: str, lengths: Lengths) -> list[str]:
    spread = [f"--{name}-stddev", f"{lengths.second:g}"] if lengths.kind is LengthKind.NORMAL else []
    return [f"--{name}", f"{lengths.first:g}", *spread]


def _goodput(request: ServingBenchRequest) -> list[str]:
    bounds = request.bounds
    if bounds is None or bounds.is_empty:
        return []
    named = {
        "time_to_first_token": bounds.ttft_s,
        "inter_token_latency": bounds.tpot_s,
        "request_latency": bounds.e2e_s,
    }
    return ["--goodput", " ".join(f"{name}:{value * 1e3:g}" for name, value in named.items() if value is not None)]


def run_aiperf(
    request: ServingBenchRequest,
    *,
    client: AiperfClient,
    recorder: ServingRecorder,
    begin: Callable[[Load, int], None],
    done: Callable[[ServingPoint], None],
) -> ServingBenchOutcome:
    """Measure all loads and repeats with AIPerf. Raises AiperfError with the end of its output when it fails."""
    for repeat in range(1, request.repeats + 1):
        for number, load in enumerate(request.loads, start=1):
            begin(load, repeat)
            out = recorder.folder / "aiperf" / f"load-{number}-repeat-{repeat}"
            started = now()
            _run(arguments(client, request, load, seed=request.seed + repeat, out=out), out)
            (result,) = read_results_of(out / RESULT)
            point = replace(result.point, load=load, repeat=repeat, started=started, token_source=TokenSource.USAGE)
            recorder.append(point)
            done(point)
    return ServingBenchOutcome(points=tuple(recorder.points), scale=None, ceilings=())


def _run(command: Sequence[str], out: Path) -> None:
    """Run AIPerf below a supervisor that ends it with all of its processes when this process ends."""
    out.mkdir(parents=True, exist_ok=True)
    log = out / "output.txt"
    environment = {k: v for k, v in os.environ.items() if k not in REFUSED_VARIABLES and k != "PYTHONPATH"}
    supervised = [sys.executable, str(Path(__file__).parent / "servers" / "supervise.py"), *command]
    with log.open("wb") as output:
        process = subprocess.Popen(
            supervised, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(timeout=LONGEST_S)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
    if process.returncode or not (out / RESULT).is_file():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        shown = " ".join(" ".join(line.strip("│╭╰─╮╯ ") for line in lines[-12:]).split())
        raise AiperfError(
            f"AIPerf ended with exit code {process.returncode}: {shown[-600:] or 'it printed nothing'}",
            hint=f"its output is in {log}",
        )


def main() -> int:
    """Create the environment."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help=f"default: {default_folder()}")
    asked = parser.parse_args()
    folder = (asked.folder or default_folder()).expanduser().absolute()
    try:
        print(create(folder))
    except MeshwrightError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
