"""The command line, which finds a verb and runs its module.

No large module is imported here. A verb's module is imported when the verb runs, and torch only
where the verb needs it. So `--help` is instant.
"""

from __future__ import annotations

import importlib
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping
from types import MappingProxyType

from megatron_recover import __version__, packages
from megatron_recover.flags import did_you_mean
from megatron_recover.shipped import shipped

VERBS: Mapping[str, str] = MappingProxyType({
    "run": "train with replicas that survive the death of any of them",
    "doctor": "check this machine before a job: limits, GPUs, folders, the scheduler's settings",
    "plan": "compare the layouts of a job: the memory of a rank, and what a death costs",
    "demo": "train on real text, kill real processes, prove that nothing was lost",
    "check": "verify the invariants of a run from its trace",
    "report": "make a page that shows what happened in a run, from its trace",
    "top": "follow a run in one live line",
    "status": "print the state of a job: nodes, replicas, steps, losses, newest checkpoint",
    "drain": "give a replica or a node of a running job back, without a loss",
    "scale": "have a running job grow or shrink to another number of replicas",
    "simulate": "run a job of any size on a virtual clock, against checkpoint-restart and others",
    "explain": "print every wait of a run and why it is so long, or which packages are used",
    "data": "turn text files into a data set that Megatron reads",
    "sbatch": "print or submit a batch script for Slurm, or judge one",
    "verdict": "print what a batch system is to do after a run",
})  # fmt: skip
"""Each verb with its description; verb V is `megatron_recover.cli.V.main(argv) -> exit code`."""

_EXAMPLES = """\
examples:
  megatron-recover demo
  megatron-recover run --nproc-per-node 3 --run-dir runs/a pretrain_gpt.py --tensor-model-parallel-size 1 ...
  megatron-recover check runs/a --against runs/undisturbed
  megatron-recover simulate scenarios/recover-paper.toml

'megatron-recover VERB --help' lists its options. docs/reference/exit_codes.md lists all exit codes, such as
0 fine, 2 bad input, 3 unfinished, 14 broken invariant. Files of docs/, scenarios/ and monitoring/ that help and messages
name are in a clone and in the source distribution, not in the wheel.
"""


def command_line(*arguments: str) -> str:
    """Return a `megatron-recover` command to paste into the shell that started this process."""
    script = shutil.which("megatron-recover")
    ours = script is not None and os.path.dirname(script) == os.path.dirname(sys.executable)
    return shlex.join([*(["megatron-recover"] if ours else [sys.executable, "-m", "megatron_recover"]), *arguments])


def usage() -> str:
    """Return the text of `megatron-recover --help`."""
    verbs = "\n".join(f"  {verb:<9} {what}" for verb, what in VERBS.items())
    return (
        "usage: megatron-recover VERB ...\n\n"
        "Megatron-Core pre-training in which a dying process costs only the microbatches that it held.\n\n"
        f"verbs:\n{verbs}\n\n{_EXAMPLES}"
    )


def _lacking() -> list[str]:
    """Return lines about what every verb needs and this interpreter lacks; none if all is there."""
    found = packages.mistakes(packages.REQUIRED)
    if sys.version_info < (3, 12):  # noqa: UP036 - any python may start a checkout
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        found = [f"{sys.executable} is Python {version}, and 3.12 or newer is needed; use another"]
    checkout = shipped("scripts").parent
    if found and (checkout / "scripts" / "setup.sh").is_file():
        found.append(f"`make setup` in {checkout}, then `. .venv/bin/activate` there, gives you all that is needed")
    return found


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return the exit code of the process; argparse's own exits are not caught."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0 if arguments else 2
    verb, rest = arguments[0], arguments[1:]
    if verb == "--version":
        print(f"megatron-recover {__version__}")
        return 0
    if verb not in VERBS:
        remedy = did_you_mean(verb, VERBS, f"verbs are {', '.join(VERBS)}")
        print(f"megatron-recover: unknown verb '{verb}'; {remedy}", file=sys.stderr)
        return 2
    if lacking := _lacking():
        print("\n".join(f"megatron-recover {verb}: {line}" for line in lacking), file=sys.stderr)
        return 2
    try:
        code: int = importlib.import_module(f"megatron_recover.cli.{verb}").main(rest)
    except KeyboardInterrupt:  # the verb itself did not catch it
        print(f"megatron-recover {verb}: interrupted", file=sys.stderr)
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        code = 128 + signal.SIGPIPE
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # no reader (`... | head`): the interpreter must not try again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
