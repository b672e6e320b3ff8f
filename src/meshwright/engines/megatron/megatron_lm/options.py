"""Options of Megatron-LM's `pretrain_gpt.py`, each taken once: out of a shell script, a file of arguments, or YAML.

train.sh             a script that calls it; `"train.sh TP=4 --vocab-size 32000"` sets a name and adds an option
megatron_lm.args     its options alone, as `export` writes them
model_config.yaml    `MODEL_ARGS: {--num-layers: 12}`, as Megatron-LM's own tests have them
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.engines.megatron.megatron_lm.arguments import known_names
from meshwright.engines.megatron.shell_scripts.scripts import Word, called, words_of
from meshwright.errors import InputError
from meshwright.units import parse_number

YAML_ENDINGS, SCRIPT_ENDINGS = (".yaml", ".yml"), (".sh", ".bash", ".slurm", ".sbatch", ".sub")

NAMES = """
    accumulate-allreduce-grads-in-fp32 attention-backend attention-softmax-in-fp32 auto-detect-ckpt-format
    calculate-per-token-loss check-for-large-grads cp-comm-type cross-entropy-fusion-impl
    cross-entropy-loss-fusion data-cache-path dataloader-type ddp-average-in-collective ddp-bucket-size ddp-num-buckets
    ddp-pad-buckets-for-high-nccl-busbw defer-embedding-wgrad-compute deterministic-mode disable-straggler-on-startup
    dist-ckpt-optim-fully-reshardable distributed-backend empty-unused-memory-level enable-experimental
    exit-signal-handler fake-process-group fp8-amax-compute-algo fp8-amax-history-len fp8-interval
    fp8-margin fp8-recipe full-validation high-priority-stream-groups legacy-tokenizer local-rank
    make-vocab-size-divisible-by manual-gc manual-gc-interval merge-file mid-level-dataset-surplus
    moe-grouped-gemm moe-pad-expert-input-to-capacity moe-per-layer-logging moe-permute-fusion moe-router-dtype
    moe-router-fusion moe-router-padding-for-fp8 moe-router-padding-for-quantization moe-shared-expert-overlap
    moe-token-dispatcher-type moe-use-legacy-grouped-gemm num-dataset-builder-threads num-workers
    pipeline-model-parallel-comm-backend profile profile-ranks profile-step-end profile-step-start rerun-mode
    split te-rng-tracker timing-log-level timing-log-option transformer-impl trust-remote-code use-cpu-initialization
    use-flash-attn use-mcore-models use-nccl-ub use-persistent-ckpt-worker use-pytorch-profiler use-ring-exchange-p2p
    use-sharp vocab-file moe-deepep-num-sms moe-enable-deepep moe-flex-dispatcher-backend
    delay-wgrad-compute overlap-p2p-communication-warmup-flush microbatch-group-size-per-virtual-pipeline-stage
    no-data-sharding no-overlap-p2p-communication no-barrier-with-level-1-timing no-one-logger
    no-create-attention-mask-in-dataloader no-mmap-bin-files no-check-for-nan-in-loss-and-grad
    no-use-tokenizer-model-from-checkpoint-args no-ckpt-fully-parallel-save disable-gloo-process-groups
"""
ABOUT_THE_PROGRAM = frozenset(NAMES.split())
PREFIXES = (
    "ckpt-", "dist-ckpt-", "distributed-timeout-", "ft-", "inprocess-", "log-", "nccl-", "object-storage-",
    "one-logger-",
    "overlap-", "straggler-", "tensorboard-", "tiktoken-", "tokenizer-", "tp-comm-", "wandb-", "logging-level",
    "no-load-", "no-save-", "non-persistent-", "inference-", "cuda-graph-", "memory-snapshot-", "use-checkpoint-",
    "disable-tp-comm-", "no-tp-comm-", "use-dist-ckpt", "exit-duration-",
    "exit-on-", "exit-signal-",
)  # fmt: skip
FUSION = "-fusion"
"""Options about kernels, files and logs, not about what is trained."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option with its values; a later one of the same name takes its place."""

    values: tuple[str, ...]
    line: int


class Options:
    """Options by name without dashes. What nobody takes becomes one note."""

    def __init__(self, found: dict[str, Option], *, path: Path) -> None:
        self.found, self.path, self.said = dict(found), path, []
        self.taken: dict[str, Option] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.found or name in self.taken

    def flag(self, name: str) -> bool:
        """Whether it stands there."""
        return self._take(name) is not None

    def word(self, name: str, default: str = "") -> str:
        """Its one value."""
        option = self._take(name)
        if option is None:
            return default
        if len(option.values) != 1:
            raise InputError(f"{self.where(option)}: --{name} takes one value", got=" ".join(option.values))
        return option.values[0]

    def words(self, name: str) -> tuple[str, ...]:
        """All its values; none where it is not said."""
        option = self._take(name)
        return () if option is None else option.values

    def whole(self, name: str, default: int) -> int:
        """A whole number. Raises InputError, with the line, for a name that nobody has set."""
        number = self.number(name, default)
        if number != int(number):
            raise InputError(f"{self.where(self.taken[name])}: --{name} is not a whole number", got=number)
        return int(number)

    def number(self, name: str, default: float) -> float:
        text = self.word(name)
        if not text:
            return default
        try:
            return parse_number(text)
        except ValueError:
            where = self.where(self.taken[name])
            hint = f'set it behind the file: "{self.path.name} NAME=value"' if "$" in text else None
            what = "cannot be expanded" if "$" in text else "is not a number"
            raise InputError(f"{where}: --{name} {what}", got=text, hint=hint) from None

    def where(self, option: Option) -> str:
        return f"{self.path}:{option.line}" if option.line else "behind the file"

    def note(self, words: str) -> None:
        """Say something about what is not carried, or contradicts itself."""
        self.said.append(words)

    def notes(self) -> list[str]:
        """What was said, and the options that are left, in one line."""
        left = [
            " ".join((f"--{name}", *option.values))
            for name, option in self.found.items()
            if name not in ABOUT_THE_PROGRAM and not name.startswith(PREFIXES) and FUSION not in name
        ]
        return [*self.said, f"not carried over: {', '.join(left)}"] if left else list(self.said)

    def _take(self, name: str) -> Option | None:
        if name in self.found:
            self.taken[name] = self.found.pop(name)
        return self.taken.get(name)


def read(source: str) -> Options:
    """The options of `source`: a path, NAME=value and positional arguments of a script, and options after all."""
    pieces = pieces_of(source)
    path = Path(pieces[0])
    at = next((k for k, piece in enumerate(pieces) if piece.startswith("--")), len(pieces))
    given, more = pieces[1:at], [Word(text=piece, line=0) for piece in pieces[at:]]
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read the arguments: {error.strerror or error}", got=str(path)) from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text: {error}") from None
    if path.suffix in SCRIPT_ENDINGS:
        return Options(parsed([*words_of(text, path=path, given=given), *more], path=path), path=path)
    if given:
        raise InputError(
            "only scripts take names and arguments", got=" ".join(given), allowed="--option value"
        )
    words = _yaml_words(text, path=path) if path.suffix in YAML_ENDINGS else _plain_words(text, path=path)
    return Options(parsed([*words, *more], path=path), path=path)


def pieces_of(source: str) -> list[str]:
    """A path and what stands behind it. Raises InputError where a quotation is open, or nothing is named."""
    try:
        pieces = shlex.split(source)
    except ValueError as error:
        raise InputError(f"the configuration cannot be told apart: {error}", got=source) from None
    if not pieces:
        raise InputError("no configuration is given", got=source)
    return pieces


def _plain_words(text: str, *, path: Path) -> list[Word]:
    words = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            pieces = shlex.split(line.rstrip().removesuffix("\\"), comments=True)
        except ValueError as error:
            raise InputError(f"{path}:{number}: {error}") from None
        words += [Word(text=piece, line=number) for piece in pieces]
    return called(words) or words  # a whole command, too


def _yaml_words(text: str, *, path: Path) -> list[Word]:
    """Options of `MODEL_ARGS`. A name may stand there twice, as in some of Megatron-LM's own; the later one counts."""
    from ruamel.yaml import YAML, YAMLError

    try:
        content = YAML().compose(text)
    except YAMLError as error:
        raise InputError(f"{path} is not YAML: {error}") from None
    given = [value for key, value, _ in _pairs(content) if key == "MODEL_ARGS"]
    if not given or not isinstance(given[0].value, list):
        hint = "it has MODEL_ARGS: {--num-layers: 12, ...}, or sections of Megatron-Bridge's ConfigContainer alone"
        raise InputError(f"{path} is not a configuration of Megatron-LM", hint=hint)
    words = []
    for name, value, line in _pairs(given[0]):
        kind = value.tag.rpartition(":")[2]
        if kind == "null" or (kind == "bool" and value.value.lower() == "false"):
            continue
        listed = (
            [item.value for item in value.value]
            if kind == "seq"
            else []
            if kind == "bool"
            else _divided(value.value)
        )
        words += [Word(text=item, line=line) for item in (name, *listed)]
    return words


def _pairs(node: Any) -> Iterator[tuple[str, Any, int]]:
    """Keys, values and lines of a mapping, those that `<<` merges first."""
    for key, value in node.value if node is not None and node.tag.endswith(":map") else ():
        if key.value == "<<":
            yield from _pairs(value)
    for key, value in node.value if node is not None and node.tag.endswith(":map") else ():
        if key.value != "<<":
            yield key.value, value, key.start_mark.line + 1


def _divided(text: str) -> list[str]:
    """`"[384 384 97656250]"` is three values to Megatron-LM's tests, which escape what their shell would read."""
    text = text.replace("\\", "")
    if text.startswith("[") and text.endswith("]") and "*" not in text:
        return text[1:-1].split()
    return [text]


def parsed(words: list[Word], *, path: Path) -> dict[str, Option]:
    """Words as options. Raises InputError, with the line, for a name that Megatron-LM does not have."""
    known = known_names()
    found: dict[str, Option] = {}
    name, k = "", 0
    while k < len(words):
        word = words[k]
        where = f"{path}:{word.line}" if word.line else "behind the file"
        if not word.text.startswith("--"):
            if word.text.startswith("$"):
                hint = f'set it behind the file: "{path.name} NAME=value"'
                raise InputError(f"{where}: cannot be expanded", got=word.text, hint=hint)
            raise InputError(f"{where}: stands behind no option that takes it", got=word.text)
        name, equals, value = word.text.removeprefix("--").partition("=")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean --{near[0]}?" if near else None
            raise InputError(f"{where}: Megatron-LM has no such option", got=f"--{name}", hint=hint)
        values, k = [value] if equals else [], k + 1
        while known[name] != "nothing" and k < len(words) and not words[k].text.startswith("--"):
            values.append(words[k].text)
            k += 1
        if unknown := next((value for value in values[1:] if value.startswith("$")), None):
            hint = f'it may hold options; set it behind the file: "{path.name} NAME=value"'
            raise InputError(f"{where}: cannot be expanded", got=unknown, hint=hint)
        if (known[name] == "nothing") != (not values):
            takes = "no value" if known[name] == "nothing" else "a value"
            raise InputError(f"{where}: --{name} takes {takes}", got=" ".join(values) or None)
        found[name] = Option(values=tuple(values), line=word.line)
    return found
