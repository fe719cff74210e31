"""Writes log lines and TensorBoard values of the job in one replica only: the writer.

The writer is the replica with the lowest id in the roster. When the writer dies, the next one takes
over. The text and the values are Megatron's, but for the throughput per GPU, which is divided by
the number of replicas. The line of an iteration gets generation, replicas and quotas in addition.
"""

from __future__ import annotations

import re
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_recover.trainer.driver import Driver

_Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Method, arguments and keywords."""
_PER_DEVICE = re.compile(r"(throughput per GPU \(TFLOP/s/GPU\): )([\d.]+)")


class LogLine:
    """Replaces `print_rank_last` in Megatron's training loop (seam `log_line`)."""

    def __init__(self, driver: Driver, num_replicas: int, original: Callable[[str], None], flush: Callable[[], None]) -> None:
        """Store the collaborators.

        `num_replicas` is the number of replicas at the start of the run. `original` is Megatron's
        function. `flush()` calls `flush` of `TensorBoardFactory` and `WandbFactory`.
        """
        self._driver, self._num_replicas, self._original, self._flush = driver, num_replicas, original, flush

    def print_rank_last(self, message: str) -> None:
        """Print `message` on the last rank of the writer; call `flush()` in every replica.

        In the line of an iteration the throughput per GPU is divided by the live replicas. The line
        gets generation, replicas and quotas in addition.
        """
        driver = self._driver
        if not driver.is_writer():
            self._flush()
            return
        if " iteration " in message and "consumed samples" in message:
            # Megatron divides the throughput of the whole batch by the ranks of one replica.
            num = len(driver.roster)
            message = _PER_DEVICE.sub(lambda found: f"{found[1]}{float(found[2]) / num:.1f}", message)
            quotas = " ".join(map(str, driver.quotas))
            message += f" generation: {driver.generation} | replicas: {num}/{self._num_replicas} | quotas: {quotas} |"
        # Megatron writes the TensorBoard values of an iteration before it logs the line.
        self._flush()
        self._original(message)


class MissedCalls[Call]:
    """Calls that this replica left to the writer, in case the writer dies before they take effect.

    The writer may have died in its last flush. So the calls since the last flush but one are kept.
    """

    def __init__(self, keep_s: float = 0.0) -> None:
        """Keep each call for at least `keep_s` seconds: that of the writer may take that long."""
        self._keep_s = keep_s
        self._before: list[tuple[float, Call]] = []
        self._since: list[tuple[float, Call]] = []

    def add(self, call: Call) -> None:
        """Keep a call."""
        self._since.append((time.monotonic(), call))

    def flush(self) -> None:
        """Drop the calls before the last flush, unless they are younger than `keep_s`."""
        since = time.monotonic() - self._keep_s
        self._before = [each for each in self._before if each[0] > since] + self._since
        self._since = []

    def take(self) -> list[Call]:
        """Return all calls that are kept, in their order, and keep none."""
        taken, self._before, self._since = self._before + self._since, [], []
        return [call for _, call in taken]


class TensorBoard:
    """A `SummaryWriter` that is created when this replica first writes as the writer.

    The writer may die before it has flushed its newest values. So every other replica keeps the
    values since the last log line but one, and a new writer writes these values first. The event
    files may then contain the values twice. Both copies are equal, except for what each replica
    measures itself, such as times.
    """

    def __init__(self, driver: Driver, create: Callable[[], Any]) -> None:
        self._driver, self._create = driver, create
        self._writer: Any = None
        self._missed: MissedCalls[_Call] = MissedCalls()

    @property
    def __class__(self) -> type:
        """Return `SummaryWriter`: upstream's timers look at the class of what they write to."""
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._driver.is_writer():
                if name.startswith("add_"):
                    self._missed.add((name, args, kwargs))
                return None
            if self._writer is None:
                self._writer = self._create()
                for missed, values, others in self._missed.take():
                    getattr(self._writer, missed)(*values, **others)
            return getattr(self._writer, name)(*args, **kwargs)

        return call

    def add_scalar(self, tag: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Call `SummaryWriter.add_scalar`; divide the throughput per GPU by the live replicas."""
        self.__getattr__("add_scalar")(tag, value / len(self._driver.roster) if tag == "throughput" else value, *args, **kwargs)

    def flush(self) -> None:
        """Write all values to disk as the writer; otherwise drop those before the last flush."""
        if self._driver.is_writer():
            self.__getattr__("flush")()
        else:
            self._missed.flush()


class TensorBoardFactory:
    """Replaces `_set_tensorboard_writer` of Megatron's `global_vars` (seam `tensorboard`)."""

    def __init__(self, driver: Callable[[], Driver]) -> None:
        """Store `driver()`, which is called at each use of the writer, and not before.

        Megatron calls `set_writer` while it parses arguments, before there is a driver.
        """
        self._driver = driver
        self._board: TensorBoard | None = None

    def flush(self) -> None:
        """Call `TensorBoard.flush`, if this rank has TensorBoard."""
        if self._board is not None:
            self._board.flush()

    def set_writer(self, args: Namespace) -> None:
        """Set Megatron's TensorBoard writer on the last rank, if `--tensorboard-dir` is given."""
        from megatron.training import global_vars

        if not args.tensorboard_dir or args.rank != args.world_size - 1:
            return

        def create() -> Any:
            from torch.utils.tensorboard import SummaryWriter

            return SummaryWriter(log_dir=args.tensorboard_dir, max_queue=args.tensorboard_queue_size)

        self._board = TensorBoard(Late(self._driver), create)
        global_vars._GLOBAL_TENSORBOARD_WRITER = self._board


class Late:
    """Stands for a driver that does not exist yet; looks it up at each use."""

    def __init__(self, find: Callable[[], Driver]) -> None:
        self._find = find

    def __getattr__(self, name: str) -> Any:
        return getattr(self._find(), name)
