"""The invariants as rules over a trace, one file for each.

INV-9 needs more than a trace, so it is not here.
"""
