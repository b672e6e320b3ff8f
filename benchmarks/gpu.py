"""Take every measurement that needs a GPU, the most wanted first, and keep all results.

    python benchmarks/gpu.py [--total SECONDS] [--budget SECONDS] [--only NAME,NAME] [--again] [--out FOLDER]
                             [--archive FILE.tar.gz] [--from FILE.tar.gz]
    python benchmarks/gpu.py --list | --dry-run
    python benchmarks/gpu.py --page FILE.tar.gz [--out PAGE.html]
    python benchmarks/gpu.py --apply FILE.tar.gz [--root CHECKOUT]

    doctor      faults of this node
    step-8b     step time and MFU of eight layers of 8B shapes, native beside TorchTitan, compiled, in bf16
    step-8b-fp8 the same in fp8
    kernels-8b  every route of every training kernel, on the shapes of Llama 3.1 8B
    tests       the gpu lane of the tests
    step-moe    step time and MFU of four layers of a mixture of 64 experts, compiled, in bf16
    kernels-moe every route of every kernel, on the shapes of a mixture of experts
    device      kernels, whole steps and, on several GPUs, collectives
    gemm        library of each GEMM, before and after, on the shapes of Llama 3.1 8B
    training, training-8b
                step time and MFU of a small model and of the 8B shapes, eager and compiled, in all formats
    engines     native, TorchTitan and Megatron-Core side by side
    profile     shares of a step by kind of kernel, and kernels whose names the table does not know
    ingest      retrieval ingestion: stages sequential and pipelined, indexes
    saving      step time and stalls with a checkpoint every five steps

It needs no decision. With `--total` it ends by then: `--total 540` on a GPU that is lent for ten minutes takes the
first ones, with budgets that fit. Each measurement has a limit of its own, and is begun only where all of it is left: a
shorter one takes its place. Started again it goes on: it does not repeat a measurement that succeeded on this device,
and it tries a failed one after all that were never tried.

On a machine that forgets, `--archive` keeps everything in one file of at most 15 MiB, and `--from` goes on from it:
results first, then the compilation caches of Triton and Inductor, as far as they fit.

    python benchmarks/gpu.py --total 540 --archive gpu.tar.gz                       # the first ten minutes
    python benchmarks/gpu.py --total 540 --from gpu.tar.gz --archive gpu.tar.gz     # the next ones

Every command runs in a process group of its own, which is killed at its limit of time; its failure does not end the
others. `gpu.json` says for each what was run, when, on which device, with which software and with what exit code; it is
written after each command. The files of a command lie in a folder of its name. Ctrl-C keeps both.

`--dry-run` takes the same path on a CPU with small models and budgets of seconds.

`--page` makes one page of an archive: routes beside PyTorch, `torch.compile` and Liger, steps beside other engines and
predictions, what failed and why. `--apply` puts the records into the checkout, and the defaults of kernels and the
documents follow (`gpu_apply.py`). docs/reference/gpu.md has what GPUs measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # started as a script, it finds the modules beside it
OUT = ROOT / "benchmarks" / "records" / "gpu"
PACKAGES = ("meshwright", "torch", "torchao", "torchtitan", "megatron-core", "triton", "liger-kernel")
LAST_LINES = 20
GRACE_S = 10.0
"""From the request to end to the kill."""
START_S = 90.0
"""Most seconds of a command besides its budget: imports, compilation, the last file."""
RUN_SMALL, RUN_EIGHT, RUN_8B, RUN_MIXTURE = ("small.yaml", "eight-layers.yaml", "shapes-8b.yaml", "mixture.yaml")
"""The third: layers of Llama 3.1 8B, as many as fit one GPU with their optimizer states."""
CACHES = "caches"
"""Folder of compilation caches below the records."""
UNPACKED_BYTES = 2**29
ARCHIVE_BYTES = 15 * 2**20
"""Most of an archive. Where a machine gives results back, it often does so in files of 16 MiB."""
UNREADABLE = (OSError, tarfile.TarError, EOFError, zlib.error)
"""Errors of reading a damaged or foreign archive."""
MIXTURE = (
    "model: {name: mixture, family: Qwen3MoeForCausalLM, hidden: 2048, num_layers: 4, vocab: 32768, ffn_hidden: 768,\n"
    "  attention: {num_heads: 32, num_kv_heads: 4, head_dim: 128, qk_norm: true},\n"
    "  experts: {num_experts: 64, top_k: 8, ffn_hidden: 768}}\n"
)
"""Layers as those of Qwen3 30B, with half of its experts."""
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
TINY = """
model: {name: tiny, family: LlamaForCausalLM, hidden: 64, num_layers: 2, vocab: 512, ffn_hidden: 128,
  attention: {num_heads: 4, num_kv_heads: 2}}
data: {source: synthetic, sequence_length: 64}
batch: {global_sequences: 2, micro: 1}
optimizer: {learning_rate: 3.0e-4, warmup_steps: 1, schedule: constant}
precision: fp32
cluster: here
parallel: {data_shard: 1, sharding: none}
train: {steps: 6}
"""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the measurements: those of a GPU, or of the dry run."""

    dense: str
    mixture: str
    tokens: tuple[str, ...]
    formats: str
    eight_bits: str
    ingest: tuple[str, ...]
    training: tuple[str, ...]  # options of `bench train`
    lane: tuple[str, ...]  # arguments of pytest
    profiled: tuple[str, ...] = ()


GPU = Scale(
    dense="llama3.1-8b", mixture="gpt-oss-20b", tokens=(), formats="bf16,fp8,fp8_rowwise,fp8_blockwise",
    eight_bits="fp8",
    ingest=(
        "--device", "cuda", "--precision", "fp32,bf16", "--batch", "64,512", "--chunks", "8192", "--vectors", "100000",
    ),
    training=("--runs", "3", "--steps", "20"), lane=("-m", "gpu", "tests/gpu"),
)  # fmt: skip
DRY = Scale(
    dense="qwen2.5-0.5b", mixture="qwen2.5-0.5b", tokens=("--tokens", "16", "--ops", "swiglu,rms_norm"), formats="fp32",
    eight_bits="fp32",
    ingest=("--device", "cpu", "--precision", "fp32", "--batch", "4", "--chunks", "16", "--vectors", "64"),
    training=("--runs", "1", "--steps", "6"), profiled=("--set", "train.steps=10"),
    lane=("--collect-only", "-m", "gpu", "tests/gpu"),
)  # fmt: skip


PLAIN = ("-o", "addopts=--import-mode=importlib", "--strict-markers")
"""Options of pytest without those of pytest-xdist, which a node may lack."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command of this Python, and the most seconds that it may take."""

    name: str
    arguments: tuple[str, ...]
    timeout_s: float
    module: str = "meshwright"
    in_root: bool = False  # it runs in the repository, not in the folder of the records

    @property
    def command(self) -> list[str]:
        return ["python", "-m", self.module, *self.arguments]


def steps(*, budget_s: float, scale: Scale = GPU) -> list[Step]:
    """All measurements, the most wanted first; each takes about `budget_s`. Paths are relative to `--out`."""

    def step(name: str, *arguments: str, budgets: float = 2.0) -> Step:
        return Step(name=name, arguments=arguments, timeout_s=START_S + budgets * budget_s)

    def bench(name: str, *arguments: str, options: Sequence[str] = scale.training, budgets: float = 20) -> Step:
        given = ("bench", "train", *arguments, *options, "--out", name)
        return step(name, *given, "--html", f"{name}.html", budgets=budgets)

    def kernels(name: str, model: str) -> Step:
        return step(name, "bench", "kernels", "--models", model, *scale.tokens, "--budget", budget, "--out", name)

    def compiled(name: str, run: str, *arguments: str) -> Step:
        return bench(name, run, "--set", "train.compile=true", *arguments, options=once, budgets=4)

    budget = f"{budget_s:g}s"
    once = ("--runs", "1", *scale.training[2:])
    each = ("--sweep", f"precision={scale.formats}", "--sweep", "train.compile=false,true")
    rivals = ("--engines", "native,torchtitan")
    saves = "train.checkpoint={folder: saved, every_steps: 5, keep: 1}"
    return [
        step("doctor", "doctor", "--json"),
        compiled("step-8b", RUN_EIGHT, *rivals),
        compiled("step-8b-fp8", RUN_EIGHT, *rivals, "--set", f"precision={scale.eight_bits}"),
        kernels("kernels-8b", scale.dense),
        Step(
            name="tests",
            module="pytest",
            arguments=("-q", *PLAIN, *scale.lane),
            timeout_s=START_S + 4 * budget_s,
            in_root=True,
        ),
        compiled("step-moe", RUN_MIXTURE),
        kernels("kernels-moe", scale.mixture),
        step("device", "bench", "device", "--model", scale.dense, "--budget", budget, "--out", "device", budgets=4),
        step("gemm", "tune", "gemm", RUN_8B, "--budget", budget, "--out", "gemm.json", "--json"),
        bench("training", RUN_SMALL, *each),
        bench("training-8b", RUN_8B, *each),
        bench("engines", RUN_SMALL, "--engines", "native,torchtitan,megatron"),
        step("profile", "train", RUN_8B, "--profile", *scale.profiled, "--json", "--out", "profile"),
        step("ingest", "bench", "ingest", *scale.ingest, "--repeats", "3", "--out", "ingest", "--json"),
        step("saving", "train", RUN_SMALL, "--json", "--only-steps", "--out", "saving", "--set", saves),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the measurements; 0 where all of them succeeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the commands and run none")
    parser.add_argument("--only", help="names of the measurements to take, with commas between them")
    parser.add_argument(
        "--budget", type=positive, help="seconds for each that takes a budget  [default: 600; less with --total]"
    )
    parser.add_argument("--total", type=positive, help="seconds for all of them  [default: as long as they take]")
    parser.add_argument("--again", action="store_true", help="repeat what succeeded")
    parser.add_argument("--dry-run", action="store_true", help="on this machine's CPU, with small models")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="keep all results in this tar.gz, too")
    parser.add_argument("--from", dest="begun", type=Path, metavar="FILE", help="go on from an archive")
    parser.add_argument("--page", type=Path, metavar="FILE", help="make a page of an archive and measure nothing")
    parser.add_argument("--apply", type=Path, metavar="FILE", help="renew defaults and documents from an archive")
    parser.add_argument("--root", type=Path, help="checkout that --apply changes  [default: this one]")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    if given.page is not None or given.apply is not None:
        return use_archive(given, parser)
    total_s = 600.0 if given.dry_run and given.total is None else given.total
    budget_s = given.budget or budget_of(total_s, is_dry=given.dry_run)
    chosen = steps(budget_s=budget_s, scale=DRY if given.dry_run else GPU)
    if given.only is not None:
        names = [name for name in given.only.split(",") if name]
        if not names or (unknown := set(names) - {step.name for step in chosen}):
            what = f"no measurement is called {', '.join(sorted(unknown))}" if names else "names no measurement"
            parser.error(f"--only: {what}; allowed are {', '.join(step.name for step in chosen)}")
        chosen = [step for step in chosen if step.name in names]
    if given.list:
        for step in chosen:
            print(f"{step.name:12s}", shlex.join(step.command))
        return 0
    device = device_here()
    if device["type"] != "cuda" and not given.dry_run:
        sys.exit("no GPU: PyTorch sees none")
    out = given.out or (Path(tempfile.mkdtemp(prefix="gpu-dry-run-")) if given.dry_run else OUT)
    if given.archive is not None and (given.archive.is_dir() or not given.archive.absolute().parent.is_dir()):
        parser.error(f"--archive: {given.archive} is a folder, or lies in none")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}")
    if given.begun is not None:
        try:
            unpack(given.begun, out)
        except UNREADABLE as error:
            parser.error(unreadable("--from", given.begun, error))
    others = {name for row in written(out) if (name := row["device"].get("name")) != device["name"]}
    if others:
        parser.error(
            f"{out} has measurements of {', '.join(map(str, others))}, and this is {device['name']}: name another"
        )
    write_run_files(out, memory_bytes=device["memory_bytes"], is_dry=given.dry_run)
    return take_all(
        chosen, folder=out, device=device, total_s=total_s, again=given.again, archive=given.archive,
    )  # fmt: skip


ONLY_MEASURING = ("list", "only", "budget", "total", "again", "dry_run", "archive", "begun")
"""Options that mean nothing where an archive is read."""


def use_archive(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Make the page of an archive, or apply it; return 0."""
    from benchmarks import gpu_apply, gpu_page, gpu_results
    from meshwright.errors import MeshwrightError

    option, archive = ("--page", given.page) if given.apply is None else ("--apply", given.apply)
    if given.page is not None and given.apply is not None:
        parser.error("--page and --apply: one of them at a time")
    if ignored := [name for name in ONLY_MEASURING if getattr(given, name) != parser.get_default(name)]:
        parser.error(f"{option} measures nothing: leave out --{', --'.join(ignored)}".replace("_", "-"))
    if given.page is not None and given.root is not None:
        parser.error("--root belongs to --apply")
    if given.apply is not None and given.out is not None:
        parser.error("--out belongs to --page; --apply writes into the checkout of --root")
    out = given.out or Path(f"{archive.name.removesuffix('.gz').removesuffix('.tar')}.html")
    if out.absolute() == archive.absolute():
        parser.error(f"--out: {out} is the archive")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            extract(archive, folder)
        except UNREADABLE as error:
            parser.error(unreadable(option, archive, error))
        try:
            results = gpu_results.read_results(folder, source=str(archive))
            if given.page is not None:
                gpu_page.write(results, path=out)
                print(out)
            else:
                root = (given.root or ROOT).resolve()
                print("\n".join(gpu_apply.apply(results, root=root, is_own=root == ROOT)))
        except MeshwrightError as error:
            parser.error(f"{option}: {error}")
        except OSError as error:
            parser.error(f"{option}: cannot write {error.filename or ''}: {error.strerror or error}")
    return 0


def extract(archive: Path, folder: Path) -> None:
    """Unpack an archive into `folder`. Raises TarError where it holds more than results and caches can."""
    with tarfile.open(archive) as file:
        if sum(member.size for member in file) > UNPACKED_BYTES:
            raise tarfile.TarError(f"it unpacks to more than {UNPACKED_BYTES / 2**20:.0f} MiB")
        file.extractall(folder, filter="data")


def unreadable(option: str, archive: Path, error: Exception) -> str:
    """Say why an archive cannot be read."""
    reason = str(error).partition("\n")[0]
    return f"{option}: cannot read {archive}: {reason}; allowed is a file of --archive"


def budget_of(total_s: float | None, *, is_dry: bool = False) -> float:
    """Seconds of one measurement: a sixth of all time, ten minutes at most.

    >>> budget_of(None), budget_of(540.0), budget_of(36000.0)
    (600.0, 90.0, 600.0)
    """
    if is_dry:
        return 4.0
    return 600.0 if total_s is None else min(600.0, total_s / 6)


def take_all(
    chosen: Sequence[Step],
    *,
    folder: Path,
    device: dict[str, Any],
    total_s: float | None,
    again: bool,
    archive: Path | None = None,
) -> int:
    """Take what is due within `total_s`; write the document and the archive after each."""
    end_s = float("inf") if total_s is None else time.monotonic() + total_s
    kept = written(folder)
    has_begun = False
    for step in due(chosen, kept, device=device, again=again):
        left_s = end_s - time.monotonic()
        if left_s < step.timeout_s and has_begun:
            print(f"no time left for {step.name}: start this again", file=sys.stderr)
            continue
        has_begun = True
        found = take(step, folder=folder, most_s=left_s)
        found |= {"device": device, "software": software(), "dry_run": device["type"] != "cuda"}
        kept = [row for row in kept if row["name"] != step.name] + [found]
        write(folder, kept)
        if archive is not None:
            pack(folder, archive)
        print(f"  {verdict(found)}", file=sys.stderr, flush=True)
        if found["exit_code"] == "interrupted":
            break
    if archive is not None and not has_begun:
        pack(folder, archive)
    done = {row["name"] for row in kept if row["exit_code"] == 0}
    for step in chosen:
        print(f"{step.name:12s} {'done' if step.name in done else 'not done'}")
    return 0 if done >= {step.name for step in chosen} else 1


def due(chosen: Sequence[Step], kept: Sequence[dict[str, Any]], *, device: dict[str, Any], again: bool) -> list[Step]:
    """Measurements to take: never tried ones first, then those that failed; not those that succeeded here."""
    here = {row["name"]: row for row in kept if row["device"].get("name") == device.get("name")}
    new = [step for step in chosen if step.name not in here]
    failed = [step for step in chosen if step.name in here and here[step.name]["exit_code"] != 0]
    repeated = [step for step in chosen if step not in new and step not in failed] if again else []
    return new + failed + repeated


def positive(text: str) -> float:
    """Read a number of seconds above 0."""
    number = float(text)
    if not (math.isfinite(number) and number > 0):
        raise ValueError
    return number


def written(folder: Path) -> list[dict[str, Any]]:
    """Measurements that the folder has; none where its document cannot be read, which is kept aside."""
    path = folder / "gpu.json"
    if not path.exists():
        return []
    try:
        rows = list(json.loads(path.read_text(encoding="utf-8"))["measurements"])
        if not all(isinstance(row["name"], str) and row["device"].get and "exit_code" in row for row in rows):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        print(f"{path} cannot be read: it is {path.with_suffix('.unreadable').name} now", file=sys.stderr)
        path.replace(path.with_suffix(".unreadable"))
        return []
    return rows


def write(folder: Path, kept: Sequence[dict[str, Any]]) -> None:
    """Write the document in one go, so that a loss of power leaves the one before."""
    document = {"command": shlex.join(["python", *sys.argv]), "measurements": list(kept)}
    beside = folder / "gpu.json.new"
    beside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    beside.replace(folder / "gpu.json")


def pack(folder: Path, archive: Path) -> list[str]:
    """Write `archive` in one go, results first and the smallest first; return what would make it too large."""
    beside = archive.with_name(f"{archive.name}.new")
    itself = {archive.absolute(), beside.absolute()}
    files = [
        path for path in folder.rglob("*") if path.is_file() and not path.is_symlink() and path.absolute() not in itself
    ]
    files.sort(key=lambda path: (CACHES in path.relative_to(folder).parts, path.stat().st_size))
    taken, left_out, size = [], [], 0
    for path in files:
        size_here = len(zlib.compress(path.read_bytes(), 6)) + 1024  # header and padding in the archive
        if size + size_here > ARCHIVE_BYTES:
            left_out.append(path.relative_to(folder).as_posix())
            continue
        taken.append(path)
        size += size_here
    with tarfile.open(beside, "w:gz", compresslevel=6) as file:
        for path in taken:
            file.add(path, path.relative_to(folder).as_posix())
    beside.replace(archive)
    if results := [name for name in left_out if not name.startswith(CACHES)]:
        print(f"left out of {archive}, which would be too large: {', '.join(results)}", file=sys.stderr)
    return left_out


def unpack(archive: Path, folder: Path) -> None:
    """Put what an archive holds into `folder`, whose own measurements stay. Raises TarError, OSError, EOFError."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".from-") as temporary:
        begun = Path(temporary)
        extract(archive, begun)
        here, there = written(folder), written(begun)
        names = {row["name"] for row in here}
        for path in [path for path in begun.rglob("*") if path.is_file() and path.name != "gpu.json"]:
            target = folder / path.relative_to(begun)
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)
        write(folder, [row for row in there if row["name"] not in names] + here)


def write_run_files(folder: Path, *, memory_bytes: int, is_dry: bool = False) -> None:
    """Write the runs; the largest has as many layers as fit, at 218M parameters and 18 bytes each a layer."""
    if is_dry:
        for name in (RUN_SMALL, RUN_EIGHT, RUN_8B, RUN_MIXTURE):
            (folder / name).write_text(TINY)
        return
    layers = max(1, min(32, int((memory_bytes / 2**30 - 35) // 4)))  # 19 GiB: embedding and head
    model = RUN[RUN.index("model:") : RUN.index("data:")]
    (folder / RUN_SMALL).write_text(RUN)
    (folder / RUN_MIXTURE).write_text(RUN.replace(model, MIXTURE))
    (folder / RUN_EIGHT).write_text(RUN.replace(model, SHAPES_8B.format(layers=min(8, layers))))
    (folder / RUN_8B).write_text(RUN.replace(model, SHAPES_8B.format(layers=layers)))


def take(step: Step, *, folder: Path, most_s: float) -> dict[str, Any]:
    """Run one command; what became of it. Its stdout and stderr go to files of its name."""
    from meshwright.training.telemetry import git_commit

    print("+", shlex.join(step.command), file=sys.stderr, flush=True)
    started, start_s = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    log = folder / f"{step.name}.stderr.txt"
    limit_s = min(step.timeout_s, most_s)
    with (folder / f"{step.name}.stdout.txt").open("w") as stdout, log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, *step.command[1:]], cwd=ROOT if step.in_root else folder, stdout=stdout, stderr=stderr,
            env=os.environ | caches(folder),
            start_new_session=True,  # so that what it starts ends with it, and gives the GPU back
        )  # fmt: skip
        exit_code: int | str
        try:
            exit_code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            exit_code = "out of time"
        except KeyboardInterrupt:
            exit_code = "interrupted"
        finally:
            end_group(process)
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:] if exit_code != 0 else []
    return asdict(step) | {
        "started": started, "wall_s": time.monotonic() - start_s, "limit_s": limit_s, "exit_code": exit_code,
        "stderr": lines, "git_commit": git_commit(ROOT),
    }  # fmt: skip


def caches(folder: Path) -> dict[str, str]:
    """Variables that put compilation caches below the records, so that an archive takes them along."""
    where = folder.resolve() / CACHES
    where.mkdir(exist_ok=True)
    (where / ".gitignore").write_text("*\n")
    return {"TRITON_CACHE_DIR": str(where / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(where / "inductor")}


def end_group(process: subprocess.Popen[Any]) -> None:
    """End the processes that a command left: by request, after `GRACE_S` by force."""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=wait_s)
        except subprocess.TimeoutExpired:
            continue


def verdict(found: dict[str, Any]) -> str:
    """One line about a measurement."""
    code = found["exit_code"]
    how = "done" if code == 0 else code if isinstance(code, str) else f"failed with {code}"
    last = found["stderr"][-1] if found["stderr"] else ""
    return f"{found['name']}: {how} after {found['wall_s']:.0f} s  {last}".rstrip()


def device_here() -> dict[str, Any]:
    """The first device of this machine, as PyTorch names it."""
    import torch

    from meshwright.kernels.architectures import architecture_of

    if not torch.cuda.is_available():
        return {"type": "cpu", "name": "cpu", "memory_bytes": 0, "architecture": "cpu"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "type": "cuda", "name": properties.name, "count": torch.cuda.device_count(),
        "architecture": architecture_of(torch.device("cuda")),
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
    sys.exit(main())
