"""Saves checkpoints through one writer for all replicas, and checks what a run resumes from."""
