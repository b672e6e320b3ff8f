"""Imports of a first step are there before the memory of a process is predicted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.tiny_runs import tiny_run

from meshwright.engines.native import compiling
from meshwright.specs.plan import Plan, Recompute, Sharding

ROOT = Path(__file__).parents[3]
SELECTIVE = Recompute.SELECTIVE
COMPILER, SHARDED = "torch._dynamo", "torch.distributed.tensor.parallel"


@pytest.mark.parametrize(
    ("plan", "imports"),
    [
        (Plan(), []),
        (Plan(recompute=Recompute.FULL), []),
        (Plan(recompute=SELECTIVE, recompute_modules=("norm", "activation")), []),
        (Plan(recompute=SELECTIVE, recompute_modules=("norm", "core_attention")), []),
        (Plan(recompute=SELECTIVE, recompute_modules=("alternate_matmuls",)), [COMPILER]),
        (Plan(tensor=2), [SHARDED, COMPILER]),
        (Plan(data_shard=2, sharding=Sharding.PARAMETERS), [SHARDED, COMPILER]),
    ],
)
def test_the_compiler_is_imported_where_a_step_would(monkeypatch, plan, imports):
    found = []
    monkeypatch.setattr(compiling, "import_module", found.append)
    compiling.import_compiler(tiny_run(), plan=plan)
    assert found == imports


@pytest.mark.parametrize("names", [("norm",), ("norm", "core_attention")])
def test_a_dropout_that_is_repeated_needs_pytorchs_checkpoint(monkeypatch, names):
    found = []
    monkeypatch.setattr(compiling, "import_module", found.append)
    run = tiny_run("task=lora", "lora={rank: 2, alpha: 4, dropout: 0.1}")
    compiling.import_compiler(run, plan=Plan(recompute=SELECTIVE, recompute_modules=names))
    assert found == ["torch._dynamo"] * ("core_attention" in names)


FULL = """
import sys
import torch
from tests.tiny_runs import tiny_run
from meshwright.engines.native.recompute import recompute
from meshwright.specs.plan import Plan, Recompute
from meshwright.training.models import build_model, init_weights
model = build_model(tiny_run().model, device="cpu")
init_weights(model, seed=0)
recompute(list(model.layers.values()), plan=Plan(recompute=Recompute.FULL))
model(torch.zeros(1, 4, dtype=torch.long), labels_BT=torch.zeros(1, 4, dtype=torch.long)).backward()
print("torch._dynamo" in sys.modules)
"""


def test_full_recomputation_imports_no_compiler():
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "False\n"


TRAINING = """
import sys
from pathlib import Path
from tests.tiny_runs import tiny_run
from meshwright.engines.native import engine
from meshwright.engines.base import Measuring, TrainOptions
run = tiny_run("parallel={data_shard: 1}")
engine.train(run, options=TrainOptions(folder=Path(sys.argv[1]), quiet=True, measuring=Measuring.NEVER))
print([name for name in ("torch._dynamo", "torch.distributed.tensor", "sympy") if name in sys.modules])
"""


def test_a_process_that_shards_nothing_knows_no_distributed_tensors(tmp_path):
    command = [sys.executable, "-c", TRAINING, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]"


def test_compiled_layers_need_what_generates_code_too(monkeypatch):
    found = []
    monkeypatch.setattr(compiling, "import_module", found.append)
    compiling.import_compiler(tiny_run("train={steps: 2, compile: true}"), plan=Plan())
    assert found == ["torch._inductor.compile_fx"]
