"""The command for events: each notice once and in order, nothing of it in a shell, and never longer than it may take."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_recover.cluster import event_command
from megatron_recover.cluster.event_command import MAX_WAITING, EventCommand, Memory, create_memory
from megatron_recover.observe.follow.notices import AnyNotice, Ended, SaveFailed

LIMIT_S = 1.0
PATIENT_S = 20.0


@pytest.fixture
def memory() -> Iterator[Memory]:
    descriptor = create_memory()
    yield Memory(descriptor)
    os.close(descriptor)


def notice(number: int, detail: str = "no room") -> SaveFailed:
    return SaveFailed(number=number, iteration=10 * number, detail=detail, last_durable_iteration=None)


def ended(number: int) -> Ended:
    return Ended(
        number=number, exit_code=0, name="ok", reason="done", last_committed_iteration=3, last_durable_iteration=None
    )  # fmt: skip


def give(memory: Memory, script: str, *notices: AnyNotice, command_s: float = PATIENT_S) -> list[str]:
    """Give notices to a shell script until all is over, and return what was said about it."""
    said: list[str] = []
    command = EventCommand(("sh", "-c", script), memory, command_s=command_s, says=said.append)
    for each in notices:
        command.give(each)
    command.finish()
    return said


def given(path: Path) -> list[int]:
    """The numbers of the notices in a file of JSON lines."""
    return [json.loads(line)["number"] for line in path.read_text().splitlines()] if path.exists() else []


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def test_each_notice_is_given_once_in_order_and_no_word_of_it_reaches_a_shell(memory: Memory, tmp_path: Path) -> None:
    evil = f"'; touch {tmp_path}/evil; $(touch {tmp_path}/evil) `touch {tmp_path}/evil` \n\" "
    said = give(memory, f"cat >> {tmp_path}/events", notice(1, evil), notice(2), ended(3))
    assert (said, given(tmp_path / "events")) == ([], [1, 2, 3])
    assert json.loads((tmp_path / "events").read_text().splitlines()[0])["detail"] == evil
    assert not (tmp_path / "evil").exists()


def test_a_monitor_that_begins_anew_gives_only_what_was_not_given(memory: Memory, tmp_path: Path) -> None:
    give(memory, f"cat >> {tmp_path}/events", notice(1), notice(2))
    assert give(memory, f"cat >> {tmp_path}/events", notice(1), notice(2), notice(3)) == []
    assert given(tmp_path / "events") == [1, 2, 3]


def test_the_end_is_given_once_also_by_a_monitor_that_had_no_time_to_count(memory: Memory, tmp_path: Path) -> None:
    """It numbers by what it has read so far; the one before has given more."""
    give(memory, f"cat >> {tmp_path}/events", notice(1), notice(2), notice(3))
    assert give(memory, f"cat >> {tmp_path}/events", notice(1), ended(2)) == []
    assert given(tmp_path / "events") == [1, 2, 3, 4]
    assert give(memory, f"cat >> {tmp_path}/events", ended(9)) == []
    assert given(tmp_path / "events") == [1, 2, 3, 4]


def test_what_a_kill_does_not_end_holds_up_no_further_event(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_command, "_kill", lambda group: None)  # as where the kernel waits for a disk
    monkeypatch.setattr(event_command, "_REAPED_S", 0.05)
    script = f"read line; case $line in *'\"number\":1,'*) sleep 30 >&- 2>&-;; esac; echo $line >> {tmp_path}/events"
    said: list[str] = []
    command = EventCommand(("sh", "-c", script), memory, command_s=LIMIT_S, says=said.append)
    for each in (notice(1), notice(2)):
        command.give(each)
    until(lambda: given(tmp_path / "events") == [2], "the second was not given")
    command.finish()
    assert len(said) == 1 and "does not end although it was killed" in said[0]


def test_a_failure_is_one_line_with_the_last_word_of_the_command(memory: Memory) -> None:
    assert give(memory, "echo first >&2; echo no route to host >&2; exit 3", notice(1), ended(2)) == [
        "--on-event sh ended by exit code 3: no route to host (event 1, savefailed)",
        "--on-event sh ended by exit code 3: no route to host (event 2, ended)",
    ]
    said: list[str] = []
    gone = EventCommand(("/nowhere/x",), memory, command_s=1.0, says=said.append)
    gone.give(notice(3))
    gone.finish()
    assert said == ["--on-event /nowhere/x cannot be started (No such file or directory) (event 3, savefailed)"]


def test_a_command_that_hangs_is_killed_with_all_it_started_and_the_next_is_given(memory: Memory, tmp_path: Path) -> None:
    script = f'read line; echo $$ >> {tmp_path}/pids; echo "$line" >> {tmp_path}/events; sleep 1000 & sleep 1000'
    began = time.monotonic()
    said = give(memory, script, notice(1), ended(2), command_s=LIMIT_S)
    assert time.monotonic() - began < 2 * LIMIT_S + 5.0
    assert re.fullmatch(r"--on-event sh was killed after (1|0\.9\d*) s \(event 1, savefailed\)", said[0])
    assert given(tmp_path / "events") == [1, 2]
    groups = {int(pid) for pid in (tmp_path / "pids").read_text().split()}
    until(lambda: not [each for each in psutil.pids() if _group(each) in groups], "nothing of the groups is left")


def test_what_a_command_leaves_running_ends_with_it(memory: Memory, tmp_path: Path) -> None:
    assert give(memory, f"echo $$ > {tmp_path}/pid; sleep 1000 >/dev/null 2>&1 & exit 0", notice(1)) == []
    group = int((tmp_path / "pid").read_text())
    until(lambda: not [each for each in psutil.pids() if _group(each) == group], "what it left running has ended")


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid) if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else -1
    except (OSError, psutil.Error):
        return -1


def test_a_command_that_writes_without_end_costs_its_time_and_no_memory(memory: Memory) -> None:
    before = psutil.Process().memory_info().rss
    said = give(memory, "yes >&2 & yes", notice(1), command_s=LIMIT_S)
    assert len(said) == 1 and "was killed after" in said[0]
    assert psutil.Process().memory_info().rss - before < 20 * 2**20


def test_of_too_many_the_newest_are_dropped_and_counted_and_never_the_end(memory: Memory, tmp_path: Path) -> None:
    said: list[str] = []
    hold = tmp_path / "hold"
    hold.touch()
    script = f"cat >> {tmp_path}/events; while [ -e {hold} ]; do sleep 0.02; done"
    command = EventCommand(("sh", "-c", script), memory, command_s=PATIENT_S, says=said.append)
    command.give(notice(1))
    until(lambda: given(tmp_path / "events"), "the first one runs")
    began = time.monotonic()
    for number in range(2, 1002):
        command.give(notice(number))
    assert time.monotonic() - began < 1.0, "whoever gives a notice does not wait"
    command.give(ended(1002))
    hold.unlink()
    command.finish()
    numbers = given(tmp_path / "events")
    assert numbers == [*range(1, MAX_WAITING + 2), 1002]
    last = json.loads((tmp_path / "events").read_text().splitlines()[-1])
    assert (last["event"], last["dropped"]) == ("ended", 1000 - MAX_WAITING)
    assert said == [f"{1000 - MAX_WAITING} events so far were not given to --on-event, which is too slow for them"]


def test_at_the_end_slow_commands_give_way_to_the_end_of_the_run(memory: Memory, tmp_path: Path) -> None:
    began = time.monotonic()
    give(memory, f"cat >> {tmp_path}/events; sleep 1000", *map(notice, range(1, 20)), ended(20), command_s=LIMIT_S)
    numbers = given(tmp_path / "events")
    assert numbers[-1] == 20 and len(numbers) <= 4
    assert time.monotonic() - began < 4 * LIMIT_S + 5.0


def test_the_next_monitor_ends_the_command_that_a_killed_one_has_left(memory: Memory) -> None:
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as left:
        memory.begins(notice(1))
        memory.runs(left.pid)
        assert memory.end_command()
        assert left.wait(PATIENT_S) == -9
    memory.runs(os.getpid())
    memory._memory[16:24] = (1).to_bytes(8, "little")  # another process has got the number since
    assert memory.end_command() and not memory.end_command()
    assert memory.num_given == 1
