"""The processes of a node: the launcher with its agent, recorder and monitor, the fork server.

Also how nodes meet, the process of the coordinator, and the checks before a job.
"""
