"""Slurm: host lists, the batch script of a job, and the judge of a user's script.

Everything here is pure text. Nothing here runs a command of Slurm: inside a container there are
none. `cli/sbatch.py` submits.
"""
