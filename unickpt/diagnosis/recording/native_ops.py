"""Record calls that torch makes in C++: functional collectives, and the reducer of DistributedDataParallel.

Their operators are overridden at the dispatch key ``BackendSelect``: below autograd, which inference mode skips, and above
every device. From there a Python kernel can call the next kernel without the interpreter's lock. An override costs some
microseconds. Functional collectives always pay them; other calls pay once a module reduces in C++.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from unickpt.diagnosis.recording.recorder import DTYPE_CODES, CallRecorder, Handle
from unickpt.diagnosis.recording.records import Flag, Op

_library: Any = torch.library
_c10d: Any = dist.distributed_c10d

_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FLAGS = int(Flag.ASYNC | Flag.FROM_NATIVE)
_MAX_OPEN = 4096
Describe = Callable[..., tuple[Op, Any, int, int, int]]  # operation, a tensor, elements in and out, rank in the group


class _RecordedCall(threading.local):
    """State of one thread: whether a method of the process group has recorded the call that it is making."""

    recorded = False


class NativeOps:
    """Overrides of operators that write to one recorder.

    Attributes:
        reducing: whether calls from C++ are recorded, too.
    """

    __slots__ = ("_libraries", "_open", "_recorder", "_thread", "reducing")

    def __init__(self, recorder: CallRecorder) -> None:
        self._recorder: CallRecorder | None = recorder
        self._thread = _RecordedCall()
        self._libraries: list[Any] = []
        self._open: dict[int, Handle] = {}  # address of a functional collective's result -> the call
        self.reducing = False

    def watch_functional(self) -> None:
        """Record functional collectives from now on."""
        makers: dict[str, Any] = {
            name: functools.partial(self._functional, describe=describe) for name, describe in _FUNCTIONAL.items()
        }
        self._override("_c10d_functional", {**makers, "wait_tensor": self._waits})

    def watch_reducer(self) -> None:
        """Record the calls of the reducer from now on. Further calls have no effect."""
        if self.reducing:
            return
        self.reducing = True
        if self._recorder is not None:
            self._recorder.state.blocked += 1  # methods must mark the calls that they have recorded
        self._override("c10d", {name: functools.partial(self._call, describe=describe) for name, describe in _CALLS.items()})

    def beside(self, method: Callable[..., Any], group: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Make a call that a method of its process group has recorded, without recording its operators."""
        self._thread.recorded = True
        try:
            return method(group, *args, **named)
        finally:
            self._thread.recorded = False

    def waiting(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap ``wait_tensor`` of torch's functional collectives, which their tensors call below ``BackendSelect``."""

        def wait_tensor(tensor: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(tensor)
            return self._record_wait(getattr(tensor, "elem", tensor), lambda: original(tensor))

        return wait_tensor

    def unwatch(self) -> None:
        """Remove all overrides."""
        if self._recorder is not None and self.reducing:
            self._recorder.state.blocked -= 1
        self._recorder, self.reducing = None, False
        for library in self._libraries:
            library._destroy()
        self._libraries.clear()
        self._open.clear()

    def _override(self, namespace: str, makers: dict[str, Any]) -> None:
        library = _library.Library(namespace, "IMPL")
        for name, make in makers.items():
            operator = _operator(namespace, name)
            if operator is not None:
                library.impl(name, make(operator), "BackendSelect", with_keyset=True)
        self._libraries.append(library)

    def _functional(self, operator: Any, *, describe: Describe) -> Callable[..., Any]:
        place = _position(operator, "group_name")

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            recorder = self._recorder
            number: Handle = 0
            if recorder is not None and type(first_of(args[0])) in _PLAIN:  # not for the fake tensors of compilers
                try:
                    number = recorder.call(_group(args[place]), _what(*describe(*args)))
                except Exception as err:
                    recorder.error(err)
            result = _below(operator, keyset, *args, **kwargs)
            if number and recorder is not None:
                address = first_of(result).data_ptr()
                forgotten: list[Handle] = [self._open.pop(address, 0)]  # the memory has another owner, without a wait
                self._open[address] = number
                if len(self._open) > _MAX_OPEN:
                    forgotten.append(self._open.pop(next(iter(self._open)), 0))
                for old in forgotten:
                    recorder.forget(old)
            return result

        return kernel

    def _waits(self, operator: Any) -> Callable[..., Any]:
        return lambda keyset, tensor: self._record_wait(tensor, lambda: _below(operator, keyset, tensor))

    def _record_wait(self, tensor: Any, wait: Callable[[], Any]) -> Any:
        recorder = self._recorder
        number = self._open.pop(tensor.data_ptr(), None) if recorder is not None and type(tensor) in _PLAIN else None
        if recorder is None or number is None:
            return wait()
        recorder.wait(number)
        result = wait()
        recorder.end(number)
        return result

    def _call(self, operator: Any, *, describe: Describe) -> Callable[..., Any]:
        place = _position(operator, "process_group")

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            recorder = None if self._thread.recorded else self._recorder
            number: Handle = 0
            if recorder is not None and type(first_of(args[0])) in _PLAIN:
                try:
                    number = recorder.call(dist.ProcessGroup.unbox(args[place]), _what(*describe(*args)))
                except Exception as err:
                    recorder.error(err)
            result = _below(operator, keyset, *args, **kwargs)
            if number and recorder is not None:
                recorder.issued(number, dist.Work.unbox(result[1] if isinstance(result, tuple) else result), _FLAGS)
            return result

        return kernel


def _operator(namespace: str, name: str) -> Any:
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return None if packet is None else packet.default


def _below(operator: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the device's kernel without the interpreter's lock.

    ``get_kernel(...).call_boxed`` would keep the lock. Gloo's threads need it to release tensors, while they hold a lock that
    the call needs: a deadlock.
    """
    return operator.redispatch(keyset & _BELOW, *args, **kwargs)


def _position(operator: Any, argument: str) -> int:
    return next(at for at, known in enumerate(operator._schema.arguments) if known.name == argument)


def _group(group: Any) -> Any:
    return _c10d._resolve_process_group(group) if isinstance(group, str) else group


def _what(op: Op, sample: Any, given: int, got: int, peer: int) -> tuple[int, int, int, int, int, int, int, int]:
    shape = 0 if op == Op.ALL_TO_ALL or sample is None else hash(sample.shape) & 0xFFFFFFFF
    return int(op), 0 if sample is None else DTYPE_CODES.get(sample.dtype, 0), given, got, _FLAGS, peer, 0, shape


def first_of(tensors: Any) -> Any:
    """Return the first tensor of nested lists; None without one."""
    while isinstance(tensors, (list, tuple)):
        tensors = tensors[0] if tensors else None
    return tensors


def elements_of(tensors: Any) -> int:
    """Return the number of elements in nested lists of tensors."""
    if not isinstance(tensors, (list, tuple)):
        return int(tensors.numel())
    if len(tensors) == 1 and not isinstance(tensors[0], list):  # the usual case
        return int(tensors[0].numel())
    return sum(map(elements_of, tensors))


def _same(op: Op) -> Describe:
    return lambda tensors, *_: (op, first_of(tensors), elements_of(tensors), elements_of(tensors), -1)


def _rooted(op: Op, root: int) -> Describe:
    return lambda *args: (op, first_of(args[0]), elements_of(args[0]), elements_of(args[0]), args[root])


def _gathered(inputs: Any, size: int, *_: Any) -> tuple[Op, Any, int, int, int]:
    count = elements_of(inputs)
    return Op.ALL_GATHER, first_of(inputs), count, count * size, -1


def _scattered(inputs: Any, _reduce: str, size: int, *_: Any) -> tuple[Op, Any, int, int, int]:
    count = elements_of(inputs)
    return Op.REDUCE_SCATTER, None, count, count // size, -1


def _exchanged(tensor: Any, output_splits: Any, *_: Any) -> tuple[Op, Any, int, int, int]:
    row = tensor[0].numel() if tensor.dim() and tensor.shape[0] else 0
    return Op.ALL_TO_ALL, tensor, tensor.numel(), int(sum(output_splits)) * row, -1


_FUNCTIONAL: dict[str, Describe] = {
    "all_reduce": _same(Op.ALL_REDUCE),
    "all_reduce_": _same(Op.ALL_REDUCE),
    "all_reduce_coalesced": _same(Op.ALL_REDUCE),
    "all_reduce_coalesced_": _same(Op.ALL_REDUCE),
    "all_gather_into_tensor": _gathered,
    "all_gather_into_tensor_out": _gathered,
    "all_gather_into_tensor_coalesced": _gathered,
    "reduce_scatter_tensor": _scattered,
    "reduce_scatter_tensor_out": _scattered,
    "reduce_scatter_tensor_coalesced": _scattered,
    "all_to_all_single": _exchanged,
    "broadcast": _rooted(Op.BROADCAST, 1),
    "broadcast_": _rooted(Op.BROADCAST, 1),
}


def _between(op: Op, own: int) -> Describe:
    """Describe a call with outputs and inputs. ``own`` is the position of the argument whose shape all members share."""
    return lambda outputs, inputs, *_: (op, first_of((outputs, inputs)[own]), elements_of(inputs), elements_of(outputs), -1)


_CALLS: dict[str, Describe] = {
    "allreduce_": _same(Op.ALL_REDUCE),
    "allreduce_coalesced_": _same(Op.ALL_REDUCE),
    "broadcast_": _rooted(Op.BROADCAST, 2),
    "reduce_": _rooted(Op.REDUCE, 3),
    "allgather_": _between(Op.ALL_GATHER, 1),
    "_allgather_base_": _between(Op.ALL_GATHER, 1),
    "allgather_coalesced_": _between(Op.ALL_GATHER, 1),
    "allgather_into_tensor_coalesced_": _between(Op.ALL_GATHER, 1),
    "reduce_scatter_": _between(Op.REDUCE_SCATTER, 0),
    "_reduce_scatter_base_": _between(Op.REDUCE_SCATTER, 0),
    "reduce_scatter_tensor_coalesced_": _between(Op.REDUCE_SCATTER, 0),
    "alltoall_": _between(Op.ALL_TO_ALL, 1),
    "alltoall_base_": _between(Op.ALL_TO_ALL, 1),
}
