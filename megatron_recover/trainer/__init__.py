"""One rank's step: its samples ahead of time, computation, counts, sums, checks and result.

Any torch trainer can use this package. Nothing in it imports Megatron.
"""
