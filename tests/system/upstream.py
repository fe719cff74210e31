"""Upstream's own training scripts, unchanged: where they are, and a run of one by torchrun on the CPU.

`python -m torch.distributed.run ... tests/system/upstream.py SCRIPT FLAG...` runs the script as plain Megatron. Only what
Megatron needs to run without CUDA at all is put in its place first.
"""

from __future__ import annotations

import os
import pathlib
import sys
from argparse import ArgumentParser
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def script(name: str) -> pathlib.Path:
    """The path of a script of upstream's; skips the test where there is no checkout."""
    given = os.environ.get("MEGATRON_CHECKOUT")
    checkout = pathlib.Path(given) if given else ROOT.parent / "shared" / "upstream" / "core_v0.19.0"
    path = checkout / name
    if not path.is_file():
        if given:
            raise FileNotFoundError(f"MEGATRON_CHECKOUT is {given}, and has no {name}")
        pytest.skip(f"no Megatron checkout: set MEGATRON_CHECKOUT to the folder with {name}")
    return path


def main() -> None:
    """Run upstream's script in this rank of torchrun's, on the CPU."""
    from megatron.training import arguments

    from megatron_recover.megatron import cpu
    from megatron_recover.megatron.launch import script as running

    cpu.enable_cpu()
    add = arguments.add_megatron_arguments

    def add_with_defaults(parser: ArgumentParser) -> Any:
        parser = add(parser)
        cpu.set_cpu_defaults(parser)
        parser.set_defaults(rerun_mode="disabled")  # as under `run`, so that both name their losses alike
        return parser

    arguments.add_megatron_arguments = add_with_defaults
    running.run(sys.argv[1:])


if __name__ == "__main__":
    main()
