"""The files in which ZeRO-Infinity keeps optimizer states and parameters on NVMe. Uses private attributes of DeepSpeed.

Between two steps the tensors of DeepSpeed have no values. The values are in files, one per tensor: the elements, then padding.
A save and a load map these files into memory. So a save reads them where it writes the checkpoint, a load writes into them,
and neither needs memory for the states. DeepSpeed opens them with O_DIRECT, so ``flush`` writes them back to the device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_unickpt.framework.fallbacks import UNKNOWN_BUFFERS


def mapped(path: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the first elements of a file as a 1-D tensor, which shares its memory with the file."""
    return torch.from_file(path, shared=True, size=numel, dtype=dtype)


def flush(paths: set[str]) -> None:
    """Write the changed pages of files to the device."""
    for path in sorted(paths):
        handle = os.open(path, os.O_RDWR)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@dataclass(frozen=True, slots=True)
class SwappedPartition:
    """A ZeRO-3 sub-group whose master and states are in files.

    Attributes:
        optimizer: DeepSpeedZeroOptimizer_Stage3.
        sub_group: number of the sub-group.
        tensors: ``master`` and the states by key, as mapped files, 1-D. All have the same number of elements.
    """

    optimizer: Any
    sub_group: int
    tensors: dict[str, torch.Tensor]
    paths: dict[str, str] = field(repr=False)

    @classmethod
    def of(cls, optimizer: Any, sub_group: int) -> SwappedPartition | None:
        """Return the files of a sub-group, or None if it is in memory.

        With ``pipeline_read`` or ``pipeline_write`` the live tensors are not empty between two steps: they are views of buffers
        that other sub-groups use too.
        """
        if not optimizer.swap_optimizer or not optimizer._swappable_optimizer_subgroup(sub_group):
            return None
        found = cls(optimizer, sub_group, {}, {})
        found._map()
        return found

    def _map(self) -> None:
        master = self.optimizer.fp32_partitioned_groups_flat[self.sub_group]
        keys = {id(value): key for key, value in self.optimizer.optimizer.state.get(master, {}).items()}
        try:
            info = self.optimizer.optimizer_swapper.swap_params_info[master.ds_id]
            files = {
                "master" if context.compute_tensor is master else keys[id(context.compute_tensor)]: context.swap_path
                for context in info.tensors
            }
        except (AttributeError, KeyError) as err:
            raise UNKNOWN_BUFFERS.error(f"the swap files of ZeRO-3 sub-group {self.sub_group} are unknown ({err!r})") from None
        for key in files.keys() - self.tensors.keys():
            dtype = master.dtype if key == "master" else self.optimizer.optimizer.state[master][key].dtype
            self.tensors[key], self.paths[key] = mapped(files[key], info.numel(), dtype), files[key]

    def create(self, keys: Mapping[str, torch.dtype]) -> None:
        """Add states of zeros, in the way in which the first step does. All states of a sub-group are added together."""
        optimizer, number = self.optimizer, self.sub_group
        master = optimizer.fp32_partitioned_groups_flat[number]
        optimizer._optimizer_states_and_gradient_swap_in(number)
        for key, dtype in keys.items():
            optimizer.optimizer.state[master][key] = torch.zeros_like(master.data, dtype=dtype)
        optimizer.optimizer_swapper.swap_out_optimizer_state(parameter=master, async_swap=False)
        master.grad = None
        self._map()


def swapped_weight(parameter: Any) -> torch.Tensor | None:
    """Return this rank's part of a parameter in its file, 1-D, or None if it is in memory."""
    swapper, partition = getattr(parameter, "nvme_swapper", None), getattr(parameter, "ds_tensor", None)
    if swapper is None or partition is None or partition.status.name != "NOT_AVAILABLE":
        return None
    return mapped(swapper.get_path(parameter, must_exist=True), int(partition.ds_numel), parameter.dtype)


def release_weights(module: torch.nn.Module) -> set[str]:
    """Drop the copies in memory of parameters that are in files. Returns the paths of the files."""
    paths = set()
    parameters: list[Any] = list(module.parameters())
    for parameter in parameters:
        swapper = getattr(parameter, "nvme_swapper", None)
        if swapper is None or parameter.ds_id not in swapper.id_to_path:
            continue
        swapper.synchronize_writes()
        swapper.synchronize_reads()
        if parameter.ds_tensor.status.name == "AVAILABLE" and parameter.ds_id in swapper.available_params:
            swapper.remove_partition_and_release_buffers([parameter])
        paths.add(swapper.get_path(parameter, must_exist=True))
    return paths
