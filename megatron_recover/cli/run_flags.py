"""The flags of `megatron-recover run`, which other verbs accept or pass on, and their parser."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NoReturn, get_args

from megatron_recover import trace
from megatron_recover.cli import launch_line, monitor_flags
from megatron_recover.cluster.event_store import PART_BYTES
from megatron_recover.cluster.job import RankStart
from megatron_recover.flags import Parser
from megatron_recover.megatron.launch.arguments import add_recover_arguments

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _bytes(text: str) -> int:
    """Return the number of bytes that `text` names. Raises ArgumentTypeError with the remedy."""
    found = re.fullmatch(r"([0-9]+) ?(|KiB|MiB|GiB)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text} is no number of bytes; write one like 268435456 or 256MiB")
    return int(found[1]) * _UNITS[found[2]]


class RunParser(Parser):
    """The parser of `run`.

    Its help ends with the flags of the trainer, which it does not accept itself.
    """

    elsewhere = "; Megatron's flags go behind the script's name"
    refusal = ""
    """Reason why the command line was refused, unless the refusal may pass by itself."""

    def error(self, message: str) -> NoReturn:
        self.refusal = message
        super().error(message)

    def error_for_now(self, message: str) -> NoReturn:
        """Exit as `error` does, but keep no reason: the next start may not be refused."""
        super().error(message)

    def format_help(self) -> str:
        theirs = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
        return f"{super().format_help()}\n{add_recover_arguments(theirs).format_help()}"


def parser() -> RunParser:
    """Return the parser of `run`."""
    made = RunParser(
        prog="megatron-recover run",
        description="Train with replicas of the model; when a process dies, the others finish its microbatches in that step.",
        usage="megatron-recover run [--nproc-per-node N | --replicas R] [options] SCRIPT [Megatron flags]",
        epilog="A replica is TP x PP x CP x lanes processes. --global-batch-size is that of the "
        "whole job. Exit codes: docs/reference/exit_codes.md. The flags below go behind the script's name, like Megatron's:",
    )
    made.set_defaults(is_again=False)  # True: this node was lost, and meets the others of its job anew
    add_flags(made)
    return made


def add_flags(parser: Parser) -> None:
    """Add the flags of `run` to its parser, or to that of a verb that takes the same line."""
    parser.add_argument(
        "--replicas", type=int, metavar="R",
        help="complete copies of the model; the data-parallel size is R x L (default: as many as --nproc-per-node gives "
        "processes for)",
    )  # fmt: skip
    parser.add_argument(
        "--lanes", type=int, metavar="L",
        help="data-parallel size inside each replica (default: the smallest over which its experts can be spread and, on "
        "GPUs with --nproc-per-node alone, with which a rank fits by plan's estimate)",
    )  # fmt: skip
    parser.add_argument(
        "--spares", type=int, metavar="N", default=0,
        help="slots of this node that are kept for replicas that are formed in place of lost ones, beside those that were "
        "theirs; not with --recover-heal off, or a flag that lets no replica join (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--rank-start", choices=("auto", *get_args(RankStart)), default="auto",
        help="how the processes of ranks start: fork, from one process that has imported everything; warm, as fresh "
        "processes that import everything in advance, which CUDA needs; auto: warm where there is a GPU (default: auto)",
    )  # fmt: skip
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="new folder for trace and logs (default: runs/<time>)")
    parser.add_argument(
        "--chaos",
        metavar="FILE|rate=P,seed=N",
        help="inject faults: a TOML file of exact ones, or random ones (docs/reference/chaos.md)",
    )
    parser.add_argument(
        "--trace-level", choices=trace.LEVELS, default="microbatches",
        help="what the trace shows: every microbatch, every step, or faults and recoveries only; check and report know "
        "only what the trace shows (default: microbatches)",
    )  # fmt: skip
    parser.add_argument(
        "--trace-file-bytes", type=_bytes, metavar="N", default=PART_BYTES,
        help="put events.jsonl aside when it has N bytes, at least 1 MiB, and compress it; N may end with KiB, MiB or GiB; "
        "0: never (default: 256MiB)",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="print only how the run ends if it does not end well")
    parser.add_argument(
        "--chained", action="store_true",
        help="another start follows by itself, as in a batch job: after exit code 2, too, leave a mark in --save that ends "
        "this (docs/reference/exit_codes.md)",
    )  # fmt: skip
    monitor_flags.add_flags(parser)
    launch_line.add_flags(parser)
