"""Speed of the planner on one core by stage, and compared with Calculon and SimuMax on the same model and devices.

    python benchmarks/planner.py [--calculon CHECKOUT] [--simumax CHECKOUT --python PYTHON] [--seconds 60]

Process seconds, medians of --repeat runs. Targets: at least 1,000,000 candidates/s screened, and the whole
search of moe-2t on 98,304 devices below 10 s. "Whole search" counts only candidates with a legal shape and
micro-batch: each is bounded, and scored unless its bound excludes it. It takes some minutes without other planners.

With checkouts of github.com/calculon-ai/calculon and github.com/MooreThreads/SimuMax their own searches run too, on
GPT-3 175B and 512 A100; nothing of them is part of this repository. Calculon needs its dependency psutil here,
SimuMax runs under --python, an interpreter that has its dependencies. The spaces differ: Calculon varies how
collectives run and which tier carries them, SimuMax tensor and pipeline widths and recomputed layers, Meshwright also
context, HSDP, schedules and selective recomputation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.catalog import lookup as catalog
from meshwright.catalog.stacks import stack_for_engine
from meshwright.cost.tables import PlanTable
from meshwright.planner.legality import legal_mask, legality_context
from meshwright.planner.request import PlanRequest
from meshwright.planner.screen import cost_model
from meshwright.planner.search import BLOCK_ROWS, PlanResult, search
from meshwright.planner.space import choices, combine, default_space, is_whole, num_rows, shapes
from meshwright.specs.precision import PRECISIONS

SCREENED_PER_S, SEARCH_S = 1_000_000, 10.0


def request(model: str, cluster: str, *, batch: int, seq_len: int, engine: str) -> PlanRequest:
    return PlanRequest(
        model=catalog.model(model),
        cluster=catalog.cluster(cluster),
        seq_len=seq_len,
        global_batch=batch,
        precision=PRECISIONS["bf16"],
        stack=stack_for_engine(engine),
        engine=engine,
    )


def cpu_s(work: Callable[[], object], repeat: int) -> float:
    """Median process seconds; the first run warms up."""
    work()
    times_s = []
    for _ in range(repeat):
        start_s = time.process_time()
        work()
        times_s.append(time.process_time() - start_s)
    return statistics.median(times_s)


def sample(wanted: PlanRequest, count: int) -> PlanTable:
    """Random candidates of the whole space, legal or not."""
    space = default_space(wanted)
    shape_table, choice_table = shapes(space), choices(space)
    rng = np.random.default_rng(0)
    rows = rng.integers(0, num_rows(shape_table), 2 * count)
    plan = combine(shape_table.take(rows), choice_table.take(rng.integers(0, len(choice_table), 2 * count)))
    return plan.take(np.flatnonzero(is_whole(plan, space))[:count])


def stage_rates(wanted: PlanRequest, repeat: int) -> dict[str, float]:
    """Candidates per second of each filter, on blocks of the size that the search uses."""
    model, setting = cost_model(wanted), legality_context(wanted)
    plan = sample(wanted, 8 * BLOCK_ROWS)
    blocks = [plan.take(np.arange(i * BLOCK_ROWS, (i + 1) * BLOCK_ROWS)) for i in range(8)]
    stages: dict[str, Callable[[PlanTable], object]] = {
        "legality (all rules)": lambda p: legal_mask(p, context=setting),
        "memory (exact)": model.memory,
        "lower bound (per node)": model.bound_s,
        "step time (full model)": model.steps,
    }

    def over_blocks(stage: Callable[[PlanTable], object]) -> Callable[[], object]:
        return lambda: [stage(block) for block in blocks]

    return {name: num_rows(plan) / cpu_s(over_blocks(stage), repeat) for name, stage in stages.items()}


def timed_search(wanted: PlanRequest, repeat: int) -> tuple[PlanResult, float]:
    return search(wanted, top=10), cpu_s(lambda: search(wanted, top=10), repeat)


def covered(result: PlanResult) -> int:
    """Candidates behind the nodes of the search, each bounded and, unless excluded, scored."""
    return result.counts.nodes * len(choices(result.space)) // len(result.space.micro_batch)


def calculon_rate(checkout: Path, seconds: float) -> tuple[int, float]:
    """(configurations evaluated, process seconds) of Calculon's own search on GPT-3 175B and 512 A100."""
    sys.path.insert(0, str(checkout))
    from calculon import io  # pyright: ignore[reportMissingImports]
    from calculon.llm.llm import Llm  # pyright: ignore[reportMissingImports]
    from calculon.llm.optimal_execution import OptimalExecution  # pyright: ignore[reportMissingImports]
    from calculon.system import System  # pyright: ignore[reportMissingImports]

    app = Llm.Application(io.read_json_file(str(checkout / "models" / "gpt3-175B.json")))
    system_file = io.read_json_file(str(checkout / "systems" / "a100_80g.json"))
    system = System(system_file)
    count, start_s = 0, time.process_time()
    for arguments in calculon_searches(Llm, app):
        count += OptimalExecution.search(False, 1, False, 512, 512, "float16", app, system, *arguments)[1]
        if time.process_time() - start_s > seconds:
            break
    return count, time.process_time() - start_s


def calculon_searches(llm: Any, app: Any) -> Iterator[tuple[Any, ...]]:
    for tp in llm.get_all_tensor_parallelisms(512, app.hidden, app.attn_heads):
        for pp in llm.get_all_pipeline_parallelisms(512, tp, app.num_blocks):
            dp = llm.get_data_parallelism(512, tp, pp)
            for chunks in llm.get_valid_pipeline_interleavings(app.num_blocks, pp):
                for again in ("full", "attn_only", "none"):
                    for sharded in (True, False) if dp > 1 else (False,):
                        batch = 512 // dp * dp
                        yield tp, pp, dp, chunks, batch, again, sharded, "rs_ag", [True], False, True, True


SIMUMAX = """
import contextlib, io, json, sys, time
checkout, seconds = sys.argv[1], float(sys.argv[2])
sys.path.insert(0, checkout)
from simumax.core.config import ModelConfig, StrategyConfig, SystemConfig
from simumax.core.perf_llm import PerfLLM
plan = StrategyConfig.read_json_file(checkout + "/configs/strategy/tp1_pp2_dp4_mbs1.json")
plan |= {"enable_recompute": False, "recompute_granularity": None, "recompute_layer_num": 0}
model, count, estimate = PerfLLM(), 0, PerfLLM.run_estimate
start_s = time.process_time()
def counted(self, *args, **kwargs):
    global count
    count += 1
    if time.process_time() - start_s > seconds:
        raise TimeoutError
    return estimate(self, *args, **kwargs)
PerfLLM.run_estimate = counted
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(TimeoutError):
    model.configure(
        strategy_config=StrategyConfig.init_from_dict(plan),
        model_config=ModelConfig.init_from_config_file(checkout + "/configs/models/gpt3-175b.json"),
        system_config=SystemConfig.init_from_config_file(checkout + "/configs/system/a100_pcie.json"),
    )
    model.search_best_parallel_strategy(
        world_size=512, gmi_error=6, micro_batch_size=1, global_batch_size=512, all_search_result={},
        tp_search_list=[1, 2, 4, 8], pp_search_list=[1, 2, 4, 8, 16, 32], verbose=False,
    )
print(json.dumps([count, time.process_time() - start_s]))
"""


def simumax_rate(checkout: Path, python: str, seconds: float) -> tuple[int, float]:
    """(plans estimated, process seconds) of SimuMax's own search; it runs in its own process."""
    run = subprocess.run(
        [python, "-c", SIMUMAX, str(checkout), str(seconds)], capture_output=True, text=True, check=True
    )
    count, taken_s = json.loads(run.stdout.splitlines()[-1])
    return count, taken_s


def print_comparison(options: argparse.Namespace) -> None:
    gpt3 = request("gpt3-175b", "a100-8x64", batch=512, seq_len=2048, engine="megatron")
    ours, ours_s = timed_search(gpt3, options.repeat)
    rows = [("Meshwright", covered(ours), ours_s), ("of which scored with the full model", ours.counts.scored, ours_s)]
    if options.calculon:
        rows.append(("Calculon", *calculon_rate(options.calculon.resolve(), options.seconds)))
    if options.simumax:
        rows.append(("SimuMax", *simumax_rate(options.simumax.resolve(), options.python, options.seconds)))
    print("\n| GPT-3 175B, 512 A100, batch 512 | candidates | s | candidates/s |\n|---|--:|--:|--:|")
    for name, number, taken_s in rows:
        print(f"| {name} | {number:,} | {taken_s:.2f} | {number / taken_s:,.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--calculon", type=Path)
    parser.add_argument("--simumax", type=Path)
    parser.add_argument("--python", default=sys.executable, help="runs SimuMax")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()

    big = request("moe-2t", "mi355x-8x12288", batch=32_768, seq_len=4096, engine="native")
    print("| stage, moe-2t on 98,304 devices | candidates/s on one core |\n|---|--:|")
    rates = stage_rates(big, options.repeat)
    for name, rate in rates.items():
        print(f"| {name} | {rate:,.0f} |")
    result, seconds = timed_search(big, options.repeat)
    rates["whole search"] = covered(result) / seconds
    print(f"| whole search: {covered(result):,} in {seconds:.2f} s | {rates['whole search']:,.0f} |")
    print(f"\n{result.counts}")
    if options.calculon or options.simumax:
        print_comparison(options)
    slow = [n for n in ("memory (exact)", "whole search") if rates[n] < SCREENED_PER_S]
    slow += ["whole search above 10 s"] if seconds > SEARCH_S else []
    sys.exit(f"below target: {', '.join(slow)}" if slow else 0)


if __name__ == "__main__":
    main()
