"""Training scripts, which the wheel has as `megatron_recover.scripts`, and tools of development."""
