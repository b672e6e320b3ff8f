"""Keys that change the speed or the memory and have no key in run files: one note names them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from meshwright.engines.maxtext import contract
from meshwright.engines.maxtext.config.keys import KEYS, known_keys, own_models
from meshwright.errors import InputError

BEGINNING = "the estimate does not include: "
MIXTURE = {"decoder_block": "mixtral", "num_experts": 8, "num_experts_per_tok": 2, "megablox": False}
ON_TPUS = {key: value for key, value in MIXTURE.items() if key != "megablox"}
PUBLISHED = own_models()


def notes(values: dict[str, Any], folder: Path, name: str = "config", cluster: str = "h100-8x2") -> list[str]:
    YAML().dump(values | {"steps": 10}, folder / f"{name}.yml")
    return list(contract.import_run(str(folder / f"{name}.yml"), cluster=cluster).notes)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"scan_layers": False}, "scan_layers = False"),
        ({"scan_layers": True, "use_iota_embed": False, "packing": True}, ""),
        ({"use_iota_embed": True, "packing": False}, "use_iota_embed = True, packing = False"),
        ({"optimizer_memory_host_offload": True, "mu_dtype": "bfloat16"},
         "optimizer_memory_host_offload = True, mu_dtype = 'bfloat16'"),
        (MIXTURE, ""),
        (MIXTURE | {"megablox": True}, "megablox = True"),
        (ON_TPUS, "megablox = True"),
        ({"megablox": True}, ""),
        (MIXTURE | {"use_ring_of_experts": True, "float32_gate_logits": True},
         "use_ring_of_experts = True, float32_gate_logits = True"),
        ({"log_period": 7, "sa_block_q": 256}, ""),
    ],
)  # fmt: skip
def test_a_key_without_a_key_of_ours_is_named(values, named, tmp_path):
    assert notes(values, tmp_path) == ([BEGINNING + named] if named else [])


@pytest.mark.parametrize(("values", "named"), [(ON_TPUS, ""), (MIXTURE, "megablox = False")])
def test_grouped_gemms_on_tpus_are_megablox(values, named, tmp_path):
    """Elsewhere MaxText interprets it."""
    assert notes(values, tmp_path, cluster="tpu-v5p-4x4") == ([BEGINNING + named] if named else [])


@pytest.mark.parametrize(("in_fp32", "named"), [(True, ""), (False, "float32_gate_logits = False")])
def test_scores_of_deepseek_v3_are_in_fp32(in_fp32, named, tmp_path):
    values = PUBLISHED["deepseek3-671b"] | {
        "n_routing_groups": 8, "topk_routing_group": 4, "float32_gate_logits": in_fp32, "megablox": False,
    }  # fmt: skip
    found = [note for note in notes(values, tmp_path, "deepseek3-671b") if note.startswith(BEGINNING)]
    assert found == ([BEGINNING + named] if named else [])


def test_the_mask_of_documents_is_not_carried_over(tmp_path):
    assert notes({"reset_attention_mask": False}, tmp_path) == ["reset_attention_mask = False is not carried over"]


@pytest.mark.parametrize(
    ("axis", "degree", "key"),
    [
        ("fsdp", 4, "data_shard"), ("data", 2, "data_replicate"), ("tensor", 2, "tensor"),
        ("context", 2, "context"), ("pipeline", 2, "pipeline"),
    ],
)  # fmt: skip
def test_degrees_across_slices_multiply(axis, degree, key, tmp_path):
    values = {"ici_fsdp_parallelism": 1, "ici_data_parallelism": 16 // degree, "attention": "dot_product",
              "per_device_batch_size": 2, f"dcn_{axis}_parallelism": degree}  # fmt: skip
    if axis == "data":
        values |= {"ici_data_parallelism": 1, "ici_fsdp_parallelism": 8}
    YAML().dump(values | {"steps": 10}, tmp_path / "config.yml")
    found = contract.import_run(str(tmp_path / "config.yml"), cluster="h100-8x2")
    assert found.content["parallel"][key] == degree


@pytest.mark.parametrize("key", ["num_slices", "compile_topology_num_slices"])
@pytest.mark.parametrize("given", [{}, {"dcn_data_parallelism": -1}])
def test_slices_are_ranks_of_data_unless_other_axes_have_them(key, given, tmp_path):
    values = {"ici_fsdp_parallelism": 4, "attention": "dot_product", "per_device_batch_size": 2, "steps": 10}
    path = tmp_path / "config.yml"
    YAML().dump(values | given | {key: 4}, path)
    assert contract.import_run(str(path), cluster="h100-8x2").content["parallel"]["data_replicate"] == 4
    YAML().dump(values | given | {key: 4, "dcn_fsdp_parallelism": 2}, path)
    plan = contract.import_run(str(path), cluster="h100-8x2").content["parallel"]
    assert (plan["data_shard"], plan["data_replicate"]) == (8, 2)
    YAML().dump(values | given | {key: 3, "dcn_fsdp_parallelism": 2}, path)
    with pytest.raises(InputError, match="slices"):
        contract.import_run(str(path), cluster="h100-8x2")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"ici_context_usp_ulysses_parallelism": 2}, "axis .*ici_context_usp_ulysses_parallelism"),
        ({"dcn_context_usp_ulysses_parallelism": 2}, "axis .*context_usp_ulysses_parallelism"),
        ({"enable_diloco": True}, "enable_diloco"),
        ({"moba": True}, "moba"),
        ({"share_kv_projections": True}, "share_kv_projections"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"mhc_expansion_rate": 4}, "mhc_expansion_rate"),
        ({"engram_layers": [1]}, "engram_layers"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"use_mrope": True}, "use_mrope"),
        ({"training_objective": "block_diffusion"}, "training_objective"),
        ({"ici_pipeline_parallelism": 2, "pipeline_parallel_layers": 8}, "pipeline_parallel_layers"),
    ],
)
def test_what_would_be_another_training_is_refused(values, words, tmp_path):
    with pytest.raises(InputError, match=words):
        notes(values, tmp_path)


def test_every_key_stands_once_and_is_one_of_theirs():
    assert not KEYS.harmless & KEYS.unestimated.keys()
    assert known_keys().keys() >= KEYS.harmless | KEYS.unestimated.keys()
