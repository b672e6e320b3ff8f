"""Batch interfaces: transformers and llama.cpp with a tiny model, vLLM with a package of its names."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.unit.bench.batch.fake_vllm import write_fake_vllm

from meshwright.bench.batch import vllm_engine
from meshwright.bench.batch.engines import BatchTokens, EngineRequest, random_prompts
from meshwright.errors import InputError


def request(model: Path | str, scratch: Path, **options: str) -> EngineRequest:
    return EngineRequest(model=str(model), scratch=scratch, options=options, longest=24, most=5)


def test_prompts_have_the_length_and_no_special_token():
    prompts = random_prompts(50, 40, vocabulary=8, excluded=[0, 3], seed="a")
    assert {len(p) for p in prompts} == {40}
    assert set().union(*prompts) == {1, 2, 4, 5, 6, 7}
    assert prompts == random_prompts(50, 40, vocabulary=8, excluded=[0, 3], seed="a")
    assert prompts[0] != random_prompts(1, 40, vocabulary=8, excluded=[0, 3], seed="b")[0]


def test_vllm_is_called_by_its_names(tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="vLLM stands on it")
    monkeypatch.syspath_prepend(str(write_fake_vllm(tmp_path / "fake")))
    asked = request("org/name", tmp_path, **{"tensor-parallel-size": "2", "enforce-eager": ""})
    engine = vllm_engine.load(asked)
    assert engine.vocabulary == 100
    assert engine.software["vllm"] == "0.0.1"
    assert engine.generate([[1, 2, 3], [4, 5, 6]], 7) == BatchTokens(input_tokens=6, output_tokens=14, num_ok=2)
    with pytest.raises(InputError, match="vLLM refuses the batch"):
        engine.generate([[1] * 14], 7)
    with pytest.raises(InputError, match="cannot load the model"):
        vllm_engine.load(request("org/name", tmp_path, **{"no-such-option": "1"}))
    for name in ("vllm", "vllm.inputs"):
        sys.modules.pop(name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    pytest.importorskip("torch")
    from tests.tiny_folders import tiny_folder

    return tiny_folder(tmp_path_factory.mktemp("tiny"))


def test_transformers_answers_with_exactly_as_many_tokens(folder, tmp_path):
    pytest.importorskip("transformers")
    from meshwright.bench.batch import transformers_engine

    engine = transformers_engine.load(request(folder, tmp_path, batch="2"))
    prompts = random_prompts(5, 16, vocabulary=engine.vocabulary, seed="x")
    assert engine.generate(prompts, 8) == BatchTokens(input_tokens=80, output_tokens=40, num_ok=5)
    with pytest.raises(InputError, match="positions"):
        engine.generate([[1] * 250], 8)
    with pytest.raises(InputError, match="dtype"):
        transformers_engine.load(request(folder, tmp_path, dtype="int3"))
    with pytest.raises(InputError, match="cannot load"):
        transformers_engine.load(request(tmp_path / "none", tmp_path))


def test_code_of_a_model_does_not_run_and_nobody_is_asked(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from meshwright.bench.batch import transformers_engine

    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    mapped = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobodys", "auto_map": mapped}))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(InputError, match="custom code"):
        transformers_engine.load(request(tmp_path, tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_llamacpp_answers_with_exactly_as_many_tokens(folder, tmp_path):
    pytest.importorskip("xllamacpp")
    pytest.importorskip("gguf")
    from meshwright.bench.batch import llamacpp_engine

    engine = llamacpp_engine.load(request(folder, tmp_path, threads="1", parallel="2"))
    prompts = random_prompts(5, 16, vocabulary=engine.vocabulary, excluded=[0], seed="x")
    found = engine.generate(prompts, 8)
    assert found == BatchTokens(input_tokens=80, output_tokens=40, num_ok=5)
    with pytest.raises(InputError, match="slot's context"):
        engine.generate([[1] * 20], 8)
    with pytest.raises(InputError, match="cannot load"):
        llamacpp_engine.load(request(tmp_path / "none", tmp_path))
