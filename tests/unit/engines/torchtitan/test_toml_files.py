"""Files of torchtitan up to 0.2 as run files, without torchtitan."""

from __future__ import annotations

from io import StringIO

import pytest
from ruamel.yaml import YAML

from meshwright import runfile
from meshwright.cost.flops import count_parameters
from meshwright.cost.tables import model_row
from meshwright.engines.torchtitan.toml_files.run_content import OLDER, PRESETS, import_toml, known_keys, preset_model
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
    ("more", "precision", "is_narrow"),
    [
        ("", "bf16", False),
        ('dtype = "bfloat16"', "bf16", True),
        ('dtype = "bfloat16"\nmixed_precision_param = "float32"', "bf16", True),
        ('mixed_precision_param = "float32"', "fp32", False),
    ],
)
def test_parameters_in_bf16_have_no_master_weights(more, precision, is_narrow, tmp_path):
    (tmp_path / "run.toml").write_text(TOML % more)
    found = import_toml(tmp_path / "run.toml", cluster="h100-8x1")
    assert found.content["precision"] == precision
    assert found.content["optimizer"].get("master_weights", True) is not is_narrow
    assert not [note for note in found.notes if "training.dtype" in note]


def test_every_unknown_key_is_named_at_once(tmp_path):
    (tmp_path / "run.toml").write_text(TOML % "stepz = 3\n[hf_transformers]\nmodel = 'x'")
    with pytest.raises(InputError, match=r"no such key: got 'training.stepz, hf_transformers.model'") as refused:
        import_toml(tmp_path / "run.toml", cluster="h100-8x1")
    assert "did you mean training.steps for training.stepz?" in refused.value.hint


@pytest.mark.parametrize("norm", ["rmsnorm", "fused_rmsnorm"])
def test_norms_of_early_files_are_read(norm, tmp_path):
    (tmp_path / "run.toml").write_text((TOML % "").replace("[training]", f'norm_type = "{norm}"\n[training]'))
    assert import_toml(tmp_path / "run.toml", cluster="h100-8x1").content


def test_another_norm_is_refused(tmp_path):
    (tmp_path / "run.toml").write_text((TOML % "").replace("[training]", 'norm_type = "layernorm"\n[training]'))
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
    assert found.content["stack"] == {"cuda_graphs": "none", "compiles": False, "gradient_format": "fp32"} | stack
    assert not [note for note in found.notes if "comm_backend" in note or "async" in note or "reduce" in note]
    (tmp_path / "run.toml").write_text(TOML % more.replace('"hybridep"', '"deepep"'))
    assert "dispatcher" not in import_toml(tmp_path / "run.toml", cluster="h100-8x1").content["stack"]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("[optimizer]\nimplementation = 'fused'", ""),
        ("[optimizer]\nimplementation = 'for-loop'", "optimizer.implementation = 'for-loop'"),
        ("[optimizer]\nearly_step_in_backward = true", "optimizer.early_step_in_backward = True"),
        ("[compile]\nenable = true\ncomponents = ['model', 'loss']", ""),
        ("[compile]\nenable = true\ncomponents = ['model']", "compile.components = ['model']"),
        ("[compile]\nenable = true\nbackend = 'eager'", "compile.backend = 'eager'"),
        ("[parallelism]\ndisable_loss_parallel = true\nenable_compiled_autograd = true",
         "parallelism.disable_loss_parallel = True, parallelism.enable_compiled_autograd = True"),
        ("[parallelism]\ncontext_parallel_degree = 2\ncontext_parallel_rotate_method = 'alltoall'",
         "parallelism.context_parallel_rotate_method = 'alltoall'"),
        ("[debug]\ndeterministic = true\nseed = 3", "debug.deterministic = True"),
        ("[training]\ngc_debug = true\ngc_freq = 7", "training.gc_debug = True"),
        ("[comm]\nmode = 'local_tensor'\ntrain_timeout_seconds = 3", "comm.mode = 'local_tensor'"),
        ("[fault_tolerance]\nenable = true\ngroup_size = 2", "fault_tolerance.enable = True"),
        ("[activation_checkpoint]\npreserve_rng_state = false\nmemory_budget = 0.3",
         "activation_checkpoint.preserve_rng_state = False"),
        ("[metrics]\nlog_freq = 3\n[profiling]\nenable_profiling = true\n[job]\ndescription = 'x'", ""),
    ],
)  # fmt: skip
def test_one_note_names_what_the_estimate_does_not_include(more, named, tmp_path):
    text = TOML % more.removeprefix("[training]\n")
    (tmp_path / "run.toml").write_text(text)
    notes = import_toml(tmp_path / "run.toml", cluster="h100-8x1").notes
    known = [note for note in notes if "weight decay" not in note]
    assert known == ([f"the estimate does not include: {named}"] if named else [])


def test_code_of_the_user_is_noted(tmp_path):
    (tmp_path / "run.toml").write_text(TOML % "[experimental]\ncustom_import = 'mine'")
    notes = import_toml(tmp_path / "run.toml", cluster="h100-8x1").notes
    assert "experimental.custom_import = 'mine' is not carried over" in notes


def test_replicas_that_average_their_weights_are_refused(tmp_path):
    (tmp_path / "run.toml").write_text(TOML % "[fault_tolerance]\nenable = true\nsemi_sync_method = 'diloco'")
    with pytest.raises(InputError, match=r"fault_tolerance\.semi_sync_method.*'diloco'"):
        import_toml(tmp_path / "run.toml", cluster="h100-8x1")


@pytest.mark.parametrize(("recipe", "stack"), [("", {"parameter_format": "fp8"}), ("rowwise", {})])
def test_parameters_that_are_gathered_in_fp8(recipe, stack, tmp_path):
    name = f"recipe_name = '{recipe}'\n" if recipe else ""
    model = (TOML % "").replace("[training]", 'converters = ["float8"]\n[training]')
    (tmp_path / "run.toml").write_text(f"{model}[float8]\n{name}enable_fsdp_float8_all_gather = true\n")
    found = import_toml(tmp_path / "run.toml", cluster="h100-8x1")
    plain = {"cuda_graphs": "none", "compiles": False, "gradient_format": "fp32"}
    assert found.content["stack"] == plain | stack
    noted = [note for note in found.notes if "enable_fsdp_float8_all_gather" in note]
    assert bool(noted) == (not stack)


def test_every_preset_is_a_model_of_a_run_file(tmp_path):
    for name, flavor in (preset.split(" ") for preset in PRESETS):
        text = (TOML % "").replace('"llama3"', f'"{name}"').replace('"8B"', f'"{flavor}"')
        (tmp_path / "run.toml").write_text(text)
        found = import_toml(tmp_path / "run.toml", cluster="h100-8x1").content
        stream = StringIO()
        YAML().dump(found | {"parallel": "auto"}, stream)
        assert runfile.loads(stream.getvalue()).model.num_layers == preset_model(name, flavor).num_layers


@pytest.mark.parametrize(
    ("preset", "parameters"),
    # vocabularies of 2048, twice; attention 4 x 256^2, or 256 x (192 x 16 + 576) + 512 x 256 x 16 + 2048 x 256 for
    # latents; feed-forward 3 x 256 x width; routers 256 an expert; norms: two of 256 a layer (latents: 512), one last
    [
        (("llama3", "debugmodel"), 2 * 2048 * 256 + 6 * (4 * 256**2 + 3 * 256 * 768 + 512) + 256),
        (
            ("llama4", "debugmodel"),
            2 * 2048 * 256 + 6 * (4 * 256**2 + 512) + 256
            + 3 * (3 * 256 * 768 + 9 * 3 * 256 * 512 + 256 * 8),
        ),
        (
            ("deepseek_v3", "debugmodel"),
            2 * 2048 * 256 + 6 * (256 * (192 * 16 + 576) + 512 * 256 * 16 + 2048 * 256 + 512 + 512) + 256
            + 3 * 256 * 1024 + 5 * (10 * 3 * 256 * 256 + 256 * 8),
        ),
        # 64 query and 8 key heads of 128; widths 32768 and 21504 are of 8/3 times the width, times 3/2 and 1.3125
        (("llama3", "32B"), 2 * 128256 * 8192 + 32 * (2 * 8192**2 * 9 // 8 + 3 * 8192 * 32768 + 2 * 8192) + 8192),
        (
            ("llama3", "coreweave"),
            2 * 128256 * 6144 + 60 * (2 * 6144**2 * 7 // 6 + 3 * 6144 * 21504 + 2 * 6144) + 6144,
        ),
    ],
)  # fmt: skip
def test_presets_have_the_parameters_of_torchtitan(preset, parameters):
    assert float(count_parameters(model_row(preset_model(*preset))).total) == pytest.approx(
        parameters, abs=8 * 3
    )  # routing biases


@pytest.mark.parametrize(
    "more",
    [
        '[checkpoint]\ninterval_type = "steps"',
        "[float8]\nenable_float8_linear = false\nmoe_fqns = ['experts']",
        "[profiling]\nrun_profiler = true",
    ],
)
def test_keys_of_early_versions_that_change_no_step_are_read(more, tmp_path):
    (tmp_path / "plain.toml").write_text(TOML % "")
    (tmp_path / "run.toml").write_text(TOML % f"\n{more}")
    plain, found = (import_toml(tmp_path / name, cluster="h100-8x1") for name in ("plain.toml", "run.toml"))
    assert (found.content, found.notes) == (plain.content, plain.notes)


def test_keys_of_early_versions_have_their_later_names(tmp_path):
    (tmp_path / "run.toml").write_text(TOML % "sequence_parallel_degree = 2\n[float8]\nenable_float8_linear = true")
    content = import_toml(tmp_path / "run.toml", cluster="h100-8x1").content
    assert (content["parallel"]["tensor"], content["precision"]) == (2, "fp8")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('[checkpoint]\ninterval_type = "seconds"', r"checkpoint\.interval_type, of torchtitan before 0\.1\.0"),
        ("[model.x]\n", "is not a configuration"),
    ],
)
def test_other_values_of_early_keys_are_refused(more, message, tmp_path):
    text = TOML % f"\n{more}" if "model" not in more else "model = 3\n"
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(InputError, match=message):
        import_toml(tmp_path / "run.toml", cluster="h100-8x1")


def test_keys_of_forks(tmp_path):
    fork = TOML % "[infra]\nset_gpu_affinity = true\n[optimizer]\nfollow_fsdp_groups = true\n[parallelism]\n"
    (tmp_path / "run.toml").write_text(fork + "prefetch_distance = 4\nprefetch_before_data = true")
    notes = "\n".join(import_toml(tmp_path / "run.toml", cluster="h100-8x1").notes)
    left_out = ("prefetch_distance = 4", "prefetch_before_data = True", "follow_fsdp_groups = True")
    assert "the estimate does not include" in notes
    assert all(key in notes for key in left_out)
    assert "set_gpu_affinity" not in notes
