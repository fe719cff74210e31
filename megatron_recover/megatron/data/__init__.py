"""Samples and random state of a microbatch, and all that must be equal when replicas start."""
