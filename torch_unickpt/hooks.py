"""Declarations of the hooks on ``torch.distributed.checkpoint``. No other module of this package assigns to a module of torch.

Each is installed after its module is imported (``unickpt.base.autoload.TORCH``), which ``import torch`` does not do.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch_unickpt.framework.declaration import declared, declared_in_trainer, declared_in_verl
from torch_unickpt.framework.versions import FRAMEWORK, version
from unickpt.base import hooks
from unickpt.base.step_replay import saves_nothing
from unickpt.base.switch import Switch, switch, times

STORAGE = "torch.distributed.checkpoint.filesystem"
HF_STORAGE = "torch.distributed.checkpoint.hf_storage"


def _arguments(wrapped: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the call's arguments by name, defaults included."""
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _is(value: Any, name: str, module: str = STORAGE) -> bool:
    """Whether the class of a value is exactly this one, of a module that may not be imported."""
    return type(value) is getattr(sys.modules.get(module), name, None)


def _is_plain_writer(writer: Any) -> bool:
    """Whether a writer is exactly torch's, and its caller asks nothing of its files, such as an extension that encrypts."""
    extended = getattr(getattr(writer, "transforms", None), "extensions", ())
    other_format = getattr(getattr(writer, "serialization_format", None), "name", "TORCH_SAVE") != "TORCH_SAVE"
    return _is(writer, "FileSystemWriter") and not extended and not other_format


def _save(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
    given = _arguments(wrapped, args, kwargs)
    writer, ours = given["storage_writer"], "torch_unickpt.dcp.storage"
    if saves_nothing(getattr(writer, "path", "a state dict"), first=not _rank()):
        return sys.modules["torch.distributed.checkpoint.metadata"].Metadata({})
    explicit = _is(writer, "UnickptWriter", ours)
    together = given.get("use_collectives", True)
    if not explicit and not (together and _is_plain_writer(writer) and switch().saves):
        return wrapped(*args, **kwargs)
    from torch_unickpt.dcp import switched

    return switched.save(wrapped, given, explicit=explicit)


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def _async_save(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
    given = _arguments(wrapped, args, kwargs)
    writer, path = given["storage_writer"], given["checkpoint_id"]
    explicit = _is(writer, "UnickptWriter", "torch_unickpt.dcp.storage")
    here = _is_plain_writer(writer) or (writer is None and path is not None and "://" not in str(path))
    own_copy = given.get("async_stager") is not None or not given.get("use_collectives", True)
    if own_copy or not (explicit or (here and switch().saves)):
        return wrapped(*args, **kwargs)
    from torch_unickpt.dcp import switched

    return switched.async_save(wrapped, given, explicit=explicit)


def _load(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
    given = _arguments(wrapped, args, kwargs)
    reader = given["storage_reader"]
    explicit = _is(reader, "UnickptReader", "torch_unickpt.dcp.storage")
    if not explicit and not _is(reader, "FileSystemReader") and not _is(reader, "HuggingFaceStorageReader", HF_STORAGE):
        return wrapped(*args, **kwargs)
    from torch_unickpt.dcp import switched

    return switched.load(wrapped, given, explicit=explicit)


def _metadata(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    from torch_unickpt.dcp import switched

    return switched.metadata(wrapped, instance, args, kwargs)


def _read_data(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    if instance.storage_data:  # torch's own
        return wrapped(*args, **kwargs)
    from torch_unickpt.dcp import switched

    return switched.read_data(wrapped, instance, _arguments(wrapped, args, kwargs))


def _timed(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
    """Time the collectives of a job that wraps a model, from before the first of them."""
    import torch.distributed as dist

    if dist.is_initialized():
        from unickpt.api.timing import time_collectives

        time_collectives()
    return wrapped(*args, **kwargs)


def _timed_reducer(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """The same for DDP, whose reducer is recorded from the making of a module on: this one, if timing begins here."""

    def made(*args: Any, **kwargs: Any) -> Any:
        from unickpt.diagnosis import session

        session.reduces()
        result = wrapped(*args, **kwargs)
        session.watch_evaluation(instance)
        return result

    return _timed(made, instance, args, kwargs)


def _save_of_verl(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    if not switch().saves:
        return wrapped(*args, **kwargs)
    from torch_unickpt.libraries import verl_manager

    return verl_manager.save(wrapped, instance, _arguments(wrapped, args, kwargs))


def _load_of_verl(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    from torch_unickpt.libraries import verl_manager

    return verl_manager.load(wrapped, instance, _arguments(wrapped, args, kwargs))


def _resume_of_trainer(wrapped: Callable[..., Any], trainer: Any, args: Any, kwargs: Any) -> Any:
    folder = _arguments(wrapped, args, kwargs)["checkpoint"]
    if folder is None or getattr(trainer, "is_deepspeed_enabled", False) or switch() is Switch.OFF:
        return wrapped(*args, **kwargs)
    from torch_unickpt.libraries import trainer as states

    found = states.checkpoint_in(str(folder))
    if not found:
        return wrapped(*args, **kwargs)
    return states.load(trainer, found)


SAVE = declared(
    "torch.dcp.save", "torch.distributed.checkpoint.state_dict_saver", "_save_state_dict", _save,
    why="save chooses a storage writer by the path, from a closed list", parameters=("state_dict", "storage_writer", "no_dist"),
)  # fmt: skip
ASYNC_SAVE = declared(
    "torch.dcp.async_save", "torch.distributed.checkpoint.state_dict_saver", "async_save", _async_save,
    why="copies the state dict tensor by tensor into new memory before save is called",
    parameters=("state_dict", "checkpoint_id", "storage_writer", "planner", "process_group", "no_dist"),
)  # fmt: skip
LOAD = declared(
    "torch.dcp.load", "torch.distributed.checkpoint.state_dict_loader", "_load_state_dict", _load,
    why="load chooses a storage reader by the path, from a closed list", parameters=("state_dict", "storage_reader", "no_dist"),
)  # fmt: skip
METADATA = declared(
    "torch.dcp.metadata", STORAGE, "FileSystemReader.read_metadata", _metadata,
    why="libraries ask torch's reader what a folder holds",
)  # fmt: skip
HF_METADATA = declared(
    "torch.dcp.hf_metadata", HF_STORAGE, "HuggingFaceStorageReader.read_metadata", _metadata,
    why="libraries take a folder for Hugging Face's if it has any safetensors file",
)  # fmt: skip
READ_DATA = declared(
    "torch.dcp.read_data", STORAGE, "FileSystemReader.read_data", _read_data,
    why="a reader of a program's own may hand its calls to torch's reader", parameters=("plan", "planner"),
)  # fmt: skip
HF_READ_DATA = declared(
    "torch.dcp.hf_read_data", HF_STORAGE, "HuggingFaceStorageReader.read_data", _read_data,
    why="a reader of a program's own may hand its calls to torch's reader", parameters=("plan", "planner"),
)  # fmt: skip
DDP = declared(
    "torch.timing.ddp", "torch.nn.parallel.distributed", "DistributedDataParallel.__init__", _timed_reducer,
    why="no callback when a model is wrapped, before its first collectives",
)  # fmt: skip
FSDP = declared(
    "torch.timing.fsdp", "torch.distributed.fsdp._fully_shard._fully_shard", "fully_shard", _timed,
    why="no callback when a model is wrapped, before its first collectives",
)  # fmt: skip
VERL = [
    declared_in_verl("verl.fsdp.save", "save_checkpoint", _save_of_verl, parameters=("local_path", "global_step")),
    declared_in_verl("verl.fsdp.load", "load_checkpoint", _load_of_verl, parameters=("local_path",)),
]
TRAINER = declared_in_trainer("transformers.resume", "_load_optimizer_and_scheduler", _resume_of_trainer)
NEEDED = [SAVE, LOAD, METADATA, HF_METADATA]
BESIDE = [
    ASYNC_SAVE,
    READ_DATA,
    HF_READ_DATA,
    *VERL,
    TRAINER,
]  # each alone: without the first, torch copies, and all is written
OPTIONAL = [DDP, FSDP]  # installed only if the environment asks for timing
DECLARED = [*NEEDED, *BESIDE, *OPTIONAL]


def _install(needed: hooks.Hook, beside: hooks.Hook | None = None) -> bool:
    """Install a hook, and one beside it. Return whether the first is installed."""
    done = False
    for hook in (beside, needed):
        if hook is not None:
            done = hooks.install([hook], framework=FRAMEWORK, version=version(), lost="no universal checkpoints through DCP")
    return done


# ``unickpt.base.autoload`` calls these after the import of a module
install_loader = partial(_install, LOAD)
install_saver = partial(_install, SAVE, ASYNC_SAVE)
install_storage = partial(_install, METADATA, READ_DATA)
install_hf_storage = partial(_install, HF_METADATA, HF_READ_DATA)


def install_verl() -> bool:
    """Install the hooks on verl's manager of FSDP checkpoints."""
    from importlib.metadata import version as version_of

    return hooks.install(VERL, framework="verl", version=version_of("verl"), lost="no universal checkpoints of FSDP models")


def install_trainer() -> bool:
    """Install the hook on the resume of Trainer."""
    from importlib.metadata import version as version_of

    lost = "Trainer without DeepSpeed starts the optimizer anew on a checkpoint of unickpt"
    return hooks.install([TRAINER], framework="transformers", version=version_of("transformers"), lost=lost)


def _install_timing(hook: hooks.Hook) -> bool:
    if not times():
        return False
    return hooks.install([hook], framework=FRAMEWORK, version=version(), lost="collectives of plain torch are not timed")


install_ddp, install_fsdp = partial(_install_timing, DDP), partial(_install_timing, FSDP)


def uninstall() -> None:
    """Restore the functions of torch."""
    hooks.uninstall(DECLARED)
