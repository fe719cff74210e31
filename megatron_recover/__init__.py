"""megatron-recover: Megatron-Core pre-training that survives dying GPUs and processes."""

__version__ = "0.1.0"
