"""The command `python -m megatron_recover`: the same as `megatron-recover`."""

import sys

from megatron_recover.cli import main

if __name__ == "__main__":
    sys.exit(main())
