"""Reading of traces: the invariants of a run, its report, and the progress of a run that lasts."""
