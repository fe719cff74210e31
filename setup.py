"""Name the packages: pyproject.toml cannot say that `patches/` becomes one of them.

All else is in pyproject.toml (PEP 621).
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["megatron_recover", "megatron_recover.*"]), "megatron_recover.patches"],
    package_dir={"megatron_recover.patches": "patches"},
)
