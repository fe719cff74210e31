"""Writes this rank's part of a checkpoint in a thread, while the rank trains (`--async-save`).

Upstream's asynchronous save (`dist_checkpointing/strategies/async_utils.py`) plans a checkpoint and
makes a request of it: tensors to write, a function that writes them, and functions that complete
the checkpoint once all ranks have written. Upstream gives the request to a process that inherits
the tensors. Here a thread of the rank writes copies from the state window. The thread ends with the
rank.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_recover.trainer.state_window import StateCopy, StateWindow

_BUCKETS, _RESULTS = 1, 2
"""Positions among the arguments of a request's function: what to write, and the queue of results.
Each bucket is (path, key, (items with bytes, items with tensors)), each item a pair."""


def write_results(mp_mode: str = "spawn") -> queue.SimpleQueue[Any]:
    """Return a queue for the results of one save, which this process writes and reads.

    Replaces `get_write_results_queue` (seam `write_results`). `mp_mode` does not matter.
    """
    return queue.SimpleQueue()


class Planning:
    """Plans a save in the background by upstream's function, also one of format `torch_dcp`."""

    def __init__(self, original: Callable[..., Any]) -> None:
        """Use upstream's `save_state_dict_async_plan` (seam `async_plan`)."""
        self._original = original

    def plan(self, *args: Any, enable_cache: bool | None = None, **kwargs: Any) -> Any:
        """Return upstream's plan. Collective over the ranks of the replica.

        Only upstream's save of format `torch_dcp` gives `enable_cache`, whether a plan is to be
        used again. It expects what completes the save, which is the first part of what the original
        returns. Such a save is planned anew each time.
        """
        found = self._original(*args, **kwargs)
        return found if enable_cache is None else found[0]


class BackgroundSave:
    """One checkpoint that is being written."""

    def __init__(self, request: Any, window: StateWindow) -> None:
        """Begin to copy what upstream's `request` (`AsyncRequest`) is to write; start the thread.

        Upstream's own references to the tensors are dropped. If no copy can be made, such as for
        want of host memory, nothing is raised or written: `failure` has the reason.
        """
        self.failure = ""
        """Reason why this rank could not write its part, once `is_written`; empty if it could."""
        self._request = request
        self._thread: threading.Thread | None = None
        if request.async_fn is None:  # other ranks write all that this one has
            return
        parts = []
        try:
            for path, key, (others, tensors) in request.async_fn_args[_BUCKETS]:
                copy = window.copy([tensor for _, tensor in tensors])
                parts.append((path, key, others, [item for item, _ in tensors], copy))
                tensors.clear()  # some exist for the checkpoint alone
        except (RuntimeError, MemoryError) as error:  # any other writer would fail alike, one after another
            self.failure = f"no copy of the state: {type(error).__name__}: {error}"
            return
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = threading.Thread(target=self._write, args=(parts, device), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """Return whether this rank's part is written, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when this rank's part is written, or has failed."""
        if self._thread is not None:
            self._thread.join()

    def complete(self) -> None:
        """Call what completes the checkpoint, once all ranks have written their part. Collective.

        Raises what these functions raise, such as CheckpointException on all ranks, or OSError on
        one.
        """
        for complete in self._request.finalize_fns:
            complete()

    def _write(self, parts: Sequence[tuple[str, str, Any, Sequence[Any], StateCopy]], device: int | None) -> None:
        """Write the copies by upstream's function; store the reason in `failure` if that fails."""
        request = self._request
        arguments = list(request.async_fn_args)
        results, arguments[_RESULTS] = arguments[_RESULTS], queue.SimpleQueue()
        try:
            if device is not None:  # a thread begins on device 0, and would get a context there
                torch.cuda.set_device(device)
            arguments[_BUCKETS] = [
                (path, key, (others, list(zip(items, copy.tensors(), strict=True)))) for path, key, others, items, copy in parts
            ]
            request.async_fn(*arguments, **request.async_fn_kwargs)
            if isinstance(found := arguments[_RESULTS].get_nowait(), Exception):
                raise found
            results.put(found)
        except BaseException as error:  # nobody sees the exception of a thread
            self.failure = f"{type(error).__name__}: {error}"
