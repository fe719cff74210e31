"""Who may connect to a process of a job.

The key of the job, the handshake that proves it, and what listeners do about connections that have not proven it.
"""
