"""Parses the arguments of a training script in its own process, and ends that for bad input.

torch and Megatron are imported inside functions, as in `megatron/training.py`.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatron_recover import flags
from megatron_recover.config import BAD_ARGUMENTS
from megatron_recover.core.exit_code import ExitCode
from megatron_recover.megatron.launch import script
from megatron_recover.megatron.launch.arguments import add_recover_arguments, cpu_refusals
from megatron_recover.megatron.launch.device import unseen_gpu

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def parse(
    extra_args_provider: script.Provider | None,
    args_defaults: Mapping[str, Any],
    defaults: Mapping[str, Any] = _NOTHING,
    *,
    ignores_unknown: bool = False,
) -> Namespace:
    """Parse Megatron's arguments and the `--recover-*` flags, and validate Megatron's; return all.

    Without CUDA, install the CPU's substitutes first (`cpu.enable_cpu`). `defaults` replaces some
    of Megatron's defaults. `ignores_unknown`: flags that no parser knows are left out. Bad input
    ends the process with exit code 2.
    """
    from megatron.training.arguments import parse_and_validate_args

    from megatron_recover.megatron import cpu

    on_cpu = prepare_device()

    def provide(parser: ArgumentParser) -> ArgumentParser:
        add_recover_arguments(parser)
        if on_cpu:
            cpu.set_cpu_defaults(parser)
        # Upstream's default repeats a step whose result looks wrong. That takes an all-reduce over
        # the world in each step.
        parser.set_defaults(rerun_mode="disabled", **defaults)
        if extra_args_provider is not None:
            parser = extra_args_provider(parser)
        refuse([] if ignores_unknown else flags.unknown(sys.argv[1:], parser))
        return parser

    with bad_input_ends():
        with _exit_is_refusal():
            args: Namespace = script.original(parse_and_validate_args)(provide, ignores_unknown, {**args_defaults})
        refuse(cpu_refusals(args) if on_cpu else [])
    return args


@contextlib.contextmanager
def _exit_is_refusal() -> Iterator[None]:
    """Raise ValueError with the last line on stdout where the block calls `exit()`.

    So upstream's parser refuses flags of the past. What is printed appears at the end of the block.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    except SystemExit as stop:
        if stop.code is None:
            raise ValueError((printed.getvalue().splitlines() or ["Megatron's parser has ended the process"])[-1]) from None
        raise
    finally:
        print(printed.getvalue(), end="", flush=True)


def prepare_device() -> bool:
    """Install the CPU's substitutes where torch finds no GPU; return whether it finds none.

    Where the machine has a GPU that torch does not see, the process ends with exit code 2.
    """
    import torch

    from megatron_recover.megatron import cpu

    if torch.cuda.is_available():
        return False
    with bad_input_ends():
        refuse(unseen_gpu())
    cpu.enable_cpu()
    return True


def refuse(found: Sequence[str]) -> None:
    """Raise ValueError with the lines, if there are any."""
    if found:
        raise ValueError("\n".join(found))


@contextlib.contextmanager
def bad_input_ends() -> Iterator[None]:
    """End the process with exit code 2 if the body rejects the user's input; print each mistake.

    Input is rejected by ValueError, AssertionError, OSError or ImportError.
    """
    try:
        yield
    except (ValueError, AssertionError, OSError, ImportError) as error:
        # Megatron asserts on its arguments, often without a message. Then the source line is the
        # message.
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error) or f"{os.path.basename(place.filename)}:{place.lineno} wants: {place.line}"
        print(*(f"{BAD_ARGUMENTS}{line}" for line in text.splitlines()), sep="\n", file=sys.stderr, flush=True)
        sys.exit(ExitCode.BAD_INPUT)
