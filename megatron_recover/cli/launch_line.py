"""The launch line: torchrun's flags, and what becomes of each.

`torchrun FLAGS SCRIPT ...` becomes `megatron-recover run FLAGS SCRIPT ...`. `flags.split` has
separated the script and all words behind it, which are the script's, whatever their spelling. As
for torchrun, a variable PET_NAME stands for a flag that is not given.

`TORCHRUN` lists every flag of torch/distributed/run.py (`get_args_parser`); a test compares them.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import re
import signal
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

import msgspec

from megatron_recover.cli import meeting_flags
from megatron_recover.cluster.meeting import Meeting
from megatron_recover.cluster.rank_process import TOLD_TO_ALL
from megatron_recover.cluster.streams import PREFIX, Stream, Streams
from megatron_recover.config import NumaBinding, RecoverConfig
from megatron_recover.core.wording import counted
from megatron_recover.host.addresses import PORTS_OF_A_RANK
from megatron_recover.host.gpus import gpu_bytes, has_gpu


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
    since: tuple[int, int] = (2, 11)
    """First release of torch that has the flag; 2.11: also older ones may have it."""
    has_variable: bool = True
    """True if a variable PET_NAME stands for the flag."""
    is_of_several: bool = False
    """True if the flag means something with several nodes only. With one node it is noted."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return all spellings, short ones first."""
        words = (self.short, self.name, f"--{self.name[2:].replace('-', '_')}")
        return tuple(dict.fromkeys(word for word in words if word))

    @property
    def dest(self) -> str:
        """Return the name of the argument's value."""
        return self.name[2:].replace("-", "_")

    @property
    def variable(self) -> str:
        """Return the name of the variable that may stand for the flag."""
        return f"PET_{self.dest.upper()}"


_CAN_END = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGXCPU")
"""Signals that may end a job. Others have another use here, or cannot be handled."""
_SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_NUM_PROCESSES = "--nproc-per-node"
_PER_GPU = ("gpu", "auto")
NO_NUMBER = "the number of processes is missing; give --nproc-per-node, as for torchrun, or --replicas"
NO_NUMBER_OF_SEVERAL = "the number of processes is missing; with several nodes give --nproc-per-node, as for torchrun"
_ONE_NODE = "all processes are on this node, and they meet without an address"
_SIGNALS = ",".join(signal.Signals(number).name for number in TOLD_TO_ALL)
TORCHRUN = (
    Flag("--nnodes", "taken", "number of nodes, N or MIN:MAX; nodes that come later are spares (default: 1)"),
    Flag(_NUM_PROCESSES, "taken", "number of processes on this node: a number, gpu, cpu or auto (needed, unless --replicas is "
         "given)"),
    Flag("--rdzv-backend", "taken", "c10d or static, which are alike on one node: several nodes meet at --rdzv-endpoint, with "
         "static at --master-addr if no endpoint is given (default: static)"),
    Flag("--rdzv-endpoint", "taken", "HOST or HOST:PORT of the node at which several nodes meet (default port with c10d: "
         "29400), or file:PATH on a shared disk, a new one for each start, into which the first node writes its own; noted on "
         "one node",
         is_of_several=True),
    Flag("--rdzv-id", "taken", "TORCHELASTIC_RUN_ID of the ranks, the same on all nodes (default: a new one; "
         "`none` with several nodes)"),
    Flag("--rdzv-conf", "taken", "join_timeout=S (also timeout=S with static): seconds to wait for MIN nodes; "
         "last_call_timeout=S: seconds from then on to wait for MAX; is_host=true or false: whether the endpoint is on this "
         "node (default: 600, 30, by the endpoint); other keys, and all on one node, are noted", is_of_several=True),
    Flag("--standalone", "taken", "there is one node", takes_value=False),
    Flag("--max-restarts", "noted", "survivors go on, so nothing is restarted"),
    Flag("--monitor-interval", "noted", "a process that ends is noticed at once"),
    Flag("--start-method", "noted", "--rank-start says how the processes of ranks start"),
    Flag("--event-log-handler", "refused", "events are in events.jsonl of --run-dir; leave it out"),
    Flag("--role", "taken", "ROLE_NAME of the ranks, and their name in front of teed lines (default: default)"),
    Flag("--module", "taken", "the script is the name of a module, as for python -m", takes_value=False, short="-m"),
    Flag("--no-python", "refused", "the training script has to be Python; leave it out", takes_value=False),
    Flag("--run-path", "noted", "every script is run by runpy.run_path, in the process of its rank", takes_value=False),
    Flag("--log-dir", "taken", "folder for links to the logs of all ranks: ID_*/attempt_0/RANK/stdout.log, stderr.log"),
    Flag("--redirects", "taken", "streams with a log by themselves that the console does not show: 0 (none), 1 (stdout), 2 "
         "(stderr), 3 (both), or by rank, such as 0:1,1:3 (default: 0)", short="-r"),
    Flag("--tee", "taken", "streams with a log by themselves of which the console shows every line, behind [ROLE and RANK]:; "
         "values as for --redirects (default: 0)", short="-t"),
    Flag("--local-ranks-filter", "taken", "ranks of which the console shows teed lines, and those of the writer for "
         "the same rank of any replica, such as 0,7 (default: all)"),
    Flag("--log-line-prefix-template", "taken", "text in front of teed lines, with ${role_name}, ${local_rank}, ${rank} and "
         "${hostname} (default: [${role_name}${local_rank}]:)", since=(2, 14)),
    Flag("--duplicate-stdout-filters", "taken", "texts, such as loss,error: teed lines of stdout with one of them are also in "
         "logs/filtered_stdout.log"),
    Flag("--duplicate-stderr-filters", "taken", "the same for stderr"),
    Flag("--node-rank", "taken", "number of this node, from 0 (default: the node gets one when it joins)"),
    Flag("--master-addr", "taken", "name or address of node 0, at which several nodes meet with static (default: 127.0.0.1); "
         "noted on one node", is_of_several=True),
    Flag("--master-port", "taken", "port there (default: 29500); noted on one node", is_of_several=True),
    Flag("--local-addr", "taken", "name or address of this node that the others use (default: that of --interface, or of the "
         "route to where nodes meet); noted on one node", is_of_several=True),
    Flag("--logs-specs", "refused", "every rank's output is in the logs of --run-dir; leave it out", has_variable=False),
    Flag("--numa-binding", "taken", "node, socket, exclusive or core-complex: each rank runs on the CPUs near its GPU that "
         "torch finds", has_variable=False),
    Flag("--signals-to-handle", "taken", f"signals that end the job (default: {_SIGNALS})"),
    Flag("--shutdown-timeout", "taken", "seconds, at most --recover-deadline-s, that a job has to end after such a signal, and "
         "its processes after a failure, before everything is killed (default: none after a signal)", since=(2, 12)),
    Flag("--virtual-local-rank", "refused", "LOCAL_RANK picks the device of a rank; leave it out", takes_value=False),
    Flag("--print-completion", "refused", "torchrun prints completions of its own name; leave it out", since=(2, 14),
         has_variable=False),
)  # fmt: skip
"""Every flag of torchrun, in the order of its parser."""


class Choice(msgspec.Struct, frozen=True):
    """The processes and names that the launch line gives."""

    num_processes: int | None
    """Number of processes on this node; None: not given."""
    nodes: Meeting
    """The nodes of the job, and where they meet."""
    run_id: str
    """TORCHELASTIC_RUN_ID of the ranks."""
    is_module: bool
    """True if the script is the name of a module."""
    log_dir: Path | None
    """Folder in which links to the logs are to be made."""
    streams: Streams
    signals: tuple[int, ...]
    """Signals that end the job."""
    shutdown_s: int | None
    numa_binding: NumaBinding | None
    notes: tuple[str, ...]
    """One line for each flag that changes nothing here."""


def add_flags(parser: ArgumentParser) -> None:
    """Add torchrun's flags to the parser of `run`, and ours about several nodes.

    A flag that is not given has the value None.
    """
    meeting_flags.add_flags(parser)
    group = parser.add_argument_group("torchrun's flags, in either spelling (--nproc-per-node, --nproc_per_node)")
    for flag in TORCHRUN:
        text = flag.text if flag.fate == "taken" else f"{flag.fate}: {flag.text}"
        if flag.takes_value:
            group.add_argument(*flag.names, dest=flag.dest, metavar="X", help=text)
        else:
            group.add_argument(*flag.names, dest=flag.dest, action="store_const", const="1", help=text)


def read(arguments: Namespace, environment: Mapping[str, str]) -> Choice:
    """Return what torchrun's flags say; PET_ variables of `environment` stand for absent ones.

    Raises ValueError with one line per mistake.
    """
    given = dict(_given(arguments, environment))
    if _SHUTDOWN_VARIABLE in environment:
        given.setdefault("shutdown_timeout", environment[_SHUTDOWN_VARIABLE])
    if not given.get("local_ranks_filter", "all"):  # a script's "${FILTER}" that is empty: for torchrun, all ranks
        del given["local_ranks_filter"]
    if given.get("log_dir") == os.devnull:  # for torchrun: no logs
        del given["log_dir"]
    found = [f"{each.name} is not supported: {each.text}" for each in TORCHRUN if each.dest in given and each.fate == "refused"]
    nodes = meeting_flags.read(given, arguments, found)
    if "log_dir" in given and "/" in given.get("rdzv_id", ""):
        found.append(f"--rdzv-id is {given['rdzv_id']}, and a folder of --log-dir has this name; give one without /")
    if given.get("module") and given.get("run_path"):
        found.append("--module and --run-path exclude each other; the first is for a module, the second for a file")
    reader = _Reader(given, found)
    choice = Choice(
        num_processes=reader.read("nproc_per_node", _num_processes), nodes=nodes,
        run_id=given.get("rdzv_id") or _own_id(given, nodes), is_module="module" in given,
        log_dir=Path(given["log_dir"]) if "log_dir" in given else None,
        streams=_streams(reader, environment),
        signals=reader.read("signals_to_handle", _signals) or TOLD_TO_ALL,
        shutdown_s=reader.read("shutdown_timeout", _seconds),
        numa_binding=reader.read("numa_binding", _numa_binding),
        notes=tuple(_notes(given, nodes, arguments)),
    )  # fmt: skip
    if found:
        absent = [flag for flag in TORCHRUN if getattr(arguments, flag.dest) is None and flag.variable in environment]
        raise ValueError("\n".join(_with_variable(line, absent) for line in found))
    return choice


def judge_for_another_machine(arguments: Namespace) -> None:
    """Raise ValueError where `read` refuses the flags on any machine, or the ranks have no number.

    What a flag asks of the machine is not judged: the job runs on another one.
    """
    if arguments.nproc_per_node is None and arguments.replicas is None:
        raise ValueError(NO_NUMBER)
    asked = {"nproc_per_node": _PER_GPU, "numa_binding": get_args(NumaBinding)}
    known = {name: None if value in asked.get(name, ()) else value for name, value in vars(arguments).items()}
    read(Namespace(**known), {})


def _notes(given: Mapping[str, str], nodes: Meeting, arguments: Namespace) -> Iterator[str]:
    """Yield one line for each flag that changes nothing here."""
    for flag in TORCHRUN:
        if flag.dest in given and flag.fate == "noted":
            yield f"{flag.name} changes nothing here: {flag.text}"
        elif flag.dest in given and flag.is_of_several and not nodes.is_of_several:
            yield f"{flag.name} changes nothing here: {_ONE_NODE}"
    if nodes.is_of_several:
        yield from meeting_flags.notes(nodes, given)
    else:
        yield from (f"{name} changes nothing here: {_ONE_NODE}" for name in meeting_flags.given_of_ours(arguments))


def _with_variable(line: str, flags: Sequence[Flag]) -> str:
    """Return the line of a mistake, with the variable if it is about one of `flags`."""
    name, *rest = line.split(" ", 1)
    variables = [f"{flag.variable} of the environment" for flag in flags if flag.name == name]
    return " ".join([name, *(f"({variable})" for variable in variables), *rest])


def _own_id(given: Mapping[str, str], nodes: Meeting) -> str:
    """Return the id of a run without --rdzv-id: a new one or `none`.

    It is `none` with several nodes, which need the same, and if a flag says how nodes meet and
    --standalone is not given. Scripts name their files by it, so torchrun makes one where it can
    (torch/distributed/run.py, `run`).
    """
    if nodes.is_of_several:
        return "none"
    meets = {"rdzv_endpoint", "master_port"} & given.keys() or given.get("rdzv_backend", "static") != "static"
    return "none" if meets and "standalone" not in given else str(uuid.uuid4())


def judge(line: Choice, num_processes: int, config: RecoverConfig) -> None:
    """Raise ValueError where torchrun's flags do not suit the job.

    `config` has the flags of the trainer.
    """
    found, deadline_s = [], config.deadline_s
    if line.nodes.is_of_several and config.ranks_per_gpu > 1:
        found.append(
            f"--recover-ranks-per-gpu is {config.ranks_per_gpu}, for trials on few GPUs of one node, and --nnodes is more than "
            "1; leave it out"
        )
    if (ports := line.nodes.ports) is not None and line.num_processes is not None:
        num, needed = ports[1] - ports[0] + 1, PORTS_OF_A_RANK * line.num_processes
        if num < needed:
            found.append(
                f"--port-range {ports[0]}-{ports[1]} has {counted(num, 'port')}, and this node has "
                f"{counted(line.num_processes, 'rank')}, each of which listens on up to {PORTS_OF_A_RANK}; "
                f"give at least {needed} ports"
            )
    for flag, named in line.streams.named.items():
        if absent := sorted(place for place in named if place >= num_processes):
            found.append(
                f"{flag} names rank {absent[0]}; the ranks of this job are 0 to {num_processes - 1}, counted over all replicas"
            )
    if line.shutdown_s is not None and line.shutdown_s > deadline_s:
        found.append(
            f"--shutdown-timeout (or {_SHUTDOWN_VARIABLE} of the environment) is {line.shutdown_s}; it must be at most "
            f"--recover-deadline-s ({deadline_s:g}), after which a job that does not end is ended in any case"
        )
    if found:
        raise ValueError("\n".join(found))


class _Reader(NamedTuple):
    """Reads values of flags, and collects what is wrong with them."""

    given: Mapping[str, str]
    found: list[str]

    def read[Value](self, dest: str, convert: Callable[[str], Value]) -> Value | None:
        """Return the value of a flag, None if it is absent or wrong.

        `convert` raises ValueError with what is to be given instead.
        """
        if dest not in self.given:
            return None
        try:
            return convert(self.given[dest])
        except ValueError as error:
            self.found.append(f"--{dest.replace('_', '-')} is {self.given[dest]}{error}")
            return None


def _streams(reader: _Reader, environment: Mapping[str, str]) -> Streams:
    """Return which output of ranks has a log by itself, and what of it the console shows.

    Append each mistake to `reader.found`. Of `environment` only the prefix of teed lines is read
    here. The function `read` reads `--log-dir`.
    """
    given = reader.given
    tee = reader.read("tee", _by_rank) or 0
    filters = {
        stream: _texts(given[dest])
        for dest, stream in (("duplicate_stdout_filters", Stream.OUT), ("duplicate_stderr_filters", Stream.ERR))
        if dest in given
    }
    teed = tee if isinstance(tee, int) else functools.reduce(operator.or_, tee.values())
    reader.found.extend(
        f"--duplicate-{name}-filters selects teed lines, and --tee names no {name}; give --tee 3"
        for name, stream in (("stdout", Stream.OUT), ("stderr", Stream.ERR))
        if stream in filters and not teed & stream
    )
    prefix = given.get("log_line_prefix_template") or environment.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
    return Streams(
        redirects=reader.read("redirects", _by_rank) or 0, tee=tee,
        shown=reader.read("local_ranks_filter", _ranks) or frozenset(), prefix=prefix or PREFIX,
        role=given.get("role", "default"), filters=filters,
    )  # fmt: skip


def _by_rank(text: str) -> int | dict[int, int]:
    """Return the streams of all ranks, or of each rank, that `--tee` or `--redirects` names."""
    if re.fullmatch(r"[0-3]", text):
        return int(text)
    if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        return {int(rank): int(streams) for rank, _, streams in (each.partition(":") for each in text.split(","))}
    raise ValueError("; give 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or one of these by rank, such as 0:1,1:3")


def _ranks(text: str) -> frozenset[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError("; give numbers of ranks, such as 0,7")
    return frozenset(map(int, text.split(",")))


def _texts(text: str) -> tuple[str, ...]:
    """Return texts that are separated by commas; two commas stand for one in a text."""
    return tuple(each.replace("\0", ",") for each in text.replace(",,", "\0").split(","))


def _signals(text: str) -> tuple[int, ...]:
    names = [each.strip() for each in text.split(",")]
    if not set(names) <= set(_CAN_END):
        raise ValueError(f"; give some of {', '.join(_CAN_END)}, separated by commas")
    return tuple(signal.Signals[name] for name in dict.fromkeys(names))


def _seconds(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("; give a whole number of seconds")
    return int(text)


def _numa_binding(text: str) -> NumaBinding:
    if text not in get_args(NumaBinding):
        raise ValueError(f"; give one of {', '.join(get_args(NumaBinding))}")
    if not has_gpu():
        raise ValueError(", but this machine has no GPU near which a rank could run; leave it out, or use numactl")
    return cast(NumaBinding, text)


def _given(arguments: Namespace, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield name and value of each of torchrun's flags that is given."""
    for flag in TORCHRUN:
        value = getattr(arguments, flag.dest)
        if value is None and flag.has_variable:
            value = environment.get(flag.variable)
            if value is not None and not flag.takes_value and value == "0":
                value = None
        if value is not None:
            yield flag.dest, value


def _num_processes(text: str) -> int:
    """Return the number of processes that `--nproc-per-node` means. Raises ValueError."""
    if text == "cpu" or (text == "auto" and not has_gpu()):
        return len(os.sched_getaffinity(0))
    if text in _PER_GPU:
        number = len(gpu_bytes())
        if number < 1:
            raise ValueError(", but torch finds no GPU, or its driver does not answer; give the number of processes")
        return number
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("; give a number of at least 1, gpu, cpu or auto")
    return int(text)


def behind_script(command: Sequence[str], parser: ArgumentParser, refused: str = "") -> list[str]:
    """Return the launcher's own flags among the script's words, and `--nproc-per-node`; once each.

    A value that follows as a word of its own is part of the text. Other flags of torchrun are left
    out, since scripts have flags of such names, unless `refused`, why the script was refused, has
    the flag.
    """
    unknown = {*re.findall(r"--[\w-]+", refused)}
    theirs = {name for flag in TORCHRUN if flag.name != _NUM_PROCESSES for name in flag.names} - unknown | {"-h", "--help"}
    ours = {name: action for action in parser._actions for name in action.option_strings if name not in theirs}
    found: dict[str, str] = {}
    for word, following in itertools.pairwise([*command[1:], ""]):
        name = word.partition("=")[0]
        if name in ours and name not in found:
            has_value = word == name and ours[name].nargs != 0 and following
            found[name] = f"{word} {following}" if has_value else word
    return list(found.values())
