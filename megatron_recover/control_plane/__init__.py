"""Messages between ranks, leaders and the coordinator.

`rank_driver`, `replica_driver` and `coordinator_driver` run the three machines of `core` on these messages.
"""
