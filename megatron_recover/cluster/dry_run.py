"""The verdict on the dry run: whether the training script accepts its arguments."""

from __future__ import annotations

import re

from megatron_recover import config as settings
from megatron_recover.cluster.node import ProcessEnd
from megatron_recover.cluster.output import Output
from megatron_recover.config import BAD_ARGUMENTS
from megatron_recover.core.exit_code import ExitCode

CALLS_PRETRAIN = (
    "called Megatron's pretrain; call parse_and_validate_args and pretrain of megatron.training, as upstream's "
    "pretrain_gpt.py does"
)


def failure(script: str, end: ProcessEnd, output: Output) -> tuple[int, str] | None:
    """Return exit code and reason of a run whose dry run has failed; None if it has passed."""
    if end.status == settings.DRY_RUN_PASSED:
        return None
    if end.status == ExitCode.BAD_INPUT:
        return ExitCode.BAD_INPUT, refusal(output)
    if end.status == ExitCode.OK:
        return ExitCode.BAD_INPUT, f"{script} never {CALLS_PRETRAIN}"
    return ExitCode.FAILED, f"{script} ended by {end.cause} before it trained; see {output.log}"


def refusal(output: Output) -> str:
    """Return why a process did not accept its arguments.

    The reason is its `BAD_ARGUMENTS` lines. Without any it is the last line, less what argparse
    writes before the reason. Without output it is a fixed text.
    """
    lines = output.end().strip().splitlines() or ["the training script refused its arguments"]
    said = [line.removeprefix(BAD_ARGUMENTS) for line in lines if line.startswith(BAD_ARGUMENTS)]
    return "\n".join(said) or re.sub(r"^\S+: error: (argument )?", "", lines[-1])
