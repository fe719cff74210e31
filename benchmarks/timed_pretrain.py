"""`scripts/pretrain_gpt.py` with a clock around each part that we add.

It prints the times of a step after `STEPS` steps.
"""

from __future__ import annotations

import collections
import functools
import json
import pathlib
import runpy
import time
from collections.abc import Callable
from typing import Any

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "scripts" / "pretrain_gpt.py"
STEPS, WARM_UP = 40, 5
MARK = "parts of a step: "
"""Beginning of the line in which a rank prints its times in milliseconds."""


def _put_clocks() -> None:
    from megatron_recover.control_plane.rank_driver import RankDriver
    from megatron_recover.control_plane.replica_driver import ReplicaDriver
    from megatron_recover.data_plane.direct import DirectTransport
    from megatron_recover.megatron import commit
    from megatron_recover.megatron.commit import CommitLoop
    from megatron_recover.trainer.bucket_sums import GradientSum
    from megatron_recover.trainer.microbatches import Microbatches
    from megatron_recover.trainer.reduction import Reduction
    from megatron_recover.trainer.result_summary import ResultSummary

    spent: collections.Counter[str] = collections.Counter()
    num_steps = 0

    def clock(owner: Any, name: str, part: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                spent[part] += time.thread_time() - begin

        setattr(owner, name, timed)

    clock(CommitLoop, "train_step", "the whole step")
    clock(DirectTransport, "sum_into", "sum over replicas, in the training thread")
    clock(Microbatches, "forward_begins", "random state at the beginning of each microbatch, with its event")
    clock(CommitLoop, "stepped", "digest of the parameters, with its event")
    clock(Microbatches, "backward_ended", "after each backward: counts and event")
    clock(commit, "read_losses", "loss reports of all microbatches")
    clock(ResultSummary, "__init__", "checksums and counts of the results")
    clock(ResultSummary, "read", "checksums and counts of the results")
    clock(Reduction, "apply", "results into the gradient buffer")
    clock(GradientSum, "is_finite", "check for values that are not finite")
    clock(RankDriver, "started", "journal")
    clock(RankDriver, "finished", "journal")
    clock(ReplicaDriver, "_feed", "machine of the replica, in the leader's control thread")
    train_step: Callable[..., Any] = CommitLoop.train_step

    @functools.wraps(train_step)
    def train_step_counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_steps
        result = train_step(*args, **kwargs)
        num_steps += 1
        if num_steps == WARM_UP:
            spent.clear()
        if num_steps == STEPS:
            print(MARK + json.dumps({part: 1000 * s / (STEPS - WARM_UP) for part, s in spent.items()}), flush=True)
        return result

    CommitLoop.train_step = train_step_counted  # type: ignore[method-assign]


if __name__ == "__main__":
    _put_clocks()
    runpy.run_path(str(SCRIPT), run_name="__main__")
