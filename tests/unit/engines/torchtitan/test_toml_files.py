"""Files of torchtitan up to 0.2 as run files, without torchtitan."""

from __future__ import annotations

import pytest

from meshwright.engines.torchtitan.toml_files.run_content import OLDER, import_toml, known_keys
from meshwright.errors import InputError

TOML = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 2048
steps = 500
%s
"""


@pytest.mark.parametrize(
    ("more", "precision", "is_noted"),
    [
        ("", "bf16", False),
        ('dtype = "bfloat16"', "bf16", True),
        ('dtype = "bfloat16"\nmixed_precision_param = "float32"', "bf16", True),
        ('mixed_precision_param = "float32"', "fp32", False),
    ],
)
def test_parameters_in_bf16_are_noted(more, precision, is_noted, tmp_path):
    (tmp_path / "run.toml").write_text(TOML % more)
    found = import_toml(tmp_path / "run.toml", cluster="h100-8x1")
    assert found.content["precision"] == precision
    noted = [note for note in found.notes if "training.dtype = 'bfloat16'" in note]
    assert [("parameters are trained in fp32" in note) for note in noted] == [True] * is_noted


def test_every_unknown_key_is_named_at_once(tmp_path):
    (tmp_path / "run.toml").write_text(TOML % "stepz = 3\n[hf_transformers]\nmodel = 'x'")
    with pytest.raises(
        InputError, match=r"no such key: got 'training.stepz, hf_transformers.model'"
    ) as refused:
        import_toml(tmp_path / "run.toml", cluster="h100-8x1")
    assert "did you mean training.steps for training.stepz?" in refused.value.hint


@pytest.mark.parametrize("norm", ["rmsnorm", "fused_rmsnorm"])
def test_norms_of_early_files_are_read(norm, tmp_path):
    (tmp_path / "run.toml").write_text((TOML % "").replace("[training]", f'norm_type = "{norm}"\n[training]'))
    assert import_toml(tmp_path / "run.toml", cluster="h100-8x1").content


def test_another_norm_is_refused(tmp_path):
    (tmp_path / "run.toml").write_text(
        (TOML % "").replace("[training]", 'norm_type = "layernorm"\n[training]')
    )
    with pytest.raises(InputError, match=r"model\.norm_type"):
        import_toml(tmp_path / "run.toml", cluster="h100-8x1")


def test_keys_of_early_files_lead_to_known_ones():
    assert set(OLDER.values()) <= known_keys().keys()


MIXTURE = """
[model]
name = "qwen3"
flavor = "30B-A3B"
[training]
local_batch_size = 1
seq_len = 2048
steps = 500
%s
"""


@pytest.mark.parametrize(
    ("more", "stack"),
    [
        ("", {"dispatcher": "all-to-all"}),
        ('[parallelism]\nexpert_parallel_comm_backend = "deepep"', {"dispatcher": "deepep"}),
        ('[parallelism]\nexpert_parallel_comm_backend = "hybridep"', {"dispatcher": "hybridep"}),
        ("[compile]\nenable = true", {"dispatcher": "all-to-all", "compiles": True}),
        ('[compile]\nenable = true\ncomponents = ["loss"]', {"dispatcher": "all-to-all"}),
        ('mixed_precision_reduce = "bfloat16"', {"dispatcher": "all-to-all", "gradient_format": "bf16"}),
        ("[parallelism]\ntensor_parallel_degree = 2", {"dispatcher": "all-to-all", "overlaps_tensor": False}),
        ("[parallelism]\ntensor_parallel_degree = 2\nenable_async_tensor_parallel = true",
         {"dispatcher": "all-to-all", "overlaps_tensor": True}),
    ],
)  # fmt: skip
def test_switches_are_those_of_the_file_or_of_torchtitan(more, stack, tmp_path):
    (tmp_path / "run.toml").write_text(MIXTURE % more)
    found = import_toml(tmp_path / "run.toml", cluster="h100-8x1")
    assert (
        found.content["stack"]
        == {"cuda_graphs": "none", "compiles": False, "gradient_format": "fp32"} | stack
    )
    assert not [note for note in found.notes if "comm_backend" in note or "async" in note or "reduce" in note]
    (tmp_path / "run.toml").write_text(TOML % more.replace('"hybridep"', '"deepep"'))
    assert "dispatcher" not in import_toml(tmp_path / "run.toml", cluster="h100-8x1").content["stack"]
