"""Every module that a plan may recompute, in every engine: each writer names it, or `check` refuses it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from meshwright import runfile
from meshwright.engines.base import check_export, find_engine
from meshwright.engines.maxtext.lower import REMATERIALISATION
from meshwright.engines.megatron.megatron_core.constructors import MODULES, settings_of
from meshwright.specs.plan import RECOMPUTE_MODULES, Recompute
from meshwright.specs.run import Run

SHARDINGS = {"native": "optimizer", "megatron": "optimizer", "torchtitan": "parameters", "maxtext": "parameters"}
MODELS = ("llama3.1-8b", "mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3")
NAMED = {
    "native": set(RECOMPUTE_MODULES),
    "megatron": set(RECOMPUTE_MODULES) - {"alternate_matmuls"},
    "torchtitan": {"alternate_matmuls"},
    "maxtext": {"core_attention", "norm", "activation", "mlp", "moe"},
}
"""Modules that an engine recomputes in some set of some model. No other fact of the engine is repeated here."""


def run_of(engine: str, model: str, *modules: str, precision: str = "bf16") -> Run:
    text = f"""
model: {model}
data: {{sequence_length: 4096}}
batch: {{global_sequences: 64, micro: 1}}
cluster: h100-8x2
engine: {engine}
precision: {precision}
parallel: {{data_shard: 16, sharding: {SHARDINGS[engine]}}}
train: {{steps: 10}}
"""
    run = runfile.loads(text)
    assert run.plan is not None
    plan = replace(run.plan, recompute=Recompute.SELECTIVE, recompute_modules=modules)
    return replace(run, plan=plan)


def sets_of_modules() -> Iterator[tuple[str, ...]]:
    """Every set but the empty one, in the order in which plans have them."""
    for count in range(1, len(RECOMPUTE_MODULES) + 1):
        yield from combinations(RECOMPUTE_MODULES, count)


def written(run: Run) -> dict[str, set[str]]:
    """The modules that each writer of the run's engine names, by writer."""
    engine, plan = find_engine(run.engine), run.plan
    assert plan is not None
    if run.engine == "native":
        found = runfile.loads(engine.lower(run, folder=Path("out")).files["run.yaml"]).plan
        assert found is not None
        return {"run file": set(found.recompute_modules)}
    if run.engine == "megatron":
        files = engine.lower_export(run, folder=Path("out")).files  # pyright: ignore[reportAttributeAccessIssue]
        named = {
            "constructors": settings_of(run, plan)["transformer"]["recompute_modules"],
            "Megatron-LM": re.search(r"--recompute-modules (.+)", files["megatron_lm.args"])[1].split(),
            "Bridge": re.findall(
                r"^ *- (\w+)$", files["megatron_bridge.yaml"].partition("recompute_modules:")[2], re.M
            ),
        }
        ours = {theirs: name for name, theirs in MODULES.items()}
        return {writer: {ours[name] for name in names if name in ours} for writer, names in named.items()}
    files = engine.lower(run, folder=Path("out")).files
    text = "\n".join(files.values())
    if run.engine == "torchtitan":
        return {"configuration": {"alternate_matmuls"} if "SelectiveAC.Config" in text else set()}
    policy = re.search(r"^remat_policy: (\w+)", text, re.M)
    assert policy is not None
    assert ("moe" if run.model.experts is None else "mlp") not in plan.recompute_modules  # one policy for both
    assert policy[1] == REMATERIALISATION[frozenset(plan.recompute_modules)]
    return {"configuration": set(plan.recompute_modules)}


@pytest.mark.when_touched  # test_files_for_megatron_come_back_with_the_module writes each module
@pytest.mark.parametrize("engine", SHARDINGS)
def test_what_is_not_refused_is_written(engine):
    named: set[str] = set()
    for model in MODELS:
        base = run_of(engine, model)
        assert base.plan is not None
        for modules in sets_of_modules():
            if len(modules) > 2 and engine in ("native", "megatron"):
                break  # each module is written by itself: pairs show that nothing depends on the others
            run = replace(base, plan=replace(base.plan, recompute_modules=modules))
            if problems := check_export(run):
                assert all(problem.reason for problem in problems)
                continue
            named |= set(modules)
            for writer, found in written(run).items():
                assert found == set(modules), (model, writer)
    assert named == NAMED[engine]


@pytest.mark.parametrize("file", ["megatron_lm.args", "megatron_bridge.yaml"])
@pytest.mark.parametrize("module", sorted(NAMED["megatron"]))
def test_files_for_megatron_come_back_with_the_module(module, file, tmp_path):
    run = run_of("megatron", "deepseek-v3", module)
    engine = find_engine("megatron")
    path = tmp_path / f"deepseek-v3{Path(file).suffix}"
    path.write_text(engine.lower_export(run, folder=Path("out")).files[file])  # pyright: ignore[reportAttributeAccessIssue]
    found = engine.import_run(str(path), cluster="h100-8x2")  # pyright: ignore[reportAttributeAccessIssue]
    again = runfile.loads(json.dumps(found.content)).plan
    assert again is not None
    assert again.recompute_modules == (module,)


@pytest.mark.parametrize(
    ("module", "precision", "is_refused"),
    [("norm", "fp8_delayed", True), ("activation", "fp8_delayed", True), ("core_attention", "fp8_delayed", False),
     ("norm", "fp8", False)],
)  # fmt: skip
def test_delayed_scales_do_not_go_with_modules_whose_output_is_dropped(module, precision, is_refused):
    """`TransformerConfig.__post_init__` of megatron-core 0.16.1 raises "Delayed scaling does not support ..."."""
    problems = check_export(run_of("megatron", "mixtral-8x7b", module, precision=precision))
    assert bool(problems) == is_refused, problems


def test_activations_of_experts_need_transformer_engine():
    """It raises "moe_act ... is only supported with moe_grouped_gemm", which Meshwright's processes do not have."""
    run = run_of("megatron", "mixtral-8x7b", "activation")
    assert [problem.key for problem in find_engine("megatron").check(run)] == ["parallel.recompute"]
    assert check_export(run) == ()


@pytest.mark.parametrize(
    ("switch", "recompute", "is_refused"),
    [
        ("cuda_graphs: partial", "full", True),
        ("cuda_graphs: full", "full", False),
        ("cuda_graphs: partial", "{modules: [moe]}", True),
        ("cuda_graphs: partial", "{modules: [norm]}", False),
        ("overlaps_experts: true", "full", True),
        ("overlaps_experts: true", "{modules: [moe]}", False),
    ],
)
def test_switches_that_recomputation_does_not_go_with(switch, recompute, is_refused):
    run = runfile.loads(f"""
model: mixtral-8x7b
data: {{sequence_length: 4096}}
batch: {{global_sequences: 64, micro: 1}}
cluster: h100-8x2
engine: megatron
parallel: {{data_shard: 16, expert: 8, sharding: optimizer, recompute: {recompute}}}
stack: {{{switch}}}
train: {{steps: 10}}
""")
    assert [problem.key for problem in check_export(run)] == ["parallel.recompute"] * is_refused
