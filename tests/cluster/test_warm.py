"""Ranks from warm processes: as ranks that are forked, but each from an interpreter of its own, as CUDA needs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from megatron_recover.cli.describing import PRELOAD
from megatron_recover.cluster import forkserver
from megatron_recover.cluster import forkserver_messages as messages
from megatron_recover.cluster.agent import Agent
from megatron_recover.cluster.node import NodeLost
from megatron_recover.cluster.output import create
from megatron_recover.cluster.packets import receive
from megatron_recover.cluster.readiness import is_readable
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.faults import Fault, FaultKind, FaultPoint
from tests.cluster.jobs import ROOT, Spec, run
from tests.cluster.waiting import until_ended, until_files, until_readable

pytestmark = pytest.mark.timeout(240)
SCRIPT = """
import os, pathlib, signal, sys
imported = "decimal" in sys.modules
ignored = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {os.getsid(0)} {os.environ['PLACE']} {imported} {ignored}")
"""
ENDLESS = """
import pathlib, signal, subprocess, sys
pathlib.Path(sys.argv[1]).write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
signal.pause()
"""


@contextlib.contextmanager
def agent(folder: Path, num_warm: int, *preload: str, num_ready: int = 0) -> Iterator[Agent]:
    made = Agent(
        preload=preload, environment=dict(os.environ) | {"PYTHONPATH": f"{ROOT}:{folder}"}, num_warm=num_warm,
        num_ready=num_ready, output=create(folder / "server.log"),
    )  # fmt: skip
    try:
        yield made
    finally:
        left = warm_processes(made)
        assert made.close() == []
        until_ended(left)


def warm_processes(made: Agent) -> list[psutil.Process]:
    try:
        return sorted(psutil.Process(made._server.pid).children(), key=lambda child: child.pid)
    except psutil.NoSuchProcess:
        return []


def spawn(made: Agent, folder: Path, rank: int, script: str = SCRIPT) -> Path:
    """Start a rank; return the file that it writes."""
    own = folder / f"script-{rank}.py"  # an earlier rank may be reading its own just now
    own.write_text(script)
    result = folder / f"result-{rank}"
    made.spawn(
        0, rank, argv=(str(own), str(result)), environment={"PLACE": str(rank)},
        output=create(folder / f"{rank}.log"),
    )  # fmt: skip
    return result


def until_all_ended(made: Agent, num_ranks: int) -> None:
    ends = []

    def have_ended() -> bool:
        ends.extend(made.poll())
        return len(ends) == num_ranks

    until_readable(made.fileno(), have_ended, "the ends of all ranks")
    assert [end.status for end in ends] == [0] * num_ranks


def test_each_warm_process_becomes_a_rank_with_the_modules_imported(tmp_path: Path) -> None:
    with agent(tmp_path, 2, "decimal") as made:
        until_readable(made.fileno(), made.is_ready, "the warm processes")
        warm = [child.pid for child in warm_processes(made)]
        assert len(warm) == 2
        results = [spawn(made, tmp_path, rank) for rank in range(2)]
        assert sorted(made.pid(0, rank) for rank in range(2)) == warm
        until_all_ended(made, 2)
        for rank, result in enumerate(results):
            pid = made.pid(0, rank)
            assert result.read_text() == f"{pid} {pid} {rank} True True"  # a session of its own


def test_a_warm_process_that_dies_is_replaced_and_the_next_rank_starts(tmp_path: Path) -> None:
    """The one that takes its place may still import when the request comes: it reads the request when it is done."""
    with agent(tmp_path, 1, "decimal") as made:
        until_readable(made.fileno(), made.is_ready, "the warm process")
        [warm] = warm_processes(made)
        warm.kill()
        until_ended([warm])
        result = spawn(made, tmp_path, 0)
        assert made.pid(0, 0) != warm.pid
        until_all_ended(made, 1)
        assert result.read_text().startswith(str(made.pid(0, 0)))


def test_warm_processes_that_are_lost_one_after_another_are_replaced_after_pauses_that_double() -> None:
    pauses, found = forkserver.Pauses(), []
    now_s = 1000.0
    for _ in range(9):
        pauses.lost(now_s)
        found.append(pauses.pause_s)
        assert pauses.due(now_s + 0.9 * pauses.pause_s) == (0 if pauses.pause_s else 1)
        now_s += pauses.pause_s
        assert pauses.due(now_s) == (1 if pauses.pause_s else 0) and not pauses.num_owed
    assert found == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    pauses.lost(now_s + 1.0)
    pauses.lost(now_s + 2.0)
    assert pauses.due(now_s + 62.0) == 2, "none is forgotten"
    pauses.lost(now_s + 300.0)
    assert pauses.due(now_s + 300.0) == 1, "after a calm there is no pause"


def test_processes_are_kept_ready_for_newcomers_when_the_ranks_have_started(tmp_path: Path) -> None:
    with agent(tmp_path, 3, "decimal", num_ready=2) as made:
        until_readable(made.fileno(), made.is_ready, "the warm processes")
        started = {child.pid for child in warm_processes(made)}
        spawn(made, tmp_path, 0)
        assert {child.pid for child in warm_processes(made)} <= started, "enough are left"
        spawn(made, tmp_path, 1)
        until_all_ended(made, 2)
        ready = {child.pid for child in warm_processes(made)}
        assert len(ready) == 2 and len(ready - started) == 1
        result = spawn(made, tmp_path, 2)
        assert made.pid(0, 2) in ready, "a newcomer takes one of them"
        until_all_ended(made, 1)
        assert result.read_text().endswith(" 2 True True") and len(warm_processes(made)) == 2


def test_a_warm_process_whose_end_is_seen_before_its_report_has_imported_everything() -> None:
    """Both may come in one turn of the loop, and no order of the two is promised."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        server = forkserver._Server(theirs, 10.0, 1, ["decimal"])
        assert server._warm is not None
        [child] = server._warm._idle
        try:
            assert child.control is not None and is_readable(child.control, 60.0)
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
            os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT)
            server._reap(child)
            assert not server._is_over
            assert is_readable(ours, 0.0)
            assert isinstance(msgspec.json.decode(receive(ours, 4096)[0], type=messages.Reply), messages.Ready)
            [other] = server._warm._idle
            assert other is not child
        finally:
            ours.close()
            server.run()  # finds the launcher gone, and kills the other one
            server._selector.close()


BLOCKS = """
import contextlib, os, pathlib, signal
folder = pathlib.Path({folder!r})
with contextlib.suppress(FileNotFoundError):
    (folder / "block").rmdir()
    (folder / f"blocked-{{os.getpid()}}").touch()
    signal.pause()
"""
"""A module whose import never ends in the one process that removes the folder `block`; a file has that process's pid."""


def until_one_blocks(folder: Path) -> int:
    """Return the pid of the process that blocks in its imports."""
    until_files(lambda: list(folder.glob("blocked-*")), "a process that imports", folder)
    [found] = folder.glob("blocked-*")
    found.unlink()
    return int(found.name.removeprefix("blocked-"))


def test_a_warm_process_that_is_stopped_while_it_imports_is_continued(tmp_path: Path) -> None:
    (tmp_path / "stops.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n")
    with agent(tmp_path, 2, "stops") as made:
        until_readable(made.fileno(), made.is_ready, "the warm processes", deadline_s=30)
        assert "somebody stopped a warm process (pid " in made._output.end()


def test_a_warm_process_that_is_stopped_while_it_waits_becomes_a_rank_all_the_same(tmp_path: Path) -> None:
    with agent(tmp_path, 1, "decimal") as made:
        until_readable(made.fileno(), made.is_ready, "the warm process")
        [warm] = warm_processes(made)
        warm.suspend()
        result = spawn(made, tmp_path, 0)
        assert made.pid(0, 0) == warm.pid
        until_files(result.exists, "the rank", tmp_path, deadline_s=30)
        until_all_ended(made, 1)


def test_a_warm_process_that_hangs_while_it_imports_is_named(tmp_path: Path) -> None:
    (tmp_path / "blocks.py").write_text(BLOCKS.format(folder=str(tmp_path)))
    (tmp_path / "block").mkdir()
    with agent(tmp_path, 2, "blocks") as made:
        hung = until_one_blocks(tmp_path)
        expected = f"1 of 2 processes has imported; pid {hung} has not, and is asleep (state S)"
        until_readable(made.fileno(), lambda: made.is_ready() or made.importing() == expected, expected, deadline_s=30)
        assert not made.is_ready()


LAUNCHES = """
import msgspec, sys
from pathlib import Path
from megatron_recover.cluster.job import Job, create_run_dir
from megatron_recover.cluster.launcher import Launcher
from megatron_recover.config import RecoverConfig
from megatron_recover.deadlines import Deadlines
from megatron_recover.trace import Layout
job = Job(argv=("no.py",), num_replicas=1, layout=Layout(tp=1, pp=1), config=RecoverConfig(), preload=("blocks",),
          run_dir=create_run_dir(Path(sys.argv[1])), rank_start=sys.argv[2])
sys.exit(Launcher(job, deadlines=msgspec.structs.replace(Deadlines.of(20.0), fork_s=2.0, deadline_s=6.0)).run())
"""


@pytest.mark.parametrize(
    ("start", "named"), [("warm", "1 of 2 processes has imported; pid {} has not, and"), ("fork", "pid {}")]
)
def test_the_console_names_a_process_that_hangs_while_it_imports(start: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "blocks.py").write_text(BLOCKS.format(folder=str(tmp_path)))
    (tmp_path / "block").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHES, str(tmp_path / "run"), start], capture_output=True, text=True, timeout=120,
        env=dict(os.environ) | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}, check=False,
    )  # fmt: skip
    what = named.format(until_one_blocks(tmp_path)) + " is asleep (state S)"
    assert done.returncode == ExitCode.FAILED, done.stderr
    told = rf"megatron-recover: still importing after \d s, of 6 s at most: {re.escape(what)}$"
    assert len(re.findall(told, done.stdout, re.MULTILINE)) == 1, done.stdout
    assert f"importing took more than 6 s: {what}\n" in done.stdout


def test_ranks_outlive_a_warm_process_that_is_killed_while_it_imports(tmp_path: Path) -> None:
    """The others have imported the same, so the next one may, too. The kernel kills for want of memory, for example."""
    (tmp_path / "blocks.py").write_text(BLOCKS.format(folder=str(tmp_path)))
    with agent(tmp_path, 2, "blocks") as made:
        until_readable(made.fileno(), made.is_ready, "the warm processes")
        begun = spawn(made, tmp_path, 0, ENDLESS)
        until_files(lambda: begun.exists() and begun.read_text(), "the rank", tmp_path)
        (tmp_path / "block").mkdir()
        [warm] = [each for each in warm_processes(made) if each.pid != made.pid(0, 0)]
        warm.kill()
        importing = psutil.Process(until_one_blocks(tmp_path))  # it has taken the place of the other
        importing.kill()
        until_ended([importing])
        result = spawn(made, tmp_path, 1)
        until_files(result.exists, "the next rank", tmp_path)
        assert made.state(0, 0) and not made.has_ended(0, 0)
        made.fence(0)
        until_readable(made.fileno(), lambda: made.poll() or made.is_fenced(0), "the end of the ranks")


def test_more_ranks_than_warm_processes_start_all_the_same(tmp_path: Path) -> None:
    with agent(tmp_path, 1, "decimal") as made:
        until_readable(made.fileno(), made.is_ready, "the warm process")
        results = [spawn(made, tmp_path, rank) for rank in range(3)]
        until_all_ended(made, 3)
        assert all(result.exists() for result in results)


@pytest.mark.parametrize(
    ("module", "message"),
    [("no_such_module", "No module named 'no_such_module'"), ("dies_by_signal", "ended by SIGKILL while it imported")],
)
def test_an_import_that_fails_ends_the_server_and_names_the_reason(tmp_path: Path, module: str, message: str) -> None:
    (tmp_path / "dies_by_signal.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with agent(tmp_path, 2, module) as made, pytest.raises(NodeLost, match=message):
        until_readable(made.fileno(), made.is_ready, "the end of the server")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_no_warm_process_outlives_its_server(tmp_path: Path, number: signal.Signals) -> None:
    """Killed, or stopped when the launcher closes: a warm process is no rank yet, but it is ended like one."""
    with agent(tmp_path, 2, "decimal") as made:
        until_readable(made.fileno(), made.is_ready, "the warm processes")
        warm = warm_processes(made)
        made._server.send_signal(number)
        os.waitid(os.P_PID, made._server.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    until_ended(warm)


def test_a_fence_ends_the_process_group_of_a_rank_that_was_warm(tmp_path: Path) -> None:
    with agent(tmp_path, 1) as made:
        until_readable(made.fileno(), made.is_ready, "the warm process")
        result = spawn(made, tmp_path, 0, ENDLESS)
        until_files(lambda: result.exists() and result.read_text(), "the child of the rank", tmp_path)
        child = psutil.Process(int(result.read_text()))
        made.fence(0)
        until_readable(made.fileno(), lambda: made.poll() or made.has_ended(0, 0), "the end of the rank")
        until_ended([child])


def test_a_job_of_warm_processes_survives_a_kill(tmp_path: Path) -> None:
    faults = (Fault(step=1, replica=1, rank=0, point=FaultPoint.REDUCE, kind=FaultKind.KILL),)
    outcome = run(Spec(run_dir=str(tmp_path / "run"), rank_start="warm", faults=faults))
    outcome.assert_finished([0, 2])


ASKED = """
import os, sys
before = set(sys.modules)
{code}
reader, writer = os.pipe()
if os.fork() == 0:
    import torch
    os.write(writer, b"poisoned" if torch.cuda._is_in_bad_fork() else b"clean")
    os._exit(0)
print(os.read(reader, 100).decode())
"""


@pytest.mark.parametrize(
    "code",
    [
        f"from megatron_recover.cluster import forkserver; forkserver._import({PRELOAD})",
        "from megatron_recover.cli import run; import megatron_recover.cluster.launcher",
    ],
    ids=["the imports of the fork server", "the launcher"],
)
def test_nothing_that_forks_asks_the_cuda_driver(code: str) -> None:
    """CUDA is of no use in a fork from a process that has: torch raises "Cannot re-initialize CUDA in forked subprocess"."""
    done = subprocess.run(
        [sys.executable, "-c", ASKED.format(code=code)], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "clean"


def test_the_imports_of_a_warm_process_touch_no_device() -> None:
    code = (
        "import torch\nfrom megatron_recover.cluster.rank_process import preload\n"
        "from megatron_recover.config import importing_without_driver\n"
        f"with importing_without_driver(hide_devices=False):\n    [preload(name) for name in {PRELOAD}]\n"
        "print(torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "False"


def test_on_a_processor_nothing_imports_the_compiler() -> None:
    """It takes a second of every start, and Megatron's decorators alone would import it."""
    code = f"import sys; from megatron_recover.cluster import forkserver; forkserver._import({PRELOAD})"
    code += "; print('torch._inductor.compile_fx' in sys.modules, 'torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "False True"
