from collections.abc import Callable, Iterator
from typing import Any

from unickpt.diagnosis.recording.fast_path import GroupState

RECORD_BYTES: int

def main_stack_first(fd: int, number: int, /) -> None: ...

class Counter(Iterator[int]):
    def __next__(self) -> int: ...

class State:
    counts: int
    last: int
    step: int
    phase: int
    blocked: int
    waits_blocked: int
    def __init__(
        self,
        memory: Any,
        address: int,
        capacity: int,
        rank: int,
        dtypes: dict[Any, int],
        in_backward: Callable[[], int],
        counter: bool = False,
    ) -> None: ...
    @property
    def pending(self) -> dict[int, tuple[Any, int | tuple[int, ...], int]]: ...
    def next(self) -> int: ...
    def now(self) -> int: ...
    def add_group(self, key: int, group: GroupState, /) -> None: ...
    def remove_group(self, key: int, /) -> None: ...

class Method:
    def __init__(self, state: State, original: Callable[..., Any], fallback: Callable[..., Any], op: int) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class Wait:
    def __init__(self, state: State, original: Callable[..., Any], fallback: Callable[..., Any]) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
