"""Exhaustive exploration of the machines of `core` in small jobs."""
