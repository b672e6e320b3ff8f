"""Whose configuration a file is, by its content. Nothing of the file is executed or imported.

Endings only exclude: documents and pages quote commands and settings, and are no configurations.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.engines.maxtext.config.keys import known_keys as maxtext_keys
from meshwright.engines.megatron.megatron_bridge.files import is_bridge_yaml
from meshwright.engines.megatron.megatron_lm.yaml_arguments import is_flagscale, is_nemo
from meshwright.engines.torchtitan.toml_files.run_content import known_keys as torchtitan_keys
from meshwright.engines.trainer_programs import is_trainer_program
from meshwright.engines.trainers.files import trainer_of
from meshwright.json_values import load_text

LARGEST_BYTES = 1 << 20
QUOTING = frozenset((".md", ".rst", ".ipynb", ".html", ".txt", ".log", ".csv", ".yaml.j2"))
SHELL = re.compile(r"\A#!.*\b(ba|da|z|k)?sh\b")
MAXTEXT_CALL = re.compile(r"^[^#\n]*\bpython3?\b[^#\n]*\bmaxtext[./]\S*(train|\$)", re.IGNORECASE | re.MULTILINE)
MEGATRON_CALL = re.compile(r"^[^#\n]*\b(pretrain|train|finetune|posttrain)\w*\.py\b", re.MULTILINE)
MEGATRON_OPTION = re.compile(r"^\s*--(num-layers|tensor-model-parallel-size)\b", re.MULTILINE)
OTHER_OPTION = re.compile(r"--(job\.config[_-]file|(pretrained_)?model_name_or_path|train_file)\b")
"""Options of torchtitan and of trainers on transformers, whose programs have such names too."""
TRAINER_CALL = re.compile(
    r"^[^#\n]*(--per[_-]device[_-]train[_-]batch[_-]size\b|\bswift (sft|pt|rlhf) |\bllamafactory-cli train |"
    r"\btrl (sft|dpo|kto|orpo) |\bsrc/train(_bash)?\.py +\S+\.(yaml|json)\b|\baxolotl(\.cli\.| )train |\btune run |"
    r"\blitgpt (pretrain|finetune|finetune_lora|finetune_full) )",
    re.MULTILINE,
)
COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
NEMO_MODEL = re.compile(r"^  (num_layers|hidden_size):", re.MULTILINE)
MODULE = re.compile(r"^def ((?!_)\w+)\(\)\s*->\s*[\w.\"']*\bConfig\b[\"']?:", re.MULTILINE)

_OF_A_RUN = """
    base_config model_name decoder_block base_emb_dim per_device_batch_size max_target_length remat_policy
"""
OF_A_RUN = frozenset(_OF_A_RUN.split())
"""Keys of MaxText one of which each of its configurations has; its rules for meshes have none."""


@dataclass(frozen=True, kw_only=True)
class Recognised:
    """A configuration of a project.

    Attributes:
        project: name of the project.
        engine: the engine that reads it.
        functions: functions of a module of Python, each a configuration; empty for data and scripts.
        is_part: True for a file that says how devices share the work of a run, which another file describes.
    """

    project: str
    engine: str
    functions: tuple[str, ...] = ()
    is_part: bool = False


def recognised(path: Path) -> Recognised | None:
    """Return whose configuration `path` is; None: it is none, or cannot be read as text."""
    try:
        if path.is_dir():
            return _of_trainer(path)
        if path.suffix in QUOTING or path.stat().st_size > LARGEST_BYTES:
            return None
        if not path.is_file():  # a pipe can be read once, and an import reads a file several times
            return None
        text = load_text(path)
    except (OSError, ValueError):
        return None
    if path.suffix == ".py":
        functions = tuple(MODULE.findall(text)) if "torchtitan" in text and "Trainer" in text else ()
        if functions:
            return Recognised(project="TorchTitan", engine="torchtitan", functions=functions)
        return Recognised(project="program of a trainer", engine="native") if is_trainer_program(text) else None
    return _of_tables(text) or _of_script(path, text) or _of_yaml(path, text) or _of_trainer(path)


def configurations_below(folder: Path) -> Iterator[tuple[Path, Recognised]]:
    """Yield every configuration of a run below `folder`, in the order of paths, without hidden folders and links."""
    for path in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if (
            not is_hidden
            and path.is_file()
            and not path.is_symlink()
            and (found := recognised(path))
            and not found.is_part
        ):
            yield path, found


def _of_tables(text: str) -> Recognised | None:
    """TOML with sections of torchtitan."""
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return None
    sections = {key.partition(".")[0] for key in torchtitan_keys()} & values.keys()
    is_titan = "training" in sections and isinstance(values.get("model"), dict)
    return Recognised(project="TorchTitan", engine="torchtitan") if is_titan else None


def is_maxtext_script(path: Path, text: str) -> bool:
    """Return True if `text`, the content of `path`, is a shell script that trains with MaxText."""
    return _is_script(path, text) and MAXTEXT_CALL.search(_joined(text)) is not None


def is_trainer_script(path: Path, text: str) -> bool:
    """Return True if `text`, the content of `path`, is a shell script that gives a trainer its arguments."""
    return _is_script(path, text) and TRAINER_CALL.search(_joined(text)) is not None


def named_script(source: str, is_script: Callable[[Path, str], bool]) -> tuple[Path, str, list[str]] | None:
    """Return the script that `source` names, its text, and the words after its name; None unless `is_script`."""
    try:
        first, *given = shlex.split(source)
        path = Path(first)
        text = load_text(path)
    except (OSError, ValueError):  # the reader of configurations reports it
        return None
    return (path, text, given) if is_script(path, text) else None


def _joined(text: str) -> str:
    """Return the lines of a script without comments, which a backslash does not continue."""
    return COMMENT.sub("", text).replace("\\\n", " ")


def _is_script(path: Path, text: str) -> bool:
    if path.name.startswith(("Dockerfile", "Makefile")):
        return False
    return SHELL.match(text) is not None or path.suffix in ("", ".sh", ".bash", ".slurm", ".sbatch", ".sub")


def _of_script(path: Path, text: str) -> Recognised | None:
    """A shell script that calls a training program, or a file of its arguments."""
    if is_maxtext_script(path, text):
        return Recognised(project="MaxText", engine="maxtext")
    if is_trainer_script(path, text):
        return Recognised(project="script of a trainer", engine="native")
    has_options, joined = MEGATRON_OPTION.search(COMMENT.sub("", text)), _joined(text)
    calls = MEGATRON_CALL.search(joined) and (has_options or not OTHER_OPTION.search(joined))
    if (_is_script(path, text) and calls) or (path.suffix == ".args" and has_options):
        return Recognised(project="Megatron-LM", engine="megatron")
    return None


def _of_trainer(path: Path) -> Recognised | None:
    """A configuration of a trainer, or a folder with one."""
    found = trainer_of(path)
    return Recognised(project=found.title, engine="native", is_part=found.shares_work) if found else None


def _of_yaml(path: Path, text: str) -> Recognised | None:
    """A mapping with keys of MaxText, Megatron-Bridge, Megatron-LM's tests or Primus."""
    top = {*re.findall(r"^([A-Za-z_]\w*):", text, re.MULTILINE)}
    if not top:
        return None
    known = maxtext_keys()
    named = (
        ("FlagScale", "experiment" in top and re.search(r"backend:\s*megatron", text)),
        ("FlagScale", is_flagscale(top) and "tensor_model_parallel_size:" in text),
        ("Megatron-LM", "MODEL_ARGS" in top),
        ("NeMo", is_nemo(top) and NEMO_MODEL.search(text)),
        ("Megatron-Bridge", is_bridge_yaml(shlex.quote(str(path)))),
        ("Primus", top >= {"modules", "exp_name"} or top >= {"modules", "work_group"}),
    )
    if project := next((project for project, is_its in named if is_its), None):
        return Recognised(project=project, engine="megatron")
    if top & OF_A_RUN and 2 * sum(key in known for key in top) > len(top):
        return Recognised(project="MaxText", engine="maxtext")
    return None
