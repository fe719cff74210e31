"""Acts between two iterations: requests the end of the job, ends it, and repeats a lost save.

A signal or a time limit makes this rank request the end. No replica ends by itself: the request
travels in a vote. Every replica ends when Megatron next decides if it exits, after the step whose
record carries the request. With `--save` Megatron then saves a checkpoint.

Without a coordinator nobody can leave a broken replica out. So once a record says that no member
has one (`core/grants.py`, Note [Last generation]), the job ends at its next save point, and without
`--save` after the next step.
"""

from __future__ import annotations

import signal
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_recover.core.request import NO_COORDINATOR, RequestKind, details, exit_for
from megatron_recover.megatron.checkpoint.checkpoints import Checkpoints
from megatron_recover.trainer.driver import Driver


class Boundary:
    """Replaces `checkpoint_and_decide_exit` (seam `exit`)."""

    def __init__(
        self,
        driver: Driver,
        checkpoints: Checkpoints,
        original: Callable[..., bool],
        get_args: Callable[[], Namespace],
        passed: Callable[[Any], None] = lambda operations: None,
        began: float | None = None,
    ) -> None:
        """Store the collaborators. `passed(operations)` gets Megatron's count of them.

        `began`: the `time.monotonic()` from which `--exit-duration-in-mins` counts; None: now.
        """
        self._passed = passed
        self._driver, self._checkpoints, self._original, self._get_args = driver, checkpoints, original, get_args
        self._received: list[str] = []
        self._minutes: float | None = None
        self._began = time.monotonic() if began is None else began

    def take_over(self, args: Namespace) -> None:
        """Handle SIGTERM, `--exit-signal` and `--exit-duration-in-mins` here, in place of Megatron.

        `--exit-signal` counts only with `--exit-signal-handler`, as in Megatron. Megatron would act
        on each of them in one replica alone.
        """
        self._minutes, args.exit_duration_in_mins = args.exit_duration_in_mins or None, None  # 0: no limit, as in Megatron
        wanted = {signal.SIGTERM, *([signal.Signals(args.exit_signal)] if args.exit_signal_handler else [])}
        args.exit_signal_handler = False
        for number in wanted:
            signal.signal(number, lambda received, _: self._received.append(signal.Signals(received).name))

    def decide(
        self,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        iteration: int,
        num_floating_point_operations_so_far: Any,
        checkpointing_context: Any,
        train_data_iterator: Any,
    ) -> bool:
        """Return whether Megatron leaves its training loop after `iteration`.

        First requests the end of the job for each signal that came and for a time limit that has
        passed, and before the next save point if there is no coordinator. The vote of the next step
        carries the request. Returns True once a committed record carries a request to exit, or
        where Megatron's own rules end training. Takes part in the save that is due by Megatron's
        rules, and in saves in place of a dead writer (`Checkpoints.make_up`).
        """
        self._passed(num_floating_point_operations_so_far)
        if self._minutes is not None and time.monotonic() - self._began > self._minutes * 60:
            self._received.append(f"ran for {self._minutes} minutes")
            self._minutes = None
        while self._received:
            self._driver.request(exit_for(self._received.pop()))
        if self._driver.is_last_generation() and self._is_save_point(iteration + 1):
            self._driver.request(NO_COORDINATOR)
        if details(self._driver.requests, RequestKind.EXIT):
            self._get_args().exit_interval = iteration
        self._checkpoints.make_up(
            iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far, checkpointing_context,
            train_data_iterator=train_data_iterator,
        )  # fmt: skip
        return self._original(
            model, optimizer, opt_param_scheduler, iteration, num_floating_point_operations_so_far, checkpointing_context,
            train_data_iterator,
        )  # fmt: skip

    def _is_save_point(self, iteration: int) -> bool:
        """Return whether Megatron saves after `iteration`; True without `--save`."""
        args = self._get_args()
        return not args.save or not args.save_interval or iteration % args.save_interval == 0
