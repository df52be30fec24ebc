"""What to do with a unickpt checkpoint where DeepSpeed alone meets it: said in the folder, and in place of DeepSpeed's errors.

DeepSpeed looks for ``*_model_states.pt`` and ``*_optim_states.pt``. There are none, and there are no stand-ins for them either:
left behind under a tag that DeepSpeed later saves to, they would become part of its checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from packaging.specifiers import SpecifierSet

from unickpt import hooks
from unickpt.hooks import Hook

CONVERTER = "deepspeed.checkpoint.ds_to_universal"

_TEXT = """\
This folder is a checkpoint that unickpt wrote for a DeepSpeed job.
It has no *_model_states.pt and no *_optim_states.pt files, so zero_to_fp32.py and ds_to_universal do not find any.

Resume with DeepSpeed:  pip install unickpt, and add "unickpt": {"enabled": true} to the DeepSpeed JSON.
                        With UNICKPT_AUTOLOAD=0 or TORCH_DEVICE_BACKEND_AUTOLOAD=0 the program also needs: import ds_unickpt
Weights as a model:     unickpt export THIS_FOLDER OUT                              (instead of zero_to_fp32.py)
Universal checkpoint:   unickpt export THIS_FOLDER OUT --to deepspeed-universal     (instead of ds_to_universal)
Check every byte:       unickpt verify THIS_FOLDER
"""


def leave_readme(directory: str) -> None:
    """Write what the folder is into it. Without effect where that is not possible: the checkpoint is whole without it."""
    from unickpt.errors import UnickptError
    from unickpt.retention import README_FILE
    from unickpt.storage import open_storage

    with contextlib.suppress(UnickptError, OSError):
        open_storage(directory).write_atomic(README_FILE, _TEXT.encode())


def without_the_key(load_dir: Any, tag: Any) -> str:
    """Why DeepSpeed alone cannot load what it was asked for, and what to do; '' if that is no unickpt checkpoint."""
    from unickpt.resuming import latest_tag
    from unickpt.storage import join

    try:
        directory = join(str(load_dir), str(tag or latest_tag(load_dir) or ""))
        if not _is_ours_alone(directory):
            return ""
    except Exception:  # DeepSpeed's own error is the one to show
        return ""
    return (
        f"{directory} is a unickpt checkpoint, and this job's DeepSpeed config does not switch unickpt on. "
        'Add "unickpt": {"enabled": true} to it, or make files that DeepSpeed alone loads: '
        f"unickpt export {directory} OUT --to deepspeed-universal"
    )


def _missing_files(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    """``get_checkpoint_files`` of DeepSpeed's two converters: the error about a unickpt checkpoint says what to use instead."""
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
    from unickpt.loading import is_checkpoint
    from unickpt.storage import open_storage

    return is_checkpoint(directory) and not any(name.endswith(".pt") for name in open_storage(directory).names())


def _hook(name: str, module: str, attribute: str) -> Hook:
    return Hook(
        name=name,
        module=module,
        attribute=attribute,
        wrapper=_missing_files,
        versions=SpecifierSet(">=0.17.0,<0.20"),
        fingerprints=frozenset(),
        parameters=("checkpoint_dir", "glob_pattern"),
        why="its error about missing files does not say what the folder is",
        upstream="https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/utils/zero_to_fp32.py",
        until="DeepSpeed asks a registry of checkpoint engines for the files",
    )


FP32 = _hook("deepspeed.zero_to_fp32", "deepspeed.utils.zero_to_fp32", "get_checkpoint_files")
UNIVERSAL = _hook("deepspeed.ds_to_universal", CONVERTER, "_get_checkpoint_files")
HOOKS = [FP32, UNIVERSAL]


def install_converter() -> bool:
    """Hook into ``ds_to_universal``, once a program has imported it."""
    return _install(UNIVERSAL)


def install_fp32() -> bool:
    """Hook into ``zero_to_fp32``, which DeepSpeed's engine imports."""
    return _install(FP32)


def _install(hook: Hook) -> bool:
    from deepspeed.git_version_info import version

    return hooks.install([hook], framework="DeepSpeed", version=version)
