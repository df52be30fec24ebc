"""Declares hooks on torch, with the versions, fingerprints and upstream URL of the hooked function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_unickpt.framework.versions import TRANSFORMERS_VERSIONS, VERL_VERSIONS, VERSIONS
from unickpt.base.hooks import Hook

_SOURCE = "https://github.com/pytorch/pytorch/blob/main"
FINGERPRINTS = {
    "torch.dcp.save": frozenset({"a90ae93e5181"}),
    "torch.dcp.async_save": frozenset({"077d7713d5d7"}),
    "torch.dcp.load": frozenset({"816fdbbcd991"}),
    "torch.timing.ddp": frozenset({"edeca76c32b0", "8c9e53e7d816"}),
    "torch.timing.fsdp": frozenset({"12613d78c56e", "8c50e63ef8c6"}),
    "torch.dcp.metadata": frozenset({"46c49b5800fc"}),
    "verl.fsdp.save": frozenset({"b0a867d01519"}),
    "verl.fsdp.load": frozenset({"f4e358625b96"}),
    "torch.dcp.hf_metadata": frozenset({"690827a42058"}),
    "torch.dcp.read_data": frozenset({"a62881ec0243"}),
    "transformers.resume": frozenset({"ea4e61dc1957"}),
    "torch.dcp.hf_read_data": frozenset({"3fc697099b15"}),
}


def declared(
    name: str, module: str, attribute: str, wrapper: Callable[..., Any], *, why: str, parameters: tuple[str, ...] = ()
) -> Hook:
    """Return a hook on a function of torch. It is not strict: the wrapper relies only on the names of parameters."""
    return Hook(
        name=name, module=module, attribute=attribute, wrapper=wrapper, versions=VERSIONS, fingerprints=FINGERPRINTS[name],
        why=why, upstream=f"{_SOURCE}/{module.replace('.', '/')}.py",
        until="torch takes its default storage classes from a registry", parameters=parameters, strict=False,
    )  # fmt: skip


def declared_in_verl(name: str, method: str, wrapper: Callable[..., Any], *, parameters: tuple[str, ...]) -> Hook:
    """Return a hook on verl's manager of FSDP checkpoints. It is not strict, as ``declared``."""
    return Hook(
        name=name, module="verl.utils.checkpoint.fsdp_checkpoint_manager", attribute=f"FSDPCheckpointManager.{method}",
        wrapper=wrapper, versions=VERL_VERSIONS, fingerprints=FINGERPRINTS[name],
        why="each rank reads its own file again, whose name has the number of ranks",
        upstream="https://github.com/volcengine/verl/issues/2265", until="verl saves FSDP models through torch's DCP",
        parameters=parameters, strict=False,
    )  # fmt: skip


def declared_in_trainer(name: str, method: str, wrapper: Callable[..., Any]) -> Hook:
    """Return a hook on Trainer of transformers. It is not strict, as ``declared``."""
    return Hook(
        name=name, module="transformers.trainer", attribute=f"Trainer.{method}", wrapper=wrapper,
        versions=TRANSFORMERS_VERSIONS, fingerprints=FINGERPRINTS[name],
        why="without a file of its own it starts optimizer and schedule anew, without a message",
        upstream="https://github.com/huggingface/transformers/blob/main/src/transformers/trainer.py",
        until="Trainer refuses a checkpoint whose optimizer states it does not find", parameters=("checkpoint",), strict=False,
    )  # fmt: skip
