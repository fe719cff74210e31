"""megatron-recover: Megatron-Core pre-training that survives dying GPUs, processes and nodes."""

__version__ = "0.1.0"
