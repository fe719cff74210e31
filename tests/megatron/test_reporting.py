"""One voice: log lines and TensorBoard of the lowest live replica."""

from __future__ import annotations

from typing import Any

from megatron_recover.megatron.reporting import LogLine, TensorBoard

LINE = " [now] iteration        7/      10 | consumed samples: 84 | throughput per GPU (TFLOP/s/GPU): 12.0 | lm loss: 3.9 |"


class Driver:
    """What reporting sees of one."""

    def __init__(self) -> None:
        self.generation, self.roster, self.quotas = 2, (1, 2), (6, 6)
        self.writer, self.step = True, 0

    def is_writer(self) -> bool:
        return self.writer


def test_log_line_says_generation_replicas_and_quotas() -> None:
    driver, printed, flushed = Driver(), [], []
    line = LogLine(driver, 3, printed.append, lambda: flushed.append(len(printed)))
    line.print_rank_last(LINE)
    line.print_rank_last(" validation loss at iteration 7 | lm loss value: 3.9 |")
    assert printed[0].endswith("lm loss: 3.9 | generation: 2 | replicas: 2/3 | quotas: 6 6 |")
    assert "throughput per GPU (TFLOP/s/GPU): 6.0" in printed[0], "the job's throughput is that of all its devices"
    assert printed[1].endswith("3.9 |")
    driver.writer = False
    line.print_rank_last(LINE)
    assert len(printed) == 2
    assert flushed == [0, 1, 2], "values are on the disk before their line is; other replicas know that"


def test_tensorboard_is_taken_over_and_not_opened_before() -> None:
    written: list[tuple[Any, ...]] = []

    class Writer:
        def add_scalar(self, *args: Any) -> None:
            written.append(args)

        def flush(self) -> None:
            written.append(("flush",))

    driver, created = Driver(), []
    board = TensorBoard(driver, lambda: created.append(1) or Writer())
    driver.writer = False
    for iteration in range(1, 8):
        board.add_scalar("lm loss", 3.9, iteration)
        board.add_scalar("lm loss vs samples", 3.9, 12 * iteration)
        if not iteration % 3:  # `--log-interval 3`
            board.flush()
    assert (created, written) == ([], [])
    driver.writer = True
    board.add_scalar("throughput", 12.0, 8)
    board.flush()
    # The dead writer may not have written these: its last flush, that of iteration 6, may not have come to its end.
    missed = [each for at in (4, 5, 6, 7) for each in (("lm loss", 3.9, at), ("lm loss vs samples", 3.9, 12 * at))]
    assert (created, written) == ([1], [*missed, ("throughput", 6.0, 8), ("flush",)])
    board.flush()
    assert written[-2:] == [("flush",)] * 2, "what was missed is written once"
