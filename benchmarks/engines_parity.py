"""Comparison of every installed engine with the native engine in one process, step by step.

    python benchmarks/engines_parity.py [--engines native,torchtitan,...] [--steps 20] [--shim ENGINE=FOLDER ...]
                                        [--out DIR] [--record FILE] [--page FILE]

A dense model and one with experts, in fp32, from the same safetensors, with the same batches and the same optimizer, on
1 to 4 processes. The table has the largest relative differences of any step's loss and gradient norm, or the reason of
a refusal. All engines take about an hour on two cores.

Some engines need a shim to run on a CPU: FOLDER is put in front of the PYTHONPATH of that engine's trainings. The
default is tests/engines/ENGINE/shim. With --out finished trainings are kept and not repeated.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from conditions import conditions

from meshwright import runfile
from meshwright.catalog.lookup import engine_names
from meshwright.engines.base import find_engine
from meshwright.training.models import build_model, init_weights, materialize
from meshwright.training.weights import save_weights

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
SHIMS = Path(__file__).parents[1] / "tests" / "engines"
NATIVE = "native"
MODELS = {
    "dense": "family: LlamaForCausalLM, ffn_hidden: 128, attention: {num_heads: 8, num_kv_heads: 4}",
    "experts": "family: Qwen3MoeForCausalLM, attention: {num_heads: 8, num_kv_heads: 4, head_dim: 16, qk_norm: true}, "
    "experts: {num_experts: 8, top_k: 2, ffn_hidden: 64}",
}
REASON = 240  # characters of why not
SHARDINGS = ("parameters", "optimizer", "gradients")
"""Of a plan that says only that data-parallel processes share their states: the first that an engine has."""
RECOMPUTE = ("none", "full")  # changes no number; the first that an engine has
SCHEDULES = ("1f1b", "gpipe")  # likewise
EXPERT_WIDTHS = ("1", "2", "2, sequence_parallel: false")
"""Tensor ranks that divide an expert's matrices: the first that an engine has."""
TEXT = """
model: {{name: {model}, hidden: 64, num_layers: 4, vocab: 260, {shapes}}}
weights: start-{model}
data: {{source: text.txt, tokenizer: bytes, sequence_length: 256}}
batch: {{global_sequences: 8, micro: {micro}}}
optimizer: {{learning_rate: 2.0e-3, warmup_steps: 4, schedule: cosine}}
precision: fp32
cluster: here
parallel: {{{plan}}}
engine: {engine}
train: {{steps: {steps}}}
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan of one model."""

    model: str
    label: str  # for the table
    plan: str  # of a run file; SHARDED, SCHEDULE and WIDTH are what the engine has
    micro: int = 1

    @property
    def name(self) -> str:
        return f"{self.model}-{self.label.replace(' ', '-').replace(',', '')}"


ONE_PROCESS = Case(model="dense", label="1 process", plan="data_shard: 1, sharding: none")
CASES = (
    ONE_PROCESS,
    Case(model="dense", label="2 processes, sharded data parallel", plan="data_shard: 2, sharding: SHARDED"),
    Case(model="dense", label="4 processes, sharded data parallel", plan="data_shard: 4, sharding: SHARDED"),
    Case(model="dense", label="2 processes, tensor parallel", plan="data_shard: 1, tensor: 2, sharding: none"),
    Case(model="dense", label="2 processes, context parallel", plan="data_shard: 1, context: 2, sharding: SHARDED"),
    Case(model="dense", label="2 processes, pipeline",
         plan="data_shard: 1, pipeline: 2, schedule: SCHEDULE, sharding: none"),
    Case(model="dense", label="4 processes, tensor parallel and pipeline",
         plan="data_shard: 1, tensor: 2, pipeline: 2, schedule: SCHEDULE, sharding: none"),
    Case(model="experts", label="1 process", plan="data_shard: 1, sharding: none"),
    Case(model="experts", label="2 processes, sharded data parallel", plan="data_shard: 2, sharding: SHARDED"),
    Case(model="experts", label="2 processes, expert parallel",
         plan="data_shard: 2, expert: 2, sharding: SHARDED"),
    Case(model="experts", label="2 processes, tensor parallel",
         plan="data_shard: 1, tensor: 2, expert_tensor: WIDTH, sharding: none", micro=2),
    Case(model="experts", label="4 processes, expert parallel",
         plan="data_shard: 4, expert: 4, sharding: SHARDED"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one case on one engine."""

    engine: str
    model: str
    label: str
    loss: float | None = None  # largest relative difference of a step's, from native in one process
    gradient_norm: float | None = None
    same_steps: int | None = None  # whose losses differ by less than 1e-6
    steps: int | None = None
    refusal: str = ""


def prepare(folder: Path) -> None:
    """Write the text and the weights that all trainings start from."""
    lines = [f"{i} times {j} is {i * j}. " + ("\n\n" if j == 12 else "") for i in range(120) for j in range(13)]
    (folder / "text.txt").write_text("".join(lines))
    for model in MODELS:
        if (folder / f"start-{model}").exists():
            continue
        run = runfile.loads(text_of(Case(model=model, label="", plan=ONE_PROCESS.plan), engine=NATIVE, steps=20))
        built = build_model(run.model)
        materialize(built, device=torch.device("cpu"))
        init_weights(built, seed=1)
        save_weights(built, folder / f"start-{model}", dtype=torch.float32)


def text_of(case: Case, *, engine: str, steps: int) -> str:
    """The run file of a case, with the choices that the engine supports best."""
    choices = product(SHARDINGS, RECOMPUTE, SCHEDULES, EXPERT_WIDTHS)
    plans = [
        case.plan.replace("SHARDED", sharding).replace("SCHEDULE", schedule).replace("WIDTH", width)
        + f", recompute: {recompute}"
        for sharding, recompute, schedule, width in choices
    ]
    shapes = MODELS[case.model]
    made = [
        TEXT.format(model=case.model, shapes=shapes, plan=plan, engine=engine, steps=steps, micro=case.micro)
        for plan in plans
    ]
    return min(made, key=lambda text: len(find_engine(engine).check(runfile.loads(text))))


def train(case: Case, *, engine: str, steps: int, folder: Path, shim: Path | None) -> list[dict[str, Any]] | str:
    """Steps of one training; a text where it is refused or fails."""
    out = folder / engine / case.name
    if not (out / "record.json").exists():
        run = folder / f"{engine}-{case.name}.yaml"
        run.write_text(text_of(case, engine=engine, steps=steps))
        path = [str(shim)] if shim is not None else []
        path += filter(None, [os.environ.get("PYTHONPATH")])
        done = subprocess.run(
            [sys.executable, "-m", "meshwright", "train", run.name, "--json", "--only-steps", "--out", str(out)],
            cwd=folder, env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            try:
                reason = json.loads(done.stdout)["error"]["message"]
            except (ValueError, KeyError):
                reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            return reason[:REASON]
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]


def outcome(
    case: Case, *, engine: str, taken: list[dict[str, Any]] | str, one_process: Sequence[Mapping[str, Any]]
) -> Outcome:
    """Compare a case on an engine with the native steps in one process."""
    if isinstance(taken, str):
        return Outcome(engine=engine, model=case.model, label=case.label, refusal=taken)

    def differences(key: str) -> list[float]:
        return [abs(mine[key] / theirs[key] - 1) for mine, theirs in zip(taken, one_process, strict=True)]

    losses = differences("loss")
    return Outcome(
        engine=engine,
        model=case.model,
        label=case.label,
        loss=max(losses),
        gradient_norm=max(differences("gradient_norm")),
        same_steps=sum(difference < 1e-6 for difference in losses),
        steps=len(losses),
    )


def publish(result: Mapping[str, Any], shown: str, *, record: Path | None, page: Path | None) -> None:
    """Write `result` as JSON to `record`, print `shown`, and put it between the marks of `page`."""
    if record is not None:
        record.write_text(json.dumps(result, indent=1) + "\n")
    print(shown)
    if page is not None:
        text = page.read_text()
        before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
        page.write_text(f"{before}\n\n{shown}\n\n{after}")


def markdown(result: Mapping[str, Any]) -> str:
    """The table of the page, with the reasons of empty cells."""
    engines = result["engines"]
    found = {(o["model"], o["label"], o["engine"]): Outcome(**o) for o in result["outcomes"]}
    lines = [
        f"{result['steps']} steps in fp32 on {result['machine']}. `{result['command']}`",
        "",
        "| | " + " | ".join(f"{name} {version}".strip() for name, version in engines.items()) + " |",
        "|---" * (len(engines) + 1) + "|",
    ]
    reasons: dict[str, int] = {}
    for case in CASES:
        cells = [_cell(found.get((case.model, case.label, engine)), reasons) for engine in engines]
        lines.append(f"| {case.model}, {case.label} | " + " | ".join(cells) + " |")
    lines += ["", *(f"{number}. {reason}" for reason, number in reasons.items())]
    return "\n".join(lines).rstrip()


def _cell(found: Outcome | None, reasons: dict[str, int]) -> str:
    if found is None:
        return ""
    if found.loss is None:
        word = "refused" if "cannot do this run" in found.refusal else "failed"
        return f"{word} ({reasons.setdefault(found.refusal, len(reasons) + 1)})"
    text = f"{found.loss:.1e}, {found.gradient_norm:.1e}"
    return text if found.same_steps == found.steps else f"{text}; {found.same_steps} steps below 1e-6"


def versions(engines: Sequence[str]) -> dict[str, str]:
    """Version of the program behind each engine."""

    def version(engine: str) -> str:
        if engine == NATIVE:
            return f"(torch {torch.__version__})"
        return getattr(importlib.import_module(f"meshwright.engines.{engine}"), "VERSION", "")

    return {engine: version(engine) for engine in engines}


def parser_of(description: str | None, *, engines: Iterable[str], steps: int) -> argparse.ArgumentParser:
    """Return the options that every comparison of engines has, with these defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engines", default=",".join(engines))
    parser.add_argument("--steps", type=int, default=steps)
    for name in ("--out", "--record", "--page"):
        parser.add_argument(name, type=Path)
    return parser


def place_of(given: argparse.Namespace) -> tuple[Path, list[str]]:
    """Return the folder of the trainings, which it makes, and the engines, the native one first."""
    folder = (given.out or Path(tempfile.mkdtemp())).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder, [NATIVE, *(name for name in given.engines.split(",") if name != NATIVE)]


def main() -> None:
    names = sorted(engine_names(), key=lambda n: (n != NATIVE, n))
    parser = parser_of(__doc__, engines=names, steps=20)
    parser.add_argument("--shim", action="append", default=[], metavar="ENGINE=FOLDER")
    given = parser.parse_args()
    folder, engines = place_of(given)
    prepare(folder)
    shims = {name: SHIMS / name / "shim" for name in engines if (SHIMS / name / "shim").is_dir()}
    shims |= {pair.partition("=")[0]: Path(pair.partition("=")[2]).absolute() for pair in given.shim}
    one_process: dict[str, Any] = {}
    outcomes = []
    for case in CASES:
        for engine in engines:
            taken = train(case, engine=engine, steps=given.steps, folder=folder, shim=shims.get(engine))
            if engine == NATIVE and case.label == ONE_PROCESS.label:
                if isinstance(taken, str):
                    raise SystemExit(f"native in one process: {taken}")
                one_process[case.model] = taken
            outcomes.append(outcome(case, engine=engine, taken=taken, one_process=one_process[case.model]))
            shown = outcomes[-1].refusal or f"{outcomes[-1].loss:.1e}, {outcomes[-1].gradient_norm:.1e}"
            print(f"{case.model}, {case.label}, {engine}: {shown}", file=sys.stderr, flush=True)
    result = {
        "command": "python benchmarks/engines_parity.py",
        **conditions(),
        "steps": given.steps,
        "engines": versions(engines),
        "outcomes": [asdict(one) for one in outcomes],
    }
    publish(result, markdown(result), record=given.record, page=given.page)


if __name__ == "__main__":
    main()
