"""A real Slurm on this machine: munged, slurmctld and slurmds, started by hand in a temporary folder, ended by their pid files.

Everything listens on loopback, on free ports, and nothing of an installed Slurm is read or changed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "sacct")
_WAIT_S = 30.0


def why_not() -> str:
    """Why no Slurm can be started here; empty if one can."""
    if lacking := [each for each in PROGRAMS if shutil.which(each) is None]:
        return f"no {', '.join(lacking)}: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "slurmd starts jobs as root only"


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def configuration(folder: Path, *, nodes: str, num_nodes: int, ports: Sequence[int], extra: str = "") -> str:
    """The text of slurm.conf: `nodes` is the host list of all nodes, which are all this machine."""
    host = socket.gethostname().partition(".")[0]
    numbers = ",".join(map(str, ports[1 : num_nodes + 1]))
    return f"""\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdTimeout=10
KillWait=10
InactiveLimit=0
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SchedulerParameters=sched_interval=1
{extra}
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{numbers}] CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=p Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""


class Machine:
    """A running slurmctld, and the slurmds of its first nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str, **options: object) -> subprocess.CompletedProcess[str]:
        """A Slurm command that asks this slurmctld."""
        given = {"env": self.environment, "capture_output": True, "text": True, "timeout": 60, **options}
        return subprocess.run(command, **given)  # type: ignore[call-overload]

    def show(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def until(self, condition: Callable[[], object], what: str, seconds: float = _WAIT_S) -> None:
        """Wait for a condition, or fail with the ends of all logs."""
        give_up_at = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > give_up_at:
                logs = "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in sorted(self.folder.glob("*.log")))
                raise AssertionError(f"{what} did not come about in {seconds} s\n{logs}")
            time.sleep(0.1)


@contextlib.contextmanager
def started(
    folder: Path, *, nodes: str = "n1", num_nodes: int = 1, slurmds: Sequence[str] = ("n1",), extra: str = ""
) -> Iterator[Machine]:
    """A slurmctld with these nodes, and a slurmd for each node of `slurmds`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state").mkdir()
    folder.chmod(0o755)
    ports = _free_ports(num_nodes + 1)
    (folder / "slurm.conf").write_text(configuration(folder, nodes=nodes, num_nodes=num_nodes, ports=ports, extra=extra))
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    machine = Machine(folder)
    try:
        places = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        _ok(machine.run("munged", "--force", *(f"--{flag}={folder}/munge.{name}" for flag, name in places.items())))
        _ok(machine.run("slurmctld", "-c", "-f", f"{folder}/slurm.conf"))
        for each in slurmds:
            (folder / f"spool-{each}").mkdir()
            _ok(machine.run("slurmd", "-f", f"{folder}/slurm.conf", "-N", each))
        machine.until(lambda: "UP" in machine.run("scontrol", "ping").stdout, "an answer of slurmctld")
        if slurmds:
            machine.until(lambda: _are_idle(machine, len(slurmds)), "idle nodes")
        yield machine
    finally:
        for pid_file in ("slurmctld.pid", *(f"slurmd-{each}.pid" for each in slurmds), "munge.pid"):
            _end(folder / pid_file)


def _are_idle(machine: Machine, number: int) -> bool:
    return machine.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split().count("idle") >= number


def _ok(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, f"{done.args}: {done.stdout}{done.stderr}"


def _end(pid_file: Path) -> None:
    """End the process that a pid file names, and wait for its end."""
    try:
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
    except (OSError, ValueError):
        return
    give_up_at = time.monotonic() + 2  # slurmctld takes longer to store what nobody needs
    while time.monotonic() < give_up_at:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
