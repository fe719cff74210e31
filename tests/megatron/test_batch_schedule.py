"""A job with a schedule of batch sizes: how it is read, and the default batch, as of a data-parallel job of its size."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_recover.megatron.launch.batch_schedule import first_batch, take_default_batch

GOOD = ("0:16", "0:16 2.4B:320 4.8B:624", "100B:2K,0:1K", "0:1.5k,1m:2k", " 0:4 , 99:8 ")
BAD = ("few", "", "0", "0:", "0:K", "0:x", "0:inf", "0:nan", "0:1:2")


@pytest.mark.parametrize("schedule", [*GOOD, *BAD])
def test_a_schedule_begins_with_the_batch_that_upstream_begins_with(schedule: str) -> None:
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    try:
        calculator = StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, schedule, seq_length=32)
        expected = calculator.get_current_global_batch_size()
    except (ValueError, OverflowError, AssertionError):
        expected = None
    assert first_batch(schedule) == expected
    assert (expected is None) == (schedule in BAD)


@pytest.mark.parametrize(
    ("argv", "defaults", "expected"),
    [
        ("", {}, (12, 12)),
        ("--eval-global-batch-size 4", {}, (12, 4)),  # given, though it is the default of one replica
        ("--eval-global-batch-size=4", {}, (12, 4)),
        ("", {"eval_global_batch_size": 4}, (12, 4)),
        ("", {"global_batch_size": 8}, (4, 4)),
        ("", {"global_batch_size": None}, (12, 12)),
    ],
)
def test_the_default_batch_is_a_microbatch_of_each_data_parallel_rank_of_the_job(
    argv: str, defaults: dict[str, object], expected: tuple[int, int]
) -> None:
    args = Namespace(step_batch_size_schedule="0:12", micro_batch_size=2, global_batch_size=4, eval_global_batch_size=4)
    take_default_batch(args, argv.split(), defaults, lanes=2, replicas=3)
    assert (args.global_batch_size, args.eval_global_batch_size) == expected


def test_without_a_schedule_the_batch_is_the_one_that_is_given() -> None:
    args = Namespace(step_batch_size_schedule=None, micro_batch_size=2, global_batch_size=48, eval_global_batch_size=48)
    take_default_batch(args, ["--global-batch-size", "48"], {}, lanes=2, replicas=3)
    assert (args.global_batch_size, args.eval_global_batch_size) == (48, 48)
