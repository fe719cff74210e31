"""Shares among the ranks of a replica why a save failed, and what rank 0 has found.

When the write of a rank fails, all ranks of its replica have to learn of it. In format `torch_dist`
Megatron informs them (`CheckpointException`), but not where rank 0 fails to make the folder or to
write small metadata files: that ends a replica of several ranks. In format `torch` that rank writes
the failure to the replica's store, which rank 0 reads before it publishes the checkpoint. Such a
rank still takes part in the barriers that are left of Megatron's save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class NoGrant(OSError):
    """A checkpoint must not be named now (`checkpoints.py`, Note [Grants])."""


class SharedFailure:
    """The failure of the current save of a replica, one object per rank."""

    def __init__(self, replica: int, get_args: Callable[[], Any]) -> None:
        self._replica, self._get_args = replica, get_args
        self._num_writes = 0
        self.is_naming = False
        """True if all ranks have written their data: only the name of the checkpoint is left."""
        self.reason = ""
        """Reason why this rank's part of the current save failed; empty if it did not."""
        self._no_grant = ""
        """Reason why rank 0 must not name the checkpoint that it has written; else empty."""

    def begin_write(self) -> None:
        """Forget the previous save: another one begins. All ranks of the replica call this."""
        self._num_writes += 1
        self.begin_attempt("")

    def begin_attempt(self, reason: str) -> None:
        """Begin another attempt to complete or name the same checkpoint.

        `reason` is the one why this rank has failed before, or empty.
        """
        self.reason, self._no_grant = reason, ""

    def attempt(self, write: Callable[[], None]) -> bool:
        """Call `write()` and store the error of a failed write; raise any other error.

        Returns whether this rank failed and the others do not know. A failed write is raised too if
        they cannot learn of it (`_can_be_left`).
        """
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            write()
        except NoGrant as error:
            self._no_grant = str(error)
            return True
        except CheckpointException as error:
            # Every rank raises this exception; only rank 0's has the reasons.
            self.reason = "; ".join(f"{type(each).__name__}: {each}" for each, _ in error.failures.values())
        except (OSError, RuntimeError) as error:
            if not self._can_be_left(error):
                raise
            self.store(error)
            return True
        return False

    def store(self, error: BaseException) -> None:
        """Store `error` as the reason why this rank's part of the save failed."""
        self.reason = f"{type(error).__name__}: {error}"

    def leave(self) -> None:
        """Write the failure to the store and join the barriers that are left of Megatron's save.

        The other ranks wait in a barrier after the data and in a barrier after the tracker. Once
        the checkpoint gets its name only the second barrier is left, and nothing is written.
        """
        if not self.is_naming:
            torch.distributed.distributed_c10d._get_default_store().set(self._key, self.reason)
            torch.distributed.barrier()
        torch.distributed.barrier()

    def raise_of_others(self) -> None:
        """Raise OSError with the failure of another rank that has left Megatron's save, if any."""
        store = torch.distributed.distributed_c10d._get_default_store()
        if store.check([self._key]):
            raise OSError(store.get(self._key).decode())

    def common(self) -> str:
        """Return the reason why a rank of this replica failed, or an empty text. Collective."""
        return next(filter(None, gathered(self.reason)), "")

    def common_no_grant(self) -> str:
        """Return the reason why rank 0 must not name the checkpoint, or "". Collective."""
        return next(filter(None, gathered(self._no_grant)), "")

    @property
    def _key(self) -> str:
        return f"megatron-recover/replica {self._replica}/save {self._num_writes}"

    def _can_be_left(self, error: BaseException) -> bool:
        """Return whether `error` is a failed write about which the other ranks can be informed."""
        # torch's archive writer raises RuntimeError for a failed write.
        of_torch = any(word in str(error) for word in ("PytorchStreamWriter", "inline_container"))
        if not isinstance(error, OSError) and not of_torch:
            return False
        return self.is_naming or self._get_args().ckpt_format == "torch" or torch.distributed.get_world_size() == 1


def gathered[Value](value: Value) -> list[Value]:
    """Return the values of all ranks of this replica, by rank. Collective."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def of_first[Value](value: Value) -> Value:
    """Return on all ranks of the replica the value of rank 0. Collective."""
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def agreed(look: Callable[[], bool]) -> bool:
    """Return on all ranks of the replica the result of `look()` on rank 0.

    A shared file system may show different states to different ranks. `look` must not raise: the
    other ranks wait for the result.
    """
    return of_first(torch.distributed.get_rank() == 0 and look())
