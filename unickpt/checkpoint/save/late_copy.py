"""Copies of a save that run behind training, until the next step of the optimizer.

    call of the save       notes versions and samples of what is copied later, and returns
    thread of the save     copies, while training computes forward and backward
    pre-step hook          copies what is left, and waits for what is being copied; then the step may change it

Masters, moments and weights change only in a step, so between two steps there is no hurry. CheckFreq (FAST '21) and
DataStates-LLM (HPDC '24) copy so. Other code may break the rule, so a copy is checked: the version counter of each source
counts the writes of torch, and samples of its memory show the others (through ``.data``, NumPy, other libraries). A write of
that kind that leaves all samples as they are is not seen. After a write the save is not committed: it would mix two states.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unickpt.base.errors import ChangedError, UnickptError
from unickpt.checkpoint.format.casts import TensorCopy, copy_some, divided, samples

_PART_BYTES = 4 << 20  # copied at a time; the step waits for one part more than it copies itself


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that is copied or compared later.

    Attributes:
        name: of the tensor, for messages.
        tensor: the tensor of the job, dense if it is on the CPU.
        copy: copy of it, or None if it is compared only. A sample of the copy shows whether the source changed before.
    """

    name: str
    tensor: torch.Tensor
    copy: torch.Tensor | None


def silent_steps(optimizer: Any) -> str:
    """Return why steps of an optimizer may change parameters and states without a hook of torch before them, or ''."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return f"{type(optimizer).__name__} is no optimizer of torch, so no hook runs before its steps"
    if getattr(optimizer, "capturable", False) or any(group.get("capturable") for group in optimizer.param_groups):
        return f"{type(optimizer).__name__} is capturable: a step in a CUDA graph calls no hook"
    return ""


def is_counted(tensor: torch.Tensor) -> bool:
    """Return whether torch counts the versions of a tensor."""
    return not tensor.is_inference()


class Watch:
    """Notes what tensors are, and finds out whether they are still the same.

    Args:
        sources: the tensors. Their copies have no values yet.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._versions = [source.tensor._version for source in sources]
        self._on_host = [source for source in sources if source.tensor.is_cpu and source.tensor.numel()]
        self._samples = samples([source.tensor for source in self._on_host])

    def check_versions(self) -> None:
        """Raises ChangedError if torch has written to a source."""
        for source, before in zip(self._sources, self._versions, strict=True):
            if source.tensor._version != before:
                raise _changed(source.name, f"torch has written to it {source.tensor._version - before} times")

    def check_samples(self) -> None:
        """Raises ChangedError if a copy, or a source that has none, differs from the source at the begin."""
        now = samples([source.tensor if source.copy is None else source.copy for source in self._on_host])
        if now == self._samples:
            return
        at = next(at for at in range(0, len(now), 8) if now[at : at + 8] != self._samples[at : at + 8])
        name = self._on_host[at // 8].name
        raise _changed(name, "its memory has other values, but torch has counted no write (`.data`, NumPy?)")


def _changed(name: str, how: str) -> ChangedError:
    error = ChangedError(
        f"{name} was changed between two steps of the optimizer while it was copied: {how}. This save is given up, because it "
        "would mix two states. Later saves of this process copy before the call returns"
    )
    error.tensor = name
    return error


class LateCopy:
    """The copies of one save that are made later: by the thread of the save, and by the thread that needs them to be over.

    Args:
        copies: between CPU tensors.
        watch: of all sources.
        finish: called once after the copies with the results of ``copy_all``. It copies what depends on them.
        order: makes what follows on the devices wait for the copies from there, and does not block; called in ``settle``.
    """

    def __init__(
        self,
        copies: Sequence[TensorCopy],
        watch: Watch,
        finish: Callable[[list[bool]], None],
        order: Callable[[], None],
    ) -> None:
        self._copies, self._watch, self._finish, self._order = copies, watch, finish, order
        self._parts = divided(copies, -(-sum(each.source.nbytes for each in copies) // _PART_BYTES)) if copies else []
        self._same = [True] * len(copies)
        self._lock = threading.Lock()
        self._begun = self._made = 0  # parts
        self._over = threading.Event()
        self._gate = threading.Lock()
        self._settled = self._cancelled = False
        self._error: Exception | None = None
        _register(self)

    @property
    def changed(self) -> bool:
        """Whether a source was found to have changed."""
        return isinstance(self._error, ChangedError)

    def run(self) -> None:
        """Make the copies, or wait until they are made. Runs in the thread of the save.

        Raises:
            ChangedError: a source has changed.
        """
        self._help()
        self._over.wait()
        self.check()

    def settle(self) -> None:
        """Return when nothing reads the sources any more. The thread that is about to change them calls this."""
        self._help()
        self._over.wait()
        with self._gate:
            if not self._settled:
                self._compare()
                self._order()
                self._settled = True
        _unsettled.discard(self)

    def check(self) -> None:
        """Raises ChangedError if a source changed before the copies were made, or, without ``settle``, until now."""
        with self._gate:
            if not self._settled:
                self._compare()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Forget the sources. Copies that were not begun are not made."""
        with self._lock:
            self._cancelled = True
            if self._begun == self._made:
                self._over.set()
        self._over.wait()
        with self._gate:
            self._settled = True
        _unsettled.discard(self)

    def _compare(self) -> None:
        try:
            self._watch.check_versions()
        except ChangedError as err:
            self._error = self._error or err

    def _help(self) -> None:
        """Make copies that nobody has begun."""
        while (at := self._next()) is not None:
            try:
                if at < len(self._parts):
                    part = self._parts[at]
                    self._same[part.start : part.stop] = copy_some(self._copies, part)
            except BaseException as err:  # the other thread waits for this part
                self._error = self._error or UnickptError(f"a copy of the state was interrupted ({type(err).__name__}: {err})")
                raise
            finally:
                self._end_part()

    def _next(self) -> int | None:
        with self._lock:
            if self._cancelled or self._begun >= max(len(self._parts), 1):  # without parts, one that only finishes
                return None
            self._begun += 1
            return self._begun - 1

    def _end_part(self) -> None:
        with self._lock:
            self._made += 1
            last = self._made == max(len(self._parts), 1)
            if self._cancelled:
                last = False
                if self._begun == self._made:
                    self._over.set()
        if not last:
            return
        try:
            if self._error is None:
                self._finish(self._same)
                self._watch.check_samples()
        except Exception as err:
            self._error = err
        self._over.set()


_unsettled: set[LateCopy] = set()  # of this process: a step does not know of the saves
_hooked = False


def _register(copy: LateCopy) -> None:
    global _hooked
    _unsettled.add(copy)
    if not _hooked:
        _hooked = True
        register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001
    settle_all()


def settle_all() -> None:
    """Return when no save of this process reads the state of the job: before code other than a step changes it."""
    for copy in list(_unsettled):
        copy.settle()
