"""Layouts of a job: the memory that each takes, what a death costs in it, and which to choose."""
