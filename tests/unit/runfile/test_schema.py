"""The schema agrees with the specs it fills and with the page that explains it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.runfile import loads, schema
from meshwright.runfile.fields import keys_of
from meshwright.runfile.reading import from_mapping
from meshwright.specs.plan import Plan
from meshwright.specs.precision import PRECISIONS
from meshwright.specs.run import Optimizer

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "run-file.md").read_text()
TEXT = "{model: llama3.1-8b, cluster: h100-8x1, data: {sequence_length: 64}, batch: {global_sequences: 8}}"
ROWS = {m[1]: m[2] for m in re.finditer(r"^\| `([\w.]+)` \|[^|]*\|([^|]*)\|", PAGE, re.MULTILINE)}


def test_the_page_names_every_key_and_no_other() -> None:
    of_rope = {key.replace(".rope.", ".windowed_rope.") for key in ROWS if ".rope." in key}
    assert ROWS.keys() | of_rope == set(schema.all_fields())


def test_the_page_says_which_keys_are_required() -> None:
    required = {key for key, field in schema.all_fields().items() if field.is_required()}
    assert {key for key, default in ROWS.items() if default.strip() == "required"} == required


def test_the_page_names_every_precision() -> None:
    assert [name for name in PRECISIONS if f"`{name}`" not in PAGE] == []


def test_a_pinned_plan_has_a_key_for_every_choice() -> None:
    elsewhere = {"micro_batch", "stored_activations", "weight_cache", "loss_chunk"}  # in `batch` and `kernels`
    of_recompute = {"recompute_modules", "recompute_layers"}
    assert set(keys_of(schema.ParallelSection)) == set(keys_of(Plan)) - elsewhere - of_recompute


def test_what_no_file_states_is_no_key() -> None:
    with pytest.raises(InputError, match="unknown key"):
        loads(TEXT, overrides=["kernels.is_storage_open=false"])
    assert loads(TEXT, overrides=["kernels.stored_activations=[norm]"]).kernels.stored_activations == {"norm": "e4m3"}


def test_specs_are_checked_in_files_alone() -> None:
    with pytest.raises(InputError, match="must be a whole number"):
        loads(TEXT, overrides=["optimizer.warmup_steps=0.5"])
    assert Optimizer(warmup_steps=-1).warmup_steps == -1


def test_an_optimizer_s_own_defaults_give_way_to_the_file() -> None:
    assert loads(TEXT, overrides=["optimizer.name=lion"]).optimizer.betas == (0.9, 0.99)
    assert loads(TEXT, overrides=["optimizer={name: lion, betas: [0.8, 0.9]}"]).optimizer.betas == (0.8, 0.9)


def test_null_is_a_key_that_follows_from_others() -> None:
    shapes = "hidden: 64, num_layers: 2, vocab: 100, ffn_hidden: 8, family: null"
    said = f"{{{shapes}, attention: {{num_heads: 4, num_kv_heads: null, head_dim: null}}}}"
    model = loads(TEXT, overrides=[f"model={said}"]).model
    assert (model.attention.num_kv_heads, model.attention.head_dim, model.family) == (4, 16, "")
    variant = "{base: deepseek-v3, attention: {num_kv_heads: null, head_dim: null}, family: null}"
    model = loads(TEXT, overrides=[f"model={variant}"]).model
    assert (model.attention.num_kv_heads, model.attention.head_dim, model.family) == (128, 56, "")


OWN_NULLS = {"optimizer.gradient_clip", "model.family", "model.attention.num_kv_heads", "model.attention.head_dim"}
INLINE = {"hidden": 64, "num_layers": 2, "vocab": 100, "ffn_hidden": 8, "attention": {"num_heads": 4}}


@pytest.mark.parametrize("model", [{"base": "deepseek-v3"}, INLINE], ids=["named", "inline"])
def test_null_is_the_default_of_every_key(model: dict[str, Any]) -> None:
    """A file with `key: null` is read, or refused, as the same file without the key."""
    content = json.loads(json.dumps({"model": model} | SMALLEST))
    own = OWN_NULLS if "base" in model else {"optimizer.gradient_clip"}
    differ = {key for key, field in schema.all_fields().items() if _outcome(content, key) != _outcome(content, key, {})}
    required = {key for key, field in schema.all_fields().items() if field.is_required()}
    assert differ - required <= own
    assert "optimizer.gradient_clip" in differ


SMALLEST = {"cluster": "h100-8x1", "data": {"sequence_length": 64}, "batch": {"global_sequences": 8}}


def _outcome(content: dict[str, Any], key: str, without: dict[str, Any] | None = None) -> object:
    """The run of `content` with a null at `key`, or with that key left out; or how it is refused."""
    *parents, last = key.replace("NAME", "code").split(".")
    content = json.loads(json.dumps(content))
    section = content
    for parent in parents:
        if not isinstance(section.get(parent), dict):
            section[parent] = {"name": section[parent]} if parent == "cluster" else {}
        section = section[parent]
    section.pop(last, None)
    if without is None:
        section[last] = None
    try:
        return replace(from_mapping(content), text="")
    except InputError as error:
        return str(error)


@pytest.mark.parametrize(
    ("stated", "same"),
    [
        ("optimizer={name: lion, betas: null}", "optimizer.name=lion"),
        ("kernels=null", "name=null"),
        ("train={evaluate: {num_batches: null, num_sequences: 8}}", "train.evaluate={num_sequences: 8}"),
    ],
)
def test_null_counts_as_not_stated(stated: str, same: str) -> None:
    assert replace(loads(TEXT, overrides=[stated]), overrides=()) == replace(
        loads(TEXT, overrides=[same]), overrides=()
    )


def test_null_for_an_unknown_or_required_key_is_refused() -> None:
    with pytest.raises(InputError, match=r"modle: unknown key"):
        loads(TEXT, overrides=["modle=null"])
    with pytest.raises(InputError, match=r"data\.sequence_length: is empty"):
        loads(TEXT, overrides=["data.sequence_length=null"])


def test_the_package_costs_nothing_until_it_is_used() -> None:
    code = "import sys, meshwright.runfile; print([m for m in ('pydantic', 'ruamel.yaml') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
