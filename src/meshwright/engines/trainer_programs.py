"""Programs in Python that call a trainer, read as text: the arguments of their calls.

model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Qwen3-4B", max_seq_length=2048)
trainer = SFTTrainer(model=model, args=SFTConfig(max_steps=60, learning_rate=2e-4))
"""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.engines.base import ASSUMED, FollowedCall
from meshwright.engines.program_values import ProgramValues, UnstatedError, dotted_name
from meshwright.engines.trainers.tables import FOLDER, matching, table
from meshwright.errors import InputError
from meshwright.json_values import parse_word

TRAINERS = ("SFTTrainer", "UnslothTrainer", "Trainer")
LENGTHS = ("max_length", "max_seq_length", "Trainer.max_seq_length", "from_pretrained.max_seq_length")
USED = {"Trainer.peft_config": "LoraConfig", "from_pretrained.quantization_config": "BitsAndBytesConfig"}
"""Keywords that take the value of another call."""
UNSLOTH = ("from_pretrained", "LoraConfig")
PREFIXES = {"arguments": "", "get_peft_model": "LoraConfig."}
Calls = Mapping[str, list[ast.Call]]  # by role


def is_trainer_program(text: str) -> bool:
    """Return True for a program that calls one trainer of language models, with arguments that it states."""
    try:
        return bool(re.search(r"(SFTConfig|TrainingArguments)\(", text)) and _is_one_run(_calls(ProgramValues(text)))
    except (SyntaxError, ValueError, RecursionError):
        return False


def program_call(path: Path, text: str, given: list[str]) -> FollowedCall:
    """Return what the calls of the program `path` state, with the settings `given` behind its name.

    Raises InputError for calls behind conditions that only a run decides, and for values that the program computes.
    """
    try:
        values = ProgramValues(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not Python", got=str(error)[:80]) from None
    calls = _calls(values)
    _require_plain(values, calls, path)
    kind = "unsloth" if "FastLanguageModel" in _names(calls["from_pretrained"]) else "program"
    content, unknown = _content(values, calls)
    of, later = table(kind), {key: parse_word(value) for key, _, value in (one.partition("=") for one in given)}
    content |= {key: value for key, value in later.items() if of.knows(key)}
    asked = [key for key in unknown.keys() - later if key in USED or not matching(key, of.without_effect)]
    if left := [f"{key}={ast.unparse(unknown[key])[:40]}" for key in sorted(asked) if of.keys.get(key) != "model"]:
        hint = f'give them behind the file: "{path.name} KEY=VALUE"'
        raise InputError(f"{path}: the program computes these values", got=", ".join(left), hint=hint)
    attributes = {one.rpartition(".")[2] for one in values.changed if "." in one} - {"model"}
    if changed := attributes & {key.rpartition(".")[2] for key in content}:
        raise InputError(f"{path}: its code changes arguments after their call", got=", ".join(sorted(changed)))
    stated = _complete(content, calls, kind=kind)
    if not content["use_peft"] and any(name.endswith("requires_grad") for name in values.changed):
        raise InputError(f"{path}: its code freezes some weights", hint="run files train all weights, or adapters")
    notes = [f"{ASSUMED} {path.name} runs as one process on each device, and what it does besides changes no step"]
    for what, found in ((f"{ASSUMED} defaults of the newest classes", stated), ("its own defaults", values.defaults)):
        notes += [f"{what}: {', '.join(f'{key} {value}' for key, value in found.items())}"] if found else []
    if kind == "unsloth":
        notes.append("the estimate is of no software in particular: Unsloth's kernels are not in it")
    source = shlex.join([str(path), *given])
    return FollowedCall(source=source, notes=tuple(notes), contents=((kind, content | stated),))


def _calls(values: ProgramValues) -> Calls:
    found: dict[str, list[ast.Call]] = {}
    for role, name in _table("program")["calls"].items():
        found[role] = [call for call in values.calls if re.fullmatch(rf"(.*\.)?({name})", dotted_name(call.func))]
    return found


@cache
def _table(kind: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{kind}.toml").read_text(encoding="utf-8"))


def _names(calls: list[ast.Call]) -> str:
    return " ".join(dotted_name(call.func) for call in calls)


def _is_one_run(calls: Calls) -> bool:
    is_known = _names(calls["Trainer"]).rpartition(".")[2] in TRAINERS
    names_model = any(one.arg == "model" and isinstance(one.value, ast.Constant)
                      for call in calls["Trainer"] for one in call.keywords)  # fmt: skip
    return is_known and len(calls["arguments"]) == 1 and (names_model or len(calls["from_pretrained"]) == 1)


def _require_plain(values: ProgramValues, calls: Calls, path: Path) -> None:
    """Raise InputError for a program whose calls do not say what one run is."""
    for role, found in calls.items():
        is_open = role == "get_peft_model" and not calls["LoraConfig"] and "FastLanguageModel" not in _names(found)
        if found and (role == "other" or is_open):
            raise InputError(f"{path}: adapters of another kind, or of a file of their own", got=_names(found))
        if (len(found) > 1 and role != "recompute") or values.conditional.intersection(found):
            what = f"{path}: calls that are there more than once, or behind a condition that its text does not decide"
            raise InputError(what, got=_names(found), hint="keep the one that runs")
    if not _is_one_run(calls):
        raise InputError(f"{path} does not call one trainer of a language model", got=_names(calls["Trainer"]))


def _content(values: ProgramValues, calls: Calls) -> tuple[dict[str, Any], dict[str, ast.expr]]:
    """Return values by key of the table, and expressions whose values are not known."""
    content: dict[str, Any] = {}
    unknown: dict[str, ast.expr] = {}
    for role in ("from_pretrained", "Trainer", "LoraConfig", "BitsAndBytesConfig", *PREFIXES):
        for call in calls[role]:
            given = {one.arg or "**": one.value for one in call.keywords}
            if call.args and role in ("from_pretrained", "Trainer"):
                given.setdefault("model", call.args[0])
            for name, node in given.items():
                key = PREFIXES.get(role, f"{role}.") + name
                if key != "Trainer.model" or isinstance(node, ast.Constant):
                    try:
                        content[key] = values.value(node)
                    except UnstatedError:
                        unknown[key] = node
    for key, role in USED.items():
        node = unknown.get(key)
        if node and values.bound.get(dotted_name(node), node) in calls[role]:
            content[key] = bool(unknown.pop(key))
        elif role == "BitsAndBytesConfig" or not calls["get_peft_model"]:  # nothing takes the value of the call
            content = {name: value for name, value in content.items() if not name.startswith(role)}
    return content, unknown


def _complete(content: dict[str, Any], calls: Calls, *, kind: str) -> dict[str, Any]:
    """Add to `content` what calls mean without saying it; return the defaults of their classes that count."""
    content["use_peft"] = bool(calls["get_peft_model"] or content.get("Trainer.peft_config"))
    of_classes, defaults = _table(kind)["of_classes"], {}
    recomputes = bool(calls["recompute"])
    if kind == "unsloth":
        defaults = of_classes["FastLanguageModel"] | (of_classes["get_peft_model"] if content["use_peft"] else {})
        is_whole = bool(content.get("from_pretrained.full_finetuning"))
        if is_whole or content.get("from_pretrained.load_in_16bit"):
            content["from_pretrained.load_in_4bit"] = False
        if content.get("fp16"):
            del defaults["bf16"]
        of_model, of_adapter = (content.pop(f"{role}.use_gradient_checkpointing", True) for role in UNSLOTH)
        recomputes |= bool(of_model if is_whole else of_adapter)
    if recomputes:
        content["gradient_checkpointing"] = True
    is_new = not content.keys() & {"max_seq_length", "Trainer.max_seq_length", "Trainer.packing"}
    if _names(calls["arguments"]).endswith("SFTConfig") and (is_new or kind == "unsloth"):
        defaults |= of_classes["SFTConfig"]
    lengths = [content.pop(key) for key in LENGTHS if content.get(key) is not None]
    if lengths or kind == "unsloth":
        content["max_length"] = min(lengths, default=2048)
    keys = table(kind).keys
    taken = {keys.get(key) for key, value in content.items() if value is not None}
    return {key: value for key, value in defaults.items() if keys[key] not in taken}
