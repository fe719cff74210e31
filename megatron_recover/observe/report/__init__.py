"""The files that a run leaves for its readers: the report, its charts and pictures."""
