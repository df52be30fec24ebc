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

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unickpt.base.arrays import Ints
from unickpt.base.errors import ChangedError, UnickptError
from unickpt.checkpoint.format.casts import TensorCopy, copy_some, divided, samples

_PART_BYTES = 4 << 20  # copied at a time; the step waits for one part more than it copies itself


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that is copied or compared later.

    Attributes:
        name: of the tensor, for messages.
        tensor: the tensor of the job, dense if it is on the CPU.
        compared: it is compared only, and not copied.
    """

    name: str
    tensor: torch.Tensor
    compared: bool = False


def silent_steps(optimizer: Any) -> str:
    """Return why steps of an optimizer may change parameters and states without a hook of torch before them, or ''."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return f"{type(optimizer).__name__} is no optimizer of torch, so no hook runs before its steps"
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # such as torch's PostLocalSGDOptimizer
        return f"{type(optimizer).__name__} has no hooks: it does not call the constructor of torch.optim.Optimizer"
    if getattr(optimizer, "capturable", False) or any(group.get("capturable") for group in optimizer.param_groups):
        return f"{type(optimizer).__name__} is capturable: a step in a CUDA graph calls no hook"
    return ""


class Watch:
    """Notes what tensors are, and finds out whether they are still the same.

    Args:
        written: tensors whose counters of writes are compared, each with a name for messages, and what it was.
        names: of the tensors in host memory whose values are sampled.
        spans: address and size in bytes of each of them. int64 ``[names, 2]``.
        compared: which of them are compared alone, and not copied.
    """

    def __init__(
        self,
        written: Sequence[tuple[str, torch.Tensor, int]] = (),
        names: Sequence[str] = (),
        spans: Ints | None = None,
        compared: Sequence[bool] = (),
    ) -> None:
        self._written, self._names, self._compared = written, names, compared
        self._spans = np.empty((0, 2), np.int64) if spans is None else spans
        self._samples = samples(self._spans)

    @classmethod
    def of(cls, sources: Sequence[Source]) -> Watch:
        """Return the watch of sources."""
        host = [each for each in sources if each.tensor.is_cpu]
        spans = np.array([(each.tensor.data_ptr(), each.tensor.nbytes) for each in host], np.int64).reshape(-1, 2)
        written = [(each.name, each.tensor, each.tensor._version) for each in sources]
        return cls(written, [each.name for each in host], spans, [each.compared for each in host])

    def check_versions(self) -> None:
        """Raises ChangedError if torch has written to a source."""
        for name, tensor, before in self._written:
            if tensor._version != before:
                raise _changed(name, f"torch has written to it {tensor._version - before} times")

    def check_samples(self, copies: Mapping[int, int]) -> None:
        """Raises ChangedError if a copy, or a source that is only compared, is not what the source was at first.

        Args:
            copies: address of a copy by that of its source.
        """
        spans = self._spans.copy()
        spans[:, 0] = [
            place if compared else copies.get(place, place)
            for place, compared in zip(spans[:, 0].tolist(), self._compared, strict=True)
        ]
        now = samples(spans)
        if now == self._samples:
            return
        at = next(at for at in range(0, len(now), 8) if now[at : at + 8] != self._samples[at : at + 8])
        raise _changed(self._names[at // 8], "its memory has other values, but torch has counted no write (`.data`, NumPy?)")


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
        place: returns the copies between CPU tensors; called once, by the first of the threads.
        watch: of all sources.
        finish: called once after the copies with the results of ``copy_all``. It copies what depends on them.
        order: makes what follows on the devices wait for the copies from there, and does not block; called in ``settle``.
    """

    def __init__(
        self,
        place: Callable[[], Sequence[TensorCopy]],
        watch: Watch,
        finish: Callable[[Sequence[bool]], None],
        order: Callable[[], None],
    ) -> None:
        self._place, self._watch, self._finish, self._order = place, watch, finish, order
        self._copies: Sequence[TensorCopy] | None = None
        self._parts: list[range] = []
        self._same: list[bool] = []
        self._lock = threading.Lock()
        self._begun = self._made = 0  # parts
        self._over = threading.Event()
        self._gate = threading.Lock()
        self._settled = self._cancelled = self._finishing = False
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
                try:
                    self._order()
                except Exception as err:  # of the device: the copies may be torn, and training goes on
                    self._error = self._error or err
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
            if self._begun == self._made and not self._finishing:  # another thread may still fill the buffer
                self._over.set()
        self._over.wait()
        with self._gate:
            self._settled = True
        _unsettled.discard(self)
        self._copies, self._watch = (), Watch()  # what is copied and what waits for it name each other
        self._place, self._finish, self._order = tuple, _nothing, _nothing

    def _compare(self) -> None:
        try:
            self._watch.check_versions()
        except ChangedError as err:
            self._error = self._error or err

    def _help(self) -> None:
        """Make copies that nobody has begun."""
        while (part := self._next()) is not None:
            try:
                if len(part):
                    self._same[part.start : part.stop] = copy_some(self._copies or (), part)
            except Exception as err:  # a step of training may have called this
                self._error = self._error or err
            except BaseException as err:  # the other thread waits for this part
                self._error = self._error or UnickptError(f"a copy of the state was interrupted ({type(err).__name__})")
                raise
            finally:
                self._end_part()

    def _next(self) -> range | None:
        """Return the positions of copies that nobody has begun; None if there are none. At least one part, maybe empty."""
        with self._lock:
            if self._copies is None and not self._cancelled:
                self._copies = self._placed()
                size = sum(each.source.nbytes for each in self._copies)
                self._parts = divided(self._copies, -(-size // _PART_BYTES)) if size else [range(len(self._copies))]
                self._same = [True] * len(self._copies)
            if self._cancelled or self._begun == len(self._parts):
                return None
            self._begun += 1
            return self._parts[self._begun - 1]

    def _placed(self) -> Sequence[TensorCopy]:
        try:
            return self._place()
        except Exception as err:
            self._error = self._error or err
            return ()

    def _end_part(self) -> None:
        with self._lock:
            self._made += 1
            if self._cancelled and self._begun == self._made:
                self._over.set()
            self._finishing = last = self._made == len(self._parts) and not self._cancelled
        if not last:
            return
        try:
            if self._error is None:
                copies = {each.source.data_ptr(): each.target.data_ptr() for each in self._copies or ()}
                self._finish(self._same)
                self._watch.check_samples(copies)
        except Exception as err:
            self._error = err
        self._over.set()


def _nothing(*_: object) -> None:
    """Do nothing."""


_unsettled: set[LateCopy] = set()  # of this process: a step does not know of the saves
_hooked = False


def _register(copy: LateCopy) -> None:
    global _hooked
    _unsettled.add(copy)
    if not _hooked:
        _hooked = True
        register_optimizer_step_pre_hook(_before_step)
        os.register_at_fork(after_in_child=_unsettled.clear)  # it has no thread of a save, and copies of its own


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001
    settle_all()


def settle_all() -> None:
    """Return when no save of this process reads the state of the job: before code other than a step changes it."""
    for copy in list(_unsettled):
        copy.settle()
