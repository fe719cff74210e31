"""What a trace says: the invariants that it keeps, the report of a run, and where a run is now."""
