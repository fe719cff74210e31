"""The command `python -m megatron_recover.run`: `megatron-recover run`.

As `python -m torch.distributed.run` is torchrun.
"""

import sys

from megatron_recover.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
