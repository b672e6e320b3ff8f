"""LoRA runs: the same under every plan, resumed bit for bit, loadable by peft, and small in memory."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch.distributed as dist
from safetensors.torch import load_file
from tests.rounding import assert_equals, assert_rounded
from tests.warm import start_warm_ranks
from torch.distributed.tensor import DTensor

from meshwright import runfile
from meshwright.engines.native.assembly import assemble
from meshwright.engines.native.batch_loader import open_batch_loader
from meshwright.engines.native.check import check
from meshwright.engines.native.parallel.mesh import MeshCoordinates, mesh_coordinates
from meshwright.specs.plan import Plan, Recompute, Schedule, Sharding
from meshwright.training.models import add_adapters, build_model, init_weights, materialize
from meshwright.training.weights import adapters_of, load_adapters, load_weights, save_adapters, save_weights

pytestmark = pytest.mark.usefixtures("warm_ranks", "without_measuring", "without_page")

CPU = torch.device("cpu")
TEXT = """
model: {name: tiny, hidden: 32, num_layers: 2, vocab: 64, ffn_hidden: 64, attention: {num_heads: 4, num_kv_heads: 2}}
task: lora
lora: {rank: 3, targets: [query, value, output, up, down]}
data: {source: synthetic, sequence_length: 16}
batch: {global_sequences: 8, micro: 4}
optimizer: {learning_rate: 1.0e-2, epsilon: 1.0e-3, schedule: constant}
precision: fp32
cluster: here
train: {steps: 6}
"""
DROPOUT = ("lora.dropout=0.3",)
RESIDUAL = ("train.residual_dropout=0.2",)
OF_MODEL = (*RESIDUAL, "train.attention_dropout=0.1")
QKV = ("lora.targets=[qkv, output, down]",)
EVERYTHING = ("lora.targets=[query, key, value, output, gate, up, down]",)

SAVED = ("lora.modules_to_save=[embedding, head]",)
PATTERNED = ("lora.ranks={down: 2, 1.query: 5}", "lora.alphas={query: 8.0}")

LATENT = (
    "model.attention={kind: mla, num_heads: 4, num_kv_heads: 4, head_dim: 16, value_head_dim: 8,"
    " query_lora_rank: 16, kv_lora_rank: 16, rope_head_dim: 8}",
    "model.family=DeepseekV3ForCausalLM",
    "model.experts={num_experts: 4, top_k: 2, ffn_hidden: 32, num_shared: 1, num_dense_layers: 1, router: sigmoid}",
    "lora.targets=[query, key, output]",
    "weights=null",
)

CASES: dict[str, tuple[Plan, tuple[str, ...]]] = {
    "ddp": (Plan(data_shard=2, sharding=Sharding.NONE, micro_batch=2), EVERYTHING),
    "fsdp": (Plan(data_shard=2, sharding=Sharding.PARAMETERS, recompute=Recompute.FULL, micro_batch=2), EVERYTHING),
    "fsdp, bf16": (
        Plan(data_shard=2, sharding=Sharding.PARAMETERS, micro_batch=2),
        ("precision=bf16", "lora.targets=[query, down]"),
    ),
    "tensor": (Plan(tensor=2, micro_batch=4), EVERYTHING),
    "tensor, bf16": (Plan(tensor=2, micro_batch=4), ("precision=bf16",)),
    "fsdp, ranks and layers": (
        Plan(data_shard=2, sharding=Sharding.PARAMETERS, micro_batch=2),
        (*EVERYTHING, "lora.layers=[1]", "lora.ranks={down: 2}"),
    ),
    "tensor, ranks": (Plan(tensor=2, micro_batch=4), (*EVERYTHING, *PATTERNED)),
    "fsdp, saved modules, bf16": (
        Plan(data_shard=2, sharding=Sharding.PARAMETERS, micro_batch=2),
        (*SAVED, "precision=bf16"),
    ),
    "ddp, saved modules": (Plan(data_shard=2, sharding=Sharding.NONE, micro_batch=2), SAVED),
    "tensor, saved modules": (Plan(tensor=2, micro_batch=4), SAVED),
    "pipeline, saved embedding, tied": (
        Plan(pipeline=2, micro_batch=2),
        ("model.tied_embeddings=true", "lora.modules_to_save=[embedding]"),
    ),
    "fsdp, dora": (
        Plan(data_shard=2, sharding=Sharding.PARAMETERS, recompute=Recompute.FULL, micro_batch=2),
        (*EVERYTHING, "lora.use_dora=true"),
    ),
    "fsdp, pissa": (
        Plan(data_shard=2, sharding=Sharding.PARAMETERS, recompute=Recompute.FULL, micro_batch=2),
        (*EVERYTHING, "lora.init=pissa"),
    ),
    "tensor, olora, dropout": (Plan(tensor=2, micro_batch=4), (*EVERYTHING, *DROPOUT, "lora.init=olora")),
    "pipeline, pissa": (Plan(pipeline=2, micro_batch=2), ("lora.init=pissa",)),
    "fsdp, iterations": (Plan(data_shard=2, micro_batch=4), ("lora.init=pissa_niter_2",)),
    "tensor, dora, dropout": (Plan(tensor=2, micro_batch=4), (*EVERYTHING, *DROPOUT, "lora.use_dora=true")),
    "tensor, latent, dora": (Plan(tensor=2, micro_batch=4), (*LATENT, "lora.use_dora=true")),
    "experts": (
        Plan(data_shard=2, expert=2, sharding=Sharding.PARAMETERS, micro_batch=4),
        ("model.experts={num_experts: 4, top_k: 2, ffn_hidden: 32}", "lora.targets=[query, value]", "weights=null"),
    ),
    "tensor, whole residuals": (Plan(tensor=2, sequence_parallel=False, micro_batch=4), ()),
    "tensor, dropout": (Plan(tensor=2, recompute=Recompute.FULL, micro_batch=4), DROPOUT),
    "tensor, dropout of all": (Plan(tensor=2, recompute=Recompute.FULL, micro_batch=4), (*DROPOUT, *RESIDUAL)),
    "tensor, whole residuals, dropout": (Plan(tensor=2, sequence_parallel=False, micro_batch=4), RESIDUAL),
    "tensor, latent": (Plan(tensor=2, micro_batch=4), LATENT),
    "fsdp, qkv": (Plan(data_shard=2, sharding=Sharding.PARAMETERS, micro_batch=2), QKV),
    "tensor, qkv, dropout": (Plan(tensor=2, recompute=Recompute.FULL, micro_batch=4), (*QKV, *DROPOUT)),
    "tensor, qkv, whole residuals, bf16": (
        Plan(tensor=2, sequence_parallel=False, micro_batch=4),
        (*QKV, "precision=bf16"),
    ),
    "context": (Plan(context=2, micro_batch=4), ()),
    "pipeline": (Plan(pipeline=2, micro_batch=2), ()),
    "zero bubble": (Plan(pipeline=2, schedule=Schedule.ZERO_BUBBLE, micro_batch=2), ()),
    "pipeline, tied": (Plan(pipeline=2, micro_batch=2), ("model.tied_embeddings=true",)),
    "8-bit base, zero1": (Plan(data_shard=2, micro_batch=2), ("lora.base_format=int8",)),
    "4-bit base, pipeline": (Plan(pipeline=2, micro_batch=2), ("lora.base_format=nf4",)),
    "4-bit base, qkv": (Plan(pipeline=2, micro_batch=2), ("lora.base_format=nf4_double", *QKV)),
}


TERMS = 8 * 16
"""The longest sum of these runs: over the tokens of a step, in a gradient and in the loss."""
ROUNDINGS = 4
"""To bf16, from a product to the next: of its parts on the ranks and of their sum, of the residual stream, of the norm.
A feed-forward layer rounds as often: the products, the activation and their product."""

COVERED = ("tensor, bf16", "tensor, dropout", "pipeline", "4-bit base, qkv")
"""Cases whose plan and settings others have, with more."""


def lora_run(*overrides: str):
    return runfile.loads(TEXT, overrides=overrides)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Weights to start from."""
    return write_base(tmp_path_factory.mktemp("weights") / "base")


def write_base(folder: Path) -> Path:
    torch.set_num_threads(1)
    built = build_model(lora_run().model, device="cpu")
    init_weights(built, seed=5, std=0.2)
    with torch.no_grad():  # one case ties them
        built.get_parameter("head.weight").copy_(built.get_parameter("embedding.weight"))
    save_weights(built, folder, dtype=torch.float32)
    return folder


def steps(run, coordinates: MeshCoordinates, base: Path | None, *, num: int = 3, begin: list | None = None):
    """Losses, and the adapters afterwards, of a few steps. `begin`: what `numbers_of` holds at the start."""
    parts = assemble(run, coordinates=coordinates, weights=base)
    if begin is not None:
        for held, value in zip(numbers_of(parts), begin, strict=True):
            held.copy_(value)
    loader = open_batch_loader(run, coordinates=coordinates)
    losses = []
    for index in range(num):
        parts.before_step(index)
        batch = loader.batch(index)
        loss = parts.stepper.forward_backward(batch.tensors, scale=batch.counts.loss_scale)
        loss = loss / coordinates.plan.tensor
        if coordinates.num_ranks > 1:
            dist.all_reduce(loss)
        losses.append(loss.item())
        parts.optimizer.step(learning_rate=1e-2)
    trained = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in parts.trained().items()}
    return losses, trained


def numbers_of(parts) -> list:
    """Everything that an assembly computes with and does not compute: weights, and the scales of quantised ones."""
    (module,) = parts.modules
    return [t.detach() for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]


def labelled(case: str, losses, trained):
    """All results by name, for messages with that of the case."""
    return {f"{case}: {name}": tensor for name, tensor in trained.items()} | {f"{case}: losses": torch.tensor(losses)}


def compare_with_one_process(case: str, base: Path, found) -> None:
    """Losses and adapters of two steps: in fp32 to another order of sums, in bf16 to other roundings."""
    plan, overrides = CASES[case]
    alone = MeshCoordinates(plan=Plan(micro_batch=plan.micro_batch), device=CPU)
    run, wide = (lora_run(f"weights={base}", *overrides, *more) for more in ((), ("precision=fp32",)))
    folder = None if run.weights is None else base

    def computed(run, begin=None):
        return labelled(case, *steps(run, alone, folder, num=2, begin=begin))

    begin = [t.clone() for t in numbers_of(assemble(wide, coordinates=alone, weights=folder))]
    if run.precision.name == "fp32":
        assert_equals(lambda: computed(run, begin), found, weights=begin, terms=TERMS)
        return
    assert_rounded(
        computed(run), found, wide=lambda: computed(wide, begin), weights=begin, terms=TERMS, roundings=ROUNDINGS
    )


def check_plans(rank: int, meeting: str, cases: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}/meeting", rank=rank, world_size=2)
    base = Path(meeting) / "base"
    for name in cases:
        plan, overrides = CASES[name]
        run = lora_run(f"weights={base}", *overrides)
        folder = None if run.weights is None else base
        coordinates = mesh_coordinates(plan=plan, device=CPU, rank=rank, num_ranks=2)
        losses, trained = steps(run, coordinates, folder, num=2)
        assert losses[1] != losses[0]
        assert {tensor.dtype for tensor in trained.values()} == {torch.float32}, name
        everywhere = [{}] * 2
        dist.all_gather_object(everywhere, trained)  # a stage has its own
        if rank == 0:
            compare_with_one_process(name, base, labelled(name, losses, everywhere[0] | everywhere[1]))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize(
    "cases",
    [[name for name in CASES if name not in COVERED], pytest.param([*COVERED], marks=pytest.mark.slow)],
    ids=["all kinds", "covered"],
)
@pytest.mark.when_touched  # test_parallel.py divides models, and one process trains adapters below
def test_a_plan_equals_one_process(tmp_path, cases):
    write_base(tmp_path / "base")
    start_warm_ranks(check_plans, args=(str(tmp_path), cases), nprocs=2)


def test_dropout_is_dropped():
    losses = [
        steps(lora_run(*more), MeshCoordinates(plan=Plan(micro_batch=4), device=CPU), None)[0] for more in ((), DROPOUT)
    ]
    assert losses[0][0] == losses[1][0]  # an adapter begins at zero
    assert losses[0][2] != losses[1][2]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(micro_batch=4, recompute=Recompute.FULL),
        Plan(micro_batch=4, recompute=Recompute.SELECTIVE, recompute_modules=("core_attention", "norm", "activation")),
        Plan(micro_batch=4, recompute=Recompute.SELECTIVE, recompute_modules=("mlp",)),
        Plan(micro_batch=4, recompute=Recompute.SELECTIVE, recompute_modules=("alternate_matmuls",)),
    ],
    ids=lambda plan: ",".join(plan.recompute_modules) or "full",
)
def test_what_runs_again_drops_the_same(plan):
    # Where attention is kept, what is behind it would draw other numbers; that is refused.
    others = RESIDUAL if "alternate_matmuls" in plan.recompute_modules else OF_MODEL
    run = lora_run(*DROPOUT, *EVERYTHING, *others)
    expected = steps(run, MeshCoordinates(plan=Plan(micro_batch=4), device=CPU), None)[1]
    found = steps(run, MeshCoordinates(plan=plan, device=CPU), None)[1]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("base_format", ["full", "int8", "nf4", "nf4_double"])
def test_only_adapters_have_masters_states_and_gradients(base, base_format):
    run = lora_run("precision=bf16", f"weights={base}", f"lora.base_format={base_format}")
    parts = assemble(run, coordinates=MeshCoordinates(plan=Plan(micro_batch=4), device=CPU), weights=base)
    loader = open_batch_loader(run, coordinates=MeshCoordinates(plan=Plan(micro_batch=4), device=CPU))
    parts.stepper.forward_backward(loader.batch(0).tensors, scale=1e-2)
    (module,) = parts.modules
    assert all((p.grad is None) for p in module.parameters())  # bf16 gradients move into fp32 sums at once
    assert all(m.local.grad is not None for m in parts.masters)
    parts.optimizer.step(learning_rate=1e-2)
    frozen = [p for n, p in module.named_parameters() if ".lora_" not in n]
    assert {p.dtype for p in frozen} == {torch.bfloat16}
    assert not any(p.requires_grad for p in frozen)
    assert {m.local.dtype for m in parts.masters} == {torch.float32}
    moments = [t for name, t in parts.optimizer.state().items() if name.startswith("exp_avg")]
    assert sum(m.numel() for m in moments) == 2 * parts.num_trained
    assert parts.num_trained == sum(p.numel() for n, p in module.named_parameters() if ".lora_" in n)
    assert all(".lora_" in name for name in parts.state())
    held = sum(t.nbytes for t in [*frozen, *module.buffers()])
    everything = 2 * sum(p.numel() for p in build_model(run.model).parameters())
    # Embedding, head and norms stay in 16 bits.
    share = {"full": 1.0, "int8": 0.64, "nf4": 0.42, "nf4_double": 0.4}[base_format]
    assert held <= share * everything


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("model.experts={num_experts: 4, top_k: 2, ffn_hidden: 32}",), "lora.targets"),
        (("lora.base_format=int8",), "weights"),
        (("lora.use_dora=true", *QKV), "lora.targets"),
        (("lora.init=pissa", *QKV), "lora.init"),
        (("lora.init=olora", "lora.base_format=int8", "weights=w"), "lora.init"),
        (("lora.use_dora=true", "lora.base_format=int8", "weights=w"), "lora.base_format"),
        (("model.experts={num_experts: 4, top_k: 2, ffn_hidden: 32}", "lora.base_format=int8"), "lora.base_format"),
        ((*LATENT, "lora.targets=[qkv]"), "lora.targets"),
        ((*LATENT, "lora.targets=[key, value]", "lora.ranks={1.value: 2}"), "lora.ranks"),
        (("model.family=Phi3ForCausalLM", *EVERYTHING, "lora.alphas={up: 2.0}"), "lora.ranks"),
        (("lora.base_format=nf4", "weights=w", "parallel={data_shard: 1, tensor: 2}"), "parallel.tensor"),
        (("parallel={data_shard: 1, pipeline: 2, layers_per_stage: [0, 2]}",), "parallel.layers_per_stage"),
        (("parallel={data_shard: 1, pipeline: 2}", "lora.layers=[1]"), "parallel.pipeline"),
        (("lora.base_format=nf4", "weights=w", "parallel={data_shard: 2, sharding: parameters}"), "parallel.sharding"),
        (
            ("lora.base_format=nf4", "weights=w", "parallel={data_shard: 1, context: 2, sharding: parameters}"),
            "parallel.sharding",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(overrides, key):
    assert key in [problem.key for problem in check(lora_run(*overrides))]


# --- through the command line ---


@pytest.fixture
def tuned(meshwright, tmp_path, monkeypatch, base):
    """`tuned("a", "train.steps=3")`: a run in this folder with results in a/out and checkpoints in a/saved."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(TEXT)

    def train(name: str, *overrides: str, more: tuple[str, ...] = ()):
        checkpoints = f"train.checkpoint={{folder: {name}/saved, every_steps: 3}}"
        sets = [a for o in (f"weights={base}", checkpoints, *overrides) for a in ("--set", o)]
        outcome = meshwright("train", "run.yaml", "--out", f"{name}/out", "--json", *sets, *more)
        assert outcome.exit_code == 0, outcome.stderr
        return outcome.json

    return train


def adapter(name: str) -> dict[str, torch.Tensor]:
    return load_file(Path(name) / "out" / "adapter" / "adapter_model.safetensors")


@pytest.mark.when_touched  # test_what_runs_again_drops_the_same draws the same numbers
def test_a_resumed_run_drops_what_one_that_was_never_stopped_drops(tuned):
    options = ("lora.dropout=0.3", *QKV, *OF_MODEL, "precision=bf16", "parallel={data_shard: 1, recompute: full}")
    tuned("whole", *options)
    tuned("parts", *options, "train.steps=3")
    tuned("parts", *options, more=("--resume",))
    expected, found = adapter("whole"), adapter("parts")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("parallel", ["auto", "{data_shard: 1}"])
@pytest.mark.parametrize("base_format", ["int8", "nf4"])
def test_a_quantised_base_trains_with_a_prediction(tuned, base_format, parallel):
    record = tuned("a", f"lora.base_format={base_format}", f"parallel={parallel}", "train.steps=1")
    assert record["ending"] == "done"
    assert record["predicted"]["step"]["value"] > 0
    assert not any("nothing was predicted" in note for note in record["notes"])
    assert any(f"its best checkpoint are of the base in {base_format}" in note for note in record["notes"])


@pytest.mark.when_touched  # test_kills_leave_no_trace kills a run of all weights
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, tiny_run, wait_for):
    lora = {
        "task": "lora",
        "lora": "{rank: 4, dropout: 0.2, use_dora: true, ranks: {query: 2}, modules_to_save: [head]}",
    }
    train = "{steps: 30, checkpoint: {folder: saved, every_steps: 10}, neftune_alpha: 5, label_smoothing: 0.1}"
    whole, killed = (tiny_run(tmp_path / name, train=train, **lora) for name in ("whole", "killed"))
    whole.train()
    process = killed.start()
    wait_for(killed.checkpoints, process)
    killed.kill(process)
    assert process.returncode == -signal.SIGKILL
    assert len(killed.losses()) < 30
    killed.train("--resume")
    assert killed.losses() == whole.losses()


def test_other_adapters_or_other_weights_are_not_resumed(tuned, meshwright, tmp_path, base):
    tuned("a", "train.steps=3")
    resumed = ("train", "run.yaml", "--resume", "--out", "a/out", "--set", "train.checkpoint={folder: a/saved}")
    outcome = meshwright(*resumed, "--set", f"weights={base}", "--set", "lora.alpha=1.0")
    assert outcome.exit_code == 2
    assert "lora.alpha: " in outcome.stderr
    outcome = meshwright(*resumed)
    assert outcome.exit_code == 2
    assert f"weights: {base} -> none" in outcome.stderr
    outcome = meshwright(*resumed, "--set", "task=pretrain", "--set", "lora=null")
    assert "task: lora -> pretrain" in outcome.stderr


def test_adapters_of_random_weights_are_noted_and_not_merged(tuned, meshwright):
    record = tuned("a", "weights=null", "train.steps=1")
    assert any("adapters are trained on random weights" in note for note in record["notes"])
    outcome = meshwright("checkpoint", "to-hf", "a/saved", "hf", "--merge")
    assert outcome.exit_code == 2
    assert "adapters of random weights cannot be merged" in outcome.stderr


@pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"  # peft 0.21 with transformers 5.23
)
@pytest.mark.parametrize(
    ("targets", "widths"),
    [
        ("[query, value, output, up, down]", 64 + 48 + 64 + 96 + 96),
        ("[qkv, output, up, down]", 32 + 32 + 16 + 16 + 64 + 96 + 96),
        ("[query, down], use_dora: true", 64 + 96 + 2 * 32 / 3),
        ("[query], modules_to_save: [embedding, head]", 64 + 2 * 64 * 32 / 6),
    ],
    ids=["separate", "qkv", "dora", "saved modules"],
)
def test_results_in_other_formats_are_the_same_model(tuned, meshwright, base, targets, widths):
    """peft on the base, the merged weights, and our own model give the same logits."""
    targets = f"lora={{rank: 3, targets: {targets}}}"
    record = tuned("a", "model.family=LlamaForCausalLM", targets)
    assert record["statistics"]["trained_parameters"] == pytest.approx(2 * 3 * widths)
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(3))
    run = lora_run(targets)
    parts = assemble(run, coordinates=MeshCoordinates(plan=Plan(), device=CPU), weights=base)
    load_adapters(parts.modules[0], "a/out/adapter")
    parts.eval_mode()
    ours = parts.modules[0]

    def assert_same_logits(other) -> None:
        # the longest sum is over the width of the feed-forward layer, the adapter's rank added
        assert_equals(
            lambda: {"logits": ours(tokens)}, {"logits": other(tokens).logits}, weights=ours.parameters(), terms=64 + 3
        )

    outcome = meshwright("checkpoint", "to-hf", "a/saved", "exported", "--json")
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.json["kind"] == "adapter"
    exported = load_file("exported/adapter_model.safetensors")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in adapter("a").items())
    outcome = meshwright("checkpoint", "to-hf", "a/saved", "merged", "--merge", "--dtype", "fp32")
    assert outcome.exit_code == 0, outcome.stderr
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    merged = transformers.AutoModelForCausalLM.from_pretrained("merged", dtype=torch.float32)
    assert_same_logits(merged)
    untuned = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with pytest.raises(AssertionError, match="apart by"):
        assert_same_logits(untuned)
    theirs = peft.PeftModel.from_pretrained(untuned, "a/out/adapter").eval()
    assert_same_logits(theirs)


@pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"  # peft 0.21 with transformers 5.23
)
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_adapters_that_begin_in_their_base_are_those_of_peft(tuned, meshwright, base, init):
    """They begin as PEFT's, change the base's function by training alone, and are written as plain ones."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    lora = f"lora={{rank: 3, alpha: 4, targets: [query, down], ranks: {{down: 2}}, init: {init}}}"
    run, plain = lora_run(lora), lora_run("lora.targets=[query, down]")
    coordinates = MeshCoordinates(plan=Plan(), device=CPU)
    (ours,), (untrained,) = (assemble(r, coordinates=coordinates, weights=base).modules for r in (run, plain))
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(3))

    def assert_same(found, expected) -> None:
        assert_equals(lambda: {"logits": found}, {"logits": expected}, weights=ours.parameters(), terms=64 + 3)

    assert_same(ours(tokens), untrained(tokens))
    config = peft.LoraConfig(
        r=3, lora_alpha=4, target_modules=["q_proj", "down_proj"], rank_pattern={"down_proj": 2}, init_lora_weights=init
    )
    record = tuned("a", "model.family=LlamaForCausalLM", lora)
    fresh = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    begun = dict(peft.get_peft_model(fresh, config).named_parameters())
    layer = "base_model.model.model.layers.1.self_attn.q_proj"
    for name, part in (("lora_A", "lora_a"), ("lora_B", "lora_b")):
        begin = ours.get_parameter(f"layers.1.attention.query.{part}.weight")
        assert_same(begin, begun[f"{layer}.{name}.default.weight"])
    assert record["statistics"]["trained_parameters"] == 2 * (3 * 64 + 2 * 96)

    for command in (("a/saved", "exported"), ("a/saved", "merged", "--merge", "--dtype", "fp32")):
        outcome = meshwright("checkpoint", "to-hf", *command)
        assert outcome.exit_code == 0, outcome.stderr
    assert {tensor.shape[0] for name, tensor in adapter("a").items() if "lora_A" in name} == {6, 4}
    untuned = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = transformers.AutoModelForCausalLM.from_pretrained("merged", dtype=torch.float32)(tokens).logits
    assert (merged - untuned(tokens).logits).abs().max() > 1e-2
    for folder in ("a/out/adapter", "exported"):
        theirs = peft.PeftModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder
        )
        assert_same(theirs.eval()(tokens).logits, merged)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_2", "olora"])
def test_a_resumed_run_goes_on_from_what_its_base_lost(tuned, init):
    tuned("whole", f"lora.init={init}")
    tuned("parts", f"lora.init={init}", "train.steps=3")
    tuned("parts", f"lora.init={init}", more=("--resume",))
    expected, found = adapter("whole"), adapter("parts")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_base_of_a_training_is_merged_on_request(tuned, meshwright, base):
    """Rounded to 4 bits and back it gives the logits of the training; the base as its files have it gives others."""
    targets = "lora={rank: 3, base_format: nf4, targets: [query, value]}"
    tuned("a", "model.family=LlamaForCausalLM", targets)
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(3))
    parts = assemble(lora_run(targets), coordinates=MeshCoordinates(plan=Plan(), device=CPU), weights=base)
    load_adapters(parts.modules[0], "a/out/adapter")
    parts.eval_mode()
    ours = parts.modules[0]
    found = {}
    for name, more in {"trained": ["--dequantised"], "files": []}.items():
        outcome = meshwright("checkpoint", "to-hf", "a/saved", name, "--merge", "--dtype", "fp32", "--json", *more)
        assert outcome.exit_code == 0, outcome.stderr
        assert any("--dequantised" in note for note in outcome.json["notes"]) == (name == "files")
        merged = build_model(ours.model, device="cpu")
        load_weights(merged, name)
        found[name] = merged(tokens)
    assert_equals(
        lambda: {"logits": ours(tokens)}, {"logits": found["trained"]}, weights=ours.parameters(), terms=64 + 3
    )
    assert (found["files"] - found["trained"]).abs().max() > 1e-3
    outcome = meshwright("checkpoint", "to-hf", "a/saved", "other", "--dequantised")
    assert (outcome.exit_code, "--dequantised needs --merge" in outcome.stderr) == (2, True)


def test_merging_wants_the_weights_that_were_trained_on(tuned, meshwright, tmp_path, base):
    copy = tmp_path / "copy"
    shutil.copytree(base, copy)
    tuned("a", f"weights={copy}", "train.steps=1")
    file = copy / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    outcome = meshwright("checkpoint", "to-hf", "a/saved", "merged", "--merge")
    assert outcome.exit_code == 2
    assert "the adapters belong to other weights" in outcome.stderr
    again = TEXT + f"weights: {base}\n"
    (tmp_path / "moved.yaml").write_text(again.replace("steps: 6", "steps: 6, checkpoint: {folder: a/saved}"))
    outcome = meshwright("checkpoint", "to-hf", "moved.yaml", "merged", "--merge")
    assert outcome.exit_code == 0, outcome.stderr


def test_alphas_of_fused_matrices_come_back(meshwright, tmp_path, monkeypatch):
    """Files hold three times an alpha of 0.1, which does not divide back to it exactly."""
    monkeypatch.chdir(tmp_path)
    phi = TEXT.replace("model: {", "model: {family: Phi3ForCausalLM, ").replace(
        "targets: [query, value, output, up, down]", "targets: [query, key, value], alpha: 0.1"
    )
    run = runfile.loads(phi)
    built = build_model(run.model)
    add_adapters(built, run.lora)
    materialize(built, device="cpu")
    init_weights(built, seed=0)
    save_adapters(adapters_of(built), "adapter", model=run.model, lora=run.lora, base=None)
    (tmp_path / "run.yaml").write_text(phi.replace("steps: 6", "steps: 6, checkpoint: {folder: saved}"))
    outcome = meshwright("checkpoint", "from-hf", "run.yaml", "adapter")
    assert outcome.exit_code == 0, outcome.stderr


def test_training_goes_on_from_an_adapter(tuned, meshwright, tmp_path, base):
    lora = "use_dora: true, ranks: {1.up: 5}, modules_to_save: [embedding, head], targets"
    tuned("a", "train.steps=3", "lora.ranks={1.up: 5}", "lora.use_dora=true", "lora.modules_to_save=[embedding, head]")
    text = TEXT.replace("targets", lora)
    text = text.replace("steps: 6", "steps: 6, checkpoint: {folder: b/saved}") + f"weights: {base}\n"
    (tmp_path / "again.yaml").write_text(text)
    outcome = meshwright("checkpoint", "from-hf", "again.yaml", "a/out/adapter")
    assert outcome.exit_code == 0, outcome.stderr
    assert meshwright("checkpoint", "to-hf", "b/saved", "back").exit_code == 0
    back = load_file("back/adapter_model.safetensors")
    assert all(torch.equal(tensor, back[name]) for name, tensor in adapter("a").items())
    outcome = meshwright("train", "again.yaml", "--resume", "--json")
    assert outcome.exit_code == 0, outcome.stderr


@pytest.mark.when_touched  # test_a_plan_equals_one_process trains adapters in stages
@pytest.mark.distributed
def test_stages_write_one_adapter(tuned):
    same = ("train.steps=1", "batch.micro=2", "optimizer.gradient_clip=null")
    tuned("alone", *same)
    tuned("stages", *same, "parallel={data_shard: 1, pipeline: 2}")
    expected, found = adapter("alone"), adapter("stages")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
