"""Moments in 16 and 8 bits: what is kept, how it is rounded, and that each step is AdamW's."""

from __future__ import annotations

import json
import math
import shutil
from functools import cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from tests.rounding import CONFIDENCE, of_falling, unit_roundoff
from tests.warm import start_warm_ranks

from meshwright import runfile
from meshwright.engines.base import TrainOptions
from meshwright.engines.native import engine
from meshwright.engines.native.assembly import assemble
from meshwright.engines.native.parallel.mesh import mesh_coordinates
from meshwright.specs.plan import Plan, Sharding
from meshwright.specs.precision import STATE_BLOCK
from meshwright.specs.run import Optimizer, StateFormat
from meshwright.training import optimizer_states as moments
from meshwright.training.masters import masters_of
from meshwright.training.optimizer import MasterOptimizer
from meshwright.training.optimizer_states import ByteState, ChunkedAdamW, PlainState, dynamic_tree

pytestmark = pytest.mark.usefixtures("warm_ranks", "without_measuring")

CPU = torch.device("cpu")
NARROW = (StateFormat.BF16, StateFormat.INT8)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wide(count=4 * STATE_BLOCK, *, scale=1.0, seed=0):
    """Numbers over several decades, as gradients are."""
    return normal(count, seed=seed) * 10 ** normal(count, seed=seed + 1) * scale


@pytest.mark.parametrize(("is_signed", "least"), [(True, 0.55e-6), (False, 0.55e-7)])
def test_a_byte_spans_seven_decades(is_signed, least):
    table = dynamic_tree(is_signed=is_signed)
    assert table.dtype == torch.float32
    assert (table.diff() > 0).all()
    assert table[-1] == 1
    assert (table == 0).sum() == 1
    assert table[table > 0][0] == torch.tensor(least, dtype=torch.float64).float()
    if is_signed:
        assert torch.equal(table, -table.flip(0))
    in_the_highest_decade = (table >= 0.1).sum()
    assert in_the_highest_decade == 2 ** (6 if is_signed else 7)


@pytest.mark.parametrize("is_squared", [False, True])
def test_bytes_without_noise_are_the_nearest_of_the_table(is_squared):
    kept = ByteState(4 * STATE_BLOCK, device=CPU, is_squared=is_squared)
    values = wide()
    values[:5] = torch.tensor([0.0, 1e-15, 1.0, -1.0, 1e-7])
    values = values.square() if is_squared else values
    kept.encode(0, values, None)
    wanted = (values.sqrt() if is_squared else values).view(-1, STATE_BLOCK)
    ratios = wanted / wanted.abs().amax(dim=1, keepdim=True)
    distance = (ratios.flatten()[:, None] - kept.table).abs()
    found = (ratios.flatten() - kept.table[kept.codes.long()]).abs()
    is_lifted = (kept.codes == 1) & (ratios.flatten() < kept.table[1] / 2) & is_squared
    # a root, a quotient and a value of the table are rounded: near the middle of two values either may be the nearest,
    # each off by these three
    excess = (found - distance.amin(dim=1))[~is_lifted]
    assert (excess <= 2 * 3 * unit_roundoff(torch.float32) * ratios.flatten().abs()[~is_lifted]).all()
    assert is_lifted.sum() == (2 if is_squared else 0)


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e-6, 1.0, 1e6])
@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("is_squared", [False, True])
def test_what_was_decoded_is_kept_as_it_was(scale, seed, is_squared):
    kept = ByteState(4 * STATE_BLOCK, device=CPU, is_squared=is_squared)
    values = wide(scale=scale)
    kept.encode(0, values.square() if is_squared else values, torch.Generator().manual_seed(5))
    codes, scales = kept.codes.clone(), kept.scales.clone()
    decoded = kept.decode(0, 4 * STATE_BLOCK)
    kept.encode(0, decoded, None if seed is None else torch.Generator().manual_seed(seed))
    assert torch.equal(kept.codes, codes)
    assert torch.equal(kept.scales, scales)


def test_a_second_moment_is_zero_only_where_it_was():
    kept = ByteState(STATE_BLOCK, device=CPU, is_squared=True)
    assert kept.decode(0, STATE_BLOCK).count_nonzero() == 0  # nothing was kept yet
    values = torch.zeros(STATE_BLOCK)
    values[:2] = torch.tensor([1.0, 1e-30])
    kept.encode(0, values, torch.Generator().manual_seed(0))
    assert torch.equal(kept.decode(0, STATE_BLOCK) > 0, values > 0)


FORMATS = {
    "bf16": lambda size: PlainState(torch.zeros(size, dtype=torch.bfloat16), is_stochastic=True),
    "int8": lambda size: ByteState(size, device=CPU, is_squared=False),
}


@pytest.mark.parametrize("name", FORMATS)
def test_stochastic_rounding_keeps_the_mean(name):
    kept, generator = FORMATS[name](STATE_BLOCK), torch.Generator().manual_seed(0)
    values = normal(STATE_BLOCK)
    total, count = torch.zeros(STATE_BLOCK), 2000
    nearest = FORMATS[name](STATE_BLOCK)
    nearest.encode(0, values, None)
    for _ in range(count):
        kept.encode(0, values, generator)
        total += kept.decode(0, STATE_BLOCK)
    error = (total / count - values).norm()
    # of a step of the format, the nearest is off by a variance of 1/12, and a draw by p (1 - p): 1/6 in the mean
    assert error < CONFIDENCE * (2 / count) ** 0.5 * (nearest.decode(0, STATE_BLOCK) - values).norm()


# Roundings of one value of a step in fp32, one after the other: 6 of the first state (scale of the gradient and its
# product, 1 - beta1, difference, product, sum); 4 of the second's root (half of 8: those of the gradient twice,
# 1 - beta2, two products, sum); 5 of the denominator (root, correction, quotient, epsilon, sum); 3 of the corrected
# rate; 3 of the weight (product, quotient, sum). Each is at most u of the sizes that are added.
OF_A_STEP = (6 + 4 + 5 + 3 + 3) * unit_roundoff(torch.float32)


@pytest.mark.parametrize("states", NARROW)
def test_a_second_moment_does_not_stand_still(states):
    """Without gradients it falls by beta2 a step: 0.999 of a bf16 rounds to itself. Gradients keep the largest of each
    block, or its scale would fall in place of the bytes."""
    beta2, times = 0.999, 500
    weight, values = torch.zeros(8 * STATE_BLOCK), 1 + normal(8 * STATE_BLOCK).square()
    values[::STATE_BLOCK] = 2 * values.max()
    adamw = ChunkedAdamW([weight], settings=Optimizer(states=states, betas=(0.9, beta2)), weight_decay=0.0, seed=0)
    adamw.restore({weight: {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": values}}, num_steps=0)
    falls = torch.arange(len(weight)) % STATE_BLOCK > 0
    power = 1 if states is StateFormat.BF16 else 0.5  # a byte is of the root

    def kept():
        return adamw.second.decode(0, len(weight)).double() ** power

    before, factor = kept(), beta2**power
    weight.grad = torch.where(falls, 0.0, before ** (0.5 / power)).float()
    for _ in range(times):
        adamw.step(learning_rate=1e-3)
    falling = before[falls]
    if states is StateFormat.BF16:
        step = 2 * unit_roundoff(torch.bfloat16) * falling
    else:
        largest = before[::STATE_BLOCK].repeat_interleave(STATE_BLOCK)[falls]
        step = dynamic_tree(is_signed=False).diff().max() * largest
    wanted = factor**times * falling.sum()
    # all values may share what fp32 is off by; a draw of 16 bits is off by half of one in the mean: a geometric sum
    of_draws = 2.0**-17 * step.sum() * (1 - factor**times) / (1 - factor)
    limit = of_falling(falling, factor=factor, times=times, step=step) + times * OF_A_STEP * wanted + of_draws
    assert_within(kept()[falls].sum() - wanted, limit)


def assert_within(apart, allowed):
    worst = (apart.abs() / allowed).nan_to_num().argmax()
    found = f"apart by {float(apart.abs().flatten()[worst]):.2e}, allowed {float(allowed.flatten()[worst]):.2e}"
    assert (apart.abs() <= allowed).all(), found


@cache
def numbers_of(states, *, is_signed):
    """The numbers of a format, rising; those of a byte are shares of the largest of a block."""
    if states is StateFormat.INT8:
        return dynamic_tree(is_signed=is_signed).double()
    found = (torch.arange(2**16, dtype=torch.int32) << 16).view(torch.float32)
    return found[found.isfinite()].double().unique()


def assert_neighbour(kept, exact, *, states, is_signed, off):
    """Each of `kept` is one of the two numbers of the format around the exact one, from which fp32 may be `off`.

    A byte's scale is the largest of its block, and may be off as far as any of it.
    """
    scale, of_scale = torch.ones_like(exact), torch.zeros_like(exact)
    if states is StateFormat.INT8:
        scale, off = (by_block(t) for t in (exact, off))
        scale, of_scale = scale.clamp(min=moments.SMALLEST), off
    numbers, reach = numbers_of(states, is_signed=is_signed), (off + of_scale) / scale
    below = torch.searchsorted(numbers, exact / scale - reach, right=True) - 1
    above = torch.searchsorted(numbers, exact / scale + reach)
    below, above = (scale * numbers[i.clamp(0, len(numbers) - 1)] for i in (below, above))
    middle = (below + above) / 2
    assert_within(kept - middle, above - middle + of_scale)


def by_block(values):
    """The largest of its block in place of each value."""
    blocks = torch.nn.functional.pad(values.abs(), (0, -len(values) % STATE_BLOCK)).view(-1, STATE_BLOCK)
    return blocks.amax(dim=1).repeat_interleave(STATE_BLOCK)[: len(values)]


take_step = ChunkedAdamW.step


def follow(adamw, *, learning_rate, gradient_scale=None):
    """Take a step, and compare it with that of PyTorch in float64 from the same weights and states.

    Weights are as near as fp32 is; each state is a neighbour of the exact one in its format. With a mean that is exact
    (see above) the errors of many steps do not add up in one direction.
    """
    exact = []
    for tensor, states in adamw.stored():
        copy = tensor.double().requires_grad_()
        grad = None if tensor.grad is None else tensor.grad.double() * (1 if gradient_scale is None else gradient_scale)
        exact.append((copy, grad, {name: state.double() for name, state in states.items()}))
    settings, (beta1, beta2), number = adamw.settings, adamw.settings.betas, adamw.num_steps + 1
    wide = torch.optim.AdamW(
        [copy for copy, _, _ in exact], lr=learning_rate, betas=settings.betas, eps=settings.epsilon,
        weight_decay=adamw.weight_decay,
    )  # fmt: skip
    for copy, grad, states in exact:
        copy.grad = grad
        wide.state[copy] = {name: state.clone() for name, state in states.items()}
        wide.state[copy]["step"] = torch.tensor(float(number - 1))
    begin = [copy.detach().clone() for copy, _, _ in exact]
    take_step(adamw, learning_rate=learning_rate, gradient_scale=gradient_scale)
    wide.step()
    for (tensor, kept), (copy, grad, before), first in zip(adamw.stored(), exact, begin, strict=True):
        first_state, second = (wide.state[copy][name].flatten() for name in ("exp_avg", "exp_avg_sq"))
        size = before["exp_avg"].abs() + (0 if grad is None else grad.abs())
        denominator = (second / (1 - beta2**number)).sqrt().view_as(size) + settings.epsilon
        update = learning_rate * size / (1 - beta1**number) / denominator
        assert_within(tensor.double() - copy.detach(), OF_A_STEP * (first.abs() + update))
        kept = {name: state.double().flatten() for name, state in kept.items()}
        of_first = OF_A_STEP * size.flatten()
        assert_neighbour(kept["exp_avg"], first_state, states=settings.states, is_signed=True, off=of_first)
        power = 1 if settings.states is StateFormat.BF16 else 0.5  # a byte is of the root
        root = second**power
        assert_neighbour(
            kept["exp_avg_sq"] ** power, root, states=settings.states, is_signed=False, off=OF_A_STEP * root
        )


@pytest.mark.parametrize("states", NARROW)
@pytest.mark.parametrize("chunk", [STATE_BLOCK, 2**18])
def test_each_step_is_that_of_adamw(states, chunk, monkeypatch):
    monkeypatch.setitem(moments.CHUNK, "cpu", chunk)
    tensors = [normal(33, 40, seed=1), normal(700, seed=2), normal(16, 16, seed=3)]
    settings = Optimizer(states=states, betas=(0.9, 0.95), weight_decay=0.1)
    adamw = ChunkedAdamW(tensors, settings=settings, weight_decay=0.1, seed=0)
    for step in range(20):
        for i, tensor in enumerate(tensors):
            tensor.grad = normal(*tensor.shape, seed=100 * step + i)
        if step == 10:
            tensors[1].grad = None  # a tensor that this step did not use
        follow(adamw, learning_rate=1e-3)


@pytest.mark.parametrize("states", StateFormat)
def test_states_in_host_memory_change_no_bit(states, monkeypatch):
    """Chunks of two blocks, so that one is fetched and one stored beside the one that is updated."""
    monkeypatch.setitem(moments.CHUNK, "cpu", 2 * STATE_BLOCK)
    settings = Optimizer(states=states, weight_decay=0.1, gradient_clip=1.0)
    weights = {offloads: [normal(33, 40, seed=1), normal(700, seed=2)] for offloads in (False, True)}
    optimizers = {
        offloads: MasterOptimizer(
            masters_of([module_of(tensors)], compute=torch.bfloat16, on_host=offloads),
            settings=settings,
            is_single_process=True,
            offloads=offloads,
        )
        for offloads, tensors in weights.items()
    }
    for step in range(5):
        for optimizer in optimizers.values():
            for i, master in enumerate(optimizer.masters):
                master.parameter.grad = normal(*master.parameter.shape, seed=9 * step + i).bfloat16()
                master.add()
            if step == 3:
                optimizer.masters[1].forget_gradient()  # a tensor that this step did not use
            optimizer.step(learning_rate=1e-2)
    on_device, on_host = (optimizers[offloads].state() for offloads in (False, True))
    assert list(on_device) == list(on_host)
    assert all(torch.equal(on_device[name], on_host[name]) for name in on_device)
    for one, other in zip(*(optimizers[offloads].masters for offloads in (False, True)), strict=True):
        assert torch.equal(one.parameter, other.parameter)
        assert other.local.untyped_storage().nbytes() == 4  # of any shape


def module_of(tensors):
    return torch.nn.ParameterDict({str(i): tensor for i, tensor in enumerate(tensors)})


def test_the_planner_counts_the_bytes_that_are_kept():
    for states in NARROW:
        run = runfile.loads(TEXT, overrides=[f"optimizer.states={states}"])
        weight = torch.zeros(2**18)
        adamw = ChunkedAdamW([weight], settings=run.optimizer, weight_decay=0.0, seed=0)
        tensors = [t for kept in (adamw.first, adamw.second) for t in vars(kept).values()]
        kept_bytes = sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor) and t.numel() in SIZES)
        assert kept_bytes / weight.numel() == run.precision.optimizer_state_bytes


SIZES = (2**18, 2**18 // STATE_BLOCK)  # of values and of scales; tables are smaller
TEXT = """
model: {name: tiny, hidden: 32, num_layers: 2, vocab: 257, ffn_hidden: 64, attention: {num_heads: 4, num_kv_heads: 2}}
data: {source: SOURCE, tokenizer: bytes, sequence_length: 16}
batch: {global_sequences: 8, micro: 8}
precision: bf16
cluster: here
optimizer: {learning_rate: 1.0e-2, warmup_steps: 3}
train: {steps: 40, evaluate: {every_steps: 40, num_batches: 4}, checkpoint: {folder: SAVED, every_steps: 10}}
"""


@pytest.fixture
def train(tmp_path):
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 600)

    def run(*overrides, **options):
        text = TEXT.replace("SOURCE", str(tmp_path / "corpus.txt")).replace("SAVED", str(tmp_path / "saved"))
        loaded = runfile.loads(text, overrides=overrides)
        return engine.train(loaded, options=TrainOptions(folder=tmp_path / "out", quiet=True, **options))

    return run


def losses(tmp_path):
    return [json.loads(line)["loss"] for line in (tmp_path / "out" / "steps.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("states", NARROW)
@pytest.mark.when_touched  # test_a_checkpoint_goes_on_with_other_states trains with the same states
def test_each_step_of_a_training_is_that_of_adamw(train, monkeypatch, states):
    """Gradients of a model, clipped, span more decades than random ones."""
    formats = []

    def counted(adamw, **step):
        formats.append(adamw.settings.states)
        follow(adamw, **step)

    monkeypatch.setattr(ChunkedAdamW, "step", counted)
    train("train.checkpoint=null", "train.steps=10", f"optimizer.states={states}")
    assert formats == [states] * 2 * 10  # matrices and vectors


@pytest.mark.parametrize("states", NARROW)
@pytest.mark.when_touched  # test_a_checkpoint_goes_on_with_other_states resumes in one process
def test_a_resumed_run_rounds_as_the_whole_one(train, tmp_path, states):
    train(f"optimizer.states={states}", "train.steps=20")
    whole = losses(tmp_path)
    shutil.rmtree(tmp_path / "saved" / "step-00000020")
    train(f"optimizer.states={states}", "train.steps=20", resume=True)
    assert losses(tmp_path) == whole


def test_a_checkpoint_goes_on_with_other_states(train, tmp_path):
    train("optimizer.states=int8", "train.steps=20")
    for states in ("fp32", "bf16", "int8"):
        shutil.copytree(tmp_path / "saved", tmp_path / "kept", dirs_exist_ok=True)
        record = train(f"optimizer.states={states}", resume=True)
        assert record.statistics["validation_loss"] < 2.5
        shutil.rmtree(tmp_path / "saved")
        shutil.copytree(tmp_path / "kept", tmp_path / "saved")


@pytest.mark.parametrize("states", [StateFormat.FP32, pytest.param(StateFormat.INT8, marks=pytest.mark.when_touched)])
def test_a_run_goes_on_with_states_elsewhere(train, tmp_path, states):
    """From the device to host memory and back: the steps are those of a run whose states stay on the device."""
    common = (f"optimizer.states={states}", "optimizer.schedule=constant", "train.evaluate=null")
    train(*common, "train.steps=40", "parallel={data_shard: 1}")
    whole = losses(tmp_path)
    shutil.rmtree(tmp_path / "saved")
    shutil.rmtree(tmp_path / "out")
    for steps, offload in ((10, "none"), (20, "optimizer"), (30, "optimizer"), (40, "none")):
        plan = f"parallel={{data_shard: 1, offload: {offload}}}"
        train(*common, plan, f"train.steps={steps}", resume=steps > 10)
    assert losses(tmp_path) == whole


@pytest.mark.when_touched  # test_a_checkpoint_goes_on_with_other_states keeps them there in one process
@pytest.mark.distributed
def test_shards_have_their_states_in_host_memory(train, tmp_path):
    found = {}
    for offload in ("none", "optimizer"):
        plan = f"parallel={{data_shard: 2, sharding: parameters, offload: {offload}}}"
        train(plan, "batch.micro=2", "train.steps=5", "train.evaluate=null", "train.checkpoint=null")
        found[offload] = losses(tmp_path)
        shutil.rmtree(tmp_path / "out")
    assert found["optimizer"] == found["none"]


def check_copies(rank: int, folder: str) -> None:
    """Replicas take the same steps, bit for bit, though the masters of each process are rounded at random."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=4)
    plans = [
        Plan(data_replicate=2, data_shard=2, sharding=Sharding.PARAMETERS),
        Plan(tensor=2, data_shard=2, sharding=Sharding.PARAMETERS),
    ]
    for plan in plans:
        run = runfile.loads(TEXT, overrides=["data.source=synthetic", "optimizer.states=int8", "model.vocab=250"])
        coordinates = mesh_coordinates(plan=plan, device=CPU, rank=rank, num_ranks=4)
        parts = assemble(run, coordinates=coordinates)
        optimizer = parts.optimizer
        for step in range(3):
            tokens_BT = torch.randint(250, (4, 16), generator=torch.Generator().manual_seed(step))
            mine_BT = tokens_BT[coordinates.data_rank :: plan.data]
            parts.stepper.forward_backward({"tokens_BT": mine_BT, "labels_BT": mine_BT}, scale=1 / 64)
            optimizer.step(learning_rate=1e-2)
        for master in optimizer.masters:
            if master.copies > 1:
                mesh = master.parameter.device_mesh
                for along in master.copied_along:
                    group = mesh.get_group(along)
                    copies = [torch.empty_like(master.local) for _ in range(dist.get_world_size(group))]
                    dist.all_gather(copies, master.local, group=group)
                    assert all(torch.equal(copies[0], copy) for copy in copies), master.name
        assert any(m.copies > 1 for m in optimizer.masters)
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.when_touched  # test_a_checkpoint_goes_on_with_other_states trains with the same states
def test_copies_stay_equal(tmp_path: Path):
    start_warm_ranks(check_copies, args=(str(tmp_path),), nprocs=4)


@pytest.mark.when_touched  # test_a_checkpoint_goes_on_with_other_states resumes in one process
@pytest.mark.distributed
def test_another_number_of_processes_goes_on(train, tmp_path):
    train("optimizer.states=int8", "train.steps=20", "batch.micro=4")
    plan = "parallel={data_shard: 2, sharding: parameters}"
    record = train("optimizer.states=int8", plan, "batch.micro=4", resume=True)
    assert record.statistics["num_devices"] == 2
    assert record.statistics["validation_loss"] < 2.5
    assert math.isfinite(losses(tmp_path)[20])
    assert losses(tmp_path)[20] < losses(tmp_path)[10]
