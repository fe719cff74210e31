"""Ctrl-C in long work: the totals so far, exit code 130, and neither tracebacks nor processes are left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megatron_recover.sim.explore.scenario import CONFIGS
from megatron_recover.sim.workers import CTRL_C_CODE, ended_by_ctrl_c


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A test that runs in the background ignores SIGINT otherwise."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_only_the_first_interrupt_counts() -> None:
    for _ in range(2):
        with ended_by_ctrl_c():
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ended_by_ctrl_c():
        signal.raise_signal(signal.SIGINT)


MASKS = """\
import signal
from megatron_recover.sim.workers import workers
masks = []
with workers(1, tasks_each=1) as pool:
    for _ in range(2):
        masks.append(pool.apply(signal.pthread_sigmask, (signal.SIG_BLOCK, ())))
    masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
print([signal.SIGINT in mask for mask in masks])
"""


def test_workers_block_ctrl_c_and_so_do_those_that_replace_them() -> None:
    done = subprocess.run([sys.executable, "-c", MASKS], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[True, True, False]\n", "")


def test_ctrl_c_ends_workers_silently_and_what_was_found_is_summed_up() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_recover.sim.explore.explorer", "--only", "links", "--jobs", "2"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    try:
        while not lines or " states, " not in lines[-1]:  # the shorter one is done, the longer one is being explored
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to the workers, too
        rest, errors = process.communicate(timeout=60)  # which waits until none of them has the pipes
    finally:
        process.kill()
    assert lines[:2] == ["exploring: links that break\n", "exploring: links and a crash\n"]
    *lines, last = lines + rest.splitlines()
    num_links = sum("links" in scenario.name for scenario in CONFIGS["ci"])
    states = [int(line.split(": ")[1].split()[0]) for line in lines if " states, " in line]
    total = f"no invariant broken in {sum(states)} states: {len(states)} of {num_links} scenarios are explored"
    assert (process.returncode, errors, last) == (CTRL_C_CODE, "", f"interrupted; {total}")
