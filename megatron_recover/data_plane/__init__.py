"""Transports that sum and copy tensors between the same-position ranks of all replicas."""
