"""Values as JSON can hold them, and JSON, YAML and files of other programs, servers and people within limits."""

from __future__ import annotations

import io
import json
import math
import os
import select
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import accumulate
from pathlib import Path, PurePath
from typing import Any

from meshwright.errors import InputError

NUM_DIGITS = 12
"""Significant digits of a JSON number. Fewer than a double has, so that the order in which a sum was taken
(BLAS, number of cores) does not change the document."""


def picked(value: Any, *names: str) -> dict[str, Any]:
    """Attributes of a value that its document has by their own names."""
    return {name: getattr(value, name) for name in names}


MOST_BYTES, MOST_DIGITS = 2**30, 300
"""Of a file that others wrote, and of an integer in it: a double has a value for it."""


PIPE_WAIT_S = 10.0
"""Longest wait for the next bytes of a pipe."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON document that others wrote.

    Raises ValueError for text that is no JSON, nested too deeply, or has an integer of more than `MOST_DIGITS` digits.

    >>> parse_json(b'{"a": [1, null]}')
    {'a': [1, None]}
    """
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


MOST_DEPTH, MOST_VALUES = 100, 1_000_000
"""Of YAML that others wrote: brackets in each other, and values with each alias as often as it stands."""


def parse_yaml(text: str, *, load: Callable[[str], Any] | None = None) -> Any:
    """Return the value of YAML that others wrote, or what `load` makes of it.

    Raises ValueError for text that is nested too deeply or that aliases make too large; `YAMLError` for no YAML.

    >>> parse_yaml("a: [1, null]")
    {'a': [1, None]}
    """
    from ruamel.yaml import YAML  # only the commands that read YAML pay for it

    depths = accumulate((char in "[{") - (char in "]}") for char in text if char in "[]{}")
    if max(depths, default=0) > MOST_DEPTH:
        raise ValueError("it is nested too deeply")
    try:
        value = (load or YAML(typ="safe").load)(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    waiting, count = [value], 0
    while waiting:
        one = waiting.pop()
        count += 1
        if count > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES:,} values")
        one = getattr(one, "value", one)  # of a node
        if isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            waiting += one
    return value


def parse_word(text: str) -> Any:
    """Return the value of a word of a command line, as YAML has it, or the text where it is no YAML.

    >>> parse_word("1e-5"), parse_word("True"), parse_word("@x")
    (1e-05, True, '@x')
    """
    from ruamel.yaml import YAMLError

    try:
        return parse_yaml(text)
    except (YAMLError, ValueError):
        return text


def dump_yaml(value: Any, *, yaml: Any = None) -> str:
    """Return a value as YAML, as `yaml` of ruamel.yaml writes it; None: as it does by default."""
    from ruamel.yaml import YAML

    stream = io.StringIO()
    (yaml or YAML()).dump(value, stream)
    return stream.getvalue()


def load_json(path: Path) -> Any:
    """Return the value of the JSON document in a file. Raises OSError; ValueError as `parse_json`, and for its size."""
    return parse_json(load_bytes(path))


def load_text(path: Path) -> str:
    """Return the UTF-8 text of a file that others wrote. Raises OSError; ValueError for its encoding or size."""
    return io.TextIOWrapper(io.BytesIO(load_bytes(path)), encoding="utf-8").read()


def read_text(path: Path) -> str:
    """Return the text of a configuration that others wrote. Raises InputError if it cannot be read."""
    try:
        return load_text(path)
    except OSError as error:
        raise InputError(f"cannot read the configuration: {error.strerror or error}", got=str(path)) from None
    except ValueError as error:
        raise InputError(f"{path} is not text: {error}") from None


def read_yaml(path: Path, *, text: str | None = None, load: Callable[[str], Any] | None = None) -> Any:
    """Return the YAML of a configuration, or of its `text`, as `parse_yaml`. Raises InputError for other files."""
    from ruamel.yaml import YAMLError

    text = read_text(path) if text is None else text
    try:
        return parse_yaml(text, load=load)
    except (YAMLError, ValueError) as error:
        raise InputError(f"{path} is not YAML: {error}") from None


def load_bytes(path: Path) -> bytes:
    """Return the content of a file that others wrote. Raises OSError; ValueError as `first_bytes`, and for its size."""
    data = first_bytes(path, MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES // 2**20} MiB")
    return data


def first_bytes(path: Path, most: int) -> bytes:
    """Return at most `most` bytes of a file or pipe.

    Raises OSError; ValueError for a device, and for a pipe to which nothing is written for `PIPE_WAIT_S`.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
        mode = os.fstat(stream.fileno()).st_mode
        if stat.S_ISFIFO(mode):
            return _from_pipe(stream.fileno(), most)
        if not stat.S_ISREG(mode):
            raise ValueError("it is a device, and no file")
        return stream.read(most) or b""  # None: of a file of the kernel that has nothing to say yet


def _from_pipe(pipe: int, most: int) -> bytes:
    data = b""
    while len(data) < most:
        if not select.select([pipe], [], [], PIPE_WAIT_S)[0]:
            raise ValueError(f"it is a pipe to which nothing was written for {PIPE_WAIT_S:g} s")
        if not (part := os.read(pipe, min(1 << 20, most - len(data)))):
            break
        data += part
    return data


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"an integer has {len(digits):,} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_integer)


def jsonable(value: Any) -> Any:
    """`value` as dicts, lists and scalars that JSON can hold.

    Dataclasses become objects of their fields, or what their `as_json()` returns; NumPy arrays and scalars
    become lists and numbers; NaN and infinities, which JSON lacks, become null; integer enums become their
    lower-case names; sets are sorted.

    >>> jsonable({"step_s": float("nan"), "degrees": (1, 2), "share": 1 / 3})
    {'step_s': None, 'degrees': [1, 2], 'share': 0.333333333333}
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return value.value if isinstance(value.value, str) else value.name.lower()
    if isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return float(f"{value:.{NUM_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, PurePath):
        return str(value)
    return _jsonable_container(value)


def _jsonable_container(value: Any) -> Any:
    if hasattr(value, "as_json"):
        return jsonable(value.as_json())
    if hasattr(value, "tolist"):  # NumPy array or scalar, told by its method: no import of NumPy here
        return jsonable(value.tolist())
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: jsonable(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {_key(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((jsonable(v) for v in value), key=str)
    if isinstance(value, Iterable):
        return [jsonable(v) for v in value]
    raise TypeError(f"no JSON form for {type(value).__name__}")


def _key(key: Any) -> str:
    key = jsonable(key)
    return key if isinstance(key, str) else json.dumps(key)
