"""Why a worker has ended: what its last exception was, and what helps against it.

A program that cannot start, for instance because a module is missing, is started again on all hosts as often as torchrun
allows. A fault of the program (``failure_kinds``) does not go away by a restart, so the agent of the host ends the job. So it
does after an unknown exception with the same type and place in each round, before any optimizer has made a step.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from unickpt.base.errors import ConfigError
from unickpt.base.failure_kinds import RULES, FailureKind, FailureRule, Remedy, own_rules, rule_for
from unickpt.base.logs import logger
from unickpt.base.round_folder import Failed, folder_of_round, note_failure

_CALLERS = ("autograd/graph.py", "_ops.py", "nn/parallel/distributed.py")  # of the reducer of DDP and functional collectives
_LIBRARIES = ("torch", "deepspeed", "megatron.core", "megatron.training", "unickpt", "ds_unickpt", "megatron_unickpt")
_INSTALLED = {"site-packages", "dist-packages"}
_MOST = 16  # causes of an exception

_stepped: dict[str, bool] = {}  # whether an optimizer of this process has made a step


def note_last_exception() -> None:
    """Note the exception that ends this process, in the folder of the round. Never raises.

    It is called at the end of torch's import, so it uses only what torch has imported already.
    """
    with contextlib.suppress(Exception):
        folder, rank = folder_of_round(), os.environ.get("RANK", "")
        if folder is None or not rank.isdigit():
            return
        sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(_made_a_step)
        on_last_exception(partial(note_failure, folder, int(rank)))


def on_last_exception(
    note: Callable[[Failed], None], *, first: Callable[[TracebackType | None], None] = lambda _: None
) -> Callable[[], None]:
    """Call ``note`` with the exception that ends this process, as soon as it is known. Return a function that removes the hook.

    What the process does at its end, with its destructors, may take long.

    Args:
        note: gets the exception.
        first: gets its traceback, before anything else is done: code that looks for the place of this process must not find it
            in this hook.
    """
    before, own = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(Exception):
            if os.getpid() == own:  # a fork is no rank
                first(trace)
                note(failed(error, trace, bool(_stepped)))
        before(kind, error, trace)

    def remove() -> None:
        if sys.excepthook is hook:
            sys.excepthook = before

    sys.excepthook = hook
    return remove


def _made_a_step(*_: Any) -> None:
    _stepped["made"] = True


def failed(error: BaseException, trace: TracebackType | None, stepped: bool) -> Failed:
    """Return what the agent must know about an exception."""
    frame = _own_frame(traceback.extract_tb(trace))
    place = f"{Path(frame.filename).name}:{frame.lineno}" if frame is not None else ""
    name, others = type(error).__name__, _is_of_others(error)
    rule = rule_for([each.__name__ for each in type(error).__mro__], str(error), _rules())
    if others and rule.kind is not FailureKind.ASKED:
        rule = replace(rule, kind=FailureKind.CONNECTION, remedy=Remedy.RESTART)
    return Failed(
        f"{name} {place}", f"{name}: {error} ({place})"[:500], stepped or others, rule.kind, rule.remedy, name, time.time_ns()
    )


def _own_frame(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """Return the innermost frame of the user's own code, otherwise the innermost one; None without frames."""
    folders = [sysconfig.get_paths()["stdlib"]]
    folders += [str(path) for name in _LIBRARIES for path in getattr(sys.modules.get(name), "__path__", ())]

    def is_own(file: str) -> bool:
        return not (file.startswith("<frozen") or _INSTALLED.intersection(Path(file).parts) or file.startswith(inside))

    inside = tuple(f"{folder}{os.sep}" for folder in folders)
    return next((frame for frame in reversed(frames) if is_own(frame.filename)), frames[-1] if frames else None)


def _rules() -> tuple[FailureRule, ...]:
    """Return the rules; the table alone, with a warning, if the user's file is wrong."""
    try:
        return own_rules()
    except ConfigError as err:
        logger.warning("unickpt: %s; the rules of unickpt alone decide", err)
        return RULES


def _is_of_others(error: BaseException) -> bool:
    """Whether the end of another process has caused it, or may have: that is no fault of this one."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and len(causes) < _MOST:
        causes.append(cause)
    return any(_typed(each) or _of_gloo(each) for each in causes)


def _typed(error: BaseException) -> bool:
    names = {each.__name__ for each in type(error).__mro__}
    return bool(names & {"DistError", "ConnectionError", "KeyboardInterrupt", "CoordinationError"})


def _of_gloo(error: BaseException) -> bool:
    """Whether gloo may have raised it because a peer has ended: gloo has no type of its own.

    It raises where torch calls it. Below an operator or a backward pass, that is a collective only if the job has no other
    backend.
    """
    frames = traceback.extract_tb(error.__traceback__)
    torch = Path(str(getattr(sys.modules.get("torch"), "__file__", None) or "/none/torch/__init__.py")).parent
    if type(error) is not RuntimeError or not frames or torch not in Path(frames[-1].filename).parents:
        return False
    place = Path(frames[-1].filename).relative_to(torch)
    return place.parts[0] == "distributed" or (str(place) in _CALLERS and _only_gloo())


def _only_gloo() -> bool:
    distributed: Any = sys.modules.get("torch.distributed")
    with contextlib.suppress(Exception):
        return bool(distributed.is_initialized() and distributed.get_world_size() > 1 and distributed.get_backend() == "gloo")
    return False
