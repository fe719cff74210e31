"""Exhaustive exploration of the machines of `core`."""
