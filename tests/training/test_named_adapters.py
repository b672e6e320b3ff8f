"""Several adapters of one base: switched as PEFT switches them, and merged as PEFT merges weighted sums."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from tests.rounding import assert_equals
from tests.tiny_folders import TEMPLATE, tiny_folder

import meshwright as mw
from meshwright.errors import InputError
from meshwright.training.trained_model import load_trained

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning")

KINDS = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "other": {"r": 2, "lora_alpha": 3, "target_modules": ["v_proj", "down_proj"], "use_rslora": True},
    "patterns": {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"layers.0.self_attn.q_proj": 5},
        "alpha_pattern": {"v_proj": 9},
    },
    "dora": {"r": 3, "lora_alpha": 5, "target_modules": ["o_proj"], "use_dora": True},
    "head": {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "pissa": {"r": 2, "lora_alpha": 2, "target_modules": ["k_proj"], "init_lora_weights": "pissa"},
}
TWO = ("--adapter", "{plain}", "--adapter", "{other}")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny", template=TEMPLATE)


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """Folders of PEFT's adapters, trained as if, by name."""
    return write_adapters(base, tmp_path_factory.mktemp("adapters"), KINDS)


def write_adapters(base, place, kinds):
    generator = torch.Generator().manual_seed(3)
    for name, values in kinds.items():
        made = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**values))
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
        made.save_pretrained(place / name)
    return {name: place / name for name in kinds}


def named(adapters):
    return [f"{name}={folder}" for name, folder in adapters.items()]


def theirs(base, adapters):
    (first, folder), *others = adapters.items()
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(plain, folder, adapter_name=first)
    for name, other in others:
        model.load_adapter(other, name)
    return model.eval()


def test_switched_adapters_compute_as_pefts(base, adapters):
    # PiSSA takes its part out of the base in PEFT, which then has no other adapters.
    together = {name: folder for name, folder in adapters.items() if name != "pissa"}
    model, tokens = theirs(base, together), torch.arange(24).view(2, 12)
    trained = load_trained(str(base), dtype="fp32", adapter=named(adapters))
    built, before = trained.module, {}
    weights = list(built.parameters())
    for name in [*together, *reversed(together)]:
        model.set_adapter(name)
        trained.adapters.use(name)
        before.setdefault(name, ours := built(tokens))
        assert torch.equal(ours, before[name])
        assert_equals(lambda: {"logits": built(tokens)}, {"logits": model(tokens).logits}, weights=weights, terms=64)
    trained.adapters.use(None)
    plain = load_trained(str(base), dtype="fp32").module
    assert torch.equal(built(tokens), plain(tokens))
    trained.adapters.use("pissa")
    only = theirs(base, {"pissa": adapters["pissa"]})(tokens).logits
    assert_equals(lambda: {"logits": built(tokens)}, {"logits": only}, weights=weights, terms=64)


def test_every_adapter_answers_every_prompt(base, adapters):
    prompts = ["Once upon", "x"]
    done = mw.generate(base, prompts, max_tokens=8, adapter=named(adapters))
    assert [c.adapter for c in done.completions] == [name for name in adapters for _ in prompts]
    for name, folder in adapters.items():
        alone = mw.generate(base, prompts, max_tokens=8, adapter=folder)
        assert [c.text for c in done.completions if c.adapter == name] == [c.text for c in alone.completions]
        assert {c.adapter for c in alone.completions} == {None}


def test_a_chat_switches_and_computes_the_conversation_again(base, adapters, capsys):
    from meshwright.api.generate import open_generator
    from meshwright.cli.commands.chat import ChatSession, _command

    settings = {"max_tokens": 6, "seed": 0, "stop": (), "step": None, "dtype": None, "tokenizer": None}
    sampling = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "repetition_penalty"))
    given = {"model": str(base), "adapter": named(adapters), "beyond_positions": False}
    generator, _ = open_generator(**given, **settings, **sampling)
    session = ChatSession(generator, system=None)
    session.ask("Hi", is_shown=False)
    assert _command("/adapter dora", session) == "dora answers"
    session.ask("And?", is_shown=False)
    again = mw.generate(base, session.requests[1], max_tokens=6, adapter=adapters["dora"])
    assert (session.done[1].text, session.done[1].adapter) == (again.text, "dora")
    assert _command("/adapter", session) == "the base answers"
    with pytest.raises(InputError, match="no adapter has this name: got 'nobody', allowed: plain, other"):
        _command("/adapter nobody", session)


def test_an_evaluation_has_the_rows_of_every_adapter(base, adapters, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("A small text, twice the same. A small text, twice the same.")
    done = mw.evaluate(base, text, adapter=named(adapters))
    for name, folder in adapters.items():
        (one,) = mw.evaluate(base, text, adapter=folder).texts
        assert done.adapters[name]["texts"][0]["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert [row["on"] for row in done.to_rows()][::3] == [f"{name}: {text}" for name in adapters]
    assert done.texts == done.adapters["plain"]["texts"]


@pytest.mark.parametrize(
    ("names", "factors"),
    [(["dora"], []), (["plain"], [0.5]), (["plain", "other"], [0.7, -0.3]), (["patterns", "plain"], [0.5, 2.0])],
)
def test_a_merge_of_folders_equals_pefts(meshwright, base, adapters, tmp_path, names, factors):
    options = [part for name in names for part in ("--adapter", str(adapters[name]))]
    options += [part for factor in factors for part in ("--factor", str(factor))]
    out = tmp_path / "out"
    done = meshwright("checkpoint", "to-hf", base, out, "--merge", "--dtype", "fp32", *options)
    assert (done.exit_code, done.stdout) == (0, f"Wrote the merged weights of tiny as fp32: {out}\n")
    model = theirs(base, {name: adapters[name] for name in names})
    if factors:
        model.add_weighted_adapter(names, factors, "sum", combination_type="cat")
        model.set_adapter("sum")
    expected = model.merge_and_unload().state_dict()
    found = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert torch.allclose(tensor, expected[key], rtol=1e-5, atol=1e-6), key
    assert json.loads((out / "config.json").read_text())["architectures"]
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


ONE_RANK = {"one": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}} | {
    "two": {"r": 4, "lora_alpha": 3, "target_modules": ["v_proj", "down_proj"], "use_rslora": True}
}


@pytest.mark.parametrize("factors", [[0.7, 0.3], [1.5, -0.5], [0.0, -1.0]])
@pytest.mark.parametrize(
    ("how", "density"),
    [
        ("linear", None), ("svd", None), ("ties", 0.4), ("ties", 1.0), ("magnitude_prune", 0.3), ("dare_ties", 0.5),
        ("dare_linear", 0.5), ("dare_linear", 1.0),
    ],
)  # fmt: skip
def test_a_combination_equals_pefts(meshwright, base, tmp_path, monkeypatch, how, density, factors):
    folders = write_adapters(base, tmp_path / "adapters", ONE_RANK)
    options = [part for folder in folders.values() for part in ("--adapter", str(folder))]
    options += [part for factor in factors for part in ("--factor", str(factor))]
    options += ["--combination", how, *(["--density", str(density)] if density else [])]
    options += ["--seed", "7"] if how.startswith("dare") else []
    done = meshwright("checkpoint", "to-hf", base, tmp_path / "out", "--merge", "--dtype", "fp32", *options)
    assert done.exit_code == 0, done.stderr
    model = theirs(base, folders)
    inject = type(model.base_model).inject_adapter

    def seeded(*given, **named):  # which draws the beginning of the new adapter
        inject(*given, **named)
        torch.manual_seed(7)

    monkeypatch.setattr(type(model.base_model), "inject_adapter", seeded)
    model.add_weighted_adapter(list(folders), factors, "sum", combination_type=how, density=density)
    model.set_adapter("sum")
    expected = model.merge_and_unload().state_dict()
    for key, tensor in transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict().items():
        assert torch.allclose(tensor, expected[key], rtol=1e-5, atol=1e-5), key


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--merge", "--adapter", "{plain}", "--combination", "svd"], "--combination needs two adapters"),
        (["--merge", "--combination", "dare_ties", *TWO], "--density is for --combination ties, dare_linear"),
        (["--merge", "--combination", "svd", "--seed", "1", *TWO], "--seed is for --combination dare_linear and"),
        (["--merge", "--density", "0.5", *TWO], "--density is for --combination ties"),
        (["--merge", "--combination", "ties", "--density", "2", *TWO], "2 is not above 0, up to 1"),
        (["--merge", "--combination", "linear", *TWO], "linear adds adapters of one rank"),
        (["--merge", "--combination", "svd", *TWO[:3], "{pissa}"], "init_lora_weights makes another function"),
        (["--merge", "--adapter", "nowhere"], "not a LoRA adapter: got 'nowhere'"),
        (["--adapter", "{plain}"], "--adapter needs --merge"),
        (["--merge", "--adapter", "{plain}", "--factor", "1", "--factor", "2"], "--factor: got 2, allowed: 1"),
        (["--merge", "--adapter", "{plain}", "--adapter", "{plain}"], "names a folder twice"),
        (["--merge", "--adapter", "{plain}", "--adapter", "{dora}"], "are in no sum of adapters"),
        (["--merge", "--adapter", "{plain}", "--step", "3"], "--adapter is for a folder of base weights"),
    ],
)
def test_a_merge_that_cannot_be_is_refused_and_writes_nothing(meshwright, base, adapters, tmp_path, options, message):
    given = [option.format(**adapters) for option in options]
    done = meshwright("checkpoint", "to-hf", base, tmp_path / "out", *given)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", [["a={plain}", "a={other}"], ["{plain}", "a={other}"], ["={plain}"]])
def test_names_that_are_no_names_are_refused(base, adapters, given):
    with pytest.raises(InputError, match="one folder, or NAME=FOLDER with a name of its own for each"):
        mw.generate(base, "x", adapter=[text.format(**adapters) for text in given])
