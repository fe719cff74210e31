"""Follows a backward: which buckets of a rank it is done with.

Both bindings to gradients use it: those to Megatron's buffers (`megatron/gradient_buffers.py`) and
to FSDP2's shards (`fsdp2/gradients.py`). Nothing here knows how a gradient is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_recover.core.values import BucketId
from megatron_recover.trainer.regions import Bucket


class Watch:
    """Reports during a backward which buckets it will not touch any more.

    A subclass calls `reached(parameter)` when the gradient of the parameter is complete.
    """

    def __init__(self, buckets: Mapping[int, Mapping[Any, Sequence[Bucket]]]) -> None:
        """Watch nothing yet.

        `buckets`: model chunk -> parameter -> the buckets that have a part of its gradient.
        """
        self._buckets = buckets
        self._awaited: dict[Bucket, int] = {}
        """Number of parameters of each bucket that the backward has yet to reach."""
        self._left: dict[Any, Sequence[Bucket]] | None = None
        """Parameters of the watched chunk without a gradient so far; None while nothing is
        watched."""
        self._passed: Callable[[BucketId], None] = lambda bucket: None

    def begin(self, chunk: int, passed: Callable[[BucketId], None]) -> None:
        """Watch the backward of `chunk` that is about to begin, as `Regions.watch` describes."""
        self._left = dict(self._buckets.get(chunk, {}))
        self._passed = passed
        self._awaited = {}
        for buckets in self._left.values():
            for bucket in buckets:
                self._awaited[bucket] = self._awaited.get(bucket, 0) + 1

    def end(self) -> None:
        """Stop watching, if a backward was watched."""
        self._left = None

    def reached(self, parameter: Any) -> None:
        """Note that the gradient of `parameter` is complete, if a backward is watched.

        Called inside the backward. Raises RuntimeError if it comes twice in one backward.
        """
        if self._left is None:
            return
        if parameter not in self._left:
            raise RuntimeError(
                "a parameter's gradient came twice in one backward, after its bucket may have been reduced: the model cannot "
                "be trained with --overlap-grad-reduce; leave it out"
            )
        for bucket in self._left.pop(parameter):
            self._awaited[bucket] -= 1
            if not self._awaited[bucket]:
                self._passed(bucket.id)
