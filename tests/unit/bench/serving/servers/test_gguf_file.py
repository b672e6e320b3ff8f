"""GGUF files: llama.cpp continues with the same tokens as Hugging Face transformers and as our own generation."""

from __future__ import annotations

import json
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp")

from meshwright.bench.serving.servers.gguf_file import permuted, write_gguf
from meshwright.bench.serving.servers.running import NO_PROXY, running
from meshwright.bench.serving.servers.table import ServedModel, server_command
from meshwright.errors import InputError
from meshwright.training.rendezvous import free_port

SHAPES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 128, "eos_token_id": 256,
    "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip


@contextmanager
def served(folder: Path, scratch: Path):
    """Address of a llama.cpp server with the model of `folder` in 32 bits."""
    command = server_command(
        "llamacpp", ServedModel(text=str(folder), scratch=scratch), port=free_port(),
        options={"threads": "1", "dtype": "f32"}, in_flight=2,
    )  # fmt: skip
    with running(command, folder=scratch, timeout_s=120):
        yield command.url


def continued(url: str, prompt: list[int] | str, count: int) -> list[int]:
    """Greedy tokens of llama.cpp's own interface."""
    body = {"prompt": prompt, "n_predict": count, "temperature": 0, "return_tokens": True, "ignore_eos": False}
    request = urllib.request.Request(f"{url}/completion", data=json.dumps(body).encode())
    with NO_PROXY.open(request, timeout=60) as answer:
        return json.load(answer)["tokens"]


def tokenizer_json(*, special: str = "<|end|>") -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=alphabet, special_tokens=[special], show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the hat of the cat"] * 20, trainer)
    return tokenizer.to_str()


def test_a_permutation_of_halves_to_neighbours():
    rows = np.arange(8)[:, None]  # two heads of four: 0 1 | 2 3
    assert permuted(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("name", ["model.layers.x.mlp.up_proj.weight", "model.layers.0.router.weight", "visual.proj"])
def test_unknown_tensors_are_refused(name, tmp_path):
    numpy_files = pytest.importorskip("safetensors.numpy")
    config = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, **SHAPES}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    numpy_files.save_file({name: np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="no name in GGUF"):
        write_gguf(tmp_path, tmp_path / "out.gguf")


def test_a_damaged_file_is_refused(tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, **SHAPES}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    for damaged in (b"", b"\xff" * 12, b"\x02\0\0\0\0\0\0\0[]", b'\x09\0\0\0\0\0\0\0{"a": {}}'):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(InputError, match="not a safetensors file"):
            write_gguf(tmp_path, tmp_path / "out.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "family"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "positions"),
        ({"sliding_window": 64}, "sliding window"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
    ids=str,
)
def test_what_llamacpp_would_run_differently_is_refused(tmp_path, change, message):
    config = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", **SHAPES, **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=message):
        write_gguf(tmp_path, tmp_path / "out.gguf")
    assert not list(tmp_path.glob("*.part"))


def test_absent_files_and_another_tokenizer_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"config\.json"):
        write_gguf(tmp_path, tmp_path / "out.gguf")
    config = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, **SHAPES}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram", "vocab": []}}')
    with pytest.raises(InputError, match="byte-level BPE"):
        write_gguf(tmp_path, tmp_path / "out.gguf")


LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.slow  # the trained model below serves a Llama through the same lines
@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("Llama", {}),
        ("Llama", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "tie_word_embeddings": True}),
        ("Mistral", {"sliding_window": None, "head_dim": 32}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 32}),
    ],
    ids=["llama", "llama with llama3 positions, biases, tied", "mistral", "qwen2", "qwen3"],
)
def test_random_models_continue_as_in_transformers(tmp_path, family, extra):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**SHAPES, **extra)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1) * 0.8)
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text(tokenizer_json())
    prompt = [(37 * i) % 250 for i in range(40)]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    with served(tmp_path / "hf", tmp_path) as url:
        assert continued(url, prompt, 12) == expected[0, 40:].tolist()


@pytest.mark.slow
def test_texts_become_the_same_tokens(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPES))
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text(tokenizer_json())
    ours = tokenizers.Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    with served(tmp_path / "hf", tmp_path) as url:
        for text in ("the cat sat", " the  hat,\nof 1234 cats\t!", "Grüße, 世界", "it's <|end|> now"):
            body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
            with NO_PROXY.open(urllib.request.Request(f"{url}/tokenize", data=body), timeout=30) as answer:
                assert json.load(answer)["tokens"] == ours.encode(text, add_special_tokens=False).ids, text


def test_a_model_of_our_own_is_served_and_continues_as_our_generation(
    tmp_path, monkeypatch, meshwright, tiny_run, without_measuring, without_page
):
    """Two commands: train, and bench serve with the run file."""
    pytest.importorskip("torch")
    pytest.importorskip("aiohttp")
    import meshwright as mw

    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the cat sat on the mat. the hat of the cat is on the mat.\n" * 40)
    training = tiny_run(
        tmp_path,
        model="{name: tiny, hidden: 32, num_layers: 2, vocab: 260, ffn_hidden: 64, "
        "attention: {num_heads: 4, num_kv_heads: 2}}",
        data="{source: text.txt, tokenizer: bytes, sequence_length: 64}",
        precision="fp32",
        optimizer="{learning_rate: 1.0e-2}",
        train="{steps: 30, checkpoint: {folder: saved, every_steps: 30}}",
    )
    path = tmp_path / "run.yaml"
    path.write_text(training.text)
    assert meshwright("train", str(path)).exit_code == 0
    outcome = meshwright(
        "bench", "serve", "--server", "llamacpp", "--model", "run.yaml", "--concurrency", "1,2", "--requests", "4",
        "--input-tokens", "20", "--output-tokens", "8", "--server-option", "threads=1", "--json", "--out", "out",
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.stderr
    points = json.loads(outcome.stdout)["points"]
    assert [(p["num_ok"], p["output_tokens"], p["token_source"]) for p in points] == [(4, 32, "usage")] * 2
    assert "listening" in (tmp_path / "out" / "server.log").read_text()
    assert meshwright("checkpoint", "to-hf", "run.yaml", "hf", "--dtype", "fp32").exit_code == 0
    expected = mw.generate("hf", "the cat", max_tokens=24, dtype="fp32").text
    with served(Path("hf"), tmp_path) as url:
        tokens = continued(url, "the cat", 24)
    assert bytes(tokens).decode() == expected
