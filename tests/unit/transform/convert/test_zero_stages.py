"""The ZeRO stage in DeepSpeed's files: a number, or a member of an enumeration that Python stores by value or by name."""

from __future__ import annotations

import enum
import pickle
from pathlib import Path
from typing import Any

import pytest

from unickpt.transform.convert.deepspeed.model_states import zero_stage_of
from unickpt.transform.convert.pickles.lazy_tensor import OpenFiles
from unickpt.transform.convert.pickles.safe_pickle import load_plain


class ByName(int, enum.Enum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3

    def __reduce_ex__(self, protocol: Any) -> Any:  # as Python 3.11.2
        return getattr, (type(self), self._name_)


class ByValue(int, enum.Enum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (self._value_,)


@pytest.mark.parametrize("kind", [int, ByName, ByValue])
@pytest.mark.parametrize("stage", range(4))
def test_every_form_of_a_stage_is_its_number(kind: Any, stage: int) -> None:
    stored = pickle.dumps(kind(stage), protocol=2)
    names = [f"{each.__module__}.{each.__qualname__}" for each in (ByName, ByValue)]
    assert zero_stage_of(load_plain(stored, Path("a.pt"), OpenFiles(), also=names)) == stage


def test_another_value_stays() -> None:
    assert zero_stage_of(-1) == -1
    assert zero_stage_of("other") == "other"
