"""Every number of seconds in the package is a wait of `Deadlines`, or stands in the list below with the reason why it is none.

A wait decides something: somebody is given up, something is ended, data is lost. What is listed here decides nothing, since
whoever pauses looks again and goes on. `sim/` is left out: its seconds are those of a virtual clock, for which nobody waits.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron_recover

PACKAGE = Path(megatron_recover.__file__).parent

INTERVALS = {
    "cli/demo.py KILL_DELAY_S": "from the end of a step to the kill that the demo shows",
    "cli/demo.py PATIENCE_S": "from the last death to the end of a run whose replicas do not come back, between its lines",
    "cli/demo.py _LOOK_S": "between two looks at the file of the endpoint, while a node runs that writes it",
    "host/addresses.py KEPT_ALIVE_S": "between two packets of the kernel on a quiet connection",
    "host/addresses.py RETRIED_S": "between two tries of the kernel to send the same bytes to another host",
    "host/addresses.py GIVEN_UP_S": "of the kernel, in place of its own 15 minutes; every wait for a peer has a deadline",
    "cli/finish.py _LOOK_S": "between two looks at whether a signal has come, while `report_s` runs",
    "cli/drain.py _LOOK_S": "between two looks at the state of the job, while the user's --wait runs",
    "cli/drain.py WAIT_S": "the default of --wait: a person reads that the replica has not left yet",
    "cli/scale.py _LOOK_S": "between two looks at the state of the job, while the user's --wait runs",
    "host/reachable.py _ASK_S": "between two questions for a name, while `join_s` or UNKNOWN_S runs",
    "host/reachable.py UNKNOWN_S": "before there is a run: a name that has no entry yet is refused, and the node starts again",
    "cluster/joining.py _TURN_S": "between two looks at whether all nodes have met, while --rdzv-conf's wait runs",
    "cluster/joining.py _ANSWER_S": "before there is a run: a signalled node leaves without the coordinator's answer",
    "control_plane/nodes_driver.py TELL_S": "before there is a run: a node that is told nothing waits as for one never started",
    "cluster/meeting.py LAST_CALL_S": "the default of --rdzv-conf last_call_timeout, as torch's; the user's own wait",
    "cluster/slurm/script.py SIGNAL_S": "the default of sbatch --signal-s; Slurm acts on it",
    "cluster/slurm/script.py _GRACE_S": "of a printed batch script, which people read and change",
    "cluster/slurm/script.py _LOOK_S": "of a printed batch script, between two looks at the run",
    "observe/margin.py _RESERVE_S": "added to a measured time; nobody waits for it",
    "trace/merging.py MARGIN_S": "between the stamps of two traces; nobody waits",
    "trace/node_clock.py _TELL_S": "between two reports of refused stamps",
    "cli/status.py _OLD_S": "nobody waits: from this age on a person reads that the state is old",
    "cli/run_dirs.py _SLURM_S": "a person who asks for a job by its number reads that Slurm does not answer",
    "cli/several_nodes.py _AGAIN_S": "a node that was lost looks so long for its coordinator; nobody waits for it",
    "cli/top.py INTERVAL_S": "between two looks at a trace that another process writes",
    "cli/top.py SILENCE_S": "after this a person reads that nothing is recorded; the verb goes on",
    "cluster/agent.py _LOOK_S": "between two looks at the fork server, while `fork_s` runs",
    "cluster/console.py _INTERVAL_S": "between two looks at logs and events",
    "cluster/doctor/between.py _WARN_S, _FAIL_S": "a difference between two clocks, for which nobody waits",
    "cluster/doctor/folders.py _READ_S": "to read what a process has written already",
    "cluster/doctor/node.py DEADLINE_S": "before there is a run: what does not answer is a warning, and the run goes on",
    "cluster/doctor/probing.py _CONNECT_S": "before there is a run: a port is reported with the reason, and given again",
    "cluster/doctor/probing.py _REDIAL_S": "between two dials, while `_CONNECT_S` runs",
    "cluster/doctor/probing.py _ECHO_S": "before there is a run, as `_CONNECT_S`",
    "cluster/doctor/probing.py _PACKET_S, _NUM_PACKETS": "between two packets; what never comes back is a warning",
    "cluster/doctor/service.py _END_S": "for a thread that ends by itself, and that nobody needs any more",
    "cluster/doctor/sharing.py _DEADLINE_S": "before there is a run: what does not answer is not known to be shared",
    "cluster/examination.py _TURN_S": "between two turns of the loop, while `deadline_s` runs",
    "cluster/event_store.py _RETRY_S": "between two tries to write the same batch, which is kept meanwhile",
    "cluster/event_command.py _REAPED_S": "after the kill of a command: it is reaped later if the kernel still holds it",
    "cluster/forkserver.py _LOOK_S": "between two looks at processes that import or wait; those that are stopped go on",
    "cluster/forkserver.py _LONGEST_PAUSE_S": "before a lost warm process is replaced; a request that finds none starts one",
    "cluster/coordinator.py _TURN_S": "between two looks at whether anybody still needs the coordinator",
    "cluster/slot_check.py _LOOK_S": "between two looks at what has to end, while `slots_s` runs",
    "config.py heal_backoff_s": "the default of --recover-heal-backoff-s, the user's own wait; nobody waits for it",
    "cluster/meeting.py JOIN_S": "before there is a run: the default of join_timeout, which is torchrun's",
    "cluster/slurm/script.py QUEUE_S": "before there is a run: the join_timeout of an array, whose jobs come from a queue",
    "cluster/gathering.py _LOOK_S": "between two looks at the folders of other nodes, while `traces_s` or `offer_s` runs",
    "cluster/launcher.py _POLL_S": "between two looks at every rank",
    "cluster/endpoint_file.py _LOOK_S": "between two looks at a file, while `join_timeout` runs",
    "cluster/membership.py _PAUSE_S": "between two tries to reach the coordinator, while `join_s` or `leader_s` runs",
    "cluster/membership.py _TRY_S": "before the next address of the endpoint is tried, while `join_s` runs",
    "cluster/membership.py _LONGEST_TRY_S": "the same after several rounds, so that a coordinator that begins late is found",
    "cluster/membership.py _TURN_S": "between two turns of the loop, while `words_s` runs",
    "cluster/logs.py _INTERVAL_S": "between two copies of what ranks print",
    "cluster/logs.py _DROP_S": "shortest time between two looks at how much each output has left",
    "cluster/logs.py _SOON_S": "the same at the end of a run",
    "cluster/logs.py _RETRY_S": "before a log that had an error is tried again; its text is kept",
    "data_plane/nccl_communicator.py _FREES_S": "without overlap, while threads of NCCL end that look every 0.5 s",
    "cluster/out_of_memory.py _LOOK_S": "between two looks at a counter of the kernel",
    "cluster/monitor.py _INTERVAL_S": "between two reads of a trace that another process writes",
    "cluster/monitor.py _TEXTFILE_S": "between two versions of the file with metrics",
    "cluster/monitor.py _LOOK_S": "between two looks at the launcher, which wakes the monitor at its end",
    "cluster/monitoring.py _LOOK_S": "between two looks at the monitor, while `monitor_s` runs",
    "cluster/recorder.py _INTERVAL_S": "between two drains of the rings",
    "cluster/recorder.py _SOON_S": "the same where every moment counts",
    "cluster/recorder.py _TELL_LOSSES_S": "between two messages about lost events",
    "cluster/status.py _INTERVAL_S": "between two looks for requests, which wait in their folder",
    "cluster/recording.py _LOOK_S": "between two looks at the recorder, while `trace_s` and `terminal_s` run",
    "authentication/admission.py PAUSE_S": "a listener without a descriptor rests, and its queue is the kernel's",
    "cluster/narrator.py HOLD_S": "a line is kept so long for those that come before it, and told all the same",
    "authentication/admission.py TELL_S": "between two reports of how many strangers were let go",
    "authentication/admission.py REST_S": "a listener that expects nobody rests; whoever connects waits in the kernel's queue",
    "control_plane/calling.py _LONGEST_PAUSE_S": "between two dials, while `patience_s` runs",
    "control_plane/calling.py _PAUSE_S": "between the first two dials, while `patience_s` runs",
    "data_plane/connection.py REDIAL_S": "between two dials, while `connect_s` or `probe_s` runs",
    "data_plane/gloo.py _POISON_S": "a receive that is meant to run out, so that gloo closes its connections",
    "control_plane/loop.py _LONGEST_WAIT_S": "the longest that the loop does not look at its timers",
    "control_plane/leader_link.py _RETRY_S": "between two tries to find the leader, while `leader_s` runs",
    "data_plane/nccl.py SHORTEST_SLICE_S, LONGEST_SLICE_S": "between two looks at an event of the GPU",
    "megatron/wandb_run.py KEEP_S": "logged values are kept so long in memory, and nobody waits for that",
    "cluster/other_ends.py _LOOK_S": "between two looks at the folders of other nodes, while `deadline_s` runs",
    "cluster/save_lock.py _BEAT_S": "between two signs of life of a job in its lock file",
    "cluster/save_lock.py _WATCH_S": "before there is a run: the lock of a job that may be dead is watched so long",
    "cluster/save_lock.py _LOOK_S": "between two looks at that lock",
    "megatron/checkpoint/checkpoints.py _POLL_S": "between two looks for a grant, while `save_s` runs",
    "megatron/checkpoint/checkpoints.py _RETRY_S": "between two tries of the last save, while `save_s` runs",
    "data_plane/nccl_communicator.py _LOOK_S": "between two looks at a communicator that comes to rest, while `close_s` runs",
    "host/gpus.py _ANSWERS_S": "before there is a run: with a driver that hangs no GPU is found, and the user gives the number",
    "host/gpus.py _READ_S": "to read what a program has written already",
    "host/lock_file.py _POLL_S": "between two tries to get the lock, while `build_s` or `lock_s` runs",
    "observe/summary.py _SLACK_S": "between two events of a trace that is read when the run is over",
    "trace/ring.py _SETTLE_S": "a store leaves the store buffer of a core (Note [Visibility]); no process is waited for",
}
"""Intervals at which something is looked at or tried again: the place, and why nothing is decided by it."""

_SECONDS = re.compile(r"(?:_s|_S)$|TIMEOUT|DEADLINE|(?<![a-z])timeout")
_WAITERS = {
    "Timer", "acquire", "close", "communicate", "is_readable", "is_writable", "join", "poll", "select", "settimeout", "sleep",
    "timedelta", "wait", "wait_for",
}  # fmt: skip
"""Calls of which a number among the arguments is a time."""


def _is_number(node: ast.expr | None) -> bool:
    """True if an expression is a number that is not 0, arithmetic of such, or a choice with one."""
    match node:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float() as value):
            return value != 0
        case ast.UnaryOp(operand=operand):
            return _is_number(operand)
        case ast.BinOp(left=left, right=right):
            return _is_number(left) and _is_number(right)
        case ast.Tuple(elts=elements):
            return bool(elements) and all(_is_number(each) for each in elements)
        case ast.IfExp(body=body, orelse=otherwise):
            return _is_number(body) or _is_number(otherwise)
    return False


def _names(target: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]


def constant_seconds(source: str) -> Iterator[tuple[str, int]]:
    """Yield the name and line of each number of seconds in a module: constants, defaults, and arguments of calls that wait."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=value):
                names = _names(target)
                if _is_number(value) and any(_SECONDS.search(name) for name in names):
                    yield ", ".join(names), node.lineno
            case ast.FunctionDef(args=arguments) | ast.AsyncFunctionDef(args=arguments):
                positional = [*arguments.posonlyargs, *arguments.args]
                defaults = [
                    *zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True),
                    *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
                ]
                for argument, default in defaults:
                    if _SECONDS.search(argument.arg) and _is_number(default):
                        yield argument.arg, node.lineno
            case ast.Call(func=function, args=arguments, keywords=keywords):
                called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
                if called in _WAITERS and any(_is_number(argument) for argument in arguments):
                    yield called, node.lineno
                for keyword in keywords:
                    is_time = keyword.arg is not None and (_SECONDS.search(keyword.arg) or called == "timedelta")
                    if is_time and _is_number(keyword.value):
                        yield f"{called}({keyword.arg}=)", node.lineno


def found() -> dict[str, int]:
    """Return every number of seconds in the package outside `deadlines.py` and `sim/`: the place, and its line."""
    modules = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]
    return {
        f"{module.as_posix()} {name}": line
        for module in modules
        if module.parts[0] != "sim" and module.name != "deadlines.py"
        for name, line in constant_seconds((PACKAGE / module).read_text())
    }


def test_every_constant_wait_comes_from_the_deadlines_or_is_listed_as_an_interval() -> None:
    places = found()
    unlisted = [f"{place} (line {line})" for place, line in places.items() if place not in INTERVALS]
    assert unlisted == [], (
        "derive it in deadlines.py, with its place in ORDER; or list it above with the reason why it decides nothing"
    )
    assert [place for place in INTERVALS if place not in places] == [], "listed, and not there"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("STALL_S = 5.0", "STALL_S"), ("_GIVE_UP_S: float = 60 * 15", "_GIVE_UP_S"), ("A_S, B_S = 0.1, 2.0", "A_S, B_S"),
        ("WAIT_TIMEOUT = 3", "WAIT_TIMEOUT"), ("thread.join(5.0)", "join"), ("process.wait(timeout=1.0)", "wait(timeout=)"),
        ("sock.settimeout(2)", "settimeout"), ("time.sleep(0.5)", "sleep"), ("timedelta(minutes=30)", "timedelta(minutes=)"),
        ("def f(timeout_s: float = 2.0): ...", "timeout_s"), ("def f(*, patience_s=3): ...", "patience_s"),
        ("f(deadline_s=900.0)", "f(deadline_s=)"), ("keeper.close(0.5 if left else 5.0)", "close"),
        ("class A:\n    grace_s: float = 0.2", "grace_s"),
    ],
)  # fmt: skip
def test_a_planted_wait_is_found(source: str, name: str) -> None:
    assert [each for each, _ in constant_seconds(source)] == [name]


@pytest.mark.parametrize(
    "source", ["', '.join(words)", "thread.join()", "queue.get()", "left_s = until - now", "f(deadline_s=self.sum_s)",
               "selector.select(0)", "seconds = 1 / 2", "NUM_STARTS = 5", "def f(wait_s: float = 0.0): ..."],
)  # fmt: skip
def test_what_is_no_constant_wait_is_not(source: str) -> None:
    assert list(constant_seconds(source)) == []
