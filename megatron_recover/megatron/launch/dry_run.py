"""Runs the training script up to the point where training would begin.

The launcher runs this before any rank.

`python dry_run.py SCRIPT ARGUMENT...` behaves like `python SCRIPT ARGUMENT...`. A script that calls
this package's `pretrain` ends in that call, after its arguments are checked. A script that calls
Megatron's `pretrain` or torch's `init_process_group` itself is refused. It would train alone on the
user's data, write to the user's checkpoints, or wait for ranks that were never started.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from typing import NoReturn

from megatron_recover.config import BAD_ARGUMENTS
from megatron_recover.core.values import ExitCode


def main() -> None:
    """Run the script that the command line names; refuse a call that would begin to train.

    A refused call prints a line and ends the process with exit code 2.
    """
    import megatron.training
    import torch.distributed

    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    megatron.training.pretrain = megatron.training.training.pretrain = _refused("Megatron's pretrain")
    torch.distributed.init_process_group = _refused("torch.distributed.init_process_group")
    runpy.run_path(sys.argv[0], run_name="__main__")


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        print(f"{BAD_ARGUMENTS}{sys.argv[0]} calls {name}; call megatron_recover.megatron.pretrain instead", file=sys.stderr)
        sys.exit(ExitCode.BAD_INPUT)

    return refuse


if __name__ == "__main__":
    main()
