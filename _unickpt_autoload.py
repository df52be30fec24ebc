"""What runs inside every ``import torch``: a hook that waits for a framework, and nothing else.

torch calls the ``torch.backends`` entry points at the end of its import and turns an exception
there into a RuntimeError for the user, so this can never raise and must cost next to nothing:
standard library only (importing wrapt for its post-import hooks takes some 60 ms; this finder
costs under 0.1 ms). When the framework's module has been imported, its adapter is installed.

A module of its own beside the package ``unickpt``: a script ``unickpt.py``, or a folder ``unickpt`` such as a clone of the
repository, in the working directory hides the package from Python. ``import torch`` has to survive that, and runs no such file.

``UNICKPT_REQUIRE=1`` is the one exception: then an adapter that is off or cannot be installed ends the import of its framework.
``UNICKPT_AUTOLOAD=0`` (also ``false``, ``no``, ``off`` or nothing) disarms it; ``import ds_unickpt`` arms it by hand.
With torch's own ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` it is never called, so the import line is needed.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # the real name would import typing
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

# module of a framework -> what is called once it has been imported: ``module:function``
DEEPSPEED = {"deepspeed.runtime.engine": "ds_unickpt:install"}
MEGATRON = {
    "megatron.core.parallel_state": "megatron_unickpt.hooks:install_parallel_state",
    "megatron.core.dist_checkpointing.serialization": "megatron_unickpt.hooks:install_core",
    "megatron.core.dist_checkpointing.strategies.async_utils": "megatron_unickpt.hooks:install_async",
    "megatron.core.optimizer.optimizer": "megatron_unickpt.hooks:install_optimizer",
    "megatron.core.optimizer.distrib_optimizer": "megatron_unickpt.hooks:install_distributed_optimizer",
    "megatron.core.optimizer.layer_wise_optimizer": "megatron_unickpt.hooks:install_layer_wise_optimizer",
    "megatron.training.arguments": "megatron_unickpt.hooks:install_arguments",
    "megatron.training.checkpointing": "megatron_unickpt.hooks:install_training",
    "megatron.training.dist_signal_handler": "megatron_unickpt.hooks:install_exit",
}
TORCH = {
    "torch.distributed.checkpoint.filesystem": "torch_unickpt.hooks:install_storage",
    "torch.distributed.checkpoint.hf_storage": "torch_unickpt.hooks:install_hf_storage",
    "torch.distributed.checkpoint.state_dict_saver": "torch_unickpt.hooks:install_saver",
    "torch.distributed.checkpoint.state_dict_loader": "torch_unickpt.hooks:install_loader",
}
VERL = {"verl.utils.checkpoint.fsdp_checkpoint_manager": "torch_unickpt.hooks:install_verl"}
TORCH_TIMING = {  # only if the environment asks for timing: ``import torch`` imports the first of them
    "torch.nn.parallel.distributed": "torch_unickpt.hooks:install_ddp",
    "torch.distributed.fsdp._fully_shard._fully_shard": "torch_unickpt.hooks:install_fsdp",
}
TRANSFORMERS = {"transformers.trainer": "torch_unickpt.hooks:install_trainer"}
_OFF = ("", "0", "false", "no", "off")
_pending: list[tuple[str, str]] = []  # modules whose import had begun without the finder, and their functions
_watched: dict[str, str] = {}  # the functions with spaces between them


def arm() -> None:
    """Wait for all frameworks. Never raises."""
    try:
        if asked():
            watch(DEEPSPEED)
            watch(MEGATRON)
            watch(TORCH)
            watch(VERL)
            watch(TRANSFORMERS)
            if os.environ.get("UNICKPT_TIMING"):
                watch(TORCH_TIMING)
            _note_worker()
            if os.environ.get("UNICKPT_TIMING") or os.environ.get("UNICKPT_AGENT"):
                _install("unickpt.diagnosis.host.early_stacks:listen_early")
                _install("unickpt.diagnosis.start_watch:begin")
            if os.environ.get("UNICKPT_AGENT"):  # a worker of ``torchrun --rdzv-backend unickpt`` ends with its agent
                _install("unickpt.base.launcher_watch:end_with_launcher")
                _install("unickpt.base.first_failure:note_last_exception")
        elif os.environ.get("UNICKPT_REQUIRE") == "1":
            watch(dict.fromkeys((*DEEPSPEED, *MEGATRON), "unickpt.base.hooks:refuse_switched_off"))
    except Exception as err:
        _complain(err)


def asked() -> bool:
    """Return whether ``UNICKPT_AUTOLOAD`` allows hooks without an import of an adapter."""
    return os.environ.get("UNICKPT_AUTOLOAD", "1").strip().lower() not in _OFF


def _note_worker() -> None:
    """Note in the environment which process is the worker: what it starts has the same variables (``launcher_watch``)."""
    agent = os.environ.get("UNICKPT_AGENT", "")
    if "TORCHELASTIC_RUN_ID" not in os.environ and "CROSS_RANK" not in os.environ:
        return
    if not os.environ.get("UNICKPT_WORKER", "").startswith(f"{agent}/"):
        os.environ["UNICKPT_WORKER"] = f"{agent}/{os.getpid()}.{_launcher()}"


def _launcher() -> int:
    """Return the parent if it was not started as a worker itself, nor is the reaper of orphans; 0 if that is unknown."""
    parent = os.getppid()
    try:
        with open(f"/proc/{parent}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        return 0
    started = any(each.startswith((b"TORCHELASTIC_RUN_ID=", b"CROSS_RANK=")) for each in variables)
    return 0 if started or parent == 1 else parent


def unwatch(modules: dict[str, str]) -> None:
    """Undo ``watch`` for modules that have not been imported yet. Hooks that are installed stay."""
    for module in modules:
        _watched.pop(module, None)


def watch(modules: dict[str, str]) -> None:
    """Call each function when its module is imported; at once, if it already is. A module may have several functions."""
    for module, function in modules.items():
        known = _watched.get(module, "")
        if function in known.split():
            continue
        _watched[module] = f"{known} {function}".strip()
        if _is_initializing(module):  # it has imported torch, which calls this
            _pending.append((module, function))
        elif module in sys.modules:
            _install(function)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _is_initializing(module: str) -> bool:
    return bool(getattr(getattr(sys.modules.get(module), "__spec__", None), "_initializing", False))


def _install_pending() -> None:
    """Call the functions of modules whose import has ended meanwhile."""
    ready = [each for each in _pending if not _is_initializing(each[0])]
    for each in ready:
        _pending.remove(each)
    for module, function in ready:
        if module in sys.modules:
            _install(function)


class _Finder:
    """Finds nothing itself: lets the other finders find a watched module and wraps its loader."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if _pending:
            _install_pending()
        adapter = _watched.get(fullname)
        if adapter is None:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)  # type: ignore[arg-type]
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, adapter)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """Delegates to the real loader, then installs the adapter."""

    def __init__(self, loader: Loader, adapter: str) -> None:
        self._loader, self._adapter = loader, adapter

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # leave no trace for tools that look at the loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        for function in self._adapter.split():
            _install(function)


def _install(function: str) -> None:
    module, _, name = function.partition(":")
    try:
        for package in ("unickpt", module.partition(".")[0]):
            _uncover(package)
        __import__(module)
        getattr(sys.modules[module], name)()
    except Exception as err:
        if os.environ.get("UNICKPT_REQUIRE") == "1":
            raise
        _complain(err)


def _uncover(package: str) -> None:
    """Make sure that a name is our package and not what lies in the working directory.

    A folder without ``__init__.py`` comes before an editable installation in Python's search, although it holds nothing that
    could be imported: then the installed package is loaded.

    Raises:
        ImportError: it is something else. That is not imported.
    """
    if package in sys.modules:
        found = [sys.modules[package].__spec__]
    else:
        finders = [finder for finder in sys.meta_path if not isinstance(finder, _Finder) and hasattr(finder, "find_spec")]
        found = [finder.find_spec(package, None, None) for finder in finders]
    specs = [spec for spec in found if spec is not None]
    regular = [spec for spec in specs if spec.origin is not None]
    if not regular:
        where = [place for spec in specs for place in spec.submodule_search_locations or ()]
        raise ImportError(f"{package} is not found, or hidden by {where}. Rename that, or start in another directory")
    spec = regular[0]
    marked = os.path.isfile(os.path.join(os.path.dirname(spec.origin or ""), "py.typed"))
    if spec.submodule_search_locations is None or not marked:
        raise ImportError(
            f"{package} is {spec.origin} here, which hides the installed package. Rename it, or start in another directory"
        )
    if specs[0] is not spec and spec.loader is not None:
        from importlib.util import module_from_spec

        sys.modules[package] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


def _complain(err: Exception) -> None:
    print(f"unickpt: failed to initialise; the framework runs without it: {type(err).__name__}: {err}", file=sys.stderr)
