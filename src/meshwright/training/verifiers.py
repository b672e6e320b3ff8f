"""Scores of completions by the verifiers of a run file. Nothing that a model or a data set writes is executed."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from threading import Timer

from meshwright.errors import InputError
from meshwright.specs.reinforcement import Reward, Verifier

NUMBER = re.compile(r"(?:(?<!\w)-)?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)")
MOST_BYTES = 256
"""Of a line that a command writes."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A completion, its prompt, and the answer that the data has for it."""

    prompt: str
    completion: str
    reference: str
    num_tokens: int  # of the completion


def scores(reward: Reward, judged: Sequence[Judged]) -> list[float]:
    """The score of each completion. Raises InputError where a command fails.

    >>> one = Judged(prompt="1+1=", completion=" It is 2. ", reference="2", num_tokens=3)
    >>> [scores(Reward(verifier=v), [one]) for v in (Verifier.EXACT, Verifier.NUMBER)]
    [[0.0], [1.0]]
    """
    if reward.verifier is Verifier.COMMAND:
        return _of_command(reward, judged)
    return [float(_is_right(reward, one)) for one in judged]


def _is_right(reward: Reward, one: Judged) -> bool:
    if reward.verifier is Verifier.EXACT:
        return _plain(one.completion) == _plain(one.reference)
    if reward.verifier is Verifier.NUMBER:
        said, right = last_number(one.completion), last_number(one.reference)
        return said is not None and said == right
    if reward.verifier is Verifier.LENGTH:
        return one.num_tokens <= (reward.most_tokens or 0)
    pattern = re.compile(reward.pattern or "", re.DOTALL)
    if reward.verifier is Verifier.FORMAT:
        return pattern.fullmatch(one.completion.strip()) is not None
    found = pattern.search(one.completion)
    return found is not None and (not pattern.groups or _plain(found[1] or "") == _plain(one.reference))


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def last_number(text: str) -> Decimal | None:
    """The last number of a text; None where there is none.

    >>> last_number("so 1,250.50 apples, or 1,250.5."), last_number("none")
    (Decimal('1250.5'), None)
    """
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def _of_command(reward: Reward, judged: Sequence[Judged]) -> list[float]:
    """Give a program the completions as lines of JSON, and read as many scores."""
    command = list(reward.command or ())
    name = f"the verifier {command[0]}"
    with tempfile.TemporaryFile() as lines:
        lines.writelines(json.dumps(asdict(one)).encode() + b"\n" for one in judged)
        lines.seek(0)
        try:
            program = subprocess.Popen(command, stdin=lines, stdout=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            raise InputError(f"{name} does not start: {error.strerror}", got=" ".join(command)) from error
    assert program.stdout is not None
    late = Timer(reward.timeout_s, _kill, (program,))
    late.start()
    try:
        said = program.stdout.read(MOST_BYTES * len(judged) + 1)
        is_long = len(said) > MOST_BYTES * len(judged)
        if is_long:
            _kill(program)
        code = program.wait()
    finally:
        late.cancel()
        _kill(program)
        program.stdout.close()
    if is_long:
        raise InputError(f"{name} writes too much", allowed=f"a score a line, {MOST_BYTES} bytes at most")
    if code == -signal.SIGKILL and late.finished.is_set():
        raise InputError(f"{name} has not ended", allowed=f"{reward.timeout_s:g} s", hint="raise its timeout_s")
    if code:
        raise InputError(f"{name} has failed", got=f"exit code {code}", allowed=0)
    return _read(said, name, num=len(judged))


def _kill(program: subprocess.Popen[bytes]) -> None:
    """End a program and what it has started."""
    if program.poll() is None:
        os.killpg(program.pid, signal.SIGKILL)


def _read(said: bytes, name: str, *, num: int) -> list[float]:
    rows = said.decode(errors="replace").split("\n")
    rows = rows[:-1] if not rows[-1].strip() else rows
    if len(rows) != num:
        raise InputError(f"{name} has written another number of scores", got=len(rows), allowed=num)
    found: list[float] = []
    for row in rows:
        try:
            found.append(float(row))
        except ValueError as error:
            raise InputError(f"{name}: a score is not a number", got=row.strip()[:80]) from error
    if not all(map(math.isfinite, found)):
        raise InputError(f"{name}: a score is not finite", got=next(x for x in found if not math.isfinite(x)))
    return found
