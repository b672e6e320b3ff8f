"""Find the training program in the words of a command, and the shell that runs a text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshwright.engines.megatron.shell_scripts.syntax import HereDocument, Part, Word

PROGRAM = re.compile(r"(^|/)(pretrain|train|finetune|posttrain)\w*\.py$")
MENTIONED = re.compile(r"(^|[\s/])(pretrain|train|finetune|posttrain)\w*\.py(\s|$)")
OTHER_MODELS = re.compile(
    r"(^|/)(\w+_(bert|t5|ict|retro|biencoder|vision|vlm|mimo|rl)(_\w+)?|(multimodal|mimo)/train\w*)\.py$"
)
"""Training programs of models other than GPT, or of other trainings."""
SCRIPT = re.compile(r"\.(sh|bash|slurm|sbatch)$")
SHELLS = ("bash", "sh", "dash", "zsh", "ksh")
NEVER_RUNNING_NAMES = """
    cat ls cp mv ln chmod chown mkdir rm rmdir touch tee grep egrep fgrep rg sed awk head tail less wc sort
    find stat du diff cmp git tar zip unzip rsync scp wget curl sleep date pkill pgrep kill killall ps which
    whereis readlink realpath basename dirname pip pip3 conda module apt apt-get yum pushd popd md5sum
    sha256sum dos2unix vim nano code black ruff pylint
"""
NEVER_RUNNING = frozenset(NEVER_RUNNING_NAMES.split())
"""Programs that have a training program's file as an argument without running it."""


@dataclass(frozen=True, kw_only=True)
class ShellText:
    """A text that a command gives to another shell."""

    text: str = ""
    document: tuple[Part, ...] | None = None
    positional: tuple[str, ...] = ()


def program_at(words: list[Word]) -> int | None:
    """Return the place of the training program in a command."""
    return next((k for k, word in enumerate(words) if PROGRAM.search(word.text)), None)


def script_at(words: list[Word]) -> int | None:
    """Return the place of a script that a command runs: `bash train.sh`, `sbatch train.sh`, `./train.sh`."""
    return next((k for k, word in enumerate(words) if SCRIPT.search(word.text)), None)


def shell_text(words: list[Word], documents: tuple[HereDocument, ...]) -> ShellText | None:
    """Return the text that a command gives to a shell: `bash -c TEXT`, `ssh HOST TEXT`, `sbatch <<END`."""
    for k, word in enumerate(words):
        name, at = word.text.rpartition("/")[2], k + 1
        if name in SHELLS:
            is_command = False
            while at < len(words) and re.match(r"[-+]\w", words[at].text):
                is_command = is_command or ("c" in words[at].text and words[at].text[1] != "-")
                at += 2 if words[at].text in ("-o", "+o", "-O", "+O") else 1
            if is_command and at < len(words):
                return ShellText(text=words[at].text, positional=tuple(one.text for one in words[at + 2 :]))
            if at == len(words) and documents:
                return ShellText(document=documents[-1].parts)
            break
    if words[0].text in ("sbatch", "qsub", "bsub") and documents and program_at(words) is None:
        return ShellText(document=documents[-1].parts)
    for word in words[1:]:
        text = word.text.partition("=")[2] if word.text.startswith("--wrap=") else word.text
        if MENTIONED.search(text) and re.search(r"\s", text.strip()):
            return ShellText(text=text)
    return None
