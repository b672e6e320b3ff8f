from collections.abc import Callable

import pytest

from meshwright.accuracy.rows import PublishedRun
from meshwright.accuracy.shipped import frameworks
from meshwright.catalog.stacks import stack_names
from meshwright.specs.plan import Recompute, Sharding

ReadOne = Callable[..., PublishedRun]


@pytest.mark.parametrize(
    ("cells", "key", "vintage"),
    [
        ({"framework": "NeMo", "framework_version": "nemo:24.12"}, "nemo", 2024.917),
        ({"framework": "NeMo Megatron-Bridge", "framework_version": "26.04.01"}, "megatron-bridge", 2026.25),
        ({"framework": "Megatron-Core", "framework_version": "r0.8.0", "date": "2024-07-15"},
         "megatron-lm", 2024.538),
        ({"framework": "Megatron-LM", "framework_version": "2021-04"}, "megatron-lm-2021", 2021.25),
        ({"framework": "Megatron-LM (ROCm)", "date": "2025-06"}, "primus-megatron", 2025.417),
        ({"framework": "Primus (torchtitan)", "date": "2026"}, "primus-torchtitan", 2026.5),
        ({"framework": "torchtitan", "framework_version": "commit 1a2; torch 2024-12-23"},
         "torchtitan", 2024.977),
        ({"framework": "Paxml (JAX)", "framework_version": "24.04 XLA"}, "pax", 2024.25),
        ({"framework": "NeMo", "framework_version": "nemo:dev", "source": "README.md @v24.11.1 [8B]",
          "date": "2025-06-09"}, "nemo", 2024.833),
        ({"framework": "NeMo", "source": "README.md @85d9284", "date": "2025-06-09"}, "nemo", 2025.439),
        ({"framework": "torchtitan", "framework_version": "v0.2.1"}, "torchtitan", 2025.985),
        ({"framework": "TorchTitan 0.2", "date": "2026-05"}, "torchtitan", 2025.794),
        ({"framework": "torchtitan", "framework_version": "main, torch 2.9", "date": "2026-05"},
         "torchtitan", 2026.333),
        ({"framework": "KempnerForge (PyTorch FSDP2)", "date": "2026-04"}, "kempnerforge", 2026.25),
        ({"framework": "Somebody's own (PyTorch FSDP2)", "date": "2025-01"}, "fsdp2", 2025.0),
        ({"framework": "Somebody's own", "date": "2025-01"}, "other", 2025.0),
        ({"framework": "", "date": ""}, "other", None),
    ],
)  # fmt: skip
def test_stack_key_and_vintage(read_one: ReadOne, cells: dict[str, object], key: str, vintage: float | None) -> None:
    c = read_one(**{"framework_version": ""} | cells).conditions
    assert c
    assert (c.stack.framework, c.stack.vintage) == (key, vintage)


@pytest.mark.parametrize(
    ("gpu", "framework", "key"),
    [
        ("H100-SXM-80GB", "PyTorch NVIDIA Release 23.09", "mlperf-nvidia"),
        ("MI300X", "LLMBoost 1.1.0", "mlperf-amd"),
        ("Gaudi2", "PyTorch 2.1.1", "mlperf-other"),
        ("TPU v5p", "maxtext", "maxtext"),
    ],
)
def test_mlperf_results_run_the_vendors_stack_of_the_round(
    read_one: ReadOne, gpu: str, framework: str, key: str
) -> None:
    c = read_one(
        source_key="mlperf_v4.0", gpu=gpu, framework=framework, framework_version="", precision="bf16"
    ).conditions
    assert c
    assert (c.stack.framework, c.stack.vintage) == (key, 2024.45)


@pytest.mark.parametrize(
    ("cells", "definition"),
    [
        ({"framework": "torchtitan"}, "reserved"),
        ({"framework": "nanotron"}, "unknown"),
        ({"framework": "nanotron", "notes": "mem = max allocated GiB"}, "allocated"),
        ({"framework": "NeMo", "notes": "read with nvidia-smi"}, "reserved"),
    ],
)
def test_memory_definition(read_one: ReadOne, cells: dict[str, object], definition: str) -> None:
    assert read_one(mem_gb_per_gpu=50, **cells).memory_definition == definition


def test_an_unknown_framework_shards_its_optimizer(read_one: ReadOne) -> None:
    """Plain data parallelism would hold all states on every device."""
    c = read_one(framework="Somebody's own", dp_type="").conditions
    assert c
    assert c.plan.sharding is Sharding.OPTIMIZER


def test_every_framework_key_is_a_stack_of_the_catalogue_and_has_a_source() -> None:
    data = frameworks()
    keys = {entry["key"] for entry in (*data["framework"], *data["mlperf"]["vendor"].values())}
    assert keys <= set(stack_names())
    assert all(entry["source"] for entry in data["framework"])


@pytest.mark.parametrize(
    ("framework", "sharding"),
    [
        ("LLaMA-Factory", Sharding.PARAMETERS),
        ("LLaMA Factory 0.9 (ZeRO-2)", Sharding.GRADIENTS),
        ("Unsloth", Sharding.NONE),
        ("axolotl", Sharding.PARAMETERS),
        ("TRL SFTTrainer", Sharding.PARAMETERS),
        ("OpenRLHF", Sharding.GRADIENTS),
        ("verl", Sharding.PARAMETERS),
        ("verl (Megatron)", Sharding.OPTIMIZER),
        ("Levanter", Sharding.PARAMETERS),
        ("MosaicML LLM Foundry", Sharding.PARAMETERS),
        ("Composer", Sharding.PARAMETERS),
        ("PyTorch Lightning", Sharding.NONE),
        ("Lightning + FSDP", Sharding.PARAMETERS),
        ("ms-swift", Sharding.NONE),
        ("ms-swift (DeepSpeed ZeRO-3)", Sharding.PARAMETERS),
        ("Megatron-SWIFT", Sharding.OPTIMIZER),
        ("FlagScale", Sharding.OPTIMIZER),
        ("PaddleNLP", Sharding.GRADIENTS),
        ("XTuner V1", Sharding.PARAMETERS),
        ("VeOmni", Sharding.PARAMETERS),
        ("HF Accelerate", Sharding.NONE),
        ("Accelerate (DeepSpeed ZeRO-3)", Sharding.PARAMETERS),
    ],
)
def test_trainers_without_rows_shard_as_what_they_build_on(
    read_one: ReadOne, framework: str, sharding: Sharding
) -> None:
    run = read_one(framework=framework, dp_type="", model="LLAMA3.2-1B")  # a copy fits
    assert run.conditions
    assert run.conditions.plan.sharding is sharding


@pytest.mark.parametrize(
    ("framework", "whole", "adapters"),
    [
        ("LLaMA-Factory", Sharding.PARAMETERS, Sharding.NONE),
        ("axolotl", Sharding.PARAMETERS, Sharding.NONE),
        ("TRL", Sharding.PARAMETERS, Sharding.NONE),
        ("PaddleNLP", Sharding.GRADIENTS, Sharding.OPTIMIZER),
        ("OpenRLHF", Sharding.GRADIENTS, Sharding.GRADIENTS),
        ("torchtune", Sharding.PARAMETERS, Sharding.PARAMETERS),
    ],
)
def test_examples_of_some_trainers_replicate_a_frozen_model(
    read_one: ReadOne, framework: str, whole: Sharding, adapters: Sharding
) -> None:
    for task, sharding in (("sft", whole), ("lora", adapters)):
        conditions = read_one(framework=framework, dp_type="", task=task).conditions
        assert conditions
        assert conditions.plan.sharding is sharding


@pytest.mark.parametrize(
    ("framework", "recompute"),
    [
        ("LLaMA-Factory", Recompute.FULL),
        ("Unsloth", Recompute.FULL),
        ("TRL", Recompute.FULL),
        ("verl", Recompute.FULL),
        ("Levanter", Recompute.FULL),
        ("OpenRLHF", Recompute.NONE),
        ("ms-swift", Recompute.FULL),
        ("Megatron-SWIFT", Recompute.SELECTIVE),
        ("FlagScale", Recompute.NONE),
        ("PaddleNLP", Recompute.NONE),
        ("nanotron", Recompute.NONE),
        ("XTuner V1", Recompute.FULL),
        ("VeOmni", Recompute.FULL),
        ("ColossalAI", Recompute.FULL),
        ("PyTorch Lightning", Recompute.NONE),
        ("HF Accelerate", Recompute.NONE),
        ("MaxText", Recompute.FULL),
    ],
)
def test_a_trainer_recomputes_by_default_as_its_code_does(
    read_one: ReadOne, framework: str, recompute: Recompute
) -> None:
    silent = read_one(framework=framework, recompute="")
    stated = read_one(framework=framework, recompute="none")
    assert silent.conditions
    assert stated.conditions
    assert silent.conditions.plan.recompute is recompute
    assert stated.conditions.plan.recompute is Recompute.NONE
    if recompute is Recompute.FULL:
        assert f"recomputation full, the recipe of {framework}".lower() in " ".join(silent.assumed).lower()


def test_paddlenlp_recomputes_where_it_tunes_all_weights(read_one: ReadOne) -> None:
    for task, recompute in (("pretrain", Recompute.NONE), ("sft", Recompute.FULL), ("lora", Recompute.NONE)):
        conditions = read_one(framework="PaddleNLP", recompute="", task=task).conditions
        assert conditions
        assert conditions.plan.recompute is recompute


@pytest.mark.parametrize(("date", "attention"), [("2023-11", "triton"), ("2025-01", "fa2")])
def test_llm_foundry_attends_as_its_configurations_of_the_year(read_one: ReadOne, date: str, attention: str) -> None:
    conditions = read_one(framework="llm-foundry", framework_version="", date=date).conditions
    assert conditions
    assert conditions.software["attention"] == attention


def test_litgpt_recomputes_where_it_tunes_and_compiles_where_it_pretrains(read_one: ReadOne) -> None:
    for task, recompute in (("pretrain", Recompute.NONE), ("sft", Recompute.FULL), ("lora", Recompute.FULL)):
        conditions = read_one(framework="litgpt", recompute="", task=task).conditions
        assert conditions
        assert conditions.plan.recompute is recompute
        assert conditions.software["compiles"] is (task == "pretrain")


@pytest.mark.parametrize("framework", ["LLaMA-Factory", "axolotl", "OpenRLHF", "TRL", "HF Accelerate"])
def test_a_trainer_without_model_parallelism_is_data_parallel(read_one: ReadOne, framework: str) -> None:
    """The batch of a replica is several micro-batches, and nothing shards the parameters."""
    cells = {"tp": "", "pp": "", "cp": 1, "dp": "", "dp_type": "", "num_gpus": 8, "mbs": 1, "gbs": 64, "task": "lora"}
    known = read_one(framework=framework, **cells)
    assert known.conditions
    assert (known.conditions.plan.data, known.conditions.plan.tensor) == (8, 1)
    assert f"no tensor or pipeline parallelism: the default of {framework}" in known.assumed
    assert read_one(framework="Somebody's own", **cells).reason == "parallelism not stated"


def test_a_default_names_the_trainer_that_has_it(read_one: ReadOne) -> None:
    known, unknown = (read_one(framework=name, dp_type="") for name in ("Axolotl", "Somebody's own"))
    assert any("sharding parameters, the default of Axolotl" in note for note in known.assumed)
    assert any("the default of Somebody's own (not known: as Megatron)" in note for note in unknown.assumed)


@pytest.mark.parametrize("framework", ["ms-swift", "Megatron-SWIFT"])
def test_adapters_of_swift_are_on_all_linear_layers(read_one: ReadOne, framework: str) -> None:
    conditions = read_one(framework=framework, task="lora").conditions
    assert conditions
    assert conditions.lora
    assert (conditions.lora.rank, conditions.lora.alpha, len(conditions.lora.targets)) == (8, 32.0, 7)


@pytest.mark.parametrize(
    ("framework", "splits"), [("Megatron-SWIFT", False), ("FlagScale", True), ("PaddleNLP", False)]
)
def test_sequence_parallelism_is_as_the_framework_has_it(read_one: ReadOne, framework: str, splits: bool) -> None:
    conditions = read_one(framework=framework, tp=2, dp=2).conditions
    assert conditions
    assert conditions.plan.sequence_parallel is splits


@pytest.mark.parametrize(("model", "recompute"), [("MPT-7b", Recompute.FULL), ("MPT-1b", Recompute.NONE)])
def test_llm_foundry_recomputes_its_larger_models(read_one: ReadOne, model: str, recompute: Recompute) -> None:
    shape = {"layers": 24, "hidden": 2048, "heads": 16}
    conditions = read_one(framework="llm-foundry", model=model, recompute="", **shape).conditions
    assert conditions
    assert conditions.plan.recompute is recompute


def _silent(read_one: ReadOne, **cells: object) -> tuple[dict[str, object], str]:
    """Switches of a row that states none, and the one note on them."""
    run = read_one(**{"framework_version": "", "recompute": "", "precision": "", "cp": 1, "dp": 8} | cells)
    assert run.conditions
    (note,) = (note for note in run.assumed if note.startswith("assumed as "))
    return dict(run.conditions.software) | {"precision": run.conditions.precision}, note


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0", "0.2.2", "0.3.0"])
def test_torchtitan_compiles_nothing_but_the_model_whose_configuration_does(read_one: ReadOne, version: str) -> None:
    cells = {"framework": "torchtitan", "framework_version": version}
    small, note = _silent(read_one, **cells)
    assert small["compiles"] is False
    assert note.startswith(f"assumed as torchtitan {version} sets it: no torch.compile, attention ")
    split = {"tp": 8, "dp": 1, "model": "LLAMA3.1-405B"}
    large, note = _silent(read_one, **cells, **split)
    assert (large["compiles"], large["overlaps_tensor"], large["precision"]) == (True, True, "fp8")
    assert "torch.compile, " in note
    assert "tensor overlap on" in note
    old, _ = _silent(read_one, **cells, **split, gpu="A100-SXM-80GB")  # which has no 8 bits
    assert old["precision"] == "bf16"


def test_torchtitan_replays_graphs_since_0_3_where_nothing_waits_for_the_host(read_one: ReadOne) -> None:
    graphs = {
        (version, tuple(cells.values())): _silent(read_one, framework="torchtitan", framework_version=version, **cells)[
            0
        ]["cuda_graphs"]
        for version in ("0.2.2", "0.3.0")
        for cells in ({"model": "LLAMA3.1-8B", "pp": 1}, {"model": "LLAMA3.1-8B", "pp": 2, "dp": 4})
    }
    assert list(graphs.values()) == ["none", "none", "full", "none"]
    mixture = {"model": "Qwen3 MoE 30B", "arch": "moe", "framework": "torchtitan", "framework_version": "0.3.0"}
    assert [_silent(read_one, **mixture, ep=ep)[0]["cuda_graphs"] for ep in (1, 8)] == ["full", "none"]


@pytest.mark.parametrize(
    ("framework", "compiles", "stack"),
    [
        ("torchtune", False, "torchtune"),
        ("OLMo-core", True, "olmo-core"),
        ("FMS FSDP (PyTorch)", True, "other"),
        ("litgpt", True, "other"),
        ("TRL", False, "transformers"),
        ("axolotl", False, "transformers"),
        ("HF Trainer", False, "transformers"),
        ("LLaMA-Factory", False, "transformers"),
        ("DeepSpeed", False, "deepspeed"),
        ("GPT-NeoX", False, "gpt-neox"),
    ],
)
def test_a_framework_compiles_where_its_own_configurations_do(
    read_one: ReadOne, framework: str, compiles: bool, stack: str
) -> None:
    assumed, _ = _silent(read_one, framework=framework)
    assert (assumed["compiles"], assumed["framework"]) == (compiles, stack)
    stated, note = _silent(read_one, framework=framework, notes="no compile" if compiles else "torch.compile")
    assert stated["compiles"] is not compiles
    assert "compile" not in note  # only what the row leaves open is assumed


def test_primus_compiles_torchtitan_since_october_2025(read_one: ReadOne) -> None:
    cells = {"framework": "Primus (torchtitan)", "recompute": "", "cp": 1, "dp": 8}
    found = []
    for date in ("2025-09", "2026-02"):
        for model in ("LLAMA3.1-8B", "LLAMA3.1-70B"):
            conditions = read_one(**cells, date=date, framework_version="", model=model).conditions
            assert conditions
            found.append((conditions.software["compiles"], conditions.plan.recompute))
    kinds = (Recompute.SELECTIVE, Recompute.FULL, Recompute.NONE, Recompute.FULL)
    assert found == list(zip((False, False, True, True), kinds, strict=True))


def test_every_default_of_a_model_names_known_models_and_its_source() -> None:
    for entry in frameworks()["defaults"]:
        assert entry["framework"] in stack_names()
        assert len(entry["source"]) > 20
