"""The pipeline schedules that compute a plan's microbatches: 1F1B and interleaved 1F1B."""
