"""Names of modules that need CUDA or an account, for libraries that import them and use none of them in these jobs."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from megatron_unickpt.testing import jobs  # before anything of Megatron, which then knows that TransformerEngine is missing

import peft  # likewise
import torch
from megatron.core.extensions import transformer_engine as extension

_MODULES = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.attention")


class _Empty(type):
    """A class that has every name, as another empty class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})


class _Names(ModuleType):
    """A module that has every name, as an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})


def offer() -> None:
    """Offer TransformerEngine's names to imports from now on, and Megatron's layers of it as modules that nothing makes."""
    assert jobs.Job
    assert peft.__name__
    for name in dir(extension):
        value = getattr(extension, name)
        if name.startswith("TE") and (value is None or isinstance(value, MagicMock)):
            setattr(extension, name, type(name, (torch.nn.Module,), {}))
    offer_names(*_MODULES)


def offer_names(*modules: str) -> None:
    """Offer modules that have every name, as an empty class, to imports from now on. A package precedes its modules."""
    for name in modules:
        module, (parent, _, last) = _Names(name), name.rpartition(".")
        module.__path__ = []
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
        if parent:
            setattr(sys.modules[parent], last, module)
