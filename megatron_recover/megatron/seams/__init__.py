"""Where Megatron is replaced or relied on, and whether the installed version fits."""
