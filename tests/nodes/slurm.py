"""A real Slurm in the nodes of the tests: slurmctld in the last one, slurmd in each other, munge in all.

Needs Debian's `slurm-wlm` and `munge`. What slurmctld is told by is short: a node that is silent for `TIMEOUT_S` is down, a job
that is told to end is killed after `KILL_WAIT_S`, and a requeued job waits for `CREDENTIAL_S`.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tests.nodes.nodes import Network, Node, Program

TIMEOUT_S = 10
KILL_WAIT_S = 10
CREDENTIAL_S = 5
CPUS = 8
"""Of each node, as Slurm believes."""
_DISK = "/run/disk"
"""A short name of the folder of a node that outlives a power loss: slurmstepd has a socket there, whose path has a limit."""
_DAEMONS = ("munged", "slurmctld", "slurmd")
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={controller}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge/munge.socket.2,cred_expire={credential_s}
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
StateSaveLocation={disk}/slurmctld
SlurmdSpoolDir={disk}/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={shared}/slurmctld.log
SlurmdLogFile={shared}/slurmd-%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
SlurmdParameters=config_overrides
ReturnToService=1
SlurmdTimeout={timeout_s}
KillWait={kill_wait_s}
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=1
JobCompType=jobcomp/filetxt
JobCompLoc={shared}/completed.txt
NodeName={nodes} CPUs={cpus} RealMemory=4000
PartitionName=all Nodes=ALL Default=YES OverSubscribe=EXCLUSIVE MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Return why no Slurm can be started here; empty: it can."""
    missing = [name for name in (*_DAEMONS, "srun", "sbatch", "sacct") if shutil.which(name) is None]
    return f"there is no {', '.join(missing)} (Debian: apt-get install slurm-wlm munge)" if missing else ""


class Slurm:
    """Slurm in a network: the last node is where it is controlled, and users log in; jobs run on the others."""

    def __init__(self, network: Network) -> None:
        """Start all daemons, and wait until all nodes are idle."""
        self.network, self.controller, self.nodes = network, network.nodes[-1], network.nodes[:-1]
        self.environment = {"SLURM_CONF": str(network.shared / "slurm.conf")}
        """Of all programs of Slurm, and of jobs."""
        self._key = network.shared / "munge.key"
        self._key.write_bytes(secrets.token_bytes(128))
        self._key.chmod(0o400)
        (network.shared / "slurm.conf").write_text(
            _CONFIGURATION.format(
                controller=self.controller.name, address=self.controller.address, credential_s=CREDENTIAL_S,
                disk=_DISK, shared=network.shared, timeout_s=TIMEOUT_S, kill_wait_s=KILL_WAIT_S,
                nodes=",".join(each.name for each in self.nodes), cpus=CPUS,
            )
        )  # fmt: skip
        self.daemons: dict[tuple[str, str], Program] = {}
        self._start_munge(self.controller)
        self._start(self.controller, "slurmctld", "-D", "-c")
        for node in self.nodes:
            self.start_node(node)
        self.until(self._are_idle, "all nodes are idle")

    def _are_idle(self) -> bool:
        with contextlib.suppress(OSError):  # slurmctld may not listen yet
            return set(self.states().values()) == {"IDLE"}
        return False

    def start_node(self, node: Node, *, rebooted: bool = False) -> None:
        """Start the daemons of a node that is on. `rebooted`: slurmd reports that."""
        self._start_munge(node)
        self._start(node, "slurmd", "-D", *["-b"] * rebooted)

    def _start_munge(self, node: Node) -> None:
        words = (
            f"ln -s {self.network.local} {_DISK} && mkdir -m 0755 /run/munge && exec munged --force --foreground"
            f" --key-file={self._key} --pid-file=/run/munged.pid --log-file=/run/munged.log --seed-file=/run/munged.seed"
        )
        self._start(node, "munged", shell=words)
        socket = Path(f"/proc/{node.pid}/root/run/munge/munge.socket.2")
        self.until(socket.exists, f"munge of {node.name}")

    def _start(self, node: Node, name: str, *flags: str, shell: str = "") -> None:
        command = ["bash", "-c", shell] if shell else [name, *flags]
        output = self.network.shared / f"{name}-{node.name}.out"
        self.daemons[name, node.name] = node.start(command, self.environment, output=output)

    def run(self, *command: str, deadline_s: float = 60.0) -> str:
        """Run a program where users log in, and return what it prints; raises OSError if it fails."""
        program = self.controller.start(command, self.environment)
        if program.wait(deadline_s):
            raise OSError(f"{shlex.join(command)}: {program.text()}")
        return program.text()

    def submit(self, script: str, *flags: str) -> str:
        """Submit a batch script; return the id of its job."""
        path = self.network.shared / f"batch-{time.monotonic_ns()}.sh"
        path.write_text(script)
        return self.run("sbatch", "--parsable", f"--chdir={self.network.shared}", *flags, str(path)).strip()

    def job(self, job: str) -> dict[str, str]:
        """Return what slurmctld knows of a job."""
        return _fields(self.run("scontrol", "show", "job", job, "-o"))

    def state(self, job: str) -> str:
        """Return the state of a job."""
        return self.job(job)["JobState"]

    def node(self, node: Node) -> dict[str, str]:
        """Return what slurmctld knows of a node."""
        return _fields(self.run("scontrol", "show", "node", node.name, "-o"))

    def states(self) -> dict[str, str]:
        """Return the state of each node, as `sinfo` has it, with marks such as `*` for one that does not answer."""
        lines = self.run("sinfo", "-N", "-h", "-o", "%N %T").split("\n")
        return {name: state.upper() for name, state in (line.split() for line in lines if line)}

    def accounted(self, job: str) -> str:
        """Return the state of a job that is over, as `sacct` has it; empty: it has nothing."""
        number = self.job(job)["JobId"]
        command = ["sacct", "-c", f"--file={self.network.shared / 'completed.txt'}", "-n", "-P", "--format=jobid,state"]
        lines = self.run(
            "bash", "-c", f"{shlex.join(command)} 2>/dev/null"
        ).split()  # it complains of fields that it has no use for
        states = [state for number_, _, state in (line.partition("|") for line in lines) if number_ == number]
        return states[-1] if states else ""

    def processes(self, node: Node, *words: str) -> list[psutil.Process]:
        """Return the processes of a node that are none of Slurm's daemons, or those that match `words`."""
        if words:
            return node.find_process(*words)
        return [each for each in node.processes() if _name(each) not in (*_DAEMONS, "slurmstepd")]

    def kill(self, node: Node, name: str) -> None:
        """Kill all processes of a node with this name (slurmd, slurmstepd), and nothing else."""
        for process in node.processes():
            if _name(process) == name:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def until(self, condition: Callable[[], object], what: str, deadline_s: float = 60.0) -> None:
        """Return when `condition()` holds; raises AssertionError at the deadline."""
        end = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"not within {deadline_s:g} s: {what}\n{self.describe()}")
            time.sleep(0.2)

    def describe(self) -> str:
        """Return what Slurm says of itself."""
        texts = [f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.network.shared.glob("*.log"))]
        texts += [f"--- {name}: {each.poll()} {each.text()[-500:]}" for name, each in self.daemons.items()]
        with contextlib.suppress(OSError):
            texts += [self.run("squeue", "-a"), self.run("sinfo", "-N", "-l")]
        return "\n".join(texts)

    def leftovers(self) -> dict[str, list[str]]:
        """Return what jobs left in nodes: processes, ports, and files in /dev/shm and /tmp."""
        daemons = {node.name: {each.pid for each in node.processes() if _name(each) in _DAEMONS} for node in self.nodes}
        left = {
            node.name: [line for line in node.leftovers() if not _is_daemon(line, daemons[node.name])] for node in self.nodes
        }
        return {name: lines for name, lines in left.items() if lines}

    def assert_nothing_left(self, deadline_s: float = 30.0) -> None:
        """Fail unless jobs have left nothing in any node."""
        self.until(lambda: not self.leftovers(), f"nothing is left of jobs: {self.leftovers()}", deadline_s)


def _fields(line: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S*)", line))


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _is_daemon(leftover: str, pids: set[int]) -> bool:
    return leftover == f"port {_SLURMD_PORT}" or any(leftover.startswith(f"process {pid}:") for pid in pids)


_SLURMD_PORT = 6818


@contextlib.contextmanager
def slurm(
    make_network: Callable[..., Network], num_nodes: int = 4, settings: Mapping[str, object] | None = None
) -> Iterator[Slurm]:
    """A Slurm on so many nodes and one for its control. Skips the test where there is none."""
    if reason := why_not():
        pytest.skip(reason)
    yield Slurm(make_network(num_nodes + 1, **(settings or {})))
