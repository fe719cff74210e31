"""Reads the samples of microbatches before they are due, in a thread of the rank.

Decides when samples are read and how many batches wait. Which samples belong to a microbatch is
decided elsewhere: a batch is identified by its source and its samples. So a batch can never be
taken for that of another step, lane or microbatch.

Note [One reading at a time]
    Datasets are not made for two threads. Upstream's load their indices and cache masks on first
    use (`core/datasets/gpt_dataset.py`), and its reader for object storage replaces its chunk in
    three assignments (`core/datasets/indexed_dataset.py`). So either the reading thread or the
    training thread reads, never both. A batch that is due and not read ahead goes first.

Note [Failures while reading ahead]
    A failed read is forgotten. The training thread reads the batch again when it is due, and raises
    there what reading raises. So the failure is charged to its own microbatch (INV-9), and a
    microbatch that is never due raises nothing. Each failure is logged. After `_FAILURES` failures
    in a row nothing more of the source is read ahead: perhaps only the training thread can read it.

Note [What is not read ahead]
    - The first pass of a source. Reading may change the state of a random generator, which all
      threads of a process share. The training thread finds that out (`Source.may_read_ahead`).
    - A pass in a generation that is newer than the last commit (`commit.CommitLoop`): the first of
      a run, and what is dealt after a loss or a failed sum. If a process dies by a signal while it
      computes one microbatch and reads another, both are charged. The next replica that gets the
      guilty one reads it alone, so the two deaths have one microbatch in common.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch

from megatron_recover.core.values import MicrobatchId
from megatron_recover.progress_page import ProgressPage

logger = logging.getLogger(__name__)
_FAILURES = 3


class Source(Protocol):
    """The batches of one data iterator."""

    may_read_ahead: bool | None
    """False: only the training thread may read. None: not known yet."""

    def read(self, indices: range) -> Any:
        """Return the batch of these samples. Any thread may call this, one at a time."""

    def prepared(self, batch: Any) -> Any:
        """Return a batch that was read, in the form that is copied best to the device.

        Any thread may call this.
        """

    def read_when_due(self, indices: range) -> Any:
        """Return the batch of these samples to the training thread; update `may_read_ahead`."""


class Batch(NamedTuple):
    """A batch that is due or will be."""

    source: Source
    microbatch: MicrobatchId
    indices: range


class ReadAhead:
    """The batches that a rank reads ahead, and the thread `recover-read` that reads them.

    The training thread calls every public method.
    """

    def __init__(self, page: ProgressPage, num_ahead: int) -> None:
        """Read at most `num_ahead` batches of each source ahead; 0: the training thread reads.

        `page` shows what the thread reads.
        """
        self._page, self._num_ahead = page, num_ahead
        self._changed = threading.Condition()
        self._expected: dict[Source, deque[Batch]] = {}
        """The batches to read, by source, in the order in which they will be due."""
        self._ready: dict[Batch, Any] = {}
        self._reading: Batch | None = None
        """The batch that either thread reads now."""
        self._is_due = self._is_closed = False
        """Due: the training thread waits for a batch, so the reading thread begins no other."""
        self._num_failed: dict[Source, int] = {}
        """Readings ahead that failed since one succeeded, by source."""
        self._thread: threading.Thread | None = None

    def expect(self, batches: Iterable[Batch]) -> None:
        """Read these batches ahead, in this order; drop all batches of earlier calls.

        Batches of a source that may not be read ahead, or not yet, are left out.
        """
        expected: dict[Source, deque[Batch]] = {}
        for batch in batches if self._num_ahead else ():
            if batch.source.may_read_ahead:
                expected.setdefault(batch.source, deque()).append(batch)
        with self._changed:
            self._expected, self._ready = expected, {}
            self._changed.notify_all()
        if expected and self._thread is None:
            device = torch.cuda.current_device() if torch.cuda.is_available() else None
            self._thread = threading.Thread(target=self._run, args=(device,), name="recover-read", daemon=True)
            self._thread.start()

    def take(self, batch: Batch) -> Any:
        """Return a batch that is due: one that was read ahead, or else read it now.

        Raises what reading raises. A batch that is read now can also show that its source must not
        be read ahead (`Source.read_when_due`), unless nothing is read ahead at all.
        """
        if not self._num_ahead:
            return batch.source.prepared(batch.source.read(batch.indices))
        with self._changed:
            self._is_due = True
            # `_run` ends every reading, whatever becomes of it, and wakes this thread (INV-8).
            self._changed.wait_for(lambda: batch in self._ready or self._reading is None)
            self._is_due = False
            if batch in self._expected.get(batch.source, ()):
                self._expected[batch.source].remove(batch)
            self._changed.notify_all()
            if batch in self._ready:
                return self._ready.pop(batch)
            self._reading = batch
        try:
            return batch.source.prepared(batch.source.read_when_due(batch.indices))
        finally:
            self._end(batch)

    def close(self, patience_s: float) -> None:
        """Drop all batches and end the thread.

        Wait at most `patience_s` seconds for a reading to end.
        """
        with self._changed:
            self._is_closed = True
            self._expected, self._ready = {}, {}
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(patience_s)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self, device: int | None) -> None:
        if device is not None:  # for the memory that batches are pinned in
            torch.cuda.set_device(device)
        while (batch := self._begin()) is not None:
            self._read(batch)

    def _begin(self) -> Batch | None:
        """Wait for a batch to read and return it; None: the thread ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._next() is not None)
            if self._is_closed:
                return None
            self._reading = self._next()
            return self._reading

    def _next(self) -> Batch | None:
        """Return the batch to read next: of all sources the one that is due first.

        None: a batch is being read or is due, or enough of each source are ready.
        """
        if self._reading is not None or self._is_due:
            return None
        for place in range(self._num_ahead):
            for expected in self._expected.values():
                if place < len(expected) and expected[place] not in self._ready:
                    return expected[place]
        return None

    def _read(self, batch: Batch) -> None:
        """Read a batch and keep it if it is still expected.

        See Note [Failures while reading ahead].
        """
        source, found = batch.source, list[Any]()
        self._page.show_reading(batch.microbatch)
        try:
            try:
                read = source.read(batch.indices)
            finally:
                self._page.show_reading(None)
            found.append(source.prepared(read))  # which may wait for the device, and is no reading
            self._num_failed.pop(source, None)
        except BaseException as error:
            self._num_failed[source] = num_failed = self._num_failed.get(source, 0) + 1
            source.may_read_ahead = num_failed < _FAILURES
            until = "it is read when it is due" if source.may_read_ahead else "no sample is read before it is due from now on"
            logger.warning("reading microbatch %d ahead failed (%r): %s", batch.microbatch, error, until)
        with self._changed:
            if found and batch in self._expected.get(source, ()):
                [self._ready[batch]] = found
            elif batch in self._expected.get(source, ()):
                self._expected[source].remove(batch)
        self._end(batch)

    def _end(self, batch: Batch) -> None:
        """End a reading of either thread.

        If the source may not be read ahead any more, also drop its batches.
        """
        with self._changed:
            self._reading = None
            if batch.source.may_read_ahead is False:
                self._expected.pop(batch.source, None)
                self._ready = {each: ready for each, ready in self._ready.items() if each.source is not batch.source}
            self._changed.notify_all()
