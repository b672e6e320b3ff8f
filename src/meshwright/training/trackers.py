"""TensorBoard, Weights & Biases and MLflow by the same four methods. Only the main process has any.

    require(trackers)              before anything starts: all named trackers must be installed
    shown = Trackers(names, ...)   opens them; step, text and finish go to each

A tracker never stops a training: one that raises causes one warning and is not called again. Identifiers that
trackers give the run are kept in the run's folder, so that a resumed training continues in the same place.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright.errors import MissingDependencyError
from meshwright.files import write_atomically
from meshwright.json_values import load_json
from meshwright.records.training import Ending, Record
from meshwright.specs.run import Tracker as Name

PROJECT = "meshwright"
IDENTITIES = "trackers.json"
FLUSH_EVERY_S = 5.0
"""MLflow receives values in batches: one request a step would cost more than a small step."""

MAX_PORTION = 900
"""Values of one MLflow request; it accepts 1000."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run that a tracker shows."""

    name: str  # of the run
    folder: Path
    settings: Mapping[str, Any]  # the resolved run
    after_step: int  # steps that were taken before, in a resumed training
    identity: str | None = None  # this tracker's identifier of that run


class TensorBoard:
    """Event files, read with `tensorboard --logdir`.

    As of every tracker: `step` takes the numbers of a step, `text` a text that belongs to one, `finish` the record at
    the end; `identity` is the tracker's identifier of the run, None where its files identify it.
    """

    identity = None

    def __init__(self, opening: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = opening.after_step + 1 if opening.after_step else None
        self.writer = SummaryWriter(opening.folder / "tensorboard", purge_step=purge)
        self.writer.add_text("run", _indented(json.dumps(opening.settings, indent=2, default=str)))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def text(self, name: str, content: str, *, step: int) -> None:
        self.writer.add_text(name, _indented(content), step)

    def finish(self, record: Record) -> None:
        self.writer.close()


class Wandb:
    """Weights & Biases."""

    def __init__(self, opening: TrackedRun) -> None:
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=opening.name,
            dir=opening.folder,
            config=dict(opening.settings),
            id=opening.identity,
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.identity: str | None = self.run.id

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def text(self, name: str, content: str, *, step: int) -> None:
        import wandb

        self.run.log({name: wandb.Html(f"<pre>{escape(content)}</pre>")}, step=step)

    def finish(self, record: Record) -> None:
        self.run.summary.update(_summary(record))
        self.run.finish(exit_code=1 if record.ending is Ending.DIVERGED else 0)


class MLflow:
    """MLflow, through its client: nothing global is set."""

    def __init__(self, opening: TrackedRun) -> None:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]  # optional

        folder = opening.folder.resolve()
        own = os.environ.get("MLFLOW_TRACKING_URI")
        self.client = MlflowClient(tracking_uri=own or f"sqlite:///{folder / 'mlflow.db'}")
        self.identity: str | None = opening.identity or self._begin(opening, None if own else folder)
        self.waiting: list[Any] = []
        self.flushed_s = time.monotonic()

    def _begin(self, opening: TrackedRun, folder: Path | None) -> str:
        """Create a run. `folder`: the folder of its files, unless a server decides that."""
        found = self.client.get_experiment_by_name(PROJECT)
        place = None if folder is None else (folder / "mlflow").as_uri()
        parent = found.experiment_id if found else self.client.create_experiment(PROJECT, place)
        run_id = self.client.create_run(parent, run_name=opening.name).info.run_id
        self.client.log_dict(run_id, json.loads(json.dumps(opening.settings, default=str)), "run.json")
        return run_id

    def step(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]  # optional

        now_ms = int(time.time() * 1000)
        self.waiting += [Metric(name, value, now_ms, step) for name, value in values.items()]
        is_due = time.monotonic() - self.flushed_s > FLUSH_EVERY_S
        if is_due or len(self.waiting) > MAX_PORTION:
            self._flush()

    def _flush(self) -> None:
        for start in range(0, len(self.waiting), MAX_PORTION):
            self.client.log_batch(self.identity, metrics=self.waiting[start : start + MAX_PORTION])
        self.waiting, self.flushed_s = [], time.monotonic()

    def text(self, name: str, content: str, *, step: int) -> None:
        self.client.log_text(self.identity, content, f"{name}-{step}.txt")

    def finish(self, record: Record) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]  # optional

        self._flush()
        now_ms = int(time.time() * 1000)
        last = [Metric(f"summary/{name}", value, now_ms, 0) for name, value in _summary(record).items()]
        self.client.log_batch(self.identity, metrics=last)
        self.client.set_terminated(self.identity, "FINISHED" if record.ending is not Ending.DIVERGED else "FAILED")


Tracker = TensorBoard | Wandb | MLflow
BACKENDS: dict[Name, Callable[[TrackedRun], Tracker]] = {
    Name.TENSORBOARD: TensorBoard,
    Name.WANDB: Wandb,
    Name.MLFLOW: MLflow,
}
PACKAGES = {
    Name.TENSORBOARD: ("tensorboard",),
    Name.WANDB: ("wandb",),
    Name.MLFLOW: ("mlflow", "sqlalchemy"),  # mlflow-skinny has no database of its own
}


def require(names: tuple[Name, ...]) -> None:
    """Raise MissingDependencyError for the first named tracker that is not installed."""
    for name in names:
        missing = [package for package in PACKAGES[name] if find_spec(package) is None]
        if missing:
            raise MissingDependencyError(
                f"train.trackers names {name.value}, which needs {missing[0]}: it is not installed",
                hint=f"pip install {name.value}",
            )


class Trackers:
    """All trackers of a run. The first failure of each calls `warn`."""

    def __init__(self, names: tuple[Name, ...], *, run: TrackedRun, warn: Callable[[str], None]) -> None:
        self.warn = warn
        self.notes: list[str] = []
        self.open: dict[Name, Tracker] = {}
        known = _identities(run.folder) if run.after_step else {}
        for name in names:
            own = replace(run, identity=known.get(name.value))
            self._protected(name, lambda name=name, own=own: self.open.update({name: BACKENDS[name](own)}))
        found = {name.value: t.identity for name, t in self.open.items() if t.identity}
        if found:
            write_atomically(run.folder / IDENTITIES, json.dumps(found) + "\n")

    def step(self, entry: Mapping[str, Any]) -> None:
        """Send the numbers in one line of `steps.jsonl`."""
        values = {name: value for name, value in _numbers(entry) if name != "step"}
        self._each(lambda tracker: tracker.step(entry["step"], values))

    def text(self, name: str, content: str, *, step: int) -> None:
        """Send text, such as a sample of the model's output."""
        self._each(lambda tracker: tracker.text(name, content, step=step))

    def finish(self, record: Record) -> None:
        """Close all of them."""
        self._each(lambda tracker: tracker.finish(record))

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.open.items()):
            self._protected(name, lambda tracker=tracker: act(tracker))

    def _protected(self, name: Name, act: Callable[[], None]) -> None:
        """Call `act`. Trackers are foreign programs with network access: their errors do not end the training."""
        try:
            act()
        except Exception as error:
            self.open.pop(name, None)
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            note = f"{name.value} failed and was not called again: {reason}"
            self.notes.append(note)
            self.warn(f"warning: {note}")


def _identities(folder: Path) -> dict[str, str]:
    try:
        return load_json(folder / IDENTITIES)
    except (OSError, ValueError):
        return {}


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a mapping, and as `NAME/KEY` the numbers of mappings in it."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{key}", number) for key, number in _numbers(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)


def _summary(record: Record) -> dict[str, float]:
    """The scalar numbers of a record's statistics."""
    return {
        name: float(value)
        for name, value in record.statistics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _indented(text: str) -> str:
    """`text` as a preformatted block of Markdown."""
    return "\n".join(f"    {line}" for line in text.splitlines())
