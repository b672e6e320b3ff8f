"""Trainings with Megatron-Core on this CPU, through the test-only shim, held against the native engine step by step.

Same first weights, same batches in the same order, fp32: losses and gradient norms agree to the last digits that sums
in another order leave.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed: pip install '.[megatron]'", allow_module_level=True)
torch = pytest.importorskip("torch")

import psutil
from safetensors.torch import load_file
from tests.toy_training import MODEL, REST, multiplication
from tests.warm import Server, WarmProcess, measure_nothing
from tests.warm_workers import WORKERS, workers_from

from meshwright import runfile
from meshwright.answers.comparison.study import compare_items
from meshwright.engines import local
from meshwright.engines.base import Launch, TrainOptions, find_engine
from meshwright.training import checkpoints as checkpoint

SHIM = Path(__file__).parent / "shim"
RUN = (
    MODEL
    + REST.replace("warmup_steps: 4", "warmup_steps: 2")
    + """
engine: megatron
train: {steps: 4}
"""
)
ON_CPU = {
    "PYTHONPATH": os.pathsep.join([str(SHIM), *filter(None, sys.path)]),
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # Megatron compiles small functions, which takes longer than the steps here
}
LOADED = ("meshwright.engines.megatron.in_megatron_process.train_loop", "meshwright.cli.train", "tests.warm")

TOLERANCE = 1e-6  # relative; 4.9e-7 was the most of any step of the plans below
DENSE = ""
TIED = """{name: tied, family: Qwen3ForCausalLM, hidden: 64, num_layers: 4, vocab: 257, ffn_hidden: 128,
tied_embeddings: true, attention: {num_heads: 4, num_kv_heads: 2, qk_norm: true, head_dim: 24}}"""
QWEN2 = """{name: qwen2, family: Qwen2ForCausalLM, hidden: 64, num_layers: 2, vocab: 257, ffn_hidden: 128,
attention: {num_heads: 4, num_kv_heads: 2, bias: true, output_bias: false}}"""
MIXTURE = """{name: mixture, family: MixtralForCausalLM, hidden: 64, num_layers: 2, vocab: 257, ffn_hidden: 0,
attention: {num_heads: 4, num_kv_heads: 2}, experts: {num_experts: 4, top_k: 2, ffn_hidden: 96}}"""
BIASED = """{name: biased, hidden: 64, num_layers: 3, vocab: 258, ffn_hidden: 128, rope: {rotated_share: 0.5},
attention: {num_heads: 4, num_kv_heads: 2, qk_norm: true}, experts: {num_experts: 8, top_k: 2, ffn_hidden: 32,
num_dense_layers: 1, num_shared: 1, router: sigmoid, routed_scale: 2.5}}"""
BALANCED = "train.balance_loss=0.1"
Z_LOSS = "train.router_z_loss=0.05"
FEWER = "batch.micro=4"  # two micro-batches a step: every layer of these waits for many collectives

CASES = {  # name -> model, plan, other settings
    "replicas": (DENSE, "{data_shard: 2, sharding: none}"),
    "shared optimizer": (
        DENSE, "{data_shard: 2, sharding: optimizer, recompute: {modules: [core_attention]}}",
        "train.checkpoint.asynchronous=false",
    ),
    "tensor": (DENSE, "{tensor: 2, data_shard: 1, sharding: none, sequence_parallel: false}"),
    "tensor and sequence": (DENSE, "{tensor: 2, data_shard: 1, sharding: optimizer}"),
    "pipeline": (TIED, "{pipeline: 2, data_shard: 1, sharding: none, recompute: full}"),
    "interleaved": (
        TIED, "{pipeline: 2, virtual_pipeline: 2, schedule: interleaved, data_shard: 1, sharding: optimizer}",
    ),
    "uneven stages": (TIED, "{pipeline: 2, data_shard: 1, sharding: none, layers_per_stage: [1, 3]}"),
    "biases": (QWEN2, "{tensor: 2, data_shard: 1, sharding: optimizer}"),
    "experts": (MIXTURE, "{data_shard: 2, sharding: optimizer}"),
    "divided experts": (MIXTURE, "{data_shard: 2, expert: 2, sharding: optimizer}"),
    "balanced experts": (MIXTURE, "{data_shard: 2, sharding: optimizer}", BALANCED),
    "balanced, tensor": (MIXTURE, "{tensor: 2, data_shard: 1, expert: 2, sharding: none}", BALANCED, Z_LOSS),
    "biased router": (BIASED, "{tensor: 2, data_shard: 1, expert: 2, sharding: none}", FEWER),
    "divided widths": (BIASED, "{tensor: 2, data_shard: 1, expert_tensor: 2, sharding: none}", FEWER),
}  # fmt: skip


OTHER_PLANS = {  # case -> a plan that goes on from its checkpoint
    "interleaved": "{data_shard: 2, sharding: optimizer}",
    "shared optimizer": "{tensor: 2, data_shard: 1, sharding: none}",
    "tensor": "{data_shard: 2, sharding: optimizer}",
    "biases": "{pipeline: 2, data_shard: 1, sharding: none}",
    "divided experts": "{tensor: 2, data_shard: 1, expert: 2, sharding: none}",
    "biased router": "{data_shard: 2, sharding: optimizer}",
}


def steps(path: Path) -> list[dict[str, float]]:
    """Lines of a step log by step, the last of each."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return list({line["step"]: line for line in lines}.values())


@pytest.fixture(scope="module")
def server() -> Server:
    """A server that has Megatron and the shim loaded."""
    return Server(LOADED, environment=ON_CPU | {"PYTHONWARNINGS": "ignore"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run file and its text."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "run.yaml").write_text(RUN)
    (folder / "notes.txt").write_text(multiplication(60))
    return folder


def loaded(folder: Path, *overrides: str, model: str = "") -> runfile.Run:
    given = [*overrides, *([f"model={model}"] if model else [])]
    text = (folder / "run.yaml").read_text().replace("notes.txt", str(folder / "notes.txt"))
    return runfile.loads(text, overrides=given)


@pytest.fixture(scope="module")
def native(folder) -> dict[tuple[str, ...], list[dict[str, float]]]:
    """Steps of the native engine in one process, by model and what changes its losses."""
    kinds = {kind_of(name) for name in CASES}
    return {kind: alone(folder, f"native-{i}", *kind[1:], model=kind[0]) for i, kind in enumerate(sorted(kinds))}


def kind_of(case: str) -> tuple[str, ...]:
    """The model and what changes its losses."""
    model, _, *others = CASES[case]
    return model, *(other for other in others if other in (BALANCED, Z_LOSS))


def alone(folder: Path, name: str, *overrides: str, model: str = "", profile: bool = False) -> list[dict[str, float]]:
    """Steps of the native engine in one process."""
    engine, plan = find_engine("native"), "parallel={data_shard: 1, sharding: none}"
    run = loaded(folder, "engine=native", plan, *overrides, model=model)
    options = TrainOptions(folder=folder / name, quiet=True, only_steps=True, profile=profile)
    with pytest.MonkeyPatch.context() as patch:
        measure_nothing(patch.setattr)
        engine.launch(engine.prepare(run, options=options))
    return steps(folder / name / "steps.jsonl")


@pytest.fixture(scope="module")
def taken(folder, server) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Steps of every case with two processes, and those that other plans take from their checkpoints.

    All are taken by the same two processes.
    """
    plans = {"two": {name: plan for name, (_, plan, *_) in CASES.items()}, "onward": OTHER_PLANS}
    lowered = {kind: lower(folder, plans[kind], kind=kind) for kind in plans}
    copies = []
    for name in OTHER_PLANS:
        saved = Path(saves(folder, name, kind="two"), "step-00000002")
        copies.append(f"{saved}={Path(saves(folder, name, kind='onward'), saved.name)}")
    arguments = [*map(str, lowered["two"].values()), *copies, *map(str, lowered["onward"].values())]
    argv = ("python", str(Path(__file__).with_name("several.py")), *arguments)
    with workers_from(server):
        local.run(Launch(argv=argv, files={}, env=ON_CPU, num_processes=2), folder=folder / "several")
    return {
        kind: {name: steps(path / "megatron" / "steps.jsonl") for name, path in where.items()}
        for kind, where in lowered.items()
    }


@pytest.fixture(scope="module")
def two(taken) -> dict[str, list[dict[str, float]]]:
    """Steps of every case, with two processes."""
    return taken["two"]


@pytest.fixture(scope="module")
def onward(taken) -> dict[str, list[dict[str, float]]]:
    """Steps that other plans take from checkpoints of those."""
    return taken["onward"]


def lower(folder: Path, plans: dict[str, str], *, kind: str) -> dict[str, Path]:
    """Write what Megatron's processes read, and return the folder of each case."""
    engine, where = find_engine("megatron"), {}
    for name, plan in plans.items():
        model, _, *others = CASES[name]
        where[name] = folder / kind / name.replace(" ", "-")
        if name in OTHER_PLANS:
            if kind == "onward":  # a writer beside each process costs more than the steps
                others.append("train.checkpoint.asynchronous=false")
            others.insert(0, f"train.checkpoint={{folder: {saves(folder, name, kind=kind)}, every_steps: 2}}")
        run = loaded(folder, f"parallel={plan}", *others, model=model)
        local.write_files(engine.lower(run, folder=where[name]), where[name])
    return where


def saves(folder: Path, name: str, *, kind: str) -> str:
    """Folder in which a case saves."""
    return str(folder / kind / f"{name.replace(' ', '-')}-saved")


def assert_equal(taken: list[dict[str, float]], native: list[dict[str, float]]) -> None:
    for mine, theirs in zip(taken, native, strict=True):
        assert mine["learning_rate"] == pytest.approx(theirs["learning_rate"], rel=1e-12)
        for key in ("loss", "gradient_norm"):
            assert mine[key] == pytest.approx(theirs[key], rel=TOLERANCE), (mine["step"], key)


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_the_native_engine(two, native, name):
    assert len(two[name]) == 4
    assert_equal(two[name], native[kind_of(name)])
    assert two[name][-1]["loss"] < two[name][0]["loss"] - 0.3


@pytest.mark.distributed
@pytest.mark.parametrize("name", OTHER_PLANS)
def test_another_plan_goes_on(onward, native, name):
    assert_equal(onward[name], native[kind_of(name)][2:])


@pytest.mark.distributed
def test_losses_of_routers_are_felt(native):
    kinds = (MIXTURE,), (MIXTURE, BALANCED), (MIXTURE, BALANCED, Z_LOSS)
    plain, balanced, small = (native[kind][-1]["gradient_norm"] for kind in kinds)
    assert abs(balanced / plain - 1) > 1e3 * TOLERANCE
    assert abs(small / balanced - 1) > 1e3 * TOLERANCE


@dataclass(frozen=True, kw_only=True)
class Training:
    """`meshwright train` in a process of its own."""

    folder: Path
    process: WarmProcess

    def wait_for(self, name: str) -> None:
        """Return when there is a folder of that name."""
        deadline_s = time.monotonic() + 200
        while not (self.folder / name).is_dir():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline_s
            time.sleep(0.002)

    def end(self, exit_code: int) -> tuple[str, str]:
        """Stdout and stderr, when it has ended so."""
        out, error = self.process.communicate(timeout=200)
        assert self.process.returncode == exit_code, error
        return out, error


def started(folder: Path, *arguments: str, plan: str, server: Server, limit_bytes: int | None = None) -> Training:
    """It and its workers start warm; none writes a file larger than `limit_bytes`."""
    command = ["train", "run.yaml", "--json", "--only-steps", *arguments, f"--set=parallel={plan}"]
    script = WORKERS
    if limit_bytes is not None:
        script = folder / "limit.py"
        limits = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit_bytes}, {limit_bytes}))"
        limits += "\nsys.dont_write_bytecode = True"  # Python 3.11 keeps a module's file that was cut
        script.write_text(f"import resource, runpy, sys\n{limits}\nrunpy.run_path({str(WORKERS)!r})\n")
    process = WarmProcess(command, folder=folder, environment=os.environ | ON_CPU, script=script, server=server)
    return Training(folder=folder, process=process)


@pytest.mark.distributed
def test_a_run_that_is_stopped_and_killed_while_it_saves_goes_on(folder, server, meshwright, monkeypatch):
    evaluate = "train.evaluate={every_steps: 10, num_batches: 2}"  # its text is not trained on
    settings = (evaluate, "train.steps=20", "optimizer.warmup_steps=4")
    arguments = (
        "--out=killed",
        *(f"--set={setting}" for setting in settings),
        "--set=train.checkpoint={folder: saved, every_steps: 4}",
    )
    plan = "{data_shard: 2, sharding: optimizer}"
    training = started(folder, *arguments, plan=plan, server=server)
    training.wait_for("saved/.partial-step-00000004")  # its writers hear the signal too, as under Slurm
    for worker in psutil.Process(training.process.pid).children():
        os.killpg(worker.pid, signal.SIGTERM)
    training.end(128 + signal.SIGTERM)
    (*_, stopped) = checkpoint.checkpoints(folder / "saved")
    assert stopped.step == len(steps(folder / "killed" / "steps.jsonl")) < 12
    assert checkpoint.verify(stopped.path) is None

    training = started(folder, *arguments, "--resume", "--max-restarts=1", plan=plan, server=server)
    training.wait_for("saved/.partial-step-00000016")
    first, *_ = psutil.Process(training.process.pid).children()
    first.kill()
    out, error = training.end(0)
    assert "starting again" in error
    lines = (folder / "killed/megatron/steps.jsonl").read_text().splitlines()
    taken = [json.loads(line)["step"] for line in lines]
    assert taken.count(12) == 1
    assert taken.count(13) == 2  # the checkpoint of step 16 never was
    assert_equal(steps(folder / "killed" / "steps.jsonl"), alone(folder, "evaluated", *settings))
    record = json.loads(out)
    assert record["ending"] == "done"
    assert record["software"]["megatron-core"] == "0.16.1"
    assert not list((folder / "saved").glob(".*"))
    theirs = json.loads((folder / "evaluated" / "record.json").read_text())["statistics"]
    mine = record["statistics"]
    assert mine.keys() == theirs.keys()
    assert mine["num_checkpoints"] == len({*range(4, 21, 4), stopped.step})
    assert 0 < mine["checkpoint_stall_s"] < mine["elapsed_s"]
    for key in ("model_flops_per_token", "parameters", "trained_parameters", "tokens"):
        assert mine[key] == theirs[key]

    monkeypatch.chdir(folder)
    done = meshwright("checkpoint", "to-hf", "saved", "weights", "--dtype=fp32")
    assert done.exit_code == 0, done.stderr
    (step,) = alone(folder, "onward", f"weights={folder / 'weights'}", "train.steps=1",
                      "train.evaluate={every_steps: 1, num_batches: 2}", "optimizer.learning_rate=1.0e-12",
                      "optimizer.warmup_steps=0")  # fmt: skip
    assert step["validation_loss"] == pytest.approx(mine["validation_loss"], rel=TOLERANCE)


def test_biases_leave_a_checkpoint_as_the_native_engine_trains_them(folder, taken, monkeypatch, meshwright):
    saving = f"train.checkpoint={{folder: {folder / 'native-biases-saved'}, every_steps: 2}}"
    alone(folder, "native-biases", saving, model=QWEN2)
    monkeypatch.chdir(folder)
    both = ("two/biases-saved", "native-biases-saved")
    for saved in both:
        done = meshwright("checkpoint", "to-hf", saved, f"{saved}-hf", "--dtype=fp32")
        assert done.exit_code == 0, done.stderr
    mine, native = (load_file(folder / f"{saved}-hf" / "model.safetensors") for saved in both)
    assert mine.keys() == native.keys()
    assert mine["model.layers.1.self_attn.k_proj.bias"].abs().max() > 1e-4
    for name, tensor in native.items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_a_checkpoint_that_cannot_be_written_ends_the_run(folder, server):
    training = started(
        folder, "--out=full-out", "--set=train.checkpoint={folder: full, every_steps: 5}",
        plan="{data_shard: 1, sharding: optimizer}", server=server, limit_bytes=100 * 1024,
    )  # fmt: skip
    _, error = training.end(1)
    assert "cannot write a checkpoint below full: process 0: Worker failure" in error
    assert not checkpoint.checkpoints(folder / "full")


@pytest.mark.slow
@pytest.mark.distributed
def test_a_profile_has_the_categories_of_the_native_engine(folder, server):
    training = started(
        folder, "--out=profiled", "--set=train.steps=10", "--profile-steps=6:8",
        plan="{data_shard: 2, sharding: optimizer}", server=server,
    )  # fmt: skip
    training.end(0)
    record = json.loads((folder / "profiled" / "record.json").read_text())
    found = record["profile"]
    assert found == json.loads((folder / "profiled" / "profile" / "summary.json").read_text())
    assert found["steps"] == [6, 7, 8]
    assert sum(found["shares"].values()) == pytest.approx(1)
    for name in ("GEMM", "attention", "elementwise", "optimizer", "communication", "idle"):
        assert found["shares"][name] > 0, name
    assert found["unknown"] == []
    lines = steps(folder / "profiled" / "steps.jsonl")
    assert [line["step"] for line in lines if line.get("profiled")] == [5, 6, 7, 8]
    assert record["statistics"]["step_s"]["n"] == 6
    assert record["time_s"]["profiling"] >= sum(line["step_s"] for line in lines if line.get("profiled"))
    alone(folder, "profiled-native", "train.steps=10", profile=True)
    sides = [str(folder / "profiled-native"), str(folder / "profiled")]
    compared = compare_items(sides, is_like_for_like=True)
    assert compared.gaps
    assert not any("not split" in text for text in compared.cautions)


@pytest.mark.distributed
def test_steps_can_wait_for_a_checkpoint(two, folder):
    _, saved = checkpoint.checkpoints(Path(saves(folder, "shared optimizer", kind="two")))
    assert saved.step == len(two["shared optimizer"])
    assert checkpoint.verify(saved.path) is None


def test_without_an_accelerator_it_is_refused_before_anything_starts(folder, meshwright, monkeypatch):
    monkeypatch.chdir(folder)
    done = meshwright("train", "run.yaml", "--out=refused")
    assert done.exit_code == 3
    assert "megatron-core 0.16.1 needs a CUDA device" in done.stderr
    assert not (folder / "refused").exists()
