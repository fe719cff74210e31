"""Simulated jobs of any size on a virtual clock."""
