"""Checks of the nodes of a job before any rank starts: what cannot work, and what to change.

`node.py` checks one node. `between.py` compares the reports of several nodes, which `service.py`
and `probing.py` have made by connections between all of them.
"""
