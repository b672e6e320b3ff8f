"""MaxText's environment for the tests (the one that is there, else one that the documented command makes), and toys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir
from io import StringIO
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from tests.toy_training import REST, multiplication
from tests.warm import WarmProcess, measure_nothing

from meshwright import runfile
from meshwright.engines.base import TrainOptions, find_engine
from meshwright.engines.maxtext import environment

TOLERANCE = 3e-6  # relative; docs/guides/maxtext.md has what was measured


PLANS = {
    "one": "data_shard: 1, sharding: none",
    "sharded": "data_shard: 2, sharding: parameters",
    "tensor": "data_shard: 1, tensor: 2, sharding: none",
    "pipeline": "data_shard: 1, pipeline: 2, schedule: gpipe, sharding: none",
    "context": "data_shard: 1, context: 2, sharding: parameters",
    "experts": "data_shard: 2, expert: 2, sharding: parameters",
    "four": "data_shard: 2, tensor: 2, sharding: parameters",
}

Reference = Callable[[Path], list[dict[str, float]]]
"""Takes the steps of `FOLDER/run.yaml`; returns lines of a step log."""


OWN = """
weights: start
engine: maxtext
parallel: {data_shard: 1, sharding: none, recompute: full}
train: {steps: 20}
"""
"""Values of a run file that a test does not give."""


def whole(text: str) -> str:
    """The run file of `text`, which is its model and what else is not as in REST and OWN."""
    yaml, stream = YAML(typ="safe"), StringIO()
    yaml.dump(yaml.load(REST + OWN) | yaml.load(text), stream)
    return stream.getvalue()


class Toy:
    """A run file, its text and the weights that it starts from, in a folder; and the steps to hold others against.

    `reference` writes those weights, `FOLDER/start`, and takes the steps; None: the native engine does.
    """

    def __init__(
        self, folder: Path, text: str, environment: dict[str, str], *, reference: Reference | None = None
    ) -> None:
        self.folder, self.environment, text = folder, environment, whole(text)
        folder.mkdir()
        (folder / "run.yaml").write_text(text)
        (folder / "notes.txt").write_text(multiplication(60))
        pairs = [{"prompt": f"{i} times {j} is ", "answer": f"{i * j}."} for i in range(40) for j in range(13)]
        (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        if reference is not None:
            self.native = reference(folder)
            return
        self._write_start(text)
        self.native = self.train("native", "engine=native")

    def _write_start(self, text: str) -> None:
        import torch

        from meshwright.training.models import build_model, init_weights, materialize
        from meshwright.training.weights import save_weights

        model = build_model(runfile.loads(text).model)
        materialize(model, device=torch.device("cpu"))
        init_weights(model, seed=1)
        biases = [b for name, b in model.named_buffers() if name.endswith("router.bias_E")]
        for seed, bias_E in enumerate(biases):  # they begin at zero, which would not show that they are read
            bias_E.uniform_(-0.05, 0.05, generator=torch.Generator().manual_seed(seed))
        save_weights(model, self.folder / "start", dtype=torch.float32)

    def start(self, *arguments: str) -> WarmProcess:
        """A command in a process of its own."""
        return WarmProcess(arguments, folder=self.folder, environment=self.environment)

    def run(self, *arguments: str) -> tuple[int, str]:
        """Its exit code and what it says on stderr."""
        return self.ended(self.start(*arguments))

    def train(self, out: str, *overrides: str, plan: str | None = None, resume: bool = False) -> list[dict[str, float]]:
        """Train to the end, without a start of the command; the lines of the step log. `plan` is one of PLANS."""
        if plan is not None:
            overrides = (*overrides, f"parallel={{{PLANS[plan]}, recompute: full}}")
        with chdir(self.folder):
            run = runfile.load(Path("run.yaml"), overrides=list(overrides))
            engine = find_engine(run.engine)
            options = TrainOptions(folder=Path(out), resume=resume, quiet=True, only_steps=True)
            with pytest.MonkeyPatch.context() as patch:
                measure_nothing(patch.setattr)
                engine.launch(engine.prepare(run, options=options))
        return self.steps(out)

    def steps(self, out: str) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.folder / out / "steps.jsonl").read_text().splitlines()]

    def record(self, out: str) -> dict[str, dict[str, object]]:
        return json.loads((self.folder / out / "record.json").read_text())

    def device(self, out: str) -> dict[str, object]:
        """Device of a training, without its threads, which are the training's own."""
        return {key: value for key, value in self.record(out)["device"].items() if key != "threads"}

    @staticmethod
    def ended(process: WarmProcess) -> tuple[int, str]:
        """Exit code and stderr of a command, once it has ended."""
        _, stderr = process.communicate(timeout=500)
        assert process.returncode is not None
        return process.returncode, stderr

    def assert_native(self, taken: list[dict[str, float]]) -> None:
        """`taken` are the steps that the native engine has taken."""
        assert [line["step"] for line in taken] == [line["step"] for line in self.native]
        for mine, theirs in zip(taken, self.native, strict=True):
            assert mine["learning_rate"] == pytest.approx(theirs["learning_rate"], rel=3e-7)  # it is fp32 there
            assert ("validation_loss" in mine) == ("validation_loss" in theirs)
            for key in ("loss", "gradient_norm", "validation_loss"):
                if key in theirs:
                    assert mine[key] == pytest.approx(theirs[key], rel=TOLERANCE), (mine["step"], key)


@pytest.fixture(scope="session")
def maxtext() -> dict[str, str]:
    """Environment variables under which trainings find MaxText. Made once, whatever the number of test processes."""
    if environment.find() is None:
        looked = environment.search_python()
        if looked[-1].python is None:
            words = "; ".join(f"{one.location}: {one.found}" for one in looked)
            pytest.skip(f"MaxText needs Python 3.12, and none was found: {words}")
        command = environment.COMMAND.split()
        subprocess.run([sys.executable, *command[1:]], check=True)
    return os.environ | {environment.VARIABLE: str(environment.default_folder()), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def make_toy(maxtext, tmp_path_factory) -> Callable[..., Toy]:
    """Makes a folder of a name with a run file, its data and weights; trains it with the native engine."""
    folder = tmp_path_factory.mktemp("maxtext")
    return lambda name, text, **options: Toy(folder / name, text, maxtext, **options)
