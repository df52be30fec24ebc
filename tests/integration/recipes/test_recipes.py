"""Every page of ``docs/recipes`` is followed as it is printed, on a CPU.

``UNICKPT_FULL_MATRIX=1`` follows all, CI only ``CHOSEN``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.extent import FULL
from tests.support.recipes import blocks, follow
from tests.support.repository import REPO
from unickpt.testing.launch import environment

PAGES = sorted(path for path in (REPO / "docs" / "recipes").glob("*.md") if path.name != "index.md")
# In place of the script of a Megatron-LM tree: runs it on a CPU, with a small model.
PRETRAIN = 'import runpy\nrunpy.run_module("tests.jobs.megatron.pretrain", run_name="__main__")\n'
CHOSEN = ("alerts-and-dashboard",)


@pytest.mark.hf
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES, ids=[path.stem for path in PAGES])
def test_a_recipe_does_what_it_prints(page: Path, tmp_path: Path) -> None:
    if page.stem not in CHOSEN and not FULL:
        pytest.skip("UNICKPT_FULL_MATRIX=1 follows it")
    packages = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    if page.stem.startswith("megatron"):
        if "MEGATRON_LM" not in os.environ:
            pytest.skip("MEGATRON_LM names no Megatron-LM tree")
        (tmp_path / "pretrain_gpt.py").write_text(PRETRAIN)
    elif page.stem == "offline":  # installs what is committed here, from a package index, and imports nothing else
        subprocess.run(["git", "clone", "--quiet", str(REPO), str(tmp_path / "unickpt")], check=True)
        packages = ""
    elif page.stem.startswith("slurm") and not ("SLURM_CONF" in os.environ and shutil.which("sbatch")):
        pytest.skip("evidence/one_machine_slurm.sh starts a Slurm for it")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = environment(PATH=path, DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1", PYTHONPATH=packages)
    follow(page, tmp_path, env, timeout_s=1800)


def test_what_is_expected_is_compared_and_what_cannot_run_is_not_typed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        textwrap.dedent("""\
        ```python title="a.py"
        print("loss 0.25, done")
        ```

        1. Type

            ```bash
            python a.py
            ```

            ```text
            loss ..., done
            ```

        <!-- not run: needs a GPU -->
        ```bash
        false
        ```
    """)
    )
    assert [block.language for block in blocks(page.read_text())] == ["python", "bash", "text", "bash"]
    env = environment()
    follow(page, tmp_path, env)
    page.write_text(page.read_text().replace("loss ...", "loss 0.5"))
    with pytest.raises(AssertionError, match=r"expected the line\nloss 0.5, done\nand found\nloss 0.25"):
        follow(page, tmp_path, env)
    page.write_text("```bash\nfalse\n```\n")
    with pytest.raises(AssertionError, match="this failed"):
        follow(page, tmp_path, env)
