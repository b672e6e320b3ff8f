"""YAML that aliases make huge, that is nested deeply or that names a class is refused in a moment by every engine."""

from __future__ import annotations

import time

import pytest

ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
KINDS = {
    "maxtext": "base_emb_dim: 64\ndecoder_block: llama2\nbase_num_decoder_layers: VALUE\nvocab_size: 4\n",
    "megatron": "MODEL_ARGS:\n  --num-layers: VALUE\n",
    "bridge": "train:\n  train_iters: VALUE\nmodel:\n  num_layers: 2\n",
    "primus": "work_group: y\nexp_name: x\nmodules:\n  pre_trainer:\n    framework: megatron\n    config: VALUE\n",
}
VALUES = {
    "aliases": "*a39",
    "brackets": "[" * 100_000,
    "pairs": "[" * 90 + "{a: " * 90,
    "a class": "!!python/object/apply:os.mkdir ['ran']",
    "a circle": "&b [*b]",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", VALUES)
def test_hostile_yaml_is_refused_at_once(meshwright, tmp_path, monkeypatch, kind, value):
    monkeypatch.chdir(tmp_path)
    head = ALIASES if value == "aliases" else ""
    (tmp_path / "run.yaml").write_text(head + KINDS[kind].replace("VALUE", VALUES[value]))
    start = time.process_time()
    outcome = meshwright("import", "run.yaml", "--cluster", "h100-8x1")
    assert outcome.exit_code == 2, outcome.stderr
    assert time.process_time() - start < 10
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
