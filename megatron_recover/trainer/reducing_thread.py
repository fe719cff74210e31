"""The thread `recover-reduce`, which carries out a rank's plans with `--overlap-grad-reduce`.

Note [One thread]
    Beside a backward the reduction must not make the device allocate (`data_plane/nccl.py`,
    Note [Overlap]). The first matrix product of a thread makes it allocate: torch gives the thread
    a cuBLAS handle, and the handle a workspace on the stream. The thread keeps both until it ends.
    So one thread carries out all plans for the life of a rank, also those that overlap with
    nothing. No plan of a generation overlaps before all buckets were summed in that generation, and
    their checksums computed, in this thread and on the same stream.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import torch

_Calls = queue.SimpleQueue["tuple[Future[None], Callable[[], None]] | None"]


class ReducingThread:
    """Runs calls one after the other in one thread, which ends with this object.

    The thread starts with the first call. No exit of the process waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        """Start nothing yet. `device` is that of the calls."""
        self._device = device
        self._calls = _Calls()
        self._has_started = False

    def begin(self, call: Callable[[], None]) -> Future[None]:
        """Run `call()` after all earlier calls.

        The future is done when `call()` has returned, or has what it raised.
        """
        if not self._has_started:
            threading.Thread(target=_run, args=(self._calls, self._device), name="recover-reduce", daemon=True).start()
            self._has_started = True
            weakref.finalize(self, self._calls.put, None)
        future = Future[None]()
        self._calls.put((future, call))
        return future


def _run(calls: _Calls, device: torch.device) -> None:
    is_placed = device.type != "cuda"
    while (due := calls.get()) is not None:
        future, call = due
        try:
            if not is_placed:  # a thread begins on device 0, and would get a context there
                torch.cuda.set_device(device)
                is_placed = True
            call()
        except BaseException as error:  # the training thread raises it
            future.set_exception(error)
        else:
            future.set_result(None)
        del due, future, call  # or this thread would keep the owner of the `ReducingThread`
