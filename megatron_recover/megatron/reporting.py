"""Who speaks for the job: log lines and TensorBoard come from one replica, and from the lowest live one when it dies.

Decides only whether this replica speaks, step by step; what is said is Megatron's, plus generation, replicas and quotas.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_recover.trainer.driver import Driver

_PER_DEVICE = re.compile(r"(throughput per GPU \(TFLOP/s/GPU\): )([\d.]+)")


class LogLine:
    """Stands in for `print_rank_last` in Megatron's training loop (seam `log_line`)."""

    def __init__(self, driver: Driver, num_replicas: int, original: Callable[[str], None], flush: Callable[[], None]) -> None:
        """`num_replicas` at the start of the run; `flush()` brings TensorBoard's values to the disk."""
        self._driver, self._num_replicas, self._original, self._flush = driver, num_replicas, original, flush

    def print_rank_last(self, message: str) -> None:
        """Print on the last rank of the writer; an iteration's line ends with generation, replicas and quotas."""
        driver = self._driver
        if not driver.is_writer():
            return
        if " iteration " in message and "consumed samples" in message:
            # Megatron divides the job's throughput by the ranks that it knows: those of one replica.
            num = len(driver.roster)
            message = _PER_DEVICE.sub(lambda found: f"{found[1]}{float(found[2]) / num:.1f}", message)
            quotas = " ".join(map(str, driver.quotas))
            message += f" generation: {driver.generation} | replicas: {num}/{self._num_replicas} | quotas: {quotas} |"
        # Megatron has written an iteration's values before its line.
        self._flush()
        self._original(message)


class TensorBoard:
    """A `SummaryWriter` that writes while this replica is the writer, and does not exist before.

    The writer may die between the commit of an iteration and the flush of its values. So the others keep the values of the
    newest iteration that they would have written; who takes over begins with them. They may be there twice then, and are equal.
    """

    def __init__(self, driver: Driver, create: Callable[[], Any]) -> None:
        self._driver, self._create = driver, create
        self._writer: Any = None
        self._newest: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        """What was to be written since `_of_step` began, while another replica was the writer."""
        self._of_step: int | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._driver.is_writer():
                if name.startswith("add_"):
                    self._remember(name, args, kwargs)
                return None
            if self._writer is None:
                self._writer = self._create()
                for missed, values, others in self._newest:
                    getattr(self._writer, missed)(*values, **others)
                self._newest.clear()
            return getattr(self._writer, name)(*args, **kwargs)

        return call

    def add_scalar(self, tag: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """`SummaryWriter.add_scalar`, with Megatron's throughput per device made one of all replicas."""
        self.__getattr__("add_scalar")(tag, value / len(self._driver.roster) if tag == "throughput" else value, *args, **kwargs)

    def _remember(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # By the driver's step: the writer began it after it had flushed what came before. (Megatron's own numbers will not do:
        # of one iteration some values are written by iteration and some by samples.)
        if self._of_step != self._driver.step:
            self._of_step = self._driver.step
            self._newest.clear()
        self._newest.append((name, args, kwargs))


class TensorBoardFactory:
    """Stands in for `_set_tensorboard_writer` (seam `tensorboard`)."""

    def __init__(self, driver: Callable[[], Driver]) -> None:
        """`driver()` is asked at the first value that is written: arguments are parsed before there is a driver."""
        self._driver = driver
        self._board: TensorBoard | None = None

    def flush(self) -> None:
        """Bring the values that were written to the disk."""
        if self._board is not None:
            self._board.flush()

    def set_writer(self, args: Namespace) -> None:
        """Give Megatron a writer on the last rank of every replica."""
        from megatron.training import global_vars

        if not args.tensorboard_dir or args.rank != args.world_size - 1:
            return

        def create() -> Any:
            from torch.utils.tensorboard import SummaryWriter

            return SummaryWriter(log_dir=args.tensorboard_dir, max_queue=args.tensorboard_queue_size)

        self._board = TensorBoard(_Late(self._driver), create)
        global_vars._GLOBAL_TENSORBOARD_WRITER = self._board


class _Late:
    """The driver that there will be."""

    def __init__(self, find: Callable[[], Driver]) -> None:
        self._find = find

    def __getattr__(self, name: str) -> Any:
        return getattr(self._find(), name)
