"""Shell scripts that run a trainer, read without running them: the arguments of its program and of its launcher.

    train.sh                        torchrun --nproc_per_node 8 train.py --model_name_or_path X --bf16 True
    "train.sh LR=1e-5 model=phi-2"  with variables of the script, and keys of the trainer that count last

The interpreter of scripts belongs to Megatron; no engine imports another, so that this module stands above both.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.engines.base import ASSUMED, FollowedCall
from meshwright.engines.megatron.shell_scripts.scripts import WantedCall, script_call
from meshwright.engines.megatron.shell_scripts.syntax import Word
from meshwright.engines.program_values import ProgramValues, UnstatedError, dotted_name
from meshwright.engines.recognition import TRAINER_CALL, is_trainer_script, named_script
from meshwright.engines.trainer_programs import program_call
from meshwright.engines.trainers.files import ENDINGS, content_of
from meshwright.engines.trainers.tables import ORDER, matching, table, table_of_program
from meshwright.errors import InputError
from meshwright.json_values import load_text, parse_word

TOOLS = {
    "swift": ("sft", "pt", "rlhf"), "llamafactory-cli": ("train",), "trl": ("sft", "dpo", "kto", "orpo"),
    "axolotl": ("train",), "tune": ("run",), "litgpt": ("pretrain", "finetune", "finetune_lora", "finetune_full"),
}  # fmt: skip
"""Programs of trainers, with those of their commands that train."""
LAUNCHER = re.compile(r"(torch\.distributed|accelerate|deepspeed)\b.*")
LAUNCHED_BY = re.compile(r"\b(torchrun|torch\.distributed\.\w+|deepspeed)\b")
SCRIPTS, SWITCHES = "scripts", {"use_lora", "lora_enable", "use_peft", "use_peft_lora", "lora"}
OF_ADAPTERS = ("rank", "alpha", "dropout", "targets")
KINDS = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "multi_gpu": "MULTI_GPU"}
OTHER_OBJECTIVE = re.compile(
    r"(?<![a-z])(squad|glue|swag|mlm|plm|ner|bert|t5|seq2seq|translation|summarization|cls|classif\w*|reward\w*|rm|ppo|"
    r"grpo|rlhf|dpo|kto|orpo|simpo|raft|distil\w*|gkd|rerank\w*|embed\w*|infer\w*|eval\w*|generate|vlm|dropo)(?![a-z])"
)
"""Words in the names of programs that train with another objective than the next token, or that do not train."""
OTHER_FOLDER = re.compile(r"(?<![a-z])(reward|dpo|ppo|grpo|rlhf)(?![a-z])")
LAUNCHED = ("NPROC_PER_NODE", "NNODES", "CUDA_VISIBLE_DEVICES")
WANTED = WantedCall(
    name="trainer that is read",
    at=lambda parts: -1 if TRAINER_CALL.search(" ".join(word.text for word in parts)) else None,
    environment=LAUNCHED,
)
SETTING = re.compile(r"[A-Za-z_][\w.]*=")
IN_CALLS = {
    "LoraConfig": {
        "r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout",
        "target_modules": "lora_target_modules",
    },
    "BitsAndBytesConfig": {"bnb_4bit_use_double_quant": "double_quant"},
}  # fmt: skip
"""Arguments of a program's calls, and the options that state them."""
UNSET = re.compile(r"\$(\w+|\{\w+\}|@|\*)")


def trainer_call(source: str) -> FollowedCall:
    """Return the call of the script that `source` names, or `source` if it names no script that runs a trainer.

    Raises InputError, with the line, for a script that cannot be followed, for a program with another objective, and
    for arguments whose values only the caller of the script knows.
    """
    if program := named_script(source, lambda path, _: path.suffix == ".py"):
        return program_call(*program)
    script = named_script(source, is_trainer_script)
    if script is None:
        return FollowedCall(source=source)
    path, text, given = script
    later = [one for one in given if any(table(kind).knows(one.partition("=")[0]) for kind in ORDER)]
    later += [one for one in given if re.match(r"[a-z]+\.[\w.]+=", one) and one not in later]  # of a run file
    call = script_call(text, path=path, given=[one for one in given if one not in later], wanted=WANTED)
    launched = [word.text.partition("=") for word in call.arguments if word.text.startswith(LAUNCHED)]
    environment = {key: value for key, _, value in launched}
    launcher, program, parts = _split(call.arguments[len(environment) :], path)
    files, content, unknown = _arguments(parts)
    laid_over: list[str] = []
    if program.startswith(("tune", "litgpt")):  # their arguments are keys of the file that one of them names
        files = [str(content.pop("config"))] if "config" in content else files
        laid_over = [f"{key}={json.dumps(value)}" for key, value in content.items()]
        content = {}
    if program.startswith("litgpt"):
        laid_over = [re.sub(r"^(optimizer|data)=", r"\1.class_path=", one) for one in laid_over]
        laid_over = [re.sub(r"^(optimizer|data)\.(?!class_path|init_args)", r"\1.init_args.", one) for one in laid_over]
        content["model_name" if "pretrain" in program else "checkpoint_dir"] = parts[0].text if parts else None
    content = (content_of(_located(files[0], path)) if files else {}) | content
    name, notes = table_of_program(program, content), [*call.notes]
    if program == "swift rlhf":
        content.setdefault("rlhf_type", "dpo")
    if name in (SCRIPTS, "deepspeed_chat") and (found := OTHER_FOLDER.search("/".join(path.absolute().parts[-5:-1]))):
        raise InputError(f"{path}: its folder is of another objective", got=found[0], hint="run files have none")
    if name == SCRIPTS:
        if found := OTHER_OBJECTIVE.search(program.rpartition("/")[2].lower()):
            what = f"{path}: a program of another objective than the next token"
            raise InputError(what, got=program, hint=f"run files have none of {found[0]} by a program of one's own")
        notes.append(
            f"{ASSUMED} {program} trains all weights, or those of an adapter that its arguments state, as the Trainer "
            "of transformers does; what its code sets besides is not known"
        )
        if not content.keys() & SWITCHES and any(key.startswith("lora_") or "lora" in program for key in content):
            content["use_lora"] = True
        stated = _own_defaults(program, path, known=content)
        if not any((stated | content).get(key) for key in SWITCHES):
            stated = {key: one for key, one in stated.items() if table(SCRIPTS).keys[key] not in OF_ADAPTERS}
        content |= stated
        shown = ", ".join(f"{key} {value}" for key, value in stated.items())
        notes += [f"defaults of {program}: {shown}"] if stated else []
    _require_known(unknown, content, name=name, path=path, given={one.partition("=")[0] for one in later})
    # litgpt starts its processes itself, by keys of its file
    shared = {} if program.startswith("litgpt") else _launched(launcher, program, environment, path)
    return FollowedCall(
        source=shlex.join([str(path), *laid_over, *later]), notes=tuple(notes),
        contents=((name, content), ("accelerate", shared)),
    )  # fmt: skip


def _own_defaults(program: str, script: Path, *, known: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults of settings that `known` lacks, as the text of the program has them.

    They are of fields of its classes, `NAME: TYPE = field(default=VALUE)`, of options that argparse adds, and of
    arguments of its calls, `LoraConfig(lora_dropout=0.05)`, where these agree.
    """
    try:
        values = ProgramValues(load_text(_located(program, script)))
    except (InputError, OSError, ValueError, SyntaxError, RecursionError):
        return {}
    keys, found = table(SCRIPTS).keys, {}
    taken = {keys.get(key) for key in known}
    for name, node in [one for fields in values.fields.values() for one in fields.items()]:
        with suppress(UnstatedError):
            value = values.default(node)
            if keys.get(name, "model") != "model" and keys[name] not in taken and value not in (None, False, ""):
                found[name] = value
    in_calls: dict[str, list[Any]] = {}
    for call in values.calls:
        of_call = IN_CALLS.get(dotted_name(call.func).rpartition(".")[2], {})
        for one in call.keywords:
            if (name := of_call.get(str(one.arg))) and keys[name] not in taken:
                with suppress(UnstatedError):
                    value = values.value(one.value)
                    in_calls.setdefault(name, []).append(value)
    stated = {name: same[0] for name, same in in_calls.items() if same[0] and same.count(same[0]) == len(same)}
    return {name: value for name, value in found.items() if keys[name] not in map(keys.get, stated)} | stated


def _split(parts: Sequence[Word], path: Path) -> tuple[Sequence[Word], str, Sequence[Word]]:
    """Return the parts of the launcher, the name of the program, and its arguments."""
    texts = [word.text for word in parts]
    for k, text in enumerate(texts):
        name = text.rpartition("/")[2]
        if texts[k + 1 : k + 2] and texts[k + 1] in TOOLS.get(name, ()):
            begin = texts.index("--config") if name == "tune" and "--config" in texts else k + 2  # behind the recipe
            return [*parts[:k], *parts[k + 2 : begin]], f"{name} {texts[k + 1]}", parts[begin:]
        if text.endswith(".py") or (k and texts[k - 1] == "-m" and not LAUNCHER.fullmatch(text)):
            return parts[:k], text, parts[k + 1 :]
    raise InputError(f"{path}: the program that trains is not known", got=" ".join(texts)[:80])


def _arguments(parts: Sequence[Word]) -> tuple[list[str], dict[str, Any], dict[str, Word]]:
    """Return files of settings, values by key as argparse takes them, and parts whose values are not known."""
    files: list[str] = []
    values: dict[str, list[Any]] = {}
    unknown: dict[str, Word] = {}
    key = ""
    for word in parts:
        text, is_open = word.text, bool(word.unknown) or "$" in word.text
        if text.startswith("--"):
            key, equals, text = text[2:].partition("=")
            key = key.replace("-", "_")
            values[key] = [text] if equals else []
            unknown.pop(key, None)
        elif UNSET.fullmatch(text) and not word.unknown and (not key or values[key]):
            continue  # a variable behind a whole argument: it is empty where the caller does not set it
        elif key and not (values[key] and SETTING.match(text)):
            values[key].append(text)
        elif "=" in text:  # behind a file
            values[text.partition("=")[0]] = [text.partition("=")[2]]
        elif text.endswith(ENDINGS):
            files.append(text)
        if is_open:
            unknown[key] = word
    read = {name: [parse_word(text) for text in found] or [True] for name, found in values.items()}
    return files, {name: found[0] if len(found) == 1 else found for name, found in read.items()}, unknown


def _require_known(
    unknown: dict[str, Word], content: dict[str, Any], *, name: str, path: Path, given: set[str]
) -> None:
    """Drop a model that only the caller knows, for which the reader asks; raise InputError for what concerns a step."""
    of, left = table(name), []
    for key, word in unknown.items():
        if of.keys.get(key) == "model" or word.text == "$RANDOM":  # the reader asks for the one, and has the other
            del content[key]
        elif not key or (of.knows(key) and not matching(key, of.without_effect) and key not in given):
            left.append(f"--{key} {word.text}" if key else word.text)
    if left:
        hint = f'give them after the file: "{path.name} NAME=value", or the script\'s own'
        raise InputError(f"{path}: the caller of the script sets these values", got=", ".join(left), hint=hint)


def _launched(parts: Sequence[Word], program: str, environment: dict[str, str], path: Path) -> dict[str, Any]:
    """Return what a launcher and its options say of devices and sharding, with the keys of accelerate's file."""
    _, found, unknown = _arguments(parts)
    options = {key: one[0] if isinstance(one, list) else one for key, one in found.items() if key not in unknown}
    names = " ".join(word.text for word in parts)
    if "accelerate" in names:
        return _accelerated(options, path)
    nodes = options.get("nnodes", options.get("num_nodes", 0 if {"nnodes", "num_nodes"} & unknown.keys() else 1))
    of_node = options.get("nproc_per_node", options.get("num_gpus", environment.get("NPROC_PER_NODE")))
    visible = [*filter(None, environment.get("CUDA_VISIBLE_DEVICES", "").split(","))]
    of_node = of_node or ("$" if "$" in "".join(visible) else None)
    if "include" in options:
        of_node = sum(len(re.split(r"[:,]", host)) - 1 for host in str(options["include"]).split("@"))
    elif program.startswith(("llamafactory-cli", "axolotl train")):  # which start a process on each device
        of_node = of_node or len(visible)
    elif not LAUNCHED_BY.search(names) and of_node is None and "srun" not in names:
        if len(visible) > 1:
            what = f"{path}: one process on {len(visible)} devices, over which it spreads layers or batches"
            raise InputError(what, got=program, hint="run files have one process for each device")
        of_node = 1
    nodes = environment.get("NNODES", nodes)
    counts = [int(one) if re.fullmatch(r"\d+", one) else 0 for one in (str(of_node), str(nodes))]
    return {"num_processes": counts[0] * counts[1] or None, "num_machines": counts[1] or None}


def _accelerated(options: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the file of accelerate that the options name, with the other options in their sections."""
    place = options.pop("config_file", None)
    found = content_of(_located(place, path)) if place else {}
    kinds = [kind for key, kind in KINDS.items() if options.pop(key, False)]
    found |= {"distributed_type": kinds[0]} if kinds else {}
    for key, value in options.items():
        section = "fsdp_config" if key.startswith("fsdp_") else "deepspeed_config"
        if table("accelerate").knows(f"{section}.{key}"):
            found[section] = {**found.get(section, {}), key: value}
        else:
            found[key] = value
    return found


def _located(written: str, script: Path) -> Path:
    """Return the file that a script names, in the folders above it."""
    places = [folder / written for folder in script.absolute().parents]
    if (found := next((place for place in places if place.is_file()), None)) is None:
        hint = "put the file where the script names it, below a folder above the script"
        hint = hint if Path(written).suffix else f"torchtune's own is copied by `tune cp {written} {written}`"
        raise InputError(f"{script} names a file that is not here", got=written, hint=hint)
    return found
