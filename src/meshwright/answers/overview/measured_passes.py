"""The passes of a pipeline as a profiled training measured them.

The files are `profile/passes-N.json` of the native engine, one for each pipeline rank. A pass begins with its wait for
the activations or gradients of another rank, `wait_s`, and then computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.json_values import load_json

KINDS = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
MOST_PASSES = 100_000


@dataclass(frozen=True, kw_only=True)
class MeasuredPass:
    """One pass of one micro-batch on one stage; seconds from the begin of the step on its rank."""

    pipeline_rank: int
    stage: int
    kind: str
    micro_batch: int
    start_s: float
    end_s: float
    wait_s: float | None  # None: the file does not tell it from computing

    @property
    def computing_from_s(self) -> float:
        """End of the wait."""
        return self.start_s + (self.wait_s or 0.0)

    @property
    def computing_s(self) -> float:
        """Time without the wait."""
        return self.end_s - self.computing_from_s


def measured_passes(folder: Path) -> tuple[MeasuredPass, ...]:
    """Passes of all ranks of a training; none where it was not profiled or has no pipeline.

    Raises InputError with file and field for a damaged file.
    """
    found: list[MeasuredPass] = []
    for path in _files(folder / "profile"):
        try:
            document = load_json(path)
            rank, passes = document["pipeline_rank"], document["passes"]
            found += [_pass(rank, p) for p in passes[:MOST_PASSES]]
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: holds no passes ({type(error).__name__}: {error})") from None
    return tuple(found)


def _files(profile: Path) -> list[Path]:
    try:
        return sorted(path for path in profile.iterdir() if path.match("passes-*.json"))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _pass(rank: Any, given: dict[str, Any]) -> MeasuredPass:
    numbers = [given["stage"], given["micro_batch"], rank]
    if any(isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < 10**6 for n in numbers):
        raise ValueError(f"stage, micro_batch and pipeline_rank are {numbers}")
    start, end = float(given["start_s"]), float(given["end_s"])
    if given["kind"] not in KINDS or not 0 <= start <= end < math.inf:
        raise ValueError(f"a pass of kind {given['kind']!r} from {start} to {end} s")
    wait = None if given.get("wait_s") is None else float(given["wait_s"])
    if not 0 <= (wait or 0.0) <= (end - start) * (1 + 1e-9) + 1e-9:
        raise ValueError(f"wait_s is {wait} in a pass of {end - start} s")
    return MeasuredPass(
        pipeline_rank=rank, stage=given["stage"], kind=given["kind"], micro_batch=given["micro_batch"],
        start_s=start, end_s=end, wait_s=wait,
    )  # fmt: skip
