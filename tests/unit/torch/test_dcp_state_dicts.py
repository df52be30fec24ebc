"""State dicts of every form come back through ``torch.distributed.checkpoint`` under the switch as they do without."""

from __future__ import annotations

import enum
import io
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from unickpt.base import autoload

Build = Callable[[], dict[str, Any]]


class Colour(enum.Enum):
    RED = 1


class Model(torch.nn.Module):
    """Has a scalar parameter, digits as names, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scale


@pytest.fixture(autouse=True)
def _hooks() -> None:
    autoload.watch(autoload.TORCH)


def _trained(kind: Any = torch.optim.AdamW, steps: int = 2, **options: Any) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    optimizer = kind(model.parameters(), lr=0.1, **options)
    for _ in range(steps):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def _by_name(*, flat: bool = False, **given: Any) -> dict[str, Any]:
    model, optimizer = _trained(**given)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}


def _by_number() -> dict[str, Any]:
    model, optimizer = _trained()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}


def _two_optimizers(*, listed: bool) -> dict[str, Any]:
    one, two = _by_name(), _by_name(kind=torch.optim.SGD, momentum=0.9)
    both = [one["optimizer"], two["optimizer"]] if listed else {"a": one["optimizer"], "b": two["optimizer"]}
    return {"model": one["model"], "critic": two["model"], "optimizer": both}


def _with_copy(name: str) -> dict[str, Any]:
    found = _by_name()
    return {**found, name: {key: value * 0.5 for key, value in found["model"].items()}, "step": 7}


def _t(*shape: int, start: float = 1.0) -> torch.Tensor:
    return torch.arange(float(np.prod(shape, dtype=int))).reshape(shape) + start


FORMS: dict[str, Build] = {
    "empty": dict,
    "of the model alone": lambda: dict(_trained()[0].state_dict()),
    "of an optimizer alone": lambda: dict(_by_name()["optimizer"]),
    "of an optimizer by number alone": lambda: _trained()[1].state_dict(),
    "by name": _by_name,
    "flat": lambda: _by_name(flat=True),
    "flat, without a step": lambda: _by_name(flat=True, steps=0),
    "by number": _by_number,
    "without states": lambda: _by_name(kind=torch.optim.SGD),
    "before the first step": lambda: _by_name(steps=0),
    "rate in a tensor": lambda: _by_name(kind=lambda params, lr: torch.optim.AdamW(params, lr=torch.tensor(lr), foreach=False)),
    "two optimizers": lambda: _two_optimizers(listed=False),
    "list of optimizers": lambda: _two_optimizers(listed=True),
    "ema": lambda: _with_copy("ema"),
    "copy that comes before the model": lambda: _with_copy("averaged"),
    "app": lambda: {"app": _by_name()},
    "other words": lambda: {"net": _by_name()["model"], "optim": _by_name()["optimizer"], "sched": {"last_epoch": 3}},
    "dots in names": lambda: {"model": {"a.b": _t(2), "a": {"c.d": _t(3)}, ".": _t(1), "x.": _t(2), ".y": _t(2)}},
    "values with names of parameters": lambda: {"model": {"step": _t(2), "w": _t(3)}, "step": 5, "w": "text"},
    "digits as names": lambda: {"model": {"0": _t(2), "1": {"2": _t(3)}}, "2": _t(1), "3": 4},
    "numbers as names": lambda: {"model": {0: _t(2), 1: {2: _t(3)}}, "x": {5: "five"}},
    "odd names": lambda: {"model": {"": _t(2), "ü/ß": _t(2), "$tuple": _t(1), " ": 3, "a" * 300: _t(1)}, "$x": {"$y": 1}},
    "words of an optimizer as names": lambda: {
        "model": {"state": _t(2), "param_groups": _t(3), "optimizer.state.w.exp_avg": _t(2), "step": _t(1)},
        "state": {"w": {"exp_avg": _t(2), "step": 3}}, "param_groups": {"w": {"lr": 0.1}}, "exp_avg": _t(2),
    },
    "settings that are no list of groups": lambda: {"optimizer": {"state": {}, "param_groups": {"a": _t(2), "lr": 1}}},
    "params that name nothing": lambda: {
        "model": {"w": _t(2)}, "optimizer": {"state": {"v": {"exp_avg": _t(2)}}, "param_groups": [{"params": ["u"], "lr": 1}]},
    },
    "tensors of a state of another shape": lambda: {
        "model": {"w": _t(4, 2)},
        "optimizer": {
            "state": {"w": {"row": _t(4), "col": _t(2), "step": torch.tensor(3), "list": [_t(2), _t(1)], "deep": {"a": _t(2)}}},
            "param_groups": [{"params": ["w"], "lr": 0.5, "betas": (0.9, 0.95), "names": {"a": [1]}, "t": _t(2)}],
        },
    },
    "lists and tuples": lambda: {
        "list": [_t(2), _t(3)], "tuple": (1, "a", None), "deep": [{"a": _t(2), "b": [1, 2]}, [_t(1)]],
        "numbers": [1, [2, {"c": 3}]],
    },
    "nothing in it": lambda: {"dict": {}, "list": [], "model": {"empty": {}, "w": _t(2)}, "tensor": torch.empty(0, 3)},
    "scalars": lambda: {
        "model": {"w": torch.tensor(1.5)}, "n": torch.tensor(7), "step": torch.tensor(3.0), "flag": torch.tensor(True),
        "optimizer": {
            "state": {"w": {"exp_avg": torch.tensor(0.5), "exp_avg_sq": torch.tensor(0.25), "step": torch.tensor(3.0)}},
            "param_groups": [{"params": ["w"], "lr": 0.1}],
        },
    },
    "types of tensors": lambda: {
        name: _t(3).to(getattr(torch, name))
        for name in ("bfloat16", "float16", "float64", "int8", "int64", "uint8", "bool", "complex64")
    },
    "tensors not in order": lambda: {
        "t": _t(3, 4).t(), "step": _t(8)[::2], "wide": _t(1).expand(5), "w": torch.nn.Parameter(_t(2)),
    },
    "values": lambda: {
        "none": None, "bytes": b"\x00\xff", "nan": float("nan"), "big": 2**80, "text": "ü", "array": np.arange(3),
        "set": {1, 2},
        "size": torch.Size([1, 2]), "dtype": torch.bfloat16, "device": torch.device("cpu"), "number": np.float32(1.5), "z": 1j,
        "keys": {(1, 2): 3, 4: "four"}, "ordered": OrderedDict(a=1), "enum": Colour.RED,
    },
    "stream": lambda: {"stream": _read(io.BytesIO(b"abcdef"), 2), "w": _t(2)},
}  # fmt: skip


def _read(stream: io.BytesIO, count: int) -> io.BytesIO:
    stream.read(count)
    return stream


def _blank(value: Any) -> Any:
    """Return a state dict of the same form to load into."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value, memory_format=torch.contiguous_format).requires_grad_(False)
    if isinstance(value, Mapping):
        return type(value)((key, _blank(each)) for key, each in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(_blank, value))
    return "other"


def _plain(value: Any) -> Any:
    """Return a form that compares by content and type."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), repr(value.detach().contiguous().reshape(-1).tolist()))
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.tolist())
    if isinstance(value, Mapping):
        return (type(value).__name__, [(key, _plain(each)) for key, each in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [_plain(each) for each in value])
    if isinstance(value, io.BytesIO):
        return ("stream", value.getvalue(), value.tell())
    return (type(value).__name__, repr(value))


def _through(state: dict[str, Any], place: Path) -> Any:
    """Return what a state dict is after a save and a load."""
    dcp.save(state, checkpoint_id=place)
    found = _blank(state)
    dcp.load(found, checkpoint_id=place)
    return _plain(found)


@pytest.mark.parametrize("form", FORMS)
def test_a_state_dict_comes_back_as_without_the_switch(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICKPT", "off")
    expected = _through(FORMS[form](), tmp_path / "stock")
    monkeypatch.setenv("UNICKPT", "1")
    assert _through(FORMS[form](), tmp_path / "step1") == expected
    assert (tmp_path / "step1" / "manifest.json").exists()
    assert not (tmp_path / "stock" / "manifest.json").exists()


_WORDS = [
    *["model", "optimizer", "state", "param_groups", "params", "0", "1", "w", "a.b", "step", "exp_avg", "weight", "ema", "lr"],
    "",
]
_LEAVES = st.one_of(
    st.sampled_from([(), (2,), (3, 2), (0,)]).map(lambda shape: torch.full(shape, 3.0)),
    st.sampled_from([None, 1, 0.5, "text", b"bytes", True, ["params", "w"], (1, 2)]),
)
_TREES = st.dictionaries(
    st.sampled_from(_WORDS),
    st.recursive(
        _LEAVES,
        lambda inner: st.one_of(st.dictionaries(st.sampled_from(_WORDS), inner, max_size=4), st.lists(inner, max_size=3)),
        max_leaves=12,
    ),
    max_size=5,
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=_TREES)
def test_a_state_dict_of_any_words_comes_back(
    state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path_factory.mktemp("any")
    monkeypatch.setenv("UNICKPT", "off")
    try:
        expected = _through(state, place / "stock"), _whole(place / "stock")
    except (Exception, CheckpointException):  # two values have one key, or torch misses its own
        reject()
    monkeypatch.setenv("UNICKPT", "1")
    assert (_through(state, place / "step1"), _whole(place / "step1")) == expected


def _whole(place: Path) -> Any:
    """Return what a folder has for a caller that knows no state dict, in an order of its own."""

    def ordered(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: ordered(value[key]) for key in sorted(value, key=str)}
        return [ordered(each) for each in value] if type(value) is list else value

    return _plain(ordered(_load_state_dict_from_keys(checkpoint_id=place)))


@pytest.mark.parametrize("form", sorted({*FORMS} - {"empty"}))  # torch refuses an empty one here
def test_the_whole_of_it_is_read_without_a_state_dict(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("off", "1"):
        monkeypatch.setenv("UNICKPT", value)
        dcp.save(FORMS[form](), checkpoint_id=tmp_path / value)
    assert _whole(tmp_path / "1") == _whole(tmp_path / "off")


def test_a_part_is_loaded_by_a_planner_that_allows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for value in ("off", "1"):
        monkeypatch.setenv("UNICKPT", value)
        dcp.save({"model": {"w": _t(2), "v": _t(3)}, "epoch": 3}, checkpoint_id=tmp_path / value)
        state = {"model": {"w": torch.zeros(2), "new": torch.ones(2)}, "epoch": 0, "more": 5}
        dcp.load(state, checkpoint_id=tmp_path / value, planner=DefaultLoadPlanner(allow_partial_load=True))
        found[value] = _plain(state)
    assert found["1"] == found["off"]


def test_planners_that_do_not_flatten_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for value in ("off", "1"):
        monkeypatch.setenv("UNICKPT", value)
        saved = {"model.w": _t(2), "optimizer": {"lr": 1, "t": _t(3)}, "list": [_t(2), 1]}
        dcp.save(saved, checkpoint_id=tmp_path / value, planner=DefaultSavePlanner(flatten_state_dict=False))
        state = {"model.w": torch.zeros(2), "optimizer": None, "list": []}
        dcp.load(state, checkpoint_id=tmp_path / value, planner=DefaultLoadPlanner(flatten_state_dict=False))
        found[value] = _plain(state)
    assert (tmp_path / "1" / "manifest.json").exists()
    assert found["1"] == found["off"]
