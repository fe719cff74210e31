"""The seams: one TOML file each, saying what of Megatron is replaced, why, and which upstream names that relies on.

`anchors.toml` lists what is used of Megatron without being replaced.
"""
