"""Packaging of megatron-recover. Tool settings are in pyproject.toml; exact versions in requirements.lock."""

from setuptools import find_packages, setup

setup(
    name="megatron-recover",
    version="0.1.0",
    description="Megatron-Core pre-training that survives dying processes without restart, rollback or a smaller batch",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=[*find_packages(include=["megatron_recover", "megatron_recover.*"]), "megatron_recover.patches"],
    package_dir={"megatron_recover.patches": "patches"},
    package_data={"megatron_recover.patches": ["*.toml"], "megatron_recover.observe": ["templates/*"]},
    install_requires=[
        "torch>=2.11",
        "megatron-core>=0.19,<0.20",
        "numpy>=2.0",
        "msgspec>=0.19",
        "rich>=13",
        "jinja2>=3.1",
        "matplotlib>=3.8",
        "tensorboard>=2.16",
        "psutil>=5.9",
    ],
    extras_require={
        "gpu": ["transformer-engine[pytorch]", "nccl4py>=0.6"],
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff>=0.6",
            "mypy>=1.11",
            "import-linter>=2.0",
        ],
    },
    entry_points={"console_scripts": ["megatron-recover = megatron_recover.cli:main"]},
)
