"""The machines of `core` without processes: exhaustive exploration, and jobs on a virtual clock."""
