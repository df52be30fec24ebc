"""What a distribution holds, and its version; pyproject.toml has the other metadata.

The extensions are optional: without a compiler the installation goes on, and Python, torch and the C library do the same. Such
a wheel is tagged ``py3-none-any``. With ``UNICKPT_REQUIRE_EXTENSIONS=1`` the build fails in its place.
"""

import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from unickpt.base.installation import REPOSITORY  # noqa: E402
from unickpt.base.version import __version__  # noqa: E402

REQUIRED = os.environ.get("UNICKPT_REQUIRE_EXTENSIONS", "0") not in ("", "0")
SHIPPED = ("configs/*.json", "configs/*/*", "examples/*.py", "examples/demo/*.*")  # below unickpt/shipped
REFERENCE = "HEAD" if "+" in __version__ else f"v{__version__}"


def extension(name: str, *arguments: str) -> Extension:
    """Return an extension for Python's stable ABI, with the name of its module."""
    return Extension(
        name,
        [name.replace(".", "/") + ".c"],
        depends=["unickpt/checkpoint/format/_xxh3.h"],
        define_macros=[("Py_LIMITED_API", "0x030A0000")],
        extra_compile_args=["-std=c11", "-Werror=implicit-function-declaration", *arguments],
        py_limited_api=True,
        optional=not REQUIRED,
    )


def readme() -> str:
    """Return the README with absolute links, as a package index shows it."""

    def absolute(link: re.Match[str]) -> str:
        return f"{link[1]}[{link[2]}]({REPOSITORY}/{'raw' if link[1] else 'blob'}/{REFERENCE}/{link[3]})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)", absolute, (HERE / "README.md").read_text(encoding="utf-8"))


def write_version(package: Path) -> None:
    (package / "VERSION").write_text(f"{__version__}\n", encoding="utf-8")


class BuildPackage(build_py):
    """Adds the version, and the files of the repository that guides use."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "unickpt"
        write_version(package)
        for file in (file for pattern in SHIPPED for file in HERE.glob(pattern) if file.is_file()):
            target = package / "shipped" / file.relative_to(HERE)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


class BuildWheel(bdist_wheel):
    """All extensions or none: the tag of a wheel with extensions promises each of them."""

    def run(self) -> None:
        self.run_command("build")
        extensions = self.get_finalized_command("build_ext")
        files = [Path(extensions.get_ext_fullpath(each.name)) for each in self.distribution.ext_modules]
        if not all(file.is_file() for file in files):
            for file in files:
                file.unlink(missing_ok=True)
            self.distribution.ext_modules = []
            self.root_is_pure = True  # the tag, and the place of the modules
        super().run()


class BuildSource(sdist):
    """Adds the version, which git does not say there. MANIFEST.in has the files."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_version(Path(base_dir) / "unickpt")


setup(
    version=__version__,
    long_description=readme(),
    long_description_content_type="text/markdown",
    project_urls={
        "Repository": REPOSITORY,
        "Documentation": f"{REPOSITORY}/blob/{REFERENCE}/docs/index.md",
        "Changelog": f"{REPOSITORY}/blob/{REFERENCE}/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
        "Security": f"{REPOSITORY}/blob/{REFERENCE}/SECURITY.md",
        "Paper: Universal Checkpointing": "https://arxiv.org/abs/2406.18820",
        "Paper: ByteCheckpoint": "https://arxiv.org/abs/2407.20143",
        "Paper: C4": "https://arxiv.org/abs/2406.04594",
    },
    packages=find_packages(include=["unickpt*", "ds_unickpt*", "megatron_unickpt*", "torch_unickpt*"]),
    py_modules=["_unickpt_autoload"],
    ext_modules=[
        extension("unickpt.diagnosis.recording._fast"),
        extension("unickpt.checkpoint.format._casts", "-O3"),
        extension("unickpt.checkpoint.format._checksums", "-O3"),
        extension("unickpt.checkpoint.load._checked_read", "-O3"),
    ],
    cmdclass={"build_py": BuildPackage, "bdist_wheel": BuildWheel, "sdist": BuildSource},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},  # one wheel serves Python 3.10 and later
    package_data={
        "unickpt": [
            "py.typed",
            "diagnosis/recording/_fast.pyi",
            "checkpoint/format/_casts.pyi",
            "checkpoint/format/_checksums.pyi",
            "checkpoint/load/_checked_read.pyi",
            "diagnosis/reports/*.html",
            "diagnosis/reports/*.js",
            "cli/doctor/*.json",
        ],
        "ds_unickpt": ["py.typed"],
        "megatron_unickpt": ["py.typed"],
        "torch_unickpt": ["py.typed"],
    },
)
