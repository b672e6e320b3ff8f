"""Responses of the shipped calibration to micro-batch, sequence, die and release: physics, not rows of a table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.catalog import lookup as catalog
from meshwright.catalog.clusters import placed_fabric
from meshwright.cost.rates import system_rates
from meshwright.cost.step import estimate_steps
from meshwright.cost.tables import BatchTable, model_row, plan_row, precision_row
from meshwright.specs.features import CudaGraphs, Dispatcher, Features, WireFormat
from meshwright.specs.hardware import Cluster, Stack
from meshwright.specs.plan import Plan, Recompute, Sharding
from meshwright.specs.precision import PRECISIONS

NEMO = Stack(framework="nemo", vintage=2025.4)
PLAN = Plan(data_shard=8, sharding=Sharding.OPTIMIZER, micro_batch=1)


def rate(
    device: str,
    *,
    model: str = "llama3-8b",
    precision: str = "bf16",
    stack: Stack = NEMO,
    plan: Plan = PLAN,
    seq_len: int = 8192,
) -> float:
    """Tokens/s per device on eight devices, 2^22 tokens a step."""
    per_node = min(8, catalog.usual_devices_per_node(device))
    fabric = placed_fabric(catalog.default_fabric_name(device), devices_per_node=per_node, num_nodes=8 // per_node)
    cluster = Cluster(
        name=device,
        accelerator=catalog.accelerator(device),
        fabric=fabric,
        devices_per_node=per_node,
        num_nodes=8 // per_node,
    )
    steps = estimate_steps(
        model=model_row(catalog.model(model)),
        batch=BatchTable(seq_len=seq_len, global_batch=2**22 // seq_len),
        plan=plan_row(plan),
        precision=precision_row(PRECISIONS[precision]),
        rates=system_rates(cluster, PRECISIONS[precision], stack),
    )
    return float(steps.tokens_per_s_per_device)


@pytest.mark.parametrize(
    ("board", "other", "least", "most"),
    [
        ("h200", "h100", 1.0, 1.09),  # the same die with faster memory
        ("h800", "h100", 0.95, 1.03),  # the same die with slower links
        ("gb200", "b200", 1.03, 1.14),  # peaks differ by 11 %, power by 20 %
        ("mi325x", "mi300x", 1.0, 1.25),  # the same die with 1000 instead of 750 W
    ],
)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_boards_with_one_die_differ_as_their_clocks_do(precision, board, other, least, most):
    assert least <= rate(board, precision=precision) / rate(other, precision=precision) <= most


def test_gb200_and_b200_differ_by_their_peaks_in_8_bits():
    assert 1.03 <= rate("gb200", precision="fp8") / rate("b200", precision="fp8") <= 1.11


class TestMicroBatch:
    """A mixture with small kernels waits for its host; with graphs, or with large kernels, it does not."""

    STACK = Stack(framework="megatron-bridge", vintage=2026.1)

    def gain(self, device: str, **switches: object) -> float:
        """Rate at micro-batch 8 over that at 1."""
        plan = replace(PLAN, expert=8)
        features = Features(dispatcher=Dispatcher.HYBRIDEP, **switches)  # pyright: ignore[reportArgumentType]
        common = {"model": "qwen3-30b-a3b", "precision": "fp8", "stack": replace(self.STACK, features=features),
                  "seq_len": 4096}  # fmt: skip
        return rate(device, plan=replace(plan, micro_batch=8), **common) / rate(device, plan=plan, **common)

    @pytest.mark.parametrize("device", ["h100", "gb200"])
    def test_it_helps_where_the_host_binds(self, device):
        assert 1.2 < self.gain(device, cuda_graphs=CudaGraphs.NONE) < 4

    @pytest.mark.parametrize("device", ["h100", "gb200"])
    def test_and_hardly_with_graphs_of_the_whole_iteration(self, device):
        """Only the starts of each expert's GEMMs and casts remain, short against H100's longer kernels."""
        assert self.gain(device, cuda_graphs=CudaGraphs.FULL) < (1.14 if device == "h100" else 1.28)

    def test_nor_in_a_dense_model(self):
        assert 1 <= rate("h100", plan=replace(PLAN, micro_batch=8)) / rate("h100") < 1.05


def test_efficiency_of_attention_rises_with_the_sequence():
    """From 4k to 32k tokens attention grows from 12 to 52 % of the FLOPs; the rate falls by less than its time does."""
    rates = [rate("h100", seq_len=s) for s in (4096, 8192, 16384, 32768)]
    assert rates == sorted(rates, reverse=True)
    assert 1.3 < rates[0] / rates[-1] < 2.2


def test_releases_step():
    """Dates inside a release predict nearly the same; the release with graphs of whole iterations is faster."""
    plan = replace(PLAN, expert=8, micro_batch=4)

    def at(vintage: float) -> float:
        stack = Stack(framework="megatron-bridge", vintage=vintage)
        return rate("gb200", model="qwen3-30b-a3b", precision="mxfp8", stack=stack, plan=plan, seq_len=4096)

    assert at(2026.26) == pytest.approx(at(2026.34), rel=0.02)
    assert at(2026.58) > 1.08 * at(2026.25)


def test_overlap_of_expert_communication_hides_it():
    plan = replace(PLAN, expert=8, micro_batch=2)

    def at(overlaps: bool) -> float:
        features = Features(overlaps_experts=overlaps, cuda_graphs=CudaGraphs.FULL)
        stack = Stack(framework="megatron-bridge", vintage=2026.1, features=features)
        return rate("h200", model="qwen3-30b-a3b", precision="fp8", stack=stack, plan=plan, seq_len=4096)

    assert 1.03 < at(True) / at(False) < 1.5


def test_factors_on_everything_stay_near_one():
    for framework in ("nemo", "megatron-bridge", "mlperf-nvidia", "torchtitan", "nanotron", "primus-megatron"):
        for device in ("h100", "gb200", "mi355x"):
            stack = Stack(framework=framework)
            cluster = catalog.cluster(f"{device}-4x4" if device == "gb200" else f"{device}-8x2")
            factor = float(system_rates(cluster, PRECISIONS["bf16"], stack).general_factor)
            assert 0.92 < factor < 1.08, (framework, device)


class TestSwitches:
    """Effect of a switch of the software, everything else equal."""

    DENSE = Plan(tensor=8, data_shard=1, sharding=Sharding.OPTIMIZER, sequence_parallel=True)
    EXPERTS = replace(PLAN, expert=8, micro_batch=4)

    def ratio(
        self,
        on: Features,
        off: Features,
        *,
        device: str = "h100",
        framework: str = "megatron-bridge",
        model: str = "llama3-8b",
        precision: str = "bf16",
        seq_len: int = 8192,
        plan: Plan = PLAN,
    ) -> float:
        """Rate with `on` over that with `off`, with graphs of the whole iteration, so that no host binds."""

        def at(switches: Features) -> float:
            stack = Stack(framework=framework, vintage=2026.1, features=replace(switches, cuda_graphs=CudaGraphs.FULL))
            return rate(device, model=model, precision=precision, stack=stack, plan=plan, seq_len=seq_len)

        return at(on) / at(off)

    def test_a_compiler_helps_where_operations_run_one_by_one(self):
        """torchtitan's 8B on H100: 5,762 tokens/s without, 6,667 with."""
        found = self.ratio(Features(compiles=True), Features(compiles=False), framework="torchtitan")
        assert 1.05 < found < 1.3

    def test_overlapped_collectives_of_tensor_parallelism(self):
        """torchtitan on 256 H100, TP8: 6 to 16 % faster."""
        on, off = Features(overlaps_tensor=True), Features(overlaps_tensor=False)
        assert 1.02 < self.ratio(on, off, framework="torchtitan", plan=self.DENSE) < 1.25
        assert self.ratio(on, off, framework="torchtitan") == 1

    def test_attention_in_8_bits_matters_on_long_sequences(self):
        on, off = Features(fp8_attention=True), Features(fp8_attention=False)
        short, long = (self.ratio(on, off, precision="fp8", seq_len=s) for s in (2048, 32768))
        assert 1 < short < 1.04 < long < 1.3

    def test_narrow_formats_on_the_wire(self):
        plan = Plan(data_shard=8, sharding=Sharding.PARAMETERS)
        wide = Features(gradient_format=WireFormat.FP32, parameter_format=WireFormat.FP32)
        narrow = Features(gradient_format=WireFormat.BF16, parameter_format=WireFormat.FP8)
        assert 1.0 < self.ratio(narrow, wide, plan=plan, seq_len=2048) < 2

    @pytest.mark.parametrize("device", ["h100", "gb200"])
    def test_offloaded_activations_cost_what_the_host_link_cannot_hide(self, device):
        cost = 1 / self.ratio(Features(offloaded_activations=1.0), Features(offloaded_activations=0.0), device=device)
        assert (1.2 < cost < 8) if device == "h100" else (1 < cost < 1.3)

    def test_recomputed_activations_are_not_offloaded(self):
        def lost(*modules: str) -> float:
            kind = Recompute.SELECTIVE if modules else Recompute.NONE
            plan = replace(PLAN, recompute=kind, recompute_modules=modules)
            on, off = Features(offloaded_activations=1.0), Features(offloaded_activations=0.0)
            return 1 / self.ratio(on, off, plan=plan)

        assert 1 < lost("mlp") < lost("norm", "activation") < lost("norm") < lost()

    def test_imbalance_slows_experts_and_nothing_else(self):
        natural, forced = Features(expert_imbalance=1.4), Features(expert_imbalance=1.0)
        mixture = self.ratio(natural, forced, model="qwen3-30b-a3b", plan=self.EXPERTS, seq_len=4096)
        assert 1 / 1.4 < mixture < 0.9
        assert self.ratio(natural, forced) == 1

    def test_fused_experts_are_faster_in_the_format_that_they_exist_for(self):
        on, off = Features(fuses_experts=True), Features(fuses_experts=False)
        common = {"device": "gb200", "model": "qwen3-30b-a3b", "plan": self.EXPERTS, "seq_len": 4096}
        assert 1.05 < self.ratio(on, off, precision="mxfp8", **common) < 1.4
        assert self.ratio(on, off, precision="fp8", **common) == 1
