"""Asynchronous checkpoints of a training.

The loop copies the states to host memory and continues; a thread writes the copy. So a save costs the loop the time
of the copy, and the memory of one more set of states on the host. At most one save is under way: the next save waits
for it, and so does the end of the run.

The threads of all processes have their own process group, so their collectives never mix with the steps'
collectives. Source: CheckFreq (Mohan et al. 2021), section 4, which calls the two phases snapshot and
persist.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.specs.run import Checkpoint
from meshwright.training.checkpoints.peers import Peers
from meshwright.training.checkpoints.stalls import Stalls
from meshwright.training.distributed_tensors import own_part
from meshwright.training.masters import distributed

TIMEOUT = timedelta(hours=1)  # of collectives that wait for the slowest disk


class CheckpointSaver:
    """The checkpoints of one training. Every process makes one and calls the same methods in the same order."""

    def __init__(self, settings: Checkpoint, *, num_ranks: int) -> None:
        self.settings = settings
        group = dist.new_group(backend="gloo", timeout=TIMEOUT) if num_ranks > 1 else None
        assert group is None or isinstance(group, dist.ProcessGroup)  # every process is a member
        self.peers = Peers(group=group)
        self.newest: Path | None = None  # the last complete one
        self.num_saved = 0
        self.stalls = Stalls()
        self._copies: dict[str, Tensor] = {}
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def save(self, state: dict[str, Tensor], *, step: int, about: Mapping[str, Any]) -> None:
        """Save `state`, in the background if the settings say so. Raises as `wait` and `writing.save` do."""
        with self.stalls.during():
            self._join()
            if self.settings.asynchronous:
                copied = staged(state, copies=self._copies)
                self._thread = Thread(target=self._write, args=(copied, step, dict(about)), daemon=True)
                self._thread.start()
            else:
                self._write(state, step, about)
                self._raise()

    def wait(self) -> None:
        """Return when no save is under way. Raises the InputError of a failed save."""
        with self.stalls.during():
            self._join()

    @property
    def has_failed(self) -> bool:
        """True if the last checkpoint could not be written; `wait` raises the reason."""
        return self._error is not None

    def _write(self, state: dict[str, Tensor], step: int, about: Mapping[str, Any]) -> None:
        from meshwright.training.checkpoints.writing import save

        folder, keep = Path(self.settings.folder), self.settings.keep
        try:
            self.newest = save(state, folder=folder, step=step, about=about, keep=keep, peers=self.peers)
            self.num_saved += 1
        except BaseException as error:  # raised where the loop waits for this thread
            self._error = error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def staged(state: Mapping[str, Tensor], *, copies: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy `state` to host memory. `copies` keeps the memory from one save to the next, pinned where there is a GPU."""
    on_host, is_gpu = {}, False
    for name, tensor in state.items():
        local = own_part(tensor)
        if name not in copies:
            copies[name] = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
        copies[name].copy_(local.detach(), non_blocking=True)
        is_gpu = is_gpu or local.is_cuda
        on_host[name] = distributed(copies[name], like=tensor)
    if is_gpu:
        torch.cuda.current_stream().synchronize()
    return on_host
