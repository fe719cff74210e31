"""Transports that sum and copy tensors between the ranks of equal position in all replicas."""
