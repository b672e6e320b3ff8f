"""Nodes made of files: a fake root folder and recorded command outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from meshwright.doctor.host import Host, Output, Unseen


class Commands:
    """Recorded outputs by the beginning of the command line; a command that is not there is not installed."""

    def __init__(self, outputs: Mapping[str, str | Output | Unseen]) -> None:
        self.outputs = dict(outputs)
        self.asked: list[str] = []

    def __call__(self, arguments: Sequence[str], timeout_s: float) -> Output:
        line = " ".join(arguments)
        self.asked.append(line)
        for beginning, output in sorted(self.outputs.items(), key=lambda item: -len(item[0])):
            if line.startswith(beginning):
                if isinstance(output, Unseen):
                    raise output
                return output if isinstance(output, Output) else Output(code=0, stdout=output)
        raise Unseen(f"{arguments[0]} is not installed")


@pytest.fixture
def make_host(tmp_path: Path) -> Callable[..., Host]:
    """`make_host({"/proc/x": "1\\n"}, {"dmesg": "..."})`."""

    def make(
        files: Mapping[str, str], commands: Mapping[str, Any] | None = None, environment: Any = None
    ) -> Host:
        root = tmp_path / "node"
        for name, text in files.items():
            path = root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        root.mkdir(exist_ok=True)
        return Host(root=root, runner=Commands(commands or {}), environment=environment or {})

    return make
