"""Which files the distribution holds; pyproject.toml has the metadata.

``configs/dialects`` is the data of ``unickpt.transform.dialects``, so one copy serves the source tree and the package.
The extensions are optional: without a compiler the installation goes on, and Python, torch and the C library do the same.
"""

from setuptools import Extension, find_packages, setup


def extension(name: str, *arguments: str) -> Extension:
    """Return an optional extension for Python's stable ABI, with the name of its module."""
    return Extension(
        name,
        [name.replace(".", "/") + ".c"],
        define_macros=[("Py_LIMITED_API", "0x030A0000")],
        extra_compile_args=["-std=c11", "-Werror=implicit-function-declaration", *arguments],
        py_limited_api=True,
        optional=True,
    )


setup(
    packages=[*find_packages(include=["unickpt*", "ds_unickpt*", "megatron_unickpt*"]), "unickpt.transform.dialects.data"],
    py_modules=["_unickpt_autoload"],
    ext_modules=[
        extension("unickpt.diagnosis.recording._fast"),
        extension("unickpt.checkpoint.format._casts", "-O3"),
        extension("unickpt.checkpoint.load._checked_read", "-O3"),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},  # one wheel serves Python 3.10 and later
    package_dir={"unickpt.transform.dialects.data": "configs/dialects"},
    package_data={
        "unickpt": [
            "py.typed",
            "diagnosis/recording/_fast.pyi",
            "checkpoint/format/_casts.pyi",
            "checkpoint/load/_checked_read.pyi",
            "diagnosis/reports/*.html",
            "diagnosis/reports/*.js",
        ],
        "unickpt.transform.dialects.data": ["*.toml"],
        "ds_unickpt": ["py.typed"],
        "megatron_unickpt": ["py.typed"],
    },
)
