"""Which folders are packages: pyproject.toml, which has all else, cannot say where `patches/` goes beside what is found."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["megatron_recover", "megatron_recover.*"]), "megatron_recover.patches"],
    package_dir={"megatron_recover.patches": "patches"},
)
