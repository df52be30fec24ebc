"""Packaging of unickpt: the core, and the adapters for DeepSpeed and Megatron.

The ``torch.backends`` entry point is what makes the JSON key work without an import line: torch
calls it at the end of ``import torch`` (see ``_unickpt_autoload.py``).
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "unickpt/__init__.py").read_text(), re.M).group(1)

setup(
    name="unickpt",
    version=VERSION,
    description="Universal checkpoints for DeepSpeed and Megatron: resume under any parallel layout",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[*find_packages(include=["unickpt*", "ds_unickpt*", "megatron_unickpt*"]), "unickpt.dialects"],
    py_modules=["_unickpt_autoload"],
    package_dir={"unickpt.dialects": "configs/dialects"},
    package_data={
        "unickpt": ["py.typed", "views/*.html", "views/*.js"],
        "unickpt.dialects": ["*.toml"],
        "ds_unickpt": ["py.typed"],
        "megatron_unickpt": ["py.typed"],
    },
    install_requires=[
        "torch>=2.4",
        "safetensors>=0.4.3",
        "packaging>=22",
        "numpy>=1.24",
        "xxhash>=3.0",
        "wrapt>=1.15",
        "rich>=13",
        "tomli>=2; python_version < '3.11'",
    ],
    extras_require={
        "deepspeed": ["deepspeed>=0.17,<0.20"],
        "megatron": ["megatron-core>=0.12"],
        "hf": ["transformers>=4.50", "accelerate>=1.6", "peft>=0.15", "trl>=0.17", "datasets"],
        "object-store": ["fsspec>=2023.6"],  # and the store's own package: s3fs, gcsfs, adlfs
        "demo": ["matplotlib>=3.7", "psutil"],
        "metrics": ["prometheus-client>=0.17", "tensorboard>=2.13"],
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "hypothesis>=6.100",
            "ruff",
            "mypy",
            "import-linter",
            "jsonschema",
            "psutil",
            "fsspec",
            "s3fs",
            "moto[server]>=5",
            "prometheus-client>=0.17",
            "tensorboard>=2.13",
            "lightning>=2.4",
        ],
    },
    entry_points={
        "console_scripts": ["unickpt = unickpt.cli.main:main"],
        "torch.backends": ["unickpt = _unickpt_autoload:arm"],
    },
)
