"""`run` on several nodes, each a process here: what does not fit together is refused on all, and nothing is left."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megatron_recover.authentication.key import key_of_several
from megatron_recover.cli import run, run_dirs, several_nodes
from megatron_recover.cluster import joining
from megatron_recover.cluster.meeting import MISSING_JOBS, Meeting
from megatron_recover.cluster.save_lock import SaveLock
from megatron_recover.cluster.signals import EndRequest
from megatron_recover.config import RecoverConfig
from megatron_recover.core.exit_code import GOES_ON_ELSEWHERE, ExitCode
from megatron_recover.core.placement import place
from megatron_recover.host.addresses import HOST, bind_free
from megatron_recover.host.reachable import is_loopback, own_address
from tests import forks
from tests.host.test_addresses import free_range

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).resolve().parents[2]
FLAGS = shlex.split(
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 1 --global-batch-size 8 --train-iters 4 --lr 1e-3 --tokenizer-type NullTokenizer"
    " --vocab-size 257 --mock-data"
)


class Nodes:
    """The launchers of one job on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.script = folder / "train.py"
        self.script.write_text("raise SystemExit('it must not run')\n")
        self.key = folder / "key"
        self.key.write_text("k" * 44)
        self.key.chmod(0o600)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.host = "127.0.0.1"
        self.launchers: list[forks.Program | subprocess.Popen[str]] = []
        self.outputs: list[Path] = []

    def start(
        self, number: int | None, line: str = "--nnodes 2 --nproc-per-node 2", flags: str = "", key: Path | None = None
    ) -> None:
        command = [
            sys.executable, "-m", "megatron_recover", "run", *line.split(), *self.where(number),
            "--key-file", str(key or self.key), "--run-dir", str(self.run_dir), str(self.script), *FLAGS, *flags.split(),
        ]  # fmt: skip
        self.outputs.append(self.folder / f"output {len(self.outputs)}")
        with self.outputs[-1].open("w") as output:
            self.launchers.append(forks.start(command, cwd=ROOT, environment=os.environ, output=output.fileno()))

    def start_two_and_one_that_idles(self) -> None:
        """The last one comes when the others prepare."""
        self.script.write_text("import time; time.sleep(600)\n")
        for number in (0, 1):
            self.start(number)
        self.until_said(1, "importing torch")
        self.start(1)
        self.until_said(2, "this node waits for the end of the job")

    def where(self, number: int | None) -> list[str]:
        """The flags that say where a node meets the others; without a number it finds them through a file."""
        if number is None:
            return ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"file:{self.folder / 'job' / 'endpoint'}"]
        return ["--node-rank", str(number), "--master-addr", self.host, "--master-port", str(self.port)]

    def end(self) -> list[tuple[int, str]]:
        """Return exit code and output of each."""
        return [self.end_of(index) for index in range(len(self.launchers))]

    def end_of(self, index: int) -> tuple[int, str]:
        """Return exit code and output of one."""
        return self.launchers[index].wait(60.0), self.outputs[index].read_text()

    def until(self, condition: Callable[[], object]) -> None:
        until = time.monotonic() + 60.0
        while not condition():
            assert time.monotonic() < until, [each.read_text() for each in self.outputs]
            time.sleep(0.02)

    def until_said(self, index: int, text: str) -> None:
        self.until(lambda: text in self.outputs[index].read_text())

    def until_linked(self, index: int) -> None:
        """Wait until a launcher has a connection to the coordinator."""
        process = psutil.Process(self.launchers[index].pid)
        self.until(
            lambda: any(
                each.status == psutil.CONN_ESTABLISHED and each.raddr and each.raddr.port == self.port
                for each in process.net_connections("tcp")
            )
        )

    def assert_nothing_left(self) -> None:
        assert not self.run_dir.exists()
        until = time.monotonic() + 20.0
        while left := [each for each in psutil.process_iter(["name", "environ"]) if self._is_ours(each)]:
            assert time.monotonic() < until, left
            time.sleep(0.05)

    def _is_ours(self, process: psutil.Process) -> bool:
        return process.info["name"] == "coordinator" and any(
            each.laddr and each.laddr.port == self.port for each in process.net_connections("tcp")
        )


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    for each in made.launchers:
        if each.poll() is None:
            each.kill()


Change = Callable[[Nodes], None]


def other_script(nodes: Nodes) -> None:
    nodes.start(0)
    nodes.script = nodes.folder / "other.py"
    nodes.script.write_text("pass\n")
    nodes.start(1)


def other_flags(nodes: Nodes) -> None:
    nodes.start(0)
    nodes.start(1, flags="--clip-grad 2.0")


def other_flags_and_a_file(nodes: Nodes) -> None:
    nodes.start(None)
    nodes.start(None, flags="--clip-grad 2.0")


def same_rank(nodes: Nodes) -> None:
    nodes.start(0, "--nnodes 3 --nproc-per-node 2")
    nodes.start(1, "--nnodes 3 --nproc-per-node 2")
    nodes.start(1, "--nnodes 3 --nproc-per-node 2")


def too_many_replicas(nodes: Nodes) -> None:
    nodes.start(0, "--nnodes 2 --nproc-per-node 2 --replicas 5")
    nodes.start(1, "--nnodes 2 --nproc-per-node 2 --replicas 5")


def too_many_replicas_and_the_own_name(nodes: Nodes) -> None:
    """A name that resolves to loopback here, as in many containers, is that of another address of this machine."""
    if is_loopback(own_address(interface=None, local_addr=None)):
        pytest.skip("this machine has no address that others reach")
    nodes.host = socket.gethostname()
    too_many_replicas(nodes)


def no_script_on_one(nodes: Nodes) -> None:
    """The third node comes when the others have ended."""
    nodes.start(0, "--nnodes 3 --nproc-per-node 2")
    nodes.script.unlink()
    nodes.start(1, "--nnodes 3 --nproc-per-node 2")
    nodes.end_of(1)
    nodes.script.touch()
    nodes.start(2, "--nnodes 3 --nproc-per-node 2")


def no_script_on_the_first(nodes: Nodes) -> None:
    nodes.start(1)
    nodes.until_said(0, "meets the others at")
    nodes.script.unlink()
    nodes.start(0)


def no_script_on_one_of_a_file(nodes: Nodes) -> None:
    nodes.start(None)
    nodes.until_said(0, "meets the others at")
    nodes.script.unlink()
    nodes.start(None)


def two_first_nodes(nodes: Nodes) -> None:
    nodes.start(0)
    nodes.until_said(0, "meets the others at")
    nodes.start(0)


def a_run_directory_of_another_job(nodes: Nodes) -> None:
    nodes.run_dir.mkdir()
    (nodes.run_dir / "events.jsonl").touch()
    nodes.start(0)
    nodes.start(1)


def a_run_directory_of_another_job_by_a_file(nodes: Nodes) -> None:
    nodes.run_dir.mkdir()
    (nodes.run_dir / "events.jsonl").touch()
    nodes.start(None)
    nodes.start(None)


def too_few_nodes(nodes: Nodes) -> None:
    nodes.start(0, "--nnodes 2:3 --nproc-per-node 2 --rdzv-conf join_timeout=1")


@pytest.mark.parametrize(
    ("start", "why"),
    [
        (other_script, ": the script is "),
        (other_flags, ": --clip-grad is "),
        (other_flags_and_a_file, ": --clip-grad is "),
        (same_rank, "--node-rank 1 is also that of "),
        (too_many_replicas, "5 replicas of 1 rank need 5 slots, and the nodes have 4"),
        (too_many_replicas_and_the_own_name, "5 replicas of 1 rank need 5 slots, and the nodes have 4"),
        (no_script_on_one, "there is no training script"),
        (no_script_on_the_first, "there is no training script"),
        (no_script_on_one_of_a_file, "there is no training script"),
        (two_first_nodes, "give another port, the same on all nodes, and each node its own --node-rank"),
        (a_run_directory_of_another_job, "is not empty"),
        (a_run_directory_of_another_job_by_a_file, "is not empty"),
        (too_few_nodes, "1 of 2 nodes was there after 1 s"),
    ],
)
def test_what_does_not_fit_together_is_refused_on_all_nodes_before_anything_starts(
    nodes: Nodes, start: Change, why: str
) -> None:
    start(nodes)
    for code, output in nodes.end():
        expected = ExitCode.TOO_FEW_REPLICAS if start is too_few_nodes else ExitCode.BAD_INPUT
        assert code == expected and why in output, output
        assert "Traceback" not in output and "it must not run" not in output
    if start in (a_run_directory_of_another_job, a_run_directory_of_another_job_by_a_file):
        (nodes.run_dir / "events.jsonl").unlink()  # it is as it was
        nodes.run_dir.rmdir()
    nodes.assert_nothing_left()


def test_jobs_of_an_array_that_wait_in_vain_end_with_one_message_and_stop_their_chain(nodes: Nodes) -> None:
    save = nodes.folder / "save"
    saves = f"--save {save} --load {save} --save-interval 2"
    for _ in range(2):
        nodes.start(None, "--nnodes 3 --nproc-per-node 2 --chained --rdzv-conf join_timeout=15", saves)
    ends = set()
    for code, output in nodes.end():
        assert code == ExitCode.TOO_FEW_REPLICAS, output
        ends.update(line for line in output.splitlines() if "exit code" in line)
    [end] = ends
    name = socket.gethostname()
    assert f"2 of 3 nodes were there after 15 s ({name}, {name}); {MISSING_JOBS}" in end
    assert (save / "STOP").read_text().startswith(f"exit code 10: 2 of 3 nodes were there after 15 s ({name}, {name}); ")
    nodes.assert_nothing_left()


def test_an_endpoint_that_only_this_machine_reaches_is_named_before_the_wait_and_at_its_end(nodes: Nodes) -> None:
    nodes.where = lambda number: ["--node-rank", str(number), "--master-port", str(nodes.port)]  # type: ignore[method-assign]
    nodes.start(0, "--nnodes 2 --nproc-per-node 2 --rdzv-conf join_timeout=1")
    code, output = nodes.end_of(0)
    said = "the nodes meet at 127.0.0.1, which only this machine reaches; give --master-addr, the name or address of node 0"
    before, _, after = output.partition("meets the others at")
    assert (code, f"megatron-recover run: {said}\n" in before) == (ExitCode.TOO_FEW_REPLICAS, True), output
    assert after.endswith(f"or give --nnodes MIN:MAX; {said}\n"), output


@pytest.mark.parametrize("where", ["address", "file"])
def test_a_mistake_is_told_to_nobody_where_no_other_node_is_and_no_endpoint_is_claimed_for_it(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (several_nodes, joining):
        monkeypatch.setattr(module, "TELL_S", 0.3)
    (tmp_path / "key").write_text("k" * 44)
    (tmp_path / "key").chmod(0o600)
    with bind_free(HOST) as free:
        meeting = Meeting(
            least_nodes=2, most_nodes=2, host=HOST, port=free.getsockname()[1], node_rank=1, key_file=tmp_path / "key",
            endpoint_file=tmp_path / "endpoint" if where == "file" else None,
        )  # fmt: skip
    begun_at = time.monotonic()
    several_nodes.report(SimpleNamespace(nodes=meeting), "no such script", EndRequest())
    assert 0.2 < time.monotonic() - begun_at < 10.0
    assert [each.name for each in tmp_path.iterdir()] == ["key"]


def test_a_second_host_that_takes_itself_for_the_first_is_refused_by_the_one_at_the_endpoint(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """127.0.0.2 stands for the second host, which finds that the endpoint 127.0.0.1 is no address of its own."""
    monkeypatch.setattr(joining.reachable, "interfaces", dict)
    monkeypatch.setattr(joining.reachable, "is_loopback", lambda address: address == "127.0.0.2")
    nodes.start(0)
    nodes.until_said(0, "meets the others at")
    meeting = Meeting(least_nodes=2, most_nodes=2, host=HOST, port=nodes.port, node_rank=0, local_addr="127.0.0.2")
    key = key_of_several(nodes.key)
    with pytest.raises(joining.NotMet, match=f"{socket.gethostname()}: --node-rank 0 is also that of {socket.gethostname()}"):
        joining.Place(meeting, RecoverConfig().deadlines, EndRequest()).join(
            key=key, level="faults", slots=2, run_dir=lambda: nodes.folder, run_id="", alike=()
        )
    code, output = nodes.end_of(0)
    assert code == ExitCode.BAD_INPUT and "--node-rank 0 is also that of" in output, output
    nodes.assert_nothing_left()


def chained(nodes: Nodes, name: str) -> tuple[str, str, Path]:
    """The launcher's flags of a chain on two nodes, the script's, and the folder that it saves to."""
    save = nodes.folder / name
    return "--nnodes 2 --nproc-per-node 2 --chained", f"--save {save} --load {save} --save-interval 2", save


def test_what_the_nodes_find_together_ends_a_chain_on_the_node_of_the_coordinator(nodes: Nodes) -> None:
    starts = [chained(nodes, name) for name in ("save", "other")]
    for number, (line, saves, _) in enumerate(starts):
        nodes.start(number, line, saves)
    assert [code for code, _ in nodes.end()] == [ExitCode.BAD_INPUT, ExitCode.BAD_INPUT]
    assert [(save / "STOP").exists() for _, _, save in starts] == [True, False]
    nodes.assert_nothing_left()


def test_a_port_of_a_file_that_is_in_use_ends_no_chain(nodes: Nodes) -> None:
    line, saves, save = chained(nodes, "save")
    first, last = free_range("0.0.0.0", 10)
    with ExitStack() as taken:
        for port in range(first, last + 1):
            taken.enter_context(socket.create_server(("0.0.0.0", port)))
        for _ in range(2):
            nodes.start(None, f"{line} --port-range {first}-{last}", saves)
        ends = nodes.end()
    assert [code for code, _ in ends] == [ExitCode.BAD_INPUT, ExitCode.BAD_INPUT]
    assert any("no job begins here, as " in output for _, output in ends), ends
    assert not (save / "STOP").exists()


def test_another_key_is_told_to_the_node_that_has_it_and_the_others_wait_on(nodes: Nodes, tmp_path: Path) -> None:
    other = tmp_path / "other key"
    other.write_text("x" * 44)
    other.chmod(0o600)
    nodes.start(0, "--nnodes 2 --nproc-per-node 2 --rdzv-conf join_timeout=20")
    line, saves, save = chained(nodes, "save")
    nodes.start(1, line, saves, key=other)
    code, output = nodes.end_of(1)
    assert code == ExitCode.BAD_INPUT
    assert "give the same --key-file (or MEGATRON_RECOVER_KEY) on all nodes" in output
    assert not (save / "STOP").exists(), "the endpoint may be another job's for a time"
    assert nodes.launchers[0].poll() is None
    nodes.launchers[0].send_signal(signal.SIGINT)
    code, output = nodes.end_of(0)
    assert code == ExitCode.INTERRUPTED and f"{socket.gethostname()}: SIGINT before training began" in output
    nodes.assert_nothing_left()


def test_any_signals_to_a_node_that_waits_end_the_job_on_all_nodes_that_are_there(nodes: Nodes) -> None:
    for number in (0, 1):
        nodes.start(number, "--nnodes 3 --nproc-per-node 2")
    nodes.until_linked(1)
    for number in (signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM, signal.SIGTERM):
        nodes.launchers[1].send_signal(number)
    ends = set()
    for code, output in nodes.end():
        assert code == ExitCode.INTERRUPTED, output
        [end] = [line for line in output.splitlines() if "exit code" in line]
        ends.add(end)
    [end] = ends  # which signal is seen first is up to the kernel
    assert re.search(rf"exit code 15 \(interrupted\): {socket.gethostname()}: SIG(USR2|HUP|TERM) before training began$", end)
    nodes.assert_nothing_left()


def test_a_signal_to_a_node_that_waits_for_its_coordinator_or_an_endpoint_ends_it_at_once(nodes: Nodes) -> None:
    nodes.start(1)
    (nodes.folder / "job").mkdir()
    (nodes.folder / "job" / "endpoint.owner").write_text("a node that has died")
    nodes.start(None)
    nodes.until_said(0, "meets the others at")
    nodes.until_said(1, "waits for the address of the endpoint")
    for each in nodes.launchers:
        each.send_signal(signal.SIGUSR1)
    for code, output in nodes.end():
        assert code == ExitCode.INTERRUPTED and "SIGUSR1 before training began" in output, output
    nodes.assert_nothing_left()


def test_an_idle_node_leaves_by_a_signal_alone_and_one_of_the_job_ends_it_for_all(nodes: Nodes) -> None:
    nodes.start_two_and_one_that_idles()
    nodes.start(0)  # once more, by mistake
    code, output = nodes.end_of(3)
    assert code == ExitCode.BAD_INPUT and "nothing can listen at" in output, output
    assert f"this job already runs here, at 127.0.0.1:{nodes.port}\n" in output and "waits for the end" not in output, output
    nodes.launchers[2].send_signal(signal.SIGTERM)
    code, output = nodes.end_of(2)
    assert code == ExitCode.INTERRUPTED and "the job does not use this node, and goes on" in output, output
    assert nodes.launchers[0].poll() is None and nodes.launchers[1].poll() is None
    nodes.launchers[1].send_signal(signal.SIGTERM)
    for index in (0, 1):
        code, output = nodes.end_of(index)
        assert code == ExitCode.INTERRUPTED and "exit code 15 (interrupted)" in output, output
        assert f"{socket.gethostname()}: SIGTERM before training began" in output, output
    nodes.assert_nothing_left()


def test_an_idle_node_is_told_that_the_coordinator_is_gone_not_that_there_was_none(nodes: Nodes) -> None:
    nodes.start_two_and_one_that_idles()
    [coordinator] = [each for each in psutil.Process(nodes.launchers[0].pid).children() if each.name() == "coordinator"]
    coordinator.kill()
    code, output = nodes.end_of(2)
    assert code == ExitCode.FAILED and "the coordinator is gone" in output and "did not use this node" in output, output
    for index in (0, 1):
        assert nodes.end_of(index)[0] == ExitCode.FAILED


def test_a_folder_for_logs_that_cannot_be_made_is_the_mistake_that_all_nodes_hear(nodes: Nodes) -> None:
    nodes.start(0, f"--nnodes 2 --nproc-per-node 2 --log-dir {nodes.script}")
    nodes.start(1)
    for code, output in nodes.end():
        assert code == ExitCode.BAD_INPUT and f"--log-dir {nodes.script}" in output, output
    nodes.assert_nothing_left()


def test_no_node_complains_of_a_folder_that_node_0_has_removed_after_a_refusal(nodes: Nodes, tmp_path: Path) -> None:
    """Node 1 imports, and still records, when node 0 finds that another job saves to the folder."""
    nodes.script.write_text("import time; time.sleep(600)\n")
    lock = SaveLock(tmp_path / "save", tmp_path / "other", None)
    try:
        for number in (0, 1):
            nodes.start(number, flags=f"--save {tmp_path / 'save'} --save-interval 2")
        for code, output in nodes.end():
            assert code == ExitCode.BAD_INPUT and "is in use by another job" in output, output
            assert not [words for words in ("WARNING", "is missing", "are missing", "The run ") if words in output], output
    finally:
        lock.release(0.0)
    nodes.assert_nothing_left()


@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize("node_0_is_first", [False, True])
def test_whichever_node_is_last_leaves_no_part_of_a_run_directory(tmp_path: Path, node_0_is_first: bool, existed: bool) -> None:
    """Node 1 may also make its part after node 0 has removed all."""
    run_dir = tmp_path / "run"
    part = run_dir / "nodes" / "1"
    (run_dir / "logs").mkdir(parents=True)
    if node_0_is_first:
        run_dirs.remove(run_dir, existed=existed)
    (part / "logs").mkdir(parents=True)
    run_dirs.remove_part(part, existed=existed)
    if not node_0_is_first:
        run_dirs.remove(run_dir, existed=existed)
        run_dirs.remove(run_dir, existed=existed)
    assert run_dir.exists() == existed and not list(tmp_path.rglob("run/*"))


def test_several_nodes_without_a_key_are_refused_with_the_line_to_add(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    line = ["run", "--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", str(script), *FLAGS]
    code, output = forks.run([sys.executable, "-m", "megatron_recover", *line], cwd=ROOT, deadline_s=60.0)
    assert code == ExitCode.BAD_INPUT and "chmod 600" in output and "--key-file" in output


@pytest.mark.parametrize("save", [None, "/x"])
def test_the_line_about_the_coordinator_says_whether_a_checkpoint_is_left_however_save_is_written(save: str | None) -> None:
    job: Any = SimpleNamespace(
        placement=place([1, 1], num_replicas=2, num_ranks=1, tp=1), node=0, nodes=[SimpleNamespace(name="n0")] * 2,
        config=RecoverConfig(), is_late=False,
        num_ranks=1, num_ranks_here=1, replicas_here=(0,), argv=("train.py", "--save=/x"), save=save and Path(save),
    )  # fmt: skip
    _, line, *_ = several_nodes.notes(job)
    assert ("without a checkpoint" in line) == (save is None)


def test_a_node_with_another_run_directory_is_told_that_it_is_not_used(tmp_path: Path) -> None:
    job: Any = SimpleNamespace(
        placement=place([1, 1], num_replicas=2, num_ranks=1, tp=1), node=1, nodes=[SimpleNamespace(name="n0")] * 2,
        config=RecoverConfig(), is_late=False,
        num_ranks=1, num_ranks_here=1, replicas_here=(1,), save=None, run_dir=tmp_path / "a" / "nodes" / "1",
    )  # fmt: skip
    first = next(several_nodes.notes(job, tmp_path / "b"))
    assert first == f"--run-dir {tmp_path / 'b'} changes nothing here: the run directory is that of node 0, {tmp_path / 'a'}"
    for wanted in (tmp_path / "a", None):
        assert not any("--run-dir" in line for line in several_nodes.notes(job, wanted))


@pytest.mark.parametrize(("reason", "are"), [("training finished", "are"), (f"SIGTERM; {GOES_ON_ELSEWHERE}", "will be")])
def test_the_report_of_a_job_that_goes_on_is_not_said_to_be_there(reason: str, are: str, capsys) -> None:  # noqa: ANN001
    launcher: Any = SimpleNamespace(has_begun=True, knows_end=True, reason=reason)
    job: Any = SimpleNamespace(node=1, run_dir=Path("/runs/a/nodes/1"), nodes=[SimpleNamespace(name="n1")])
    assert run._ended(launcher, job, ExitCode.INTERRUPTED, existed=False, quiet=False) == ExitCode.INTERRUPTED
    assert f"summary and report of all nodes {are} on n1, in /runs/a\n" in capsys.readouterr().out


def test_an_error_that_names_no_file_is_told_as_it_is() -> None:
    error = OSError(errno.EMFILE, "Too many open files")
    assert several_nodes.mistake_of(error) == str(error)
    named = several_nodes.mistake_of(PermissionError(errno.EACCES, "Permission denied", "a.py"))
    assert named == "a.py cannot be read (Permission denied); make it readable, or name another"


def test_the_coordinator_may_open_as_many_files_as_the_hard_limit_allows(nodes: Nodes) -> None:
    """The soft limit of most systems is 1024. The coordinator has a connection for each node and one for each replica."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        command = [
            sys.executable, "-m", "megatron_recover", "run", "--nnodes", "2", "--nproc-per-node", "1", *nodes.where(0),
            "--key-file", str(nodes.key), "--run-dir", str(nodes.run_dir), str(nodes.script), *FLAGS,
        ]  # fmt: skip
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, text=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    nodes.launchers = [process]
    nodes.until(lambda: psutil.Process(process.pid).children())
    [coordinator] = psutil.Process(process.pid).children()
    nodes.until(lambda: coordinator.name() == "coordinator")
    assert coordinator.rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
    process.terminate()
    assert process.wait(60.0) == ExitCode.INTERRUPTED
    nodes.assert_nothing_left()


def test_node_0_is_heard_while_it_looks_whether_the_last_job_on_the_save_folder_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the lock is free and names a job of another host, that takes 15 s. All consoles told that node 0 was silent."""
    events: list[str] = []

    @contextlib.contextmanager
    def kept() -> Iterator[None]:
        events.append("begins")
        yield
        events.append("ends")

    joined: Any = SimpleNamespace(coordinator=None, membership=SimpleNamespace(kept=kept))
    job: Any = SimpleNamespace(save=Path("save"), run_dir=Path("run"), node=0, nodes=())
    monkeypatch.setattr(run, "SaveLock", lambda *given: events.append("looks"))
    run._locked_save(job, joined)
    assert events == ["begins", "looks", "ends"]
    run._locked_save(job, None)
    assert events[3:] == ["looks"], "a job of one node has nobody to tell"
