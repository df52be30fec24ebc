"""The folder comes first here, and last in ``torch_unickpt``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")

import megatron_unickpt
from unickpt.base.errors import ConfigError


@pytest.mark.parametrize(("call", "name"), [("save", "directory"), ("load", "directory"), ("resume_or_start", "folder")])
def test_a_model_in_place_of_the_folder_is_refused(tmp_path: Path, call: str, name: str) -> None:
    """Otherwise its ``str`` would be a folder without checkpoints."""
    order = f"expected a path or a URL, got Linear. The order is {name}, model, optimizer"
    with pytest.raises(ConfigError, match=order):
        getattr(megatron_unickpt, call)(torch.nn.Linear(1, 1), str(tmp_path))
