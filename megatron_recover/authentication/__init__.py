"""The admission of connections to the processes of a job.

It consists of the job's key, the handshake that proves the key, and the handling of connections
that have not proven it.
"""
