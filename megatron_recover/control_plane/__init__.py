"""Messages between ranks, leaders and the coordinator.

`rank_driver`, `replica_driver` and `coordinator_driver` exchange these messages for the three state
machines of `core`.
"""
