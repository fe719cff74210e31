"""A rank's life: from Megatron's arguments to its exit code."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any


def parse_arguments(
    extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None, args_defaults: dict[str, Any] | None = None
) -> Namespace:
    import torch
    from megatron.training.arguments import parse_and_validate_args

    from megatron_recover.megatron import cpu

    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        cpu.enable_cpu()

    def provide(parser: ArgumentParser) -> ArgumentParser:
        if on_cpu:
            cpu.set_cpu_defaults(parser)
        parser.set_defaults(rerun_mode="disabled")
        return extra_args_provider(parser) if extra_args_provider else parser

    return parse_and_validate_args(extra_args_provider=provide, args_defaults=args_defaults or {})


def pretrain(*args: Any, **kwargs: Any) -> None:
    from megatron.training import pretrain as megatron_pretrain

    megatron_pretrain(*args, **kwargs)
