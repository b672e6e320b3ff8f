"""Take every measurement that needs a GPU, one after the other, and keep what each leaves.

    python benchmarks/gpu.py [--list] [--only NAME,NAME] [--budget SECONDS] [--out benchmarks/records/gpu]

    doctor     what is wrong with this node
    device     kernels, whole steps and, on several GPUs, collectives
    gemm       library of each GEMM, before and after, on the shapes of Llama 3.1 8B
    training, training-8b
               step time and MFU of a small model and of the 8B shapes, eager and compiled, in bf16 and fp8
    engines    native, TorchTitan and Megatron-Core side by side
    profile    shares of a step by kind of kernel, and kernels whose names the table does not know
    saving     step time and stalls with a checkpoint every five steps

Every command runs in a process of its own, which may fail without ending the others. `gpu.json` says for each what was
run, when, on which device, with which software and with what exit code; a command's own records lie in a folder of its
name. It is written after each command, so that an interrupted run keeps what it has.

Nothing of this has run on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "records" / "gpu"
PACKAGES = ("meshwright", "torch", "torchao", "torchtitan", "megatron-core", "triton")
LAST_LINES = 20
SHAPES_8B = (
    "model: {{name: llama-8b-shapes, family: LlamaForCausalLM, hidden: 4096, num_layers: {layers}, vocab: 128256, "
    "ffn_hidden: 14336, attention: {{num_heads: 32, num_kv_heads: 8}}}}\n"
)
RUN = """
model: {name: small, family: LlamaForCausalLM, hidden: 2048, num_layers: 8, vocab: 32768, ffn_hidden: 8192,
  attention: {num_heads: 16, num_kv_heads: 8}}
data: {source: synthetic, sequence_length: 4096}
batch: {global_sequences: 8, micro: 1}
optimizer: {learning_rate: 3.0e-4, warmup_steps: 4, schedule: constant}
precision: bf16
cluster: here
parallel: {data_shard: 1, sharding: none}
train: {steps: 20}
"""
RUN_SMALL, RUN_8B = "small.yaml", "shapes-8b.yaml"
"""The second: layers of Llama 3.1 8B, as many as fit one GPU of 80 GB with their optimizer states."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command and the most seconds that it may take."""

    name: str
    arguments: tuple[str, ...]
    timeout_s: float


def steps(*, budget_s: float) -> list[Step]:
    """Return all measurements; each takes about `budget_s`, `timeout_s` at most. Paths are relative to `--out`."""

    def step(name: str, *arguments: str, timeouts: float = 3.0) -> Step:
        return Step(name=name, arguments=arguments, timeout_s=300.0 + timeouts * budget_s)

    def bench(name: str, *arguments: str) -> Step:
        given = ("bench", "train", *arguments, "--runs", "3", "--steps", "20", "--out", name)
        return step(name, *given, "--html", f"{name}.html", timeouts=20)

    budget = f"{budget_s:g}s"
    each = ("--sweep", "precision=bf16,fp8", "--sweep", "train.compile=false,true")
    saves = "train.checkpoint={folder: saved, every_steps: 5, keep: 1}"
    return [
        step("doctor", "doctor", "--json"),
        step("device", "bench", "device", "--model", "llama3.1-8b", "--budget", budget, "--out", "device"),
        step("gemm", "tune", "gemm", RUN_8B, "--budget", budget, "--out", "gemm.json", "--json"),
        bench("training", RUN_SMALL, *each),
        bench("training-8b", RUN_8B, *each),
        bench("engines", RUN_SMALL, "--engines", "native,torchtitan,megatron"),
        step("profile", "train", RUN_8B, "--profile", "--json", "--out", "profile"),
        step("saving", "train", RUN_SMALL, "--json", "--only-steps", "--out", "saving", "--set", saves),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the commands and run none")
    parser.add_argument("--only", help="names of the measurements to take, with commas between them")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for each that takes a budget")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    chosen = steps(budget_s=given.budget)
    if given.only is not None:
        names = given.only.split(",")
        if unknown := set(names) - {step.name for step in chosen}:
            parser.error(f"--only: no measurement is called {', '.join(sorted(unknown))}")
        chosen = [step for step in chosen if step.name in names]
    if given.list:
        for step in chosen:
            print(f"{step.name:10s}", shlex.join(["meshwright", *step.arguments]))
        return
    device = device_here()
    if device["type"] != "cuda":
        sys.exit("no GPU: PyTorch sees none")
    given.out.mkdir(parents=True, exist_ok=True)
    write_run_files(given.out, memory_bytes=device["memory_bytes"])
    taken: list[dict[str, Any]] = []
    for step in chosen:
        taken.append(take(step, folder=given.out) | {"device": device, "software": software()})
        document = {"command": shlex.join(["python", *sys.argv]), "measurements": taken}
        (given.out / "gpu.json").write_text(json.dumps(document, indent=1) + "\n")


def write_run_files(folder: Path, *, memory_bytes: int) -> None:
    """Write the two runs; that of 8B has as many layers as fit, at 218M parameters and 18 bytes each a layer."""
    layers = max(1, min(32, int((memory_bytes / 2**30 - 35) // 4)))  # 19 GiB: embedding and head
    model = RUN[RUN.index("model:") : RUN.index("data:")]
    (folder / RUN_SMALL).write_text(RUN)
    (folder / RUN_8B).write_text(RUN.replace(model, SHAPES_8B.format(layers=layers)))


def take(step: Step, *, folder: Path) -> dict[str, Any]:
    """Run one command; what became of it. Its stdout goes to a file of its name."""
    from meshwright.training.telemetry import git_commit

    print("+", shlex.join(["meshwright", *step.arguments]), file=sys.stderr, flush=True)
    started, start_s = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    log = folder / f"{step.name}.stderr.txt"
    with (folder / f"{step.name}.stdout.txt").open("w") as stdout, log.open("w") as stderr:
        try:
            words = [sys.executable, "-m", "meshwright", *step.arguments]
            exit_code = subprocess.run(
                words, cwd=folder, stdout=stdout, stderr=stderr, timeout=step.timeout_s
            ).returncode
        except subprocess.TimeoutExpired:
            exit_code = None
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:] if exit_code != 0 else []
    return asdict(step) | {
        "started": started, "wall_s": time.perf_counter() - start_s, "exit_code": exit_code, "stderr": lines,
        "git_commit": git_commit(Path(__file__).parent),
    }  # fmt: skip


def device_here() -> dict[str, Any]:
    """The first device of this machine, as PyTorch names it."""
    import torch

    if not torch.cuda.is_available():
        return {"type": "cpu"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "type": "cuda", "name": properties.name, "count": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory, "cuda": torch.version.cuda, "hip": torch.version.hip,
    }  # fmt: skip


def software() -> dict[str, str]:
    """Versions of the packages that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
