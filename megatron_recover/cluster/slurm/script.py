"""Write the batch script of a job: pure text, each line of it with its reason.

Two shapes:

- *allocation*: one job with all nodes, and in it one `srun` for each node;
- *array*: one job for each node. Slurm knows nothing of what they have in common, so it cannot end
  one for the loss of another.

Note [The files of a series]
    `run_dir` of the settings is the folder of a series of starts: requeues, jobs of a chain, new
    submissions. It has the key, one log for each node (`NODE.log`), and the output of the batch
    script. Each start has a run directory of its own inside it, because `run` needs an empty one.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from megatron_recover.core.exit_code import ExitCode
from megatron_recover.core.wording import counted
from megatron_recover.observe.stop_mark import STOP_MARK

Shape = Literal["allocation", "array"]
COMMENT = "megatron-recover:"
"""Prefix of the comment that a script gives its job; the run directory of the start follows.
`megatron-recover status --jobid` reads it."""
SIGNAL_S = 300
"""Seconds between the signal and the end of the time limit where neither `--signal-s` nor `--like`
is given."""
PORT = 29500
"""Default of `--port`."""
QUEUE_S = 3600
"""Array: seconds from the first agent on that agents wait for the jobs of other nodes, which may
still be in the queue. All nodes that have come are idle so long."""
_WAIT = f"join_timeout={QUEUE_S}"
OF_ANOTHER_JOB = (
    "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE", "SLURM_CPUS_PER_GPU", "SLURM_GPUS_PER_TASK",
    "SLURM_GPU_BIND", "SLURM_NTASKS_PER_GPU", "SLURM_TRES_PER_TASK", "SLURM_HINT", "SLURM_THREADS_PER_CORE",
)  # fmt: skip
"""Options of srun by variables, which a job inherits where it is submitted from inside a job."""
REQUEUES = 3
"""Default of `--requeues`."""
_GRACE_S = 60
"""Seconds that the other agents have to end after the end of the run is in the trace."""
_LOOK_S = 10
"""Seconds between two looks at the trace where nothing else tells of the end of the run."""
_COLUMNS = 98
"""Longest comment of the script."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a batch script depends on."""

    command: tuple[str, ...]
    """The command that prints the script; it becomes a comment."""
    launch: tuple[str, ...]
    """Words behind `megatron-recover run`: its flags, the training script, and that one's flags."""
    run_dir: str
    """Absolute path of the folder of all starts (Note [The files of a series])."""
    python: str
    """Full path of the interpreter on the nodes, or inside the container."""
    nodes: int
    shape: Shape
    spares: int = 0
    """Array: number of further jobs, each of which starts when one of the others has ended."""
    save: str | None = None
    """Folder of `--save`; None: the job saves nothing, so it is never started again."""
    chain: int = 1
    """Number of jobs one after the other."""
    requeues: int = REQUEUES
    """Allocation without a chain: how often at most the script requeues its job."""
    signal_s: int = SIGNAL_S
    port: int = PORT
    directives: tuple[str, ...] = ()
    """Further options of sbatch, such as `--partition=gpu`, without `#SBATCH`."""
    modules: tuple[str, ...] = ()
    venv: str | None = None
    container: tuple[str, ...] = ()
    """Flags of srun that start the agent in a container; empty: there is none."""

    @property
    def is_wide(self) -> bool:
        """Return whether one Slurm job has several nodes."""
        return self.shape == "allocation" and self.nodes > 1

    @property
    def meets(self) -> bool:
        """Return whether agents of several nodes have to meet."""
        return self.nodes + self.spares > 1

    @property
    def goes_on(self) -> bool:
        """Return whether a start may follow another."""
        return self.save is not None and (self.chain > 1 or (self.shape == "allocation" and self.requeues > 0))


def default_shape(nodes: int) -> Shape:
    """Return the shape without `--shape`. Source: the table of losses in docs/how_to/slurm.md.

    Slurm never kills jobs of an array for the loss of a node, and each ends by itself. An
    allocation that has lost the node of its script holds all other nodes until somebody cancels it,
    or Slurm kills all its steps. With one node the shapes do not differ, and a single job can put
    itself back into the queue.
    """
    return "array" if nodes > 1 else "allocation"


def text(settings: Settings) -> str:
    """Return the batch script."""
    is_array = settings.shape == "array"
    parts = (
        _head(settings), _array_directives(settings) if is_array else _allocation_directives(settings),
        _common_directives(settings), [""], _of_this_job(), [""], _places(settings), [""], _start(settings), [""],
        _array(settings) if is_array else _allocation(settings), [""], _decision(settings),
    )  # fmt: skip
    return "\n".join(line for part in parts for line in part) + "\n"


def _because(reason: str, indent: str = "") -> list[str]:
    """Return a reason as lines of a comment."""
    begin = f"{indent}# "
    return textwrap.wrap(
        reason, _COLUMNS, initial_indent=begin, subsequent_indent=begin, break_long_words=False, break_on_hyphens=False
    )


def _head(settings: Settings) -> Iterator[str]:
    yield "#!/bin/bash"
    yield "# Printed by this command, which submits the script with --submit:"
    yield f"#   {shlex.join(settings.command)}"
    yield "# To submit a copy by hand, make the folder of its output first:"
    yield f"#   mkdir -p {settings.run_dir}; sbatch FILE"
    if settings.shape == "array" and settings.chain > 1:
        yield from _because(
            f"{settings.chain} jobs, one after the other: submit the script {settings.chain} times, from the second time on "
            "with the id of the job before: sbatch --dependency=afterany:ID FILE"
        )
    elif settings.shape == "array" and settings.save is not None:
        yield from _because("One start. With --chain N there are N, of which each goes on where the one before has ended.")
    yield "# After a change by hand, have the script judged: megatron-recover sbatch --check FILE"
    yield ""
    yield from (f"#SBATCH {each}" for each in settings.directives)


def _allocation_directives(settings: Settings) -> Iterator[str]:
    yield f"#SBATCH --nodes={settings.nodes}"
    if settings.is_wide:
        yield from _because(
            "Without this line Slurm ends or requeues the whole job when it loses a node. srun needs the flag as well."
        )
        yield "#SBATCH --no-kill"
    if settings.chain > 1:
        yield from _because(
            f"A chain of {settings.chain} jobs, one at a time. (--dependency=singleton would start them all at once: array "
            "tasks inherit a dependency that is fulfilled.)"
        )
        yield f"#SBATCH --array=1-{settings.chain}%1"
        yield from _because("No job of a chain comes back: the next one goes on.")
        yield "#SBATCH --no-requeue"
    elif settings.goes_on:
        lost = " Slurm does so only if that node reboots before SlurmdTimeout: --no-kill keeps the job without it."
        yield from _because(f"The script requeues the job below, if its own node lives.{lost if settings.is_wide else ''}")
        yield "#SBATCH --requeue"
    else:
        why = "--save is not given, so another start would begin anew" if settings.save is None else "--requeues is 0"
        yield from _because(f"No second start: {why}.")
        yield "#SBATCH --no-requeue"


def _array_directives(settings: Settings) -> Iterator[str]:
    reason = f"One job for each of {settings.nodes} nodes, so the loss of one node ends one job only."
    last, limit = settings.nodes + settings.spares - 1, ""
    if settings.spares:
        reason += f" {settings.spares} more are spares: Slurm starts one when one of the {settings.nodes} has ended."
        limit = f"%{settings.nodes}"
    yield "#SBATCH --nodes=1"
    yield from _because(reason)
    yield f"#SBATCH --array=0-{last}{limit}"
    yield from _because("The job of a lost node must not come back into a run that has gone on without it.")
    yield "#SBATCH --no-requeue"


def _common_directives(settings: Settings) -> Iterator[str]:
    yield from _because("One agent on each node. The agent starts all ranks of its node.")
    yield "#SBATCH --ntasks-per-node=1"
    yield from _because("The whole node and all its memory: ranks need more of it while they do the work of a lost replica.")
    yield "#SBATCH --exclusive"
    yield "#SBATCH --mem=0"
    yield from _because("Limits of the login node, such as on locked memory, are not those of the job.")
    yield "#SBATCH --propagate=NONE"
    yield from _because(
        f"{settings.signal_s} s before the time limit each agent gets USR2: the job ends after a common step, with a "
        "checkpoint. (With B: this shell alone would get the signal.)"
    )
    yield f"#SBATCH --signal=USR2@{settings.signal_s}"
    yield from _because("A later start must not erase the output of an earlier one.")
    yield "#SBATCH --open-mode=append"
    name = "slurm-%A_%a.out" if settings.shape == "array" or settings.chain > 1 else "slurm-%j.out"
    yield f"#SBATCH --output={settings.run_dir}/{name}"


def _of_this_job() -> Iterator[str]:
    """Yield the lines that leave no option of another job to the sruns."""
    yield from _because(
        "Options of srun by variables. A job that is submitted from inside another one inherits them: some exclude each other, "
        "so that no step starts, and some show an agent one GPU. Each srun below has what it needs as a flag."
    )
    lines = textwrap.wrap(" ".join(OF_ANOTHER_JOB), _COLUMNS - len("unset  \\"))
    for number, line in enumerate(lines, start=1):
        yield ("unset " if number == 1 else "  ") + line + (" \\" if number < len(lines) else "")


def _places(settings: Settings) -> Iterator[str]:
    yield "# --- Place for the modules of this cluster ---"
    yield from (f"module load {shlex.quote(each)}" for each in settings.modules)
    yield "# --- Place for a virtual environment, and for variables such as NCCL_SOCKET_IFNAME ---"
    if settings.venv is not None:
        yield "# shellcheck source=/dev/null"
        yield f". {shlex.quote(settings.venv)}/bin/activate"
    yield ""
    yield from _because(
        "Full path of the interpreter, which srun starts without a shell or wrapper between: Slurm may signal only the "
        "process that it has started itself (proctrack/cgroup)."
    )
    yield f"PYTHON={shlex.quote(settings.python)}"
    key = "the key, " if settings.meets else ""
    yield from _because(f"Folder of all starts: {key}one log for each node, and a run directory for each start.")
    yield f"RUN={settings.run_dir}"
    if settings.container:
        yield from _because(
            "Flags of the steps only. As #SBATCH lines they would put this script into the container, where there is no srun."
        )
        yield f"container=({' '.join(map(_quoted, settings.container))})"
    yield "launch=("
    launch = list(_waiting_long(settings.launch)) if settings.shape == "array" else settings.launch
    yield from (f"  {shlex.join(line)}" for line in _by_flag(launch))
    yield ")"


def _waiting_long(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a launch line, with the wait of an array in a --rdzv-conf that gives none.

    The flag of the launch line takes the place of the script's own.
    """
    is_next = False
    for word in words:
        is_value = is_next or word.startswith("--rdzv-conf=")
        is_next = word == "--rdzv-conf"
        yield f"{word},{_WAIT}" if is_value and "join_timeout=" not in word else word


def _quoted(word: str) -> str:
    """Return a word in quotes, also where the shell needs none (shellcheck doubts bare commas)."""
    return "'" + word.replace("'", "'\"'\"'") + "'"


def _by_flag(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield the words of a command line in groups: a flag with its values."""
    group: list[str] = []
    for word in words:
        if word.startswith("-") and group:
            yield group
            group = []
        group.append(word)
    yield group


def _start(settings: Settings) -> Iterator[str]:
    yield from _because("A judge that fails knows nothing of the run: it must not end one that goes on.")
    yield "judge() {"
    if settings.container:
        yield '  srun --overlap --mem=0 --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" --mpi=none "${container[@]}" \\'
    yield f'  {"  " if settings.container else ""}"$PYTHON" -P -m megatron_recover verdict "$start" || echo unknown'
    yield "}"
    ends_chain = settings.chain > 1 and settings.shape == "allocation"
    if ends_chain:
        yield from _because("Takes the later jobs of the chain from the queue.")
        yield 'end_chain() { scancel --state=PENDING "$SLURM_ARRAY_JOB_ID"; }'
    if settings.goes_on:
        yield from _because("An earlier start may have ended in a way that repeats itself. Its mark says what to do.")
        yield f"MARK={shlex.quote(f'{settings.save}/{STOP_MARK}')}"
        yield "stop_if_marked() {"
        yield '  [ -e "$MARK" ] || return 0'
        yield '  echo "$MARK:"; cat "$MARK"'
        if ends_chain:
            yield "  end_chain"
        yield '  exit "$1"'
        yield "}"
        yield f"stop_if_marked {ExitCode.BAD_INPUT:d}"
    yield ""
    yield from _because(
        "Slurm's signals may reach this shell, too. It lives on until the agents have ended, because Slurm ends all steps "
        "when this script ends."
    )
    yield "trap : HUP INT TERM USR1 USR2"
    yield 'mkdir -p "$RUN"'
    if settings.shape == "array":
        yield from _because("All jobs of the array are one run. One that starts after its end has nothing to do.")
        yield 'start="$RUN/$SLURM_ARRAY_JOB_ID"'
        yield 'if [ -e "$start.over" ] || { [ -e "$start" ] && [[ $(judge) != unknown* ]]; }; then exit 0; fi'
    else:
        yield 'start="$RUN/$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"'
    yield from _because("For megatron-recover status --jobid, on any node of the cluster.")
    yield f'scontrol update JobId="$SLURM_JOB_ID" Comment="{COMMENT}$start"'
    if settings.meets:
        yield from _because(
            "The key by which processes of several nodes know each other, made once and readable for you alone: mktemp makes "
            "a new file, and writes through no link that somebody has left. ln gives it its name only if there is none, "
            "whoever does the same now. A full disk leaves no key."
        )
        yield 'if [ ! -e "$RUN/key" ]; then'
        yield '  if mine=$(mktemp "$RUN/.key-XXXXXXXXXX"); then'
        yield '    head -c 32 /dev/urandom | base64 > "$mine" &&'
        yield '      ln "$mine" "$RUN/key" 2> /dev/null'
        yield '    rm -f "$mine"'
        yield "  fi"
        yield "fi"
    yield from _because("Want of memory must not end a whole step: the death of one rank costs its microbatches only.")
    yield "oom=()"
    yield "if srun --help | grep -q -- --oom-kill-step; then oom=(--oom-kill-step=0); fi"


_FLAGS = (
    "--kill-on-bad-exit=0, --wait=0: Slurm never ends an agent because another has ended.",
    "--mpi=none: agents are no MPI ranks. --input=none: no agent reads this script.",
    "--export=ALL: agents get the environment of this script, also after sbatch --export=NONE.",
    "--cpus-per-task: all CPUs of the node, since srun does not inherit the number. --mem=0: all memory.",
    "--cpu-bind=none: ranks bind themselves, if --numa-binding asks for it.",
    "--output with %N: the node writes the log itself. An agent never waits for an srun that is dead.",
)


def _srun(settings: Settings, *, where: str, cpus: str, endpoint: str, indent: str = "") -> Iterator[str]:
    """Yield the lines of the srun that starts one agent in the background."""
    no_kill = "--no-kill " if settings.is_wide else ""
    lines = [
        f"srun {no_kill}--nodes=1 --ntasks=1 --mem=0{where}",
        "  --kill-on-bad-exit=0 --wait=0 --mpi=none --input=none --export=ALL",
        f'  --cpus-per-task="{cpus}" --cpu-bind=none "${{oom[@]}}"',
        '  --open-mode=append --output="$RUN/%N.log"' + (' "${container[@]}"' if settings.container else ""),
        '  "$PYTHON" -P -m megatron_recover run --run-dir "$start"' + (" --chained" if settings.goes_on else ""),
    ]
    if settings.meets:
        lines.append(f'  --nnodes {settings.nodes} --rdzv-backend c10d --rdzv-endpoint "{endpoint}" --key-file "$RUN/key"')
        if settings.shape == "array" and "--rdzv-conf" not in {word.partition("=")[0] for word in settings.launch}:
            lines.append(f"  --rdzv-conf {_WAIT}")
    yield from (f"{indent}{line} \\" for line in lines)
    yield f'{indent}  "${{launch[@]}}" &'


def _allocation(settings: Settings) -> Iterator[str]:
    yield 'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")'
    yield from _because("The CPUs of each node, from a text such as 16(x2),8.")
    yield "cpus=()"
    yield "for part in ${SLURM_JOB_CPUS_PER_NODE//,/ }; do"
    yield "  times=1"
    yield "  if [[ $part == *x* ]]; then times=${part#*x}; times=${times%)}; fi"
    yield '  for ((i = 0; i < times; i++)); do cpus+=("${part%%(*}"); done'
    yield "done"
    yield ""
    yield from _because("One srun for each node: one over all nodes ends its step on all of them when it loses one slurmstepd.")
    yield from (f"# {each}" for each in _FLAGS)
    yield "steps=()"
    yield 'for i in "${!nodes[@]}"; do'
    endpoint = f"${{nodes[0]}}:{settings.port}"
    yield from _srun(settings, where=' --nodelist="${nodes[i]}"', cpus="${cpus[i]}", endpoint=endpoint, indent="  ")
    yield "  steps+=($!)"
    yield "done"
    yield ""
    yield from _until_over("${steps[0]}")
    if settings.is_wide:
        yield from _because(
            "The run is over. The srun of a lost node may last until Slurm gives the node up; nothing is left to wait for."
        )
        yield f'for ((i = 0; i < {_GRACE_S}; i++)); do kill -0 "${{steps[@]}}" 2> /dev/null || break; sleep 1; done'


def _array(settings: Settings) -> Iterator[str]:
    if settings.meets:
        yield from _because(
            "The agents meet through a file: the first one writes its address into it. From then on they wait for the others, "
            "which may be in the queue, for join_timeout seconds. --rdzv-conf in the launch line may give another number."
        )
    yield from (f"# {each}" for each in _FLAGS)
    yield from _srun(settings, where="", cpus="$SLURM_CPUS_ON_NODE", endpoint="file:$start.endpoint")
    yield "step=$!"
    yield from _until_over("$step")
    if settings.meets:
        yield from _end_of_meeting()


def _end_of_meeting() -> Iterator[str]:
    """Yield the lines that end the other jobs of an array whose nodes have not met."""
    yield from _because("Takes the jobs of this array from the queue that would wait in vain, also one that is held.")
    yield "end_array() {"
    yield '  : > "$start.over"'
    yield '  scancel --state=PENDING "$SLURM_ARRAY_JOB_ID"'
    yield '  echo "The run ended before training began: see the logs of the nodes, $RUN/*.log"'
    yield "}"
    yield 'wait "$step"'
    yield "status=$?"
    too_few = f'[ "$status" = {ExitCode.TOO_FEW_REPLICAS:d} ]'
    yield f'if [ ! -e "$start" ] && {{ [ -e "$start.endpoint" ] || {too_few}; }}; then'
    yield from _because(
        "A run that ended while its nodes met has left no folder: too few came, or one had a mistake, or the first one has "
        "claimed the endpoint and never written its address.",
        "  ",
    )  # fmt: skip
    yield "  end_array"
    yield f'elif {too_few} && [[ $verdict == unknown* ]] && [ -e "$start.endpoint.owner" ]; then'
    yield from _because(
        "No coordinator was at the address in that file. If Slurm knows no job on its node any more, the node was lost, so "
        "the trace has no end. That can be known only where Slurm has the hosts' own names.",
        "  ",
    )  # fmt: skip
    yield '  owner=$(< "$start.endpoint.owner")'
    yield '  [ "${HOSTNAME%%.*}" = "$SLURMD_NODENAME" ] &&'
    yield '    nodes=$(squeue --noheader --states=RUNNING --format=%N --jobs="$SLURM_ARRAY_JOB_ID") &&'
    yield '    ! grep -qxF -- "${owner%%.*}" <<< "$nodes" && end_array'
    yield "fi"


def _until_over(step: str) -> Iterator[str]:
    """Yield the lines that wait for the end of the run, at first for that of the srun `step`."""
    yield from _because("A signal ends a wait, not the srun that it waits for.")
    yield f'while kill -0 "{step}" 2> /dev/null; do wait "{step}"; done'
    yield "verdict=$(judge)"
    yield from _because(
        "That srun may be gone although agents train on: it was killed itself, or its node is lost. So as long as the trace "
        "has no end, the run is over when Slurm has no step of the job any more. A slurmctld that does not answer says nothing."
    )
    yield "has_step() {"
    yield "  local steps"
    yield '  steps=$(squeue --noheader --steps --format=%i --jobs="$SLURM_JOB_ID") || return 0'
    yield "  [[ $steps =~ [.][0-9] ]]"
    yield "}"
    yield f"while [[ $verdict == unknown* ]] && has_step; do sleep {_LOOK_S}; verdict=$(judge); done"


def _decision(settings: Settings) -> Iterator[str]:
    yield from _because(
        "The trace says how the run has ended. The status of an srun does not: it is the worst of all processes, also of those "
        "whose death the run survived."
    )
    yield 'echo "$verdict"'
    yield "code=${verdict#* }"
    yield f"if [[ ! $code =~ ^[0-9]+$ ]]; then code={ExitCode.FAILED:d}; fi"
    if not settings.goes_on:
        yield 'exit "$code"'
        return
    yield 'stop_if_marked "$code"'
    is_chain = settings.chain > 1
    if is_chain and settings.shape == "allocation":
        yield "if [[ $verdict == finished* || $verdict == stop* ]]; then end_chain; fi"
    if is_chain:
        yield from _because("If training has not finished, the next job resumes from the newest checkpoint.")
    else:
        yield from _because(
            f"The job resumes from the newest checkpoint, at most {counted(settings.requeues, 'time')}. A job that was "
            "cancelled is no longer RUNNING, and stays away."
        )
        yield "if [[ $verdict != finished* && $verdict != stop* ]] &&"
        yield f'  [ "${{SLURM_RESTART_COUNT:-0}}" -lt {settings.requeues} ] &&'
        yield '  [ "$(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID")" = RUNNING ]; then'
        yield '  scontrol requeue "$SLURM_JOB_ID"'
        yield "fi"
    yield 'exit "$code"'
