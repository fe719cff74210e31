"""Saving and loading: one writer for all replicas, the folder of checkpoints, and what a run resumes from."""
