"""A run with everything that is decided before its first process starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.engines.base import TrainOptions
from meshwright.engines.observer import TrainingObserver
from meshwright.specs.plan import Plan
from meshwright.specs.run import Run
from meshwright.training.gemm_tuning import GemmChoices
from meshwright.training.run_identity import RunIdentity
from meshwright.training.weights import Origin


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """The run that every process receives, pickled."""

    run: Run
    plan: Plan
    options: TrainOptions
    device_name: str  # as its driver has it
    identity: RunIdentity  # of a new run; a resumed one continues that of its checkpoint
    accelerator: str | None = None  # the catalogue's name of the device; None: it has no such device
    notes: tuple[str, ...] = ()
    weights: Origin | None = None  # where training starts; None: random weights
    gemm_choices: GemmChoices | None = None  # threads and kernels of GEMMs; None: PyTorch's own
    observer: TrainingObserver = field(default_factory=TrainingObserver)
    warm_up_steps: int = 0  # on random tokens, before the data is opened; undone afterwards
    is_restart: bool = False  # after a process was lost: continue from the newest checkpoint, if there is one

    @property
    def num_processes(self) -> int:
        """One a device."""
        return self.plan.num_devices
