"""A thin entry point for tools that look for setup.py.

The package is described in pyproject.toml (PEP 621).
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["megatron_recover", "megatron_recover.*"]), "megatron_recover.patches"],
    package_dir={"megatron_recover.patches": "patches"},
)
