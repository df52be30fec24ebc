"""Universal checkpoints for DeepSpeed, Megatron and plain torch.distributed.

The names in ``__all__`` are the public API, documented on the Python API page. Every other module and name is private and
can change in any release.

``import unickpt`` imports only the standard library. A public name is imported on first access.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_unickpt.loading.load_training import load_training
    from torch_unickpt.saving.save_training import save_training
    from unickpt.api.conversion import Export, convert_checkpoint, export_checkpoint
    from unickpt.api.growth import GrownModel, grow_checkpoint, upcycle_checkpoint
    from unickpt.api.loading import Loaded
    from unickpt.api.planning import plan_bits
    from unickpt.api.preemption import Preemption
    from unickpt.api.state import LocalShard
    from unickpt.api.timing import phase, time_collectives
    from unickpt.api.training import latest_checkpoint, load_checkpoint, save_checkpoint
    from unickpt.base.errors import (
        ConfigError,
        CoordinationError,
        CorruptCheckpointError,
        CoverageError,
        FormatError,
        HostPeerFailedError,
        LanguageError,
        MismatchError,
        NewerFormatError,
        NotACheckpointError,
        SaveFailedError,
        StorageError,
        UncertainCommitError,
        UnickptError,
        UnsafePathError,
        UnsupportedFrameworkError,
        UnsupportedLayoutError,
    )
    from unickpt.base.options.job import MemoryOptions, TimingOptions
    from unickpt.base.version import __version__ as __version__
    from unickpt.checkpoint.load.checkpoint import Checkpoint
    from unickpt.checkpoint.load.report import LoadReport
    from unickpt.checkpoint.load.verify import Verification, verify_checkpoint
    from unickpt.checkpoint.save.requests import SaveOptions, SaveResult
    from unickpt.checkpoint.save.retention import Retention
    from unickpt.checkpoint.save.shutdown import finish_all
    from unickpt.training.data.global_order import DataPosition, GlobalOrderSampler
    from unickpt.training.data.resharding import ReshardableLoader, deal_samples
    from unickpt.transform.convert.pipeline import Converted
    from unickpt.transform.quantise.divergence import measure_rounding
    from unickpt.transform.quantise.inputs import InputStatistics

_MODULES = {
    "torch_unickpt.loading.load_training": ("load_training",),
    "torch_unickpt.saving.save_training": ("save_training",),
    "unickpt.api.conversion": ("Export", "convert_checkpoint", "export_checkpoint"),
    "unickpt.api.growth": ("GrownModel", "grow_checkpoint", "upcycle_checkpoint"),
    "unickpt.api.planning": ("plan_bits",),
    "unickpt.api.preemption": ("Preemption",),
    "unickpt.api.state": ("LocalShard",),
    "unickpt.api.timing": ("phase", "time_collectives"),
    "unickpt.api.loading": ("Loaded",),
    "unickpt.api.training": ("latest_checkpoint", "load_checkpoint", "save_checkpoint"),
    "unickpt.transform.convert.pipeline": ("Converted",),
    "unickpt.training.data.global_order": ("DataPosition", "GlobalOrderSampler"),
    "unickpt.training.data.resharding": ("ReshardableLoader", "deal_samples"),
    "unickpt.base.errors": (
        "ConfigError", "CoordinationError", "CorruptCheckpointError", "CoverageError", "FormatError", "LanguageError",
        "MismatchError", "HostPeerFailedError", "NewerFormatError", "NotACheckpointError", "SaveFailedError", "StorageError",
        "UncertainCommitError", "UnickptError", "UnsafePathError", "UnsupportedFrameworkError", "UnsupportedLayoutError",
    ),
    "unickpt.base.options.job": ("MemoryOptions", "TimingOptions"),
    "unickpt.base.version": ("__version__",),
    "unickpt.checkpoint.load.checkpoint": ("Checkpoint",),
    "unickpt.checkpoint.load.report": ("LoadReport",),
    "unickpt.checkpoint.load.verify": ("Verification", "verify_checkpoint"),
    "unickpt.transform.quantise.divergence": ("measure_rounding",),
    "unickpt.transform.quantise.inputs": ("InputStatistics",),
    "unickpt.checkpoint.save.requests": ("SaveOptions", "SaveResult"),
    "unickpt.checkpoint.save.retention": ("Retention",),
    "unickpt.checkpoint.save.shutdown": ("finish_all",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Checkpoint",
    "ConfigError",
    "Converted",
    "CoordinationError",
    "CorruptCheckpointError",
    "CoverageError",
    "DataPosition",
    "Export",
    "FormatError",
    "GlobalOrderSampler",
    "GrownModel",
    "HostPeerFailedError",
    "InputStatistics",
    "LanguageError",
    "LoadReport",
    "Loaded",
    "LocalShard",
    "MemoryOptions",
    "MismatchError",
    "NewerFormatError",
    "NotACheckpointError",
    "Preemption",
    "ReshardableLoader",
    "Retention",
    "SaveFailedError",
    "SaveOptions",
    "SaveResult",
    "StorageError",
    "TimingOptions",
    "UncertainCommitError",
    "UnickptError",
    "UnsafePathError",
    "UnsupportedFrameworkError",
    "UnsupportedLayoutError",
    "Verification",
    "convert_checkpoint",
    "deal_samples",
    "export_checkpoint",
    "finish_all",
    "grow_checkpoint",
    "latest_checkpoint",
    "load_checkpoint",
    "load_training",
    "measure_rounding",
    "phase",
    "plan_bits",
    "save_checkpoint",
    "save_training",
    "time_collectives",
    "upcycle_checkpoint",
    "verify_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
