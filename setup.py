"""Name the packages: pyproject.toml cannot say that `patches/` and `scripts/` become two of them.

All else is in pyproject.toml (PEP 621).
"""

from setuptools import find_packages, setup

BESIDE = {"megatron_recover.patches": "patches", "megatron_recover.scripts": "scripts"}

setup(
    packages=[*find_packages(include=["megatron_recover", "megatron_recover.*"]), *BESIDE],
    package_dir=BESIDE,
)
