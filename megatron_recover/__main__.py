"""The command `python -m megatron_recover`: the same as `megatron-recover`."""

import sys

from megatron_recover.cli import main
from megatron_recover.config import leave_working_directory

if __name__ == "__main__":
    leave_working_directory()
    sys.exit(main())
