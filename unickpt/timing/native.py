"""Calls that torch makes in C++: functional collectives, and the reducer of DistributedDataParallel.

Their operators are overridden at the key ``BackendSelect``: below autograd, which inference mode leaves out, and above every
device; from there a kernel in Python can call on without the interpreter's lock. That costs some microseconds, and it is paid
where it must: by functional collectives always, by all other calls once there is a module that reduces in C++.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from unickpt.timing.recorder import DTYPE_CODES, Recorder
from unickpt.timing.records import Flag, Op

_library: Any = torch.library
_c10d: Any = dist.distributed_c10d

_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FLAGS = int(Flag.ASYNC | Flag.FROM_NATIVE)
_MAX_OPEN = 4096
Describe = Callable[..., tuple[Op, Any, int, int, int]]  # operation, a tensor, elements in and out, rank in the group


class Noted(threading.local):
    """Whether a method of the process group has noted the call that this thread is making."""

    here = False


noted = Noted()
reducing = False  # calls from C++ are noted, too
_libraries: list[Any] = []
_open: dict[int, int] = {}  # address of a functional collective's result -> its record


def watch_functional(recorder: Callable[[], Recorder | None]) -> None:
    """Note functional collectives, from now on."""
    makers: dict[str, Any] = {name: functools.partial(_functional, describe=describe) for name, describe in _FUNCTIONAL.items()}
    _override("_c10d_functional", {**makers, "wait_tensor": _waits}, recorder)


def watch_reducer(recorder: Callable[[], Recorder | None]) -> None:
    """Note what the reducer calls, from now on. Once is enough."""
    global reducing
    if reducing:
        return
    reducing = True
    _override("c10d", {name: functools.partial(_call, describe=describe) for name, describe in _CALLS.items()}, recorder)


def beside(method: Callable[..., Any], group: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """A call that a method of its process group has noted: what it does in C++ is not noted again."""
    noted.here = True
    try:
        return method(group, *args, **named)
    finally:
        noted.here = False


def _override(namespace: str, makers: dict[str, Any], recorder: Callable[[], Recorder | None]) -> None:
    library = _library.Library(namespace, "IMPL")
    for name, make in makers.items():
        operator = _operator(namespace, name)
        if operator is not None:
            library.impl(name, make(operator, recorder), "BackendSelect", with_keyset=True)
    _libraries.append(library)


def waiting(original: Callable[[Any], Any], recorder: Callable[[], Recorder | None]) -> Callable[[Any], Any]:
    """``wait_tensor`` of torch's functional collectives, whose tensors call it below that key."""

    def wait_tensor(tensor: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(tensor)
        return _noting_the_wait(getattr(tensor, "elem", tensor), recorder, lambda: original(tensor))

    return wait_tensor


def unwatch() -> None:
    """Take all overrides back."""
    global reducing
    reducing = False
    for library in _libraries:
        library._destroy()
    _libraries.clear()
    _open.clear()


def _operator(namespace: str, name: str) -> Any:
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return None if packet is None else packet.default


def _functional(operator: Any, recorder: Callable[[], Recorder | None], *, describe: Describe) -> Callable[..., Any]:
    place = _position(operator, "group_name")

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        found = recorder()
        number = 0
        if found is not None and type(_first(args[0])) in _PLAIN:  # compilers call with tensors that are none
            try:
                number = found.call(_group(args[place]), _what(*describe(*args)))
            except Exception as err:
                found.error(err)
        result = _below(operator, keyset, *args, **kwargs)
        if number:
            _open[_first(result).data_ptr()] = number
            if len(_open) > _MAX_OPEN:
                _open.pop(next(iter(_open)), None)
        return result

    return kernel


def _waits(operator: Any, recorder: Callable[[], Recorder | None]) -> Callable[..., Any]:
    return lambda keyset, tensor: _noting_the_wait(tensor, recorder, lambda: _below(operator, keyset, tensor))


def _noting_the_wait(tensor: Any, recorder: Callable[[], Recorder | None], wait: Callable[[], Any]) -> Any:
    found = recorder()
    number = _open.pop(tensor.data_ptr(), None) if found is not None and type(tensor) in _PLAIN else None
    if found is None or number is None:
        return wait()
    found.wait(number)
    result = wait()
    found.end(number)
    return result


def _below(operator: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the device's own. Without the interpreter's lock (``get_kernel(...).call_boxed`` would keep it): gloo's threads
    need that to let tensors go, and hold a lock of their own meanwhile that the call wants."""
    return operator.redispatch(keyset & _BELOW, *args, **kwargs)


def _call(operator: Any, recorder: Callable[[], Recorder | None], *, describe: Describe) -> Callable[..., Any]:
    place = _position(operator, "process_group")

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        found = None if noted.here else recorder()
        number = 0
        if found is not None and type(_first(args[0])) in _PLAIN:
            try:
                number = found.call(dist.ProcessGroup.unbox(args[place]), _what(*describe(*args)))
            except Exception as err:
                found.error(err)
        result = _below(operator, keyset, *args, **kwargs)
        if number and found is not None:
            found.issued(number, dist.Work.unbox(result[1] if isinstance(result, tuple) else result), _FLAGS)
        return result

    return kernel


def _position(operator: Any, argument: str) -> int:
    return next(at for at, known in enumerate(operator._schema.arguments) if known.name == argument)


def _group(group: Any) -> Any:
    return _c10d._resolve_process_group(group) if isinstance(group, str) else group


def _what(op: Op, sample: Any, given: int, got: int, peer: int) -> tuple[int, int, int, int, int, int, int, int]:
    shape = 0 if op == Op.ALL_TO_ALL or sample is None else hash(sample.shape) & 0xFFFFFFFF
    return int(op), 0 if sample is None else DTYPE_CODES.get(sample.dtype, 0), given, got, _FLAGS, peer, 0, shape


def _first(tensors: Any) -> Any:
    while isinstance(tensors, (list, tuple)):
        tensors = tensors[0] if tensors else None
    return tensors


def _elements(tensors: Any) -> int:
    return sum(map(_elements, tensors)) if isinstance(tensors, (list, tuple)) else int(tensors.numel())


def _same(op: Op) -> Describe:
    return lambda tensors, *_: (op, _first(tensors), _elements(tensors), _elements(tensors), -1)


def _rooted(op: Op, root: int) -> Describe:
    return lambda *args: (op, _first(args[0]), _elements(args[0]), _elements(args[0]), args[root])


def _gathered(inputs: Any, size: int, *_: Any) -> tuple[Op, Any, int, int, int]:
    count = _elements(inputs)
    return Op.ALL_GATHER, _first(inputs), count, count * size, -1


def _scattered(inputs: Any, _reduce: str, size: int, *_: Any) -> tuple[Op, Any, int, int, int]:
    count = _elements(inputs)
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
    """Of outputs and inputs; the tensor that all members have alike is at ``own``."""
    return lambda outputs, inputs, *_: (op, _first((outputs, inputs)[own]), _elements(inputs), _elements(outputs), -1)


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
