"""The step of one rank: what is computed, counted, summed, checked and applied.

Every trainer that uses torch can use this package. Nothing in it imports Megatron.
"""
