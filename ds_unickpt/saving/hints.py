"""Hints for users who open a unickpt checkpoint with DeepSpeed alone: a README in the folder, and better errors.

DeepSpeed looks for ``*_model_states.pt`` and ``*_optim_states.pt``. A unickpt checkpoint has neither, nor placeholders for
them: if DeepSpeed later saves under the same tag, a placeholder becomes part of its checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ds_unickpt.framework.declaration import declared
from ds_unickpt.framework.versions import version
from unickpt.base import hooks
from unickpt.base.hooks import Hook
from unickpt.base.installation import install_command

if TYPE_CHECKING:
    from types import TracebackType

CONVERTER = "deepspeed.checkpoint.ds_to_universal"
_FP32 = "deepspeed.utils.zero_to_fp32"
_PROGRAMS = (_FP32, "deepspeed.utils.zero_to_torch", CONVERTER)

_TEXT = f"""\
This folder is a checkpoint that unickpt wrote for a DeepSpeed job.
It has no *_model_states.pt and no *_optim_states.pt files, so zero_to_fp32.py and ds_to_universal do not find any.

Resume with DeepSpeed:  install unickpt ({install_command()}). To save
                        such checkpoints, too, add "unickpt": {{"enabled": true}} to the DeepSpeed JSON.
                        With UNICKPT_AUTOLOAD=0 or TORCH_DEVICE_BACKEND_AUTOLOAD=0 the program also needs: import ds_unickpt
Weights as a model:     unickpt export THIS_FOLDER OUT                              (instead of zero_to_fp32.py)
Universal checkpoint:   unickpt export THIS_FOLDER OUT --to deepspeed-universal     (instead of ds_to_universal)
Check every byte:       unickpt verify THIS_FOLDER
"""


def leave_readme(directory: str) -> None:
    """Write the README into a checkpoint. A failure is ignored: the checkpoint does not need the file."""
    from unickpt.base.errors import UnickptError
    from unickpt.checkpoint.save.retention import README_FILE
    from unickpt.checkpoint.storage.open import open_storage

    with contextlib.suppress(UnickptError, OSError):
        open_storage(directory).write_atomic(README_FILE, _TEXT.encode())


def meant(load_dir: Any, tag: Any) -> str:
    """Return the unickpt checkpoint that the arguments of ``load_checkpoint`` mean; '' if they mean another one, or none."""
    from unickpt.checkpoint.checkpoint_folder import latest_tag
    from unickpt.checkpoint.storage.base import join

    with contextlib.suppress(Exception):  # DeepSpeed's own error is shown
        directory = join(str(load_dir), str(tag or latest_tag(load_dir) or ""))
        return directory if _is_ours_alone(directory) else ""
    return ""


def switched_off(load_dir: Any, tag: Any) -> str:
    """Return why DeepSpeed alone cannot load a checkpoint and the remedy, or '' if it is no unickpt checkpoint."""
    directory = meant(load_dir, tag)
    if not directory:
        return ""
    return (
        f'{directory} is a unickpt checkpoint, and this job switches unickpt off: by "enabled": false in its DeepSpeed config, '
        'or by UNICKPT=off. Set "unickpt": {"enabled": true}, or make files that DeepSpeed alone loads: '
        f"unickpt export {directory} OUT --to deepspeed-universal"
    )


def _missing_files(wrapped: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
    """Replace the error that DeepSpeed's converters raise for a unickpt checkpoint."""
    import inspect

    try:
        return wrapped(*args, **kwargs)
    except (FileNotFoundError, ValueError):  # no *_states.pt, or no 'latest' in the folder
        given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
        directory = _ours(str(given["checkpoint_dir"]), given.get("tag"))
        if not directory:
            raise
        raise FileNotFoundError(_remedy(directory)) from None


def _remedy(directory: str) -> str:
    place = shlex.quote(directory)
    return (
        f"{directory} is a unickpt checkpoint, which DeepSpeed's converters do not read. For weights use: unickpt export "
        f"{place} OUT. For a universal checkpoint of DeepSpeed use: unickpt export {place} OUT --to deepspeed-universal"
    )


def _ours(folder: str, tag: Any = None) -> str:
    """Return the unickpt checkpoint that a converter's arguments mean; '' if there is none. DeepSpeed reads no URL."""
    from unickpt.checkpoint.checkpoint_folder import latest_tag
    from unickpt.checkpoint.load.folders import newest

    with contextlib.suppress(Exception):  # DeepSpeed's own error is shown
        if not os.path.isdir(folder):
            return ""
        if _is_ours_alone(folder):
            return folder
        named = tag or latest_tag(folder)
        if named is not None:
            directory = os.path.join(folder, str(named))
            return directory if _is_ours_alone(directory) else ""
        found = newest(folder)  # a folder of checkpoints without 'latest', such as the output directory of Trainer
        return "" if found is None else found.checkpoint
    return ""


def explain_uncaught(command: Sequence[str]) -> None:
    """Let a converter of DeepSpeed that runs as a program end with the remedy in place of a traceback.

    Its functions are in ``__main__``, where no hook reaches them: Python runs a copy of the module, or of the script that
    DeepSpeed leaves beside its checkpoints.

    Args:
        command: the process's command line, with the interpreter (``sys.orig_argv``).
    """
    programs = {name for module in _PROGRAMS for name in (module, f"{module.rpartition('.')[2]}.py")}
    if not any(os.path.basename(word) in programs for word in command):
        return
    before = sys.excepthook

    def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        directory = _named_in(sys.argv[1:]) if issubclass(kind, Exception) else ""
        if directory:
            print(f"{os.path.basename(sys.argv[0])}: {_remedy(directory)}", file=sys.stderr)
        else:
            before(kind, error, trace)

    sys.excepthook = explain


def _named_in(words: Sequence[str]) -> str:
    """Return the first unickpt checkpoint that the arguments of a converter name; '' if there is none."""
    values = [part for word in words for part in (word.split("=", 1) if word.startswith("-") else [word])]
    tags = [after for word, after in itertools.pairwise(values) if word in ("-t", "--tag")]
    return next((found for word in values if (found := _ours(word, tags[0] if tags else None))), "")


def _is_ours_alone(directory: str) -> bool:
    from unickpt.checkpoint.load.validation import is_checkpoint
    from unickpt.checkpoint.storage.open import open_storage

    return is_checkpoint(directory) and not any(name.endswith(".pt") for name in open_storage(directory).names())


def _hook(name: str, module: str, attribute: str, why: str, parameters: tuple[str, ...]) -> Hook:
    """Return a hook that only adds to the text of an error, so it is also installed on an unknown source."""
    return declared(
        name, module, attribute, _missing_files, why=why, strict=False, parameters=parameters,
        until="DeepSpeed's converters read checkpoints through its checkpoint engines",
    )  # fmt: skip


FP32 = [
    _hook(
        "deepspeed.zero_to_fp32",
        _FP32,
        "get_checkpoint_files",
        "for a unickpt checkpoint, zero_to_fp32 reports missing *_optim_states.pt files and no remedy",
        ("checkpoint_dir", "glob_pattern"),
    ),
    _hook(
        "deepspeed.fp32_state_dict",
        _FP32,
        "get_fp32_state_dict_from_zero_checkpoint",
        "for the folder of a unickpt checkpoint itself, zero_to_fp32 reports a missing file 'latest'",
        ("checkpoint_dir", "tag"),
    ),
]
UNIVERSAL = _hook(
    "deepspeed.ds_to_universal",
    CONVERTER,
    "_get_checkpoint_files",
    "for a unickpt checkpoint, ds_to_universal reports missing *_model_states.pt files and no remedy",
    ("checkpoint_dir", "glob_pattern"),
)
HOOKS = [*FP32, UNIVERSAL]


def install_converter() -> bool:
    """Install the hook in ``ds_to_universal``. Called after a program has imported that module."""
    return hooks.install(
        [UNIVERSAL], framework="DeepSpeed", version=version(), lost="no advice in errors of DeepSpeed's converters"
    )


def install_fp32() -> bool:
    """Install the hooks in ``zero_to_fp32``, which DeepSpeed's engine imports."""
    return hooks.install(FP32, framework="DeepSpeed", version=version(), lost="no advice in errors of DeepSpeed's converters")
