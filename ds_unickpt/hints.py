"""Hints for users who open a unickpt checkpoint with DeepSpeed alone: a README in the folder, and better errors.

DeepSpeed looks for ``*_model_states.pt`` and ``*_optim_states.pt``. A unickpt checkpoint has neither, nor placeholders for
them: if DeepSpeed later saves under the same tag, a placeholder becomes part of its checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from ds_unickpt.declaration import declared
from ds_unickpt.versions import version
from unickpt import hooks
from unickpt.hooks import Hook

CONVERTER = "deepspeed.checkpoint.ds_to_universal"

_TEXT = """\
This folder is a checkpoint that unickpt wrote for a DeepSpeed job.
It has no *_model_states.pt and no *_optim_states.pt files, so zero_to_fp32.py and ds_to_universal do not find any.

Resume with DeepSpeed:  install unickpt (a checkout of its repository: pip install .), and add "unickpt": {"enabled": true}
                        to the DeepSpeed JSON.
                        With UNICKPT_AUTOLOAD=0 or TORCH_DEVICE_BACKEND_AUTOLOAD=0 the program also needs: import ds_unickpt
Weights as a model:     unickpt export THIS_FOLDER OUT                              (instead of zero_to_fp32.py)
Universal checkpoint:   unickpt export THIS_FOLDER OUT --to deepspeed-universal     (instead of ds_to_universal)
Check every byte:       unickpt verify THIS_FOLDER
"""


def leave_readme(directory: str) -> None:
    """Write the README into a checkpoint. A failure is ignored: the checkpoint does not need the file."""
    from unickpt.errors import UnickptError
    from unickpt.save.retention import README_FILE
    from unickpt.storage.open import open_storage

    with contextlib.suppress(UnickptError, OSError):
        open_storage(directory).write_atomic(README_FILE, _TEXT.encode())


def without_the_key(load_dir: Any, tag: Any) -> str:
    """Return why DeepSpeed alone cannot load a checkpoint and the remedy, or '' if it is no unickpt checkpoint."""
    from unickpt.checkpoint_folder import latest_tag
    from unickpt.storage.base import join

    try:
        directory = join(str(load_dir), str(tag or latest_tag(load_dir) or ""))
        if not _is_ours_alone(directory):
            return ""
    except Exception:  # DeepSpeed's own error is shown
        return ""
    return (
        f"{directory} is a unickpt checkpoint, and this job's DeepSpeed config does not switch unickpt on. "
        'Add "unickpt": {"enabled": true} to it, or make files that DeepSpeed alone loads: '
        f"unickpt export {directory} OUT --to deepspeed-universal"
    )


def _missing_files(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    """Replace the error that ``get_checkpoint_files`` of DeepSpeed's two converters raises for a unickpt checkpoint."""
    import inspect

    try:
        return wrapped(*args, **kwargs)
    except FileNotFoundError as err:
        directory = str(inspect.signature(wrapped).bind(*args, **kwargs).arguments["checkpoint_dir"])
        if not _is_ours_alone(directory):
            raise
        raise FileNotFoundError(
            f"{err}: it is a unickpt checkpoint. For weights use: unickpt export {directory} OUT. "
            f"For a universal checkpoint of DeepSpeed use: unickpt export {directory} OUT --to deepspeed-universal"
        ) from None


def _is_ours_alone(directory: str) -> bool:
    from unickpt.load.validation import is_checkpoint
    from unickpt.storage.open import open_storage

    return is_checkpoint(directory) and not any(name.endswith(".pt") for name in open_storage(directory).names())


def _hook(name: str, module: str, attribute: str, why: str) -> Hook:
    """Return a hook that only adds to the text of an error, so it is also installed on an unknown source."""
    return declared(
        name, module, attribute, _missing_files, why=why, strict=False, parameters=("checkpoint_dir", "glob_pattern"),
        until="DeepSpeed's converters read checkpoints through its checkpoint engines",
    )  # fmt: skip


FP32 = _hook(
    "deepspeed.zero_to_fp32",
    "deepspeed.utils.zero_to_fp32",
    "get_checkpoint_files",
    "for a unickpt checkpoint, zero_to_fp32 reports missing *_optim_states.pt files and no remedy",
)
UNIVERSAL = _hook(
    "deepspeed.ds_to_universal",
    CONVERTER,
    "_get_checkpoint_files",
    "for a unickpt checkpoint, ds_to_universal reports missing *_model_states.pt files and no remedy",
)
HOOKS = [FP32, UNIVERSAL]


def install_converter() -> bool:
    """Install the hook in ``ds_to_universal``. Called after a program has imported that module."""
    return _install(UNIVERSAL)


def install_fp32() -> bool:
    """Install the hook in ``zero_to_fp32``, which DeepSpeed's engine imports."""
    return _install(FP32)


def _install(hook: Hook) -> bool:
    return hooks.install([hook], framework="DeepSpeed", version=version())
