"""A module without a family, in plain torch and under DeepSpeed, has one set of names: commands translate nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torch_unickpt
from unickpt.cli.main import main


class Own(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(6, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(6, 6, bias=False)
        self.head.weight = self.body.weight
        self.frozen = torch.nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)).relu()).square().mean()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of three steps. The optimizer has the frozen parameter, which no step uses."""
    torch.manual_seed(0)
    model = Own()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).backward()
        optimizer.step()
    torch_unickpt.save_training(model, optimizer, tmp_path / "run" / "step3", step=3)
    return tmp_path / "run" / "step3"


def test_an_export_for_deepspeed_and_back_is_equal(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(saved), str(tmp_path / "universal"), "--to", "deepspeed-universal"]) == 0
    told = capsys.readouterr().out
    assert "states of 4 parameters" in told
    assert "not trained: frozen, norm.num_batches_tracked" in told
    assert main(["convert", str(tmp_path / "universal"), str(tmp_path / "back")]) == 0
    for pair in ((saved, tmp_path / "back"), (tmp_path / "back", saved)):
        assert main(["diff", *map(str, pair)]) == 0


def test_an_export_for_transformers_needs_a_family(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(saved), str(tmp_path / "hf"), "--to", "hf"]) == 2
    assert "the model family is unknown" in capsys.readouterr().err


def test_a_choice_of_the_user_is_not_ignored(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = [str(tmp_path / "universal"), "--to", "deepspeed-universal", "--dialect", "llama"]
    assert main(["export", str(saved), *to]) == 2
    assert "no dialect between 'torch' and 'huggingface'" in capsys.readouterr().err
