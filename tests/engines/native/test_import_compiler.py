"""Imports of a first step are there before the memory of a process is predicted."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.tiny_runs import tiny_run

from meshwright.engines.native import compiling
from meshwright.specs.plan import Plan, Recompute, Sharding

SELECTIVE = Recompute.SELECTIVE


@pytest.mark.parametrize(
    ("plan", "imports"),
    [
        (Plan(), False),
        (Plan(recompute=Recompute.FULL), True),
        (Plan(recompute=SELECTIVE, recompute_modules=("norm", "activation")), False),
        (Plan(recompute=SELECTIVE, recompute_modules=("norm", "core_attention")), True),
        (Plan(tensor=2), True),
        (Plan(data_shard=2, sharding=Sharding.PARAMETERS), True),
    ],
)
def test_the_compiler_is_imported_where_a_step_would(monkeypatch, plan, imports):
    found = []
    monkeypatch.setattr(compiling, "import_module", found.append)
    compiling.import_compiler(tiny_run(), plan=plan)
    assert found == ["torch._dynamo"] * imports


def test_compiled_layers_need_what_generates_code_too(monkeypatch):
    found = []
    monkeypatch.setattr(compiling, "import_module", found.append)
    compiling.import_compiler(tiny_run("train={steps: 2, compile: true}"), plan=Plan())
    assert found == ["torch._inductor.compile_fx"]
