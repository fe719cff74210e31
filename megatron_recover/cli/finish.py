"""The process that makes summary.json and the loss plot of a run: this module run as a program.

The run is over by then and has its exit code, which this process cannot change. The process may
fail, be killed for lack of memory, or hang on a disk.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_recover.config import module_command
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.deadlines import Deadlines
from megatron_recover.host.process_stat import signal_name
from megatron_recover.trace import TraceError

_LOOK_S = 0.2
"""Seconds between two checks whether a signal has arrived."""
_LAST_WORDS = 400
"""Characters at most of the last line of the process's stderr that are reported."""


def failure(run_dir: Path, deadlines: Deadlines, is_hurried: Callable[[], bool] = lambda: False) -> str | None:
    """Make the files of a run in a separate process; return in a few words why it failed, or None.

    The process is killed after `report_s` seconds, soon after `is_hurried()` is true, or at a
    KeyboardInterrupt, which is not raised again. A process that does not die then is left alone.
    """
    command = [*module_command("megatron_recover.cli.finish"), str(run_dir)]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
            start_new_session=True,  # Ctrl-C at a terminal is for the run's own process, which ends this one
        )  # fmt: skip
    except OSError as error:
        return f"no process could be started ({error.strerror})"
    until = time.monotonic() + deadlines.report_s
    try:
        while True:
            left_s = max(0.0, until - time.monotonic())
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, errors = process.communicate(timeout=min(_LOOK_S, left_s))
                break
            if is_hurried():
                _kill(process, deadlines)
                return "interrupted"
            if not left_s:
                _kill(process, deadlines)
                return f"the process that makes them was ended after {deadlines.report_s:g} s"
    except KeyboardInterrupt:
        _kill(process, deadlines)
        return "interrupted"
    if process.returncode == 0:
        return None
    if process.returncode < 0 or process.returncode == 128 + signal.SIGKILL:
        number = -process.returncode if process.returncode < 0 else signal.SIGKILL
        reason = " (perhaps for want of memory)" if number == signal.SIGKILL else ""
        return f"the process that makes them was ended by {signal_name(number)}{reason}"
    words = errors.strip().splitlines()
    return words[-1][:_LAST_WORDS] if words else f"the process that makes them ended with exit code {process.returncode}"


def _kill(process: subprocess.Popen[str], deadlines: Deadlines) -> None:
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a disk, and ends once the disk answers
        process.wait(timeout=deadlines.sigkill_s)
    if process.stderr is not None:
        process.stderr.close()


def main(argv: Sequence[str]) -> int:
    """Make the files of one run directory. On failure the last line on stderr gives the reason."""
    from megatron_recover.observe import summary
    from megatron_recover.observe.history import History
    from megatron_recover.observe.report import plot

    run_dir = Path(argv[0])
    with contextlib.suppress(OSError):  # if memory runs out, the kernel kills this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        history = History.read(run_dir)
        summary.save(run_dir, summary.summarize(history))
        if plot.left_out() is None:
            plot.draw(run_dir, history)
    except TraceError as error:
        print(f"the trace cannot be read: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    except OSError as error:
        print(error.strerror or error, file=sys.stderr)
        return ExitCode.FAILED
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
