from collections.abc import Callable
from typing import Any

from unickpt.diagnosis.recording.fast_path import GroupState

RECORD_BYTES: int

class State:
    last: int
    step: int
    phase: int
    blocked: int
    waits_blocked: int
    def __init__(
        self, memory: Any, address: int, capacity: int, rank: int, dtypes: dict[Any, int], in_backward: Callable[[], int]
    ) -> None: ...
    @property
    def groups(self) -> dict[int, GroupState]: ...
    @property
    def pending(self) -> dict[int, tuple[Any, int | tuple[int, ...], int]]: ...
    def next(self) -> int: ...

class Method:
    def __init__(self, state: State, original: Callable[..., Any], fallback: Callable[..., Any], op: int) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class Wait:
    def __init__(self, state: State, original: Callable[..., Any], fallback: Callable[..., Any]) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
