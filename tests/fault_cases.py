"""Commands for the injector of faults: their lines, their inputs, and what they leave."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.record_folders import write_serving, write_system, write_training
from tests.smoke_benchmark import write_smoke
from tests.tiny_encoder import write_encoder
from tests.tiny_folders import tiny_checkpoint, tiny_folder
from tests.unit.conftest import Machine
from tests.unit.doctor.test_tuning import NODE
from tests.unit.mlperf.conftest import SyntheticLog

from meshwright.engines.exporting import export_saved
from meshwright.training import checkpoints

FAKE_TRAIN = Path(__file__).parent / "unit" / "bench" / "fake_train.py"
PLANNED = """
model: {name: tiny, hidden: 32, num_layers: 2, vocab: 64, ffn_hidden: 64, attention: {num_heads: 4}}
data: {source: synthetic, sequence_length: 16}
batch: {global_sequences: 8, micro: 1}
cluster: h100-8x1
"""
PRETRAIN = (
    "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
    "--max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 --bf16 --vocab-size 64 --train-iters 4 "
    "--mock-data --tokenizer-type NullTokenizer --lr 1e-3\n"
)
FAULTY_CHILDREN = """
import os, runpy
if start := os.environ.pop("FAULTS_OF_CHILDREN", None):
    runpy.run_path(start)
    os.environ["FAULTS_OF_CHILDREN"] = start
"""
QUICK = """
import meshwright.bench.ingest.comparison as comparison, meshwright.bench.ingest.bench as bench
comparison.LEAST_S = bench.BUDGET_S = 0.001
"""
FEW_POINTS = """
from itertools import islice
import meshwright.bench.device as campaign
from meshwright.records.measurement import Measurement
Measurement.is_narrow = property(lambda self: True)
points_of = campaign.points_of
campaign.points_of = lambda *arguments, **options: islice(points_of(*arguments, **options), 2)
"""
ONE_ROUTE = """
import meshwright.bench.kernel_routes as kernel_routes
from meshwright.records.measurement import Measurement
Measurement.is_narrow = property(lambda self: True)
kernel_routes.routes_of = lambda op: ["reference"]
"""
FASTER_ROWS = """
import torch
from meshwright.bench import gemm
from meshwright.kernels import linear
def sample_s(work, p):
    route = linear._routes.get((torch.float32, p.m, p.n, p.k), {}).get(p.kernel)
    return 0.5e-3 if p.kernel is linear.GemmKind.WEIGHT_GRADIENT and route is linear.GemmRoute.TORCH_ROWS else 1e-3
gemm._Work.sample_s = sample_s
"""
LAUNCHED = """
import sys
from meshwright.cli import main
from tests.warm import measure_nothing
measure_nothing(setattr)
sys.exit(main.run(sys.argv[1:]))
"""
ACCEPTED = """
import meshwright.mlperf.package as package
package.ask = lambda request: {"passes": True, "messages": []}
"""
INGEST = (
    "bench ingest documents --encoder encoder --chunks all --chunk-tokens 20 --overlap 4 --batch 4 --queries 4 "
    "--query-tokens 4 --query-batch 1 --threads 1 --k 2 --mode sequential --index flat --out ingest"
)
SERVE = (
    "bench serve --server mock --concurrency 1,2 --requests 2 --warmup 0 --input-tokens 4 --output-tokens 2 "
    "--no-self-test --out served"
)
SWEEP = (
    f"bench train run.yaml --sweep batch.micro=1,2 --runs 1 --steps 2 --warmup 0 --out sweep "
    f"--launcher '{sys.executable} {FAKE_TRAIN}'"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command line, and how it is given again; `leaves` are the paths that are compared."""

    line: str
    again: str | None = None  # what the hint of a refusal names
    hint: str = "--resume"
    leaves: tuple[str, ...]
    script: str = ""
    under: tuple[str, ...] = ()  # a launcher
    is_parallel: bool = False
    has_children: bool = False  # it starts other programs in Python, whose operations are numbered too


DEVICE = "bench device --families gemm,memory --budget 60s --processes 1 --out measured"
TRAIN = "train run.yaml --out out --json --resume-or-begin --only-steps"
OFFLINE = "bench offline --server mock --pairs 4/2,4/3 --requests 2 --warmup 0 --out offline --html offline.html"
BENCHMARK = (
    "mlperf run smoke_xs.toml --runs 1 --seeds 5 --warm-up 0 --concurrent 1 --out set "
    "--set batch.global_sequences=16 --set optimizer.learning_rate=4e-3"
)
TUNED = "train {}.yaml --out out --json --resume-or-begin --only-steps"
TALK = [{"role": "user", "content": "Are you there?"}, {"role": "assistant", "content": "I am."}]
RECORDS = {
    "talks": {"messages": TALK},
    "pairs": {"prompt": "1+1=", "chosen": "2", "rejected": "11"},
    "sums": {"prompt": "1+1=", "answer": "2"},
}
"""The record that each of these files repeats."""
TUNINGS = {
    "new-tokens": "talks.jsonl, tokenizer: tiny, added_tokens: ['<|im_start|>', '<|im_end|>']",
    "pairs": "pairs.jsonl, tokenizer: tiny",
    "completions": "sums.jsonl, tokenizer: tiny",
}
TUNING = """
model: {{base: tiny, vocab: {vocab}}}
weights: tiny
data: {{source: {data}, sequence_length: 96}}
batch: {{global_sequences: 4, micro: 4}}
precision: fp32
cluster: here
train: {{steps: 4, {loss}checkpoint: {{folder: saved-{name}, every_steps: 2}}}}
"""
RECIPE = """
base_model: meta-llama/Llama-3.1-8B
datasets: [{path: tatsu-lab/alpaca, type: alpaca}]
sequence_len: 2048
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
learning_rate: 0.0002
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
"""
LOSSES = {
    "pairs": "preference: dpo, ",
    "completions": "grpo: {group: 2, completion_tokens: 8, iterations: 2, "
    "rewards: [{verifier: length, most_tokens: 4}, {verifier: regex, pattern: '[0-9a-z]'}]}, ",
}
PREPARED = (
    TRAIN, "train bytes.yaml --out bytes-out", "checkpoint to-hf run.yaml exported --dtype fp32",
    "train adapted.yaml --out adapted-out --only-steps", f"{BENCHMARK} --dry-run",
)  # fmt: skip
"""Commands of a place with finished trainings."""
CASES = {
    "train": Case(line=TRAIN, leaves=("saved", "out")),
    "train on two processes": Case(line=TRAIN.replace("run", "two"), leaves=("saved", "out"), is_parallel=True),
    "train under torchrun": Case(
        line=TRAIN.replace("run", "two"), leaves=("saved", "out"),
        under=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"), is_parallel=True,
    ),
    **{
        f"train: {name}": Case(line=TUNED.format(name), leaves=(f"saved-{name}", "out")) for name in TUNINGS
    },
    "train --resume": Case(line="train longer.yaml --json --resume --only-steps", leaves=("saved", "out")),
    "checkpoint to-hf": Case(line="checkpoint to-hf run.yaml hf", leaves=("hf",)),
    "checkpoint from-hf": Case(line="checkpoint from-hf again.yaml exported", leaves=("again",)),
    "export": Case(
        line="export planned.yaml --engine megatron --set train.steps=9 --out exported-run",
        leaves=("exported-run",),
    ),
    "import": Case(line="import pretrain.sh --cluster h100-8x1 --out imported.yaml", leaves=("imported.yaml",)),
    "import of a recipe": Case(
        line="import recipe.yaml --cluster h100-8x1 --out recipe.run.yaml",
        leaves=("recipe.run.yaml",),
    ),
    "report": Case(line="report records --html report.html", leaves=("report.html",)),
    "bench train": Case(
        line=SWEEP, again=f"{SWEEP} --resume", leaves=("sweep/trainings.csv", "sweep/trainings.json"),
    ),
    "bench serve": Case(line=SERVE, again=f"{SERVE} --resume", leaves=("served",)),
    "bench ingest": Case(
        line=INGEST, again=INGEST, hint="name another --out", leaves=("ingest",), script=QUICK
    ),
    "mlperf package": Case(
        line="mlperf package llama2_70b_lora --org Org --system sys8.json --code code --out submission --round 5.1",
        leaves=("submission",), script=ACCEPTED,
    ),
    "tune system": Case(line="tune system --root node --state state.json --apply", leaves=("state.json",)),
    "evaluate": Case(line="evaluate bytes.yaml text.txt --json --sequence-length 16", leaves=()),
    "plan": Case(line="plan planned.yaml --write pinned.yaml", leaves=("pinned.yaml",)),
    "estimate": Case(line="estimate planned.yaml --html estimate.html", leaves=("estimate.html",)),
    "calibrate": Case(line="calibrate device --out device.json", leaves=("device.json",)),
    "train with a page": Case(
        line="train bytes.yaml --out out --json --resume-or-begin", leaves=("saved-bytes", "out"),
    ),
    "train --dry-run": Case(line="train bytes.yaml --dry-run --html data.html", leaves=("data.html", "cache")),
    "launch": Case(
        line="launch planned.yaml --set train.steps=9 --on slurm --dry-run --out launched", leaves=("launched",),
    ),
    "checkpoint to-hf --merge": Case(line="checkpoint to-hf adapted.yaml merged --merge", leaves=("merged",)),
    "checkpoint to-hf --merge --dequantised": Case(
        line="checkpoint to-hf saved-first dequantised --merge --dequantised", leaves=("dequantised",),
    ),
    "checkpoint to-hf of a sum": Case(
        line="checkpoint to-hf tiny summed --merge --adapter first --adapter second --factor 0.7 --factor 0.3",
        leaves=("summed",),
    ),
    "bench device": Case(line=DEVICE, again=f"{DEVICE} --resume", leaves=("measured",), script=FEW_POINTS),
    "bench kernels": Case(
        line="bench kernels --ops swiglu --tokens 2 --budget 1s --out kernels", leaves=("kernels",), script=ONE_ROUTE,
    ),
    "bench offline": Case(
        line=OFFLINE, again=OFFLINE, hint="name another --out", leaves=("offline", "offline.html"),
    ),
    "mlperf run": Case(
        line=BENCHMARK,
        leaves=("set/result_0.txt", "set/records", "set/set.json", "set/run.yaml", "set/system.json"),
        has_children=True,
    ),
    "mlperf rcp": Case(
        line="mlperf rcp reference --creator A --platform B --when 5.1 --round 5.1 --out points.json",
        leaves=("points.json",),
    ),
    "tune gemm": Case(
        line="tune gemm run.yaml --budget 0.2s --out tuned.json --write tuned.yaml",
        leaves=("tuned.json", "tuned.yaml"), script=FASTER_ROWS,
    ),
    "tune gemm --apply": Case(
        line="tune gemm run.yaml --budget 0.2s --apply", leaves=("run.gemm.json", "run.yaml"), script=FASTER_ROWS,
    ),
    "tune dataloader": Case(
        line="tune dataloader bytes.yaml --workers 0 --step-time 0.01 --budget 0.1s --apply", leaves=("bytes.yaml",),
    ),
    "tune learning-rate": Case(
        line="tune learning-rate bytes.yaml --steps 10 --html rates.html --write rated.yaml",
        leaves=("rates.html", "rated.yaml"),
    ),
    "calibrate --install": Case(
        line="calibrate device --out device.json --install", leaves=("device.json", "home/.local"),
    ),
    "inference plan": Case(
        line="inference plan --model llama3.1-8b --cluster h200-8x1 --precision fp8 --input-tokens 1024 "
        "--output-tokens 256 --itl 40 --write servers",
        leaves=("servers",),
    ),
    "inference calibrate": Case(
        line="inference calibrate serving --cluster a100-1x1 --model llama3.1-8b --precision bf16 --engine vllm "
        "--out serving.json",
        leaves=("serving.json",),
    ),
    "compare": Case(
        line="compare records records --html compared.html --svg figures --markdown compared.md",
        leaves=("compared.html", "figures", "compared.md"),
    ),
    "plan --csv": Case(line="plan planned.yaml --csv plans.csv --html plans.html", leaves=("plans.csv", "plans.html")),
    "estimate --trace": Case(
        line="estimate planned.yaml --trace trace.json --html estimate.html", leaves=("trace.json", "estimate.html"),
    ),
}  # fmt: skip


def write_inputs(folder: Path, tiny_text: str) -> None:
    """Write the inputs of all commands."""
    text = tiny_text.replace("precision: bf16", "precision: fp32")
    (folder / "run.yaml").write_text(text)
    (folder / "longer.yaml").write_text(text.replace("steps: 4", "steps: 6"))
    (folder / "two.yaml").write_text(text + "parallel: {data_shard: 2, sharding: parameters}\n")
    (folder / "again.yaml").write_text(text.replace("folder: saved", "folder: again"))
    (folder / "planned.yaml").write_text(PLANNED)
    wide = text.replace("vocab: 64", "vocab: 257").replace("synthetic", "text.txt, tokenizer: bytes")
    (folder / "bytes.yaml").write_text(wide.replace("folder: saved", "folder: saved-bytes"))
    (folder / "pretrain.sh").write_text(PRETRAIN)
    (folder / "text.txt").write_text("An evaluation reads this text, which has a few words.\n" * 20)
    write_training(folder / "records")
    write_encoder(folder / "encoder")
    for number in range(4):
        (folder / "documents").mkdir(exist_ok=True)
        (folder / "documents" / f"{number}.py").write_text(f"def f{number}(a, b):\n    return a + b\n" * 4)
    for seed in range(10):
        SyntheticLog(seed=seed, evaluations=5 + seed % 2).write(folder / "llama2_70b_lora" / f"result_{seed}.txt")
    for seed in range(20):
        SyntheticLog(seed=seed).write(folder / "reference" / f"result_{seed}.txt")
    write_serving(folder / "serving")
    write_smoke(folder / "smoke_xs.toml")
    (folder / "adapted.yaml").write_text(
        text.replace("folder: saved", "folder: saved-adapted") + "weights: exported\ntask: lora\nlora: {rank: 2}\n"
    )
    _write_tunings(folder)
    write_system(folder)
    for name, value in NODE.items():
        path = folder / "node" / name.removeprefix("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value)
    Machine().record(folder / "device", count=12)


def _write_tunings(folder: Path) -> None:
    """A tiny model with a tokenizer, adapters of it, and trainings that begin with it on records."""
    base = tiny_folder(folder / "tiny")
    for name, record in RECORDS.items():
        (folder / f"{name}.jsonl").write_text((json.dumps(record) + "\n") * 16)
    for name, data in TUNINGS.items():
        vocab = 259 if "added_tokens" in data else 257
        text = TUNING.format(name=name, data=data, loss=LOSSES.get(name, ""), vocab=vocab)
        (folder / f"{name}.yaml").write_text(text)
    for seed, name in enumerate(("first", "second")):
        adapters = ("task=lora", "lora={rank: 2, base_format: nf4}", f"weights={base}")
        saved = tiny_checkpoint(folder / f"saved-{name}", *adapters, seed=seed)
        export_saved(checkpoints.choose(saved.parent, None), folder / name, run=None, dtype="fp32", merge=False)
    (folder / "recipe.yaml").write_text(RECIPE)
