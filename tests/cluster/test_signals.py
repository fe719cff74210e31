"""Signals to the launcher: whatever a scheduler sends is one request, only a second Ctrl-C at a terminal kills at once."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_recover.cluster.rank_process import TOLD_TO_ALL
from megatron_recover.cluster.signals import Answer, EndRequest
from megatron_recover.core.exit_code import ExitCode
from tests.cluster.jobs import Spec
from tests.cluster.running import FOR_EVER, Running, Start

pytestmark = pytest.mark.timeout(180)


def spec(tmp_path: Path) -> Spec:
    return Spec(run_dir=str(tmp_path / "run"), steps=FOR_EVER)


@given(st.lists(st.tuples(st.sampled_from(TOLD_TO_ALL), st.booleans()), min_size=1))
def test_any_signals_in_any_order_are_one_request_and_only_a_second_ctrl_c_kills(received: list[tuple[int, bool]]) -> None:
    request, num_ctrl_c = EndRequest(), 0
    for index, (number, at_terminal) in enumerate(received):
        is_ctrl_c = number == signal.SIGINT and at_terminal
        num_ctrl_c += is_ctrl_c
        expected = Answer.KILL if is_ctrl_c and num_ctrl_c > 1 else Answer.END if index == 0 else Answer.KNOWN
        assert request.take(number, at_terminal=at_terminal) is expected
        assert request.is_made


def assert_ended_together(job: Running) -> None:
    outcome = job.end()
    assert outcome.exit_code == ExitCode.INTERRUPTED, outcome.output
    outcome.assert_exactly_once()
    lengths = {len(outcome.sums(replica, rank)) for replica in range(3) for rank in range(2)}
    assert len(lengths) == 1, f"the ranks ended at different steps: {lengths}"
    job.assert_nothing_left()


def test_sigterm_twice_in_a_row_to_every_process_is_one_request(start: Start, tmp_path: Path) -> None:
    """As Slurm sends it at a time limit."""
    job = start(spec(tmp_path))
    for _ in range(2):
        for process in (*job.processes, job.launcher):
            process.send_signal(signal.SIGTERM)
        time.sleep(0.001)  # the interval is what is tested
    assert_ended_together(job)


def test_every_signal_of_a_scheduler_in_a_row_is_one_request(start: Start, tmp_path: Path) -> None:
    """SIGINT twice, too, where there is no terminal: `scancel --signal=INT`."""
    job = start(spec(tmp_path))
    for number in (signal.SIGUSR2, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        job.launcher.send_signal(number)
        time.sleep(0.001)
    assert_ended_together(job)
    output = job.output.read_text()
    assert f"all replicas end after the same step, with a checkpoint if --save is set; `kill -9 {job.launcher.pid}`" in output


def test_a_second_ctrl_c_at_a_terminal_kills_everything(start: Start, tmp_path: Path) -> None:
    job = start(spec(tmp_path), at_terminal=True)
    for rank in job.ranks:  # the common step of the first signal never comes, and nobody is left who could do without them
        rank.send_signal(signal.SIGSTOP)
    job.launcher.send_signal(signal.SIGTERM)  # counts for nothing here
    job.until(lambda: "SIGTERM: all replicas end after the same step" in job.output.read_text(), "the first answer")
    job.type("\x03")
    job.until(lambda: "SIGINT: the end was requested before; a second Ctrl-C" in job.output.read_text(), "the second answer")
    job.type("\x03")
    assert job.end().exit_code == 128 + signal.SIGINT
    job.assert_nothing_left()


def test_a_signal_that_the_user_names_ends_the_job_and_what_has_not_ended_in_time_is_killed(
    start: Start, tmp_path: Path
) -> None:
    """SIGQUIT, which is no request by default: like every request it may come to every process; only the launcher reacts."""
    job = start(msgspec.structs.replace(spec(tmp_path), signals=(signal.SIGQUIT,), shutdown_s=2, on_event=("true",)))
    for process in job.processes:
        process.send_signal(signal.SIGQUIT)
    before = job.num_applied()
    job.until(lambda: job.num_applied() > before + 20, "steps after the signal")
    for rank in job.ranks:  # the common step never comes
        rank.send_signal(signal.SIGSTOP)
    asked_at = time.monotonic()
    job.launcher.send_signal(signal.SIGQUIT)
    outcome = job.end()
    assert outcome.exit_code == 128 + signal.SIGQUIT, outcome.output
    assert time.monotonic() - asked_at >= 2
    assert "nothing is saved; so does the end of --shutdown-timeout, in 2 s" in outcome.output
    assert "the recorder ended by" not in outcome.output
    assert "the monitor ended by" not in outcome.output
    assert "the job did not end within --shutdown-timeout (2 s) of SIGQUIT" in outcome.output
    job.assert_nothing_left()


def test_no_other_signal_than_those_that_the_user_names_is_handled() -> None:
    handled = signal.SIGTERM, signal.SIGXCPU
    before = {number: signal.getsignal(number) for number in (*TOLD_TO_ALL, *handled)}
    request, heard = EndRequest(handled), []
    try:
        with request.received(heard.append):
            assert {number for number in before if signal.getsignal(number) != before[number]} == {*handled}
            signal.raise_signal(signal.SIGXCPU)
    finally:
        request.release()
        assert {number: signal.getsignal(number) for number in before} == before
    assert heard == [signal.SIGXCPU]


def test_signals_before_the_launcher_are_kept_for_it() -> None:
    before = {number: signal.getsignal(number) for number in TOLD_TO_ALL}
    request, heard = EndRequest(), []
    try:
        request.keep()
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.raise_signal(number)
        assert (request.kept, heard) == ("SIGUSR2", [])
        with request.received(heard.append):
            signal.raise_signal(signal.SIGINT)
        assert heard == [signal.SIGUSR2, signal.SIGTERM, signal.SIGINT]
    finally:
        request.release()
        assert {number: signal.getsignal(number) for number in before} == before
