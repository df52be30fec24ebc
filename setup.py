"""Which files the distribution holds; pyproject.toml has the metadata.

``configs/dialects`` is installed as the data of ``unickpt.dialects``, so one copy serves the source tree and the package.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["unickpt*", "ds_unickpt*", "megatron_unickpt*"]), "unickpt.dialects.data"],
    py_modules=["_unickpt_autoload"],
    package_dir={"unickpt.dialects.data": "configs/dialects"},
    package_data={
        "unickpt": ["py.typed", "diagnosis/reports/*.html", "diagnosis/reports/*.js"],
        "unickpt.dialects.data": ["*.toml"],
        "ds_unickpt": ["py.typed"],
        "megatron_unickpt": ["py.typed"],
    },
)
