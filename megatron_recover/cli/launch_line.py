"""The launch line: torchrun's flags, what becomes of each, and where the script begins.

`torchrun FLAGS SCRIPT ...` becomes `megatron-recover run FLAGS SCRIPT ...`. The first word that is
no flag of the launcher is the script. All words behind it are the script's, whatever their
spelling. As for torchrun, a variable PET_NAME stands for a flag that is not given.

`TORCHRUN` lists every flag of torch/distributed/run.py (`get_args_parser`); a test compares them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from megatron_recover.host.gpus import has_gpu


class Flag(msgspec.Struct, frozen=True):
    """A flag of torchrun."""

    name: str
    """Long name with hyphens; the spelling with underscores is a flag, too."""
    fate: Literal["taken", "noted", "refused"]
    """taken: it means what it means to torchrun. noted: one line says why it changes nothing here.
    refused: the command ends with exit code 2."""
    text: str
    """taken: the meaning. noted: why nothing changes. refused: the remedy."""
    takes_value: bool = True
    short: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Return all spellings, short ones first."""
        words = (self.short, self.name, f"--{self.name[2:].replace('-', '_')}")
        return tuple(dict.fromkeys(word for word in words if word))

    @property
    def dest(self) -> str:
        """Return the name of the argument's value."""
        return self.name[2:].replace("-", "_")


_ONE_NODE = "all processes are on this node, and they meet without an address"
_LOGS = "every rank's output is in the logs of --run-dir; the console shows the writer's"
TORCHRUN = (
    Flag("--nnodes", "taken", "number of nodes; 1 for now"),
    Flag("--nproc-per-node", "taken", "number of processes on this node: a number, gpu, cpu or auto (default: 1)"),
    Flag("--rdzv-backend", "taken", "c10d or static, which are alike on one node"),
    Flag("--rdzv-endpoint", "noted", _ONE_NODE),
    Flag("--rdzv-id", "taken", "TORCHELASTIC_RUN_ID of the ranks (default: none)"),
    Flag("--rdzv-conf", "noted", _ONE_NODE),
    Flag("--standalone", "taken", "there is one node", takes_value=False),
    Flag("--max-restarts", "noted", "survivors go on, so nothing is restarted"),
    Flag("--monitor-interval", "noted", "a process that ends is noticed at once"),
    Flag("--start-method", "noted", "--rank-start says how the processes of ranks start"),
    Flag("--event-log-handler", "refused", "events are in events.jsonl of --run-dir; leave it out"),
    Flag("--role", "noted", "all processes have one role"),
    Flag("--module", "taken", "the script is the name of a module, as for python -m", takes_value=False, short="-m"),
    Flag("--no-python", "refused", "the training script has to be Python; leave it out", takes_value=False),
    Flag("--run-path", "noted", "every script is run by runpy.run_path, in the process of its rank", takes_value=False),
    Flag("--log-dir", "taken", "folder for links to the logs of all ranks: ID_*/attempt_0/RANK/stdout.log"),
    Flag("--redirects", "noted", _LOGS, short="-r"),
    Flag("--tee", "noted", _LOGS, short="-t"),
    Flag("--local-ranks-filter", "noted", _LOGS),
    Flag("--duplicate-stdout-filters", "refused", f"{_LOGS}; leave it out"),
    Flag("--duplicate-stderr-filters", "refused", f"{_LOGS}; leave it out"),
    Flag("--node-rank", "taken", "number of this node; 0 for now"),
    Flag("--master-addr", "noted", _ONE_NODE),
    Flag("--master-port", "noted", _ONE_NODE),
    Flag("--local-addr", "noted", _ONE_NODE),
    Flag("--logs-specs", "refused", f"{_LOGS}; leave it out"),
    Flag("--numa-binding", "refused", "ranks are not bound to NUMA nodes yet; leave it out, or bind the launcher by numactl"),
    Flag("--signals-to-handle", "refused", "SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 end the job; leave it out"),
    Flag("--shutdown-timeout", "refused", "--recover-deadline-s, behind the script, bounds the end of a job; leave it out"),
    Flag("--virtual-local-rank", "refused", "LOCAL_RANK picks the device of a rank; leave it out", takes_value=False),
)  # fmt: skip
"""Every flag of torchrun, in the order of its parser."""


class Choice(msgspec.Struct, frozen=True):
    """The processes and names that the launch line gives."""

    num_processes: int | None
    """Number of processes of all replicas; None: not given."""
    run_id: str
    """TORCHELASTIC_RUN_ID of the ranks."""
    is_module: bool
    """True if the script is the name of a module."""
    log_dir: Path | None
    """Folder in which links to the logs are to be made."""
    notes: tuple[str, ...]
    """One line for each flag that changes nothing here."""


def add_flags(parser: ArgumentParser) -> None:
    """Add torchrun's flags to the parser of `run`. A flag that is not given has the value None."""
    group = parser.add_argument_group("torchrun's flags, in either spelling (--nproc-per-node, --nproc_per_node)")
    for flag in TORCHRUN:
        text = flag.text if flag.fate == "taken" else f"{flag.fate}: {flag.text}"
        if flag.takes_value:
            group.add_argument(*flag.names, dest=flag.dest, metavar="X", help=text)
        else:
            group.add_argument(*flag.names, dest=flag.dest, action="store_const", const="1", help=text)


def read(arguments: Namespace, environment: Mapping[str, str]) -> Choice:
    """Return what torchrun's flags say; PET_ variables of `environment` stand for absent ones.

    Raises ValueError with one line per flag that cannot be accepted.
    """
    given = dict(_given(arguments, environment))
    found = [f"{each.name} is not supported: {each.text}" for each in TORCHRUN if each.dest in given and each.fate == "refused"]
    nodes = given.get("nnodes", "1")
    if not re.fullmatch(r"1(:1)?", nodes):
        found.append(f"--nnodes is {nodes}; a job has one node for now: give --nnodes 1")
    if given.get("node_rank", "0") != "0":
        found.append(f"--node-rank is {given['node_rank']}; a job has one node for now: give --node-rank 0")
    if given.get("rdzv_backend", "static") not in ("static", "c10d"):
        found.append(f"--rdzv-backend {given['rdzv_backend']} is not supported; leave it out: {_ONE_NODE}")
    if given.get("module") and given.get("run_path"):
        found.append("--module and --run-path exclude each other; the first is for a module, the second for a file")
    num_processes = None
    try:
        num_processes = _num_processes(given["nproc_per_node"]) if "nproc_per_node" in given else None
    except ValueError as error:
        found.append(str(error))
    if found:
        raise ValueError("\n".join(found))
    notes = tuple(
        f"{each.name} changes nothing here: {each.text}" for each in TORCHRUN if each.dest in given and each.fate == "noted"
    )
    log_dir = Path(given["log_dir"]) if "log_dir" in given else None
    return Choice(num_processes, given.get("rdzv_id", "none"), "module" in given, log_dir, notes)


def _given(arguments: Namespace, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield name and value of each of torchrun's flags that is given."""
    for flag in TORCHRUN:
        value = getattr(arguments, flag.dest)
        if value is None:
            value = environment.get(f"PET_{flag.dest.upper()}")
            if value is not None and not flag.takes_value and value == "0":
                value = None
        if value is not None:
            yield flag.dest, value


def _num_processes(text: str) -> int:
    """Return the number of processes that `--nproc-per-node` means. Raises ValueError."""
    if text == "cpu" or (text == "auto" and not has_gpu()):
        return len(os.sched_getaffinity(0))
    if text in ("gpu", "auto"):
        number = _num_gpus()
        if number < 1:
            raise ValueError(f"--nproc-per-node is {text}, but torch finds no GPU; give the number of processes")
        return number
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--nproc-per-node is {text}; give a number of at least 1, gpu, cpu or auto")
    return int(text)


def _num_gpus() -> int:
    """Return how many GPUs torch finds, by a process that ends at once.

    The launcher itself asks no driver: what it forked then could use no GPU.
    """
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"], capture_output=True, text=True, check=False
    )  # fmt: skip
    return int(done.stdout) if done.stdout.strip().isdecimal() else 0


def behind_script(command: Sequence[str], parser: ArgumentParser) -> list[str]:
    """Return the launcher's own flags among the script's words, without torchrun's; once each."""
    theirs = {name for flag in TORCHRUN for name in flag.names} | {"-h", "--help"}
    ours = {option for action in parser._actions for option in action.option_strings} - theirs
    return [word for word in dict.fromkeys(each.partition("=")[0] for each in command[1:]) if word in ours]
