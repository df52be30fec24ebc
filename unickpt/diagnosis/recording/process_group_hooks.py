"""Hooks on torch.distributed that record every collective and point-to-point call of every process group.

Calls reach a process group in three ways. Each is hooked where it costs least:

- Python calls end in a method of ``ProcessGroup``, whichever function they come through. These methods are replaced: in C for
  the usual calls (``fast_path``; below a microsecond), otherwise in Python (some microseconds).
- Functional collectives, also those of compiled code, are operators ``_c10d_functional::*`` that call the group in C++. These
  operators are overridden (some microseconds, for these calls only).
- The reducer of ``DistributedDataParallel`` calls the group in C++. The first such module overrides the operators ``c10d::*``.
  All calls go through them from then on; a call that a method has recorded is not recorded again.

The end of a call is recorded when the caller waits for it, or by a thread that looks every 10 ms. For calls on a device see
``docs/guides/diagnosis-records.md``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as _functional_collectives
from torch.nn.parallel import DistributedDataParallel

from unickpt.base.logs import logger
from unickpt.diagnosis.recording.fast_path import method, wait_method
from unickpt.diagnosis.recording.native_ops import NativeOps, elements_of, first_of
from unickpt.diagnosis.recording.recorder import DTYPE_CODES, CallRecorder, Handle
from unickpt.diagnosis.recording.records import Flag, Op

_ProcessGroup: Any = dist.ProcessGroup
_Work: Any = dist.Work
_c10d: Any = dist.distributed_c10d

# op, dtype, elements in, elements out, flags, rank in the group, tag, hash of the shape
CallFields = tuple[int, int, int, int, int, int, int, int]
_NONE = -1


class _CoalescedCalls(threading.local):
    """State of one thread: the calls that are being coalesced."""

    coalesced: list[Handle] | None = None


class ProcessGroupHooks:
    """Hooks on torch.distributed that write to one recorder. At most one instance per process is installed.

    Args:
        recorder: where they write to.
        wraps: called with each new ``DistributedDataParallel``.

    Attributes:
        recorder: where they write to; None after ``uninstall``. A method that a caller has kept then only calls the original.
    """

    __slots__ = ("_coalescing", "_native", "_originals", "_thread", "_wraps", "recorder")

    def __init__(self, recorder: CallRecorder, wraps: Callable[[Any], None] = lambda _: None) -> None:
        self.recorder: CallRecorder | None = recorder
        self._originals: dict[tuple[Any, str], Any] = {}
        self._thread = _CoalescedCalls()
        self._coalescing = 0  # number of threads that coalesce calls; at 0 there is no need to look at ``_thread``
        self._native = NativeOps(recorder)
        self._wraps = wraps

    def install(self) -> None:
        """Begin to record."""
        assert self.recorder is not None
        state = self.recorder.state
        state.blocked -= 1
        state.waits_blocked -= 1
        for name, describe in _METHODS.items():
            if hasattr(_ProcessGroup, name):
                original = getattr(_ProcessGroup, name)
                self._replace(_ProcessGroup, name, method(state, name, original, self._watched(original, describe)))
        known = {*_METHODS, *_NO_CALLS}
        unknown = sorted(name for name in vars(_ProcessGroup) if not name.startswith("__") and name not in known)
        if unknown:
            logger.warning(
                "unickpt: torch %s has methods of process groups that this release does not know. If they communicate, they "
                "are not timed: %s",
                torch.__version__,
                ", ".join(unknown),
            )
        self._replace(_ProcessGroup, "_start_coalescing", self._starts_coalescing(_ProcessGroup._start_coalescing))
        self._replace(_ProcessGroup, "_end_coalescing", self._ends_coalescing(_ProcessGroup._end_coalescing))
        self._replace(_Work, "wait", wait_method(state, _Work.wait, self._waits(_Work.wait)))
        self._replace(DistributedDataParallel, "__init__", self._reduces(DistributedDataParallel.__init__))
        self._replace(_c10d, "_new_process_group_helper", self._creates(_c10d._new_process_group_helper))
        self._native.watch_functional()
        wait_tensor = self._native.waiting(_functional_collectives.wait_tensor)
        self._replace(_functional_collectives, "wait_tensor", wait_tensor)

    def reduces(self) -> None:
        """Record the calls of the reducer of a ``DistributedDataParallel`` that is being made. Further calls have no effect."""
        if self.recorder is not None:
            self._native.watch_reducer()

    def uninstall(self) -> None:
        """Restore torch's own methods."""
        if self.recorder is not None:  # for methods that a caller has kept
            self.recorder.state.blocked += 1
            self.recorder.state.waits_blocked += 1
        self.recorder = None
        for (owner, name), original in self._originals.items():
            setattr(owner, name, original)
        self._originals.clear()
        self._native.unwatch()

    def _replace(self, owner: Any, name: str, function: Any) -> None:
        self._originals[owner, name] = vars(owner)[name]  # the raw attribute: getattr would bind it
        function.__name__, function.__qualname__ = name, f"{owner.__name__}.{name}"  # DeepSpeed names ranges by them
        function.__module__, function.__doc__ = getattr(owner, "__module__", owner.__name__), getattr(owner, name).__doc__
        setattr(owner, name, function)

    def _watched(self, original: Callable[..., Any], describe: Callable[..., CallFields]) -> Callable[..., Any]:
        hooks, native, thread = self, self._native, self._thread

        def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
            recorder = hooks.recorder
            if recorder is None:
                return original(self, *args, **kwargs)
            coalesced = thread.coalesced if hooks._coalescing else None
            try:
                what = describe(*args, **kwargs)
                number = recorder.call(self, what, 0 if coalesced is None else _COALESCED)
            except Exception as err:  # a call that cannot be described is made all the same
                if recorder.error(err):
                    hooks.uninstall()
                return original(self, *args, **kwargs)
            try:
                work = native.beside(original, self, args, kwargs) if native.reducing else original(self, *args, **kwargs)
            except BaseException:
                if number:
                    recorder.failed(number)
                raise
            if number and coalesced is None:
                recorder.issued(number, work, what[4])
            elif number and coalesced is not None:
                coalesced.append(number)
            return work

        return replaced

    def _creates(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Record the creation of process groups of this rank. With gloo their members connect to each other there."""
        hooks = self

        def replaced(size: Any, rank: Any, ranks: Any, *args: Any, **kwargs: Any) -> Any:
            recorder, number = hooks.recorder, 0
            try:
                if recorder is not None and ranks and dist.get_rank() in ranks:
                    number = recorder.new_group(ranks)
            except Exception as err:
                if recorder is not None and recorder.error(err):
                    hooks.uninstall()
            try:
                return original(size, rank, ranks, *args, **kwargs)
            except BaseException:
                if recorder is not None and number:
                    recorder.failed(number)
                raise
            finally:
                if recorder is not None and number:
                    recorder.end(number)

        return replaced

    def _starts_coalescing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        hooks, thread = self, self._thread

        def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
            if thread.coalesced is None:
                hooks._coalescing += 1
                if hooks.recorder is not None:
                    hooks.recorder.state.blocked += 1
            thread.coalesced = []
            return original(self, *args, **kwargs)

        return replaced

    def _ends_coalescing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        hooks, thread = self, self._thread

        def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
            numbers, thread.coalesced = thread.coalesced, None
            if numbers is not None:
                hooks._coalescing -= 1
                if hooks.recorder is not None:
                    hooks.recorder.state.blocked -= 1
            work = original(self, *args, **kwargs)
            if hooks.recorder is not None and numbers:
                hooks.recorder.issued(hooks.recorder.together(numbers), work, _ASYNC | _COALESCED)
            return work

        return replaced

    def _waits(self, original: Callable[..., Any]) -> Callable[..., Any]:
        hooks = self

        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            recorder = hooks.recorder
            if recorder is None:
                return original(self, *args, **kwargs)
            numbers = recorder.waits(self)
            if not numbers:
                return original(self, *args, **kwargs)
            try:
                done = original(self, *args, **kwargs)
            except BaseException:
                recorder.failed(numbers)
                raise
            recorder.end(numbers)
            return done

        return wait

    def _reduces(self, original: Callable[..., Any]) -> Callable[..., Any]:
        hooks = self

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            hooks.reduces()
            original(self, *args, **kwargs)
            if hooks.recorder is not None:
                hooks._wraps(self)

        return init


# ---------------------------------------------------------------- description of a call from its arguments
# Plain integers, as they are packed: looking up a member of an enumeration takes a tenth of a microsecond.

(_ALL_REDUCE, _BROADCAST, _REDUCE, _ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL, _GATHER, _SCATTER, _BARRIER, _SEND, _RECEIVE) = (
    int(op) for op in Op if op.collective or op.point_to_point
)
_ASYNC, _COALESCED = int(Flag.ASYNC), int(Flag.COALESCED)


def _shapes(tensors: Any) -> Any:
    return tuple(map(_shapes, tensors)) if isinstance(tensors, (list, tuple)) else tensors.shape


def _call(op: int, sample: Any, elements_in: int, elements_out: int, opts: Any, peer: int = _NONE, tag: int = 0) -> CallFields:
    """Describe a call with options. ``sample`` is a tensor whose shape is the same on all members."""
    flags = _ASYNC if getattr(opts, "asyncOp", False) else 0
    if sample is None:
        return op, 0, elements_in, elements_out, flags, peer, tag, 0
    return op, DTYPE_CODES.get(sample.dtype, 0), elements_in, elements_out, flags, peer, tag, hash(sample.shape) & 0xFFFFFFFF


def _all_reduce(tensors: Any, opts: Any = None, *_: Any, **__: Any) -> CallFields:
    if type(tensors) is list and len(tensors) == 1:  # the usual case
        tensor = tensors[0]
        count = tensor.numel()
        flags = _ASYNC if getattr(opts, "asyncOp", False) else 0
        return _ALL_REDUCE, DTYPE_CODES.get(tensor.dtype, 0), count, count, flags, _NONE, 0, hash(tensor.shape) & 0xFFFFFFFF
    count = elements_of(tensors)
    return _call(_ALL_REDUCE, first_of(tensors), count, count, opts)


def _rooted(op: int) -> Callable[..., CallFields]:
    def describe(tensors: Any, opts: Any = None, *_: Any, root: int = 0, **__: Any) -> CallFields:
        count = elements_of(tensors)
        root = opts if isinstance(opts, int) else getattr(opts, "rootRank", root)
        return _call(op, first_of(tensors), count, count, opts, root)

    return describe


def _listed(op: int) -> Callable[..., CallFields]:
    """Describe calls with a list that has a tensor for each member.

    With NCCL, members may give or get tensors of different shapes. All shapes together are the same on all members.
    """

    def describe(outputs: Any, inputs: Any, opts: Any = None, *_: Any, **__: Any) -> CallFields:
        lists, own = (outputs, inputs) if op == _ALL_GATHER else (inputs, outputs)
        fields = _call(op, first_of(own), elements_of(inputs), elements_of(outputs), opts)
        return (*fields[:-1], hash(_shapes(lists)) & 0xFFFFFFFF)

    return describe


def _all_gather(outputs: Any, inputs: Any, opts: Any = None, *_: Any, **__: Any) -> CallFields:
    return _call(_ALL_GATHER, first_of(inputs), elements_of(inputs), elements_of(outputs), opts)


def _reduce_scatter(outputs: Any, inputs: Any, opts: Any = None, *_: Any, **__: Any) -> CallFields:
    return _call(_REDUCE_SCATTER, first_of(outputs), elements_of(inputs), elements_of(outputs), opts)


def _all_to_all(outputs: Any, inputs: Any, *rest: Any, **_: Any) -> CallFields:
    op, dtype, given, got, flags, peer, tag, _shape = _call(
        _ALL_TO_ALL, first_of(inputs), elements_of(inputs), elements_of(outputs), rest[-1] if rest else None
    )
    return op, dtype, given, got, flags, peer, tag, 0  # members may split differently


def _to_or_from_one(op: int) -> Callable[..., CallFields]:
    def describe(outputs: Any, inputs: Any, opts: Any = None, *_: Any, **__: Any) -> CallFields:
        own = inputs if op == _GATHER else outputs
        return _call(op, first_of(own), elements_of(inputs), elements_of(outputs), opts, getattr(opts, "rootRank", 0))

    return describe


def _barrier(opts: Any = None, *_: Any, **__: Any) -> CallFields:
    return _call(_BARRIER, None, 0, 0, opts)


def _send(tensors: Any, dstRank: int = 0, tag: int = 0) -> CallFields:  # noqa: N803  (torch's name)
    sample = first_of(tensors)
    dtype, shape = DTYPE_CODES.get(sample.dtype, 0), hash(sample.shape) & 0xFFFFFFFF
    return _SEND, dtype, elements_of(tensors), 0, _ASYNC, dstRank, tag, shape


def _receive(tensors: Any, srcRank: int = _NONE, tag: int = 0) -> CallFields:  # noqa: N803
    sample = first_of(tensors)
    dtype, shape = DTYPE_CODES.get(sample.dtype, 0), hash(sample.shape) & 0xFFFFFFFF
    return _RECEIVE, dtype, 0, elements_of(tensors), _ASYNC, srcRank, tag, shape


def _receive_any(tensors: Any, tag: int = 0) -> CallFields:
    return _receive(tensors, _NONE, tag)


_METHODS: dict[str, Callable[..., CallFields]] = {
    "allreduce": _all_reduce,
    "allreduce_coalesced": _all_reduce,
    "broadcast": _rooted(_BROADCAST),
    "reduce": _rooted(_REDUCE),
    "allgather": _listed(_ALL_GATHER),
    "_allgather_base": _all_gather,
    "all_gather_single": _all_gather,
    "all_gather_single_coalesced": _all_gather,
    "allgather_coalesced": _all_gather,
    "allgather_into_tensor_coalesced": _all_gather,
    "reduce_scatter": _listed(_REDUCE_SCATTER),
    "_reduce_scatter_base": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "reduce_scatter_single_coalesced": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _reduce_scatter,
    "alltoall": _all_to_all,
    "alltoall_base": _all_to_all,
    "all_to_all_single": _all_to_all,
    "gather": _to_or_from_one(_GATHER),
    "gather_single": _to_or_from_one(_GATHER),  # since torch 2.15, as is gather_into_tensor
    "gather_into_tensor": _to_or_from_one(_GATHER),
    "scatter": _to_or_from_one(_SCATTER),
    "barrier": _barrier,
    "monitored_barrier": _barrier,
    "send": _send,
    "recv": _receive,
    "recv_anysource": _receive_any,
}
_NO_CALLS = frozenset({
    "_pybind11_conduit_v1_", "rank", "size", "name", "get_group_store", "split_group", "merge_remote_group", "abort",
    "shutdown", "_id", "_backend_id", "_set_sequence_number_for_group", "_get_sequence_number_for_group", "set_timeout",
    "_device_types", "_get_backend_name", "_start_coalescing", "_end_coalescing", "_register_backend", "_get_backend",
    "_set_default_backend", "_register_on_completion_hook", "_wait_for_pending_works", "_has_hooks",
    "_enable_collectives_timing", "_set_group_name", "group_name", "_set_group_desc", "group_desc", "bound_device_id",
    "use_pg_for_symm_mem_rendezvous", "boxed", "unbox", "BackendType", "UNDEFINED", "GLOO", "NCCL", "XCCL", "UCC", "MPI",
    "CUSTOM", "_add_ephemeral_timeout", "get_backend", "get_reconfigure_handle", "reconfigure", "new_window",
    "register_abort_hook", "register_post_hook", "register_pre_hook", "supports_abort_hooks", "supports_completion_hooks",
    "supports_reconfigure", "supports_window", "unregister_abort_hook", "unregister_post_hook", "unregister_pre_hook",
})  # fmt: skip
