"""Statistics of the inputs of Linear modules, recorded while a model runs on a sample of data, and their file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from unickpt.base.errors import FormatError
from unickpt.transform.quantise.measure import Inputs

_MEAN_SQUARE, _VARIANCE = ".input_mean_square", ".input_variance"


class InputStatistics:
    """Records mean squares and variances of the inputs of all Linear modules of a model.

    Example:
        A few batches are enough::

            with unickpt.InputStatistics(model) as statistics:
                for batch in sample:
                    model(**batch)
            statistics.save("inputs.safetensors")      # unickpt plan bits --inputs inputs.safetensors
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._sums: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # of values and of squares, float64 [in]
        self._counts: dict[str, int] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> InputStatistics:
        for name, module in self._model.named_modules():
            if isinstance(module, torch.nn.Linear):
                self._hooks.append(module.register_forward_pre_hook(self._recorder(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _recorder(self, name: str) -> Any:
        @torch.no_grad()
        def record(_: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            values = arguments[0].detach().flatten(0, -2).double()
            sums = (values.sum(0).cpu(), values.square().sum(0).cpu())
            before = self._sums.get(name)
            self._sums[name] = sums if before is None else (before[0] + sums[0], before[1] + sums[1])
            self._counts[name] = self._counts.get(name, 0) + values.shape[0]

        return record

    def statistics(self) -> Mapping[str, Inputs]:
        """Return the statistics by name of the module; of modules that have run."""
        found = {}
        for name, (values, squares) in self._sums.items():
            count = self._counts[name]
            mean_square = squares / count
            variance = float(mean_square.mean() - (values / count).mean() ** 2)
            found[name] = Inputs(mean_square.float(), variance)
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the statistics to a safetensors file. Raises OSError if it cannot be written."""
        tensors = {}
        for name, each in self.statistics().items():
            tensors[name + _MEAN_SQUARE] = each.mean_square.contiguous()
            tensors[name + _VARIANCE] = torch.tensor(each.variance)
        save_file(tensors, Path(path))


def read_inputs(path: Path) -> dict[str, Inputs]:
    """Read a file that ``InputStatistics.save`` wrote.

    Raises:
        FormatError: the file is not one of these, or cannot be read.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as err:
        raise FormatError(f"{path}: cannot be read as statistics of inputs ({err})") from err
    names = [key.removesuffix(_MEAN_SQUARE) for key in tensors if key.endswith(_MEAN_SQUARE)]
    if not names or any(name + _VARIANCE not in tensors for name in names):
        raise FormatError(f"{path}: has no statistics of inputs")
    return {name: Inputs(tensors[name + _MEAN_SQUARE].float(), float(tensors[name + _VARIANCE])) for name in names}
