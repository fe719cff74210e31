"""The seams, one TOML file each, with the replaced name of Megatron, the reason and the signature.

`anchors.toml` lists the parts of Megatron that are used without being replaced.
"""
