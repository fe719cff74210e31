"""Samples and random state of a microbatch, and what replicas must start alike with."""
