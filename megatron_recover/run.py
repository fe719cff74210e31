"""The command `python -m megatron_recover.run`: `megatron-recover run`.

As `python -m torch.distributed.run` is torchrun.
"""

import sys

from megatron_recover.cli import main
from megatron_recover.config import leave_working_directory

if __name__ == "__main__":
    leave_working_directory()
    sys.exit(main(["run", *sys.argv[1:]]))
