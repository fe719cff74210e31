"""Runs `pretrain_gpt.py` with every forward stretched to a fixed wall time.

Then the number of cores does not affect the measured times, unless a forward takes longer than that
by itself. `--paced-forward-s SECONDS` gives the time of a forward. `--paced-backward-s` stretches
backwards too, for jobs with many more replicas than cores. With `--second-pass-only` every pass is
closed when it begins, so work that is dealt during a pass gets a pass of its own. Megatron does not
see these flags.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

from megatron_recover import megatron as recover
from megatron_recover.trainer.microbatches import Microbatches
from megatron_recover.trainer.work_queue import WorkQueue

SCRIPT = pathlib.Path(__file__).resolve().with_name("pretrain_gpt.py")


def main() -> None:
    """Train with stretched forwards; with flags also stretch backwards, close passes at once."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage="%(prog)s --paced-forward-s SECONDS ...")
    parser.add_argument("--paced-forward-s", type=float, required=True)
    parser.add_argument("--paced-backward-s", type=float, default=0.0)
    parser.add_argument("--second-pass-only", action="store_true")
    paced, sys.argv[1:] = parser.parse_known_args()
    pretrain = recover.pretrain

    def pretrain_paced(configure: Any, datasets: Any, model_type: Any, forward_step: Callable[..., Any], **others: Any) -> None:
        @functools.wraps(forward_step)
        def forward_paced(*args: Any, **kwargs: Any) -> Any:
            until = time.monotonic() + paced.paced_forward_s
            result = forward_step(*args, **kwargs)
            time.sleep(max(0.0, until - time.monotonic()))
            return result

        pretrain(configure, datasets, model_type, forward_paced, **others)

    if paced.paced_backward_s:
        _pace_backwards(paced.paced_backward_s)
    if paced.second_pass_only:
        _close_passes_at_once()
    recover.pretrain = pretrain_paced
    runpy.run_path(str(SCRIPT), run_name="__main__")


def _pace_backwards(seconds: float) -> None:
    ended = Microbatches.backward_ended

    def ended_paced(microbatches: Microbatches, *args: Any) -> None:
        time.sleep(max(0.0, microbatches._since + seconds - time.perf_counter()))
        ended(microbatches, *args)

    Microbatches.backward_ended = ended_paced  # type: ignore[method-assign]


def _close_passes_at_once() -> None:
    begin = WorkQueue.__init__

    def begin_closed(queue: WorkQueue, *args: Any, **kwargs: Any) -> None:
        begin(queue, *args, **kwargs)
        queue._driver.ask_close()

    WorkQueue.__init__ = begin_closed  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
