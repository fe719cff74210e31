"""Where a run is at present."""
