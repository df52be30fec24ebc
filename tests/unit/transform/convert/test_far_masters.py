"""Masters that are those of other elements, in files of ``torch.distributed.checkpoint``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from unickpt.transform.convert.pickles.lazy_tensor import OpenFiles
from unickpt.transform.convert.torch_dcp.files import DcpTable, is_far

MASTER = torch.arange(1.0, 3501.0).view(70, 50)
CASES = {
    "bf16": (MASTER.bfloat16(), MASTER, False),
    "fp8": ((MASTER / 8).to(torch.float8_e4m3fn), MASTER / 8, False),
    "other elements": (MASTER.bfloat16(), MASTER.flip(0), True),
    "one number": (torch.tensor(2.0).bfloat16(), torch.tensor(2.0), False),
    "another number": (torch.tensor(2.0), torch.tensor(-3.0), True),
    "empty": (torch.empty(0, 4), torch.empty(0, 4), False),
    "zeros": (torch.zeros(9), torch.zeros(9), False),
    "not numbers": (torch.full((9,), float("nan")), torch.ones(9), False),
}


@pytest.mark.parametrize("name", CASES)
def test_only_other_elements_are_far(tmp_path: Path, name: str) -> None:
    weight, master, far = CASES[name]
    dcp.save({"weight": weight, "master": master}, checkpoint_id=tmp_path, no_dist=True)
    with OpenFiles() as files:
        table = DcpTable(tmp_path, files)
        assert is_far(table.tensors["weight"], table.tensors["master"]) is far
