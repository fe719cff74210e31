"""Judge a batch script: each line in it by which Slurm would lose more than a lost node's share.

The judge knows the rules below and nothing else of Slurm. A script without a finding may still be
wrong in other ways, which `sbatch --test-only` finds. Sources are Slurm's own (22.05 and 26.05).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator

import msgspec

from megatron_recover.cluster.slurm.batch_script import BatchScript, Srun, read

_LAUNCHERS = re.compile(r"megatron[_-]recover|torchrun|torch\.distributed|megatron|pretrain")
_TORCHRUN = re.compile(r"(?:^|[\s/])torchrun(?:\s|$)|\btorch\.distributed\.(?:run|launch)\b")
_RUN = re.compile(r"megatron[_-]recover[.\s]+run\b")
_NNODES = re.compile(r"--nnodes[ =]\s*(\S+)")
_MORE_FLAGS = re.compile(r"\$\{\w+\[[@*]|\$[@*]|\$\{[@*]")
_SHELLS = frozenset({"bash", "sh", "dash", "zsh", "ksh"})
_PRINTS = re.compile(r"^[^#\n]*\bmegatron[_-]recover\s+sbatch\b", re.MULTILINE)
_SUBMITS = re.compile(r"^\s*(?:\w+=\S*\s+)*sbatch\s", re.MULTILINE)
_OTHER_VERB = re.compile(r"megatron[_-]recover\s+(?!run\b)[a-z]+")


class Finding(msgspec.Struct, frozen=True, order=True):
    """A mistake in a script."""

    line: int
    """Line to change, or behind which a line is missing."""
    what: str
    remedy: str


def findings(text: str) -> list[Finding]:
    """Return all mistakes of a script by line."""
    script = read(text)
    return sorted({each for rule in RULES for each in rule(script)})


def refusal(text: str) -> str | None:
    """Return why a text is no batch script, with the remedy; None if it may be one.

    The rules would advise changes that make nothing better in such a text.
    """
    script = read(text)
    if script.directives or script.sruns:
        return None
    why = "it has neither an #SBATCH line nor an srun"
    if _PRINTS.search(text):
        return f"{why}, and prints a batch script; write what it prints to a file, and judge that file"
    if _SUBMITS.search(text):
        return f"{why}, and submits another script; judge that one"
    return f"{why}; print a batch script for its launch line: megatron-recover sbatch -- LAUNCH LINE"


def _agents(script: BatchScript) -> list[Srun]:
    """Return the sruns that start agents: those that no other use explains."""
    return [each for each in script.sruns if _starts_agent(each.command)]


def _starts_agent(command: tuple[str, ...]) -> bool:
    text = " ".join(command)
    if not command or _OTHER_VERB.search(text):
        return False
    first = os.path.basename(command[0])
    return bool(_LAUNCHERS.search(text)) or first in _SHELLS or first.endswith(".sh") or command[0].startswith("$")


def _number(text: str | None) -> int | None:
    """Return the largest number that a text such as `2-4` or `4` names; None if it names none."""
    found = re.findall(r"\d+", text or "")
    return max(map(int, found)) if found and re.fullmatch(r"[\d-]+", text or "") else None


def _num_nodes(script: BatchScript) -> int:
    """Return the number of nodes of a job: by --nodes, else by its tasks, else 1."""
    given = {each.name: _number(each.value) for each in script.directives}
    if (nodes := given.get("--nodes")) is not None:
        return nodes
    tasks, of_a_node = given.get("--ntasks") or 1, given.get("--ntasks-per-node")
    return -(-tasks // of_a_node) if of_a_node else 1


def _no_kill(script: BatchScript) -> Iterator[Finding]:
    if _num_nodes(script) == 1:
        return
    if (given := script.directive("--no-kill")) is None or given.value == "off":
        yield Finding(
            script.last_directive, "without --no-kill the loss of one node ends or requeues the whole job",
            "add the line: #SBATCH --no-kill",
        )  # fmt: skip
    for srun in _agents(script):
        if srun.value("--no-kill") in (None, "off"):
            yield Finding(
                srun.line, "srun without --no-kill ends its step on all nodes when one is lost", "add --no-kill to it"
            )


def _bad_exit(script: BatchScript) -> Iterator[Finding]:
    for srun in _agents(script):
        if srun.value("--kill-on-bad-exit") != "0":
            yield Finding(
                srun.line, "srun may end all agents when one ends badly (the cluster's KillOnBadExit decides)",
                "write --kill-on-bad-exit=0",
            )  # fmt: skip


def _wait(script: BatchScript) -> Iterator[Finding]:
    for srun in _agents(script):
        if srun.value("--wait") != "0":
            yield Finding(
                srun.line, "srun may end all agents some time after the first one ends (the cluster's WaitTime decides)",
                "write --wait=0",
            )  # fmt: skip


def _batch_signal(script: BatchScript) -> Iterator[Finding]:
    signal = script.directive("--signal")
    if signal is None:
        return
    options, _, name = signal.value.partition("@")[0].rpartition(":")
    if "B" in options and name.removeprefix("SIG") not in script.trapped:
        yield Finding(
            signal.line, f"B: sends {name} to the batch shell only, which has no trap for it and dies, and all agents with it",
            f"write #SBATCH --signal={signal.value.replace('B:', '', 1)}, by which each agent gets the signal",
        )  # fmt: skip


def _no_signal(script: BatchScript) -> Iterator[Finding]:
    agents = _agents(script)
    if script.directive("--signal") is None and not (agents and all(each.value("--signal") is not None for each in agents)):
        yield Finding(
            script.last_directive, "without --signal the time limit leaves an agent KillWait to save (30 s by default), then "
            "kills it", "add the line: #SBATCH --signal=USR2@300",
        )  # fmt: skip


def _one_core(script: BatchScript) -> Iterator[Finding]:
    if all(script.directive(name) is None for name in ("--exclusive", "--cpus-per-task", "--cpus-per-gpu")):
        yield Finding(
            script.last_directive, "without --exclusive or --cpus-per-task the job gets one core for all ranks of a node",
            "add the line: #SBATCH --exclusive",
        )  # fmt: skip


def _foreground(script: BatchScript) -> Iterator[Finding]:
    nodes = _num_nodes(script)
    if nodes == 1:
        return
    for srun in _agents(script):
        if _number(srun.value("--nodes")) != 1:
            yield Finding(
                srun.line, "one srun over all nodes ends its whole step when it loses one slurmstepd, also with --no-kill",
                "start one srun for each node in the background: --nodes=1 --ntasks=1 --nodelist=NODE ... &, and wait "
                "behind the loop",
            )  # fmt: skip
        elif not srun.in_background:
            yield Finding(
                srun.line, "srun in the foreground: the next node starts when this one has ended", "end the line with &"
            )


def _early_end(script: BatchScript) -> Iterator[Finding]:
    for srun in script.sruns[script.num_awaited :]:
        if srun.in_background and _starts_agent(srun.command):
            yield Finding(
                srun.line, "the batch script ends while its agents run, and Slurm ends all steps with it", "add the line: wait"
            )


def _torchrun(script: BatchScript) -> Iterator[Finding]:
    for srun in _agents(script):
        if _TORCHRUN.search(" ".join(srun.command)):
            yield Finding(
                srun.line, "torchrun ends the job when it loses a rank",
                "write megatron-recover run, and add --key-file FILE with several nodes",
            )  # fmt: skip


def _key(script: BatchScript) -> Iterator[Finding]:
    """Yield the agents that `run` would refuse; none where the key may be in words not known."""
    for srun in _agents(script):
        text = " ".join(srun.command)
        nodes = _NNODES.search(text)
        if script.names_key or nodes is None or not _RUN.search(text) or "--key-file" in text or _MORE_FLAGS.search(text):
            continue
        number = _number(nodes[1].strip("\"'").replace(":", "-"))
        if (_num_nodes(script) if number is None else number) > 1:
            yield Finding(srun.line, "run of several nodes needs a key", "add --key-file FILE")


def _cpus(script: BatchScript) -> Iterator[Finding]:
    given = script.directive("--cpus-per-task")
    if given is None or "SRUN_CPUS_PER_TASK" in script.variables:
        return
    for srun in _agents(script):
        if srun.value("--cpus-per-task") is None:
            yield Finding(
                srun.line, f"srun does not inherit --cpus-per-task={given.value} of line {given.line} (since Slurm 22.05)",
                f"add --cpus-per-task={given.value} to it",
            )  # fmt: skip


def _gpus(script: BatchScript) -> Iterator[Finding]:
    for name in ("--gpus-per-task", "--gpu-bind"):
        places = [script.directive(name), *(each for srun in _agents(script) for each in srun.options if each.name == name)]
        for each in places:
            if each is not None and each.value not in ("none", "no"):
                yield Finding(
                    each.line, f"{name} shows an agent only a part of the node's GPUs, and the agent starts the ranks of all",
                    "write --gpus-per-node=NUMBER on the #SBATCH side instead",
                )  # fmt: skip
    total = script.directive("--gpus")
    of_one_node = [each for each in _agents(script) if _number(each.value("--nodes")) == 1 and each.value("--gpus") is None]
    if total is not None and of_one_node and _num_nodes(script) > 1:
        yield Finding(
            total.line, f"srun inherits --gpus={total.value}, and one node does not have them all: no step starts",
            "write --gpus-per-node=NUMBER instead",
        )  # fmt: skip


def _tasks(script: BatchScript) -> Iterator[Finding]:
    given = script.directive("--ntasks-per-node")
    if given is not None and (_number(given.value) or 1) > 1:
        yield Finding(
            given.line, f"{given.value} tasks on a node are {given.value} agents; one agent starts all ranks of a node",
            "write #SBATCH --ntasks-per-node=1, and the number of ranks into --nproc-per-node",
        )  # fmt: skip
    for srun in _agents(script):
        of_a_node, tasks = _number(srun.value("--ntasks-per-node")), _number(srun.value("--ntasks"))
        nodes = _number(srun.value("--nodes")) or _num_nodes(script)
        if (of_a_node or 1) > 1 or (tasks or 1) > nodes:
            yield Finding(srun.line, "srun starts several agents on a node; one starts all ranks of a node", "write --ntasks=1")


def _chain(script: BatchScript) -> Iterator[Finding]:
    array, dependency = script.directive("--array"), script.directive("--dependency")
    if array is not None and dependency is not None and "singleton" in dependency.value and not array.value.endswith("%1"):
        yield Finding(
            array.line, "singleton orders nothing inside an array: once it is fulfilled, all tasks start at once",
            f"write #SBATCH --array={array.value.partition('%')[0]}%1",
        )  # fmt: skip


def _open_mode(script: BatchScript) -> Iterator[Finding]:
    mode = script.directive("--open-mode")
    if script.directive("--no-requeue") is not None and script.directive("--array") is None and mode is None:
        return  # there is one start only
    if mode is None or mode.value not in ("append", "a"):
        line = script.last_directive if mode is None else mode.line
        yield Finding(line, "a job that starts again erases its output", "add the line: #SBATCH --open-mode=append")


def _container(script: BatchScript) -> Iterator[Finding]:
    for each in script.directives:
        if each.name.startswith(("--container", "--no-container")):
            yield Finding(
                each.line, f"#SBATCH {each.name} runs this script itself in the container, where there is no srun",
                f"move {each.name} to the srun",
            )  # fmt: skip


def _wrapper(script: BatchScript) -> Iterator[Finding]:
    for srun in _agents(script):
        first, text = os.path.basename(srun.command[0]), _shell_text(srun.command)
        if first.endswith(".sh") or (first in _SHELLS and text is None):
            yield Finding(
                srun.line, "a wrapper stands between Slurm and the agent: Slurm may signal the wrapper only",
                "start the interpreter itself: srun ... /full/path/python -P -m megatron_recover run ...",
            )  # fmt: skip
        elif first in _SHELLS and text is not None:
            commands = [each.strip() for each in re.split(r"&&|\|\||[;\n]", text) if each.strip()]
            if not commands or not commands[-1].startswith("exec "):
                yield Finding(
                    srun.line, "a shell stays between Slurm and the agent: Slurm may signal the shell only",
                    "write exec in front of the agent's command",
                )  # fmt: skip


def _shell_text(command: tuple[str, ...]) -> str | None:
    """Return the text behind `-c` of a shell, also of `-lc`; None if the shell reads a file."""
    words = iter(command[1:])
    for word in words:
        if word in ("-o", "+o"):
            next(words, None)
        elif not word.startswith("-"):
            return None
        elif re.fullmatch(r"-[a-z]*c[a-z]*", word):
            return next(words, "")
    return None


def _interpreter(script: BatchScript) -> Iterator[Finding]:
    if not script.has_interpreter:
        yield Finding(1, "sbatch refuses a script whose first line names no interpreter", "add the first line: #!/bin/bash")


def _no_step(script: BatchScript) -> Iterator[Finding]:
    if not _agents(script):
        yield Finding(
            script.last_directive, "no srun starts an agent, and Slurm signals steps only",
            "start it by srun: srun --nodes=1 --ntasks=1 ... /full/path/python -P -m megatron_recover run ...",
        )  # fmt: skip


RULES: tuple[Callable[[BatchScript], Iterator[Finding]], ...] = (
    _no_kill, _bad_exit, _wait, _batch_signal, _no_signal, _one_core, _foreground, _early_end, _torchrun, _key, _cpus, _gpus,
    _tasks, _chain, _open_mode, _container, _wrapper, _interpreter, _no_step,
)  # fmt: skip
