"""Local checkpoints of nvidia-resiliency-ext (NVRx) as a peer of the memory tier, on CPU.

``pip install --no-deps --target DIR nvidia-resiliency-ext``, and put DIR into ``PYTHONPATH``. Two things differ from a job on
GPUs:

- ``BasicTensorAwareStateDict`` accepts only tensors on GPUs. ``HostState`` is the same for tensors in host memory: its copy to
  the host is a copy.
- An asynchronous save waits for the device before it returns (``torch.cuda.synchronize``). There is none to wait for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

try:
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict, dict_list_map_inplace
except ImportError:
    BasicTensorAwareStateDict = None


def problem() -> str:
    """Return why NVRx cannot run; '' if it can."""
    return "nvidia-resiliency-ext is not installed" if BasicTensorAwareStateDict is None else ""


if BasicTensorAwareStateDict is not None:

    class HostState(BasicTensorAwareStateDict):  # type: ignore[misc]
        """A state dict of tensors in host memory."""

        def __init__(self, state_dict: dict[str, Any]) -> None:
            self.state_dict = state_dict
            self._is_hollow = False

        def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:  # noqa: ARG002
            dict_list_map_inplace(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, self.state_dict)

        def restore_tensor_device(self, non_blocking: bool = True) -> None:
            pass


def _nothing_to_wait_for(*_: Any) -> None:
    pass


class LocalCheckpoints:
    """Saves tensors into a folder in memory, with a replica on another host. All ranks make the same calls.

    Args:
        folder: of this host.
        tensors: of this rank.
        ranks_per_host: number of ranks that share a host.
        replicate: keep a replica on the rank ``ranks_per_host`` further.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, torch.Tensor], ranks_per_host: int, *, replicate: bool) -> None:
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
        from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

        strategy = CliqueReplicationStrategy.from_replication_params(ranks_per_host, 2) if replicate else None
        self._manager = LocalCheckpointManager(folder, repl_strategy=strategy)
        self._tensors = tensors
        self._iteration = 0
        self._request: Any = None

    def save(self) -> None:
        """Begin an asynchronous save. The call returns when training may go on: after replication and the copy."""
        self._iteration += 1
        wait = torch.cuda.synchronize
        if not torch.cuda.is_available():
            torch.cuda.synchronize = _nothing_to_wait_for
        try:
            self._request = self._manager.save(HostState(dict(self._tensors)), self._iteration, is_async=True)
        finally:
            torch.cuda.synchronize = wait

    def finish(self) -> None:
        """Write what ``save`` copied, in this process, and agree on it."""
        self._request.execute_sync()
        self._request = None
