"""Installs the replacements in Megatron, and checks that the installed version fits."""
